"""vLLM's connector: an engine decodes what another one has prefilled and is still storing."""

import json
import random
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import pytest
from conftest import CHUNK
from kvrig.waiting import wait_until
from kvtier import KvTierError
from rig import BLOCK, tokens
from simulated import Simulation, full  # skips without vLLM
from test_connector_misses import misses
from test_multi_connector import leased
from test_windows import MODELS, STATES, prompts
from vllm_rig import request, same

from kvtier.vllm import KvTierConnector
from kvtier.vllm.dynamo import LMCacheMPConnector
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class HeldStores:
    """Stores of an engine, which begin when the test says so."""

    def __init__(self, engine):
        [worker] = engine.workers
        self.moves, self.start = [], worker._start_store
        worker._start_store = lambda move, event: self.moves.append((move, event))

    def begin(self, count=None):
        """Begins the first of them."""
        begun, self.moves = self.moves[:count], self.moves[len(self.moves) if count is None else count :]
        for move in begun:
            self.start(*move)


class Decoding:
    """An engine with a clock that the test sets, the number of its lookups, and the ranges whose leases it has released."""

    def __init__(self, engine):
        self.engine, self.now, self.lookups, self.released = engine, 100.0, 0, []
        self.scheduling = engine.scheduler._scheduling
        self.scheduling.clock = lambda: self.now
        submit = self.scheduling.adapter.maybe_submit_lookup_request
        self.scheduling.adapter.maybe_submit_lookup_request = lambda *args, **named: self.count() or submit(*args, **named)

        free = self.scheduling.adapter.free_lookup_locks
        self.scheduling.adapter.free_lookup_locks = lambda *args, **named: self.release(**named) or free(*args, **named)

    def count(self):
        self.lookups += 1

    def release(self, start, end, **named):
        self.released.append((start, end))

    def ask(self, req):
        """One question of vLLM's scheduler."""
        return self.engine.scheduler.get_num_new_matched_tokens(req, 0)

    def waits(self, req):
        """Asks until the lookup's result is known. Whether the request waits for another."""
        adapter, name = self.scheduling.adapter, req.request_id
        wait_until(lambda: self.ask(req)[0] is not None or adapter.check_lookup_result(name) is not None, 60, "a lookup")
        return self.ask(req)[0] is None

    def stats(self):
        """Counters since the last call, of requests that waited."""
        found = self.engine.scheduler.get_kv_connector_stats()
        return {name: count for name, count in (found.data if found else {}).items() if name.startswith("hand_over")}


@pytest.fixture
def pair(place, engines):
    """A server, an engine that prefills, and one that decodes."""
    server = place.server()
    prefill = engines(server, seed=1, **{"kvtier.hand_over": True})
    return server, prefill, Decoding(engines(server, seed=2))


def prefill_in_two(engine, prompt, params=PREFILL):
    """Prefills with a store of the first chunk and one of the rest. Returns the parameters in the answer."""
    req, blocks = request("prefill", prompt, kv_transfer_params=params), range(1, 14)
    assert engine.match(req) == (0, False)
    engine.allocate(req, blocks, 0)
    engine.step(new=[(req, blocks, 0, CHUNK)])
    engine.step(cached=[(req, None, CHUNK, len(prompt) - CHUNK)])
    engine.finish(req)
    return engine.handed_over


# proves: docs/compare.md#disaggregated-prefill
# proves: docs/vllm.md#disaggregated-prefill
def test_decode_waits_for_stores_in_flight(pair):
    """It finds them when they are there, and keeps no lease of its earlier lookups. Another request does not wait."""
    server, prefill, decode = pair
    prompt, stores = tokens(3 * CHUNK + 1, "handed over"), HeldStores(prefill)
    params = prefill_in_two(prefill, prompt)
    assert params == {"kvtier.stored_tokens": 3 * CHUNK}
    req = request("decode", prompt, kv_transfer_params=params)
    assert decode.waits(req) and decode.lookups == 1
    assert all(decode.ask(req) == (None, False) for _ in range(100)) and decode.lookups == 1
    other = request("other", tokens(CHUNK + 1, "other"))
    assert decode.engine.match(other) == (0, False)
    assert decode.ask(req) == (None, False) and decode.lookups == 2
    stores.begin(1)
    wait_until(lambda: prefill.step() and len(prefill.scheduler._scheduling.in_flight_stores) == 1, 60, "the first store")
    decode.now += 0.005
    assert decode.waits(req) and decode.lookups == 3
    assert leased(server) == "1"
    stores.begin()
    prefill.wait_for_stores()
    assert all(decode.ask(req) == (None, False) for _ in range(100)) and decode.lookups == 3
    decode.now += 0.005
    assert decode.engine.match(req) == (3 * CHUNK, True) and decode.lookups == 4
    # A server that counts leases would keep those of the lookup before.
    assert leased(server) == "3" and decode.released == [(0, CHUNK)]
    assert decode.engine.load(req, range(21, 34), 0, 3 * CHUNK) == set()
    assert same(decode.engine.read(range(21, 33)), prefill.read(range(1, 13)))
    stats = decode.scheduling.take_stats().data
    waited = stats.pop("hand_over_seconds")
    assert stats == {"hand_overs": 1, "lookups": 1, "hit_tokens": 3 * CHUNK} and waited == pytest.approx(0.01)
    decode.engine.finish(req)
    wait_until(lambda: leased(server) == "0", 60, "the leases")


