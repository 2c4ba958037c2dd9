"""Simulated engines whose KV cache is on a GPU, over the fake CUDA driver.

As in `engine`, the adapters, their transfer contexts, heartbeats, descriptors and wire code are LMCache's. What torch
would do on a GPU is done here instead, in three places: what `_share_cuda_` says of a storage, the name of the device,
and its events.
"""

import itertools
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from unittest import mock

import pytest
import torch
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter
from lmcache.v1.multiprocess import futures
from lmcache.v1.multiprocess.transfer_context import worker_transfer
from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper

try:
    from lmcache.v1.platform.base.ipc_wire import RawCudaIPCData, TensorMetadata
    from lmcache.v1.platform.devices.cuda.ipc_wrapper import CudaIPCWrapper, RawCudaIPCWrapper
except ImportError:  # up to 0.5.5, which pickles the wrapper itself
    from lmcache.v1.platform.cuda.ipc_wrapper import CudaIPCWrapper

from .engine import Engine, Worker
from .server import fake_driver_library
from .waiting import wait_until

# The server's mode for such engines, for tests that have several.
MODE = pytest.param("cuda", marks=pytest.mark.ours("it needs a GPU, and not only its driver"))

# Where PyTorch's allocator places storages inside an allocation.
ALIGN = 512

# What registers patches names of LMCache's modules: one at a time.
_PATCHING = threading.Lock()

_numbers = itertools.count()


class GpuProcess:
    """A process of `gpu_process`; its methods are those of `gpu_process.Gpu`. May be used by several threads."""

    def __init__(self):
        script = Path(__file__).with_name("gpu_process.py")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.lock = threading.Lock()
        self._call("open", fake_driver_library())

    def _call(self, name, *args):
        with self.lock:
            pickle.dump((name, args), self.process.stdin)
            self.process.stdin.flush()
            ok, value = pickle.load(self.process.stdout)
        if not ok:
            raise RuntimeError(value)
        return value

    def __getattr__(self, name):
        return lambda *args: self._call(name, *args)

    def kill(self):
        """SIGKILL: what a crash of the engine is to its GPU memory."""
        self.process.kill()
        self.process.wait()

    def close(self):
        """End the process; nothing may have been wrong in it. A second call does nothing."""
        if self.process.poll() is None:
            wrong = self.finish()
            self.process.stdin.close()
            self.process.wait(10)
            assert not wrong, f"the engine used the driver wrongly:\n{wrong}"


class RefCounters:
    """PyTorch's file of reference counters, by which it learns that receivers have released a storage."""

    BYTES, HEADER = 80064, 64

    def __init__(self, pid):
        self.name = f"/torch_{pid}_{os.getpid()}_{next(_numbers)}"
        self.path = Path("/dev/shm" + self.name)
        self.path.write_bytes(bytes(self.BYTES))
        self.used = 0

    def take(self):
        """A counter of a storage that is being shared: its index. It is set to 1."""
        index, self.used = self.used, self.used + 1
        with open(self.path, "r+b") as file:
            file.seek(self.HEADER + 8 * index)
            file.write(struct.pack("<q", 1))
        return index

    def values(self):
        """All counters that were taken."""
        raw = self.path.read_bytes()
        return [struct.unpack_from("<q", raw, self.HEADER + 8 * i)[0] for i in range(self.used)]


class Storage:
    """A torch storage that is on the GPU; the one in host memory is its mirror."""

    def __init__(self, gpu, mirror, base, offset):
        self.gpu, self.mirror, self.base, self.offset = gpu, mirror, base, offset
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(mirror)

    @property
    def at(self):
        """Its address on the device."""
        return self.base + self.offset

    def push(self):
        """Host to device."""
        self.gpu.write(self.at, self.bytes.numpy().tobytes())

    def pull(self):
        """Device to host."""
        self.bytes.copy_(torch.frombuffer(bytearray(self.gpu.read(self.at, self.mirror.nbytes())), dtype=torch.uint8))


