"""The tier below vLLM's OffloadingConnector, called as vLLM's scheduler does: what a real vLLM (tests/vllm/tiered.py) cannot show."""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from kvrig.proxy import Proxy
from kvrig.server import free_port
from kvrig.waiting import wait_until

pytest.importorskip("vllm")

from kvtier.vllm import tier as module  # noqa: E402
from vllm.v1.kv_offload import config as vllm_config  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402

ROWS, ROW = 16, 4096
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def offloading_config(**more):
    """What vLLM tells a tier of a model."""
    parallel = vllm_config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
    parts = {
        "groups": (vllm_config.OffloadingGroupConfig(16, ("layer.0",), 0),), "worker_kv_bytes_per_block": ROW,
        "enable_kv_cache_events": True, "extra_config": {}, "engine_id": "engine",
        "model": vllm_config.OffloadingModelConfig("model", "float32"),
        "cache": vllm_config.OffloadingCacheConfig(16, 1), "parallel": parallel, "kv_cache_layout": "LBHNC",
    }  # fmt: skip
    return vllm_config.OffloadingConfig(**parts | more)


class Tier:
    """A tier over rows of its own, and the scheduler's part."""

    def __init__(self, server, row=ROW, **options):
        self.rows = np.random.default_rng(1).integers(0, 255, (ROWS, row), np.uint8)
        events = SimpleNamespace(enable_kv_cache_events=True)
        spec = SimpleNamespace(config=offloading_config(), kv_events_config=events)
        options = {"url": server.url, "model_name": "test", "heartbeat": 1, **options}
        self.tier = module.KvTier(spec, memoryview(self.rows), "KvTier", **options)
        self.numbers, self.results = itertools.count(), {}
        if server.process is not None:
            wait_until(self.is_up, 60, "a registration")

    def is_up(self):
        """Whether a new step finds the server, whose features are known."""
        self.tier.on_schedule_end(None)
        self.tier._poll_finds()
        return self.tier._is_up and self.tier._features is None

    def request(self, name, facts=None):
        """A request that the scheduler has added."""
        context = ReqContext(name, {module._FACTS: facts} if facts else None)
        self.tier.on_new_request(context)
        return context

    def step(self, keys, context):
        """The verdicts of one step."""
        found = [self.tier.lookup(key, context) for key in keys]
        self.tier.on_schedule_end(None)
        return found

    def lookup(self, keys, context):
        """The verdicts when all are known."""
        return wait_until(lambda: (found := self.step(keys, context)) and RETRY not in found and found, 60, "verdicts")

    def submit(self, keys, rows, context, is_load=False):
        """Starts a job; returns its number."""
        job = TransferJob(next(self.numbers), keys, np.array(rows, np.int32), is_load, context)
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return job.job_id

    def poll(self):
        """Takes results; none may come twice."""
        for result in self.tier.get_finished_jobs():
            assert result.job_id not in self.results
            self.results[result.job_id] = result

    def end(self, *jobs):
        """Whether each of the jobs succeeded, when all have ended."""

        def ended():
            self.poll()
            return all(job in self.results for job in jobs)

        wait_until(ended, 60, "the end of jobs")
        return [self.results[job].success for job in jobs]


