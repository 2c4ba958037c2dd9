"""How the server gets to know a worker's KV tensors: now, or when one comes."""

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

# How long a registration waits for a server that may come later, in seconds: one that is there answers within milliseconds.
_GRACE = 1.0
# Time between two looks whether nothing listens there.
_GLANCE = 0.01


class Registration:
    """The native worker of an adapter, from its description on."""

    def __init__(
        self, client: Client, block_tokens: int, identity: Callable[[], dict[str, Any]], *, waits: bool
    ) -> None:
        """``waits``: the server has to be there, and errors are the caller's."""
        self._client, self._block_tokens, self._waits = client, block_tokens, waits
        # The adapter has this object.
        self._identity = weakref.WeakMethod(identity)
        self.worker: Worker | None = None
        self.mode: str | None = None
        self._layout: dict[str, Any] | None = None
        self._storages: Storages | None = None
        # Held while the worker is made, here or on the client's thread.
        self._making = threading.Lock()
        self._has_stopped = False

    @property
    def is_described(self) -> bool:
        """Whether there are tensors to register, or registered ones."""
        return self._layout is not None

    def start(
        self, modes: Sequence[str], tensors: list[Any], groups: list[dict[str, Any]], kv_layout: str | None
    ) -> None:
        """Register in the first of these modes that the tensors and the server allow, or have the client do it later."""
        for mode in modes:
            is_last = mode == modes[-1]
            try:
                self._describe(mode, tensors, groups, kv_layout)
            except ValueError as error:
                if is_last:
                    raise
                logger.warning("%s is not possible (%s); trying %s", mode, error, modes[-1])
                continue
            refusal = self._register_now()
            if refusal is None:
                return
            if not is_last and not isinstance(refusal, Disconnected):
                self.release()
                logger.warning("%s does not work with %s (%s); trying %s", mode, self._client.url, refusal, modes[-1])
                continue
            if self._waits:
                self.release()
                raise refusal
            logger.warning("%s: starting without the kvtier server at %s, registering when it can", refusal, self._client.url)
            self._register_later()
            return

    def _describe(self, mode: str, tensors: list[Any], groups: list[dict[str, Any]], kv_layout: str | None) -> None:
        """Keep what the worker is made of, if it can be served."""
        self._storages = storages = Storages(shared=mode == "lmcache_driven")
        try:
            layout: dict[str, Any] = {"tensors": storages.views(tensors), "groups": groups, "kv_layout": kv_layout, "mode": mode}
            layout["storages"] = storages.described
            Worker.check(**layout, chunk_tokens=self._client.chunk_tokens or self._block_tokens)
        except BaseException:
            self.release()
            raise
        self.mode, self._layout = mode, layout

    def release(self) -> None:
        """Forget the tensors, and remove the names of their segments."""
        self.worker = None
        storages, self._storages, self._layout = self._storages, None, None
        if storages is not None:
            storages.release()

    def _register_now(self) -> KvTierError | None:
        """Why the worker is not registered; None when it is."""
        until = time.monotonic() + _GRACE
        while not self._waits and not self._client.wait_healthy(_GLANCE):
            if self._client.is_unreachable or time.monotonic() >= until:
                return Disconnected("no server answers")
        try:
            self._make_worker()
        except KvTierError as error:
            return error
        return None

    def _register_later(self) -> None:
        """Have the client's thread register with the next server, and again at each heartbeat until that succeeds."""
        registration = weakref.ref(self)

        def register() -> None:
            if (mine := registration()) is not None:
                mine._make_worker()

        self._client.on_recover(register)

    def _make_worker(self) -> None:
        """Register with the server that is connected now."""
        with self._making:
            layout, identity = self._layout, self._identity()
            if identity is None or self._has_stopped or self.worker is not None or layout is None:
                return
            chunk_tokens = self._client.chunk_tokens
            if chunk_tokens is None:
                raise KvTierError("no server has told its chunk size")
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
        """Let transfers end and unregister, for good."""
        with self._making:
            self._has_stopped = True
        if self.worker is not None:
            self.worker.shutdown()
