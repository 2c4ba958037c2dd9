"""PyTorch's CUDA build and LMCache's client, both unmodified, on the fake CUDA driver.

    environment(folder)         for a process that is to see the fake driver as its GPU
    check(module, urls, folder) runs `python -m MODULE URL...`, such a process
    python -m kvrig.torch_cuda URL...   one of them: engines with LMCache's adapters that store and retrieve

NVIDIA's runtime library needs more of a driver than the fake driver has, so `cudart.c` is preloaded in its place. No kernel
can run: tensors are made empty, filled and read by copies.
"""

import ctypes
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

from .server import fake_driver_library

HERE = Path(__file__).parent
LAYOUTS = ["fused_nhd", "fused_hnd", "mla"]
DRIVER, RUNTIME = "libcuda.so.1", "libcudart-fake.so"


def environment(folder):
    """Variables for a process whose GPU is the fake driver; `folder` is for libraries."""
    # Triton brings the headers of the runtime and the driver.
    headers = Path(sysconfig.get_paths()["purelib"], "triton", "backends", "nvidia", "include")
    (folder / DRIVER).symlink_to(fake_driver_library())
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{headers}", "-o", folder / RUNTIME,
         HERE / "cudart.c", f"-L{folder}", f"-l:{DRIVER}"],
        check=True,
    )  # fmt: skip
    (folder / "libnvidia-ml.so.1").symlink_to(RUNTIME)
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(folder / RUNTIME),
        "KVTIER_CUDA_FAKE_LOUD": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "LMCACHE_LOG_LEVEL": "ERROR",
        "LMCACHE_TRACK_USAGE": "false",
    }


def check(module, urls, folder, **more):
    """Run an engine with these and `more` variables; it must say that it is done, and have used the driver as a correct
    caller does."""
    command = [sys.executable, "-m", module, *urls]
    engine = subprocess.run(command, env=environment(folder) | more, capture_output=True, text=True, timeout=150)
    assert engine.returncode == 0 and engine.stdout.endswith("done\n"), engine.stdout + engine.stderr
    assert "cuda fake driver" not in engine.stderr, engine.stderr


def script(text):
    """Tell the fake driver what to pretend in this process."""
    assert ctypes.CDLL(DRIVER).fake_driver_script(text.encode()) == 0, text


class OnGpu:
    """CPU tensors as CUDA tensors: the same views into storages with the same bytes."""

    def __init__(self, mirrors):
        import torch

        self.mirrors = {}  # address of a storage in host memory: its bytes, and those on the GPU
        self.tensors = []
        for tensor in mirrors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.mirrors:
                here = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.mirrors[storage.data_ptr()] = here, torch.empty(len(here), dtype=torch.uint8, device="cuda")
            there = self.mirrors[storage.data_ptr()][1].untyped_storage()
            view = torch.empty(0, dtype=tensor.dtype, device="cuda")
            self.tensors.append(view.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride()))
        self.zeros = [torch.zeros(len(here), dtype=torch.uint8).cuda() for here, _ in self.mirrors.values()]
        self.push()

    def push(self):
        """To the GPU."""
        for here, there in self.mirrors.values():
            there.copy_(here)

    def pull(self):
        """From the GPU."""
        for here, there in self.mirrors.values():
            here.copy_(there)

    def overwrite(self):
        """Have the GPU write zeros, when it gets to it."""
        for zeros, (_, there) in zip(self.zeros, self.mirrors.values(), strict=True):
            there.copy_(zeros)


def lmcache_engine(url, name):
    """An engine with LMCache's adapters."""
    from .engine import Group
    from .layouts import layout
    from .torch_gpu import TorchEngine

    server = SimpleNamespace(url=url, chunk=16)
    return TorchEngine(server, "lmcache_driven", groups=[Group(layout(name))], mla=name == "mla", model=f"models/{name}")


def run_lmcache(url, name):
    """Store, find, retrieve elsewhere; then a store that is behind the GPU's work."""
    import torch

    from .engine import tokens

    engine = lmcache_engine(url, name)
    worker, prompt = engine.worker, tokens(64)
    assert all(tensor.is_cuda for tensor in worker.adapter.kv_caches.values())
    # By this servers know whose memory it is.
    maps = Path("/proc/self/maps").read_text()
    assert f"/dev/shm/torch_{os.getpid()}_" in maps, "PyTorch has not mapped its reference counters"
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 64)
    stored = worker.read(engine.blocks_for(64))
    target = engine.blocks_for(64, 30)
    worker.fill(target, 7)
    rest = worker.read(range(46, 64))
    request, hit = engine.lookup(prompt)
    assert worker.retrieve(request, prompt, 0, hit, target, skip=9).ok
    engine.end(request)
    loaded = worker.read(target)
    assert all((layer[:2] == 7).all() for layer in loaded), "skipped blocks were written"
    assert all(torch.equal(a[2:], b[2:]) for a, b in zip(loaded, stored, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(worker.read(range(46, 64)), rest, strict=True))

    script("hold kernel")
    worker.gpu.overwrite()
    late = tokens(64)
    worker.submit_store("late", late, 0, 64, engine.blocks_for(64))
    # The server answers another connection's request, but not this one.
    assert engine.hits(prompt) == 64
    assert not worker.stores["late"].query()
    script("release")
    assert worker.finish_store("late") is True
    request, hit = engine.lookup(late)
    assert hit == 64
    worker.fill(target, 7)
    assert worker.retrieve(request, late, 0, hit, target).ok
    assert all((layer == 0).all() for layer in worker.read(target))
    engine.close()


if __name__ == "__main__":
    for url in sys.argv[1:]:
        for name in LAYOUTS:
            run_lmcache(url, name)
    print("done")
