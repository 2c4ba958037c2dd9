#!/usr/bin/env python3
"""Requests without copies, on the request port: kvtier beside LMCache's server, and kvtier by itself.

    benches/wire.py rounds|crowd|front|prefault|syscalls [--rounds 5] [--out benches/runs/DATE]

rounds    ping, lookup and store bookkeeping by kvtier's client, and ping by libzmq (pyzmq): both servers in turn, and kvtier
          with --busy-poll-us 0
crowd     64 and 512 clients that look 8192 tokens up: as fast as possible, then at 60 % of that at fixed times
front     the processor time of the thread that owns the sockets, per request of 64 and of 512 such clients, and of a ping
prefault  lookups of 32,768 tokens while 8 GiB of L1 are being prefaulted, and afterwards; on a quiet machine, and while a
          process per core computes
syscalls  system calls of the server per request, nearly all of them pings, with and without busy polling (needs strace)

Needs `cargo build --profile dist -p kvtier`, or KVTIER_BIN; `rounds` needs LMCache 0.5.6 and pyzmq in $KVTIER_E2E_HOME/venv
(tests/setup.sh) and is run by its Python. Servers listen on loopback and end with this program.
"""

import argparse
import atexit
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from beside import KVTIER, PORTS, start, stop, wait_until_it_answers

HOME = Path(os.environ.get("KVTIER_E2E_HOME") or Path.home() / ".cache" / "kvtier-e2e")
PEER_PORT = 17655
PINGS = 20_000
QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


