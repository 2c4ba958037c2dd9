#!/usr/bin/env python3
"""Wall time of the calls of an engine's step while the server answers nothing.

    PYTHONPATH=target/python ~/.cache/kvtier-e2e/venv/bin/python benches/never_blocks.py [--outstanding 1000] [--rounds 20]
        [--mode engine_driven|lmcache_driven] [--json FILE]

The server is stopped (SIGSTOP); then that many lookups and as many stores are submitted, and each round asks for each of
them once, with ``check_lookup_result`` and with ``get_finished``. `tests/run package` makes the package in
``target/python``, `cargo build --release -p kvtier` the server (or KVTIER_BIN).
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "harness"), str(TESTS / "python")]

import kvtier  # noqa: E402
from kvrig.server import Server, our_command  # noqa: E402
from kvtier import LoadStoreOp  # noqa: E402
from rig import Engine, tokens  # noqa: E402

CHUNK = 16


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--outstanding", type=int, default=1000, help="lookups, and stores, without an answer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mode", choices=["engine_driven", "lmcache_driven"], default="engine_driven")
    parser.add_argument("--json", metavar="FILE", help="write the figures for programs too")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = Server(our_command(), Path(directory) / "log", "both", chunk=CHUNK)
        server.start()
        engine = Engine(server.url, mode=chosen.mode, timeout=600.0, heartbeat=600)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            spans = measure(engine, chosen.outstanding, chosen.rounds)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        engine.finish_stores(60)
        engine.close()
        server.stop()
    report = {
        "kvtier": kvtier.__version__, "mode": chosen.mode, "outstanding": chosen.outstanding, "rounds": chosen.rounds,
        "cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(), "calls": {},
    }  # fmt: skip
    print(f"{'us on the wall':22} {'p50':>8} {'p99':>8} {'p99.9':>8} {'longest':>8}   of {chosen.outstanding} outstanding, {chosen.mode}")
    for name, values in spans.items():
        cuts = statistics.quantiles(values, n=1000)
        figures = {"count": len(values), "p50": cuts[499], "p99": cuts[989], "p99.9": cuts[998], "max": max(values)}
        report["calls"][name] = {key: round(value, 2) for key, value in figures.items()}
        print(f"{name:22} " + " ".join(f"{figures[key]:8.1f}" for key in ("p50", "p99", "p99.9", "max")))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(report, indent=1) + "\n")


def measure(engine, outstanding, rounds):
    """Returns the microseconds of each call, by its name."""
    scheduler, worker = engine.scheduler, engine.worker
    prompt = scheduler.prompt(tokens(4 * CHUNK, "path"))
    op = LoadStoreOp(list(range(1, 17)), None, None, 0, 4 * CHUNK, prompt)
    names = [f"path-{number}" for number in range(outstanding)]
    spans = {name: [] for name in ("submit a lookup", "submit a store", "check_lookup_result", "get_finished")}

    def timed(name, call):
        began = time.perf_counter_ns()
        result = call()
        spans[name].append((time.perf_counter_ns() - began) / 1000)
        return result

    for name in names:
        timed("submit a lookup", lambda: scheduler.maybe_submit_lookup_request(name, prompt=prompt))
        timed("submit a store", lambda: worker.submit_store_request(name, op))
    for _ in range(rounds):
        for name in names:
            assert timed("check_lookup_result", lambda: scheduler.check_lookup_result(name)) is None
            assert timed("get_finished", lambda: worker.get_finished({name})) == (set(), set())
    return spans


if __name__ == "__main__":
    main()
