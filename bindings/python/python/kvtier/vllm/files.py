"""Identifies files by their names, sizes and times; contents are not read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")


def state_of(path: str, suffixes: tuple[str, ...] = ("",), with_times: bool = True) -> Any:
    """Names, sizes and times of the files at a path, or the commit where it is a snapshot of the Hugging Face hub; None if
    nothing is there.

    Raises:
        OSError: a file cannot be looked at.
    """
    if commit := _COMMIT.search(os.path.realpath(path)):
        return commit[1]
    found = []
    for file in sorted(_files(path)):
        if file.endswith(suffixes):
            stat = os.stat(file)
            found.append([os.path.basename(file), stat.st_size, stat.st_mtime_ns if with_times else 0])
    return found or None


def weights_of(path: str, with_times: bool) -> Any:
    """The state of a model's weights; None for a model that is known by a name."""
    try:
        return state_of(path, _WEIGHTS, with_times)
    except OSError:
        return None


def newest_change(path: str) -> int:
    """When the files at a path, or what the path means, changed last, in nanoseconds of the file system's clock. Times that
    were set by hand do not count.

    Raises:
        OSError: nothing is there, or a file cannot be looked at.
    """
    times = []
    for each in (path, *_files(path)):
        # A link that was pointed elsewhere has changed, and so has a file that was moved here.
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
