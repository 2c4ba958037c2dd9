"""The scheduler's side: what of a prompt is cached."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ._native import Client, Future, KvTierError, Prompt
from .connecting import DEFAULT_HEARTBEAT, DEFAULT_TIMEOUT, connect
from .operation import blocks_per_chunk, one_prompt

logger = logging.getLogger(__name__)


class _Lookup:
    """One request's lookup: on its way, or with its result in tokens."""

    __slots__ = ("future", "tokens")

    def __init__(self, future: Future | None, tokens: int | None) -> None:
        self.future, self.tokens = future, tokens


class SchedulerAdapter:
    """Looks prompts up, without ever making the scheduler wait.

    Used by one thread. Only the constructor and :meth:`reset_cache` wait for the server: the latter up to ``timeout``, the
    former up to ``timeout`` for the chunk size and as long again for the first heartbeat.
    A lookup that fails, or that the server does not answer within ``timeout``, found nothing.
    """

    def __init__(
        self,
        server_url: str,
        model_name: str,
        *,
        block_tokens: int,
        world_size: int = 1,
        num_kv_readers: int = 1,
        timeout: float = DEFAULT_TIMEOUT,
        heartbeat: float = DEFAULT_HEARTBEAT,
    ) -> None:
        """Connect and ask for the chunk size.

        Args:
            server_url: ``tcp://host:port``, ``ipc://path``, or ``host:port``.
            model_name: part of every key; without ``@``.
            block_tokens: tokens in one block of the engine; divides the server's chunk.
            world_size: how many pieces the KV of a token is split into (ranks; for MLA without tensor parallelism).
            num_kv_readers: workers that read each piece: 1, or for MLA the tensor-parallel size.
            timeout: seconds each request may take.
            heartbeat: seconds between two heartbeats.

        Raises:
            ConnectionError: no server answers.
            ValueError: the chunk is no multiple of the block, or the address is none.
        """
        self.client: Client
        self.client, self.chunk_tokens = connect(server_url, timeout, heartbeat)
        try:
            self._blocks_per_chunk = blocks_per_chunk(self.chunk_tokens, block_tokens)
        except ValueError:
            self.client.close()
            raise
        self.model_name, self.world_size, self.num_kv_readers = model_name, world_size, num_kv_readers
        self._lookups: dict[str, _Lookup] = {}
        self.failed_lookups = 0

    @property
    def is_healthy(self) -> bool:
        """Whether the server answers heartbeats; lookups of an unhealthy one find nothing, at once."""
        return self.client.is_healthy

    def on_health(self, callback: Callable[[str], None]) -> None:
        """Have ``callback`` called with ``healthy``, ``degraded`` or ``recovering``, on another thread."""
        self.client.on_health(callback)

    def num_blocks_per_chunk(self) -> int:
        """Blocks of the engine in one chunk."""
        return self._blocks_per_chunk

    def prompt(
        self, token_ids: Sequence[int] | None = None, block_hashes: Sequence[bytes] | None = None
    ) -> Prompt:
        """A prompt encoded once, for several calls; from exactly one of the two."""
        return one_prompt(token_ids, block_hashes, None, self._blocks_per_chunk, self.chunk_tokens)

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | None = None,
        block_hashes: Sequence[bytes] | None = None,
        cache_salt: str = "",
        *,
        prompt: Prompt | None = None,
    ) -> None:
        """Start a lookup unless the request has one; its result is kept until :meth:`cleanup_lookup_result`.

        What it finds is leased to the request until it is retrieved, freed, or the session ends. A prompt shorter than
        a chunk, and any prompt while the server is unhealthy, is not sent and has the result 0.

        Raises:
            ValueError: not exactly one of ``token_ids``, ``block_hashes`` and ``prompt``.
        """
        if request_id in self._lookups:
            return
        whole = one_prompt(token_ids, block_hashes, prompt, self._blocks_per_chunk, self.chunk_tokens)
        end = len(whole) // self.chunk_tokens * self.chunk_tokens
        if end == 0 or not self.client.is_healthy:
            self._lookups[request_id] = _Lookup(None, 0)
            return
        future = self.client.lookup(
            whole,
            end,
            request_id,
            self.model_name,
            self.world_size,
            self.num_kv_readers,
            cache_salt,
        )
        self._lookups[request_id] = _Lookup(future, None)

    def check_lookup_result(self, request_id: str) -> int | None:
        """Tokens of the longest cached prefix, a multiple of the chunk; None while it is not known. Never waits.

        Raises:
            KeyError: the request has no lookup.
        """
        lookup = self._lookups[request_id]
        if lookup.tokens is None:
            assert lookup.future is not None
            if not lookup.future.done():
                return None
            try:
                lookup.tokens = lookup.future.result() * self.chunk_tokens
            except KvTierError as error:
                self.failed_lookups += 1
                lookup.tokens = 0
                logger.warning("lookup of request %s: %s; it is computed instead", request_id, error)
            lookup.future = None
        return lookup.tokens

    def has_lookup(self, request_id: str) -> bool:
        """Whether the request has a lookup, with or without a result."""
        return request_id in self._lookups

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget the request's lookup. Leases stay; :meth:`free_lookup_locks` and :meth:`end_session` end them."""
        self._lookups.pop(request_id, None)

    def free_lookup_locks(
        self,
        request_id: str,
        token_ids: Sequence[int] | None = None,
        block_hashes: Sequence[bytes] | None = None,
        start: int = 0,
        end: int = 0,
        cache_salt: str = "",
        *,
        prompt: Prompt | None = None,
    ) -> None:
        """End the leases of the request's lookup on the whole chunks in ``[start, end)``. Does not wait.

        Raises:
            ValueError: not exactly one of ``token_ids``, ``block_hashes`` and ``prompt``.
        """
        whole = one_prompt(token_ids, block_hashes, prompt, self._blocks_per_chunk, self.chunk_tokens)
        if start < end:
            self.client.free_lookup_locks(
                whole,
                start,
                end,
                request_id,
                self.model_name,
                self.world_size,
                self.num_kv_readers,
                cache_salt,
            )

    def end_session(self, request_id: str) -> None:
        """Tell the server that the request has ended, which ends its leases. Does not wait.

        A server that does not answer reads it when it goes on. One whose connection is lost ends the leases by itself
        when it has not heard a heartbeat on that connection for its ``--worker-reap-timeout-seconds``.
        """
        self.cleanup_lookup_result(request_id)
        self.client.end_session(request_id)

    def reset_cache(self) -> bool:
        """Drop what the server keeps in memory and nobody holds; whether it did. At once false while it is not healthy.

        Second tiers keep what they have, and the server what somebody holds: what was stored may still be found.
        """
        if not self.client.is_healthy:
            return False
        try:
            self.client.clear(False).result()
        except KvTierError as error:
            logger.warning("the cache server was not cleared: %s", error)
            return False
        return True

    def shutdown(self) -> None:
        """Disconnect."""
        self._lookups.clear()
        self.client.close()
