"""The native part: kvtier's Rust client. Nothing here holds the GIL while it waits."""

from collections.abc import Callable, Sequence
from types import GenericAlias
from typing import Any, Generic, TypeVar, final

from typing_extensions import Self

__all__ = [
    "Client",
    "Disconnected",
    "Future",
    "KvEvents",
    "KvTierError",
    "Prompt",
    "Refused",
    "TimedOut",
    "Worker",
    "__version__",
]

__version__: str

_T = TypeVar("_T")

class KvTierError(Exception):
    """A request failed; subclasses have the cause."""

class TimedOut(KvTierError):
    """No reply came within the deadline, or the server stopped answering heartbeats."""

class Disconnected(KvTierError):
    """The connection was lost before the reply, or the client was closed."""

class Refused(KvTierError):
    """The server answered with an error, or with "no"."""

@final
class Future(Generic[_T]):
    """Result of one request: a value or an error, at the latest at the request's deadline.

    After a fork, in the child, each method raises KvTierError at once.
    """

    def __class_getitem__(cls, item: Any) -> GenericAlias: ...

    def done(self) -> bool:
        """Whether the result is there. Never waits."""

    def result(self, timeout: float | None = None) -> _T:
        """Returns the result; waits up to ``timeout`` seconds (None: until the request's deadline).

        Raises:
            TimeoutError: no result within ``timeout``; the request continues.
            KvTierError: the request failed, or was cancelled.
        """

    def cancel(self) -> None:
        """Abandons the result; the server may still handle the request."""

@final
class Prompt:
    """Token ids, or objects by their keys, encoded once for many requests. Immutable and hashable; with token ids, it can be pickled."""

    def __new__(cls, token_ids: list[int]) -> Self:
        """Token ids from 0 to 2**32 - 1; OverflowError for others."""

    @staticmethod
    def from_block_hashes(
        block_hashes: Sequence[bytes], blocks_per_chunk: int, chunk_tokens: int
    ) -> Prompt:
        """Returns a prompt that represents an engine's block hashes: one chunk per ``blocks_per_chunk`` of them.

        Raises:
            ValueError: ``blocks_per_chunk`` is 0, or a chunk has fewer than 9 tokens.
        """

    @staticmethod
    def from_keys(keys: Sequence[bytes], chunk_tokens: int) -> Prompt:
        """Returns objects by their keys in place of a prompt: each is one chunk, whatever comes before it, and its key is its hash. For
        servers that announce ``kvtier.objects.1``.

        Raises:
            ValueError: a key has not 32 bytes, or ``chunk_tokens`` is 0.
        """

    def with_identity(self, start: int, length: int, identity: bytes) -> Prompt:
        """Returns the prompt with ``length`` tokens from ``start`` replaced by ids that depend on them and on ``identity``.

        For facts that tokens do not have: the picture of placeholders, an adapter.

        Raises:
            ValueError: the range is outside the prompt.
        """

    def extended(self, more: Prompt) -> Prompt:
        """Returns the prompt followed by another one; neither is encoded again."""

    def prefix(self, length: int) -> Prompt:
        """Returns the first ``length`` tokens."""

    def chunk_hashes(self, chunk_tokens: int, known: list[bytes] = ...) -> list[bytes]:
        """Returns the hashes by which a server with ``--hash-algorithm blake3``, the default, knows the whole chunks, without those of the
        first chunks, which are ``known``."""

    def __len__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class KvEvents:
    """A server's KV events of a model, except those of chunks with a cache salt. They arrive on another thread."""

    @property
    def obstacle(self) -> str | None:
        """Why the connected server's events are not known; None while they are, or the server has not answered yet."""

    def take(self) -> tuple[int, list[dict[bytes, bool]]] | None:
        """Returns an epoch, and what happened in it since the last call, in L1 and in tiers: a chunk's hash, and whether the chunk was
        stored last, not removed. Tiers count only what L1 has lost. Another epoch than before: some events were lost, or the server may be another one. None until the connected server
        has answered. Never waits."""

