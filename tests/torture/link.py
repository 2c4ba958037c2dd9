"""A TCP proxy in a process of its own, whose connections can be cut, delayed, and frozen in one direction."""

import contextlib
import json
import os
import signal
import socket
import threading
import time

from kvrig.fragments import reset

TO_SERVER, TO_CLIENT = 0, 1


class Link:
    """Forwards connections from `port` to `target`. It is forked at the start, and ends with its parent's pipe."""

    def __init__(self, port, target):
        self.url = f"tcp://127.0.0.1:{port}"
        read, self.pipe = os.pipe()
        listener = socket.create_server(("127.0.0.1", port))
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                os.close(self.pipe)
                _Forwarding(listener, target).obey(read)
            finally:
                os._exit(0)
        os.close(read)
        listener.close()

    def say(self, *order):
        """cut; delay SECONDS LENGTH; freeze DIRECTION LENGTH."""
        os.write(self.pipe, json.dumps(order).encode() + b"\n")

    def close(self):
        """Ends it with all connections."""
        os.close(self.pipe)
        os.waitpid(self.pid, 0)


class _Forwarding:
    def __init__(self, listener, target):
        self.listener, self.target, self.open = listener, target, set()
        self.delay, self.delayed_until, self.frozen_until = 0.0, 0.0, [0.0, 0.0]
        threading.Thread(target=self.accept, daemon=True).start()

    def obey(self, read):
        """Until the pipe ends."""
        with os.fdopen(read) as orders:
            for line in orders:
                what, *values = json.loads(line)
                if what == "cut":
                    for stream in list(self.open):
                        with contextlib.suppress(OSError):
                            stream.shutdown(socket.SHUT_RDWR)
                elif what == "delay":
                    self.delay, self.delayed_until = values[0], time.monotonic() + values[1]
                else:
                    self.frozen_until[values[0]] = time.monotonic() + values[1]

    def accept(self):
        """A pair of threads per connection."""
        while True:
            client, _ = self.listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                reset(client)
                continue
            server.settimeout(None)
            for source, sink, direction in ((client, server, TO_SERVER), (server, client, TO_CLIENT)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.open.add(source)
                threading.Thread(target=self.forward, args=(source, sink, direction), daemon=True).start()

    def forward(self, source, sink, direction):
        """Until either side ends."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                now = time.monotonic()
                if now < self.delayed_until:
                    time.sleep(self.delay)
                while (left := self.frozen_until[direction] - time.monotonic()) > 0:
                    time.sleep(left)
                sink.sendall(data)
        for stream in (source, sink):
            self.open.discard(stream)
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        source.close()
