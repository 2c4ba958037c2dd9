"""SGLang's own radix tree, pools and linker wrapper with KvTierLinker, on CPU tensors."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import fakes
import pytest
import torch
from kvrig import torch_cuda
from kvrig.server import Server, our_command
from kvrig.waiting import wait_until

fakes.load()

import kvtier.sglang.linker  # noqa: E402
from kvtier.sglang import KvTierLinker  # noqa: E402
from kvtier.sglang.identity import Ranks  # noqa: E402
from rig import PAGE, _pools, arguments  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402

TOKENS = random.Random(1).sample(range(1 << 16), 20)


def equal(ours, theirs):
    """Whether all buffers have the same bytes."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# proves: docs/sglang.md#the-linker
@pytest.mark.parametrize("kind", ["mha", "mla", "swa", "mamba"])
def test_offloaded_pages_are_loaded_after_a_reset(serve, model, engines, kind):
    """Offload, reset, lookup, load, finish: the bytes of pages, windows and states come back, and no others change."""
    engine = engines(serve(), model("a"), kind)
    computed = engine.compute(TOKENS)
    assert engine.settle()[1] == 0
    engine.reset()
    request, hit = engine.match(TOKENS)
    assert hit == len(TOKENS)
    slots, failed = engine.load(request)
    loaded = engine.read(slots)
    if kind == "mamba":
        loaded += engine.states(request.kv.mamba_pool_idx)
    assert failed == [] and equal(loaded, computed)
    others = torch.ones(len(engine.buffers()[0]), dtype=torch.bool)
    others[slots] = False
    assert all(not buffer[others].any() for buffer in engine.buffers())


# proves: docs/sglang.md#the-linker
def test_salt_adapter_tenant_model_and_type_are_apart(serve, model, engines):
    """Pages of one are found by no other."""
    server, folder = serve(), model("a")
    first = engines(server, folder)
    first.compute(TOKENS)
    first.settle()
    others = [
        engines(server, folder, tenant="other"),
        engines(server, model("b")),
        engines(server, folder, dtype=torch.float16),
        engines(server, folder, options={"kv_cache_dtype": "fp8_e4m3"}),
        engines(server, folder, "mla"),
    ]
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    others.append(engines(server, folder))
    assert [each.match(TOKENS)[1] for each in others] == [0] * len(others)
    first.reset()
    assert first.match(TOKENS, salt="alice")[1] == first.match(TOKENS, adapter="lora")[1] == 0
    assert first.match(TOKENS)[1] == len(TOKENS)


# proves: docs/sglang.md#the-linker
def test_copies_of_a_model_share(serve, model, engines):
    """The same weights in another folder of the same name: another host."""
    server = serve()
    first = engines(server, model("a"), model_name="served")
    first.compute(TOKENS)
    first.settle()
    assert engines(server, model("b"), model_name="served").match(TOKENS)[1] == len(TOKENS)


# proves: docs/sglang.md#the-linker
def test_found_pages_stay_until_their_load_has_ended(serve, model, engines):
    """Other prompts evict all but what a lookup has found; once that is loaded, it can be evicted too."""
    engine = engines(serve(l1_gb=0.001, flags=["--eviction-trigger-watermark", "0.9"]), model("a"))
    computed = engine.compute(TOKENS)
    engine.settle()
    engine.reset()
    request, hit = engine.match(TOKENS)
    assert hit == len(TOKENS)

    def fill():
        for seed in range(24):
            engine.compute(random.Random(f"other {seed}").sample(range(1 << 16), 200))
            engine.settle()
            engine.tree._reset_full()
            engine.allocator.clear()

    fill()
    slots, failed = engine.load(request)
    assert failed == [] and equal(engine.read(slots), computed)
    engine.reset()
    fill()
    assert engine.match(TOKENS)[1] == 0


