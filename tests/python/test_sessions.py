"""Sessions of agents: by vLLM's connector, and what they change of the hits of agents that call tools."""

import heapq
import logging
import random
import statistics
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import CHUNK
from kvrig import tiers
from kvrig.waiting import wait_until
from kvtier.limited import RateLimited
from kvtier.vllm.parameters import Parameters
from rig import BLOCK, tokens
from vllm_rig import request


def metric(server, name):
    """The sum of a metric's series."""
    _, text = server.get("/metrics")
    return sum(int(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))


def hint(kind, **payload):
    """One of vLLM's KV hints."""
    return SimpleNamespace(action_id="1", action_type=kind, action_version="1.0", payload=payload)


# proves: docs/vllm.md#sessions-of-agents
def test_session_of_a_request_is_read(caplog):
    """From parameters, from vLLM's own id of it, and from KV hints; parameters first. Others are ignored, and logged."""

    def of(params=None, **more):
        read = Parameters.of(request("a", [1], kv_transfer_params=params, **more), RateLimited(logging.getLogger("test")))
        return read.session, read.session_action

    named = {"kvtier.session": "agent", "kvtier.session_action": "demote"}
    assert (of(named), of(None), of(None, session_id="own")) == (("agent", "demote"), (None, None), ("own", None))
    hints = SimpleNamespace(actions=[hint("kv.fetch", mode="copy"), hint("kvtier", **named)])
    assert of(None, session_id="own", kv_hints=hints) == ("agent", "demote")
    assert of({"kvtier.session_action": "release"}, kv_hints=hints) == ("agent", "release")
    assert not caplog.messages
    for value in (7, "", "x" * 257, "\ud800", "a\nb", True):
        caplog.clear()
        assert of({"kvtier.session": value, "kvtier.session_action": "release"}) == (None, "release")
        assert "allowed are printable names of at most 256 bytes; the request is of no session" in caplog.messages[0]
    caplog.clear()
    assert of({"kvtier.session_action": "prefetch"}) == (None, None)
    assert "allowed are release and demote, prefetch by HTTP alone; the request does nothing to its session" in caplog.messages[0]


# proves: docs/vllm.md#sessions-of-agents
def test_turn_of_the_connector_is_demoted_when_it_ends(place, engines, tmp_path):
    """With what it has stored, and loaded again for the next one."""
    server = place.server(flags=tiers.fs(tmp_path / "tier"))
    engine = engines(server)
    prompt = tokens(2 * CHUNK + 1, "turn")
    turn = request("a", prompt, kv_transfer_params={"kvtier.session": "agent", "kvtier.session_action": "demote"})
    engine.prefill(turn, range(1, 10))
    engine.finish(turn)
    l1 = lambda: server.get("/status")[1]["storage_manager"]["l1_manager"]["total_object_count"]
    wait_until(lambda: l1() == 0, 60, "a demoted session")
    assert server.get("/status")[1]["agent_sessions"] == {"sessions": 1, "chunks": 2}
    assert server.post("/cache/sessions", {"session": "agent", "action": "prefetch"})[0] == 202
    wait_until(lambda: l1() == 2, 60, "a prefetch")
    assert engine.match(request("b", prompt)) == (2 * CHUNK, True)


