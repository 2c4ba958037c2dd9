#!/usr/bin/env python3
"""Time to the first token of agents that call tools: a real vLLM on CPU, with sessions and without at equal memory.

    benches/agents.py --package DIR [--rounds 3] [--l1-mib 352] [--tier] [--model DIR]

Each setup has a server, and an engine without a prefix cache of its own. Agents share a system prompt; each does LIVES tasks, one after the other, and
a task is a session of TURNS turns. A turn sends all so far, and the call of a tool that follows takes as long as some turns of others. Each turn
is computed in all setups, one after the other in a changing order, so what slows the machine meets all. A round has new tasks and empty caches.

    none    no request names a session
    ends    all name theirs (`kvtier.session`), and a task's last one releases it (`kvtier.session_action`)
    calls   as `ends`; POST /cache/sessions also releases a session whose call takes more than LONG turns. With --tier, a directory
            below L1 that holds everything, such a session is prefetched LEAD turns before its next one

Printed for each round: hit tokens, and milliseconds from the request to its first token, of all turns and of those behind a task's first;
then ratios to `none`: the median of the rounds, and each.
"""

import argparse
import contextlib
import heapq
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / each) for each in ("harness", "trust")]

import forked  # noqa: E402
from kvrig import tiers  # noqa: E402
from kvrig.server import Server, our_command  # noqa: E402

CHUNK = 128
AGENTS, LIVES, TURNS = 16, 2, 6
# Tokens: of the prompt that all begin with, of a task, and of an answer with a tool's result, least and most.
SYSTEM, TASK, RESULT = 512, 512, (128, 512)
# Logarithm of the median time of a call in turns, and its deviation.
CALL = (2.3, 1.2)
LONG, LEAD = 16, 3


class Inside(forked.Inside):
    """The engine's side."""

    def turn(self, prompt, parameters):
        """Milliseconds to the first token, the token, and the tokens that were loaded. Stores have ended."""
        before, self.number = self.external(), self.number + 1
        began = time.perf_counter()
        self._add(str(self.number), prompt, None, None, None, None, 1, None, parameters)
        while not (outputs := self.engine.step()):
            pass
        took = 1000 * (time.perf_counter() - began)
        self.settle()
        return took, outputs[0].outputs[0].token_ids[0], self.external() - before


def trace(number):
    """(turn, release or prefetch; session, prompt, place in its task) in order; the prompt of a turn only."""
    source, lengths, now = random.Random(number), {}, 0.0
    due = [(source.random() * AGENTS, agent, "turn", 0) for agent in range(AGENTS)]
    heapq.heapify(due)
    system = forked.prompt_of(f"system {number}", SYSTEM)
    while due:
        at, agent, kind, turn = heapq.heappop(due)
        now, (life, place) = max(now, at), divmod(turn, TURNS)
        session = f"agent-{number}-{agent}-{life}"
        if kind == "prefetch":
            yield kind, session, None, place
            continue
        lengths[session] = lengths[session] + source.randint(*RESULT) if place else TASK
        takes = source.lognormvariate(*CALL)
        yield kind, session, system + forked.prompt_of(session, lengths[session]), place
        now += 1
        if takes > LONG and place < TURNS - 1:
            yield "release", session, None, place
            heapq.heappush(due, (now + takes - LEAD, agent, "prefetch", turn))
        if turn + 1 < LIVES * TURNS:
            heapq.heappush(due, (now + takes, agent, "turn", turn + 1))