def start_peer():
    """Starts LMCache's server; returns its process and its port."""
    command = [
        HOME / "venv" / "bin" / "lmcache", "server", "--host", "127.0.0.1", "--port", str(PEER_PORT),
        "--http-port", str(PEER_PORT + 100), "--l1-size-gb", "1", "--eviction-policy", "LRU",
        "--supported-transfer-mode", "auto", "--shm-name", f"kvtier_bench_{PEER_PORT}", "--no-l1-use-lazy",
    ]  # fmt: skip
    quiet = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    process = subprocess.Popen(command, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    wait_until_it_answers(process, PEER_PORT)
    return process, PEER_PORT


def bench(port, *flags):
    """The rows of `kvtier bench`, by name."""
    command = [KVTIER, "bench", f"127.0.0.1:{port}", "--clear", "--json", "-", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {row["name"]: row for row in json.loads(done.stdout)["rows"]}


def latencies(row):
    """The percentiles of a row, in microseconds."""
    return {name: row["latency_us"].get(name) for name in QUANTILES}


def libzmq_pings(port):
    """Percentiles of pings by libzmq, in microseconds."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://127.0.0.1:{port}")
        took = []
        for number in range(PINGS + 1000):
            began = time.perf_counter_ns()
            # A G6 ping without a worker.
            dealer.send_multipart([b"\xcd" + (number & 0xFFFF).to_bytes(2, "big"), b"\x16", b"\xc0"])
            dealer.recv_multipart()
            took.append((time.perf_counter_ns() - began) / 1000)
    took = sorted(took[1000:])
    return {name: took[int(len(took) * part)] for name, part in QUANTILES.items()}


def measure(port):
    """One round at one server."""
    rows = bench(port, "--scenario", "ping,lookup-hit,lookup-miss,store-bookkeeping", "--duration", "3s")
    found = {name: latencies(row) for name, row in rows.items()}
    return {**found, "ping, libzmq": libzmq_pings(port)}


def rounds(count):
    """All servers in turn, in alternating order."""
    ours = {"kvtier": [], "kvtier, no polling": ["--busy-poll-us", "0"]}
    runs = {name: [] for name in [*ours, "lmcache"]}
    for number in range(count):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            process, port = start_peer() if name == "lmcache" else (start(0, "--l1-size-gb", "1", *ours[name])[0], PORTS[0][0])
            # Both prefault their L1.
            time.sleep(5)
            runs[name].append({"load_1m": os.getloadavg()[0], **measure(port)})
            stop(process)
    for row in [row for row in runs["kvtier"][0] if row != "load_1m"]:
        for name, found in runs.items():
            known = {q: [each[row][q] for each in found if each[row][q] is not None] for q in QUANTILES}
            medians = {q: f"{statistics.median(values):.1f}" if values else "-" for q, values in known.items()}
            print(f"{row:20} {name:18} us {medians}", flush=True)
    return runs


def crowd(count):
    """Many clients of one server."""
    runs = []
    for clients in (64, 512):
        for _ in range(count):
            server, _ = start(0)
            flags = ["--scenario", "mixed", "--prompt-tokens", "8192", "--clients", str(clients), "--writer-rate", "0"]
            (fastest,) = bench(PORTS[0][0], *flags, "--duration", "4s").values()
            rate = 0.6 * fastest["per_second"] / clients
            (paced,) = bench(PORTS[0][0], *flags, "--duration", "8s", "--rate", f"{rate:.2f}").values()
            stop(server)
            run = {"clients": clients, "per_second": fastest["per_second"], "fastest": latencies(fastest),
                   "rate_per_client": rate, "at_60_percent": latencies(paced), "load_1m": os.getloadavg()[0]}  # fmt: skip
            print(json.dumps(run), flush=True)
            runs.append(run)
    return runs


def front_seconds(server):
    """Processor time that the thread which owns the sockets has used."""
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        if (task / "comm").read_text().strip() == "kvtier-front":
            # In nanoseconds, the first of three numbers.
            return int((task / "schedstat").read_text().split()[0]) / 1e9
    raise SystemExit("the server has no thread kvtier-front")


def front(count):
    """What one thread for all sockets can serve: the inverse of its processor time per request."""
    runs = []
    lookups = ["--scenario", "mixed", "--prompt-tokens", "8192", "--writer-rate", "0", "--requests", "200"]
    cases = {
        "ping": ["--scenario", "ping", "--requests", "50000"],
        "lookup, 64 clients": [*lookups, "--clients", "64"],
        "lookup, 512 clients": [*lookups, "--clients", "512"],
    }
    for _ in range(count):
        server, _ = start(0)
        run = {"load_1m": os.getloadavg()[0]}
        for name, flags in cases.items():
            before = front_seconds(server)
            (row,) = bench(PORTS[0][0], *flags).values()
            seconds = front_seconds(server) - before
            run[name] = {"requests": row["count"], "front_us": 1e6 * seconds / row["count"], "per_second": row["per_second"]}
        stop(server)
        print(json.dumps(run), flush=True)
        runs.append(run)
    return runs


def hog():
    """Starts a process that computes for ever."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    atexit.register(process.kill)
    return process


def prefault(count):
    """Lookups during and after the prefault of L1."""
    runs = []
    for number in range(2 * count):
        hogs = [hog() for _ in range(os.cpu_count() if number % 2 else 0)]
        server, _ = start(0, "--l1-size-gb", "8")
        # Beside a process per core each turn of client and server waits for its slice.
        flags = ["--scenario", "lookup-hit", "--rate", "20" if hogs else "200"]
        during = bench(PORTS[0][0], *flags, "--duration", "16s")["lookup hit"]
        time.sleep(10)
        settled = bench(PORTS[0][0], *flags, "--duration", "16s")["lookup hit"]
        stop(server)
        for process in hogs:
            process.kill()
        run = {"hogs": len(hogs), "during": latencies(during), "settled": latencies(settled), "load_1m": os.getloadavg()[0]}
        run["ratio_p50"] = run["during"]["p50"] / run["settled"]["p50"]
        print(json.dumps(run), flush=True)
        runs.append(run)
    return runs


def requests(http):
    """Number of requests that the server has answered."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("kvtier_request_duration_seconds_count"))


def syscalls(_count):
    """System calls of the thread that owns the socket, per request."""
    runs = {}
    for busy_poll in (0, 50):
        server, _ = start(0, "--busy-poll-us", str(busy_poll))
        tasks = Path(f"/proc/{server.pid}/task").iterdir()
        (front,) = [task.name for task in tasks if (task / "comm").read_text().strip() == "kvtier-front"]
        command = ["strace", "-c", "-U", "calls,name", "-p", front]
        trace = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        time.sleep(1)
        before = requests(PORTS[0][1])
        bench(PORTS[0][0], "--scenario", "ping", "--requests", "2000")
        # Those too that warm up, and what the bench asks first.
        answered = requests(PORTS[0][1]) - before
        trace.send_signal(2)
        output, _ = trace.communicate()
        stop(server)
        calls = {line.split()[1]: int(line.split()[0]) for line in output.splitlines() if line.split()[:1] and line.split()[0].isdigit()}
        calls.pop("total", None)
        runs[busy_poll] = {"requests": answered, "calls": calls}
        print(busy_poll, "us:", {name: round(calls[name] / answered, 2) for name in calls}, flush=True)
    return runs


def main():
    """Runs one of them and keeps its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rounds", "crowd", "front", "prefault", "syscalls"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {"rounds": rounds, "crowd": crowd, "front": front, "prefault": prefault, "syscalls": syscalls}[args.what](args.rounds)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"wire-{args.what}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
