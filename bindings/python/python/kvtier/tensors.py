"""KV tensors as the server and the copying code see them: storages and views into them."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import glob
import logging
import mmap
import os
import random
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from ._native import KvTierError

logger = logging.getLogger(__name__)

# A segment's number begins with it: names of other programs, which have small numbers, are left alone.
_MARK = "58"
_DIGITS = 18


class Segment:
    """A POSIX shared-memory segment of this process; what engines' memory is called on the wire.

    Its name goes with the object, at the latest with the interpreter. The lock on the file ends with the last process that
    has it mapped, however that ends: :func:`remove_orphans` removes names whose file has no lock.
    """

    def __init__(self, size: int) -> None:
        remove_orphans()
        file, self.name = _new_file()
        self.size = size
        self._finalizer = weakref.finalize(self, _unlink, self.name, os.getpid())
        try:
            # Room is taken now: a full /dev/shm must be an error here and no fault later.
            os.posix_fallocate(file, 0, size)
            # The mapping keeps the lock.
            self.map = mmap.mmap(file, size)
        except OSError as error:
            self.unlink()
            raise KvTierError(_no_room(size, error)) from error
        finally:
            os.close(file)

    def unlink(self) -> None:
        """Remove the name; the memory lives as long as its users."""
        self._finalizer()


def _new_file() -> tuple[int, str]:
    """A locked file in ``/dev/shm``, and its name."""
    while True:
        name = f"/lmcache_kv_{os.getpid()}_{_MARK}{random.SystemRandom().randrange(10**_DIGITS):0{_DIGITS}}"
        try:
            file = os.open(f"/dev/shm{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Another process may have taken it for an orphan before it was locked.
            if os.path.samestat(os.stat(f"/dev/shm{name}"), os.fstat(file)):
                return file, name
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(file)


def _unlink(name: str, owner: int) -> None:
    """Remove a segment's name, unless this is a fork of the process that made it."""
    if os.getpid() == owner:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm{name}")


def remove_orphans() -> None:
    """Remove segments of this package that no process has mapped any more."""
    for path in glob.glob(f"/dev/shm/lmcache_kv_*_{_MARK}{'[0-9]' * _DIGITS}"):
        # Another user's, in use, or gone.
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
                logger.info("removed %s, which no process uses any more", path)
            finally:
                os.close(file)


def _no_room(size: int, error: OSError) -> str:
    """What to do about a segment that cannot be had."""
    try:
        there = os.statvfs("/dev/shm")
        room = f"{there.f_bavail * there.f_frsize} bytes of {there.f_blocks * there.f_frsize} are free"
    except OSError as unknown:
        room = f"how much is free is not known ({unknown})"
    return (
        f"/dev/shm: {size} bytes of KV have to be there for lmcache_driven, and {room} ({error}): give it more room "
        "(docker run --shm-size, a medium: Memory volume at /dev/shm), the engine less KV, or use engine_driven"
    )


# The segments that tensors were moved to, by address: they may be moved from there.
_segments: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


class Storages:
    """The storages of an engine's KV tensors, each once, however many tensors share it."""

    def __init__(self, shared: bool) -> None:
        """``shared``: CPU tensors are moved into segments that the server can open."""
        self.shared = shared
        self.described: list[dict[str, Any]] = []
        self.segments: list[Segment] = []
        self._known: dict[int, int] = {}
        self._moved: dict[int, Any] = {}
        self._kept: list[Any] = []

    def views(self, tensors: Iterable[Any]) -> list[dict[str, Any]]:
        """The description of each tensor; moves CPU tensors if asked to, with all other tensors in their storages.

        Raises:
            KvTierError: there is no room for them.
            ValueError: a tensor on another device, or one that is not all that uses its storage.
        """
        tensors = list(tensors)
        self._kept += tensors
        # Held until all have been described, so that no number is used again for another storage.
        storages = {_number(tensor): tensor.untyped_storage() for tensor in tensors}
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
        number = _number(tensor)
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
            self._moved[_number(tensor)] = moved = _into(segment, storage)
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
        """Remove the segments' names. The tensors stay usable."""
        for segment in self.segments:
            segment.unlink()
        self._kept.clear()


def _into(segment: Segment, storage: Any) -> Any:
    """The segment as a storage with the other's bytes."""
    import torch

    target = torch.frombuffer(segment.map, dtype=torch.uint8)
    _segments[target.data_ptr()] = segment.map
    source = torch.empty(0, dtype=torch.uint8)
    source.set_(storage)
    target.copy_(source)
    return target.untyped_storage()


def _number(tensor: Any) -> int:
    """What tells the tensor's storage from others."""
    storage = tensor.untyped_storage()
    # On CPUs two may be at one address, and asking for it can give a lazy copy memory of its own.
    number: int = storage.data_ptr() if tensor.is_cuda else storage._cdata
    return number


def _move(storages: Mapping[int, tuple[Any, Any]]) -> None:
    """Have all tensors in the storages, by number, use others: also the views of them that an engine computes with.

    One that stayed behind would be computed with, and never be stored or loaded. So nothing moves unless those that can
    be found are all that there are.
    """
    import torch

    users = _users(storages)
    for number, (storage, _) in storages.items():
        # One of them is the storage's own object.
        unknown = torch._C._storage_Use_Count(number) - 1 - len(users[number])
        # PyTorch's sign that NumPy or another library has the memory.
        lent = not storage.resizable() and storage.data_ptr() not in _segments
        if unknown or lent:
            who = "another library" if lent else f"{unknown} others"
            raise ValueError(
                f"kv_caches: a layer's memory is also used by {who}, not to be found, so it cannot be moved to shared memory "
                "for lmcache_driven; use engine_driven"
            )
    for number, (_, moved) in storages.items():
        for tensor in users[number].values():
            # What was made in inference mode can be changed in it alone.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.set_(moved, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def _users(numbers: Iterable[int]) -> dict[int, dict[int, Any]]:
    """The process's tensors in the storages of these numbers: by number, then by their ids."""
    import torch

    found: dict[int, dict[int, Any]] = {number: {} for number in numbers}
    for thing in gc.get_objects():
        # Its type's word: that of proxies and lazy modules has effects.
        if not issubclass(type(thing), torch.Tensor) or thing.device.type != "cpu":
            continue
        # A view keeps what it is of, of which nobody else may have an object.
        for tensor in (thing, thing._base):
            try:
                users = None if tensor is None else found.get(_number(tensor))
            except (NotImplementedError, RuntimeError, ValueError):  # It has no memory, or none yet.
                continue
            if users is not None:
                users[id(tensor)] = tensor
    return found


def cuda_storage(tensor: Any, storage: Any) -> dict[str, Any]:
    """A CUDA storage as PyTorch shares it with other processes."""
    import torch

    device, handle, size, offset, counter, counter_offset, event, event_needed = storage._share_cuda_()
    return {
        "share": (device, handle, size, offset, counter, counter_offset, event, bool(event_needed)),
        "device_uuid": str(torch.cuda.get_device_properties(tensor.device).uuid),
    }
