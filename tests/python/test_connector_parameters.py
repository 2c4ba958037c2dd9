"""vLLM's connector: what a request's `kv_transfer_params` ask of the cache."""

import logging
import random
from contextlib import closing
from dataclasses import replace

import pytest
from conftest import CHUNK
from rig import BLOCK, tokens
from simulated import Simulation  # skips without vLLM
from test_connector_resets import objects
from test_windows import MODELS, STATES, prompts
from vllm_rig import request

from kvtier.limited import RateLimited
from kvtier.vllm.parameters import PARAMETERS, Parameters


def warned(caplog):
    """The lines about parameters."""
    return [line for line in caplog.messages if "kv_transfer_params" in line]


def stores(engine, req, blocks, *ends):
    """The ranges that steps store which compute a request up to these ends."""
    engine.allocate(req, blocks, 0)
    found, done = [], 0
    for end in ends:
        part = {"cached": [(req, None, done, end - done)]} if done else {"new": [(req, blocks, 0, end)]}
        found.append([(move.start, move.end) for move in engine.step(**part).metadata.stores])
        done = end
    return found


@pytest.mark.parametrize(
    ("params", "stored", "found"),
    [
        ({}, [[(0, CHUNK)], [(CHUNK, 3 * CHUNK)], []], 3 * CHUNK),
        ({"kvtier.store": True, "kvtier.load": True, "kvtier.max_load_tokens": None}, [[(0, CHUNK)], [(CHUNK, 3 * CHUNK)], []], 3 * CHUNK),
        ({"kvtier.store": False}, [[], [], []], 3 * CHUNK),
        ({"kvtier.load": False}, [[(0, CHUNK)], [(CHUNK, 3 * CHUNK)], []], 0),
        ({"kvtier.max_store_tokens": 3 * CHUNK - 1}, [[(0, CHUNK)], [(CHUNK, 2 * CHUNK)], []], 3 * CHUNK),
        ({"kvtier.max_store_tokens": CHUNK - 1, "kvtier.max_load_tokens": CHUNK - 1}, [[], [], []], 0),
        ({"kvtier.max_load_tokens": 3 * CHUNK - 1}, [[(0, CHUNK)], [(CHUNK, 3 * CHUNK)], []], 2 * CHUNK),
        ({"kvtier.max_load_tokens": 10**30, "kvtier.max_store_tokens": 10**30}, [[(0, CHUNK)], [(CHUNK, 3 * CHUNK)], []], 3 * CHUNK),
        ({"kvtier.max_store_tokens": CHUNK, "kvtier.store": False}, [[], [], []], 3 * CHUNK),
        ({"lmcache.skip_save": True}, [[], [], []], 3 * CHUNK),
        ({"lmcache.skip_save": False, "lmcache.max_offload_tokens": 2 * CHUNK}, [[(0, CHUNK)], [(CHUNK, 2 * CHUNK)], []], 3 * CHUNK),
        # Of other connectors.
# proves: docs/compare.md#limits-per-request
# proves: docs/vllm.md#parameters-of-a-request
        ({"do_remote_prefill": False, "max_load_tokens": 0, "lmcache.tag.user": "x", 7: 8}, [[(0, CHUNK)], [(CHUNK, 3 * CHUNK)], []], 3 * CHUNK),
        ("of another connector", [[(0, CHUNK)], [(CHUNK, 3 * CHUNK)], []], 3 * CHUNK),
    ],
)
def test_limits_of_a_request(place, engines, caplog, params, stored, found):
    """The first tokens are stored and loaded, in whole chunks; the least of several limits counts."""
    engine, prompt = engines(place.server()), tokens(3 * CHUNK + BLOCK, "limits")
    mine = request("a", prompt, kv_transfer_params=params)
    assert engine.match(mine) == (0, False)
    assert stores(engine, mine, range(1, 14), CHUNK + 1, 3 * CHUNK, 3 * CHUNK + BLOCK) == stored
    engine.finish(mine)
    engine.prefill(request("b", prompt, salt="all"), range(1, 14))
    later = request("c", prompt, salt="all", kv_transfer_params=params)
    assert engine.match(later) == (found, found > 0)
    # Tokens that vLLM has itself do not extend the limit.
    assert engine.match(request("d", prompt, salt="all", kv_transfer_params=params), BLOCK) == (max(0, found - BLOCK), found > 0)
    assert engine.scheduler._scheduling.errors.take() == 0 and not warned(caplog)


