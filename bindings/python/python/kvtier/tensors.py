"""Descriptions of KV tensors for the server and the copying code: storages and views into them."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import glob
import logging
import mmap
import os
import random
import signal
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from ._native import KvTierError

logger = logging.getLogger(__name__)


class Segment:
    """A POSIX shared-memory segment of this process, under the name that engines' memory has on the wire.

    The name is removed with the object, at the latest with the interpreter. If the process is killed, servers and
    :func:`remove_orphans` remove it.
    """

    def __init__(self, size: int) -> None:
        remove_orphans()
        self.name, file = _create()
        self.size = size
        self._finalizer = weakref.finalize(self, _unlink, self.name, os.getpid())
        try:
            # Allocates the pages now: a full /dev/shm must be an error here, not a fault later.
            os.posix_fallocate(file, 0, size)
            self.map = mmap.mmap(file, size)
        except OSError as error:
            self.unlink()
            raise KvTierError(_out_of_memory(size, error)) from error
        finally:
            os.close(file)

    def unlink(self) -> None:
        """Removes the name; the memory lives as long as its users."""
        self._finalizer()


def _create() -> tuple[str, int]:
    """Creates a segment's file; returns its name and descriptor."""
    while True:
        name = f"/lmcache_kv_{os.getpid()}_{random.SystemRandom().randrange(10**18)}"
        file = os.open(f"/dev/shm{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        # The name is visible before the system counts the file as open: it may have been removed as an orphan's.
        if os.fstat(file).st_nlink:
            return name, file
        os.close(file)


def _unlink(name: str, owner: int) -> None:
    """Removes a segment's name, unless this is a fork of the process that created it."""
    if os.getpid() == owner:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm{name}")


def remove_orphans() -> None:
    """Removes this user's segments that no process has open or mapped any more, in whichever PID namespace."""
    for path in glob.glob("/dev/shm/lmcache_kv_*"):
        # Another user's, in use, or already removed.
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if os.fstat(file).st_uid != os.geteuid():
                    continue
                # A process that opens it meanwhile breaks the lease: by a signal that is ignored by default.
                fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
                if os.path.samestat(os.lstat(path), os.fstat(file)):
                    os.unlink(path)
                    logger.info("removed %s: no process has it mapped", path)
            finally:
                os.close(file)


def _out_of_memory(size: int, error: OSError) -> str:
    """Returns the error text for a segment that does not fit."""
    try:
        stat = os.statvfs("/dev/shm")
        free = f"{stat.f_bavail * stat.f_frsize} bytes of {stat.f_blocks * stat.f_frsize} are free"
    except OSError as unknown:
        free = f"its free space is not known ({unknown})"
    return (
        f"/dev/shm: lmcache_driven needs {size} bytes for KV, and {free} ({error}): enlarge it "
        "(docker run --shm-size, a medium: Memory volume at /dev/shm), reduce the engine's KV cache, or use engine_driven"
    )


# Segments that tensors were moved to, by address: tensors may be moved again from there.
_segments: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


class Storages:
    """Storages of an engine's KV tensors, each once even if several tensors share it."""

    def __init__(self, shared: bool) -> None:
        """``shared``: CPU tensors are moved into segments that the server can open."""
        self.shared = shared
        self.described: list[dict[str, Any]] = []
        self.segments: list[Segment] = []
        self._known: dict[int, int] = {}
        self._moved: dict[int, Any] = {}
        self._kept: list[Any] = []

    def views(self, tensors: Iterable[Any]) -> list[dict[str, Any]]:
        """Returns the description of each tensor. If shared, moves CPU tensors with all other tensors in their storages.

        Raises:
            KvTierError: /dev/shm has no space for them.
            ValueError: a tensor is on another device, or its storage has unknown users.
        """
        tensors = list(tensors)
        self._kept += tensors
        # Held until all are described, so that no key is reused for another storage.
        storages = {_storage_key(tensor): tensor.untyped_storage() for tensor in tensors}
        described = [self._view(tensor) for tensor in tensors]
        if self._moved:
            _move({number: (storages[number], moved) for number, moved in self._moved.items()})
            self._moved.clear()
        return described

    def _view(self, tensor: Any) -> dict[str, Any]:
        return {
            "storage": self._storage(tensor),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "storage_offset": tensor.storage_offset(),
        }

    def _storage(self, tensor: Any) -> int:
        number = _storage_key(tensor)
        if number not in self._known:
            self._known[number] = self._describe(tensor, tensor.untyped_storage())
        return self._known[number]

    def _describe(self, tensor: Any, storage: Any) -> int:
        index = len(self.described)
        if tensor.is_cuda:
            self.described.append(cuda_storage(tensor, storage))
            return index
        if tensor.device.type != "cpu":
            raise ValueError(f"kv_caches: tensors on {tensor.device.type}; allowed are cpu and cuda")
        address, name = storage.data_ptr(), ""
        if self.shared:
            segment = Segment(storage.nbytes())
            self.segments.append(segment)
            self._moved[_storage_key(tensor)] = moved = _copy_into(segment, storage)
            address, name = moved.data_ptr(), segment.name
        self.described.append(
            {
                "address": address,
                "bytes": storage.nbytes(),
                "shm_name": name,
            }
        )
        return index

    def release(self) -> None:
        """Removes the segments' names. The tensors stay usable."""
        for segment in self.segments:
            segment.unlink()
        self._kept.clear()


def _copy_into(segment: Segment, storage: Any) -> Any:
    """Copies the storage into the segment; returns the segment as a storage."""
    import torch

    target = torch.frombuffer(segment.map, dtype=torch.uint8)
    _segments[target.data_ptr()] = segment.map
    source = torch.empty(0, dtype=torch.uint8)
    source.set_(storage)
    target.copy_(source)
    return target.untyped_storage()


def _storage_key(tensor: Any) -> int:
    """Returns a key that identifies the tensor's storage."""
    storage = tensor.untyped_storage()
    # On CPUs two storages may have one address, and asking for it can materialize a lazy copy.
    number: int = storage.data_ptr() if tensor.is_cuda else storage._cdata
    return number


def _move(storages: Mapping[int, tuple[Any, Any]]) -> None:
    """Moves all tensors in the storages, by key, to others: also views that an engine computes with.

    A tensor that is left behind would be used for computing, and never be stored or loaded. So nothing moves unless all
    users of the storages are found.
    """
    import torch

    users = _tensors_in(storages)
    for number, (storage, _) in storages.items():
        # One user is the storage object itself.
        unknown = torch._C._storage_Use_Count(number) - 1 - len(users[number])
        # PyTorch marks memory that NumPy or another library has.
        is_exported = not storage.resizable() and storage.data_ptr() not in _segments
        if unknown or is_exported:
            user = "another library" if is_exported else f"{unknown} others"
            raise ValueError(
                f"kv_caches: a layer's memory is also used by {user}, which cannot be found, so it cannot be moved to shared memory "
                "for lmcache_driven; use engine_driven"
            )
    for number, (_, moved) in storages.items():
        for tensor in users[number].values():
            # A tensor created in inference mode can be changed only in it.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.set_(moved, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def _tensors_in(numbers: Iterable[int]) -> dict[int, dict[int, Any]]:
    """Returns the process's tensors in the storages with these keys: by key, then by id."""
    import torch

    found: dict[int, dict[int, Any]] = {number: {} for number in numbers}
    for thing in gc.get_objects():
        # By type: isinstance has side effects on proxies and lazy modules.
        if not issubclass(type(thing), torch.Tensor) or thing.device.type != "cpu":
            continue
        # A view keeps its base, which may have no other reference.
        for tensor in (thing, thing._base):
            try:
                users = None if tensor is None else found.get(_storage_key(tensor))
            except (NotImplementedError, RuntimeError, ValueError):  # Without memory, or not allocated yet.
                continue
            if users is not None:
                users[id(tensor)] = tensor
    return found


def cuda_storage(tensor: Any, storage: Any) -> dict[str, Any]:
    """Returns a CUDA storage as PyTorch shares it with other processes.

    Raises:
        ValueError: it cannot be shared.
    """
    import torch

    try:
        device, handle, size, offset, counter, counter_offset, event, event_needed = storage._share_cuda_()
    except RuntimeError as error:
        raise ValueError(
            f"kv_caches: the server cannot open this memory of {tensor.device} ({str(error).strip().splitlines()[0]}). CUDA shares no memory of "
            "vLLM's cumem allocator in this way: start vLLM without --enable-sleep-mode and --enable-cumem-allocator"
        ) from error
    return {
        "share": (device, handle, size, offset, counter, counter_offset, event, bool(event_needed)),
        "device_uuid": str(torch.cuda.get_device_properties(tensor.device).uuid),
    }