class IpcEvents:
    """LMCache's event backend for CUDA: 64-byte handles of interprocess events."""

    device_type = "cuda"

    def __init__(self, gpu):
        self.gpu, self.exported, self.imported = gpu, deque(maxlen=2048), 0

    def check_event_support(self, _device):
        """They are supported."""

    def create_event(self, _device):
        """A new event."""
        return self.gpu.create_event()

    def record_event(self, event, _stream):
        """Record it behind what the engine does."""
        self.gpu.record_event(event)

    def export_event(self, event, _device):
        """Its handle."""
        self.exported.append(event)
        return self.gpu.event_handle(event)

    def import_event(self, handle, _device):
        """The server's event, of a server that answers with one."""
        self.imported += 1
        return self.gpu.open_event(handle)

    def query_event(self, event):
        """Whether it is complete."""
        return self.gpu.is_complete(event)

    def synchronize_event(self, event, _device):
        """Wait until it is."""
        wait_until(lambda: self.query_event(event), 60, "the server's event")


class TimelineEvents(IpcEvents):
    """LMCache's backend under `isolated_ipc`: a number in device memory that the stream raises, 81 bytes."""

    def __init__(self, gpu):
        super().__init__(gpu)
        self.slots, self.sequence, self.slot = gpu.allocate(4096 * 8), 0, 8
        self.handle = gpu.memory_handle(self.slots)

    def create_event(self, _device):
        """One that was never recorded, and so is complete."""
        return [0]

    def record_event(self, event, _stream):
        """The next number, behind what the engine does."""
        self.sequence += 1
        event[0] = self.sequence
        self.gpu.signal(self.slots + self.slot, self.sequence)

    def export_event(self, event, _device):
        """Version, buffer, slot, number."""
        return struct.pack("!B64sQQ", 1, self.handle, self.slot, event[0])

    def import_event(self, handle, _device):
        """Not met: no server of ours answers such an engine with an event."""
        raise AssertionError(f"the server answered with the event {handle.hex()}")


class GpuAdapter(LMCacheMPWorkerAdapter):
    """LMCache's worker adapter on tensors that are said to be on a GPU."""

    worker = None

    def _send_register_kv_caches_request(self, kv_caches):
        # Also called by the heartbeat's thread, after a restart of the server.
        worker = self.worker
        instead = {
            "wrap_kv_caches": lambda caches: [worker.wrap(tensor) for tensor in caches.values()],
            "_get_kv_device": lambda _caches: torch.device("cuda", 0),
            "get_event_ipc_backend": lambda _device: worker.events,
        }
        with _PATCHING, mock.patch.multiple(worker_transfer, **instead):
            super()._send_register_kv_caches_request(kv_caches)

    def with_events(self, submit):
        """Submits a transfer whose future opens the events of a GPU; up to 0.5.5 it looks the backend up by itself."""
        with _PATCHING, mock.patch.object(futures, "get_event_ipc_backend", lambda _device: self.worker.events):
            return submit()

    def submit_store_request(self, *args, **options):
        """As the adapter's."""
        return self.with_events(lambda: super(GpuAdapter, self).submit_store_request(*args, **options))

    def submit_retrieve_request(self, *args, **options):
        """As the adapter's."""
        return self.with_events(lambda: super(GpuAdapter, self).submit_retrieve_request(*args, **options))


