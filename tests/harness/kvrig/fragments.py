"""A proxy of bytes between clients and a server on loopback, which cuts the streams into fragments and resets connections."""

import contextlib
import selectors
import socket
import struct
import threading
from collections import deque

from .waiting import wait_until

READ_BYTES = 1 << 16
# Seconds within which the other end reads what it was sent.
DEADLINE = 60.0
TO_SERVER, TO_CLIENT = "to_server", "to_client"

# Of linux/sock_diag.h and linux/inet_diag.h: an exact query of one TCP socket.
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, ANY_STATE, NO_COOKIE = 4, 20, 1, 0xFFFFFFFF, b"\xff" * 8
NETLINK_HEADER, SOCKET_ID, REPLY = struct.Struct("=IHHII"), struct.Struct("!HH4s12x4s12x4x"), struct.Struct("=BBBB48xII")
LISTENING = 10


def unread_bytes(stream):
    """Bytes that the process at the other end of a loopback connection has not read yet. /proc/net/tcp takes 2 ms."""
    try:
        (their_host, their_port), (host, port) = stream.getpeername(), stream.getsockname()
    except OSError:
        return 0
    wanted = SOCKET_ID.pack(their_port, port, socket.inet_aton(their_host), socket.inet_aton(host)) + NO_COOKIE
    query = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, ANY_STATE) + wanted
    header = NETLINK_HEADER.pack(NETLINK_HEADER.size + len(query), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
        netlink.send(header + query)
        reply = netlink.recv(4096)
    if NETLINK_HEADER.unpack_from(reply)[1] != SOCK_DIAG_BY_FAMILY:
        return 0  # it has ended
    _, state, _, _, _, unread = REPLY.unpack_from(reply, NETLINK_HEADER.size)
    return 0 if state == LISTENING else unread


def reset(stream):
    """Ends a connection by RST."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


class Link:
    """One forwarded connection. `bytes` and `writes` are by direction; `ended` is the side that ended it, or "proxy"."""

    def __init__(self, client, server):
        self.client, self.server, self.ended = client, server, None
        self.bytes = {TO_SERVER: bytearray(), TO_CLIENT: bytearray()}
        self.writes = {TO_SERVER: 0, TO_CLIENT: 0}


class FragmentingProxy:
    """Forwards connections from `port` to `target`.

    * `size()` returns the number of bytes of the next write; without it, bytes are forwarded as they arrive.
    * If `is_paced`, each write waits until the other end has read the one before.
    * `reset_each(direction, counts)`: each of the next connections is reset on both sides after that number of bytes in the
      direction, once the other end has read them. `resets` counts this.
    * `keeps_servers`: if a client ends a connection, the server does not learn it.
    """

    def __init__(self, target, size=None, is_paced=False, keeps_servers=False):
        self.target, self.size, self.is_paced, self.keeps_servers = target, size, is_paced, keeps_servers
        self.links, self.resets, self.limits, self.failure = [], 0, deque(), None
        self.selector, self.stopping = selectors.DefaultSelector(), False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def url(self):
        """Where clients connect."""
        return f"tcp://127.0.0.1:{self.port}"

    def reset_each(self, direction, counts):
        """See the class."""
        self.limits.extend((direction, count) for count in counts)

    def close(self):
        """Ends it, with all connections."""
        self.stopping = True
        self.thread.join()
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()
        if self.failure:
            raise self.failure

    def _run(self):
        try:
            while not self.stopping:
                for key, _ in self.selector.select(0.02):
                    if key.fileobj is self.listener:
                        self._accept()
                    elif key.fileobj.fileno() >= 0:
                        self._forward(*key.data)
        except BaseException as failure:  # noqa: BLE001
            self.failure = failure

    def _accept(self):
        client, _ = self.listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self.target), DEADLINE)
        except OSError:
            client.close()
            return
        link = Link(client, server)
        limited, count = self.limits.popleft() if self.limits else (None, None)
        self.links.append(link)
        if count == 0:
            self._reset(link)
            return
        for source, sink, direction in ((client, server, TO_SERVER), (server, client, TO_CLIENT)):
            source.settimeout(DEADLINE)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit = count if limited == direction else None
            self.selector.register(source, selectors.EVENT_READ, (link, source, sink, direction, limit))

    def _forward(self, link, source, sink, direction, limit):
        try:
            data = source.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._end(link, "client" if direction == TO_SERVER else "server")
            return
        if limit is not None:
            data = data[: limit - len(link.bytes[direction])]
        try:
            while data:
                piece = data[: self.size()] if self.size else data
                sink.sendall(piece)
                link.bytes[direction] += piece
                link.writes[direction] += 1
                data = data[len(piece) :]
                if self.is_paced:
                    self._wait_read(sink)
        except OSError:
            self._end(link, "server" if direction == TO_SERVER else "client")
            return
        if len(link.bytes[direction]) == limit:
            self._wait_read(sink)
            self._reset(link)

    def _wait_read(self, sink):
        wait_until(lambda: not unread_bytes(sink), DEADLINE, "the other end to read", interval=0.0001)

    def _end(self, link, by):
        link.ended = link.ended or by
        for stream in (link.client, link.server):
            if stream is link.server and by == "client" and self.keeps_servers:
                continue
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(stream)
            stream.close()

    def _reset(self, link):
        link.ended = "proxy"
        for stream in (link.server, link.client):
            with contextlib.suppress(KeyError):
                self.selector.unregister(stream)
            reset(stream)
        self.resets += 1