# proves: docs/vllm.md#disaggregated-prefill
def test_wait_ends_at_its_deadline(pair):
    """What is there is loaded then; a preempted request does not wait again."""
    _, prefill, decode = pair
    prompt, stores = tokens(3 * CHUNK + 1, "late"), HeldStores(prefill)
    params = prefill_in_two(prefill, prompt)
    stores.begin(1)
    wait_until(lambda: prefill.step() and len(prefill.scheduler._scheduling.in_flight_stores) == 1, 60, "the first store")
    req = request("decode", prompt, kv_transfer_params=params)
    for millisecond in range(1000):
        decode.now = 100 + millisecond / 1000
        assert decode.waits(req), millisecond
    assert decode.lookups < 25
    decode.now = 101.0
    lookups = decode.lookups
    assert decode.engine.match(req) == (CHUNK, True) and decode.lookups == lookups
    assert decode.stats() == {"hand_overs": 1, "hand_over_timeouts": 1, "hand_over_seconds": pytest.approx(1)}
    assert decode.engine.load(req, range(21, 34), 0, CHUNK) == set()
    decode.engine.step(preempted=["decode"])
    assert decode.engine.match(req) == (CHUNK, True)
    nothing = request("nothing", tokens(2 * CHUNK, "nothing"), kv_transfer_params=params)
    assert decode.waits(nothing)
    decode.now += 1
    assert decode.engine.match(nothing) == (0, False)
    decode.engine.allocate(nothing, range(41, 49), 0)
    assert misses(decode.engine) == {"not_found": 1}
    stores.begin()


def test_failed_lookup_costs_no_hit(pair):
    """A lookup that fails ends the wait, and what earlier ones found is found by one more; a request that had found nothing is computed."""
    _, prefill, decode = pair
    prompt, stores, adapter = tokens(3 * CHUNK + 1, "failed"), HeldStores(prefill), decode.scheduling.adapter
    params = prefill_in_two(prefill, prompt)
    stores.begin(1)
    wait_until(lambda: prefill.step() and len(prefill.scheduler._scheduling.in_flight_stores) == 1, 60, "the first store")
    found = request("found", prompt, kv_transfer_params=params)
    nothing = request("nothing", tokens(2 * CHUNK, "nothing"), kv_transfer_params=params)
    assert decode.waits(found) and decode.waits(nothing) and decode.lookups == 2

    class Failing:
        """The adapter's client, whose lookups fail."""

        def __getattr__(self, name):
            return getattr(client, name)

        def lookup(self, *args):
            raise KvTierError("no answer in time")

    client, adapter.client = adapter.client, Failing()
    decode.now += 0.005
    assert decode.ask(found) == decode.ask(nothing) == (None, False) and decode.lookups == 4
    adapter.client = client
    assert decode.engine.match(found) == (CHUNK, True) and decode.engine.match(nothing) == (0, False)
    assert decode.lookups == 5
    assert decode.stats() == {"hand_overs": 2, "hand_over_seconds": pytest.approx(0.01)}
    stores.begin()


# proves: docs/vllm.md#disaggregated-prefill
def test_dead_server_ends_the_wait(pair):
    """Between two lookups, and in one: the request is computed at once."""
    server, _, decode = pair
    server.expect_trouble("instance|worker|register")
    between, within = (request(name, tokens(CHUNK, name), kv_transfer_params={"kvtier.stored_tokens": CHUNK}) for name in ("between", "within"))
    assert decode.waits(between) and decode.waits(within)
    with server.frozen():
        decode.now += 0.005
        assert decode.ask(within) == (None, False) and decode.lookups == 3
        server.kill()
    # The clock stands still.
    wait_until(lambda: not decode.scheduling.adapter.is_healthy, 60, "a lost server")
    assert decode.engine.match(between) == (0, False)
    assert decode.engine.match(within) == (0, False)
    assert decode.lookups == 3
    server.start()


