"""Mooncake Store as a second tier.

    python -m kvtier.tier.mooncake --socket /run/kvtier/mooncake.sock --local-hostname HOST:PORT \
        --metadata-server http://HOST:8080/metadata --master-server-addr HOST:50051 [--global-segment-size 16GiB]

It needs the Python package of Mooncake (``mooncake-transfer-engine``, or ``mooncake-transfer-engine-non-cuda``) and a running
``mooncake_master``. Options have the names of Mooncake's own configuration.

An object's key and bytes are those of LMCache's ``mooncake_store``. The text that kvtier keeps beside each object (layout and
checksum) is a second, small object under ``kvtier.meta@KEY``; LMCache does not see it. kvtier loads objects without it, as LMCache
stores them, only with ``trust_missing_layout``.

Mooncake keeps no empty objects: they are one byte, which the second object tells from an object of one byte.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from .base import Capabilities, Found, LoadObject, StoreObject, Tier, TierError
from .server import main

#: Put before the key of the object that holds an object's text.
META = "kvtier.meta@"

#: Mooncake's numbers of errors (``ErrorCode`` in its ``types.h``), and ours.
NOT_FOUND = -704
NOT_READY = -707
LEASED = -706
NO_SPACE = -200
UNREACHABLE = -900

#: Seconds that a removal waits for leases. By default Mooncake removes no object for 10 s after it was looked up;
#: then a removal is `busy`, and kvtier tries again later.
LEASE_WAIT = 1.0
LEASE_PAUSE = 0.02

#: Locks of keys: an object and its text are written one after the other.
LOCKS = 256

#: How often a load reads an object that is replaced meanwhile.
ATTEMPTS = 4


class Mooncake(Tier):
    """Objects in Mooncake Store, through one client that this process has."""

    name = "mooncake"
    # Other clients store and evict there, and it cannot be listed.
    capabilities = Capabilities(list=False, shared=True, max_in_flight=8)

    def __init__(self, store: Any) -> None:
        """Takes a ``MooncakeDistributedStore`` that is set up."""
        self._store = store
        self._locks = [threading.Lock() for _ in range(LOCKS)]

    def mapped(self, segment: memoryview) -> None:
        if code := self._store.register_buffer(address(segment), len(segment)):
            raise TierError("unavailable", f"Mooncake does not take the segment: {code}")

    def unmapped(self, segment: memoryview) -> None:
        self._store.unregister_buffer(address(segment))

    def store(self, objects: Sequence[StoreObject]) -> Sequence[bool | TierError]:
        with self._locked([one.key for one in objects]):
            return self._store_locked(objects)

    def _store_locked(self, objects: Sequence[StoreObject]) -> Sequence[bool | TierError]:
        there = self._found([one.key for one in objects])
        results: list[bool | TierError] = [False] * len(objects)
        # Of several under one key, the last stays.
        last = {one.key: number for number, one in enumerate(objects)}
        writes = [
            (number, one)
            for number, (one, found) in enumerate(zip(objects, there, strict=True))
            if last[one.key] == number and (one.replace or found != Found(len(one.data), one.meta))
        ]
        # A put keeps what is there, and an update in place could be seen half done.
        removed = self._remove([one.key for number, one in writes if there[number]])
        for number, one in writes:
            error = removed.get(one.key)
            results[number] = error if isinstance(error, TierError) else True
        writes = [(number, one) for number, one in writes if results[number] is True]
        if not writes:
            return [results[last[one.key]] for one in objects]
        codes = {number: self._store.put(one.key, b"\0") for number, one in writes if not len(one.data)}
        whole = [(number, one) for number, one in writes if len(one.data)]
        if whole:
            keys, places = [one.key for _, one in whole], [address(one.data) for _, one in whole]
            put = self._store.batch_put_from(keys, places, [len(one.data) for _, one in whole])
            codes.update(zip([number for number, _ in whole], put, strict=True))
        written = [(number, one) for number, one in writes if codes[number] == 0]
        if written:
            keys = [META + one.key for _, one in written]
            texts = [text_of(one.key, len(one.data), one.meta) for _, one in written]
            if code := self._store.upsert_batch(keys, texts):
                codes.update((number, code) for number, _ in written)
        for number, _ in writes:
            if codes[number]:
                results[number] = error_of(codes[number], "store")
        return [results[last[one.key]] for one in objects]

    def lookup(self, keys: Sequence[str]) -> Sequence[Found | None | TierError]:
        return self._found(keys)

    def load(self, objects: Sequence[LoadObject]) -> Sequence[Found | TierError]:
        results: list[Found | TierError] = [TierError("busy", "it is being replaced")] * len(objects)
        left = list(range(len(objects)))
        for _ in range(ATTEMPTS):
            found = self._load([objects[number] for number in left])
            # Bytes and text are of one object if the text is the same before and after the bytes were read.
            again = self._found([objects[number].key for number in left])
            moved = []
            for number, one, then in zip(left, found, again, strict=True):
                if isinstance(one, TierError) or one == then:
                    results[number] = one
                else:
                    moved.append(number)
            if not (left := moved):
                break
        return results

    def _load(self, objects: Sequence[LoadObject]) -> Sequence[Found | TierError]:
        found = self._found([one.key for one in objects])
        results: list[Found | TierError] = [one or TierError("not_found") for one in found]
        wanted = [
            (number, one)
            for number, (one, at) in enumerate(zip(objects, found, strict=True))
            if at and at.length == len(one.data) and at.length
        ]
        if wanted:
            keys = [one.key for _, one in wanted]
            places = [address(one.data) for _, one in wanted]
            lengths = self._store.batch_get_into(keys, places, [len(one.data) for _, one in wanted])
            for (number, one), length in zip(wanted, lengths, strict=True):
                if length < 0:
                    results[number] = error_of(length, "load")
                elif length != len(one.data):
                    # Another one was stored under its key meanwhile.
                    results[number] = Found(length)
        return results

    def delete(self, keys: Sequence[str]) -> Sequence[bool | TierError]:
        # Without a lookup, which would lease them.
        unique = list(dict.fromkeys(keys))
        with self._locked(unique):
            removed = self._remove(unique)
        results = []
        for key in keys:
            results.append(removed[key])
            # Of several of one key, the first has removed it.
            if removed[key] is True:
                removed[key] = False
        return results

    @contextmanager
    def _locked(self, keys: Sequence[str]) -> Iterator[None]:
        """Excludes other stores and deletes of these keys in this process."""
        numbers = sorted({zlib.crc32(key.encode()) % LOCKS for key in keys})
        with ExitStack() as stack:
            for number in numbers:
                stack.enter_context(self._locks[number])
            yield

    def close(self) -> None:
        self._store.close()

    def _found(self, keys: Sequence[str]) -> list[Found | None]:
        """What is under the keys."""
        described = self._store.batch_get_replica_desc(list(dict.fromkeys(keys)))
        if not described:
            # So it answers, too, if the master does not.
            codes = self._store.batch_is_exist(list(keys[:1]))
            if any(code < 0 for code in codes):
                raise error_of(codes[0], "lookup")
            return [None] * len(keys)
        lengths = {key: length for key, replicas in described.items() if (length := length_of(replicas)) is not None}
        there = list(lengths)
        texts = dict(zip(there, self._store.get_batch([META + key for key in there]), strict=True)) if there else {}
        return [found_of(key, lengths[key], texts[key]) if key in lengths else None for key in keys]

    def _remove(self, keys: list[str]) -> dict[str, bool | TierError]:
        """Removes objects and their texts, each as soon as its lease has ended; whether they were there."""
        results: dict[str, bool | TierError] = {}
        until = time.monotonic() + LEASE_WAIT
        left = keys
        while left:
            codes = dict(zip(left, self._store.batch_remove(left, False), strict=True))
            is_late = time.monotonic() >= until
            left = [key for key, code in codes.items() if code == LEASED and not is_late]
            for key, code in codes.items():
                if code in (0, NOT_FOUND):
                    results[key] = code == 0
                elif key not in left:
                    results[key] = error_of(code, "removal")
            if left:
                time.sleep(LEASE_PAUSE)
        if gone := [key for key in keys if isinstance(results[key], bool)]:
            # The next object under a key would be compared with it.
            self._store.batch_remove([META + key for key in gone], True)
        return results


def length_of(replicas: Sequence[Any]) -> int | None:
    """The length of an object, ``None`` if no replica of it is in memory or on a disk."""
    for replica in replicas:
        if replica.is_memory_replica():
            return replica.get_memory_descriptor().buffer_descriptor.size
        if replica.is_disk_replica():
            return replica.get_disk_descriptor().object_size
    return None


def text_of(key: str, length: int, meta: str) -> bytes:
    """The text beside an object. It names its key: what is read while it is removed may be the text of another object."""
    return f"{digest(key)} {length} {meta}".encode()


def digest(key: str) -> str:
    """A short name of a key."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def found_of(key: str, length: int, text: bytes) -> Found:
    """An object of this length with this text beside it, which anyone may have written."""
    match = re.fullmatch(rb"([0-9a-f]{32}) (\d{1,20}) ([ -~]{0,256})", text)
    if match and match[1].decode() == digest(key):
        told, meta = int(match[2]), match[3].decode()
        if told == length or (told, length) == (0, 1):
            return Found(told, meta)
    return Found(length)


