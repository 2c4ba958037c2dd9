"""Our worker adapter on PyTorch's CUDA tensors, over the fake CUDA driver; torch is as it comes."""

import os
from pathlib import Path

from kvrig import torch_cuda


# proves: docs/compare.md#lmcache_driven-on-cuda
def test_torch_on_fake_gpu(place, tmp_path, monkeypatch):
    """Registration by torch's IPC handles, store and retrieve behind torch's events, in several layouts, of servers that
    would answer at the end and of such that would answer with events."""
    servers = [place.server("cuda", flags=["--gpu-reply", reply]) for reply in ("done", "event")]
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
    torch_cuda.check("cuda_engine", [server.url for server in servers], tmp_path)
    for server in servers:
        (gpu,) = server.get("/status")[1]["devices"]["cuda"]["gpus"]
        moved = {m["direction"] for m in gpu["state"]["moved"] if m["bytes"]}
        assert moved == {"store", "retrieve"}
        assert gpu["state"]["open_allocations"] == 0