@final
class Client:
    """Connection to a server, for any number of threads. It connects and reconnects by itself.

    After a fork, in the child, it is never healthy and each request fails at once.
    """

    def __new__(
        cls,
        url: str,
        *,
        timeout: float = 10.0,
        heartbeat: float = 5.0,
        block_tokens: int | None = None,
        chunk_tokens: int | None = None,
    ) -> Self:
        """Connects to ``tcp://host:port``, ``ipc://path`` or ``host:port``; does not wait for the server.

        Args:
            timeout: seconds from the submission of a request to its result.
            heartbeat: seconds between two heartbeats, and for the answer to one.
            block_tokens: tokens in a block of the engine. With it the client first agrees with each new server on the chunk
                size. A server that cannot serve it is not used.
            chunk_tokens: the chunk size. By default that of the first server if it is a multiple of the block, else the
                smallest multiple of at least 256 tokens. Servers with the feature ``kvtier.chunk_tokens.1`` serve any size,
                others only their own.

        Raises:
            ValueError: the address is invalid, or a timeout is not above 0 and at most a day.
        """

    timeout: float
    """Seconds that each later request may take."""

    @property
    def url(self) -> str:
        """The server's address."""

    @property
    def health(self) -> str:
        """``healthy``, ``degraded`` (no connection, or no answer to a heartbeat) or ``recovering``."""

    @property
    def is_healthy(self) -> bool:
        """Whether :attr:`health` is ``healthy``."""

    @property
    def connections(self) -> int:
        """Number of connections made so far; if it changes, the server may be another one."""

    @property
    def in_flight(self) -> int:
        """Requests in flight, heartbeats included."""

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens in a chunk, as agreed with the server; None until then, and without ``block_tokens``."""

    @property
    def named_chunk_tokens(self) -> int | None:
        """The chunk size that keys name to the connected server; None for a server that has only its own size."""

    @property
    def obstacle(self) -> str | None:
        """Why the server cannot be used, and what to do; None while it can, or none answers."""

    @property
    def is_unreachable(self) -> bool:
        """Whether the last connection attempt failed, as it does at once if nothing listens."""

    def wait_healthy(self, patience: float) -> bool:
        """Waits up to ``patience`` seconds for the server. Whether it is healthy."""

    def on_health(self, callback: Callable[[str], object]) -> None:
        """Calls ``callback`` with each later state, and with ``degraded`` again when :attr:`obstacle` changes.

        The call is on another thread.
        """

    def on_recover(self, callback: Callable[[], str | None]) -> None:
        """Calls ``callback``, on another thread, before the server of a connection is used, the current one included.

        It returns None, or why the server cannot be used. Until it returns None, it is called again at each heartbeat.
        """

    def kv_events(self, model_name: str) -> KvEvents:
        """Subscribes to the server's KV events of a model, on each connection. A client has one subscription, the last."""

    def close(self) -> None:
        """Closes the connection: requests in flight fail with :class:`Disconnected`."""

    def get_chunk_size(self) -> Future[int]:
        """Returns the server's default number of tokens in a chunk."""

    def get_experimental(self) -> Future[list[str]]:
        """Returns the names of the server's enabled optional features."""

    def noop(self) -> Future[str]:
        """Returns the server's ``OK``."""

    def ping(self, instance: int | None = None) -> Future[bool]:
        """Sends a heartbeat. False: the worker ``instance`` must register (again)."""

    def clear(self, force: bool = False) -> Future[None]:
        """Clears the objects in the server's memory: unleased ones, or with ``force`` all."""

    def end_session(self, request_id: str) -> Future[None]:
        """Ends a request's session."""

    def report_block_allocation(
        self, instance: int, model_name: str, records: list[tuple[str, list[int], list[int]]]
    ) -> Future[None]:
        """Reports allocated blocks: (request id, block ids, token ids)."""

    def lookup(
        self,
        prompt: Prompt,
        end: int,
        request_id: str,
        model_name: str,
        world_size: int = 1,
        num_kv_readers: int = 1,
        cache_salt: str = ...,
        timeout: float | None = None,
        traceparent: str | None = None,
        keep_seconds: int | None = None,
        peer: str | None = None,
        session: str | None = None,
        session_action: str | None = None,
    ) -> Future[int]:
        """Returns the chunks of the longest cached prefix of the first ``end`` tokens, leased to the request.

        It may take ``timeout`` seconds; default: as other requests. A server that traces requests puts this one below the
        span that ``traceparent`` names (W3C Trace Context). What is found in the server's memory is pinned for ``keep_seconds``.
        Its tiers of peers ask ``peer``, a host among theirs, before others. The request is a turn of the agent's ``session``; see
        :meth:`kvtier.SchedulerAdapter.maybe_submit_lookup_request`.

        Raises:
            ValueError: a ``cache_salt`` that no key can have.
        """

    def find(
        self,
        prompt: Prompt,
        request_id: str,
        model_name: str,
        world_size: int = 1,
        worker_id: int | None = None,
        cache_salt: str = ...,
        timeout: float | None = None,
    ) -> Future[list[bool]]:
        """Returns which objects of a ``Prompt.from_keys`` are cached, on all workers of the world or on ``worker_id``. They are leased
        until ``end_session(request_id)``. Tiers have ``timeout`` seconds to give what memory lacks; default: as other requests.

        Raises:
            ValueError: a ``cache_salt`` that no key can have.
        """

    def free_lookup_locks(
        self,
        prompt: Prompt,
        start: int,
        end: int,
        request_id: str,
        model_name: str,
        world_size: int = 1,
        num_kv_readers: int = 1,
        cache_salt: str = ...,
    ) -> Future[None]:
        """Releases the leases of the request's lookup on ``[start, end)``."""

