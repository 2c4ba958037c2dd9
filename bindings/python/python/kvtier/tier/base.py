"""What a tier implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: Kinds of errors, see ``docs/tier-protocol.md``.
KINDS = frozenset(
    ["not_found", "corrupt", "full", "over_quota", "busy", "unavailable", "refused", "unreadable", "unsupported"]
)


class TierError(Exception):
    """Error of one object or of a whole call.

    Returned in place of an object's result it is that object's error; raised, it is the error of every object of the call.
    """

    def __init__(self, kind: str, message: str = "") -> None:
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; allowed: {', '.join(sorted(KINDS))}")
        super().__init__(message or kind)
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Capabilities:
    """Optional features, told to kvtier once per connection."""

    #: Objects can be deleted; without it nothing is evicted.
    delete: bool = True
    #: Objects can be listed, so they are counted after a restart of kvtier.
    list: bool = True
    #: Other programs write to the store, so kvtier asks the tier also for objects that it does not know of.
    shared: bool = False
    #: The text that comes with each object is kept beside it and returned. Without it kvtier cannot tell layouts apart and
    #: loads nothing, unless it is configured with ``trust_missing_layout``.
    metadata: bool = True
    #: :meth:`Tier.free_bytes` knows the free space.
    free_bytes: bool = False
    #: Bytes in the store per object beyond its own, for kvtier's accounting.
    overhead_bytes: int = 0
    #: Longest object in bytes, ``None`` for no limit but kvtier's segment.
    max_object_bytes: int | None = None
    #: Longest key in bytes of UTF-8.
    max_key_bytes: int | None = None
    #: Calls at once, which is also the number of threads; 1 to 1024.
    max_in_flight: int = 8
    #: Objects per call, 1 to 1024.
    max_batch: int = 512


@dataclass(frozen=True)
class Hello:
    """What kvtier says first on a connection."""

    #: Name and version, such as ``kvtier/0.1.0``.
    client: str
    #: Random name of this run of kvtier.
    instance: str
    #: The object ``options`` of kvtier's configuration.
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Key:
    """The parts of an object's key; the key itself is their text."""

    model: str
    #: World size and worker, packed.
    kv_rank: int
    object_group: int
    #: 64 hex digits.
    chunk_hash: str
    #: The tenant, empty for none.
    cache_salt: str = ""

    @classmethod
    def parse(cls, text: str) -> Key:
        """Reads ``model@rank@group@hash[@salt]``."""
        parts = text.split("@")
        if len(parts) not in (4, 5):
            raise ValueError(f"{text!r} is no key: it has {len(parts)} parts")
        salt = parts[4] if len(parts) == 5 else ""
        return cls(parts[0], int(parts[1], 16), int(parts[2], 16), parts[3], salt)

    def __str__(self) -> str:
        text = f"{self.model}@{self.kv_rank:08x}@{self.object_group:x}@{self.chunk_hash}"
        return f"{text}@{self.cache_salt}" if self.cache_salt else text


@dataclass(frozen=True)
class StoreObject:
    """An object to be stored."""

    key: str
    #: Its bytes, read-only shared memory. Valid until the call returns.
    data: memoryview
    #: Text of at most 256 printable ASCII characters to be kept beside it.
    meta: str
    #: What is stored under this key is damaged: write, whatever is there.
    replace: bool = False


@dataclass(frozen=True)
class LoadObject:
    """An object to be loaded."""

    key: str
    #: Its destination, shared memory. Valid until the call returns; it holds garbage before.
    data: memoryview


@dataclass(frozen=True)
class Found:
    """An object of the store."""

    #: Its length in bytes.
    length: int
    #: The text that was stored with it, ``None`` if there is none.
    meta: str | None = None


@dataclass(frozen=True)
class Listed:
    """An object of a listing."""

    key: str
    length: int
    #: Time of its last use or write, in seconds since the Unix epoch.
    used_at: int = 0


class Tier(ABC):
    """A store of whole objects.

    Methods are called from several threads at once, :attr:`Capabilities.max_in_flight` of them. Each takes a batch and
    returns one result per object, in order; a :class:`TierError` among them is the result of its object alone, and any
    exception fails the whole call.

    A store is atomic: a load or lookup never sees a part of an object, also after a crash.
    """

    #: Name in kvtier's log and status.
    name: str = "python"
    capabilities: Capabilities = Capabilities()

    def connected(self, hello: Hello) -> None:
        """Called once per connection, before anything else. Raise :class:`TierError` to refuse it."""

    def mapped(self, segment: memoryview) -> None:
        """Called once per connection, after :meth:`connected`, with all of its shared memory.

        For backends that transfer only from memory they know. Keep no view of it. Raise :class:`TierError` to refuse it.
        """

    def unmapped(self, segment: memoryview) -> None:
        """Called after the last call of a connection whose memory was :meth:`mapped`."""

    @abstractmethod
    def store(self, objects: Sequence[StoreObject]) -> Sequence[bool | TierError]:
        """Stores objects, each in place of what is under its key.

        True: it was written. False: an object of the same length and metadata was there and was kept (not if ``replace``).
        """

    @abstractmethod
    def lookup(self, keys: Sequence[str]) -> Sequence[Found | None | TierError]:
        """Returns length and metadata per object, ``None`` for one that is not there."""

    @abstractmethod
    def load(self, objects: Sequence[LoadObject]) -> Sequence[Found | TierError]:
        """Writes objects to ``data``.

        An object of another length than ``len(data)`` is not written, only its :class:`Found` is returned. One that is not
        there is ``TierError("not_found")``.
        """

    def delete(self, keys: Sequence[str]) -> Sequence[bool | TierError]:
        """Deletes objects; whether each was there."""
        raise TierError("unsupported", "this tier deletes nothing")

    def list(self, cursor: str | None, limit: int) -> tuple[Sequence[Listed], str | None]:
        """Returns about ``limit`` objects from ``cursor`` on (``None`` is the start), and the next cursor, ``None`` at the end.

        An object that is there all the time is on one page. Cursors are untrusted: raise ``TierError("refused")`` for one that
        is none of this tier's.
        """
        raise TierError("unsupported", "this tier lists nothing")

    def free_bytes(self) -> int | None:
        """Returns the free bytes of the store, ``None`` if unknown."""
        return None

    def close(self) -> None:
        """Called once, after the last call."""
