"""The server of tiers in a process of their own: what it refuses, and how it starts and ends. The suite of adapters runs the
directory (`crates/kvtier-l2-process/src/tests/python.rs`)."""

import array
import errno
import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kvtier.tier import Capabilities, Found, Key, StoreObject, Tier, TierError, serve
from kvtier.tier.directory import Directory

HEADER = struct.Struct("<4sIQ")
SEGMENT = 1 << 20


class Client:
    """kvtier's side, frame by frame."""

    def __init__(self, path, hello=None, descriptors=1):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        while True:
            try:
                self.sock.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                continue
        fd = os.memfd_create("test")
        os.ftruncate(fd, SEGMENT)
        self.memory = mmap.mmap(fd, SEGMENT)
        hello = hello or {"op": "hello", "versions": [1], "segment_bytes": SEGMENT, "options": {"a": 1}}
        fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * descriptors))]
        self.sock.sendmsg([self.frame(0, hello)], fds if descriptors else [])
        os.close(fd)

    @staticmethod
    def frame(request_id, body):
        text = json.dumps(body).encode()
        return HEADER.pack(b"KVT1", len(text), request_id) + text

    def read(self):
        """The next answer, None at the end."""
        head = self.exactly(HEADER.size)
        if len(head) < HEADER.size:
            return None
        _, length, request_id = HEADER.unpack(head)
        return request_id, json.loads(self.exactly(length))

    def exactly(self, count):
        data = b""
        try:
            while len(data) < count and (part := self.sock.recv(count - len(data))):
                data += part
        except ConnectionResetError:
            # It was closed before it had read all.
            return b""
        return data

    def ask(self, **body):
        self.sock.sendall(self.frame(7, body))
        request_id, answer = self.read()
        assert request_id == 7
        return answer


@pytest.fixture
def served(tmp_path):
    """Serves tiers in threads; gives the path of the socket."""
    stops, threads = [], []

    def start(tier):
        path = str(tmp_path / f"socket-{len(stops)}")
        stop = threading.Event()
        thread = threading.Thread(target=serve, args=(path, tier), kwargs={"stop": stop})
        thread.start()
        stops.append(stop)
        threads.append(thread)
        return path

    yield start
    for stop in stops:
        stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


class Failing(Tier):
    """Fails as the key says."""

    capabilities = Capabilities(max_batch=2)

    def store(self, objects):
        return [True]

    def lookup(self, keys):
        if keys[0] == "raise":
            raise ZeroDivisionError("a defect")
        if keys[0] == "whole":
            raise TierError("busy", "later")
        return [TierError("unreadable", "x") if key == "one" else Found(3, "m") for key in keys]

    def load(self, objects):
        return [None for _ in objects]


def test_failures_are_answers(served):
    """A tier that raises, or returns another number of results, fails that call only."""
    client = Client(served(Failing()))
    assert client.read()[1]["capabilities"]["list"] is True
    assert client.ask(op="lookup", keys=["raise"]) == {"error": "unavailable", "message": "ZeroDivisionError: a defect"}
    assert client.ask(op="lookup", keys=["whole"]) == {"error": "busy", "message": "later"}
    assert client.ask(op="lookup", keys=["one", "b"])["results"][1] == {"len": 3, "meta": "m"}
    two = [{"key": "a", "len": 1, "at": 0, "meta": ""}] * 2
    assert client.ask(op="store", objects=two)["error"] == "unavailable"
    assert client.ask(op="load", objects=two[:1])["results"][0]["error"] == "not_found"
    assert client.ask(op="delete", keys=["a"])["error"] == "unsupported"
    assert client.ask(op="other")["error"] == "unsupported"
    assert client.ask(op="ping") == {}


@pytest.mark.parametrize(
    "item",
    [
        {"key": "a", "len": SEGMENT + 1, "at": 0},
        {"key": "a", "len": 1, "at": SEGMENT},
        {"key": "a", "len": -1, "at": 0},
        {"key": "a", "len": 1.5, "at": 0},
        {"key": "a", "len": True, "at": 0},
        {"key": 7, "len": 1, "at": 0},
        "a",
    ],
)
def test_memory_outside_the_segment_is_refused(served, tmp_path, item):
    """No object reaches the tier whose memory is not inside of the segment."""
    client = Client(served(Directory(tmp_path / "objects")))
    client.read()
    assert client.ask(op="load", objects=[item])["error"] == "refused"
    assert client.ask(op="ping") == {}


def test_too_many_objects_are_refused(served):
    """A batch is at most what the tier said."""
    client = Client(served(Failing()))
    client.read()
    assert client.ask(op="lookup", keys=["b"] * 3)["error"] == "refused"


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(b"KVT1", (4 << 20) + 1, 1), Client.frame(1, [])])
def test_other_bytes_end_their_connection_only(served, junk):
    """A connection that breaks the protocol is closed; others go on."""
    path = served(Failing())
    other, client = Client(path), Client(path)
    other.read(), client.read()
    client.sock.sendall(junk)
    assert client.read() is None
    assert other.ask(op="ping") == {}


