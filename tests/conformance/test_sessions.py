"""Sessions of agents, named in keys of LMCache's client: what only one of them needs is evicted first, leaves L1, or is loaded."""

import re

import pytest
from kvrig import older, tiers
from kvrig.engine import tokens
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("LMCache's server has no sessions of agents")

# A prompt has 4 chunks of 16 tokens.
COUNT = 64
# Neither the watermark nor a second passes by what is evicted.
NO_WATERMARK = ["--eviction-trigger-watermark", "1", "--eviction-ratio", "0"]


def act(server, session, action, **more):
    """Status and answer of an action."""
    return server.post("/cache/sessions", {"session": session, "action": action, **more})


def turn(engine, session, prompt, action=None, salt=""):
    """A request of a session: looked up, stored, and ended."""
    request = engine.new_request()
    named = {"kvtier.session": session, **({"kvtier.session_action": action} if action else {})}
    engine.scheduler.maybe_submit_lookup_request(request, older.packed(prompt), request_configs=named, **older.salted(salt))
    wait_until(lambda: engine.scheduler.check_lookup_result(request) is not None, 60, "a lookup")
    engine.scheduler.cleanup_lookup_result(request)
    blocks = engine.blocks_for(len(prompt))
    assert engine.worker.store(request, prompt, 0, len(prompt), blocks, salt)
    engine.end(request)


def in_l1(engine, prompt, salt=""):
    """Tokens of a prompt in L1; counts as no use."""
    body = {"model_name": engine.model, "token_ids": prompt, "cache_salt": salt}
    status, found = engine.server.post("/prefix/match", body)
    assert status == 200, found
    return found["hit_tokens_l1"]


def metric(server, series):
    """A value of `/metrics`."""
    _, text = server.get("/metrics")
    return int(re.search(rf"^{re.escape(series)} (\d+)$", text, re.M)[1])


def flood(engine, server, objects):
    """Stores so much that L1 evicts this number of objects."""
    evicted = "kvtier_l1_evicted_chunks_total"
    before, number = metric(server, evicted), 0
    while metric(server, evicted) < before + objects:
        engine.store_prompt(tokens(server.chunk, f"flood-{before}-{number}"))
        number += 1


# proves: docs/vllm.md#sessions-of-agents
@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_driven"])
def test_released_sessions_lose_their_own_chunks_first(serve, engines, mode):
    """The prefix that they share with others stays, and so does another tenant's session of the same name and prompt."""
    server = serve("both", flags=NO_WATERMARK, l1_gb=1 / 256)
    engine = engines(server, mode)
    shared = tokens(COUNT // 2, "shared")
    one, other = (shared + tokens(COUNT // 2, name) for name in ("one", "other"))
    turn(engine, "other", other)
    turn(engine, "one", one, salt="alice")
    turn(engine, "one", one)
    assert server.get("/status")[1]["agent_sessions"] == {"sessions": 3, "chunks": 12}
    assert act(server, "one", "release") == (200, {"status": "done", "chunks": 4, "own_chunks": 2, "objects": 2})
    flood(engine, server, 2)
    assert (in_l1(engine, one), in_l1(engine, other), in_l1(engine, one, "alice")) == (COUNT // 2, COUNT, COUNT)
    # The next turn has the chunks as any other.
    turn(engine, "one", one)
    flood(engine, server, 2)
    assert in_l1(engine, one) == COUNT


# proves: docs/vllm.md#sessions-of-agents
def test_ended_requests_are_demoted_and_prefetched(serve, engines, tmp_path):
    """Only what the tier has leaves L1; a pinned or leased object stays; what is loaded is what was stored."""
    server = serve(flags=tiers.fs(tmp_path / "tier"))
    engine = engines(server)
    prompt = tokens(COUNT, "prompt")
    tiers.paint(engine.worker, engine.blocks_for(COUNT), "prompt")
    turn(engine, "agent", prompt, "demote")
    wait_until(lambda: in_l1(engine, prompt) == 0, 60, "a demoted session")
    assert metric(server, 'kvtier_agent_session_objects_total{action="demote"}') == 4
    status, begun = act(server, "agent", "prefetch")
    assert (status, begun["chunks"]) == (202, 4)
    path = f"/cache/prefetches/{begun['request_id']}"
    wait_until(lambda: server.get(path)[1]["status"] == "completed", 60, "a prefetch")
    assert in_l1(engine, prompt) == COUNT
    # A running request holds it.
    request, hit = engine.lookup(prompt)
    assert hit == COUNT
    assert act(server, "agent", "demote")[1]["objects"] == 0
    assert in_l1(engine, prompt) == COUNT
    blocks = engine.blocks_for(COUNT)
    engine.worker.fill(blocks)
    assert engine.worker.retrieve(request, prompt, 0, COUNT, blocks).ok
    assert tiers.is_painted(engine.worker, blocks, "prompt")
    engine.end(request)
    # Within a second, since it was held.
    wait_until(lambda: in_l1(engine, prompt) == 0, 60, "a session demoted again")
    assert [act(server, "agent", "prefetch")[0], act(server, "agent", "release")[0]] == [202, 200]


# proves: docs/vllm.md#sessions-of-agents
def test_bad_and_unknown_sessions_are_refused(serve, engines):
    """By field, value and what is allowed. In a key they are ignored, and the request is served."""
    server = serve()
    engine = engines(server)
    prompt = tokens(COUNT, "prompt")
    turn(engine, "x" * 257, prompt)
    turn(engine, "", prompt, "release")
    turn(engine, 7, prompt, "forget")
    assert server.get("/status")[1]["agent_sessions"] == {"sessions": 0, "chunks": 0}
    turn(engine, "agent", prompt, "forget")
    for session, action, status, text in [
        ("", "release", 400, 'session: ""; allowed: 1 to 256 bytes'),
        ("x" * 257, "release", 400, f'session: "{"x" * 127}...; allowed: 1 to 256 bytes'),
        ("other", "release", 404, 'session: "other" is not remembered of the tenant that cache_salt names; allowed: a name that a request of it had lately, since the start'),
        ("agent", "forget", 422, 'action: "forget"; allowed: release, demote, prefetch'),
        ("agent", "demote", 503, "no L2 adapters configured"),
        ("agent", "prefetch", 503, "no L2 adapters configured"),
    ]:
        assert act(server, session, action) == (status, {"detail": text})
    assert act(server, "agent", "release", cache_salt="alice")[0] == 404
    # Not the session of the default tenant.
    assert act(server, "agent", "release", salt="alice")[0] == 422
    assert act(server, "agent", "release")[0] == 200
