"""Blocks of stores in flight, each kept from reuse by a reference in vLLM's block pool."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

# Of the pool's blocks, at most this part is held; small pools hold up to _SMALL blocks, all at least one chunk, and never more than
# half.
_PART = 10
_SMALL = 64

# Seconds in which a store usually ends: as long as a request that gets no block rather waits than preempts another.
_YOUNG = 0.05


@dataclass
class Hold:
    """The blocks of one store."""

    request_id: str
    blocks: list[Any]
    since: float


class Holds:
    """References to blocks of a pool, by the number of the store that reads them.

    A block returns to the pool when its request and all stores have released it. So neither a request's end nor a preemption
    waits for a store, and no block is overwritten while a store reads it. Each hold is released once, however often that is asked for.
    """

    def __init__(self, pool: Any, clock: Callable[[], float] = time.monotonic, *, is_large: bool = False) -> None:
        """``is_large``: half of the blocks may be held."""
        self._pool, self._clock = pool, clock
        self._held: dict[int, Hold] = {}
        # Block id -> number of stores that hold it.
        self._counts: Counter[int] = Counter()
        self._dropped: set[str] = set()
        count = pool.num_gpu_blocks
        self.max_held = count // 2
        self.limit = self.max_held if is_large else max(count // _PART, min(self.max_held, _SMALL))
        self._give_way_to_resets()

    @classmethod
    def of(cls, pool: Any, *, is_large: bool = False) -> Holds | None:
        """Returns the holds of a pool; None for releases whose pool counts no references, or counts them in another way."""
        needed = ("touch", "free_blocks", "get_num_free_blocks", "reset_prefix_cache", "blocks", "num_gpu_blocks")
        if any(not hasattr(pool, name) for name in needed):
            return None
        try:
            # Releases from 0.33 on count no references to the null block.
            block = next(block for block in pool.blocks if not block.is_null and not block.ref_cnt)
            pool.touch([block])
            if block.ref_cnt != 1:
                return None
            pool.free_blocks([block])
        except (StopIteration, TypeError, AttributeError):
            return None
        return None if block.ref_cnt else cls(pool, is_large=is_large)

    def __len__(self) -> int:
        return len(self._held)

    def free_capacity(self, per_chunk: int) -> int:
        """Returns the number of blocks that may be held in addition; if none are held, those of one chunk."""
        return max(0, max(self.limit, min(per_chunk, self.max_held)) - len(self._counts))

    def take(self, number: int, request_id: str, block_ids: Iterable[Sequence[int]]) -> None:
        """Holds a store's blocks, by group; null blocks need no hold.

        Raises:
            RuntimeError: a block belongs to no request, so its contents are not the store's. Nothing is held then.
        """
        if number in self._held:
            raise RuntimeError(f"store {number} holds blocks already")
        blocks, known = [], self._pool.blocks
        for ids in block_ids:
            for block_id in ids:
                block = known[block_id] if 0 <= block_id < len(known) else None
                if block is None or not block.is_null and block.ref_cnt <= 0:
                    raise RuntimeError(f"block {block_id} belongs to no request")
                if not block.is_null:
                    blocks.append(block)
        self._pool.touch(blocks)
        self._held[number] = Hold(request_id, blocks, self._clock())
        self._counts.update(block.block_id for block in blocks)

    def release(self, number: int) -> None:
        """Releases a store's blocks, if it still holds any."""
        hold = self._held.pop(number, None)
        if hold is None:
            return
        for block in hold.blocks:
            self._counts[block.block_id] -= 1
            if not self._counts[block.block_id]:
                del self._counts[block.block_id]
        # As vLLM frees a request's: the end of a prefix is evicted before its start.
        self._pool.free_blocks(reversed(hold.blocks))

    def release_all(self) -> None:
        """Releases all, at the engine's end."""
        for number in list(self._held):
            self.release(number)

    def older_than(self, seconds: float) -> set[int]:
        """Returns the stores that have held their blocks for longer."""
        until = self._clock() - seconds
        return {number for number, hold in self._held.items() if hold.since < until}

    def soon_free(self) -> bool:
        """Whether blocks of ended or preempted requests are held, and only since a moment ago."""
        if not self._held:
            return False
        oldest = next(iter(self._held.values())).since
        return self._clock() - oldest < _YOUNG and self._alone() > 0

    def _alone(self) -> int:
        """Returns the number of blocks that belong to no request any more."""
        known = self._pool.blocks
        return sum(known[block_id].ref_cnt == count for block_id, count in self._counts.items())

    # -- resets ------------------------------------------------------------------------------

    def _give_way_to_resets(self) -> None:
        """A reset of the prefix cache fails while any block is in use. One that only holds would make fail gets their blocks."""
        reset = self._pool.reset_prefix_cache

        def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
            try:
                self._drop_for_reset()
            except Exception as error:  # vLLM then refuses the reset.
                logger.warning("blocks of stores in flight could not be released for a reset of the prefix cache: %r", error)
            return reset(*args, **kwargs)

        self._pool.reset_prefix_cache = reset_prefix_cache

    def _drop_for_reset(self) -> None:
        used = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
        if self._held and used == self._alone():
            self._dropped.update(hold.request_id for hold in self._held.values())
            self.release_all()

    def take_dropped(self) -> set[str]:
        """Returns the requests whose stores lost their blocks to a reset: the next step must wait for those stores."""
        dropped, self._dropped = self._dropped, set()
        return dropped
