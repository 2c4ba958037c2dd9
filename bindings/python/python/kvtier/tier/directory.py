"""A directory as a tier: the example of ``docs/tier-protocol.md``.

    python -m kvtier.tier.directory --socket /run/kvtier/dir.sock --path /var/cache/kvtier-dir

One file per object, named by a hash of its key, in 256 directories. A file is written under another name first, so that no
reader sees a part of it. For production use kvtier's own ``fs``, which is faster and also survives a loss of power.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import secrets
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .base import Capabilities, Found, Listed, LoadObject, StoreObject, Tier, TierError
from .server import main

#: Before the object's bytes in a file: this, and a JSON object of as many bytes as the number.
HEAD = struct.Struct("<8sI")
MAGIC = b"kvdir 1\n"
MAX_HEADER = 64 << 10
TEMPORARY = ".tmp-"


class Directory(Tier):
    """Objects in files below ``path``."""

    name = "directory"
    capabilities = Capabilities(shared=True, free_bytes=True)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)
        for left in self._path.glob(f"{TEMPORARY}*"):
            # Of a process that has ended: it has no lock any more.
            with suppress(OSError), open(left, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()

    def store(self, objects: Sequence[StoreObject]) -> Sequence[bool | TierError]:
        return [self._each(self._store_one, one) for one in objects]

    def lookup(self, keys: Sequence[str]) -> Sequence[Found | None | TierError]:
        return [self._each(self._lookup_one, key) for key in keys]

    def load(self, objects: Sequence[LoadObject]) -> Sequence[Found | TierError]:
        return [self._each(self._load_one, one) for one in objects]

    def delete(self, keys: Sequence[str]) -> Sequence[bool | TierError]:
        return [self._each(self._delete_one, key) for key in keys]

    def list(self, cursor: str | None, limit: int) -> tuple[Sequence[Listed], str | None]:
        if cursor is not None and not _is_name(cursor):
            raise TierError("refused", "the cursor is none of this tier's")
        listed: list[Listed] = []
        last = cursor or ""
        for shard in range(int(last[:2] or "0", 16), 256):
            names = self._names(f"{shard:02x}")
            for name in sorted(name for name in names if name > last):
                if len(listed) >= max(limit, 1):
                    return listed, last
                last = name
                if (one := self._listed(name)) is not None:
                    listed.append(one)
        return listed, None

    def free_bytes(self) -> int | None:
        space = os.statvfs(self._path)
        return space.f_bavail * space.f_frsize

    def _file(self, name: str) -> Path:
        return self._path / name[:2] / name

    def _names(self, shard: str) -> Sequence[str]:
        try:
            return [name for name in os.listdir(self._path / shard) if _is_name(name)]
        except FileNotFoundError:
            return []

    def _store_one(self, one: StoreObject) -> bool:
        if not one.replace and self._lookup_one(one.key) == Found(len(one.data), one.meta):
            return False
        header = json.dumps({"key": one.key, "meta": one.meta, "len": len(one.data)}).encode()
        if len(header) > MAX_HEADER:
            raise TierError("refused", "the key is too long")
        parts = (HEAD.pack(MAGIC, len(header)) + header, one.data)
        try:
            self._put(self._file(_name(one.key)), parts)
        except FileNotFoundError:
            # A process that started has removed the temporary file before it was locked.
            self._put(self._file(_name(one.key)), parts)
        return True

    def _put(self, target: Path, parts: Sequence[bytes | memoryview]) -> None:
        temporary = self._path / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            with open(temporary, "xb", buffering=0) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX)
                except OSError as error:
                    # Without locks no process removes what another has left.
                    if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                        raise
                for part in parts:
                    _write(file, part)
                target.parent.mkdir(exist_ok=True)
                os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _lookup_one(self, key: str) -> Found | None:
        try:
            with open(self._file(_name(key)), "rb", buffering=0) as file:
                return _found(file, key)
        except FileNotFoundError:
            return None

    def _load_one(self, one: LoadObject) -> Found:
        with open(self._file(_name(one.key)), "rb", buffering=0) as file:
            found = _found(file, one.key)
            if found is None:
                raise TierError("corrupt", "the file is damaged")
            if found.length != len(one.data):
                return found
            done = 0
            while done < found.length:
                count = file.readinto(one.data[done:])
                if not count:
                    raise TierError("corrupt", "the file is too short")
                done += count
            # Times of use are what an eviction goes by after a restart.
            os.utime(file.fileno())
            return found

    def _delete_one(self, key: str) -> bool:
        try:
            self._file(_name(key)).unlink()
        except FileNotFoundError:
            return False
        return True

    def _listed(self, name: str) -> Listed | None:
        try:
            with open(self._file(name), "rb", buffering=0) as file:
                header = _header(file)
                if header is None or _name(header["key"]) != name:
                    return None
                used_at = int(os.fstat(file.fileno()).st_mtime)
                return Listed(header["key"], header["len"], max(used_at, 0))
        except FileNotFoundError:
            return None

    @staticmethod
    def _each(work, one):
        try:
            return work(one)
        except TierError as error:
            return error
        except FileNotFoundError:
            return TierError("not_found")
        except OSError as error:
            full = error.errno in (28, 122)  # ENOSPC, EDQUOT
            return TierError("full" if full else "unreadable", str(error))


def _name(key: str) -> str:
    # Keys may have characters that no file name has, and lone surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _is_name(name: str) -> bool:
    return len(name) == 64 and all(digit in "0123456789abcdef" for digit in name)


def _header(file: BinaryIO) -> dict | None:
    """Reads the header of a file and checks its length; ``None`` if it is damaged."""
    head = file.read(HEAD.size)
    if len(head) != HEAD.size:
        return None
    magic, size = HEAD.unpack(head)
    if magic != MAGIC or size > MAX_HEADER:
        return None
    try:
        header = json.loads(file.read(size))
        expected = HEAD.size + size + header["len"]
        is_whole = os.fstat(file.fileno()).st_size == expected
        types = {"key": str, "meta": str, "len": int}
        return header if is_whole and all(type(header[name]) is kind for name, kind in types.items()) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _found(file: BinaryIO, key: str) -> Found | None:
    header = _header(file)
    return Found(header["len"], header["meta"]) if header and header["key"] == key else None


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _make(arguments: argparse.Namespace) -> Tier:
    return Directory(arguments.path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serves a directory as a second tier of kvtier.")
    parser.add_argument("--path", required=True, help="the directory")
    sys.exit(main(_make, parser))
