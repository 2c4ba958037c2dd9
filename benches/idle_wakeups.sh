#!/usr/bin/env bash
# Activity of an idle server: system calls per second, and CPU seconds and wakeups per thread.
#
#     benches/idle_wakeups.sh KVTIER [CONNECTIONS] [SECONDS] > benches/runs/DATE/idle-wakeups.txt
#
# CONNECTIONS (0) are opened by idle_connections.py: they finish the handshake, answer heartbeats and send no request.
# First SECONDS (60) without strace for CPU and wakeups, then the same with it.
set -eu
kvtier=$1 connections=${2:-0} seconds=${3:-60}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'kill $holders $server 2>/dev/null || true; wait; rm -rf "$work"' EXIT
holders='' server=''
tier="{\"type\":\"fs\",\"base_path\":\"$work\"}"
"$kvtier" server --state-dir none --port 0 --http-port 0 --l1-size-gb 0.25 --shm-name "" --l2-adapter "$tier" 2>"$work/log" &
server=$!
until grep -q 'L1 is pre-faulted' "$work/log" && grep -q 'serving' "$work/log"; do sleep 0.2; done
port=$(sed -n 's|.*tcp://127.0.0.1:\([0-9]*\).*|\1|p' "$work/log" | head -n 1)
left=$connections
while [ "$left" -gt 0 ]; do
    share=$((left < 10000 ? left : 10000)) left=$((left - share))
    mkfifo "$work/in$left"
    python3 "$here/idle_connections.py" --hold 127.0.0.1 "$port" "$share" <"$work/in$left" >"$work/out$left" &
    holders="$holders $!"
    exec {keep}>"$work/in$left"
    until grep -q ready "$work/out$left"; do sleep 0.5; done
done
# After the handshakes and the first heartbeats.
sleep 35
threads() {
    for task in /proc/$server/task/*; do
        switches=$(sed -n 's/^voluntary_ctxt_switches:\s*//p' "$task/status")
        ticks=$(sed 's/.*) //' "$task/stat" | awk '{print $12 + $13}')
        echo "$(cat "$task/comm") ${task##*/} $ticks $switches"
    done
}
threads >"$work/before"
sleep "$seconds"
threads >"$work/after"
echo "# $(basename "$kvtier") server, $connections connections, $seconds s, $(uname -sr), $(nproc) CPUs"
echo "# thread: CPU seconds, times it slept"
join -j 2 <(sort -k 2 "$work/before") <(sort -k 2 "$work/after") |
    awk '{cpu = ($6 - $3) / 100; all += cpu; woke += $7 - $4; if ($7 > $4) print $2, cpu, $7 - $4} END {print "all", all, woke}'
timeout "$seconds" strace -f -c -o "$work/calls" -p "$server" 2>/dev/null || true
echo "# strace -f -c -p PID, $seconds s"
cat "$work/calls"
