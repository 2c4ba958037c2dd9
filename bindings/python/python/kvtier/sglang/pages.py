"""Pools of SGLang's pages, each page an object of the server under SGLang's hash of it."""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from .._native import KvTierError, Prompt
from ..connecting import DEFAULT_HEARTBEAT, connect
from ..limited import RateLimited
from ..plain import digest
from ..registration import Registration
from ..transfer import Group
from ..worker import NO_EVENT
from .identity import Ranks
from .options import Options

logger = logging.getLogger(__name__)

# Seconds that the thread of a pool waits for a transfer before it looks whether the pool was closed.
_POLL_INTERVAL = 0.2

# The server serves no smaller chunks. For objects by key the number only divides their bytes, and is counted in statistics.
_MIN_CHUNK_TOKENS = 16


class Store:
    """A rank's connection to the server, and the pools that it has registered."""

    def __init__(self, options: Options, model_name: str, page_size: int, ranks: Ranks, nonce: bytes) -> None:
        """``page_size``: tokens in a page, which is a chunk of the server. ``nonce``: of :func:`~.identity.shared_nonce`."""
        self.options, self.model_name, self.ranks = options, model_name, ranks
        self.page_size, self.page_tokens = page_size, max(page_size, _MIN_CHUNK_TOKENS)
        self.client = connect(
            options.url,
            timeout=options.timeout,
            heartbeat=DEFAULT_HEARTBEAT,
            block_tokens=self.page_tokens,
            chunk_tokens=self.page_tokens,
            wait_for_server=None,
        )
        # Name -> the parts of its pages.
        self.pools: dict[str, list[Pool]] = {}
        self.warnings = RateLimited(logger)
        self._prefix = f"sglang-{random.SystemRandom().getrandbits(62):x}"
        self._numbers = itertools.count()
        self._nonce, self._forgotten = nonce, itertools.count()
        # Added to keys. The same on all ranks, since the first one stores some pages for all.
        self._generation = b""

    def request_id(self) -> str:
        """Returns an id that no other request of any engine has."""
        return f"{self._prefix}-{next(self._numbers)}"

    def register(self, name: str, tensors: list[Any], is_replicated: bool, **layout: Any) -> None:
        """Registers a pool's tensors of bytes, ``[pages, tokens of a page, bytes per token]``, with this server and each later one.

        ``layout``: what else the order of bytes in a page depends on.

        Raises:
            ValueError: the tensors cannot be served.
        """
        if name in self.pools:
            raise ValueError(f"{name}: the pool was already registered")
        world_size, worker_id = self.ranks.piece(is_replicated)
        layout |= {"pool": name, "pieces": [tensor.shape[1:] for tensor in tensors], "page": self.page_size}
        layout["ranks"] = [1 if is_replicated else self.ranks.tp_size, self.ranks.pp_size, self.ranks.cp_size]
        # Layers of a worker have equal sizes: pages whose layers differ are an object per size.
        parts = self.pools[name] = []
        for size in sorted({tensor.shape[2] for tensor in tensors}):
            model_name = f"{self.model_name}#{digest(layout | {'part': size})}"
            identity = {"model_name": model_name, "world_size": world_size, "worker_id": worker_id}
            parts.append(Pool(self, [tensor for tensor in tensors if tensor.shape[2] == size], identity))

    def find(self, keys: Sequence[str], names: Sequence[str]) -> tuple[str, dict[str, list[bool]]] | None:
        """Returns which of the pages each pool has, leased until :meth:`end` of the returned session; None if it is not known."""
        if not self.client.is_healthy or not all(name in self.pools for name in names):
            return None
        session, prompt = self.request_id(), self.prompt(keys)
        timeout, salt = self.options.lookup_timeout, self.options.tenant
        try:
            # A session per part: the server keeps one find of each.
            finds = {
                name: [
                    self.client.find(prompt, f"{session}-{name}-{number}", **part.identity, cache_salt=salt, timeout=timeout)
                    for number, part in enumerate(self.pools[name])
                ]
                for name in names
            }
            return session, {name: [all(bits) for bits in zip(*(each.result() for each in finds[name]), strict=True)] for name in names}
        except KvTierError as error:
            self.warnings.warning("find", "lookup failed: %s; computing", error)
            self.end(session, names)
            return None

    def end(self, session: str, names: Sequence[str]) -> None:
        """Ends the leases of a find."""
        for name in names:
            for number in range(len(self.pools[name])):
                self.client.end_session(f"{session}-{name}-{number}")

    def prompt(self, keys: Sequence[str]) -> Prompt:
        """Returns the server's keys of pages."""
        named = [bytes.fromhex(key) for key in keys]
        if self._generation:
            named = [hashlib.sha256(key + self._generation).digest() for key in named]
        return Prompt.from_keys(named, self.page_tokens)

    def forget(self) -> None:
        """Changes all keys: nothing that was stored before is found."""
        self._generation = self._nonce + b"%d" % next(self._forgotten)

    def transfer(self, name: str, keys: Sequence[str], pages: list[int], *, is_store: bool) -> list[Future[bool]]:
        """Stores or loads pages; returns whether each part of all of them was. The pages must stay until then."""
        return [part.transfer(keys, pages, is_store=is_store) for part in self.pools[name]]

    def close(self) -> None:
        """Waits for transfers to end, unregisters and disconnects."""
        for part in (part for parts in self.pools.values() for part in parts):
            part.close()
        self.client.close()


