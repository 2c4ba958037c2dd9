"""The native part: kvtier's Rust client. Nothing here holds the GIL while it waits."""

from collections.abc import Callable, Sequence
from types import GenericAlias
from typing import Any, Generic, TypeVar, final

from typing_extensions import Self

__all__ = [
    "Client",
    "Disconnected",
    "Future",
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
    """A request failed; subclasses say how."""

class TimedOut(KvTierError):
    """There was no reply within the deadline, or the server has stopped answering heartbeats."""

class Disconnected(KvTierError):
    """The connection was lost before the reply, or the client was closed."""

class Refused(KvTierError):
    """The server answered with an error, or with no."""

@final
class Future(Generic[_T]):
    """The result of one request. It is there at the request's deadline at the latest, as a value or as an error.

    After a fork, in the child, each method raises KvTierError at once.
    """

    def __class_getitem__(cls, item: Any) -> GenericAlias: ...

    def done(self) -> bool:
        """Whether the result is there. Never waits."""

    def result(self, timeout: float | None = None) -> _T:
        """The result, waited for up to ``timeout`` seconds (None: until the request's deadline).

        Raises:
            TimeoutError: not within ``timeout``; the request goes on.
            KvTierError: the request failed, or was cancelled.
        """

    def cancel(self) -> None:
        """Give the result up; the server may still do what it was asked."""

@final
class Prompt:
    """Token ids, encoded once for many requests. Immutable, hashable, can be pickled."""

    def __new__(cls, token_ids: list[int]) -> Self:
        """Token ids from 0 to 2**32 - 1; OverflowError for others."""

    @staticmethod
    def from_block_hashes(
        block_hashes: Sequence[bytes], blocks_per_chunk: int, chunk_tokens: int
    ) -> Prompt:
        """A prompt that stands for an engine's block hashes: a chunk for each ``blocks_per_chunk`` of them.

        Raises:
            ValueError: ``blocks_per_chunk`` is 0, or a chunk has fewer than 9 tokens.
        """

    def with_identity(self, start: int, length: int, identity: bytes) -> Prompt:
        """The prompt with ``length`` tokens from ``start`` replaced by ids that depend on them and on ``identity``.

        For what tokens do not say: the picture behind placeholders, an adapter.

        Raises:
            ValueError: the range leaves the prompt.
        """

    def extended(self, more: Prompt) -> Prompt:
        """The prompt with another one behind it; neither is encoded again."""

    def prefix(self, length: int) -> Prompt:
        """The first ``length`` tokens."""

    def __len__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Client:
    """A connection to a server, for any number of threads. It connects, and reconnects, by itself.

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
        """Connect to ``tcp://host:port``, ``ipc://path`` or ``host:port``; does not wait for the server.

        Args:
            timeout: seconds from the submission of a request to its result.
            heartbeat: seconds between two heartbeats, and for the answer to one.
            block_tokens: tokens in a block of the engine. With it each new server is asked for its chunk size first, and one
                whose chunk is no multiple of the block, or another than before, is not used.
            chunk_tokens: the chunk size that a server must have; by default that of the first one.

        Raises:
            ValueError: the address is invalid, or a span is not above 0 and at most a day.
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
        """Connections made so far; another number means that the server may be another one."""

    @property
    def in_flight(self) -> int:
        """Requests under way, heartbeats included."""

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens in a chunk, as agreed with the server; None until then, and without ``block_tokens``."""

    @property
    def obstacle(self) -> str | None:
        """Why the server that answers cannot be used, and what to do; None while it can, or none answers."""

    @property
    def is_unreachable(self) -> bool:
        """Whether the last try to connect has failed, as it does at once where nothing listens."""

    def wait_healthy(self, patience: float) -> bool:
        """Wait up to ``patience`` seconds for the server; whether it is healthy."""

    def on_health(self, callback: Callable[[str], object]) -> None:
        """Have ``callback`` called with each later state, and with ``degraded`` again when :attr:`obstacle` changes.

        It is called on another thread.
        """

    def on_recover(self, callback: Callable[[], str | None]) -> None:
        """Have ``callback`` called, on another thread, before the server of a connection is used, the present one included.

        It returns None, or why the server cannot be used; it is called again at each heartbeat until it returns None.
        """

    def close(self) -> None:
        """End it: what is under way fails with :class:`Disconnected`."""

    def get_chunk_size(self) -> Future[int]:
        """Tokens in a chunk."""

    def get_experimental(self) -> Future[list[str]]:
        """Names of the server's optional features that are on."""

    def noop(self) -> Future[str]:
        """The server's ``OK``."""

    def ping(self, instance: int | None = None) -> Future[bool]:
        """A heartbeat. False: the worker ``instance`` must register (again)."""

    def clear(self, force: bool = False) -> Future[None]:
        """Drop what is cached in memory: what nobody holds, or all of it."""

    def end_session(self, request_id: str) -> Future[None]:
        """A request has ended."""

    def report_block_allocation(
        self, instance: int, model_name: str, records: list[tuple[str, list[int], list[int]]]
    ) -> Future[None]:
        """Which blocks requests got: (request id, block ids, token ids)."""

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
    ) -> Future[int]:
        """Chunks of the longest cached prefix of the first ``end`` tokens, leased to the request.

        It may take ``timeout`` seconds, as long as other requests by default.

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
        """End the leases of the request's lookup on ``[start, end)``."""

@final
class Worker:
    """A registered worker; :class:`kvtier.WorkerAdapter` is what to use."""

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
        instance: int,
        model_name: str,
        world_size: int = 1,
        worker_id: int = 0,
        num_kv_readers: int = 1,
        force_pickle: bool = False,
        keep: object = None,
    ) -> Self:
        """Register; the memory behind ``storages`` must stay until :meth:`shutdown` has returned; ``keep`` is held as long.

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
    ) -> None:
        """Check what a worker would be made of, without a server.

        Raises:
            ValueError: the tensors or groups cannot be served.
        """

    @property
    def transport(self) -> str | None:
        """``pool``, ``pickle``, ``server``; None while not registered."""

    @property
    def pool_obstacle(self) -> str | None:
        """Why the server's pool cannot be opened here; None where it can, or where there is none."""

    @property
    def is_registered(self) -> bool:
        """Whether the server that is connected now knows this worker."""

    @property
    def chunk_bytes(self) -> int | None:
        """Bytes of a chunk; None for memory that only the server can tell."""

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
    ) -> None:
        """Start a store or a retrieve. Never waits, never fails: :meth:`take_finished` tells how it ended.

        That is so for numbers and names that are none, too: of a batch all parts end, whatever one of them is. It may
        take ``timeout`` seconds, as long as each of the client's requests by default.
        """

    def release_pages(self, ids: list[int]) -> list[int]:
        """Those of these stores whose pages may still be read; none of the others begins to read its pages any more."""

    def take_finished(self, patience: float = 0.0) -> list[tuple[int, bytes, str | None, list[int] | None]]:
        """What has ended since the last call: (id, device event, error, chunks). Waits up to ``patience`` s for something.

        ``chunks`` are, of a store, the positions in its range of the chunks that the server took; None where it does
        not say.
        """

    def shutdown(self) -> None:
        """Let transfers end, and unregister."""
