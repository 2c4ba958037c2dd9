"""Pages on a GPU for `gpu.py`: with PyTorch, or with the driver alone, by ctypes, so that the fake driver can take its place."""

import atexit
import ctypes
import itertools
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np

_numbers = itertools.count()
# Bytes before the first counter in PyTorch's files.
COUNTER_HEADER = 64
SIZES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class NotHere(Exception):
    """Raised by a check that this kind of pages cannot run."""


class Torch:
    """Memory of PyTorch."""

    name = "torch"

    def __init__(self, _):
        import torch

        self.torch = torch
        torch.cuda.init()
        self.stream = torch.cuda.Stream()

    def allocate(self, count):
        """Allocates a storage of this size."""
        return TorchStorage(self.torch, count)

    def event(self, stream=None):
        """Records an event after all work so far, or after the work on a stream."""
        event = self.torch.cuda.Event(interprocess=True)
        if stream is None:
            self.torch.cuda.synchronize()
        event.record(stream or self.torch.cuda.current_stream())
        return event

    def behind_a_long_kernel(self, storage, noise, seconds):
        """Writes the bytes after a kernel of this duration; returns the event after that."""
        # Kept, so that this memory is not reused before it was read.
        self.kept = new = self.torch.from_numpy(noise).cuda()
        self.torch.cuda.synchronize()
        with self.torch.cuda.stream(self.stream):
            # In cycles of at most 2 GHz.
            self.torch.cuda._sleep(int(seconds * 2e9))
            storage.bytes.copy_(new)
        return self.event(self.stream)

    def enter(self):
        """Lets this thread use the memory, as any thread may."""

    def go_on(self):
        """Does nothing: the long kernel ends by itself."""

    def used(self):
        """Returns the bytes of the GPU in use by all processes."""
        free, total = self.torch.cuda.mem_get_info()
        return total - free

    def collect(self):
        """Frees cached memory."""
        self.torch.cuda.ipc_collect()
        self.torch.cuda.empty_cache()


class TorchStorage:
    """A storage of PyTorch."""

    def __init__(self, torch, count):
        self.torch, self.bytes = torch, torch.zeros(count, dtype=torch.uint8, device="cuda")

    def tensor(self, dtype, shape, stride, offset):
        """Returns a view into it."""
        tensor = self.torch.empty(0, dtype=getattr(self.torch, dtype), device="cuda")
        return tensor.set_(self.bytes.untyped_storage(), offset, tuple(shape), tuple(stride))

    def read(self):
        """Returns all bytes."""
        self.torch.cuda.synchronize()
        return self.bytes.cpu().numpy()

    def write(self, noise):
        """Writes all bytes."""
        self.bytes.copy_(self.torch.from_numpy(noise))
        self.torch.cuda.synchronize()

    def free(self):
        """Frees it."""
        self.bytes = None


