"""A Redis server for tests: `redis-server` of the machine, on loopback, which ends with the test."""

import socket
import subprocess
import time

from .server import free_port


class Redis:
    """A server without persistence."""

    def __init__(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.port = directory, free_port()
        self.process = None
        self.start()

    def start(self):
        """Starts it, empty, and waits until it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [*command, "--dir", str(self.directory)], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        until = time.monotonic() + 30
        while True:
            try:
                assert self.ask("PING") == "PONG"
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < until, "redis-server does not answer"
                time.sleep(0.01)

    def ask(self, *arguments):
        """The reply to a command: a string, a number, bytes, None, or a list of them."""
        with socket.create_connection(("127.0.0.1", self.port), 30) as connection:
            parts = [part if isinstance(part, bytes) else str(part).encode() for part in arguments]
            connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
            with connection.makefile("rb") as stream:
                return read(stream)

    def keys(self):
        """The keys of objects: all but those of their checksums."""
        return sorted(key.decode() for key in self.ask("KEYS", "*") if not key.startswith(b"kvtier.sum@"))

    def stop(self):
        """Kills it."""
        self.process.kill()
        self.process.wait()


def read(stream):
    """One reply."""
    kind, line = stream.read(1), stream.readline()[:-2]
    if kind == b"+":
        return line.decode()
    if kind == b":":
        return int(line)
    if kind == b"$":
        return None if line == b"-1" else stream.read(int(line) + 2)[:-2]
    if kind == b"*":
        return [read(stream) for _ in range(int(line))]
    raise AssertionError(f"{kind}{line}")
