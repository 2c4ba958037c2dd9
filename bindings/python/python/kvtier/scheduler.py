"""Scheduler adapter: lookups of cached prefixes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from ._native import Client, Future, KvTierError, Prompt, TimedOut
from .connecting import (
    DEFAULT_HEARTBEAT,
    DEFAULT_LOOKUP_TIMEOUT,
    DEFAULT_TIMEOUT,
    check_count,
    check_model_name,
    check_seconds,
    connect,
)
from .limited import RateLimited
from .operation import check_one_form, to_prompt

logger = logging.getLogger(__name__)

# Errors of arguments that no request can carry.
_BAD_ARGUMENTS = (ValueError, OverflowError, TypeError)


class _Lookup:
    """One request's lookup: in flight, or with its result in tokens, and the cause if that is 0."""

    __slots__ = ("asked", "future", "miss", "tokens")

    def __init__(self) -> None:
        self.future: Future[int] | None = None
        self.tokens: int | None = 0
        self.asked, self.miss = 0, "no_server"


class SchedulerAdapter:
    """Lookups of prompts that never block the scheduler.

    Used by one thread. Only the constructor (``wait_for_server``) and :meth:`reset_cache` (``timeout``) wait for the server.
    A lookup that fails, or that the server does not answer within ``lookup_timeout``, found nothing. If the server stops
    answering, lookups in flight fail.
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
        lookup_timeout: float = DEFAULT_LOOKUP_TIMEOUT,
        heartbeat: float = DEFAULT_HEARTBEAT,
        wait_for_server: float | None = DEFAULT_TIMEOUT,
        chunk_tokens: int | None = None,
    ) -> None:
        """Connects to the server.

        Args:
            server_url: ``tcp://host:port``, ``ipc://path``, or ``host:port``.
            model_name: part of every key; without ``@``.
            block_tokens: tokens in one block of the engine; divides the chunk.
            world_size: number of pieces that the KV of a token is split into (ranks, counting those with the same KV once).
            num_kv_readers: number of workers that read each piece: the ranks with the same KV, for MLA the tensor-parallel size.
            timeout: seconds each request may take.
            lookup_timeout: seconds a lookup may take, if that is less.
            heartbeat: seconds between two heartbeats.
            wait_for_server: seconds to wait for a server. None: the server may start later, and until then nothing is found.
            chunk_tokens: tokens in a chunk, a multiple of ``block_tokens``. None: the first server's default if it is one, else
                the smallest multiple of at least 256 tokens. A server that cannot serve it is not used.

        Raises:
            ConnectionError: no server answered within ``wait_for_server``.
            ValueError: the server cannot serve the chunk size, the address is invalid, or an argument is not allowed.
        """
        check_model_name(model_name)
        check_count("world_size", world_size, 1)
        check_count("num_kv_readers", num_kv_readers, 1)
        check_seconds("lookup_timeout", lookup_timeout)
        self.client = connect(
            server_url,
            timeout=timeout,
            heartbeat=heartbeat,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
            wait_for_server=wait_for_server,
        )
        self.model_name, self.world_size, self.num_kv_readers = model_name, world_size, num_kv_readers
        self._block_tokens, self._lookup_timeout = block_tokens, lookup_timeout
        self._lookups: dict[str, _Lookup] = {}
        self._warnings = RateLimited(logger)
        self.failed_lookups = 0

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens in a chunk; None until the first server has answered."""
        return self.client.chunk_tokens

    @property
    def is_healthy(self) -> bool:
        """Whether the server answers heartbeats. If not, lookups find nothing, at once."""
        return self.client.is_healthy

    def on_health(self, callback: Callable[[str], None]) -> None:
        """Calls ``callback`` with ``healthy``, ``degraded`` or ``recovering`` on each change, on another thread."""
        self.client.on_health(callback)

    def num_blocks_per_chunk(self) -> int:
        """Blocks of the engine in one chunk; 0 until the chunk size is known."""
        return (self.chunk_tokens or 0) // self._block_tokens

    def prompt(
        self, token_ids: Sequence[int] | None = None, block_hashes: Sequence[bytes] | None = None
    ) -> Prompt:
        """Encodes a prompt once, for several calls; from exactly one of the two.

        Raises:
            ValueError: not exactly one, or ``block_hashes`` while the chunk size is not known.
        """
        return self._prompt(token_ids, block_hashes, None)

    def _prompt(
        self, token_ids: Sequence[int] | None, block_hashes: Sequence[bytes] | None, prompt: Prompt | None
    ) -> Prompt:
        return to_prompt(token_ids, block_hashes, prompt, self.num_blocks_per_chunk(), self.chunk_tokens or 0)

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | None = None,
        block_hashes: Sequence[bytes] | None = None,
        cache_salt: str = "",
        *,
        prompt: Prompt | None = None,
        traceparent: str | None = None,
        keep_seconds: int | None = None,
        peer: str | None = None,
        session: str | None = None,
        session_action: str | None = None,
    ) -> None:
        """Starts a lookup unless the request has one; its result is kept until :meth:`cleanup_lookup_result`.

        Objects that it finds are leased to the request until they are retrieved or freed, or the session ends. A prompt
        shorter than a chunk, and any prompt while the server is unhealthy, is not sent and has the result 0. A prompt that
        no request can carry (negative ids, a ``cache_salt`` that no key can have) has failed, with the result 0.
        ``traceparent`` is the span that a server which traces requests puts this one below (W3C Trace Context).
        What the lookup finds in the server's memory is not evicted for ``keep_seconds`` seconds from then on (1 to 86400; a server
        allows it for a share of its memory). ``peer`` is the host that is likely to have the prompt, one of those that the server's tiers of
        peers read from; others are ignored. ``session`` is the agent's session that the request is a turn of, and ``session_action``
        (``release`` or ``demote``) what happens to what only that session needs when the request ends.

        Raises:
            ValueError: not exactly one of ``token_ids``, ``block_hashes`` and ``prompt``.
        """
        if request_id in self._lookups:
            return
        check_one_form(token_ids, block_hashes, prompt)
        self._lookups[request_id] = lookup = _Lookup()
        chunk = self.chunk_tokens
        if chunk is None or not self.client.is_healthy:
            return
        try:
            whole = self._prompt(token_ids, block_hashes, prompt)
            end = len(whole) // chunk * chunk
            if end == 0:
                lookup.miss = "too_short"
                return
            lookup.future = self.client.lookup(
                whole,
                end,
                request_id,
                self.model_name,
                self.world_size,
                self.num_kv_readers,
                cache_salt,
                min(self._lookup_timeout, self.client.timeout),
                traceparent,
                keep_seconds,
                peer,
                session,
                session_action,
            )
            lookup.tokens, lookup.asked, lookup.miss = None, end, "not_found"
        except (KvTierError, *_BAD_ARGUMENTS) as error:
            self._failed(request_id, error)

    def _failed(self, request_id: str, why: object) -> None:
        self.failed_lookups += 1
        self._lookups[request_id].miss = "lookup_failed"
        if isinstance(why, TimedOut):
            limits = {"lookup_timeout": self._lookup_timeout, "timeout": self.client.timeout}
            setting = min(limits, key=limits.__getitem__)
            why = f"{why}; {setting} (kvtier.{setting} of the connector) is {limits[setting]:g} s"
        self._warnings.warning("lookup", "lookup of request %r failed: %s; computing it", request_id, why)

    def check_lookup_result(self, request_id: str) -> int | None:
        """Returns the tokens of the longest cached prefix, a multiple of the chunk; None while in flight. Never waits.

        Raises:
            KeyError: the request has no lookup.
        """
        lookup = self._lookups[request_id]
        if lookup.future is None:
            return lookup.tokens
        try:
            if not lookup.future.done():
                return None
            found = lookup.future.result() * (self.chunk_tokens or 0)
            if not 0 <= found <= lookup.asked:
                raise KvTierError(f"the server found {found} tokens, {lookup.asked} were asked for")
        except (KvTierError, *_BAD_ARGUMENTS) as error:
            self._failed(request_id, error)
            found = 0
        lookup.tokens, lookup.future = found, None
        return found

    def miss(self, request_id: str) -> str:
        """Returns why the request's lookup had the result 0: ``no_server``, ``too_short``, ``lookup_failed`` or ``not_found``.

        Raises:
            KeyError: the request has no lookup.
        """
        return self._lookups[request_id].miss

    def has_lookup(self, request_id: str) -> bool:
        """Whether the request has a lookup, with or without a result."""
        return request_id in self._lookups

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Removes the request's lookup. Leases stay; :meth:`free_lookup_locks` and :meth:`end_session` release them."""
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
        """Releases the leases of the request's lookup on the whole chunks in ``[start, end)``. Does not wait.

        Raises:
            ValueError: not exactly one of ``token_ids``, ``block_hashes`` and ``prompt``.
        """
        check_one_form(token_ids, block_hashes, prompt)
        if start >= end:
            return
        # A prompt that no request can carry has no leases.
        with contextlib.suppress(*_BAD_ARGUMENTS):
            self.client.free_lookup_locks(
                self._prompt(token_ids, block_hashes, prompt),
                start,
                end,
                request_id,
                self.model_name,
                self.world_size,
                self.num_kv_readers,
                cache_salt,
            )

    def end_session(self, request_id: str) -> None:
        """Ends the request's session, which releases its leases. Does not wait.

        A server that hangs reads the message when it resumes. A server whose connection was lost releases the leases by
        itself after ``--worker-reap-timeout-seconds`` without a heartbeat on that connection.
        """
        self.cleanup_lookup_result(request_id)
        # An id that no request can carry has no session.
        with contextlib.suppress(*_BAD_ARGUMENTS):
            self.client.end_session(request_id)

    def reset_cache(self) -> bool:
        """Clears all unleased objects in the server's memory. Whether it did; false at once while the server is not healthy.

        Leased objects and second tiers are kept, so stored objects may still be found.
        """
        if not self.client.is_healthy:
            return False
        try:
            self.client.clear(False).result()
        except KvTierError as error:
            logger.warning("clearing the cache server failed: %s", error)
            return False
        return True

    def shutdown(self) -> None:
        """Disconnects."""
        self._lookups.clear()
        self.client.close()
