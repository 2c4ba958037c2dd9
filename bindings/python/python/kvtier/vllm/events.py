"""vLLM's events of chunks in the cache: what is announced, and its removal."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from ..operation import NO_BLOCK
from ..transfer import Group
from .kinds import hash_block_tokens, served_numbers
from .resets import PoolResets

_MEDIUM = "CPU"

# Block hashes that are announced at a time, of about 50 bytes each; beyond it the least recently used chunks, with those behind them, are
# announced as removed.
_MAX_HASHES = 1 << 20


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
            medium=_MEDIUM,
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

    epoch: int
    """How often all chunks were removed before it was made."""

    events: list[tuple[int, BlockStored]]
    """Each with the number of its group."""


class Announcements:
    """Events to publish, and the announced chunks.

    A block hash is announced once per group until it is removed, and removed once: llm-d and Dynamo count announcements, and Dynamo
    ignores what follows an unknown hash in a removal. A chunk is announced only behind the one before it, whose hash readers look up.
    """

    def __init__(self, kv_cache_config: Any, groups: Sequence[Group], lookahead: int = 0, max_hashes: int = _MAX_HASHES) -> None:
        """``lookahead``: tokens behind a block that its hash covers too."""
        self._hash_block = hash_block_tokens(kv_cache_config, groups)
        self._groups = [
            _GroupEvents(number, group, kv_cache_config.kv_cache_groups[number].kv_cache_spec, self._hash_block, lookahead)
            for number, group in zip(served_numbers(kv_cache_config), groups, strict=True)
        ]
        self._max_hashes, self._hashes = max_hashes, 0
        # A chunk's identity -> its parent's, and block hashes by number of the group; from the least recently used chunk on.
        self._chunks: OrderedDict[bytes, tuple[bytes | None, list[tuple[int, list[Any]]]]] = OrderedDict()
        self._events: list[KVCacheEvent] = []
        # Number of the connection to the server; None while it does not answer.
        self._connection: int | None = None
        self._epoch = 0
        self._resets: PoolResets | None = None

    def bind_pool(self, pool: Any) -> None:
        """Follows resets of vLLM's block pool."""
        self._resets = PoolResets(pool)

    def follow(self, connection: int | None) -> None:
        """Removes all chunks if vLLM's cache was reset since the last call, or if the connection is another one: the server is lost, or may
        be another one."""
        if self._resets is not None and self._resets.take():
            self._forget()
        if connection != self._connection:
            self._connection = connection
            self._remove_all()

    def reset(self) -> None:
        """Removes all chunks, which no request finds any more."""
        if self._resets is not None and self._resets.are_known:
            # If vLLM's cache was reset too, the next call of `follow` drops these events.
            self._remove_all()
        else:
            self._forget()

    def chunks(
        self, request: Any, start: int, end: int, chunk: int, blocks: Sequence[Sequence[int]] | None = None
    ) -> dict[int, ChunkEvents]:
        """Returns the events of chunks of ``[start, end)`` that are not announced, by their number in it. ``blocks`` are those of each
        group that are stored; None stands for a hit, which only says what groups without windows and states have."""
        made: dict[int, ChunkEvents] = {}
        if self._connection is None:
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
                made[number] = ChunkEvents(identity, parent, self._epoch, events)
        return made

    def _hashed(self, request: Any, end: int) -> int:
        """Returns the end of the tokens that vLLM's hashes cover, at most ``end``: without a prefix cache it has none."""
        return min(end, len(request.block_hashes) * self._hash_block)

    def _identity(self, request: Any, end: int) -> bytes:
        """Returns the identity of the chunk that ends there: vLLM's hash, which covers all before, and salt, adapter and pictures."""
        return bytes(request.block_hashes[end // self._hash_block - 1])

    def stored(self, chunk: ChunkEvents) -> None:
        """Announces a chunk, unless it is announced, its parent is not, or all were removed since it was made."""
        is_orphan = chunk.parent is not None and chunk.parent not in self._chunks
        if chunk.epoch != self._epoch or chunk.identity in self._chunks or is_orphan:
            return
        groups: dict[int, list[Any]] = defaultdict(list)
        for number, event in chunk.events:
            self._events.append(event)
            groups[number] += event.block_hashes
        self._chunks[chunk.identity] = chunk.parent, list(groups.items())
        self._hashes += sum(map(len, groups.values()))
        if self._hashes > self._max_hashes:
            self._shrink()

    def found(self, request: Any, end: int, chunk: int) -> None:
        """Announces the chunks of a hit: other engines may have stored them, and the server may have been away meanwhile."""
        for each in self.chunks(request, 0, end, chunk).values():
            self.stored(each)
        # A prompt's first chunks, which it shares with others, are the last to be removed.
        for position in range(self._hashed(request, end) // chunk * chunk, 0, -chunk):
            if (identity := self._identity(request, position)) in self._chunks:
                self._chunks.move_to_end(identity)

    def remove(self, identity: bytes) -> None:
        """Announces that the server has removed a chunk, if the chunk is announced."""
        _, groups = self._chunks.pop(identity, (None, ()))
        for number, hashes in groups:
            self._remove(number, hashes)

    def _shrink(self) -> None:
        """Removes a sixteenth, and what is behind it, which readers could not find."""
        behind: dict[bytes | None, list[bytes]] = defaultdict(list)
        for identity, (parent, _) in self._chunks.items():
            behind[parent].append(identity)
        while self._hashes > self._max_hashes - self._max_hashes // 16:
            doomed = [next(iter(self._chunks))]
            while doomed:
                identity = doomed.pop()
                doomed += behind[identity]
                self.remove(identity)

    def _remove(self, number: int, hashes: list[Any]) -> None:
        self._hashes -= len(hashes)
        self._events.append(_event(BlockRemoved, block_hashes=hashes, medium=_MEDIUM, group_idx=number))

    def _remove_all(self) -> None:
        groups: dict[int, list[Any]] = defaultdict(list)
        for _, chunk in self._chunks.values():
            for number, hashes in chunk:
                groups[number] += hashes
        for number, hashes in groups.items():
            self._remove(number, hashes)
        self._chunks.clear()
        self._epoch += 1

    def _forget(self) -> None:
        # vLLM itself announces that everything is cleared.
        self._chunks.clear()
        self._events.clear()
        self._hashes, self._epoch = 0, self._epoch + 1

    def take(self) -> list[KVCacheEvent]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events