@pytest.fixture
def tiers():
    """Factory of tiers, which end with the test."""
    made = []

    def make(*args, **options):
        made.append(Tier(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.tier.shutdown()


def keys_of(name, count=4):
    """Keys of vLLM's form: a hash, and the number of a group."""
    return [f"{name}-{number}".encode().ljust(36, b"\0") for number in range(count)]


def sessions(server):
    """Sessions that the server has."""
    return server.get("/status")[1]["active_sessions"]


def test_each_job_has_one_exact_result(place, tiers):
    """Loads bring what was stored, in any order; one with a missing chunk fails as a whole, and its chunks are computed."""
    tier = tiers(place.server())
    keys, context = keys_of("exact"), tier.request("a")
    assert tier.lookup(keys, context) == [MISS] * 4
    assert tier.end(tier.submit({keys[2], keys[0]}, [0, 1], context), tier.submit([keys[3]], [2], context)) == [True, True]
    tier.tier.on_request_finished(context)
    context = tier.request("b")
    found = tier.lookup(keys, context)
    assert found == [HIT, MISS, HIT, HIT]
    order = list({keys[2], keys[0]})
    assert tier.end(tier.submit([keys[3], *order], [10, 11, 12], context, is_load=True)) == [True]
    assert (tier.rows[10:13] == tier.rows[[2, 0, 1]]).all()
    assert tier.end(tier.submit(keys[:2], [13, 14], context, is_load=True)) == [False]
    assert tier.step(keys, context) == [MISS, MISS, HIT, HIT]
    tier.poll()
    assert len(tier.results) == 4


def test_leases_end_with_the_last_request(place, tiers):
    """A lookup asks for the new keys of one request and step. Its leases are for all that use its verdicts."""
    server = place.server()
    tier = tiers(server)
    keys, context = keys_of("leases"), tier.request("a")
    assert tier.end(tier.submit(keys, range(4), context)) == [True]
    assert sessions(server) == 0
    assert tier.lookup(keys[:3], context) == [HIT] * 3
    other = tier.request("b")
    assert tier.lookup(keys, other) == [HIT] * 4
    assert sessions(server) == 2
    tier.tier.on_request_finished(context)
    tier.tier._client.noop().result(10)
    assert sessions(server) == 2
    tier.tier.on_request_finished(other)
    wait_until(lambda: sessions(server) == 0, 60, "the end of leases")
    # One that ends before its answer.
    context = tier.request("c")
    assert tier.step(keys, context) == [RETRY] * 4
    tier.tier.on_request_finished(context)
    wait_until(lambda: not tier.tier.has_pending_work() or tier.tier.on_schedule_end(None), 60, "the answer")
    wait_until(lambda: sessions(server) == 0, 60, "the end of leases")
    assert not tier.tier._verdicts and not tier.tier._requests


def test_leases_end_with_the_load(place, tiers):
    """vLLM has what was loaded: a long request leases nothing until its end."""
    server = place.server()
    tier = tiers(server)
    keys, context = keys_of("loaded"), tier.request("a")
    assert tier.end(tier.submit(keys, range(4), context)) == [True]
    assert tier.lookup(keys, context) == [HIT] * 4 and sessions(server) == 1
    assert tier.end(tier.submit(keys, range(4, 8), context, is_load=True)) == [True]
    wait_until(lambda: sessions(server) == 0, 60, "the end of leases")
    assert tier.lookup(keys, context) == [HIT] * 4


def test_keys_that_two_requests_ask_for_at_once_leave_no_lease(place, tiers):
    """A reset makes the unsent keys of a request misses, which the next request asks for in the same step."""
    server = place.server()
    tier = tiers(server)
    keys, first, second = keys_of("twice"), tier.request("a"), tier.request("b")
    tier.tier._generation = b"x"
    assert tier.end(tier.submit(keys, range(4), first)) == [True]
    assert [tier.tier.lookup(key, first) for key in keys] == [RETRY] * 4
    tier.tier.drain_jobs()
    tier.tier._generation = b"x"
    assert [tier.tier.lookup(key, second) for key in keys] == [RETRY] * 4
    assert tier.lookup(keys, second) == [HIT] * 4
    for context in (first, second):
        tier.tier.on_request_finished(context)
    wait_until(lambda: not tier.tier.has_pending_work() or tier.tier.on_schedule_end(None), 60, "the answers")
    wait_until(lambda: sessions(server) == 0, 60, "the end of leases")


def test_hashes_that_can_be_made_are_refused():
    """Prompts of one hash would share KV."""
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="xxhash"))
    with pytest.raises(ValueError, match="prefix_caching_hash_algo: xxhash; the tier needs sha256"):
        module._identity(config, None, "model")


def test_store_without_space_for_all_takes_the_beginning(place, tiers):
    """vLLM names the chunks of a store in any order; a prompt without its first chunk is no hit."""
    # L1 has space for 32 rows, and a quarter of it may be written at once.
    server = place.server(l1_gb=2 / 1024)
    server.expect_trouble("staged and not committed bytes are at the limit")
    tier = tiers(server, row=1 << 16)
    keys, context = keys_of("beginning", ROWS), tier.request("a")
    for at, key in enumerate(keys):
        context.set_offload_key_position(key, 16 * (at + 1))
    assert tier.end(tier.submit(set(keys), range(ROWS), context)) == [True]
    found = tier.lookup(keys, context)
    assert 0 < found.count(HIT) < ROWS
    assert found == [HIT] * found.count(HIT) + [MISS] * found.count(MISS)


def test_touched_chunks_are_evicted_last(place, tiers):
    """A touch counts as a use, and leaves no lease."""
    server = place.server(l1_gb=2 / 1024)
    tier = tiers(server, row=1 << 16)
    context = tier.request("a")
    for number in range(12):
        assert tier.end(tier.submit(keys_of(f"{number}"), range(4), context)) == [True]
        tier.tier.touch(keys_of("0"), context)
        wait_until(lambda: tier.is_up() and not tier.tier.has_pending_work(), 60, "the answer")
    wait_until(lambda: sessions(server) == 0, 60, "the end of leases")
    assert tier.lookup(keys_of("0") + keys_of("1"), context) == [HIT] * 4 + [MISS] * 4