# proves: docs/sglang.md#the-linker
def test_lost_pages_fail_their_load_only(serve, model, engines):
    """Pages that are lost between lookup and load: the request is reported, and the next batch loads."""
    server = serve()
    engine = engines(server, model("a"))
    computed = engine.compute(TOKENS)
    engine.settle()
    engine.reset()
    request, _ = engine.match(TOKENS)
    assert server.post("/cache/clear", {"force": True})[0] == 200
    assert engine.load(request)[1] == [request.rid]
    assert engine.match(TOKENS)[1] == 0
    engine.reset()
    engine.compute(TOKENS)
    engine.settle()
    engine.reset()
    slots, failed = engine.load(engine.match(TOKENS)[0])
    assert failed == [] and equal(engine.read(slots), computed)


# proves: docs/sglang.md#the-linker
def test_killed_server_costs_one_load(serve, model, engines):
    """A load fails at once; lookups miss and offloads fail until the server is back, and no call waits."""
    server = serve()
    engine = engines(server, model("a"))
    computed = engine.compute(TOKENS)
    engine.settle()
    engine.reset()
    request, _ = engine.match(TOKENS)
    server.kill()
    wait_until(lambda: not engine.linker._store.client.is_healthy, 30, "the end of the connection")
    began = time.monotonic()
    assert engine.load(request)[1] == [request.rid]
    assert engine.match(TOKENS)[1] == 0
    engine.reset()
    engine.compute(TOKENS)
    assert engine.settle() == (0, 1)
    assert time.monotonic() - began < 1
    server.start()
    wait_until(lambda: is_registered(engine.linker._store), 60, "the registration")
    engine.reset()
    engine.compute(TOKENS)
    assert engine.settle() == (1, 0)
    engine.reset()
    slots, failed = engine.load(engine.match(TOKENS)[0])
    assert failed == [] and equal(engine.read(slots), computed)


def is_registered(store):
    """Whether the server knows the pool."""
    worker = store.pools["kv"][0]._registration.worker
    return store.client.is_healthy and worker is not None and worker.is_registered


# proves: docs/sglang.md#the-linker
def test_frozen_server_bounds_every_call(serve, model, engines):
    """A lookup ends within its 20 ms, a load and an offload within their timeout; reset and close wait for no more."""
    server = serve()
    engine = engines(server, model("a"), timeout=0.5, lookup_timeout=kvtier.sglang.linker._LOOKUP_TIMEOUT)
    engine.compute(TOKENS)
    engine.settle()
    engine.reset()
    request, _ = engine.match(TOKENS)
    with server.frozen():
        began = time.monotonic()
        assert engine.match(TOKENS)[1] == 0
        looked_up = time.monotonic()
        assert engine.load(request)[1] == [request.rid]
        assert looked_up - began < 0.2 and time.monotonic() - looked_up < 3
        engine.compute(list(reversed(TOKENS)))
        assert engine.settle() == (0, 1)
        engine.compute(list(range(40)))
        engine.tree.reset()
        assert engine.linker.num_completed_offloads() == 0
        assert time.monotonic() - began < 6


# proves: docs/sglang.md#the-linker
def test_server_that_comes_later_is_used(serve, model, engines):
    """An engine that starts without a server registers with the first one."""
    server = serve(begins=False)
    engine = engines(server, model("a"))
    engine.compute(TOKENS)
    assert engine.settle() == (0, 1)
    server.start()
    wait_until(lambda: is_registered(engine.linker._store), 60, "the registration")
    engine.reset()
    engine.compute(TOKENS)
    assert engine.settle() == (1, 0)


# proves: docs/sglang.md#options
def test_flush_forgets_all(serve, model, engines):
    """After an update of the weights, KV of the old ones is not found, and that of new ones not stored under their names."""
    server, folder = serve(), model("a")
    engine, other = engines(server, folder), engines(server, folder)
    old = engine.compute(TOKENS)
    engine.settle()
    for engine.weights in (1, 2):
        engine.tree.reset()
        engine.reset()
        assert engine.match(TOKENS)[1] == 0
        new = engine.compute(TOKENS)
        engine.settle()
        engine.reset()
        assert equal(engine.read(engine.load(engine.match(TOKENS)[0])[0]), new)
    assert equal(other.read(other.load(other.match(TOKENS)[0])[0]), old) and not equal(old, new)


