"""Identifies files by their names, sizes and samples of their bytes."""

from __future__ import annotations

import functools
import hashlib
import os
import re
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
