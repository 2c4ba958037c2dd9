"""vLLM's events of chunks in the cache: what is announced, and its removal."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from ..operation import NO_BLOCK
from ..transfer import Group
from .kinds import hash_block_tokens, served_numbers
from .resets import PoolResets

# Media: of chunks that the server has in L1, and in a tier.
_CPU, _STORAGE = "CPU", "STORAGE"

# Block hashes that are announced at a time, of about 50 bytes each; beyond it the least recently used chunks, with those behind them, are
# announced as removed.
_MAX_HASHES = 1 << 20

# Removed chunks that are remembered, and chunks that wait until the server has them.
_MAX_REMOVED, _MAX_WAITING = 1 << 16, 1 << 12


def _event(kind: Any, **fields: Any) -> Any:
    """Returns an event with those of the fields that this vLLM knows."""
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})


def _published(keys: list[Any]) -> Any:
    """Returns the extra keys of blocks as events have them; releases that tag them in hashes do not in events."""
    untag = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return untag(keys) if untag is not None else keys


class _GroupEvents:
    """Builder of the events of one group of layers."""

    def __init__(self, number: int, group: Group, spec: Any, hash_block: int, lookahead: int) -> None:
        self.number, self.block_tokens = number, group.block_tokens
        self._hash_block, self._lookahead = hash_block, lookahead
        self.is_whole = group.sliding_window < 0 and not group.recurrent_state
        kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
        window = getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)
        self._spec = {
            "group_idx": number,
            "kv_cache_spec_kind": kind(spec).value if kind is not None else None,
            "kv_cache_spec_sliding_window": window(spec) if window is not None else None,
        }

    def stored(self, request: Any, first: int, last: int, blocks: Sequence[int] | None) -> Iterator[BlockStored]:
        """Yields an event per run of consecutive blocks from the ``first`` to before the ``last`` one; all of them, or those of
        ``blocks`` that are not ``NO_BLOCK``. Readers count on a hash per block of tokens."""
        present = [place for place in range(first, last) if blocks is None or blocks[place - first] != NO_BLOCK]
        for _, run in itertools.groupby(enumerate(present), lambda pair: pair[1] - pair[0]):
            places = [place for _, place in run]
            yield self._run(request, places[0], places[-1] + 1)

    def _run(self, request: Any, first: int, last: int) -> BlockStored:
        size, lora, hashes = self.block_tokens, request.lora_request, request.block_hashes
        if size != self._hash_block:
            hashes = kv_cache_utils.BlockHashListWithBlockSize(hashes, self._hash_block, size)
        tokens, ahead, extra_keys, picture = request.all_token_ids, self._lookahead, [], 0
        for end in range((first + 1) * size, (last + 1) * size, size):
            keys, after = kv_cache_utils.generate_block_hash_extra_keys(request, end - size, end + ahead, picture)
            extra_keys.append(keys)
            # The next block has the pictures among the tokens ahead too.
            picture = 0 if ahead else after
        return _event(
            BlockStored,
            block_hashes=[kv_cache_utils.maybe_convert_block_hash(each) for each in hashes[first:last]],
            parent_block_hash=kv_cache_utils.maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(tokens[first * size : last * size]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=_CPU,
            lora_name=lora.lora_name if lora else None,
            extra_keys=_published(extra_keys),
            session_id=getattr(request, "session_id", None),
            lookahead_token_ids=[list(tokens[each * size : each * size + ahead]) for each in range(first + 1, last + 1)] if ahead else None,
            **self._spec,
        )


@dataclass
class ChunkEvents:
    """Events of one chunk, to be announced once it is stored."""

    identity: bytes
    parent: bytes | None
    """Identity of the chunk before, if there is one."""

    key: bytes | None
    """The server's hash of the chunk; None for one with a salt, which is not in the server's events."""

    epoch: int
    """How often all chunks were removed before it was made."""

    events: list[tuple[int, BlockStored]]
    """Each with the number of its group."""


@dataclass
class AnnouncedChunk:
    """A chunk that readers know."""

    parent: bytes | None
    key: bytes | None
    hashes: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Block hashes by number of the group."""

    media: set[str] = field(default_factory=lambda: {_CPU})
    encoded: list[bytes] = field(default_factory=list)
    """Its ``BlockStored`` events for other media; none without a key. Encoded, tokens take a tenth of their objects."""