class Setup:
    """A server, an engine, and what `Inside.turn` has returned for each turn of a round."""

    def __init__(self, name, chosen, directory, stack):
        self.name, self.actions = name, {"calls": ("turn", "release", "prefetch") if chosen.tier else ("turn", "release")}.get(name, ("turn",))
        flags = tiers.fs(directory / name / "tier") if chosen.tier else []
        self.server = Server(our_command(), directory / f"{name}.log", "engine_shm", chunk=CHUNK, l1_gb=chosen.l1_mib / 1024, flags=flags)
        self.server.start()
        stack.callback(self.server.stop)
        connection = {
            "kv_connector": "KvTierConnector", "kv_role": "kv_both", "kv_connector_module_path": "kvtier.vllm",
            "kv_connector_extra_config": {"kvtier.url": self.server.url, "kvtier.transfer_mode": "engine_driven", "kvtier.lookup_timeout": 10},
        }  # fmt: skip
        self.engine = forked.Engine(f"engine-{name}", directory, chosen.model, connection, max_model_len=4096)
        stack.callback(self.engine.stop)

    def act(self, kind, session, prompt, place):
        """A turn, or what an orchestrator does; a prefetch goes on beside the next turns."""
        if kind == "turn":
            named = {"kvtier.session": session} | ({"kvtier.session_action": "release"} if place == TURNS - 1 else {})
            self.turns.append(self.engine.call("turn", prompt, None if self.name == "none" else named))
        elif kind in self.actions:
            status, answer = self.server.post("/cache/sessions", {"session": session, "action": kind})
            assert status in (200, 202), answer
            self.calls[kind] += 1

    def figures(self, later):
        """Hit tokens, and times to the first token."""
        found = {"hit tokens": sum(each[2] for each in self.turns)}
        for name, chosen in (("all", [True] * len(later)), ("later", later)):
            times = sorted(each[0] for each, is_chosen in zip(self.turns, chosen, strict=True) if is_chosen)
            found |= {f"{name} p50": statistics.median(times), f"{name} p90": times[len(times) * 9 // 10], f"{name} mean": statistics.mean(times)}
        return found


def play(number, setups):
    """One round; returns the figures of each setup."""
    later, asked, best, lengths = [], 0, 0, {}
    for setup in setups:
        assert setup.server.post("/cache/clear", {})[0] == 200
        setup.turns, setup.calls = [], Counter()
    for at, event in enumerate(trace(number)):
        for setup in setups[at % len(setups) :] + setups[: at % len(setups)]:
            setup.act(*event)
        kind, session, prompt, place = event
        if kind == "turn":
            best += lengths.get(session, SYSTEM if lengths else 0) // CHUNK * CHUNK
            asked, lengths[session] = asked + len(prompt), len(prompt)
            later.append(place > 0)
    kv = SYSTEM + sum(length - SYSTEM for length in lengths.values())
    print(f"round {number}: {len(later)} turns, {asked} prompt tokens, {best} hit without a limit, KV of {kv} in all; load {os.getloadavg()[0]:.1f}")
    found = {setup.name: setup.figures(later) for setup in setups}
    for setup in setups:
        differ = sum(one[1] != other[1] for one, other in zip(setup.turns, setups[0].turns, strict=True))
        (_, hits), *times = found[setup.name].items()
        times = ", ".join(f"{key} {value:.0f}" for key, value in times)
        hits = f"hit tokens {hits}, {hits / best:.3f} of those"
        print(f"  {setup.name:6} {hits}; ms to the first token: {times}; {dict(setup.calls)}; {differ} first tokens are not those of none", flush=True)
    return found


def main():
    """Runs the command line."""
    home = Path(os.environ.get("KVTIER_E2E_HOME") or os.path.expanduser("~/.cache/kvtier-e2e"))
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--package", required=True, type=Path, help="directory with the Python package kvtier")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--l1-mib", type=int, default=352)
    parser.add_argument("--tier", action="store_true", help="a directory below L1; without `ends`")
    parser.add_argument("--model", type=Path, default=home / "model", help="made by tests/vllm/make_model.py")
    chosen = parser.parse_args()
    release, forked.Inside = forked.prepare(chosen.package)[1], Inside
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        setups = [Setup(name, chosen, Path(directory), stack) for name in (("none", "calls") if chosen.tier else ("none", "ends", "calls"))]
        warm = [each.engine.call("turn", forked.prompt_of(f"warm-up {at}", 2048), {"kvtier.store": False})[0] for at in range(4) for each in setups]
        below = "a tier on disk" if chosen.tier else "no tier"
        print(f"vLLM {release}, L1 {chosen.l1_mib} MiB, {below}; 2048 tokens computed in {min(warm):.0f} ms at best", flush=True)
        rounds = [play(number, setups) for number in range(chosen.rounds)]
        for name, key in ((setup.name, key) for setup in setups[1:] for key in rounds[0][setup.name]):
            ratios = [found[name][key] / found["none"][key] for found in rounds]
            print(f"{name} / none, {key}: {statistics.median(ratios):.3f} ({', '.join(f'{each:.3f}' for each in ratios)})", flush=True)
        print(f"warnings of the servers: {[line for setup in setups for line in setup.server.unexpected_trouble()][:3]}")


if __name__ == "__main__":
    main()
