"""KV tensors as the server and the copying code see them: storages and views into them."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
from collections.abc import Iterable
from typing import Any

from ._native import KvTierError

logger = logging.getLogger(__name__)

_numbers = itertools.count()


class Segment:
    """A POSIX shared-memory segment of this process; what engines' memory is called on the wire."""

    def __init__(self, size: int) -> None:
        while True:
            self.name = f"/lmcache_kv_{os.getpid()}_{next(_numbers)}"
            path = f"/dev/shm{self.name}"
            try:
                file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
                break
            except FileExistsError:
                continue
        try:
            # Room is taken now: a full /dev/shm must be an error here and no fault later.
            os.posix_fallocate(file, 0, size)
            self.map = mmap.mmap(file, size)
        except OSError as error:
            os.unlink(path)
            raise KvTierError(_no_room(size, error)) from error
        finally:
            os.close(file)
        self.size = size

    def unlink(self) -> None:
        """Remove the name; the memory lives as long as its users."""
        try:
            os.unlink(f"/dev/shm{self.name}")
        except FileNotFoundError:
            pass


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


class Storages:
    """The storages of an engine's KV tensors, each once, however many tensors share it."""

    def __init__(self, shared: bool) -> None:
        """``shared``: CPU tensors are moved into segments that the server can open."""
        self.shared = shared
        self.described: list[dict[str, Any]] = []
        self.segments: list[Segment] = []
        self._known: dict[int, tuple[int, Any]] = {}
        self._kept: list[Any] = []

    def views(self, tensors: Iterable[Any]) -> list[dict[str, Any]]:
        """The description of each tensor; moves CPU tensors if asked to."""
        tensors = list(tensors)
        # Kept, so that no address is used again for another storage while this one is described.
        self._kept += [tensor.untyped_storage() for tensor in tensors] + tensors
        return [self._view(tensor) for tensor in tensors]

    def _view(self, tensor: Any) -> dict[str, Any]:
        return {
            "storage": self._storage(tensor),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "storage_offset": tensor.storage_offset(),
        }

    def _storage(self, tensor: Any) -> int:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        known = self._known.get(address)
        if known is None:
            known = self._describe(tensor, storage)
            self._known[address] = known
        index, moved = known
        if moved is not None and storage.data_ptr() != moved.data_ptr():
            _point(tensor, moved)
        return index

    def _describe(self, tensor: Any, storage: Any) -> tuple[int, Any]:
        index = len(self.described)
        if tensor.is_cuda:
            self.described.append(cuda_storage(tensor, storage))
            return index, None
        if tensor.device.type != "cpu":
            raise ValueError(f"kv_caches: tensors on {tensor.device.type}; allowed are cpu and cuda")
        moved, name = None, ""
        if self.shared:
            segment = Segment(storage.nbytes())
            self.segments.append(segment)
            moved, name = _into(segment, storage), segment.name
        self.described.append(
            {
                "address": (moved if moved is not None else storage).data_ptr(),
                "bytes": storage.nbytes(),
                "shm_name": name,
            }
        )
        return index, moved

    def release(self) -> None:
        """Remove the segments' names. The tensors stay usable."""
        for segment in self.segments:
            segment.unlink()
        self._kept.clear()


def _into(segment: Segment, storage: Any) -> Any:
    """The segment as a storage with the other's bytes."""
    import torch

    target = torch.frombuffer(segment.map, dtype=torch.uint8)
    source = torch.empty(0, dtype=torch.uint8)
    source.set_(storage)
    target.copy_(source)
    return target.untyped_storage()


def _point(tensor: Any, storage: Any) -> None:
    """Have the tensor, and so everybody who holds it, use another storage."""
    import torch

    with torch.no_grad():
        tensor.set_(storage, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def cuda_storage(tensor: Any, storage: Any) -> dict[str, Any]:
    """A CUDA storage as PyTorch shares it with other processes."""
    import torch

    device, handle, size, offset, counter, counter_offset, event, event_needed = storage._share_cuda_()
    return {
        "share": (device, handle, size, offset, counter, counter_offset, event, bool(event_needed)),
        "device_uuid": str(torch.cuda.get_device_properties(tensor.device).uuid),
    }