class Pool:
    """A registered pool, or one of its parts.

    The lock guards the start of its thread, which ends transfers.
    """

    def __init__(self, store: Store, tensors: list[Any], identity: dict[str, Any]) -> None:
        self.identity = identity
        self._store, self._tokens, self._on_cuda = store, store.page_tokens, tensors[0].is_cuda
        self._instance = random.SystemRandom().getrandbits(62)
        self._numbers = itertools.count()
        # Number -> whether it is a store, and the future of a transfer in flight.
        self._transfers: dict[int, tuple[str, Future[bool]]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        layers = [str(number) for number in range(len(tensors))]
        groups = [Group(layers, self._tokens).described(0, range(len(tensors)))]
        self._registration = Registration(store.client, self._tokens, self._registered, requires_server=False)
        self._registration.start(["lmcache_driven" if self._on_cuda else "engine_driven"], tensors, groups, None)

    def _registered(self) -> dict[str, Any]:
        return {"instance": self._instance, **self.identity}

    def transfer(self, keys: Sequence[str], pages: list[int], *, is_store: bool) -> Future[bool]:
        """Stores or loads pages, all or none of them; returns whether it succeeded.

        Without a server the result is there at once, otherwise a second after the timeout at the latest.
        """
        future: Future[bool] = Future()
        worker = self._registration.worker
        if worker is None or self._is_closed or not (self._store.client.is_healthy and worker.is_registered):
            future.set_result(False)
            return future
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._collect, args=(worker,), name="kvtier-sglang", daemon=True)
                self._thread.start()
        number = next(self._numbers)
        self._transfers[number] = ("store" if is_store else "load", future)
        try:
            worker.submit(
                number,
                self._store.prompt(keys),
                0,
                len(keys) * self._tokens,
                self._store.request_id(),
                self._store.options.tenant,
                [pages],
                is_store=is_store,
                timeout=self._store.options.timeout,
            )
        except Exception as error:  # noqa: BLE001: the result is waited for.
            self._finish([(number, b"", f"it was not started: {error}", None)])
        return future

    def _collect(self, worker: Any) -> None:
        try:
            while not self._is_closed:
                self._finish(worker.take_finished(_POLL_INTERVAL))
        except Exception:
            logger.exception("%s: no more pages are stored or loaded", self.identity["model_name"])
            self._is_closed = True
            # Until then pages may still be written, which SGLang uses again after a failed load.
            time.sleep(self._store.options.timeout + 1)
            self._fail()

    def _fail(self) -> None:
        """Lets the transfers in flight fail."""
        self._finish([(number, b"", "its result is lost", None) for number in list(self._transfers)])

    def _finish(self, finished: list[tuple[int, bytes, str | None, list[int] | None]]) -> None:
        for number, event, error, _ in finished:
            if (ended := self._transfers.pop(number, None)) is None:
                continue
            kind, future = ended
            if error is None and self._on_cuda and event and event != NO_EVENT:
                error = _wait_for(event)
            if error is not None:
                self._store.warnings.warning(kind, "%s failed: %s", kind, error)
            future.set_result(error is None)

    def close(self) -> None:
        """Waits for transfers to end, and unregisters."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()
        self._registration.stop()
        if self._registration.worker is not None:
            self._finish(self._registration.worker.take_finished())
        self._fail()
        self._registration.release()


def _wait_for(event: bytes) -> str | None:
    """Waits for the device event after which a copy is complete; returns its error."""
    import torch

    try:
        torch.cuda.Event.from_ipc_handle(torch.cuda.current_device(), event).synchronize()
    except Exception as error:  # noqa: BLE001: the result of the transfer must not be lost.
        return f"its device event failed: {error}"
    return None


def view(storage: Any, offset: int, pages: int, stride: int, size: int, page_tokens: int) -> Any:
    """Returns ``pages`` pages of ``size`` bytes, ``stride`` bytes apart from ``offset`` on in a storage, as a pool's tensor.

    Raises:
        ValueError: the pages cannot be divided among their tokens.
    """
    import torch

    if size % page_tokens:
        raise ValueError(f"page_size: {page_tokens}; allowed are divisors of a page's {size} bytes")
    shape, strides = (pages, page_tokens, size // page_tokens), (stride, size // page_tokens, 1)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, shape, strides)


def restorable(found: dict[str, list[bool]], windows: dict[str, int]) -> list[int]:
    """Returns the lengths, in pages, of prefixes that can be restored: all pages of pools without a window, and of each other pool
    those in the window before the prefix's end."""
    whole = [bits for name, bits in found.items() if name not in windows]
    run = min(bits.index(False) if False in bits else len(bits) for bits in whole)
    return [
        length
        for length in range(1, run + 1)
        if all(all(found[name][max(0, length - window) : length]) for name, window in windows.items())
    ]
