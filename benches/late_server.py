#!/usr/bin/env python3
"""Engines that start without a server: the time of their start, and the time until they use a later server.

    PYTHONPATH=target/python ~/.cache/kvtier-e2e/venv/bin/python benches/late_server.py [--rounds 20]
        [--mode engine_driven|lmcache_driven] [--json FILE]

Each round makes a scheduler's and a worker's adapter with default heartbeats and no server, waits up to three seconds (so the
pauses between tries to connect have grown), starts the server, and measures from when its request port accepts connections:
until the scheduler finds it healthy, until the worker is registered, and until a stored chunk is found by a lookup.
`tests/run package` makes the package in ``target/python``, `cargo build --release -p kvtier` the server (or KVTIER_BIN).
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "harness"), str(TESTS / "python")]

import kvtier  # noqa: E402
from kvrig.server import Server, listening, our_command  # noqa: E402
from kvtier.connecting import DEFAULT_HEARTBEAT  # noqa: E402
from rig import Engine, tokens  # noqa: E402

CHUNK = 16
MAX_PAUSE_SECONDS = 3.0
POLL_SECONDS = 0.001


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mode", choices=["engine_driven", "lmcache_driven"], default="engine_driven")
    parser.add_argument("--json", metavar="FILE", help="write the figures for programs too")
    chosen = parser.parse_args()
    rounds = []
    for number in range(chosen.rounds):
        with tempfile.TemporaryDirectory() as directory:
            rounds.append(measure(Path(directory), chosen.mode, number))
    report = {
        "kvtier": kvtier.__version__, "server": our_command()[0].rpartition("target/")[2], "mode": chosen.mode, "cpus": os.cpu_count(),
        "load": os.getloadavg()[0], "heartbeat_s": DEFAULT_HEARTBEAT, "rounds": rounds,
    }  # fmt: skip
    print(f"{'':34} {'p50 s':>8} {'max s':>8} {'max in heartbeats':>18}   of {chosen.rounds} rounds, {chosen.mode}")
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        print(f"{name:34} {statistics.median(values):8.3f} {max(values):8.3f} {max(values) / DEFAULT_HEARTBEAT:18.3f}")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(report, indent=1) + "\n")


def measure(directory, mode, number):
    """Runs one round; returns its seconds."""
    server = Server(our_command(), directory / "log", "both", chunk=CHUNK)
    began = time.monotonic()
    engine = Engine(server.url, mode=mode, heartbeat=DEFAULT_HEARTBEAT, wait_for_server=None)
    start = time.monotonic() - began
    time.sleep(random.Random(number).uniform(0, MAX_PAUSE_SECONDS))
    starting = threading.Thread(target=server.start)
    starting.start()
    until(lambda: listening(server.port))
    opened, seconds = time.monotonic(), {"start without a server": start}
    seen = {"scheduler is healthy": lambda: engine.scheduler.is_healthy, "worker is registered": lambda: engine.worker.is_healthy}
    while seen:
        for name in [name for name, is_done in seen.items() if is_done()]:
            del seen[name]
            seconds[name] = time.monotonic() - opened
        time.sleep(POLL_SECONDS)
    prompt = tokens(CHUNK, number)
    assert engine.store("store", prompt, 0, CHUNK, [1, 2, 3, 4])
    assert engine.lookup("lookup", prompt) == CHUNK
    seconds["first hit"] = time.monotonic() - opened
    starting.join()
    engine.close()
    server.stop()
    return {name: round(seconds[name], 4) for name in ("start without a server", *sorted(seconds.keys() - {"start without a server"}))}


def until(is_done):
    """Polls for at most a minute."""
    end = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < end, "the server did not start"
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
