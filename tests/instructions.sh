#!/usr/bin/env bash
# Instructions of the hot paths, against the limits in tests/instructions.tsv. Needs valgrind.
#   tests/instructions.sh
# Counts do not depend on what else the machine does, so a limit can be close: a tenth above what was measured. The ledger
# may cost a store a tenth at most, whatever both take.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --profile dist -q -p kvtier-core -p kvtier-device --example instructions --example plan_instructions
binaries=${CARGO_TARGET_DIR:-target}/dist/examples

count() {
  valgrind --tool=callgrind --callgrind-out-file=/dev/null "$binaries/$1" "$2" "$3" 2>&1 |
    sed -n 's/.*Collected : //p'
}

failed=0 passed=0
declare -A measured
while IFS=$'\t' read -r example scenario limit meaning; do
  [[ $example == \#* || -z $example ]] && continue
  few=$(count "$example" "$scenario" 8)
  many=$(count "$example" "$scenario" 40)
  # They differ by 32 rounds of 128 chunks or pages.
  each=$(((many - few) / (32 * 128)))
  measured[$scenario]=$each
  if [ "$each" -le "$limit" ]; then
    echo "PASS $scenario: $each instructions each, limit $limit ($meaning)"
    passed=$((passed + 1))
  else
    echo "FAIL $scenario: $each instructions each, limit $limit ($meaning)"
    failed=$((failed + 1))
  fi
done <tests/instructions.tsv
store=${measured[store]} ledger=${measured[ledger-store]}
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