def test_aborted_wait_releases_its_leases(pair):
    """Those of its last lookup."""
    server, prefill, decode = pair
    prompt = prefill.stored(2 * CHUNK + 1, "aborted")
    prefill.wait_for_stores()
    req = request("decode", prompt + tokens(CHUNK, "more"), kv_transfer_params={"kvtier.stored_tokens": 3 * CHUNK})
    assert decode.waits(req)
    decode.now += 0.005
    assert decode.waits(req) and decode.lookups == 2
    assert leased(server) == "2"
    decode.engine.finish(req)
    wait_until(lambda: leased(server) == "0", 60, "the leases")
    assert decode.scheduling.tracked == {} and decode.stats() == {}


# proves: docs/vllm.md#disaggregated-prefill
@pytest.mark.parametrize(
    ("options", "params", "handed"),
    [
        ({}, PREFILL, None),
        ({"kvtier.hand_over": True}, None, None),
        ({"kvtier.hand_over": True}, {"do_remote_decode": False, "kvtier.stored_tokens": 7}, None),
        ({"kvtier.hand_over": True}, "of another connector", None),
        ({"kvtier.hand_over": True}, PREFILL, 3 * CHUNK),
        ({"kvtier.hand_over": True, "role": "kv_producer"}, PREFILL, 3 * CHUNK),
        ({"kvtier.hand_over": True}, PREFILL | {"kvtier.max_store_tokens": 2 * CHUNK + 1}, 2 * CHUNK),
        ({"kvtier.hand_over": True}, PREFILL | {"kvtier.store": False}, 0),
        ({"kvtier.hand_over": True, "role": "kv_consumer"}, PREFILL, 0),
    ],
)
def test_only_prefill_requests_hand_over(place, engines, caplog, options, params, handed):
    """If the engine's option says so: with parameters that name what is stored. Without the option the log has a word of it."""
    engine = engines(place.server(), **options)
    engine.prefill(request("a", tokens(3 * CHUNK + 1, "asked"), kv_transfer_params=params), range(1, 14))
    assert engine.handed_over == (None if handed is None else {"kvtier.stored_tokens": handed})
    assert ("set kvtier.hand_over" in caplog.text) == (params is PREFILL and not options)
    assert engine.scheduler._scheduling.errors.take() == 0


def test_what_was_found_is_handed_over(pair):
    """Also if nothing new is stored; nothing after a reset, since no other engine finds it."""
    _, prefill, _ = pair
    prompt = prefill.stored(2 * CHUNK + 1, "found")
    prefill.wait_for_stores()
    for name, expected in (("found", 2 * CHUNK), ("reset", 0)):
        req = request(name, prompt, kv_transfer_params=PREFILL)
        found = prefill.match(req)
        assert found == (expected, bool(expected))
        if expected:
            assert prefill.load(req, range(11, 20), 0, expected) == set()
        else:
            prefill.allocate(req, range(21, 30), 0)
            prefill.step(new=[(req, range(21, 30), 0, len(prompt))])
        prefill.finish(req)
        assert prefill.handed_over == {"kvtier.stored_tokens": expected}
        prefill.scheduler.reset_cache()


def test_nothing_is_handed_over_after_a_failed_load(pair):
    """vLLM itself may have had a prefix that the server has lost, and that is not stored again."""
    server, prefill, _ = pair
    prompt = prefill.stored(3 * CHUNK + 1, "lost")
    prefill.wait_for_stores()
    req = request("lost", prompt, kv_transfer_params=PREFILL)
    assert prefill.match(req, CHUNK) == (2 * CHUNK, True)
    server.expect_trouble("instance|worker|register")
    server.kill()
    assert prefill.load(req, range(21, 34), CHUNK, 2 * CHUNK)
    # vLLM computes on from its own prefix, without another question.
    prefill.finish(req)
    assert prefill.handed_over == {"kvtier.stored_tokens": 0}


@pytest.mark.parametrize("stored", [None, 0, CHUNK - 1, -1, True, "x", [], float("nan"), 2 * CHUNK + 1, 10**30])
@pytest.mark.parametrize("options", [{}, {"kvtier.hand_over_timeout": 0}], ids=["waits", "never waits"])
def test_nothing_to_wait_for(place, engines, options, stored):
    """Values of clients, and waits that are switched off: the first lookup's result counts."""
    decode = Decoding(engines(place.server(), **options))
    prompt = decode.engine.stored(2 * CHUNK + 1, "there", salt="there")
    decode.engine.wait_for_stores()
    assert decode.engine.match(request("b", prompt, salt="there", kv_transfer_params={"kvtier.stored_tokens": stored})) == (2 * CHUNK, True)
    if options or type(stored) is not int or stored < CHUNK:
        assert decode.engine.match(request("c", prompt, kv_transfer_params={"kvtier.stored_tokens": stored})) == (0, False)
    assert decode.stats() == {} and decode.scheduling.errors.take() == 0