# proves: docs/sglang.md#options
def test_ranks_forget_alike(tmp_path):
    """The first rank stores pages that all load."""
    program = (
        "import sys, torch.distributed as d; from kvtier.sglang.identity import shared_nonce\n"
        "d.init_process_group('gloo', init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)\n"
        "groups = [d.new_group([1, 0], backend='gloo'), d.group.WORLD]\n"
        "print([shared_nonce(group).hex() for group in groups])"
    )
    stubs = "import sys, types; sys.modules['kvtier.sglang'] = m = types.ModuleType('kvtier.sglang'); m.__path__ = [sys.argv[3]]\n"
    command = [sys.executable, "-c", stubs + program, f"file://{tmp_path}/ranks"]
    started = [subprocess.Popen([*command, str(rank), str(Path(kvtier.sglang.__file__).parent)], stdout=subprocess.PIPE) for rank in range(2)]
    first, second = (each.communicate(timeout=60)[0] for each in started)
    assert first == second and first


# proves: docs/sglang.md#the-linker
def test_start_that_raises_is_a_failure(serve, model, engines, monkeypatch):
    """An offload is counted, and a load is reported."""
    engine = engines(serve(), model("a"))
    engine.compute(TOKENS)
    engine.settle()
    engine.reset()
    request, _ = engine.match(TOKENS)
    monkeypatch.setattr(engine.linker._store, "transfer", lambda *_, **__: 1 / 0)
    assert engine.load(request)[1] == [request.rid]
    engine.compute(list(range(40)))
    assert engine.settle() == (0, 1)


class Broken:
    """A worker that raises."""

    def __init__(self, worker, name):
        self.worker, self.name = worker, name

    def __getattr__(self, name):
        if name == self.name:
            raise RuntimeError("broken")
        return getattr(self.worker, name)


# proves: docs/sglang.md#the-linker
@pytest.mark.parametrize("call", ["submit", "take_finished"])
def test_worker_that_raises_fails_transfers(serve, model, engines, call):
    """Nothing waits for a result that will not come."""
    engine = engines(serve(), model("a"), timeout=0.2)
    (pool,) = engine.linker._store.pools["kv"]
    wait_until(lambda: is_registered(engine.linker._store), 60, "the registration")
    worker, pool._registration.worker = pool._registration.worker, Broken(pool._registration.worker, call)
    for tokens in (TOKENS, list(range(40))):
        engine.compute(tokens)
        assert engine.settle() == (0, 1)
    assert not pool._transfers
    pool._registration.worker = worker


# proves: docs/sglang.md#the-linker
def test_cancelled_load_writes_nothing(serve, model, engines):
    """The slots of a request that is released before its batch stay as they are, and its leases end."""
    server = serve()
    engine = engines(server, model("a"))
    engine.compute(TOKENS)
    engine.settle()
    engine.reset()
    request, _ = engine.match(TOKENS)
    engine.tree.linker.load_back(request)
    engine.tree.linker.release_request(request.rid)
    assert engine.tree.ready_to_load_host_cache() == -1 and engine.tree.linker.finish_loads() == []
    assert not any(buffer.any() for buffer in engine.buffers())
    assert request.rid not in engine.linker._sessions


def linker(server, folder, pool, page):
    """A linker without a tree."""
    params = CacheInitParams(False, None, SimpleNamespace(get_kvcache=lambda: pool), page)
    extra = {"url": server.url, "lookup_timeout": 30.0}
    return KvTierLinker(arguments(folder), params, components={ComponentType.FULL}, extra_config=extra)


