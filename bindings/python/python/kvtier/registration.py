"""Registration of a worker's KV tensors: at once, or with a later server."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ._native import Client, Disconnected, KvTierError, Worker
from .tensors import Storages

logger = logging.getLogger(__name__)

# Seconds that a registration without a required server waits for one: a running server answers within milliseconds.
_CONNECT_TIMEOUT = 1.0
# Seconds between two checks whether the address is unreachable.
_POLL_INTERVAL = 0.01


class Registration:
    """Registration of an adapter's native worker, from its description on."""

    def __init__(
        self, client: Client, block_tokens: int, identity: Callable[[], dict[str, Any]], *, requires_server: bool
    ) -> None:
        """``requires_server``: the server must be there, and :meth:`start` raises its errors."""
        self._client, self._block_tokens, self._requires_server = client, block_tokens, requires_server
        # Weak, since the adapter owns this object.
        self._identity = weakref.WeakMethod(identity)
        self.worker: Worker | None = None
        self.mode: str | None = None
        self._layout: dict[str, Any] | None = None
        self._storages: Storages | None = None
        # Held while the worker registers, here or on the client's thread.
        self._register_lock = threading.Lock()
        self._is_stopped = False

    @property
    def is_described(self) -> bool:
        """Whether there are tensors to register, or registered ones."""
        return self._layout is not None

    def start(
        self,
        modes: Sequence[str],
        tensors: list[Any],
        groups: list[dict[str, Any]],
        kv_layout: str | None,
        holds_blocks: bool = False,
    ) -> None:
        """Registers in the first of these modes that the tensors and the server allow, now or with a later server."""
        for mode in modes:
            is_last = mode == modes[-1]
            try:
                self._describe(mode, tensors, groups, kv_layout, holds_blocks)
            except ValueError as error:
                if is_last:
                    raise
                logger.warning("%s is not possible (%s); trying %s", mode, error, modes[-1])
                continue
            refusal = self._try_register()
            if refusal is None:
                return
            if not is_last and not isinstance(refusal, Disconnected):
                self.release()
                logger.warning("%s does not work with %s (%s); trying %s", mode, self._client.url, refusal, modes[-1])
                continue
            if self._requires_server:
                self.release()
                raise refusal
            logger.warning("%s: starting without the kvtier server at %s; registering once it answers", refusal, self._client.url)
            self._register_later()
            return

    def _describe(
        self, mode: str, tensors: list[Any], groups: list[dict[str, Any]], kv_layout: str | None, holds_blocks: bool
    ) -> None:
        """Keeps the worker's layout if it can be served."""
        self._storages = storages = Storages(shared=mode == "lmcache_driven")
        try:
            layout: dict[str, Any] = {"tensors": storages.views(tensors), "groups": groups, "kv_layout": kv_layout, "mode": mode}
            layout["holds_blocks"] = holds_blocks
            layout["storages"] = storages.described
            Worker.check(**layout, chunk_tokens=self._client.chunk_tokens or self._block_tokens)
        except BaseException:
            self.release()
            raise
        self.mode, self._layout = mode, layout

    def release(self) -> None:
        """Drops the tensors, and removes the names of their segments."""
        self.worker = None
        storages, self._storages, self._layout = self._storages, None, None
        if storages is not None:
            storages.release()

    def _try_register(self) -> KvTierError | None:
        """Registers the worker; returns the error if that failed."""
        until = time.monotonic() + _CONNECT_TIMEOUT
        while not self._requires_server and not self._client.wait_healthy(_POLL_INTERVAL):
            if self._client.is_unreachable or time.monotonic() >= until:
                return Disconnected("no server answers")
        try:
            self._register()
        except KvTierError as error:
            return error
        return None

    def _register_later(self) -> None:
        """Registers on the client's thread with the next server, and again at each heartbeat until that succeeds."""
        registration = weakref.ref(self)

        def register() -> None:
            if (registered := registration()) is not None:
                registered._register()

        self._client.on_recover(register)

    def _register(self) -> None:
        """Registers with the connected server."""
        with self._register_lock:
            layout, identity = self._layout, self._identity()
            if identity is None or self._is_stopped or self.worker is not None or layout is None:
                return
            chunk_tokens = self._client.chunk_tokens
            if chunk_tokens is None:
                raise KvTierError("no server has agreed on the chunk size yet")
            self.worker = Worker(
                self._client,
                **layout,
                chunk_tokens=chunk_tokens,
                **identity(),
                keep=self._storages,
            )
        logger.info(
            "registered %d layers with %s: %s through %s",
            len(layout["tensors"]),
            self._client.url,
            self.mode,
            self.worker.transport,
        )

    def stop(self) -> None:
        """Waits for transfers to end and unregisters, for good."""
        with self._register_lock:
            self._is_stopped = True
        if self.worker is not None:
            self.worker.shutdown()
