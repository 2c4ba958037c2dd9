#!/usr/bin/env bash
# Measures LMCache's server and kvtier with the same load generator, in turn, on this machine.
# See benches/README.md.
set -euo pipefail

rounds=${ROUNDS:-3}
gib=${L1_GIB:-4}
objects=${OBJECTS:-200000}
here=$(cd "$(dirname "$0")/.." && pwd)
home=${KVTIER_E2E_HOME:-$HOME/.cache/kvtier-e2e}
peer_program=${LMCACHE:-$home/venv/bin/lmcache}
kvtier=${KVTIER:-${CARGO_TARGET_DIR:-$here/target}/dist/kvtier}
out=${OUT:-$here/benches/runs/$(date +%Y-%m-%d)}
peer_port=${PEER_PORT:-25551}
our_port=${OUR_PORT:-25552}

fail() {
  echo "compare.sh: $*" >&2
  exit 1
}
[ -x "$kvtier" ] || fail "$kvtier is missing: cargo build --profile dist -p kvtier"
[ -x "$peer_program" ] || fail "$peer_program is missing: see benches/README.md"
mkdir -p "$out"

export LMCACHE_TRACK_USAGE=false
shm="kvtier_bench_$$"
peer=("$peer_program" server --host 127.0.0.1 --port "$peer_port" --http-port "$((peer_port + 100))"
  --l1-size-gb "$gib" --eviction-policy LRU --supported-transfer-mode auto --shm-name "${shm}_peer" --no-l1-use-lazy)
ours=("$kvtier" server --state-dir none --host 127.0.0.1 --port "$our_port" --http-port "$((our_port + 100))"
  --l1-size-gb "$gib" --eviction-policy LRU --supported-transfer-mode auto --shm-name "${shm}_ours")

# The one running server; it is always stopped by its id.
server=
stop_server() {
  [ -n "$server" ] || return 0
  kill "$server" 2>/dev/null || true
  wait "$server" 2>/dev/null || true
  server=
}
trap stop_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# measure NAME URL ROUND COMMAND... : start times, then the whole table, then memory per object.
measure() {
  local name=$1 url=$2 round=$3
  shift 3
  local log="$out/$name-$round.log" bad=0
  echo "== $name, round $round of $rounds" >&2
  "$kvtier" bench start --url "$url" --rounds 3 --label "$name" --log "$log" \
    --json "$out/$name-$round-start.json" -- "$@" >/dev/null
  "$@" >>"$log" 2>&1 &
  server=$!
  # Its first answer, without a limit.
  until "$kvtier" ping --url "$url" --count 1 --timeout 120 >/dev/null 2>&1; do
    kill -0 "$server" 2>/dev/null || fail "$name ended before it answered; see $log"
    sleep 0.1
  done
  # Both servers prefault the arena; measurements begin after that.
  sleep "${SETTLE:-5}"
  "$kvtier" bench "$url" --label "$name" --clear --json "$out/$name-$round-load.json" ${BENCH_ARGS:-} >/dev/null || bad=1
  "$kvtier" bench "$url" --label "$name" --clear --scenario memory --objects "$objects" --pid "$server" \
    --json "$out/$name-$round-memory.json" >/dev/null || bad=1
  stop_server
  [ "$bad" -eq 0 ] || echo "compare.sh: not all requests to $name succeeded; see its reports in $out" >&2
}

{
  date -u +%Y-%m-%dT%H:%M:%SZ
  uname -srm
  grep -m1 'model name' /proc/cpuinfo || true
  echo "cpus $(nproc), L1 $gib GiB, objects $objects, rounds $rounds"
  "$kvtier" --version
  "$(dirname "$peer_program")/python" -c 'import importlib.metadata as m; print("lmcache", m.version("lmcache"))' || true
} >"$out/machine.txt"

for round in $(seq "$rounds"); do
  # The order alternates, so that neither server always meets the quieter machine.
  if [ $((round % 2)) -eq 1 ]; then order=(peer ours); else order=(ours peer); fi
  for side in "${order[@]}"; do
    case $side in
      peer) measure lmcache "tcp://127.0.0.1:$peer_port" "$round" "${peer[@]}" ;;
      ours) measure kvtier "tcp://127.0.0.1:$our_port" "$round" "${ours[@]}" ;;
    esac
  done
done

cat "$out/machine.txt"
"$kvtier" bench compare --base "$out"/lmcache-*.json --ours "$out"/kvtier-*.json | tee "$out/table.txt"