class Driver:
    """Memory of the driver, without PyTorch."""

    name = "driver"

    def __init__(self, library):
        self.lib = ctypes.CDLL(library)
        self.fake_driver = hasattr(self.lib, "fake_driver_script")
        self.kept = []
        self("cuInit", 0)
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(device), 0)
        uuid = (ctypes.c_ubyte * 16)()
        self("cuDeviceGetUuid_v2", uuid, device)
        text = bytes(uuid).hex()
        self.uuid = "-".join([text[:8], text[8:12], text[12:16], text[16:20], text[20:]])
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.context = context
        self.enter()
        self.streams = [ctypes.c_void_p(), ctypes.c_void_p()]
        for stream in self.streams:
            self("cuStreamCreate", ctypes.byref(stream), 1)
        import kvtier.tensors

        kvtier.tensors.cuda_storage = lambda tensor, storage: storage.shared()

    def enter(self):
        """Lets this thread use the memory."""
        self("cuCtxSetCurrent", self.context)

    def __call__(self, function, *arguments):
        code = getattr(self.lib, function)(*arguments)
        if code:
            raise RuntimeError(f"{function} answered {code}")

    def script(self, text):
        """Tell the fake driver."""
        if not self.fake_driver:
            raise NotHere("without PyTorch only the fake driver has slow work")
        assert self.lib.fake_driver_script(text.encode()) == 0, text

    def allocate(self, count):
        """Allocates a storage of this size."""
        return DriverStorage(self, count)

    def event(self, stream=None):
        """Records an event after all work so far, or after the work on a stream."""
        event = ctypes.c_void_p()
        self("cuEventCreate", ctypes.byref(event), 2 | 4)
        self("cuEventRecord", event, stream or self.streams[0])
        handle = (ctypes.c_ubyte * 64)()
        self("cuIpcGetEventHandle", handle, event)
        return SimpleNamespace(
            ipc_handle=lambda: bytes(handle), query=lambda: self.lib.cuEventQuery(event) == 0, wait=lambda: None
        )

    def behind_a_long_kernel(self, storage, noise, seconds):
        """Writes the bytes after stalled work; returns the event after that."""
        del seconds
        self.script("hold h2d")
        # A copy of unpinned memory would wait here.
        self("cuMemHostRegister_v2", noise.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(noise.nbytes), 0)
        self.kept.append(noise)
        self("cuMemcpyHtoDAsync_v2", storage.base, noise.ctypes.data_as(ctypes.c_void_p),
             ctypes.c_size_t(noise.nbytes), self.streams[1])  # fmt: skip
        return self.event(self.streams[1])

    def go_on(self):
        """Lets the stalled work continue."""
        self.script("release")

    def used(self):
        """Of a GPU, bytes in use."""
        raise NotHere("the fake driver counts the memory of each process by itself")

    def collect(self):
        """Does nothing: no memory is cached."""


class DriverStorage:
    """An allocation, as a storage."""

    def __init__(self, driver, count):
        self.driver, self.count, self.base = driver, count, ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(self.base), ctypes.c_size_t(count))
        self.write(np.zeros(count, np.uint8))
        handle = (ctypes.c_ubyte * 64)()
        driver("cuIpcGetMemHandle", handle, self.base)
        self.handle = bytes(handle)
        # One counter after a header, as PyTorch has them: one process has the storage open.
        self.file = Path(f"/dev/shm/torch_{os.getpid()}_gpu{next(_numbers)}")
        self.file.write_bytes(bytes(COUNTER_HEADER) + struct.pack("=q", 1))
        atexit.register(self.file.unlink, missing_ok=True)

    def shared(self):
        """Returns the description, in the form of `kvtier.tensors.cuda_storage`."""
        share = (0, b"\x03c" + self.handle, self.count, 0, f"/{self.file.name}".encode(), 0, b"", False)
        return {"share": share, "device_uuid": self.driver.uuid}

    def counter(self):
        """Returns the reference counter."""
        return struct.unpack_from("=q", self.file.read_bytes(), COUNTER_HEADER)[0]

    def tensor(self, dtype, shape, stride, offset):
        """Returns the used part of a CUDA tensor."""
        storage = SimpleNamespace(data_ptr=lambda: self.base.value, nbytes=lambda: self.count, shared=self.shared)
        return SimpleNamespace(
            is_cuda=True, device=SimpleNamespace(type="cuda"), dtype=f"torch.{dtype}", shape=tuple(shape),
            stride=lambda: tuple(stride), storage_offset=lambda: offset, untyped_storage=lambda: storage,
        )  # fmt: skip

    def read(self):
        """Returns all bytes."""
        to = np.empty(self.count, np.uint8)
        self.driver("cuMemcpyDtoH_v2", to.ctypes.data_as(ctypes.c_void_p), self.base, ctypes.c_size_t(self.count))
        return to

    def write(self, noise):
        """Writes all bytes."""
        self.driver("cuMemcpyHtoD_v2", self.base, noise.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(self.count))

    def free(self):
        """Frees it."""
        self.driver("cuMemFree_v2", self.base)
        self.file.unlink()


def remove_counters(pid):
    """Removes the files of a killed process."""
    for file in Path("/dev/shm").glob(f"torch_{pid}_gpu*"):
        file.unlink()


# -- layouts -----------------------------------------------------------------------------------

LAYERS, BLOCKS, TOKENS, HEADS, SIZE = 3, 40, 16, 2, 64