class GpuWorker(Worker):
    """An engine rank whose tensors are on a GPU."""

    adapter_class = GpuAdapter

    def __init__(self, engine, rank, generator, handle_version=3, isolated=False, per_allocation=2):
        """`handle_version`: how PyTorch's memory handle begins: 3 (2.13), 2 (to 2.12), None (64 bytes, early). `isolated`:
        as with LMCache's `isolated_ipc`. `per_allocation`: number of storages that share an allocation."""
        super().__init__(engine, rank, generator)
        self.adapter.worker = self
        self.handle_version, self.isolated = handle_version, isolated
        self.gpu = GpuProcess()
        self.uuid = self.gpu.uuid()
        self.counters = RefCounters(self.gpu.process.pid)
        self.gpu.map_file(str(self.counters.path))
        self.storages = {}
        mirrors = list({t.untyped_storage().data_ptr(): t.untyped_storage() for t, _ in self.layers}.values())
        for first in range(0, len(mirrors), per_allocation):
            some = mirrors[first : first + per_allocation]
            # The first does not begin with the allocation either.
            ends = list(itertools.accumulate((-(-m.nbytes() // ALIGN) * ALIGN for m in some), initial=ALIGN))
            base = self.gpu.allocate(ends[-1])
            for mirror, offset in zip(some, ends, strict=False):
                self.storages[mirror.data_ptr()] = Storage(self.gpu, mirror, base, offset)
        self.push()
        # PyTorch says which event a storage's first bytes wait for; LMCache's servers import it.
        self.ready = self.gpu.create_event()
        self.gpu.record_event(self.ready)
        self.events = (TimelineEvents if isolated else IpcEvents)(self.gpu)

    def push(self):
        """All tensors to the device."""
        for storage in self.storages.values():
            storage.push()

    def pull(self):
        """All tensors from the device."""
        for storage in self.storages.values():
            storage.pull()

    def share(self, mirror):
        """What torch's `_share_cuda_` returns."""
        storage = self.storages[mirror.data_ptr()]
        prefix = b"" if self.handle_version is None else bytes([self.handle_version]) + b"c"
        handle = prefix + self.gpu.memory_handle(storage.base)
        name, event = self.counters.name.encode(), self.gpu.event_handle(self.ready)
        return (0, handle, mirror.nbytes(), storage.offset, name, self.counters.take(), event, True)

    def wrap(self, tensor):
        """LMCache's descriptor of a tensor."""
        with (
            mock.patch.object(torch.UntypedStorage, "_share_cuda_", lambda mirror: self.share(mirror), create=True),
            mock.patch.object(DeviceIPCWrapper, "_get_device_uuid", lambda *_: self.uuid),
        ):
            wrapper = CudaIPCWrapper.wrap(tensor)
        return as_raw(wrapper) if self.isolated else wrapper

    def recorded_event(self):
        """Of the device."""
        if hasattr(self.adapter, "create_recorded_event"):
            return super().recorded_event()
        event = self.events.create_event(None)
        self.events.record_event(event, None)
        return event

    def read(self, blocks, group=None):
        """As in host memory, from the device."""
        self.pull()
        return super().read(blocks, group)

    def fill(self, blocks, value=0, group=None):
        """As in host memory, on the device."""
        self.pull()
        super().fill(blocks, value, group)
        self.push()

    def crash(self):
        """The process of the engine ends without unregistering."""
        self.closed = True
        self.gpu.kill()
        self.counters.path.unlink()
        # No request may be sent any more: the adapter's own shutdown would unregister.
        self.adapter.transfer_ctx = None
        self.adapter.shutdown()

    def close(self):
        """Unregister, then free the memory."""
        try:
            super().close()
        finally:
            self.counters.path.unlink(missing_ok=True)
            self.gpu.close()


class GpuEngine(Engine):
    """An engine with its KV caches on GPUs."""

    def __init__(self, *args, gpu=None, **options):
        """`gpu`: options of `GpuWorker`."""
        self.gpu_options = gpu or {}
        super().__init__(*args, **options)

    def make_worker(self, rank, generator):
        """A rank on a GPU."""
        return GpuWorker(self, rank, generator, **self.gpu_options)


def as_raw(wrapper):
    """The same tensor as `RawCudaIPCWrapper` describes it, which asks the driver and not torch."""
    data = wrapper.to_wire()
    _, handle, _, offset, *_ = data.handle
    facts = data.metadata
    width = wrapper.dtype.itemsize
    metadata = TensorMetadata(facts.dtype, facts.shape, facts.stride, 0, facts.device_uuid)
    raw = RawCudaIPCData(
        version=1,
        metadata=metadata,
        ipc_handle=handle[-64:],
        alloc_offset=offset + facts.storage_offset * width,
        nbytes=torch.Size(facts.shape).numel() * width,
    )
    return RawCudaIPCWrapper.from_wire(raw)