@final
class Worker:
    """Registered worker; use :class:`kvtier.WorkerAdapter` instead."""

    def __new__(
        cls,
        client: Client,
        *,
        storages: list[dict[str, Any]],
        tensors: list[dict[str, Any]],
        groups: list[dict[str, Any]],
        kv_layout: str | None,
        mode: str,
        chunk_tokens: int,
        holds_blocks: bool,
        instance: int,
        model_name: str,
        world_size: int = 1,
        worker_id: int = 0,
        num_kv_readers: int = 1,
        force_pickle: bool = False,
        keep: object = None,
    ) -> Self:
        """Registers. The memory of ``storages`` must stay until :meth:`shutdown` has returned; ``keep`` is referenced until then.

        Raises:
            KvTierError: the server refused, or did not answer.
            ValueError: the tensors or groups cannot be served.
        """

    @staticmethod
    def check(
        *,
        storages: list[dict[str, Any]],
        tensors: list[dict[str, Any]],
        groups: list[dict[str, Any]],
        kv_layout: str | None,
        mode: str,
        chunk_tokens: int,
        holds_blocks: bool,
    ) -> None:
        """Checks the arguments of a worker, without a server.

        Raises:
            ValueError: the tensors or groups cannot be served.
        """

    @property
    def transport(self) -> str | None:
        """``pool``, ``pickle``, ``server``; None while not registered."""

    @property
    def pool_obstacle(self) -> str | None:
        """Why the server's pool cannot be opened here; None if it can, or if there is none."""

    @property
    def is_registered(self) -> bool:
        """Whether the connected server knows this worker."""

    @property
    def chunk_bytes(self) -> int | None:
        """Bytes of a chunk; None if only the server knows them."""

    def submit(
        self,
        id: int,
        prompt: Prompt,
        start: int,
        end: int,
        request_id: str,
        cache_salt: str,
        block_ids: list[list[int]],
        *,
        is_store: bool,
        skip: int | None = None,
        event: bytes = ...,
        timeout: float | None = None,
        keep_seconds: int | None = None,
        session: str | None = None,
    ) -> None:
        """Starts a store or a retrieve. Never waits, never fails: :meth:`take_finished` returns the outcome.

        That includes invalid numbers and names: all parts of a batch end, even if one of them is invalid. It may take
        ``timeout`` seconds; default: as each of the client's requests. For ``keep_seconds`` and ``session`` see
        :class:`kvtier.LoadStoreOp`.
        """

    def release_pages(self, ids: list[int]) -> list[int]:
        """Returns the stores of ``ids`` whose pages may still be read; none of the others begins to read its pages any more."""

    def take_finished(self, patience: float = 0.0) -> list[tuple[int, bytes, str | None, list[int] | None]]:
        """Returns transfers that ended since the last call: (id, device event, error, chunks). Waits up to ``patience`` s for one.

        ``chunks`` of a store are the positions in its range of the chunks that the server took; None if the server does
        not report them.
        """

    def shutdown(self) -> None:
        """Waits for transfers to end, and unregisters."""