def error_of(code: int, what: str) -> TierError:
    """The error of a number of Mooncake."""
    kinds = {NOT_FOUND: "not_found", NOT_READY: "not_found", LEASED: "busy", NO_SPACE: "full"}
    reason = "the master does not answer" if code == UNREACHABLE else f"Mooncake's error {code}"
    return TierError(kinds.get(code, "unavailable"), f"{what}: {reason}")


class _Buffer(ctypes.Structure):
    """``Py_buffer``; only the first field is read."""

    _fields_ = [("buf", ctypes.c_void_p), ("rest", ctypes.c_byte * 128)]


def address(view: memoryview) -> int:
    """Where the bytes of a view are, also of a read-only one."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return buffer.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(B|[KMGT]iB)?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give bytes, or a number with KiB, MiB, GiB or TiB")
    return int(match[1]) << {None: 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[match[2]]


def _make(arguments: argparse.Namespace) -> Tier:
    # Otherwise each request is a line; errors are ours to report.
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise OSError(
            f"Mooncake's package cannot be imported ({error}); install mooncake-transfer-engine or "
            "mooncake-transfer-engine-non-cuda, and the libraries of libibverbs1"
        ) from error
    store = MooncakeDistributedStore()
    code = store.setup(
        arguments.local_hostname,
        arguments.metadata_server,
        arguments.global_segment_size,
        arguments.local_buffer_size,
        arguments.protocol,
        arguments.rdma_devices,
        arguments.master_server_addr,
    )
    if code:
        raise OSError(
            f"Mooncake's client could not be set up (error {code}): master {arguments.master_server_addr}, metadata server "
            f"{arguments.metadata_server}, local host name {arguments.local_hostname}"
        )
    return Mooncake(store)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serves Mooncake Store as a second tier of kvtier.")
    parser.add_argument("--local-hostname", required=True, help="HOST:PORT under which other clients reach this one")
    parser.add_argument("--metadata-server", required=True, help="URL of the metadata server, or P2PHANDSHAKE")
    parser.add_argument("--master-server-addr", required=True, help="HOST:PORT of mooncake_master")
    parser.add_argument("--protocol", default="tcp", choices=["tcp", "rdma"], help="transport (default: %(default)s)")
    parser.add_argument("--rdma-devices", default="", help="names of RDMA devices, separated by commas")
    parser.add_argument(
        "--global-segment-size", type=_bytes, default=0, help="memory of this host for the store, such as 16GiB (default: none)"
    )
    parser.add_argument(
        "--local-buffer-size", type=_bytes, default=64 << 20, help="memory for the texts beside objects (default: 64MiB)"
    )
    sys.exit(main(_make, parser))
