"""Sockets of one pyzmq release, in a process of its own that the test controls.

`Peer` starts the process with the unpacked wheel first in its path, and runs methods of `Sockets` there by name. Requests and
results go through its pipes, pickled.
"""

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

HOME = Path(os.environ.get("KVTIER_E2E_HOME") or Path.home() / ".cache/kvtier-e2e")
HARNESS = Path(__file__).resolve().parents[1]
# Seconds for what takes milliseconds on an idle machine.
DEADLINE = 60.0

GET_CHUNK_SIZE, PING = b"\x15", b"\x16"
TRUE, NIL = b"\xc3", b"\xc0"


def number(value):
    """A number as MessagePack; always 3 bytes."""
    return b"\xcd" + value.to_bytes(2, "big")


def requests(first, count):
    """get_chunk_size and pings in turn, with the uids from `first` on."""
    kinds = ([GET_CHUNK_SIZE], [PING, NIL])
    return [[number(uid), *kinds[uid % 2]] for uid in range(first, first + count)]


def answers(first, count, chunk):
    """The replies to `requests`."""
    kinds = ([GET_CHUNK_SIZE, bytes([chunk])], [PING, TRUE])
    return [[number(uid), *kinds[uid % 2]] for uid in range(first, first + count)]


class Peer:
    """The process of a release, and its sockets by name."""

    def __init__(self, release, log):
        wheel = HOME / "clients" / f"pyzmq-{release}"
        if not wheel.is_dir():
            raise FileNotFoundError(f"no pyzmq {release} in {wheel}: run tests/setup.sh")
        path = os.pathsep.join([str(wheel), str(HARNESS)])
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvrig.pyzmq_peer"],
                env=dict(os.environ, PYTHONPATH=path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out,
            )  # fmt: skip
        version, module = self.call("version")
        assert version == release and Path(module).is_relative_to(wheel), f"pyzmq {version} of {module}, not {release}"

    def call(self, method, *args, **options):
        """Runs a method of `Sockets`; returns its result or raises its failure."""
        pickle.dump((method, args, options), self.process.stdin)
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 2 * DEADLINE)[0], f"{method}: no answer of the process"
        result, failure = pickle.load(self.process.stdout)
        assert failure is None, f"{method}: {failure}"
        return result

    def ask(self, socket, first, count, chunk):
        """Sends `count` requests at once; every reply must come, in their order."""
        self.call("send", socket, requests(first, count))
        self.expect(socket, first, count, chunk)

    def expect(self, socket, first, count, chunk):
        """Receives the replies to requests, in their order."""
        assert self.call("receive", socket, count) == answers(first, count, chunk)

    @contextmanager
    def stopped(self):
        """SIGSTOP, until the block ends. Returns once the process stands still."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self):
        """Ends the process."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Sockets:
    """What `Peer.call` runs, in the process of the release."""

    def __init__(self):
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        self.zmq, self.next_event = zmq, recv_monitor_message
        self.context = zmq.Context()
        self.sockets, self.monitors = {}, {}

    def version(self):
        """(version, path) of what was imported."""
        return self.zmq.__version__, self.zmq.__file__

    def open(self, name, url, kind="DEALER", **options):
        """Makes a socket with these options (`heartbeat_ivl=100`) and connects it; a ROUTER is bound, to a port it returns."""
        socket = self.sockets[name] = self.context.socket(getattr(self.zmq, kind))
        for option, value in {"linger": 0, **options}.items():
            socket.setsockopt(getattr(self.zmq, option.upper()), value)
        self.monitors[name] = socket.get_monitor_socket()
        if kind == "ROUTER":
            return socket.bind_to_random_port(url)
        socket.connect(url)
        return None

    def close(self, *names):
        """Closes sockets."""
        for name in names:
            # Needs the monitor's reader, else it waits for one.
            self.sockets[name].disable_monitor()
            self.monitors.pop(name).close()
            self.sockets.pop(name).close()

    def send(self, name, messages):
        """Sends messages without waiting for any answer. A frame may be (byte, count), for large ones."""
        for message in messages:
            frames = [frame if isinstance(frame, bytes) else frame[0] * frame[1] for frame in message]
            self.sockets[name].send_multipart(frames, copy=False)

    def receive(self, name, count, timeout=DEADLINE):
        """Receives `count` messages."""
        socket, received, deadline = self.sockets[name], [], time.monotonic() + timeout
        while len(received) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not socket.poll(left * 1000):
                raise TimeoutError(f"{len(received)} of {count} messages in {timeout} s, the last {received[-1:]}")
            received.append(socket.recv_multipart())
        return received

    def exchange(self, name, message):
        """Sends one request and receives its reply."""
        self.send(name, [message])
        return self.receive(name, 1)[0]

    def wait_event(self, name, event, timeout=DEADLINE):
        """Waits for an event of the socket's connection, and consumes those before it."""
        deadline, wanted, seen = time.monotonic() + timeout, getattr(self.zmq, f"EVENT_{event}"), []
        while (left := deadline - time.monotonic()) > 0:
            if self.monitors[name].poll(left * 1000):
                seen.append(int(self.next_event(self.monitors[name])["event"]))
                if seen[-1] == wanted:
                    return
        raise TimeoutError(f"no {event} in {timeout} s, but {seen}")

    def events(self, name):
        """Names of the events so far that were not consumed."""
        names = {int(getattr(self.zmq, key)): key[6:] for key in dir(self.zmq) if key.startswith("EVENT_") and key[6:9] != "ALL"}
        seen = []
        while self.monitors[name].poll(0):
            seen.append(names.get(int(self.next_event(self.monitors[name])["event"])))
        return seen

    def answer_pings(self, name, count):
        """As a server, receives `count` pings and answers each; returns them without the connection's identity."""
        seen = []
        for _ in range(count):
            [[identity, uid, *request]] = self.receive(name, 1)
            self.send(name, [[identity, uid, request[0], TRUE]])
            seen.append([uid, *request])
        return seen


def main():
    """Runs what is asked for until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout, sockets = sys.stderr, Sockets()
    while True:
        try:
            method, args, options = pickle.load(source)
        except EOFError:
            break
        try:
            reply = getattr(sockets, method)(*args, **options), None
        except Exception:
            reply = None, traceback.format_exc()
        pickle.dump(reply, sink)
        sink.flush()
    sockets.context.destroy(linger=0)


if __name__ == "__main__":
    main()