def test_requests_that_end_before_the_step_leave_shared_keys(place, tiers):
    """A key that another request waits for is asked all the same; one that was missed, again for a later request."""
    tier = tiers(place.server())
    keys, first, second = keys_of("shared"), tier.request("a"), tier.request("b")
    assert [tier.tier.lookup(key, first) for key in keys] == [RETRY] * 4
    assert tier.tier.lookup(keys[1], second) == RETRY
    tier.tier.on_request_finished(first)
    assert tier.lookup(keys, second) == [MISS] * 4
    assert tier.end(tier.submit(keys, range(4), second)) == [True]
    third = tier.request("c")
    assert tier.step(keys, third) == [RETRY] * 4
    assert tier.lookup(keys, third) == tier.step(keys, second) == [HIT] * 4


# proves: docs/vllm.md#below-vllms-offloadingconnector
def test_drain_waits_for_jobs_and_forgets(place, tiers):
    """Every result is there at the return, and nothing from before a reset is found."""
    tier = tiers(place.server())
    keys, context = keys_of("drain", ROWS), tier.request("a")
    jobs = [tier.submit([key], [row], context) for row, key in enumerate(keys)]
    tier.tier.drain_jobs()
    tier.poll()
    assert [tier.results[job].success for job in jobs] == [True] * ROWS
    assert tier.lookup(keys, tier.request("b")) == [MISS] * ROWS
    assert tier.end(tier.submit(keys, range(ROWS), context)) == [True]
    assert tier.lookup(keys, tier.request("c")) == [HIT] * ROWS


# proves: docs/vllm.md#below-vllms-offloadingconnector
def test_silent_server_bounds_each_wait(place, tiers):
    """Lookups, loads, stores and a drain end at their deadline, and no other call waits."""
    server = place.server()
    tier = tiers(server, lookup_timeout=0.3, timeout=1, heartbeat=60)
    keys, context = keys_of("silent"), tier.request("a")
    assert tier.end(tier.submit(keys, range(4), context)) == [True]
    with server.frozen():
        began = time.monotonic()
        assert tier.lookup(keys, context) == [MISS] * 4
        assert 0.2 < time.monotonic() - began < 5
        began = time.monotonic()
        jobs = [tier.submit(keys, range(4, 8), context, is_load=bool(number % 2)) for number in range(12)]
        assert tier.end(*jobs) == [False] * 12
        assert 0.5 < time.monotonic() - began < 6
        last = tier.submit(keys_of("last"), range(4), context)
        tier.tier.drain_jobs()
        assert tier.end(last) == [False]
    assert tier.tier.get_stats().data["data"]["vllm:kv_offload_kvtier_failed_finds"] == {(): 1}


def test_absent_server_costs_no_time(place, tiers):
    """Misses and failed jobs at once; a later server is used."""
    server = place.server(start=False)
    tier = tiers(server)
    keys, context = keys_of("absent"), tier.request("a")
    assert tier.step(keys, context) == [MISS] * 4
    job, load = tier.submit(keys, range(4), context), tier.submit(keys, range(4), context, is_load=True)
    tier.poll()
    assert not tier.results[job].success and not tier.results[load].success
    tier.tier.drain_jobs()
    tier.tier._generation = b""
    server.start()
    wait_until(tier.is_up, 60, "a registration")
    assert tier.end(tier.submit(keys, range(4), context)) == [True]
    assert tier.lookup(keys, tier.request("b")) == [HIT] * 4


def test_server_without_operations_by_key_is_not_used(place, tiers):
    """An earlier release, or one that takes the place of a newer one."""
    server = place.server()
    proxy = Proxy(server.url, free_port(), hidden=["kvtier.objects.1"])
    place.proxies.append(proxy)
    tier = tiers(SimpleNamespace(url=proxy.url, process=None))
    wait_until(lambda: not tier.is_up() and tier.tier._features is None and tier.tier._connection > 0, 60, "the server's features")
    context = tier.request("a")
    assert tier.step(keys_of("older"), context) == [MISS] * 4
    job = tier.submit(keys_of("older"), range(4), context)
    tier.poll()
    assert not tier.results[job].success


def test_tenants_adapters_and_unknown_contents(place, tiers):
    """A key is found with the same salt and adapter only, and never if the request has contents that no key has."""
    tier = tiers(place.server())
    keys = keys_of("facts")
    known = {
        "alice": module.Facts("alice"), "adapter": module.Facts(adapter=b"adapter"), "plain": module.Facts(),
    }  # fmt: skip
    for name, facts in known.items():
        context = tier.request(name, facts)
        assert tier.lookup(keys, context) == [MISS] * 4
        assert tier.end(tier.submit(keys, range(4), context)) == [True]
        tier.tier.on_request_finished(context)
    for name, facts in known.items():
        context = tier.request(name, facts)
        assert tier.lookup(keys, context) == [HIT] * 4
        tier.tier.on_request_finished(context)
    for facts in (module.Facts("bob"), module.Facts("alice", b"adapter"), module.Facts(is_known=False), module.Facts("no@salt")):
        context = tier.request("other", facts)
        assert tier.lookup(keys, context) == [MISS] * 4
        tier.tier.on_request_finished(context)
    context = tier.request("unknown", module.Facts(is_known=False))
    assert tier.end(tier.submit(keys, range(4), context)) == [False]
    context = tier.request("invalid", module.Facts("no@salt"))
    assert tier.end(tier.submit(keys, range(4), context)) == [False]


