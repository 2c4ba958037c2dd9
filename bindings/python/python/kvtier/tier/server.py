"""Server of a tier: frames, shared memory and threads."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from .base import Found, Hello, LoadObject, StoreObject, Tier, TierError

VERSION = 1
MAGIC = b"KVT1"
HEADER = struct.Struct("<4sIQ")
MAX_FRAME = 4 << 20
MAX_META = 256
#: Longest error message that is sent, in characters.
MAX_MESSAGE = 500
#: Seconds that calls have to end when the server stops.
STOP_WAIT = 10.0


class ProtocolError(Exception):
    """The other side broke the protocol; its connection is closed."""


class CallsLeft(Exception):
    """Calls of the tier did not end when the server stopped. Only the end of the process ends them."""


class Connection:
    """One kvtier and its segment."""

    def __init__(self, sock: socket.socket, tier: Tier) -> None:
        self._sock = sock
        self._tier = tier
        self._writing = threading.Lock()
        self._segment: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._read_only = memoryview(b"")
        self._is_mapped = False
        self._max_batch = tier.capabilities.max_batch
        self._ops: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "ping": lambda _: {},
            "store": self._store,
            "lookup": self._lookup,
            "load": self._load,
            "delete": self._delete,
            "list": self._list,
            "free_bytes": lambda _: {"free_bytes": self._tier.free_bytes()},
        }

    def run(self) -> None:
        """Serves until the other side closes the connection or breaks the protocol."""
        threads = self._tier.capabilities.max_in_flight
        pool = ThreadPoolExecutor(threads, thread_name_prefix="kvtier-call")
        try:
            if not self._greet():
                return
            while (frame := self._receive()) is not None:
                pool.submit(self._answer, *frame)
        except (ProtocolError, OSError) as error:
            _log(f"connection closed: {error}")
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            self._sock.close()
            if self._is_mapped:
                self._tier.unmapped(self._view)
            self._unmap()

    def stop(self) -> None:
        """Ends :meth:`run`; calls that run are finished and answered."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def _greet(self) -> bool:
        # The descriptor comes with the first byte.
        head, fds, _, _ = socket.recv_fds(self._sock, HEADER.size, 4)
        try:
            if not head:
                return False
            frame = self._receive(head)
            if frame is None:
                return False
            request_id, hello = frame
            if hello.get("op") != "hello":
                raise ProtocolError("the first request is no hello")
            if VERSION not in hello.get("versions", []):
                self._send(request_id, {"error": "unsupported", "message": f"this tier speaks version {VERSION}"})
                raise ProtocolError(f"versions {hello.get('versions')} are not spoken here")
            if len(fds) != 1:
                raise ProtocolError(f"{len(fds)} descriptors came with the hello, not 1")
            size = _whole(hello, "segment_bytes")
            if not 0 < size <= os.fstat(fds[0]).st_size:
                raise ProtocolError(f"the segment is smaller than {size} bytes")
            self._segment = mmap.mmap(fds[0], size)
            self._view = memoryview(self._segment)
            self._read_only = self._view.toreadonly()
        finally:
            for fd in fds:
                os.close(fd)
        options = hello.get("options") or {}
        try:
            self._tier.connected(Hello(str(hello.get("client")), str(hello.get("instance")), options))
            self._tier.mapped(self._view)
            self._is_mapped = True
        except TierError as error:
            self._send(request_id, _error(error))
            return False
        can = self._tier.capabilities
        self._send(
            request_id,
            {
                "version": VERSION,
                "tier": self._tier.name,
                "capabilities": {
                    "delete": can.delete,
                    "list": can.list,
                    "shared": can.shared,
                    "metadata": can.metadata,
                    "free_bytes": can.free_bytes,
                },
                "overhead_bytes": can.overhead_bytes,
                "max_object_bytes": can.max_object_bytes,
                "max_key_bytes": can.max_key_bytes,
                "max_in_flight": can.max_in_flight,
                "max_batch": can.max_batch,
            },
        )
        return True

    def _receive(self, head: bytes = b"") -> tuple[int, dict[str, Any]] | None:
        head += self._exactly(HEADER.size - len(head), may_end=not head)
        if not head:
            return None
        magic, length, request_id = HEADER.unpack(head)
        if magic != MAGIC or length > MAX_FRAME:
            raise ProtocolError(f"no frame: {head.hex()}")
        try:
            body = json.loads(self._exactly(length))
        except ValueError as error:
            raise ProtocolError(f"a body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise ProtocolError("a body is no object")
        return request_id, body

    def _exactly(self, count: int, *, may_end: bool = False) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._sock.recv(min(count - len(parts), 1 << 20))
            if not part:
                if may_end and not parts:
                    return b""
                raise ProtocolError("the connection ended inside a frame")
            parts += part
        return bytes(parts)

    def _send(self, request_id: int, body: dict[str, Any]) -> None:
        text = json.dumps(body, separators=(",", ":")).encode()
        if len(text) > MAX_FRAME:
            text = json.dumps({"error": "refused", "message": f"an answer of {len(text)} bytes is too long"}).encode()
        with self._writing:
            self._sock.sendall(HEADER.pack(MAGIC, len(text), request_id) + text)

    def _answer(self, request_id: int, body: dict[str, Any]) -> None:
        op = body.get("op")
        try:
            work = self._ops.get(str(op))
            answer = work(body) if work else {"error": "unsupported", "message": f"no operation {op!r}"}
        except TierError as error:
            answer = _error(error)
        except ProtocolError as error:
            answer = {"error": "refused", "message": str(error)[:MAX_MESSAGE]}
        except Exception as error:  # A tier may raise anything; kvtier gets an answer, stderr the cause.
            _log("".join(traceback.format_exception(error)).rstrip())
            answer = {"error": "unavailable", "message": f"{type(error).__name__}: {error}"[:MAX_MESSAGE]}
        # If it fails, the reader sees the end too.
        with suppress(OSError):
            self._send(request_id, answer)

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        objects = [
            StoreObject(_text(item, "key"), self._memory(item, self._read_only), _text(item, "meta"), item.get("replace") is True)
            for item in self._items(body, "objects")
        ]
        results = _counted(self._tier.store(objects), len(objects))
        return {"results": [_error(new) if isinstance(new, TierError) else {"new": bool(new)} for new in results]}

    def _lookup(self, body: dict[str, Any]) -> dict[str, Any]:
        keys = self._keys(body)
        return {"results": [_found(found) for found in _counted(self._tier.lookup(keys), len(keys))]}

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        items = self._items(body, "objects")
        objects = [LoadObject(_text(item, "key"), self._memory(item, self._view)) for item in items]
        results = _counted(self._tier.load(objects), len(objects))
        missing = TierError("not_found")
        return {"results": [_found(missing if found is None else found) for found in results]}

    def _delete(self, body: dict[str, Any]) -> dict[str, Any]:
        keys = self._keys(body)
        results = _counted(self._tier.delete(keys), len(keys))
        return {"results": [_error(was) if isinstance(was, TierError) else bool(was) for was in results]}

    def _list(self, body: dict[str, Any]) -> dict[str, Any]:
        cursor = body.get("cursor")
        if cursor is not None and not isinstance(cursor, str):
            raise ProtocolError("cursor is no text")
        objects, following = self._tier.list(cursor, _whole(body, "limit"))
        listed = [{"key": one.key, "len": one.length, "used_at": one.used_at} for one in objects]
        return {"objects": listed, "next": following}

    def _items(self, body: dict[str, Any], name: str) -> list[Any]:
        items = body.get(name)
        if not isinstance(items, list) or len(items) > self._max_batch:
            raise ProtocolError(f"{name} is no list of at most {self._max_batch}")
        return items

    def _keys(self, body: dict[str, Any]) -> list[str]:
        keys = self._items(body, "keys")
        if not all(isinstance(key, str) for key in keys):
            raise ProtocolError("a key is no text")
        return keys

    def _memory(self, item: dict[str, Any], view: memoryview) -> memoryview:
        at, length = _whole(item, "at"), _whole(item, "len")
        if at + length > len(view):
            raise ProtocolError(f"{length} bytes at {at} are outside of the segment")
        return view[at : at + length]

    def _unmap(self) -> None:
        # A tier that kept a view keeps the mapping, until it drops that.
        with suppress(BufferError):
            self._read_only.release()
            self._view.release()
            if self._segment is not None:
                self._segment.close()


def _whole(item: Any, name: str) -> int:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ProtocolError(f"{name} is no whole number from 0 on")
    return value


def _text(item: Any, name: str) -> str:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise ProtocolError(f"{name} is no text")
    return value


def _counted(results: Sequence[Any], count: int) -> Sequence[Any]:
    if len(results) != count:
        raise TierError("unavailable", f"the tier gave {len(results)} results for {count} objects")
    return results


def _error(error: TierError) -> dict[str, Any]:
    return {"error": error.kind, "message": error.message[:MAX_MESSAGE]}


def _found(found: Found | TierError | None) -> dict[str, Any] | None:
    if found is None:
        return None
    if isinstance(found, TierError):
        return _error(found)
    return {"len": found.length, "meta": found.meta}


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def serve(socket_path: str | os.PathLike[str], tier: Tier, *, stop: threading.Event | None = None) -> None:
    """Serves ``tier`` on a unix socket until SIGTERM, SIGINT or ``stop``, then closes it.

    The socket is usable only by this user and root. One that an earlier process left is replaced; one that a process listens
    on is an error. Signals are handled only if this is the main thread. A program that kvtier has started also ends when its
    standard input does, which is when kvtier has ended. Calls in flight have 10 s to end, else :class:`CallsLeft` is raised.
    """
    path = os.fspath(socket_path)
    stop = stop or threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    if os.environ.get("KVTIER_SOCKET") == path and _is_pipe(sys.stdin):
        threading.Thread(target=_await_end, args=(stop,), name="kvtier-end", daemon=True).start()
    listener = _listen(path)
    inode = os.stat(path).st_ino
    connections: dict[threading.Thread, Connection] = {}
    try:
        while not stop.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            sock.settimeout(None)
            connection = Connection(sock, tier)
            thread = threading.Thread(target=connection.run, name="kvtier-connection", daemon=True)
            connections = {thread: one for thread, one in connections.items() if thread.is_alive()}
            connections[thread] = connection
            thread.start()
    finally:
        listener.close()
        with suppress(OSError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)
        for connection in connections.values():
            connection.stop()
        until = time.monotonic() + STOP_WAIT
        for thread in connections:
            thread.join(max(until - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in connections):
            raise CallsLeft(f"calls of the tier did not end within {STOP_WAIT:g} s")
        tier.close()


def _is_pipe(stream: Any) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):
        return False


def _await_end(stop: threading.Event) -> None:
    """Waits for the end of kvtier, which holds the other end of our standard input."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    stop.set()


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)
                else:
                    raise FileExistsError(f"{path}: another process listens there")
        mask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        listener.listen(16)
        # Signals are seen between two waits.
        listener.settimeout(0.2)
    except BaseException:
        listener.close()
        raise
    return listener


def main(make: Callable[[argparse.Namespace], Tier], parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Runs a tier as a program: adds ``--socket`` to the parser, and returns the exit status."""
    # kvtier sets it for a command that it starts.
    path = os.environ.get("KVTIER_SOCKET")
    help_text = "path of the unix socket that kvtier connects to (default: the variable KVTIER_SOCKET)"
    parser.add_argument("--socket", default=path, required=not path, help=help_text)
    arguments = parser.parse_args(argv)
    try:
        serve(arguments.socket, make(arguments))
    except OSError as error:
        _log(str(error))
        return 1
    except CallsLeft as error:
        _log(f"{error}; ending without them")
        # Python's own end waits for their threads.
        os._exit(1)
    return 0