def test_no_wait_for_what_vllm_has(pair):
    """Nor for what the request may not load, nor after a reset, since keys of others are no more its own."""
    decode = pair[2]
    prompt, params = tokens(2 * CHUNK + 1, "own"), {"kvtier.stored_tokens": 2 * CHUNK}
    assert decode.engine.match(request("own", prompt, kv_transfer_params=params), 2 * CHUNK) == (0, False)
    assert decode.engine.match(request("limited", prompt, kv_transfer_params=params | {"kvtier.max_load_tokens": CHUNK - 1})) == (0, False)
    req = request("reset", prompt, kv_transfer_params=params)
    assert decode.waits(req)
    decode.engine.scheduler.reset_cache()
    assert decode.engine.match(req) == (0, False)
    assert decode.engine.match(request("later", prompt, kv_transfer_params=params)) == (0, False)
    assert decode.stats() == {"hand_overs": 1}


@pytest.mark.parametrize("model", [*MODELS, *STATES])
def test_hits_behind_a_hand_over_are_whole(place, model):
    """vLLM's schedulers, asked one behind the other: no wait is in vain, and no layer attends to wrong KV."""
    server, specs = place.server("lmcache_driven"), (MODELS | STATES)[model]
    made = [*prompts(random.Random(f"{model}-apart"), 6), [each % 4000 for each in tokens(3 * CHUNK, "exact")]]
    options = {"blocks": 600, "caching": model in STATES, "step_tokens": 64}
    prefill = Simulation(server, model, specs, **options, **{"kvtier.hand_over": True})
    decode = Simulation(server, model, specs, **options, **{"kvtier.hand_over_timeout": 20})
    found, counts, take = [], Counter(), decode.ours._scheduling.take_stats
    decode.ours._scheduling.take_stats = lambda: counts.update(decode.ours._scheduling.stats.data) or take()
    with closing(prefill), closing(decode):
        for number, prompt in enumerate(made):
            prefill.add(f"prefill-{number}", prompt, f"{number}", answer=1, extra_args={"kv_transfer_params": PREFILL})
            prefill.run()
            params, before = prefill.handed_over[f"prefill-{number}"], decode.external
            decode.add(f"decode-{number}", prompt, f"{number}", answer=3, extra_args={"kv_transfer_params": params})
            decode.run()
            found.append(decode.external - before)
        assert prefill.errors == decode.errors == decode.left == 0
        assert counts["lookups"] and not counts["hand_over_timeouts"]
    # Without its last token, which models with windows or states compute.
    chunk = decode.ours._scheduling.chunk
    assert found == [(len(prompt) - 1) // chunk * chunk for prompt in made]


def shared_storage(body):
    """What llm-d's sidecar makes of a request with `shared-storage`: for the prefill engine, and for the other, whatever the first answers
    (pkg/sidecar/proxy/connector_shared_storage.go in llm-d-router of 2026-08-22)."""
    sent = body | {"cache_hit_threshold": 0}
    return sent | {"max_tokens": 1, "max_completion_tokens": 1}, lambda answer: sent


def nixlv2(body):
    """The same with `nixlv2`, its default (connector_nixlv2.go there)."""
    remote = dict.fromkeys(["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"])
    prefill = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False, "kv_transfer_params": PREFILL | remote}
    return body | prefill, lambda answer: body | {"kv_transfer_params": answer}


def read(body):
    """Returns the parameters in a request as vLLM's OpenAI server reads it."""
    sent = CompletionRequest.model_validate_json(json.dumps(body))
    params = sent.to_sampling_params(sent.max_tokens, {})
    assert (params.max_tokens, sent.prompt) == (body["max_tokens"], body["prompt"])
    return (params.extra_args or {}).get("kv_transfer_params")


