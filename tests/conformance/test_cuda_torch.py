"""PyTorch's CUDA build and LMCache's client, both as they come, against servers on the fake driver's GPU.

What the descriptors and the events of such an engine are is PyTorch's and LMCache's word here, not ours.
"""

import os
from pathlib import Path

import pytest
from kvrig import torch_cuda

pytestmark = pytest.mark.ours("it needs a GPU, and not only its driver")


# proves: docs/compare.md#lmcache_driven-on-cuda
def test_unmodified_torch_and_lmcache(serve, tmp_path):
    """Registration, store and retrieve with torch's CUDA tensors and events, in several layouts, of servers that answer at
    the end and of such that answer with events. A store waits for what is on torch's stream."""
    servers = [serve("cuda", flags=["--gpu-reply", reply]) for reply in ("done", "event")]
    torch_cuda.check("kvrig.torch_cuda", [server.url for server in servers], tmp_path)
    for server in servers:
        (gpu,) = server.get("/status")[1]["devices"]["cuda"]["gpus"]
        moved = {m["direction"] for m in gpu["state"]["moved"] if m["bytes"]}
        assert moved == {"store", "retrieve"}
        assert gpu["state"]["open_allocations"] == 0


def test_expandable_segments(serve, tmp_path):
    """The same where PyTorch's allocator maps segments, whose memory travels as file descriptors of its process."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if os.geteuid() != 0 and scope.exists() and scope.read_text().strip() != "0":
        pytest.skip("no process may trace another here, which it takes to get its file descriptors")
    server = serve("cuda")
    torch_cuda.check("kvrig.torch_cuda", [server.url], tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    (gpu,) = server.get("/status")[1]["devices"]["cuda"]["gpus"]
    assert {m["direction"] for m in gpu["state"]["moved"] if m["bytes"]} == {"store", "retrieve"}
