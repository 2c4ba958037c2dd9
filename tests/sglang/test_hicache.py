"""SGLang's own radix tree, host pools and cache controller with KvTierStorage, on CPU tensors."""

import random
import time
from types import SimpleNamespace

import fakes
import pytest
import torch
from kvrig.waiting import wait_until

fakes.load()

from kvtier.sglang import KvTierStorage  # noqa: E402
from rig import PAGE  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool  # noqa: E402
from test_linker import equal, is_registered  # noqa: E402

TOKENS = random.Random(2).sample(range(1 << 16), 20)
PAGES = len(TOKENS) // PAGE
KEYS = [f"{number:064x}" for number in range(8)]
LAYOUTS = ["layer_first", "page_first", "page_first_direct"]


# proves: docs/sglang.md#hicache
@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_pages_are_loaded_after_a_reset(serve, model, engines, layout, kind):
    """Write-through to the host pool and the storage, reset, prefetch, load: the same bytes."""
    engine = engines(serve(), model("a"), kind, layout)
    computed = engine.compute(TOKENS)
    assert engine.settle() == [True] * PAGES
    engine.reset()
    engine.host.kv_buffer.zero_()
    assert engine.match(TOKENS)[1] == 0
    request, hit = engine.prefetch(TOKENS)
    assert hit == len(TOKENS)
    slots = engine.load(request)
    assert len(slots) == len(TOKENS) and equal(engine.read(slots), computed)


# proves: docs/sglang.md#hicache
def test_salt_adapter_tenant_model_and_layout_are_apart(serve, model, engines):
    """Pages of one are found by no other."""
    server, folder = serve(), model("a")
    first = engines(server, folder, layout="page_first")
    first.compute(TOKENS)
    first.settle()
    others = [
        engines(server, folder, layout="page_first", tenant="other"),
        engines(server, model("b"), layout="page_first"),
        engines(server, folder, layout="page_first", options={"kv_cache_dtype": "fp8_e4m3"}),
        engines(server, folder, layout="page_first_direct"),
        engines(server, folder, "mla", layout="page_first"),
    ]
    assert [each.prefetch(TOKENS)[1] for each in others] == [0] * len(others)
    first.reset()
    assert first.prefetch(TOKENS, salt="alice")[1] == first.prefetch(TOKENS, adapter="lora")[1] == 0
    assert first.prefetch(TOKENS)[1] == len(TOKENS)


# proves: docs/sglang.md#hicache
def test_lost_pages_are_misses(serve, model, engines):
    """What is lost between lookup and load is computed: the load says so."""
    server = serve()
    engine = engines(server, model("a"), layout="page_first")
    slots = torch.arange(PAGE, PAGE * 9)
    assert engine.storage.batch_set_v1(KEYS, slots) == [True] * 8
    assert engine.storage.batch_exists([*KEYS[:3], "f" * 64, *KEYS[4:]]) == 3
    assert engine.storage.batch_exists(KEYS) == 8 and engine.storage.exists(KEYS[5])
    assert server.post("/cache/clear", {"force": True})[0] == 200
    assert engine.storage.batch_get_v1(KEYS, slots) == [False] * 8
    assert engine.storage.batch_exists(KEYS) == 0
    # A request that does not fit the pool is no error of the engine.
    assert engine.storage.batch_get_v1(KEYS, slots[:-1]) == [False] * 8


# proves: docs/sglang.md#hicache
def test_found_pages_stay_for_their_load(serve, model, engines):
    """Others are evicted first. The leases end with the load of the last page."""
    engine = engines(serve(l1_gb=0.001), model("a"), layout="page_first")
    slots = torch.arange(PAGE, PAGE * 9)
    engine.storage.batch_set_v1(KEYS, slots)
    assert engine.storage.batch_exists(KEYS) == 8

    def fill():
        for number in range(1, 400):
            engine.storage.batch_set_v1([f"{number:08x}{key[8:]}" for key in KEYS], slots)

    fill()
    assert engine.storage.batch_exists([f"{1:08x}{key[8:]}" for key in KEYS]) == 0
    assert engine.storage.batch_get_v1(KEYS[:4], slots[: 4 * PAGE]) == [True] * 4
    assert len(engine.storage._leases) == 1
    assert engine.storage.batch_get_v1(KEYS[4:], slots[4 * PAGE :]) == [True] * 4
    fill()
    assert not engine.storage._leases and engine.storage.batch_exists(KEYS) == 0


# proves: docs/sglang.md#options
def test_clear_forgets_all(serve, model, engines):
    """For this engine: others still find what was stored."""
    server, folder, slots = serve(), model("a"), torch.arange(PAGE, PAGE * 9)
    cleared, other = (engines(server, folder, layout="page_first").storage for _ in range(2))
    cleared.batch_set_v1(KEYS, slots)
    cleared.clear()
    assert (cleared.batch_exists(KEYS), other.batch_exists(KEYS)) == (0, 8)
    assert cleared.batch_set_v1(KEYS[:3], slots[: 3 * PAGE]) == [True] * 3 and cleared.batch_exists(KEYS) == 3


