#!/usr/bin/env python3
"""What storing adds to the steps of a real vLLM on CPU.

    benches/engine_steps.py --package DIR [--waves 20] [--mode engine_driven|lmcache_driven] [--out DIR]

Two engines, alone and with kvtier's connector, get the same new prompts in turn, several at once: prompts are computed and stored in
steps of some hundred tokens, while those before them are answered. The seconds of each step are divided by the median of the engine alone
at the same place of a wave, which computes the same: p50 and p99 of steps of the engine with the connector that begin with stores in
flight, of its others, and of the engine alone. The model is that of benches/engine.py.
"""

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / each) for each in ("harness", "trust")]

import forked  # noqa: E402

# tests/vllm has a module of this name.
SPEC = importlib.util.spec_from_file_location("conversations", ROOT / "benches" / "engine.py")
SPEC.loader.exec_module(bench := importlib.util.module_from_spec(SPEC))

SETUPS = ("none", "kvtier")
# Of a wave: prompts, tokens of each, tokens of each answer; tokens per step.
PROMPTS, TOKENS, ANSWER, STEP = 4, 512, 8, 520
# Steps at one place whose tokens differ by less are alike.
ALIKE = 64


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--package", required=True, type=Path)
    parser.add_argument("--waves", type=int, default=20)
    parser.add_argument("--mode", choices=("engine_driven", "lmcache_driven"), default="engine_driven")
    parser.add_argument("--out", type=Path, help="where results go [default: benches/runs/<date>/engine-steps]")
    chosen = parser.parse_args()
    out = (chosen.out or ROOT / "benches" / "runs" / datetime.date.today().isoformat() / "engine-steps").resolve()
    out.mkdir(parents=True, exist_ok=True)
    load = bench.DEVICES["cpu"]
    home = Path(os.environ.get("KVTIER_E2E_HOME") or os.path.expanduser("~/.cache/kvtier-e2e"))
    model = bench.make_model(out / "model", home / "model", load)
    forked.prepare(chosen.package)
    load.mode = chosen.mode
    with ExitStack() as stack:
        server = bench.start_server(stack, "kvtier", load, out)
        engines = {}
        for name in SETUPS:
            engines[name] = forked.Engine(
                name, out, model, bench.transfer_config(name, server, load), load_format="dummy", max_num_batched_tokens=STEP,
                async_scheduling=False,
            )
            stack.callback(engines[name].stop)
        waves = [wave(engines, number) for number in range(-1, chosen.waves)][1:]
    report(waves, chosen, out)


def wave(engines, number):
    """The steps of each engine for the same prompts."""
    prompts = [forked.prompt_of(f"steps {number} {each}", TOKENS) for each in range(PROMPTS)]
    return {name: engines[name].call("time_steps", prompts, ANSWER) for name in (SETUPS if number % 2 else SETUPS[::-1])}


def report(waves, chosen, out):
    """Prints and writes the comparison."""
    usual = {}
    for each in waves:
        for place, (seconds, tokens, _) in enumerate(each["none"]):
            usual.setdefault((place, tokens // ALIKE), []).append(seconds)
    usual = {place: statistics.median(each) for place, each in usual.items()}

    def relative(name, in_flight):
        steps = [((place, tokens // ALIKE), seconds) for each in waves for place, (seconds, tokens, flag) in enumerate(each[name])
                 if flag == in_flight]  # fmt: skip
        return [seconds / usual[place] for place, seconds in steps if place in usual]

    compared = [relative("none", False), relative("kvtier", True), relative("kvtier", False)]
    lines = [
        f"{chosen.mode}: {len(compared[0])} steps alone, {len(compared[1])} with stores in flight, {len(compared[2])} without",
        f"{'':4}{'alone':>8}{'storing':>9}{'idle':>8}{'storing / alone':>17}",
    ]
    ratios = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        one, two, idle = (bench.milliseconds(each or [0], share) / 1000 for each in compared)
        ratios[name] = round(two / one, 4)
        lines.append(f"{name:4}{one:8.3f}{two:9.3f}{idle:8.3f}{ratios[name]:17.3f}")
    print("\n".join(lines))
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(), "cpus": os.cpu_count(), "mode": chosen.mode,
        "prompts": PROMPTS, "tokens": TOKENS, "answer": ANSWER, "step": STEP, "storing_over_alone": ratios, "waves": waves,
    }  # fmt: skip
    (out / f"steps-{chosen.mode}.json").write_text(json.dumps(facts) + "\n")
    (out / f"steps-{chosen.mode}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