# proves: docs/vllm.md#below-vllms-offloadingconnector
def test_events_and_counts_have_what_the_server_took(place, tiers):
    """An event for each stored chunk, under the tier's name; none for one that the server has."""
    tier = tiers(place.server(), enable_kv_events=True, locality="REMOTE")
    keys, context = keys_of("events"), tier.request("a")
    for wanted in (keys[:2], keys):
        assert tier.end(tier.submit(wanted, range(len(wanted)), context)) == [True]
    events = list(tier.tier.take_events())
    assert [(each.keys, each.medium.value, each.removed, each.locality.value, each.ownership) for each in events] == [
        (keys[:2], "STORAGE", False, "REMOTE", "KvTier"), (keys[2:], "STORAGE", False, "REMOTE", "KvTier"),
    ]  # fmt: skip
    assert tier.tier.take_events() == ()
    stats = tier.tier.get_stats()
    assert stats.data["data"] == {"vllm:kv_offload_kvtier_stored_keys": {(): 4}}
    assert tier.tier.get_stats() is None
    assert set(stats.data["data"]) <= set(module.KvTier.build_metric_definitions({}))


# proves: docs/vllm.md#below-vllms-offloadingconnector
def test_all_that_changes_rows_is_in_the_name():
    """A canonical row is the same for all ranks, any other is not."""
    config, row = offloading_config(), 8192
    group, parallel = config.groups[0], config.parallel
    changed = [
        offloading_config(**each)
        for each in (
            {"groups": (replace(group, tokens_per_block=32),)}, {"groups": (replace(group, layer_names=("layer.1",)),)},
            {"model": replace(config.model, dtype="float8")}, {"cache": replace(config.cache, blocks_per_chunk=2)},
            {"kv_cache_layout": "LBNHC"}, {"worker_kv_bytes_per_block": 2 * ROW}, {"parallel": replace(parallel, tp_size=2)},
            {"parallel": replace(parallel, pp_size=2)}, {"canonical_layout": True}, {"replicated_layout": True},
        )
    ]  # fmt: skip
    digests = {module._row_digest(each, row) for each in [config, *changed]} | {module._row_digest(config, 2 * row)}
    assert len(digests) == 2 + len(changed)
    same = [
        offloading_config(**each)
        for each in ({"model": replace(config.model, name="other")}, {"engine_id": "x"}, {"parallel": replace(parallel, data_parallel_index=1)})
    ]
    assert {module._row_digest(each, row) for each in [config, *same]} == {module._row_digest(config, row)}
    canonical = [
        offloading_config(canonical_layout=True, worker_kv_bytes_per_block=size, parallel=replace(parallel, tp_size=ranks, is_parallelism_agnostic=portable))
        for ranks, size in ((1, ROW), (2, ROW // 2))
        for portable in (True, False)
    ]
    assert len({module._row_digest(each, row) for each in canonical}) == 3


def test_connector_shows_facts_for_one_call():
    """vLLM's request is as before afterwards."""
    seen = []
    connector = object.__new__(module.OffloadingConnector)
    connector.connector_scheduler = SimpleNamespace(on_new_request=lambda request: seen.append(request.kv_transfer_params))
    connector._contents = SimpleNamespace(are_known=lambda request: request.lora_request is None, adapter=lambda lora: None)
    for params in (None, {"max_load_tokens": 5}):
        request = SimpleNamespace(kv_transfer_params=params, cache_salt="alice", lora_request=None)
        connector.on_new_request(request)
        assert request.kv_transfer_params is params
    connector.on_new_request(SimpleNamespace(kv_transfer_params=None, cache_salt=None, lora_request="adapter"))
    known = {module._FACTS: module.Facts("alice")}
    assert seen == [known, {"max_load_tokens": 5, **known}, {module._FACTS: module.Facts(is_known=False)}]


def test_options_are_checked(place, tiers):
    """The message names the option."""
    server = place.server(start=False)
    for wrong, text in (
        ({"model_name": ""}, "model_name.*kvtier.vllm.tier"), ({"model_name": "a@b"}, "model_name"), ({"timeout": 0}, "timeout"),
        ({"lookup_timeout": -1}, "lookup_timeout"), ({"locality": "near"}, "near"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            tiers(server, **wrong)