# proves: docs/sglang.md#hicache
def test_no_call_waits_for_a_server_that_is_away(serve, model, engines):
    """A frozen server costs each call its timeout, an absent one nothing; it is used again when it is back."""
    server = serve()
    engine = engines(server, model("a"), layout="page_first", timeout=0.5, lookup_timeout=0.5)
    storage, slots = engine.storage, torch.arange(PAGE, PAGE * 9)
    storage.batch_set_v1(KEYS, slots)
    with server.frozen():
        for call in (storage.batch_exists, lambda keys: any(storage.batch_get_v1(keys, slots)), lambda keys: any(storage.batch_set_v1(keys, slots))):
            began = time.monotonic()
            assert not call(KEYS)
            assert time.monotonic() - began < 2
    server.kill()
    wait_until(lambda: not storage._store.client.is_healthy, 30, "the end of the connection")
    began = time.monotonic()
    assert storage.batch_exists(KEYS) == 0
    assert not any(storage.batch_get_v1(KEYS, slots) + storage.batch_set_v1(KEYS, slots))
    assert time.monotonic() - began < 0.2
    server.start()
    wait_until(lambda: is_registered(storage._store), 60, "the registration")
    assert storage.batch_set_v1(KEYS, slots) == [True] * 8 and storage.batch_exists(KEYS) == 8


# proves: docs/sglang.md#hicache
def test_side_pools_bound_the_prefix(serve, model, engines):
    """Windows end at the prefix's end, other pools have every page; a pool without bytes has all."""
    engine = engines(serve(), model("a"), layout="page_first")
    storage, host = engine.storage, engine.host
    for name in (PoolName.SWA, PoolName.INDEXER):
        # Any pool will do: each has a name in keys of its own.
        storage.register_mem_host_pool_v2(host, name)
    slots = torch.arange(PAGE, PAGE * 9)

    def transfer(name, first, last, **more):
        return PoolTransfer(name, slots[: (last - first) * PAGE], keys=KEYS[first:last], **more)

    stored = storage.batch_set_v2([transfer(PoolName.SWA, 2, 4), transfer(PoolName.SWA, 6, 7), transfer(PoolName.INDEXER, 0, 7)])
    assert stored == {PoolName.SWA: [True], PoolName.INDEXER: [True] * 7}
    storage.batch_set_v1(KEYS, slots)
    window = transfer(PoolName.SWA, 6, 8, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    result = storage.batch_exists_v2(KEYS, [window])
    assert storage.batch_get_v2([transfer(PoolName.KV, 0, 4)]) and len(storage._leases) == 1
    assert storage.batch_get_v2([transfer(PoolName.SWA, 2, 4)]) and not storage._leases
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [4])
    assert result.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.SWA: 4}
    result = storage.batch_exists_v2(KEYS, [transfer(PoolName.INDEXER, 0, 8)])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages[PoolName.INDEXER]) == (7, 7)
    assert storage.batch_get_v2([transfer(PoolName.INDEXER, 0, 7), transfer(PoolName.SWA, 0, 2)]) == {
        PoolName.INDEXER: [True] * 7,
        PoolName.SWA: [False] * 2,
    }
    storage.register_mem_host_pool_v2(LogicalHostPool(64, PAGE), PoolName.DRAFT)
    result = storage.batch_exists_v2(KEYS, [transfer(PoolName.DRAFT, 0, 8)])
    assert (result.kv_hit_pages, storage.batch_get_v2([transfer(PoolName.DRAFT, 0, 2)])) == (8, {PoolName.DRAFT: [True] * 2})


def config(rank=0, replicated=False, **extra):
    """The configuration of one of two ranks."""
    return HiCacheStorageConfig(
        tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=replicated,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="m", extra_config={"interface_v1": 1, **extra},
    )  # fmt: skip


# proves: docs/sglang.md#hicache
@pytest.mark.parametrize("replicated", [False, True])
def test_ranks_share_only_replicated_pages(serve, model, engines, replicated):
    """Each rank has its own piece of a page, except of latents, which the first one stores for all."""
    server = serve()
    engine = engines(server, model("a"), "mla" if replicated else "mha", layout="page_first")
    ranks = []
    for rank in range(2):
        ranks.append(KvTierStorage(config(rank, replicated, url=server.url, lookup_timeout=30.0), {}))
        ranks[-1].register_mem_pool_host(engine.host)
    slots = torch.arange(PAGE, PAGE * 9)
    assert ranks[0].batch_set_v1(KEYS, slots) == [True] * 8
    assert [rank.batch_exists(KEYS) for rank in ranks] == [8, 8 if replicated else 0]
    if not replicated:
        ranks[1].batch_set_v1(KEYS[:3], slots[: 3 * PAGE])
        assert [rank.batch_exists(KEYS) for rank in ranks] == [8, 3]
    for rank in ranks:
        rank.close()


# proves: docs/sglang.md#options
def test_refusals_name_what_is_allowed():
    """Wrong options end the start."""
    for extra, message in [
        ({"interface_v1": 0}, "interface_v1: 0; KvTierStorage needs 1"),
        ({"tennant": "a"}, "tennant: no such option; allowed are url, tenant"),
        ({"tenant": "a/b"}, "tenant: 'a/b'; allowed are"),
        ({"timeout": 0}, "timeout: 0; a positive number"),
        ({"url": 5555}, "url: 5555; a text is needed"),
    ]:
        with pytest.raises(ValueError, match=message):
            KvTierStorage(config(**extra), {})
    uneven = SimpleNamespace(size=16, page_size=4, layout="page_head", get_page_buffer_meta=lambda at: ([[8, 24, 0, 99][at[0] // 4]], [16]))
    with pytest.raises(ValueError, match="hicache_mem_layout: page_head; allowed are page_first"):
        from kvtier.sglang.hicache import _tensors

        _tensors(uneven, 16)
