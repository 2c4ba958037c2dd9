#!/usr/bin/env python3
"""Real engines that differ in what KV depends on, and servers that change beside them; see `scenarios.py`.

  run.py --package DIR             the gate's scenarios; DIR has the Python package kvtier
  run.py --package DIR --more      those beside the gate
  run.py --package DIR NAME ...    these
  run.py --connector kvtier --mode engine_shm ...

No answer may differ from what the same engine computes without a hit. Exit status: 0 when every check passed.
"""

import argparse
import functools
import multiprocessing
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / each) for each in ("harness", "vllm", "vllm/witness")]

import forked
import scenarios
import windowed
from kvrig.report import Report
from rig import Case

# What is known to be wrong where the operator allows it: run by name.
DOCUMENTED = ["window_blocks_allowed"]
# Beside the gate: like others of it, with other models.
MORE = [windowed.crowded_name(name) for name in windowed.CROWDED if name not in windowed.CROWDED_IN_THE_GATE]


def arguments():
    """The command line."""
    home = Path(os.environ.get("KVTIER_E2E_HOME") or os.path.expanduser("~/.cache/kvtier-e2e"))
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(scenarios.SCENARIOS))
    parser.add_argument("--more", action="store_true", help=", ".join(MORE))
    parser.add_argument("--connector", action="append", choices=["kvtier", "lmcache"])
    parser.add_argument("--mode", action="append", choices=scenarios.BOTH)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count()), help="scenarios at the same time")
    parser.add_argument("--package", required=True, type=Path, help="directory with the Python package kvtier")
    parser.add_argument("--models", type=Path, default=home / "models-trust", help="made by models.py")
    parser.add_argument("--logs", type=Path, default=home / "logs" / "trust")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(scenarios.SCENARIOS):
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(scenarios.SCENARIOS)}")
    beside = {*DOCUMENTED, *MORE}
    chosen.names = chosen.names or (MORE if chosen.more else [name for name in scenarios.SCENARIOS if name not in beside])
    chosen.connector = chosen.connector or ["kvtier", "lmcache"]
    chosen.mode = chosen.mode or list(scenarios.BOTH)
    chosen.logs = chosen.logs.resolve()
    return chosen


def run(options, chosen):
    """One scenario with one connector in one mode; its results."""
    name, connector, mode = chosen
    began, report = time.monotonic(), Report()
    function, _ = scenarios.SCENARIOS[name]
    with Case(name, options, report, connector, mode).running() as case:
        function(case)
    print(f"# {case.name}: {time.monotonic() - began:.0f} s", flush=True)
    return report.rows


def main():
    """Run the scenarios."""
    options, began = arguments(), time.monotonic()
    package, release = forked.prepare(options.package)
    options.release = release
    print(f"# vLLM {release}, {package}, imported in {time.monotonic() - began:.0f} s", flush=True)
    # The longest stand last and begin first: the end does not wait for one of them.
    chosen = [
        (name, connector, mode)
        for name in reversed(options.names)
        for connector, mode in scenarios.SCENARIOS[name][1]
        if connector in options.connector and mode in options.mode
    ]
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        rows = [row for found in pool.imap_unordered(functools.partial(run, options), chosen) for row in found]
    failed = sum(not row["ok"] for row in rows)
    print(f"trust: {len(rows) - failed} passed, {failed} failed ({time.monotonic() - began:.0f} s)")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