class Announcements:
    """Events to publish, and the announced chunks.

    A block hash is announced once per group and medium until it is removed, and removed once: llm-d and Dynamo count announcements, and Dynamo
    ignores what follows an unknown hash in a removal. A chunk is announced only behind the one before it, whose hash readers look up,
    and not while the server's last word on it is a removal: reports of stores and the server's events overtake each other.
    """

    def __init__(self, kv_cache_config: Any, groups: Sequence[Group], lookahead: int = 0, max_hashes: int = _MAX_HASHES) -> None:
        """``lookahead``: tokens behind a block that its hash covers too."""
        self._hash_block = hash_block_tokens(kv_cache_config, groups)
        self._groups = [
            _GroupEvents(number, group, kv_cache_config.kv_cache_groups[number].kv_cache_spec, self._hash_block, lookahead)
            for number, group in zip(served_numbers(kv_cache_config), groups, strict=True)
        ]
        self._max_hashes, self._hashes = max_hashes, 0
        # By identity, from the least recently used chunk on.
        self._chunks: OrderedDict[bytes, AnnouncedChunk] = OrderedDict()
        # The server's hash -> identities of announced chunks, which differ in the adapter's name.
        self._identities: dict[bytes, set[bytes]] = defaultdict(set)
        # The server's hashes of chunks that were removed last, not stored, from the earliest removal on; each with the chunks, by
        # identity, to be announced when the server has stored it: itself, and those behind it.
        self._removed: OrderedDict[bytes, dict[bytes, ChunkEvents]] = OrderedDict()
        # Identity of a chunk there -> the hash that it waits for, in the order of their arrival.
        self._waiting: OrderedDict[bytes, bytes] = OrderedDict()
        self._events: list[KVCacheEvent] = []
        # Number of the connection to the server, and epoch of its events; None while it does not answer.
        self.connection: tuple[int, int] | None = None
        self._epoch = 0
        self._resets: PoolResets | None = None

    def bind_pool(self, pool: Any) -> None:
        """Follows resets of vLLM's block pool."""
        self._resets = PoolResets(pool)

    def follow(self, connection: tuple[int, int] | None, changes: Mapping[bytes, bool], tiers: Mapping[bytes, bool] = MappingProxyType({})) -> None:
        """Removes all chunks if vLLM's cache was reset since the last call, or if the connection is another one: the server is lost, may
        be another one, or has removed chunks unheard. Otherwise applies the server's ``changes``: a chunk's hash, and whether the server
        has stored the chunk, not removed it; and those of its ``tiers``."""
        if self._resets is not None and self._resets.take():
            self._forget()
        if connection != self.connection:
            self.connection = connection
            self._remove_all()
        # First of all, as readers forget what no medium has.
        for key in (key for key, is_stored in tiers.items() if is_stored):
            self._add_medium(key, _STORAGE)
        for key in (key for key, is_stored in changes.items() if not is_stored):
            # A hash keeps its place, so that no chunk waits for one that is forgotten later than its own.
            self._removed.setdefault(key, {})
            self._remove_medium(key, _CPU)
        for key in (key for key, is_stored in tiers.items() if not is_stored):
            self._remove_medium(key, _STORAGE)
        for key in (key for key, is_stored in changes.items() if is_stored):
            self._add_medium(key, _CPU)
            for chunk in self._forget_removed(key):
                self.stored(chunk)
        while len(self._removed) > _MAX_REMOVED:
            self._forget_removed(next(iter(self._removed)))

    def _forget_removed(self, key: bytes) -> Collection[ChunkEvents]:
        """Forgets a removal; returns the chunks that have waited for the chunk's store, and wait no more."""
        chunks = self._removed.pop(key, {})
        for identity in chunks:
            del self._waiting[identity]
        return chunks.values()

    def reset(self) -> None:
        """Removes all chunks, which no request finds any more."""
        if self._resets is not None and self._resets.are_known:
            # If vLLM's cache was reset too, the next call of `follow` drops these events.
            self._remove_all()
        else:
            self._forget()

    def chunks(
        self,
        request: Any,
        start: int,
        end: int,
        chunk: int,
        keys: Sequence[bytes],
        blocks: Sequence[Sequence[int]] | None = None,
    ) -> dict[int, ChunkEvents]:
        """Returns the events of chunks of ``[start, end)`` that are not announced, by their number in it. ``keys`` are the server's hashes
        of all chunks up to ``end`` at least; none if its events have none of them. ``blocks`` are those of each group that are stored; None
        stands for a hit, which only says what groups without windows and states have."""
        made: dict[int, ChunkEvents] = {}
        if self.connection is None:
            return made
        for number, position in enumerate(range(start, self._hashed(request, end) - chunk + 1, chunk)):
            identity = self._identity(request, position + chunk)
            if identity in self._chunks:
                continue
            events: list[tuple[int, BlockStored]] = []
            for at, group in enumerate(self._groups):
                if blocks is None and not group.is_whole:
                    continue
                first, count = position // group.block_tokens, chunk // group.block_tokens
                offset = first - start // group.block_tokens
                present = None if blocks is None else blocks[at][offset : offset + count]
                events += ((group.number, event) for event in group.stored(request, first, first + count, present))
            parent = self._identity(request, position) if position else None
            if events:
                key = keys[position // chunk] if keys else None
                made[number] = ChunkEvents(identity, parent, key, self._epoch, events)
        return made

    def _hashed(self, request: Any, end: int) -> int:
        """Returns the end of the tokens that vLLM's hashes cover, at most ``end``: without a prefix cache it has none."""
        return min(end, len(request.block_hashes) * self._hash_block)

    def _identity(self, request: Any, end: int) -> bytes:
        """Returns the identity of the chunk that ends there: vLLM's hash, which covers all before, and salt, adapter and pictures."""
        return bytes(request.block_hashes[end // self._hash_block - 1])

    def stored(self, chunk: ChunkEvents) -> None:
        """Announces a chunk, unless it is announced, its parent is not, or all were removed since it was made. It waits if the server has
        removed it, or if its parent waits."""
        if chunk.epoch != self._epoch or chunk.identity in self._chunks or chunk.identity in self._waiting:
            return
        awaited = chunk.key if chunk.key in self._removed else self._waiting.get(chunk.parent)
        if awaited is not None:
            self._removed[awaited][chunk.identity], self._waiting[chunk.identity] = chunk, awaited
            if len(self._waiting) > _MAX_WAITING:
                identity, key = self._waiting.popitem(last=False)
                del self._removed[key][identity]
            return
        if chunk.parent is not None and chunk.parent not in self._chunks:
            return
        announced = self._chunks[chunk.identity] = AnnouncedChunk(chunk.parent, chunk.key)
        if chunk.key is not None:
            self._identities[chunk.key].add(chunk.identity)
        for number, event in chunk.events:
            self._events.append(event)
            announced.hashes[number] += event.block_hashes
            if chunk.key is not None:
                announced.encoded.append(msgspec.msgpack.encode(event))
        self._hashes += sum(map(len, announced.hashes.values()))
        if self._hashes > self._max_hashes:
            self._shrink()

    def _add_medium(self, key: bytes, medium: str) -> None:
        """Announces a chunk, if it is announced in another medium, and the one before it."""
        for identity in self._identities.get(key, ()):
            chunk = self._chunks[identity]
            if medium in chunk.media or (chunk.parent is not None and chunk.parent not in self._chunks):
                continue
            chunk.media.add(medium)
            for encoded in chunk.encoded:
                event = msgspec.msgpack.decode(encoded, type=BlockStored)
                event.medium = medium
                self._events.append(event)

    def _remove_medium(self, key: bytes, medium: str) -> None:
        for identity in list(self._identities.get(key, ())):
            chunk = self._chunks[identity]
            if chunk.media == {medium}:
                self.remove(identity)
            elif medium in chunk.media:
                chunk.media.remove(medium)
                for number, hashes in chunk.hashes.items():
                    self._remove(number, hashes, medium)

    def found(self, request: Any, end: int, chunk: int, keys: Sequence[bytes]) -> None:
        """Announces the chunks of a hit: other engines may have stored them, and the server may have been away meanwhile."""
        for each in self.chunks(request, 0, end, chunk, keys).values():
            self.stored(each)
        # A prompt's first chunks, which it shares with others, are the last to be removed.
        for position in range(self._hashed(request, end) // chunk * chunk, 0, -chunk):
            if (identity := self._identity(request, position)) in self._chunks:
                self._chunks.move_to_end(identity)

    def missed(self, request: Any, start: int, end: int, chunk: int) -> None:
        """Removes the chunks of ``[start, end)``, which a lookup has not found."""
        for position in range(start, self._hashed(request, end) - chunk + 1, chunk):
            self.remove(self._identity(request, position + chunk))

    def remove(self, identity: bytes) -> None:
        """Removes a chunk, if it is announced."""
        if (chunk := self._chunks.pop(identity, None)) is None:
            return
        if chunk.key is not None:
            same = self._identities[chunk.key]
            same.remove(identity)
            if not same:
                del self._identities[chunk.key]
        for number, hashes in chunk.hashes.items():
            self._hashes -= len(hashes)
            for medium in chunk.media:
                self._remove(number, hashes, medium)

    def _shrink(self) -> None:
        """Removes a sixteenth, and what is behind it, which readers could not find."""
        behind: dict[bytes | None, list[bytes]] = defaultdict(list)
        for identity, chunk in self._chunks.items():
            behind[chunk.parent].append(identity)
        while self._hashes > self._max_hashes - self._max_hashes // 16:
            doomed = [next(iter(self._chunks))]
            while doomed:
                identity = doomed.pop()
                doomed += behind[identity]
                self.remove(identity)

    def _remove(self, number: int, hashes: list[Any], medium: str) -> None:
        self._events.append(_event(BlockRemoved, block_hashes=hashes, medium=medium, group_idx=number))

    def _remove_all(self) -> None:
        groups: dict[tuple[int, str], list[Any]] = defaultdict(list)
        for chunk in self._chunks.values():
            for number, hashes in chunk.hashes.items():
                for medium in chunk.media:
                    groups[number, medium] += hashes
        for (number, medium), hashes in groups.items():
            self._remove(number, hashes, medium)
        self._clear()

    def _forget(self) -> None:
        # vLLM itself announces that everything is cleared.
        self._events.clear()
        self._clear()

    def _clear(self) -> None:
        self._epoch += 1
        self._hashes = 0
        for each in (self._chunks, self._identities, self._removed, self._waiting):
            each.clear()

    def take(self) -> list[KVCacheEvent]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events