def test_limited_load_leaves_nothing_leased(place, engines):
    """The objects behind the limit are not leased: they can be removed while the request runs."""
    server = place.server()
    engine = engines(server)
    prompt = engine.stored(3 * CHUNK + 1, "leases")
    req = request("b", prompt, kv_transfer_params={"kvtier.max_load_tokens": CHUNK})
    assert engine.match(req) == (CHUNK, True)
    engine.scheduler._scheduling.adapter.client.clear(False).result()
    assert objects(server) == 1
    assert engine.load(req, range(21, 34), 0, CHUNK) == set()


@pytest.mark.parametrize("name", [name for name in PARAMETERS if PARAMETERS[name].use not in ("keep_seconds", "session", "session_action", "peer")])
def test_value_that_is_not_allowed_counts_as_nothing(caplog, name):
    """The log has the key, the value and what is allowed."""
    use = {"kvtier.load": "load", "kvtier.max_load_tokens": "load", "kvtier.stored_tokens": "awaited"}.get(name, "store")
    effect = "waits for nothing" if use == "awaited" else f"may {use} nothing"
    allowed = "whole numbers from 0 on" if "tokens" in name else "true and false"
    for value in ("false", "x" * 10**6, -1, 0.5, float("nan"), [], {}, object(), True if "tokens" in name else 1):
        caplog.clear()
        limits = Parameters.of(request("a", [1], kv_transfer_params={name: value}), RateLimited(logging.getLogger("test")))
        assert limits == replace(Parameters(), **{use: 0}), value
        (line,) = caplog.messages
        assert f"{name!r} is {value!r}"[:40] in line and f"allowed are {allowed}; the request {effect}" in line
        assert len(line) < 300


def test_time_that_is_not_allowed_is_none(caplog):
    """The log has the key, the value and what is allowed."""
    of = lambda value: Parameters.of(request("a", [1], kv_transfer_params={"kvtier.keep_seconds": value}), RateLimited(logging.getLogger("test")))
    for value in ("60", "x" * 10**6, -1, 86_401, 10**30, 0.5, float("inf"), [], {}, object(), True):
        caplog.clear()
        assert of(value) == Parameters(), value
        (line,) = caplog.messages
        assert "allowed are whole numbers from 0 to 86400; the request sets no time" in line and len(line) < 300
    caplog.clear()
    assert [of(value).keep_seconds for value in (0, 1, 86_400, None)] == [0, 1, 86_400, None] and not caplog.messages


# proves: docs/vllm.md#parameters-of-a-request
def test_peer_is_a_host_in_either_form(caplog):
    """The log has invalid values."""
    of = lambda params: Parameters.of(request("a", [1], kv_transfer_params=params), RateLimited(logging.getLogger("test"))).peer
    source = {"kv_request_id": "r", "remote_host": "10.0.0.7", "remote_port": 7777}
    assert of({"kvtier.peer": "host-a"}) == "host-a" and of({"remote_kv_source": source}) == "10.0.0.7" and of({}) is None
    assert not caplog.messages
    for params in ({"kvtier.peer": 7}, {"kvtier.peer": ""}, {"kvtier.peer": "x" * 254}, {"remote_kv_source": {}}, {"remote_kv_source": "a"}):
        caplog.clear()
        assert of(params) is None
        (line,) = caplog.messages
        assert "the request names no peer" in line and len(line) < 300


# proves: docs/vllm.md#parameters-of-a-request
def test_peer_of_a_request_is_sent_with_its_lookup(place, engines, monkeypatch):
    """A host that is unknown to the server changes nothing."""
    engine, prompt = engines(place.server()), tokens(CHUNK + 1, "peer")
    engine.prefill(request("a", prompt), range(1, 6))
    adapter, sent = engine.scheduler._scheduling.adapter, []
    submit = adapter.maybe_submit_lookup_request
    monkeypatch.setattr(adapter, "maybe_submit_lookup_request", lambda *args, **named: sent.append(named["peer"]) or submit(*args, **named))
    assert engine.match(request("b", prompt, kv_transfer_params={"kvtier.peer": "host-a"})) == (CHUNK, True)
    assert sent == ["host-a"]


