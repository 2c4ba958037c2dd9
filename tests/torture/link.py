"""A TCP proxy in a process of its own, whose connections can be cut, delayed, frozen in one direction, and changed.

Loss of packets is what a reader of TCP sees of it: a piece that is late by a retransmission.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import threading
import time

from kvrig.fragments import reset

TO_SERVER, TO_CLIENT = 0, 1
# Seconds until Linux sends a lost segment again, at least.
RETRANSMISSION = 0.2
# Connections end 10 s after their other side was lost.
OPTIONS = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
]  # fmt: skip
# Bytes from which on a piece is of an object.
OBJECT_PIECE = 1000
# Of an object's trailer (kvtier-l2, trailer.rs): its first bytes, its length, and where its checksum is.
TRAILER, TRAILER_BYTES, TRAILER_SUM = b"kvtr\x02\0", 64, 56


class Link:
    """Forwards connections from `port` to `target`, both of `host`. It is forked at the start, and ends with its parent's pipe."""

    def __init__(self, port, target, host="127.0.0.1"):
        self.url = f"tcp://{host}:{port}"
        read, self.pipe = os.pipe()
        listener = socket.create_server((host, port))
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                os.close(self.pipe)
                _Forwarding(listener, (host, target)).obey(read)
            finally:
                os._exit(0)
        os.close(read)
        listener.close()

    def say(self, *order):
        """cut; delay SECONDS LENGTH; freeze DIRECTION LENGTH; lose SHARE; damage or version LENGTH, of what the server sends."""
        os.write(self.pipe, json.dumps(order).encode() + b"\n")

    def close(self):
        """Ends it with all connections."""
        os.close(self.pipe)
        os.waitpid(self.pid, 0)


class _Forwarding:
    def __init__(self, listener, target):
        self.listener, self.target, self.open = listener, target, set()
        self.delay, self.delayed_until, self.frozen_until, self.lost = 0.0, 0.0, [0.0, 0.0], 0.0
        self.change, self.changed_until = None, 0.0
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
                elif what == "lose":
                    self.lost = values[0]
                elif what in CHANGES:
                    self.change, self.changed_until = CHANGES[what], time.monotonic() + values[0]
                else:
                    self.frozen_until[values[0]] = time.monotonic() + values[1]

    def accept(self):
        """A pair of threads per connection."""
        while True:
            client, _ = self.listener.accept()
            try:
                server = socket.create_connection(self.target, 5)
            except OSError:
                reset(client)
                continue
            server.settimeout(None)
            for source, sink, direction in ((client, server, TO_SERVER), (server, client, TO_CLIENT)):
                for level, option, value in OPTIONS:
                    source.setsockopt(level, option, value)
                self.open.add(source)
                threading.Thread(target=self.forward, args=(source, sink, direction), daemon=True).start()

    def forward(self, source, sink, direction):
        """Until either side ends."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                now = time.monotonic()
                if now < self.delayed_until:
                    time.sleep(self.delay)
                if random.random() < self.lost:
                    time.sleep(RETRANSMISSION)
                if now < self.changed_until and direction == TO_CLIENT:
                    data = self.change(data)
                while (left := self.frozen_until[direction] - time.monotonic()) > 0:
                    time.sleep(left)
                sink.sendall(data)
        for stream in (source, sink):
            self.open.discard(stream)
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        source.close()


def damaged(data):
    """One bit is another one, in pieces that are of an object, and rarely in others: without those no object is asked for."""
    data = bytearray(data)
    if len(data) > OBJECT_PIECE or random.random() < 0.05:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return data


def of_other_version(data):
    """Trailers are of a version to come, and intact."""
    data, at = bytearray(data), 0
    checksum = ctypes.CDLL("libxxhash.so.0").XXH3_64bits
    checksum.argtypes, checksum.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_uint64
    while 0 <= (at := data.find(TRAILER, at)) <= len(data) - TRAILER_BYTES:
        data[at + 4] += 1
        found = checksum(bytes(data[at : at + TRAILER_SUM]), TRAILER_SUM)
        data[at + TRAILER_SUM : at + TRAILER_BYTES] = found.to_bytes(8, "little")
    return data


CHANGES = {"damage": damaged, "version": of_other_version}
