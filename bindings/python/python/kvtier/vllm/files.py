"""Identifies files by their names, sizes, and all or samples of their bytes."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")

# Of a model: its weights, and the code that --trust-remote-code runs.
_MODEL = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors", ".py")


# Samples of each file: its first and last bytes, and pieces of a page between them. The number of pieces has two limits.
_END_BYTES = 64 << 10
_PIECE_BYTES = 4 << 10
_MAX_PIECES = 1024
_MAX_PIECES_PER_FILE = 64


def state_of(path: str, suffixes: tuple[str, ...] = ("",), with_times: bool = True) -> Any:
    """Returns names, sizes, samples and times of the files at a path, or the commit of a snapshot of the Hugging Face hub; None
    if no file is there.

    Raises:
        OSError: a file cannot be read.
    """
    if commit := _COMMIT.search(os.path.realpath(path)):
        return commit[1]
    files = [file for file in sorted(_files(path)) if file.endswith(suffixes)]
    pieces = min(_MAX_PIECES // max(1, len(files)), _MAX_PIECES_PER_FILE)
    found = []
    for file in files:
        stat = os.stat(file)
        # Cached: an unchanged file is not read again.
        sample = _sample(file, pieces, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
        found.append([os.path.basename(file), stat.st_size, sample, stat.st_mtime_ns if with_times else 0])
    return found or None


def weights_of(path: str) -> Any:
    """Returns the state of a model's weights and code, the same for copies on other hosts; None if no file can be read."""
    try:
        return state_of(path, _MODEL, with_times=False)
    except OSError:
        return None


@functools.lru_cache(maxsize=1024)
def _sample(path: str, pieces: int, size: int, *state: int) -> str:
    """Returns the SHA-256 of a file's ends and of pieces at even distances between them."""
    sample = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        places = [(size * piece // (pieces + 1), _PIECE_BYTES) for piece in range(1, pieces + 1)]
        for offset, count in ((0, _END_BYTES), *places, (max(0, size - _END_BYTES), _END_BYTES)):
            file.seek(offset)
            sample.update(file.read(count))
    return sample.hexdigest()


# Bytes of files that are read at once, and those above which samples suffice.
_READ_AT_ONCE = 1 << 20
_MAX_READ = 1 << 30
_MAX_KNOWN = 1024


class UnreadableError(OSError):
    """A file could not be read when its digest was made, and has not changed since."""


class Digests:
    """Digests of the files at paths: of their names and all bytes, whatever their times and places. Each content is read once.

    The lock guards what is known, and is not held while files are read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        # Status of the files -> their digest, the error, or None while they are read.
        self._known: OrderedDict[Any, str | OSError | None] = OrderedDict()

    def of(self, path: str) -> Any:
        """Returns the digest of a path's files, or samples and times of large ones; None while a thread reads them, and if there are none.

        Raises:
            OSError: a file cannot be read.
        """
        files, status = _status(path)
        if not files:
            return None
        size = sum(each[1] for each in status)
        if size > _MAX_READ:
            return ("samples", path, state_of(path))
        with self._lock:
            is_new = status not in self._known
            known = self._known.setdefault(status, None)
            self._known.move_to_end(status)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if is_new and size > _READ_AT_ONCE:
            threading.Thread(target=self._read, args=(path, files, status), name="kvtier-adapter", daemon=True).start()
        elif is_new:
            known = self._read(path, files, status)
        if isinstance(known, OSError):
            raise UnreadableError(str(known)) from known
        return known

    def has_files(self, path: str) -> bool:
        """Whether there are files at a path."""
        return bool(_status(path)[0])

    def _read(self, path: str, files: list[str], status: Any) -> str | OSError:
        result: str | OSError
        try:
            with self._one_at_a_time:
                result = _digest(files)
            if _status(path)[1] != status:
                result = OSError(f"{path} changed while it was read")
        except OSError as error:
            result = error
        with self._lock:
            self._known[status] = result
        return result


def _status(path: str) -> tuple[list[str], Any]:
    """Returns the files at a path, and what changes if one does."""
    files = sorted(_files(path))
    stats = [os.stat(file) for file in files]
    return files, tuple(
        (file, stat.st_size, stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in zip(files, stats, strict=True)
    )


def _digest(files: list[str]) -> str:
    """Returns the SHA-256 of files' names, sizes and bytes."""
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            digest.update(repr((os.path.basename(file), os.fstat(opened.fileno()).st_size)).encode())
            while piece := opened.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def newest_change(path: str) -> int:
    """Returns the last change of the files at a path, or of the path's target, in nanoseconds of the file system's clock.

    Times that were set explicitly do not count.

    Raises:
        OSError: no file is there, or its status cannot be read.
    """
    times = []
    for each in (path, *_files(path)):
        # A redirected link counts as changed, and so does a file that was moved here.
        times += [os.stat(each).st_ctime_ns, os.lstat(each).st_ctime_ns]
    above = os.path.dirname(os.path.abspath(path))
    while above != os.path.dirname(above):
        if os.path.islink(above):
            times.append(os.lstat(above).st_ctime_ns)
        above = os.path.dirname(above)
    return max(times)


def _files(path: str) -> Iterator[str]:
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            yield from (entry.path for entry in entries if entry.is_file())
    elif os.path.isfile(path):
        yield path