def test_hello_without_segment_or_version_is_refused(served):
    """Nothing is served before a complete hello."""
    path = served(Failing())
    assert Client(path, descriptors=0).read() is None
    assert Client(path, descriptors=2).read() is None
    assert Client(path, {"op": "hello", "versions": [1], "segment_bytes": SEGMENT + 1}).read() is None
    assert Client(path, {"op": "ping"}).read() is None
    assert Client(path, {"op": "hello", "versions": [2]}).read()[1]["error"] == "unsupported"


def test_socket_of_a_running_tier_is_not_replaced(served, tmp_path):
    """A second process fails; the socket that an ended one left is replaced."""
    path = served(Failing())
    client = Client(path)
    client.read()
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        serve(path, Failing())
    assert client.ask(op="ping") == {}
    left = str(tmp_path / "left")
    socket.socket(socket.AF_UNIX).bind(left)
    stop = threading.Event()
    stop.set()
    serve(left, Failing(), stop=stop)
    assert not Path(left).exists()


@pytest.mark.parametrize("end", ["signal", "input"])
def test_program_ends_by_signal_and_with_kvtier(tmp_path, end):
    """SIGTERM ends it; so does the end of its input if kvtier has started it."""
    path = str(tmp_path / "socket")
    command = [sys.executable, "-m", "kvtier.tier.directory", "--path", str(tmp_path / "objects")]
    process = subprocess.Popen(command, env={**os.environ, "KVTIER_SOCKET": path}, stdin=subprocess.PIPE)
    Client(path).read()
    if end == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        process.stdin.close()
    assert process.wait(60) == 0
    assert not Path(path).exists()


@pytest.mark.parametrize(
    "header", [b"[" * 60_000, b'{"key":"a","meta":"m","len":3.0}', b'{"key":"a","meta":"m","len":"3"}', b'{"len":3}', b"[]", b"3"]
)
def test_damaged_file_costs_its_object_only(served, tmp_path, header):
    """A header that is anything is a miss; the object beside it in the batch is found."""
    client = Client(served(Directory(tmp_path / "objects")))
    client.read()
    client.memory[:3] = b"abc"
    items = [{"key": key, "len": 3, "at": 0, "meta": "m"} for key in ("a", "b")]
    assert client.ask(op="store", objects=items)["results"] == [{"new": True}] * 2
    files = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    damaged = next(path for path in files if b'"key": "a"' in path.read_bytes())
    damaged.write_bytes(struct.pack("<8sI", b"kvdir 1\n", len(header)) + header + b"abc")
    found = {"len": 3, "meta": "m"}
    assert client.ask(op="lookup", keys=["a", "b"])["results"] == [None, found]
    failed, loaded = client.ask(op="load", objects=[{**item, "at": 9} for item in items])["results"]
    assert (failed["error"], loaded) == ("corrupt", found)
    # A store replaces it.
    assert client.ask(op="store", objects=items)["results"] == [{"new": True}, {"new": False}]
    assert client.ask(op="lookup", keys=["a"])["results"] == [found]


def test_directory_stores_while_another_process_starts_and_without_locks(tmp_path, monkeypatch):
    """A temporary file is removed before it is locked: it is written again."""
    tier, lock, failures = Directory(tmp_path), fcntl.flock, [lambda: Directory(tmp_path)]
    found = Found(3, "m")

    def store(key):
        return tier.store([StoreObject(key, memoryview(b"abc"), "m")]) + tier.lookup([key])

    def locked(file, how):
        if failures:
            failures.pop()()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", locked)
    assert store("a") == [True, found] and not failures

    def unknown(file, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", unknown)
    assert store("b") == [True, found]


STUCK = """
import argparse, sys, threading
from kvtier.tier import Tier, main, server

server.STOP_WAIT = 0.2

class Stuck(Tier):
    def store(self, objects):
        return []
    def lookup(self, keys):
        print("called", flush=True)
        threading.Event().wait()
    def load(self, objects):
        return []

sys.exit(main(lambda _: Stuck(), argparse.ArgumentParser()))
"""


def test_program_ends_though_a_call_hangs(tmp_path):
    """A backend that never answers does not keep the program from ending."""
    path = str(tmp_path / "socket")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", STUCK, "--socket", path], text=True, **pipes)
    try:
        client = Client(path)
        client.read()
        client.sock.sendall(client.frame(1, {"op": "lookup", "keys": ["a"]}))
        assert process.stdout.readline() == "called\n"
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "did not end within 0.2 s" in told


def test_keys_read_back():
    """The parts of a key make its text again."""
    text = f"org/m@02000200@1f@{'ab' * 32}@tenant"
    key = Key.parse(text)
    assert (key.model, key.kv_rank, key.object_group, key.cache_salt) == ("org/m", 0x02000200, 31, "tenant")
    assert str(key) == text
    with pytest.raises(ValueError, match="2 parts"):
        Key.parse("a@b")
