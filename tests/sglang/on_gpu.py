"""The linker on PyTorch's CUDA tensors: `python -m on_gpu MODEL URL`, for `kvrig.torch_cuda.check`."""

import sys
from types import SimpleNamespace

import fakes
import torch
from kvrig.torch_cuda import OnGpu, script
from kvrig.waiting import wait_until

fakes.load()

from kvtier.sglang import KvTierLinker  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402

PAGE, KEYS = 4, [f"{number:064x}" for number in range(3)]


def main(folder, url):
    """Offloads and loads, then offloads behind the GPU's queued work."""
    mirrors = [torch.randint(0, 100, (64, 2, 8)).to(torch.bfloat16) for _ in range(6)]
    gpu = OnGpu(mirrors)
    pool = object.__new__(MHATokenToKVPool)
    vars(pool).update(k_buffer=gpu.tensors[:3], v_buffer=gpu.tensors[3:], dtype=torch.bfloat16, start_layer=0, end_layer=2)
    vars(pool).update(kv_cache_layout="nhd", k_scale_buffer=None)
    params = CacheInitParams(False, None, SimpleNamespace(get_kvcache=lambda: pool), PAGE)
    args, extra = SimpleNamespace(model_path=folder, tp_size=1), {"url": url, "lookup_timeout": 30.0}
    forward = torch.cuda.Stream()
    linker = KvTierLinker(args, params, components={ComponentType.FULL}, extra_config=extra, forward_stream=forward)
    # No kernel can run, and these are no pages.
    slots = torch.arange(PAGE, 4 * PAGE)
    stored = [mirror[slots].clone() for mirror in mirrors]
    rest = [mirror[: 8 * PAGE].clone() for mirror in mirrors]
    linker.offload([PoolTransfer(PoolName.KV, keys=KEYS, device_indices=slots)])
    wait_until(linker.num_completed_offloads, 60, "the offload")
    assert linker.pop_completed_offload()
    assert linker.lookup("r", [PoolTransfer(PoolName.KV, keys=KEYS)]) == [1, 2, 3]
    linker.load("r", [PoolTransfer(PoolName.KV, keys=KEYS, device_indices=slots + 7 * PAGE)])
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    linker.layer_done_counter.wait_until(0)
    assert linker.finish_layer_wise_loading(index)
    gpu.pull()
    assert all(torch.equal(mirror[slots + 7 * PAGE], old) for mirror, old in zip(mirrors, stored, strict=True))
    assert all(torch.equal(mirror[: 8 * PAGE], old) for mirror, old in zip(mirrors, rest, strict=True))

    script("hold kernel")
    with torch.cuda.stream(forward):
        gpu.overwrite()
    late = [key[::-1] for key in KEYS[1:]]
    linker.offload([PoolTransfer(PoolName.KV, keys=late, device_indices=slots[: 2 * PAGE])])
    assert linker.lookup("s", [PoolTransfer(PoolName.KV, keys=late)]) == []
    assert linker.num_completed_offloads() == 0, "stored before the forward had ended"
    script("release")
    wait_until(linker.num_completed_offloads, 60, "the late offload")
    assert linker.pop_completed_offload()
    linker.load("t", [PoolTransfer(PoolName.KV, keys=late, device_indices=slots[: 2 * PAGE] + 9 * PAGE)])
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    gpu.pull()
    assert all((mirror == 0).all() for mirror in mirrors)
    linker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("done")