# proves: docs/sglang.md#the-linker
def test_pools_as_sglang_describes_them(serve, model):
    """Sparse attention has an index beside its latents, with pages as rows: both are stored and loaded."""
    runtime_context.get_parallel().override_permanently(attn_dcp_size=1)
    pool = DSATokenToKVPool(
        size=256, page_size=64, kv_lora_rank=16, qk_rope_head_dim=8, kv_cache_dim=24, index_head_dim=128, layer_num=2, device="cpu",
        dtype=torch.bfloat16, enable_memory_saver=False,
    )  # fmt: skip
    made = linker(serve(), model("a"), pool, 64)
    keys, slots = [f"{number:064x}" for number in range(2)], torch.arange(64, 192)
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        buffer.copy_(torch.randint(0, 100, buffer.shape))
    before = [buffer.clone() for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer)]
    assert made.offload([PoolTransfer(PoolName.KV, keys=keys, device_indices=slots)])
    wait_until(made.num_completed_offloads, 30, "the offload")
    assert made.pop_completed_offload() and sorted(made.pools) == [PoolName.INDEXER, PoolName.KV]
    assert made.lookup("r", [PoolTransfer(PoolName.KV, keys=keys)]) == [1, 2]
    assert made.load("r", [PoolTransfer(PoolName.KV, keys=keys, device_indices=slots + 64)])
    assert made.finish_layer_wise_loading(made.start_layer_wise_loading())
    for buffer, old in zip((*pool.kv_buffer, *pool.index_k_with_scale_buffer), before, strict=True):
        page = 1 if buffer.dtype == torch.uint8 else 64
        assert torch.equal(buffer[2 * page : 4 * page], old[page : 3 * page]) and torch.equal(buffer[: 2 * page], old[: 2 * page])
    made.close()


# proves: docs/sglang.md#the-linker
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_ranks_share_only_replicated_pages(serve, model, monkeypatch, kind):
    """Each rank has its own piece of a page, except of latents, which the first one stores for all."""
    server, folder, keys, slots = serve(), model("a"), [f"{number:064x}" for number in range(3)], torch.arange(PAGE, 4 * PAGE)
    pools, ranks = [_pools(kind, torch.bfloat16)[0] for _ in range(2)], []
    for rank, pool in enumerate(pools):
        monkeypatch.setattr(kvtier.sglang.linker, "_ranks", lambda *_, rank=rank: Ranks(rank, 2))
        ranks.append(linker(server, folder, pool, PAGE))
        (pool.kv_buffer if kind == "mla" else pool.k_buffer)[0].fill_(rank + 1)
    for rank in reversed(ranks):
        rank.offload([PoolTransfer(PoolName.KV, keys=keys, device_indices=slots)])
        wait_until(rank.num_completed_offloads, 30, "the offload")
        assert rank.pop_completed_offload()
        assert ranks[0].lookup("r", [PoolTransfer(PoolName.KV, keys=keys)]) == ([1, 2, 3] if rank is ranks[0] else [])
    assert ranks[1].lookup("r", [PoolTransfer(PoolName.KV, keys=keys)]) == [1, 2, 3]
    ranks[1].load("r", [PoolTransfer(PoolName.KV, keys=keys, device_indices=slots + 4 * PAGE)])
    assert ranks[1].finish_layer_wise_loading(ranks[1].start_layer_wise_loading())
    loaded = (pools[1].kv_buffer if kind == "mla" else pools[1].k_buffer)[0][slots + 4 * PAGE]
    assert (loaded == (1 if kind == "mla" else 2)).all()
    for rank in ranks:
        rank.close()


# proves: docs/sglang.md#the-linker
def test_pages_on_a_gpu(model, tmp_path, monkeypatch):
    """On the fake driver: registration by torch's IPC handles, copies by the server, behind the forward's stream."""
    server = Server(our_command(), tmp_path / "server.log", "cuda")
    server.start()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])))
    torch_cuda.check("on_gpu", [str(model("a")), server.url], tmp_path)
    (gpu,) = server.get("/status")[1]["devices"]["cuda"]["gpus"]
    assert {moved["direction"] for moved in gpu["state"]["moved"] if moved["bytes"]} == {"store", "retrieve"}
    assert server.stop()[0] == 0 and not server.unexpected_trouble()