def contiguous(shape):
    """Returns strides without gaps."""
    return [*itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)][::-1]


# Name -> shape of a layer, its block dimension, the hint, the arrangement of layers.
LAYOUTS = {
    "packed-nhd": ((BLOCKS, TOKENS, HEADS, 2 * SIZE), 0, "NHD", "one storage"),
    "packed-hnd": ((BLOCKS, HEADS, TOKENS, 2 * SIZE), 0, "HND", "one storage"),
    "kv-first-nhd": ((2, BLOCKS, TOKENS, HEADS, SIZE), 1, "NHD", "apart"),
    "kv-first-hnd": ((2, BLOCKS, HEADS, TOKENS, SIZE), 1, "HND", "apart"),
    "blocks-first-nhd": ((BLOCKS, 2, TOKENS, HEADS, SIZE), 0, "NHD", "apart"),
    "blocks-first-hnd": ((BLOCKS, 2, HEADS, TOKENS, SIZE), 0, "HND", "apart"),
    "mla": ((BLOCKS, TOKENS, 9 * SIZE), 0, "NHD", "apart"),
    "cross-layer-nhd": ((BLOCKS, LAYERS, 2, TOKENS, HEADS, SIZE), 0, "NHD", "one tensor"),
    "cross-layer-hnd": ((BLOCKS, LAYERS, 2, HEADS, TOKENS, SIZE), 0, "HND", "one tensor"),
    "padded": ((BLOCKS, TOKENS, HEADS, 2 * SIZE), 0, "NHD", "padded"),
    "interleaved": ((BLOCKS, HEADS, TOKENS, 2 * SIZE), 0, "BLHNC", "interleaved"),
}


class Pages:
    """Layers in a layout, and their bytes as numpy arrays."""

    def __init__(self, memory, layout="packed-nhd", dtype="bfloat16"):
        shape, self.axis, self.hint, lie = LAYOUTS[layout]
        size, stride = SIZES[dtype], contiguous(shape)
        elements = int(np.prod(shape))
        layers = 1 if lie == "one tensor" else LAYERS
        # Per layer: its storage, and the elements before it.
        places = [(number, 0) for number in range(layers)]
        if lie == "one storage":
            places = [(0, number * elements) for number in range(layers)]
        if lie == "padded":
            stride[0] += 128
            elements = BLOCKS * stride[0]
        if lie == "interleaved":
            places = [(0, number * stride[0]) for number in range(layers)]
            stride[0] *= layers
        storages = 1 + max(storage for storage, _ in places)
        count = elements * size * (layers if storages == 1 else 1)
        self.storages = [memory.allocate(count) for _ in range(storages)]
        self.views = [(storage, size, shape, stride, offset) for storage, offset in places]
        self.tensors = {
            f"layer.{number}": self.storages[storage].tensor(dtype, shape, stride, offset)
            for number, (storage, offset) in enumerate(places)
        }

    def read(self):
        """Returns all bytes, including padding."""
        return [storage.read() for storage in self.storages]

    def noise(self, seed):
        """Returns random bytes for all storages."""
        random = np.random.default_rng(seed)
        return [random.integers(0, 256, storage.nbytes, dtype=np.uint8) for storage in self.read()]

    def write(self, noise):
        """Writes all bytes, including padding."""
        for storage, bytes_ in zip(self.storages, noise, strict=True):
            storage.write(bytes_)

    def blocks(self, noise):
        """Returns views of each layer in bytes, blocks first."""
        for storage, size, shape, stride, offset in self.views:
            elements = noise[storage].view({1: np.uint8, 2: np.uint16}[size])
            view = np.lib.stride_tricks.as_strided(elements[offset:], shape, [size * step for step in stride])
            yield np.moveaxis(view, self.axis, 0)

    def moved(self, source, stored, target, written):
        """Returns `target` after a copy of blocks from `source`."""
        result = [bytes_.copy() for bytes_ in target]
        for old, new in zip(self.blocks(source), self.blocks(result), strict=True):
            new[written] = old[stored]
        return result

    def free(self):
        """Frees all memory."""
        self.tensors = {}
        for storage in self.storages:
            storage.free()
