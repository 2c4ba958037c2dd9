#!/usr/bin/env python3
"""Engines of several tenants on a server while everything around it fails; see README.md.

  run.py --package DIR --seed 7                  one round; DIR has the Python package kvtier
  run.py --package DIR --seed 7 --seconds 3600   rounds for an hour; the seeds of the next ones follow from the first
  run.py --package DIR --seed 7 --plan           prints what would happen
  run.py --package DIR --seed 7 --fleet          three servers that read from each other, for ten minutes or --seconds

Exit status 0 if nothing was violated.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "harness"), str(HERE.parent / "python")]
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", DO_NOT_TRACK="1", LMCACHE_LOG_LEVEL="ERROR")


def arguments():
    """The command line."""
    home = Path(os.environ.get("KVTIER_E2E_HOME") or os.path.expanduser("~/.cache/kvtier-e2e"))
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--seed", type=int, action="append", required=True, help="of the first round; several for a round of each")
    parser.add_argument("--seconds", type=float, default=0, help="no round begins later; 0 is a round per seed")
    parser.add_argument("--round-seconds", type=float, default=20, help="of a round's faults; part of what makes a round")
    parser.add_argument("--package", type=Path, help="directory with the Python package kvtier")
    parser.add_argument("--logs", type=Path, default=home / "logs" / "torture")
    parser.add_argument("--summary", type=Path, help="path without a suffix of a summary, as .txt and .json")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--fleet", action="store_true")
    return parser.parse_args()


def seeds(options):
    """The seeds of rounds: those given, then as many as time allows."""
    yield from options.seed
    following = random.Random(options.seed[-1])
    began = time.monotonic()
    while time.monotonic() - began < options.seconds:
        yield following.randrange(1 << 32)


class Summary:
    """What all rounds have seen."""

    def __init__(self, seeds, version):
        self.seeds, self.version = seeds, version
        self.began, self.rounds, self.compared = time.time(), 0, 0
        self.operations, self.faults, self.tiers, self.modes, self.violations = Counter(), Counter(), Counter(), Counter(), Counter()
        self.compared_objects = Counter()
        self.failed, self.slowest = [], {}

    def add(self, round_, violations):
        """The results of a round."""
        self.rounds += 1
        self.compared += getattr(round_, "compared", 0)
        self.compared_objects.update(round_.compared_objects)
        for op, results in getattr(round_, "operations", {}).items():
            self.operations.update({f"{op}: {result}": count for result, count in results.items()})
        for op, seconds in getattr(round_, "slowest", {}).items():
            self.slowest[op] = max(self.slowest.get(op, 0), seconds)
        self.faults.update(round_.done)
        self.tiers["+".join(round_.plan.tiers) or "none"] += 1
        self.modes.update(f"{spec.client} {spec.mode}" for spec in round_.plan.engines)
        self.violations.update(violation.kind for violation in violations)
        if violations:
            self.failed.append(round_.plan.seed)

    def data(self):
        """For JSON."""
        return {
            "server": self.version, "seeds": self.seeds,
            "seconds": round(time.time() - self.began), "rounds": self.rounds, "rounds_by_tiers": dict(self.tiers),
            "engines_by_mode": dict(self.modes), "operations": dict(sorted(self.operations.items())),
            "operations_total": sum(self.operations.values()), "bytes_compared": self.compared, "slowest_seconds": self.slowest,
            "faults": dict(sorted(self.faults.items())), "faults_total": sum(self.faults.values()),
            "kept_objects_compared": dict(sorted(self.compared_objects.items())),
            "violations": dict(self.violations),
            "violations_total": sum(self.violations.values()), "failed_seeds": self.failed,
        }  # fmt: skip

    def text(self):
        """For people."""
        lines = []
        for name, value in self.data().items():
            if isinstance(value, dict):
                lines += [f"{name}:", *(f"  {count:>9}  {key}" for key, count in value.items())]
            else:
                lines.append(f"{name}: {value}")
        return "\n".join(lines) + "\n"

    def write(self, path):
        """Both forms."""
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".json").write_text(json.dumps(self.data(), indent=1) + "\n")
            path.with_suffix(".txt").write_text(self.text())


def main():
    """All rounds."""
    options = arguments()
    if options.package:
        sys.path.insert(0, str(options.package))
    import plan

    if options.plan:
        for seed in options.seed:
            print(seed, plan.make(seed, options.round_seconds))
        return 0
    from kvrig.server import our_command
    from round import Round

    version = subprocess.run([our_command()[0], "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if options.fleet:
        return run_fleet(options, version)
    summary = Summary(options.seed, version)
    for seed in seeds(options):
        made, logs, began = plan.make(seed, options.round_seconds), options.logs / str(seed), time.monotonic()
        shutil.rmtree(logs, ignore_errors=True)
        round_ = Round(made, logs)
        violations = round_.run()
        summary.add(round_, violations)
        asked = sum(sum(results.values()) for results in round_.operations.values())
        about = f"seed {seed}: {asked} requests, {len(round_.done)} faults, {time.monotonic() - began:.0f} s; {made}"
        if violations:
            again = f"tests/torture/run.py --package {options.package} --seed {seed} --round-seconds {options.round_seconds:g}"
            print(f"FAIL {about}\n  again: {again}\n  logs: {logs}", flush=True)
            for violation in violations[:20]:
                print(f"  {violation.kind}: {violation.text}", flush=True)
        else:
            print(f"PASS {about}", flush=True)
            shutil.rmtree(logs, ignore_errors=True)
        summary.write(options.summary)
    print(summary.text(), end="")
    return 1 if summary.failed else 0


def run_fleet(options, version):
    """Three servers, if there may be network namespaces."""
    import fleet
    from network import Network

    try:
        network = Network(len(fleet.HOSTS), fleet.BANDWIDTH)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"SKIP a fleet: {error}")
        return 0
    shutil.rmtree(options.logs, ignore_errors=True)
    seed, seconds = options.seed[0], options.seconds or 600
    print(f"{version}, seed {seed}, {seconds:g} s of faults; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", flush=True)
    return 1 if fleet.Fleet(network, seed, seconds, options.logs).run() else 0


if __name__ == "__main__":
    sys.exit(main())