class Agents:
    """Agents whose turns end with calls of tools. One turn at a time is served; times are in turns."""

    # An agent does two tasks of six turns; its next prompt is loaded three turns before it comes.
    AGENTS, TURNS, LIVES, LEAD = 32, 6, 2, 3
    # Logarithm of the median time of a call, and its deviation; calls above LONG are known to be long: a build, a search, a person.
    CALL, LONG = (3, 1.2), 32

    def __init__(self, engine, server, has_tier, acts):
        self.engine, self.server, self.has_tier, self.acts = engine, server, has_tier, acts
        self.asked = self.hits = 0
        self.waits = []
        self.random = random.Random(11)
        self.calls = Counter()

    def act(self, session, action):
        """By HTTP, as an orchestrator."""
        status, answer = self.server.post("/cache/sessions", {"session": session, "action": action})
        assert status in (200, 202), answer
        self.calls[action] += 1
        if action == "prefetch":
            path = f"/cache/prefetches/{answer['request_id']}"
            wait_until(lambda: self.server.get(path)[1]["status"] == "completed", 60, "a prefetch", interval=0.002)

    def turn(self, session, prompt):
        """A request: looked up, what is missing stored, and ended."""
        engine, whole = self.engine, len(prompt) // CHUNK * CHUNK
        begun = time.perf_counter()
        engine.scheduler.maybe_submit_lookup_request("r", prompt, session=session)
        wait_until(lambda: engine.scheduler.check_lookup_result("r") is not None, 60, "a lookup", interval=0.0002)
        self.waits.append(time.perf_counter() - begun)
        hit = engine.scheduler.check_lookup_result("r")
        engine.scheduler.cleanup_lookup_result("r")
        if hit < whole:
            op = engine.op(prompt, hit, whole, range((whole - hit) // BLOCK), session=session)
            engine.worker.submit_store_request("r", op)
            engine.finish_stores()
        engine.scheduler.end_session("r")
        self.asked += whole
        self.hits += hit

    def run(self):
        """All turns of all agents, in the order of a simulated time; returns the hit tokens that L1 had."""
        system = tokens(2 * CHUNK, "system")
        events = [(self.random.random() * self.AGENTS, number, "turn", f"agent-{number}", 0) for number in range(self.AGENTS)]
        heapq.heapify(events)
        prompts, now, order = {}, 0.0, self.AGENTS
        before = metric(self.server, "lmcache_mp_lookup_hit_l1_tokens_total")
        while events:
            due, _, kind, agent, turns = heapq.heappop(events)
            now = max(now, due)
            if kind == "prefetch":
                self.act(agent, "prefetch")
                continue
            life = turns // self.TURNS
            session = f"{agent}-{life}"
            if turns % self.TURNS == 0:
                prompts[agent] = system + tokens(3 * CHUNK, session)
            self.turn(session, prompts[agent])
            now += 1
            prompts[agent] = prompts[agent] + tokens(2 * CHUNK, f"{agent}-{turns}")
            # The same calls in every run.
            takes = self.random.lognormvariate(*self.CALL)
            ends = (turns + 1) % self.TURNS == 0
            if self.acts and (ends or takes > self.LONG):
                self.act(session, "release")
                if self.has_tier and not ends:
                    heapq.heappush(events, (now + takes - self.LEAD, order, "prefetch", session, 0))
                    order += 1
            if turns + 1 < self.TURNS * self.LIVES:
                heapq.heappush(events, (now + takes, order, "turn", agent, turns + 1))
                order += 1
        return metric(self.server, "lmcache_mp_lookup_hit_l1_tokens_total") - before


# proves: docs/vllm.md#sessions-of-agents
@pytest.mark.parametrize("has_tier", [False, True])
def test_agents_with_sessions_hit_more_of_l1(place, tmp_path, has_tier):
    """L1 has some 107 chunks, and the agents' prompts some 260 on average. `pytest -s` prints the figures."""
    found, hits = {}, {}
    for acts in (False, True):
        flags = tiers.fs(tmp_path / f"tier-{acts}") if has_tier else []
        server = place.server(l1_gb=2 / 1024, flags=flags)
        agents = Agents(place.engine(server, layers=19), server, has_tier, acts)
        l1 = agents.run()
        found[acts], hits[acts] = l1, agents.hits
        waits = sorted(agents.waits)
        print(
            f"\n{'a tier on disk' if has_tier else 'L1 alone'}, {'with' if acts else 'without'} sessions: {agents.asked} prompt tokens in "
            f"{len(waits)} turns, hit tokens {agents.hits}, of these in L1 {l1}; lookup ms p50 {1e3 * statistics.median(waits):.1f} "
            f"p99 {1e3 * waits[len(waits) * 99 // 100]:.1f}; {dict(agents.calls)}"
        )
    print(f"hit tokens in L1, with to without: {found[True] / found[False]:.2f} times")
    assert hits[True] >= hits[False] and found[True] >= (1.3 if has_tier else 1.05) * found[False]
