#!/usr/bin/env bash
# Instructions of the hot paths, against the limits in tests/instructions.tsv. Needs valgrind.
#   tests/instructions.sh
# Counts do not depend on what else the machine does, so a limit can be close: a tenth above what was measured. The ledger
# may cost a store a tenth at most, whatever both take: the mean of five runs of each, as the seeds of hash tables are random.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --profile dist -q -p kvtier-core -p kvtier-device --example instructions --example plan_instructions
binaries=${CARGO_TARGET_DIR:-target}/dist/examples

count() {
  valgrind --tool=callgrind --callgrind-out-file=/dev/null "$binaries/$1" "$2" "$3" 2>&1 |
    sed -n 's/.*Collected : //p'
}

# Instructions of one round's chunk or page: two numbers of rounds differ by 32 of 128.
each() {
  echo $((($(count "$1" "$2" 40) - $(count "$1" "$2" 8)) / (32 * 128)))
}

failed=0 passed=0
declare -A measured
while IFS=$'\t' read -r example scenario limit meaning; do
  [[ $example == \#* || -z $example ]] && continue
  measured[$scenario]=$(each "$example" "$scenario")
  if [ "${measured[$scenario]}" -le "$limit" ]; then
    echo "PASS $scenario: ${measured[$scenario]} instructions each, limit $limit ($meaning)"
    passed=$((passed + 1))
  else
    echo "FAIL $scenario: ${measured[$scenario]} instructions each, limit $limit ($meaning)"
    failed=$((failed + 1))
  fi
done <tests/instructions.tsv
store=${measured[store]} ledger=${measured[ledger-store]}
for _ in 2 3 4 5; do
  store=$((store + $(each instructions store)))
  ledger=$((ledger + $(each instructions ledger-store)))
done
store=$((store / 5)) ledger=$((ledger / 5))
verdict=PASS
if [ $((ledger * 100)) -gt $((store * 110)) ]; then
  verdict=FAIL
  failed=$((failed + 1))
else
  passed=$((passed + 1))
fi
printf '%s ledger: %d of %d instructions of a store, %+.1f %%, limit +10 %%\n' \
  $verdict $((ledger - store)) "$ledger" "$(awk "BEGIN {print 100 * ($ledger - $store) / $store}")"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