# proves: docs/vllm.md#parameters-of-a-request
def test_value_that_is_not_allowed_costs_only_the_cache(place, engines, caplog):
    """The request is computed, and so are the others."""
    engine, prompt = engines(place.server()), tokens(CHUNK + 1, "bad")
    engine.prefill(request("a", prompt, salt="known"), range(1, 6))
    careful = {"kvtier.store": "no", "kvtier.max_load_tokens": "no"}
    assert engine.match(request("b", prompt, salt="known", kv_transfer_params=careful)) == (0, False)
    new = request("c", prompt, kv_transfer_params=careful)
    assert engine.match(new) == (0, False)
    assert stores(engine, new, range(11, 16), CHUNK + 1) == [[]]
    assert engine.scheduler._scheduling.errors.take() == 0
    assert len(warned(caplog)) == 1


def test_unknown_parameters_are_ignored(place, engines, caplog):
    """With one line in ten seconds for all of them."""
    engine = engines(place.server())
    params = {f"kvtier.{name}": False for name in ("pinned", "priority", "y" * 10**6)}
    prompt = tokens(CHUNK + 1, "unknown")
    engine.prefill(request("a", prompt, kv_transfer_params=params), range(1, 6))
    assert engine.match(request("b", prompt, kv_transfer_params=params)) == (CHUNK, True)
    (line,) = warned(caplog)
    assert "request 'a': 'kvtier.pinned' is False in kv_transfer_params; there is no such parameter" in line
    assert "kvtier.max_store_tokens" in line
    assert engine.scheduler._scheduling.errors.take() == 0


def test_preempted_request_keeps_its_limits(place, engines):
    """When it resumes, it loads no more of what it has stored than it allows."""
    engine = engines(place.server())
    params = {"kvtier.max_store_tokens": 2 * CHUNK, "kvtier.max_load_tokens": CHUNK}
    req = request("a", tokens(3 * CHUNK + 1, "resumed"), kv_transfer_params=params)
    assert engine.match(req) == (0, False)
    assert stores(engine, req, range(1, 14), 3 * CHUNK + 1) == [[(0, 2 * CHUNK)]]
    engine.wait_for_stores()
    engine.step(preempted=["a"])
    assert engine.match(req) == (CHUNK, True)
    assert engine.load(req, range(21, 34), 0, CHUNK) == set()
    moves = engine.step(cached=[(req, range(21, 34), CHUNK, 2 * CHUNK + 1)], resumed=["a"]).metadata.stores
    assert [(move.start, move.end) for move in moves] == [(CHUNK, 2 * CHUNK)]


# proves: docs/compare.md#limits-per-request
# proves: docs/vllm.md#parameters-of-a-request
@pytest.mark.parametrize("model", [*MODELS, *STATES])
def test_limited_hits_are_complete_in_all_groups(place, model):
    """Windows, chunks of attention and states at the end of a limited hit are those that its next tokens need. vLLM's own request
    carries the parameters."""
    server, made, source = place.server("lmcache_driven"), prompts(random.Random(f"{model}-limited"), 8), random.Random(model)
    specs, limits = (MODELS | STATES)[model], [source.randrange(5 * CHUNK) for _ in range(8)]
    longest = [(len(prompt) - 1) // CHUNK * CHUNK for prompt in made]
    limited = [min(whole, limit // CHUNK * CHUNK) for whole, limit in zip(longest, limits, strict=True)]
    found = {}
    for name, use, salt in (("whole", None, "a"), ("load", "load", "a"), ("store", "store", "b"), ("stored", None, "b")):
        with closing(Simulation(server, model, specs, blocks=600, caching=model in STATES, step_tokens=40)) as engine:
            found[name] = []
            for number, prompt in enumerate(made):
                before = engine.external
                params = {f"kvtier.max_{use}_tokens": limits[number]} if use else {}
                # Apart from each other.
                engine.add(f"{name}-{number}", prompt, f"{salt}-{number}", answer=1, extra_args={"kv_transfer_params": params})
                engine.run()
                engine.finish_stores()
                found[name].append(engine.external - before)
            assert engine.errors == 0 and engine.left == 0
    assert found["whole"] == found["store"] == [0] * len(made)
    for name in ("load", "stored"):
        assert all(one <= limit for one, limit in zip(found[name], limited, strict=True))
        # vLLM keeps a state at the prompt's end only.
        assert model in STATES or found[name] == limited