# proves: docs/vllm.md#disaggregated-prefill
@pytest.mark.parametrize("sidecar", [shared_storage, nixlv2])
def test_llm_d_sidecar(pair, sidecar):
    """With `shared-storage` the decode engine loads what is stored when it asks, and computes the rest; with `nixlv2` it waits."""
    _, prefill, decode = pair
    prompt, stores = tokens(3 * CHUNK + 1, "llm-d"), HeldStores(prefill)
    first, second = sidecar({"model": "m", "prompt": prompt, "max_tokens": 7, "stream": True})
    answer = prefill_in_two(prefill, prompt, read(first))
    req = request("decode", prompt, kv_transfer_params=read(second(answer)))
    stores.begin(1)
    wait_until(lambda: prefill.step() and len(prefill.scheduler._scheduling.in_flight_stores) == 1, 60, "the first store")
    if sidecar is shared_storage:
        assert decode.engine.match(req) == (CHUNK, True) and decode.lookups == 1
        assert decode.engine.load(req, range(21, 34), 0, CHUNK) == set()
        decode.engine.finish(req)
        req = request("later", prompt, kv_transfer_params=read(second(answer)))
    else:
        assert decode.waits(req)
    stores.begin()
    prefill.wait_for_stores()
    decode.now += 0.005
    assert decode.engine.match(req) == (3 * CHUNK, True)
    assert decode.engine.load(req, range(41, 54), 0, 3 * CHUNK) == set()
    assert same(decode.engine.read(range(41, 53)), prefill.read(range(1, 13)))
    assert decode.stats().get("hand_over_timeouts", 0) == 0


# proves: docs/vllm.md#disaggregated-prefill
def test_dynamo_workers(place):
    """vLLM's factory takes the class that Dynamo's table names; the decode worker waits for the prefill's stores, and no other request does."""
    server, salt = place.server("lmcache_driven"), "dynamo-cache-salt:acme"
    prompt = [each % 4000 for each in tokens(3 * CHUNK + 1, "dynamo")]
    # dynamo/vllm/kv_connector_protocols.py and handlers.py of ai-dynamo 1.6.1.
    sent = {"extra_args": {"kv_transfer_params": {}}}
    options = {"blocks": 200, "caching": False, "step_tokens": 1024, "connector": ("LMCacheMPConnector", "kvtier.vllm.dynamo")}
    prefill, decode = (Simulation(server, "dynamo", [full(4)], **options, **{"kvtier.hand_over_timeout": 60}) for _ in range(2))
    with closing(prefill), closing(decode):
        config = decode.scheduler.vllm_config.kv_transfer_config
        assert KVConnectorFactory.get_connector_class(config) is LMCacheMPConnector and KVConnectorFactory.supports_hma_config(config)
        # vLLM's MultiConnector reads its statistics so.
        assert KVConnectorFactory.get_connector_class_by_name(LMCacheMPConnector.__name__) is KvTierConnector
        stores = HeldStores(SimpleNamespace(workers=[prefill.our_worker]))
        prefill.add("prefill", prompt, salt, answer=1, min_tokens=1, **sent)
        wait_until(lambda: prefill.step() or "prefill" in prefill.handed_over, 60, "the prefill")
        decode.add("decode", prompt, salt, answer=3, **sent)
        decode.add("other", prompt, "dynamo-cache-salt:other", answer=3)
        wait_until(lambda: decode.step() or "other" in decode.handed_over, 60, "the other request")
        assert "decode" not in decode.handed_over and decode.external == 0
        stores.begin()
        prefill.finish_stores()
        decode.run()
        assert decode.external == 3 * CHUNK and prefill.errors == decode.errors == decode.left == 0


# proves: docs/vllm.md#disaggregated-prefill
@pytest.mark.parametrize("hands_over", [False, True])
def test_another_connector_answers_too(place, hands_over):
    """In older releases two answers end the engine, so kvtier's has to be asked for."""
    server, name = place.server("lmcache_driven"), f"answers {hands_over}"
    other = {
        "kv_connector": "OtherConnector", "kv_role": "kv_both", "kv_connector_module_path": "other_connector",
        "kv_connector_extra_config": {"name": name, "is_async": True, "answer": {"remote_engine_id": "nixl"}},
    }  # fmt: skip
    options = {"kvtier.hand_over": True} if hands_over else {}
    engine = Simulation(server, "answers", [full(4)], blocks=200, caching=True, step_tokens=32, beside=(other, True), **options)
    with closing(engine):
        engine.add("a", [each % 4000 for each in tokens(2 * CHUNK + BLOCK, "answers")], answer=1, extra_args={"kv_transfer_params": PREFILL})
        engine.run()
        engine.finish_stores()
        assert engine.handed_over == {"a": {"remote_engine_id": "nixl"} | ({"kvtier.stored_tokens": 2 * CHUNK} if hands_over else {})}
        assert engine.errors == 0
