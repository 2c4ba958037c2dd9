"""Identifies files by their names, sizes, and all or samples of their bytes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")

# Files of a model: its weights, and the code that --trust-remote-code runs.
_MODEL = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors", ".py")

# Files of a model's directory that describe its layers, their quantization, and the processing of pictures.
_DESCRIPTIONS = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# Keys of these files that do not describe the model.
_IGNORED_KEYS = ("_name_or_path", "transformers_version")

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


def described(directory: str) -> list[Any]:
    """Returns the descriptions in the model's directory; empty for a model of a hub, whose commit is known."""
    found = []
    for name in _DESCRIPTIONS:
        try:
            with open(os.path.join(directory, name), encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            content = {key: value for key, value in content.items() if key not in _IGNORED_KEYS}
        found.append([name, content])
    return found


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


class Files(NamedTuple):
    """Files at a path."""

    path: str
    names: tuple[str, ...]
    status: tuple[tuple[int, ...], ...]
    """What changes if a file does: sizes, numbers and times."""

    @classmethod
    def at(cls, path: str) -> Files:
        """Returns the files at a path.

        Raises:
            OSError: the status of one cannot be read.
        """
        names = tuple(sorted(_files(path)))
        stats = [os.stat(name) for name in names]
        return cls(path, names, tuple((each.st_size, each.st_dev, each.st_ino, each.st_mtime_ns, each.st_ctime_ns) for each in stats))


class Digests:
    """Digests of files: of their names and all bytes, whatever their times and places. Each content is read once.

    The lock guards what is known, and is not held while files are read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        # Files -> their digest, the error, or None while they are read.
        self._known: OrderedDict[Files, str | Exception | None] = OrderedDict()

    def of(self, files: Files) -> Any:
        """Returns the digest of files, or samples and times of large ones; None while a thread reads them.

        Raises:
            OSError: a file cannot be read. The next call tries again.
        """
        size = sum(each[0] for each in files.status)
        if size > _MAX_READ:
            return ("samples", files.path, state_of(files.path))
        with self._lock:
            is_new = files not in self._known
            known = self._known.setdefault(files, None)
            self._known.move_to_end(files)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if is_new and size > _READ_AT_ONCE:
            threading.Thread(target=self._read, args=(files,), name="kvtier-adapter", daemon=True).start()
        elif is_new:
            known = self._read(files)
        if isinstance(known, Exception):
            with self._lock:
                self._known.pop(files, None)
            raise OSError(str(known)) from known
        return known

    def _read(self, files: Files) -> str | Exception:
        result: str | Exception
        try:
            with self._one_at_a_time:
                result = _digest(files.names)
            if Files.at(files.path) != files:
                result = OSError(f"{files.path} changed while it was read")
        except Exception as error:  # noqa: BLE001: a thread that ended without a result would leave the files unknown for good.
            result = error
        with self._lock:
            self._known[files] = result
        return result


def _digest(files: Iterable[str]) -> str:
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
    times += [os.lstat(link).st_ctime_ns for link in _links(path)]
    return max(times)


def _links(path: str, depth: int = 40) -> Iterator[str]:
    """The symbolic links that lead to a path, at any place in it and in their targets."""
    at = os.path.abspath(path)
    while at != os.path.dirname(at):
        if depth and os.path.islink(at):
            yield at
            yield from _links(os.path.join(os.path.dirname(at), os.readlink(at)), depth - 1)
        at = os.path.dirname(at)


def _files(path: str) -> Iterator[str]:
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            yield from (entry.path for entry in entries if entry.is_file())
    elif os.path.isfile(path):
        yield path
