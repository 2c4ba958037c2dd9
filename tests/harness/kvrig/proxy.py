"""A proxy between engines and a server that does something at a chosen request, such as killing the server."""

import threading

import msgspec
import zmq

# LMCache 0.5.6's numbers of operations.
OPERATIONS = {
    1: "register_kv_cache", 6: "store", 7: "retrieve", 8: "lookup", 10: "wait_prefetch_status", 12: "free_lookup_locks",
    13: "end_session", 14: "register_kv_cache_engine_driven_context", 16: "prepare_store", 17: "commit_store",
    18: "prepare_retrieve", 19: "commit_retrieve", 20: "clear", 21: "get_chunk_size", 22: "ping",
    32: "get_experimental",
}  # fmt: skip


class Proxy:
    """Forwards messages; each engine's connection is one connection to the server.

    ``at(operation, action)``: the next request (or, with ``reply=True``, the next reply) of that operation is dropped,
    and ``action()`` is called. Optional features in ``hidden`` are not announced, as by an earlier server; ``named`` has the
    operations whose requests named a chunk size. ``cut()`` ends all connections, as the death of a server does; ``mend()`` listens again.
    """

    def __init__(self, server_url, port, hidden=()):
        self.server_url, self.url = server_url, f"tcp://127.0.0.1:{port}"
        self.seen = []
        self.hidden, self.named = set(hidden), set()
        self.actions, self.lock = {}, threading.Lock()
        self.wanted, self.is_open = True, threading.Event()
        self.stopping = False
        self.context = zmq.Context()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.is_open.wait(60)

    def at(self, operation, action=lambda: None, reply=False):
        """See the class."""
        assert operation in OPERATIONS.values(), operation
        with self.lock:
            self.actions[operation, reply] = action

    def cut(self):
        """End all connections, and accept none."""
        self.wanted = False

    def mend(self):
        """Accept connections (again)."""
        self.wanted = True
        assert self.is_open.wait(60)

    def close(self):
        """End it."""
        self.stopping = True
        self.thread.join()
        self.context.destroy(linger=0)

    def _drops(self, frames, reply):
        """Whether a message is dropped; does what was to be done at it. Hides features from its frames."""
        try:
            number = msgspec.msgpack.decode(frames[1])
        except (IndexError, msgspec.DecodeError):
            return False
        operation = OPERATIONS.get(number)
        self.seen.append((operation, reply))
        if not reply and any(b"kvtier.chunk_tokens" in frame for frame in frames):
            self.named.add(operation)
        if reply and operation == "get_experimental":
            features = msgspec.msgpack.decode(frames[2])
            frames[2] = msgspec.msgpack.encode([name for name in features if name not in self.hidden])
        with self.lock:
            action = self.actions.pop((operation, reply), None)
        if action is None:
            return False
        action()
        return True

    def _run(self):
        while not self.stopping:
            if not self.wanted:
                self.is_open.clear()
                threading.Event().wait(0.01)
                continue
            self._serve()

    def _serve(self):
        router = self.context.socket(zmq.ROUTER)
        router.linger = 0
        while True:
            try:
                router.bind(self.url)
                break
            except zmq.ZMQError:
                threading.Event().wait(0.01)
        self.is_open.set()
        servers = {}
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        try:
            while self.wanted and not self.stopping:
                for socket, _ in poller.poll(20):
                    frames = socket.recv_multipart()
                    if socket is router:
                        client, *message = frames
                        if self._drops(message, reply=False):
                            continue
                        server = servers.get(client)
                        if server is None:
                            server = servers[client] = self.context.socket(zmq.DEALER)
                            server.linger = 0
                            server.connect(self.server_url)
                            poller.register(server, zmq.POLLIN)
                        server.send_multipart(message)
                    elif not self._drops(frames, reply=True):
                        client = next(name for name, own in servers.items() if own is socket)
                        router.send_multipart([client, *frames])
        finally:
            for socket in (router, *servers.values()):
                socket.close()
