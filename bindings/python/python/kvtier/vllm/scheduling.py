"""The connector in the scheduler's process: decides which chunks are loaded and stored."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent

from .._native import Prompt
from ..limited import RateLimited
from ..operation import NO_BLOCK
from ..scheduler import SchedulerAdapter
from ..transfer import Group
from .contents import Contents
from .events import Announcements, ChunkEvents
from .guard import Errors, falls_back
from .holds import Holds
from .kinds import (
    blocks_of_range,
    blocks_per_chunk,
    check_windows,
    chunk_tokens,
    chunk_unit,
    has_states,
    has_windows,
    hash_block_tokens,
    is_compressed,
    of_served,
    served_numbers,
    with_offered_states,
)
from .metadata import Move, StepMetadata, WorkerReport
from .metrics import KvTierStats
from .options import Identity, Options
from .parameters import STORED_TOKENS, Parameters, is_prefill
from .requests import Keys, Tracked, Wait
from .resets import PoolResets

logger = logging.getLogger(__name__)

# Seconds behind the last deadline of a store after which its end counts as lost, and the workers are asked for it.
_LATE = 2


@dataclass
class InFlightStore:
    """A store in flight on the workers."""

    ended: int = 0
    """Number of workers where it has ended."""

    stored: Counter[int] = field(default_factory=Counter)
    """A chunk's position -> number of workers that have stored their piece of it."""

    events: dict[int, ChunkEvents] = field(default_factory=dict)
    """A chunk's position -> its events, if vLLM publishes events and the chunk is not announced."""


class Scheduling:
    """Follows requests from their arrival to their end."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options, identity: Identity, groups: list[Group]) -> None:
        block_tokens = [group.block_tokens for group in groups]
        hash_block = hash_block_tokens(kv_cache_config, groups)
        self.chunk_unit = chunk_unit(kv_cache_config, groups)
        self.adapter = SchedulerAdapter(
            options.url,
            identity.model_name,
            block_tokens=self.chunk_unit,
            world_size=identity.world_size,
            num_kv_readers=identity.num_kv_readers,
            timeout=options.timeout,
            lookup_timeout=options.lookup_timeout,
            heartbeat=options.heartbeat,
            wait_for_server=options.wait_for_server,
            chunk_tokens=chunk_tokens(options.chunk_tokens, kv_cache_config, groups),
        )
        self.errors, self.warnings = Errors(logger), RateLimited(logger)
        self.options, self.groups, self.block_tokens = options, groups, block_tokens
        self.clock = time.monotonic
        self.has_windows, self.has_states = has_windows(groups), has_states(groups)
        # A hit serves no other end than its own.
        self.ends_exactly = self.has_windows or is_compressed(kv_cache_config)
        # vLLM's numbers of the groups that are cached: its tables have others too.
        self.group_numbers = served_numbers(kv_cache_config)
        # A state in the middle of speculated tokens is in its block only after sampling, which a store does not wait for.
        speculates = getattr(vllm_config, "speculative_config", None) is not None
        self.save_decode = options.save_decode and not (self.has_states and speculates)
        self.keys = Keys(self.adapter, options.key_mode, hash_block, Contents(vllm_config))
        transfer, events = vllm_config.kv_transfer_config, vllm_config.kv_events_config
        self.can_load, self.can_store = transfer.is_kv_consumer, transfer.is_kv_producer
        # None: vLLM publishes no events.
        self.announcements: Announcements | None = None
        if events is not None and events.enable_kv_cache_events:
            self.announcements = Announcements(kv_cache_config, groups, getattr(vllm_config, "num_hash_lookahead_tokens", 0))
            self.server_events = self.adapter.client.kv_events(identity.model_name)
        # Of the ranks with the same piece one stores it, and reports.
        self.pieces = identity.world_size
        self.tracked: dict[str, Tracked] = {}
        self.held: set[str] = set()
        self.stats = KvTierStats()
        self.next_number = 0
        self.in_flight_stores: dict[int, InFlightStore] = {}
        self.was_reset = False
        self.has_warned_of_prefill = False
        self.pool_resets: PoolResets | None = None
        # None: vLLM's pool counts no references, or is not known. Then ended requests and preemptions wait for stores.
        self.holds: Holds | None = None
        # Loads that vLLM waits for and that could not start, with their blocks.
        self.failed_loads: dict[str, list[list[int]]] = {}
        self.metadata = StepMetadata()
        # vLLM's current block tables, in a step.
        self.block_state: Any = None

    @property
    def chunk(self) -> int:
        """Tokens in a chunk; 0 until the first server has answered."""
        return self.adapter.chunk_tokens or 0

    # -- a request arrives -------------------------------------------------------------------

    def _track(self, request: Any) -> Tracked:
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            self.keys.note(request)
            parameters = Parameters.of(request, self.warnings)
            tracked = self.tracked[request.request_id] = Tracked(request, request.cache_salt or "", parameters)
        return tracked

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Returns the tokens that can be loaded beyond ``computed``; None while the lookup is in flight."""
        if self.pool_resets is not None and self.pool_resets.take():
            self.reset_cache()
        self._follow_announced()
        tracked = self._track(request)
        tracked.own_tokens, tracked.received = computed, False
        if not self.adapter.has_lookup(request.request_id):
            # A new or preempted request: its earlier stores may have failed, or their objects may be evicted, or older than a reset.
            self.keys.begin(request.request_id)
            tracked.stored_tokens, tracked.server_hashes, tracked.is_stale = 0, [], False
        # The last token is always computed, to sample the next. With blocks of one token its block must not be loaded, and a
        # window loaded for the end of the prompt may lack the first token of the one before; a compressed latent, the tokens in it.
        loadable = request.num_tokens - 1 if 1 in self.block_tokens or self.ends_exactly else request.num_tokens
        if not self.can_load:
            return 0, False
        tracked.miss = self._miss_without_lookup(request, tracked, loadable)
        if tracked.miss:
            return 0, False
        # A limit is the lookup of a shorter prompt: what it finds is complete in all groups of layers.
        end = min(loadable, tracked.parameters.load) // self.chunk * self.chunk
        self._lookup(tracked, end)
        cached = self.adapter.check_lookup_result(request.request_id)
        if cached is None:
            return None, False
        tracked.miss = "" if cached else self.adapter.miss(request.request_id)
        if not tracked.matched and (cached or tracked.miss == "not_found"):
            self._withdraw_missing(request, cached, end)
        if self._waits(tracked, cached, end):
            return None, False
        tracked.matched, tracked.cached_tokens, tracked.local_tokens = True, cached, computed
        more = cached - computed
        if cached == request.num_tokens:
            more -= 1
        return (more, True) if more > 0 else (0, False)

    def _lookup(self, tracked: Tracked, end: int) -> None:
        """Looks up a request's first ``end`` tokens, unless it has a lookup."""
        request = tracked.request
        if self.adapter.has_lookup(request.request_id):
            return
        # vLLM has them if it traces too.
        traced = getattr(request, "trace_headers", None) or {}
        self.adapter.maybe_submit_lookup_request(
            request.request_id,
            prompt=self.keys.prompt(request, end),
            cache_salt=tracked.salt,
            traceparent=traced.get("traceparent"),
            keep_seconds=tracked.parameters.keep_seconds,
            peer=tracked.parameters.peer,
            session=tracked.parameters.session,
            session_action=tracked.parameters.session_action,
        )

    def _waits(self, tracked: Tracked, found: int, end: int) -> bool:
        """Whether a request whose lookup found ``found`` tokens waits for more that another engine is storing. It is then looked up
        again from time to time, for ``kvtier.hand_over_timeout`` in all, and another time if such a lookup fails: those before it may
        have found something."""
        wait, timeout = tracked.wait, self.options.hand_over_timeout
        if not tracked.parameters.awaited or not timeout or (wait is not None and wait.has_ended):
            return False
        awaited = min(tracked.parameters.awaited // self.chunk * self.chunk, end)
        has_all = max(found, tracked.own_tokens or 0) >= awaited
        # After a reset this engine finds nothing of others.
        in_vain = tracked.miss == "lookup_failed" or self.was_reset or not self.adapter.is_healthy
        now = self.clock()
        if wait is None:
            if has_all or in_vain:
                return False
            wait = tracked.wait = Wait(now)
        waited = now - wait.began
        if has_all or in_vain or waited >= timeout:
            wait.has_ended = True
            self.stats.add(hand_overs=1, hand_over_timeouts=not (has_all or in_vain), hand_over_seconds=waited)
            if tracked.miss == "lookup_failed" and wait.has_found:
                self._lookup_again(tracked, found, end)
                return True
            return False
        if wait.is_lookup_due(now):
            wait.has_found |= found > 0
            self._lookup_again(tracked, found, end)
        return True

    def _lookup_again(self, tracked: Tracked, found: int, end: int) -> None:
        """Replaces a request's lookup, which found ``found`` tokens."""
        # Servers that count leases would keep those of both.
        self._free(tracked, found, 0, found)
        self.adapter.cleanup_lookup_result(tracked.request.request_id)
        self._lookup(tracked, end)

    def _free(self, tracked: Tracked, found: int, start: int, end: int) -> None:
        """Releases the leases on tokens from ``start`` to ``end`` of the ``found`` ones."""
        if start < end:
            self.adapter.free_lookup_locks(
                tracked.request.request_id,
                start=start,
                end=end,
                cache_salt=tracked.salt,
                prompt=self.keys.prompt(tracked.request, found),
            )

    def _miss_without_lookup(self, request: Any, tracked: Tracked, loadable: int) -> str:
        """Returns why a request is not looked up; empty if it is."""
        if tracked.bypass:
            return tracked.bypass
        if getattr(request, "skip_reading_prefix_cache", False):
            return "skipped_by_vllm"
        if not self.chunk:
            return "no_server"
        if loadable < self.chunk:
            return "too_short"
        if tracked.parameters.load < self.chunk:
            return "parameter"
        return "" if self.keys.can_identify(request) else "not_identified"

    def _count_miss(self, tracked: Tracked, miss: str) -> None:
        if miss and not tracked.has_missed:
            tracked.has_missed = True
            self.stats.add(**{f"misses_{miss}": 1})

    def bypass_cache(self, request: Any) -> None:
        """Makes the request compute all its tokens."""
        request_id = request.request_id
        if (tracked := self.tracked.get(request_id)) is not None:
            tracked.bypass = tracked.miss = "error"
            tracked.matched = False
        if self.adapter.has_lookup(request_id):
            self.adapter.end_session(request_id)

    def allocated(self, request: Any, block_ids: Iterable[Iterable[int]], external_tokens: int) -> None:
        """Notes vLLM's decision to load ``external_tokens`` tokens beyond its own, and the request's blocks."""
        tracked = self._track(request)
        tracked.block_ids = self._cached(block_ids)
        self._count_miss(tracked, tracked.miss)
        if not tracked.matched:
            return
        tracked.matched = False
        self.adapter.cleanup_lookup_result(request.request_id)
        found = tracked.cached_tokens
        self.stats.add(lookups=1, hit_tokens=found)
        self._announce_hit(tracked, found)
        tracked.stored_tokens = found
        tracked.wants_load = external_tokens > 0
        # Neither vLLM's own prefix is read nor tokens that it computes.
        start = tracked.local_tokens // self.chunk * self.chunk if tracked.wants_load else found
        end = min(found, -(-(tracked.local_tokens + external_tokens) // self.chunk) * self.chunk)
        if tracked.wants_load and self.ends_exactly and (end != found or tracked.local_tokens + external_tokens != found):
            raise RuntimeError(f"a hit of {found} tokens was found that ends only there, and vLLM loads {end}")
        if tracked.wants_load:
            tracked.cached_tokens = end
            tracked.own_tokens = max(tracked.own_tokens or 0, end)
        for first, last in ((0, start), (max(start, end), found)):
            self._free(tracked, found, first, last)

    def fail_load(self, request: Any, block_ids: Iterable[Iterable[int]], external_tokens: int) -> None:
        """Fails a load that vLLM waits for and that cannot start: the workers report the failure."""
        if external_tokens > 0:
            tracked = self._track(request)
            tracked.wants_load, tracked.loading, tracked.matched = False, True, False
            self.failed_loads[request.request_id] = self._external(tracked, self._cached(block_ids))

    def _cached(self, block_ids: Iterable[Iterable[int]] | None) -> list[list[int]]:
        """Returns the blocks of the groups that are cached, from those of all; an empty list for none."""
        by_group = [list(ids) for ids in block_ids or ()]
        return of_served(by_group, self.group_numbers) if by_group else []

    def _external(self, tracked: Tracked, block_ids: list[list[int]]) -> list[list[int]]:
        """Returns the blocks after vLLM's own prefix, which other requests may share."""
        return [ids[tracked.local_tokens // size :] for ids, size in zip(block_ids, self.block_tokens, strict=False)]

    # -- a step is scheduled -----------------------------------------------------------------

    def step(self, scheduled: Any) -> StepMetadata:
        """Returns the workers' part of a step."""
        self.metadata = metadata = StepMetadata()
        self._follow_announced()
        self.block_state = getattr(scheduled, "kv_connector_block_state", None)
        preempted = set(scheduled.preempted_req_ids or ())
        if self.holds is None:
            metadata.preempted = preempted
        else:
            metadata.preempted = self.holds.take_dropped()
            metadata.asked = self.holds.older_than(max(self.options.timeout, self.options.store_timeout) + _LATE)
        metadata.held, self.held = self.held, set()
        metadata.failed, self.failed_loads = self.failed_loads, {}
        for request_id in preempted:
            if tracked := self.tracked.get(request_id):
                # Its blocks may already be the new ones: a reset preempts and resumes in one step.
                tracked.bypass = ""
        for tracked in self._take_wanted_loads():
            self._load(metadata, tracked)
        for new in scheduled.scheduled_new_reqs:
            tracked = self.tracked.get(new.req_id)
            if tracked is not None:
                self._note_start(tracked, new.num_computed_tokens)
                computed = new.num_computed_tokens + scheduled.num_scheduled_tokens[new.req_id]
                self._advance(metadata, tracked, new.block_ids, True, computed)
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            tracked = self.tracked.get(request_id)
            if tracked is not None:
                computed = cached.num_computed_tokens[index] + scheduled.num_scheduled_tokens[request_id]
                is_whole = request_id in cached.resumed_req_ids
                if is_whole:
                    self._note_start(tracked, cached.num_computed_tokens[index])
                self._advance(metadata, tracked, cached.new_block_ids[index], is_whole, computed)
        return metadata

    def _note_start(self, tracked: Tracked, computed: int) -> None:
        """Notes the tokens with which a request begins to run. Those that another connector loads in this very step are not stored, nor
        what follows: that load may fail, and is reported only after the stores of the step."""
        own, tracked.own_tokens = tracked.own_tokens, None
        # vLLM's own prefix may end inside a block of states.
        unit = self.chunk_unit if self.has_states else 1
        if own is not None and computed // unit > own // unit and not tracked.received:
            tracked.is_stale = True

    def partial_step(self, scheduled: Any) -> StepMetadata:
        """Returns the known part of an unreadable step. Its new blocks are unknown, so no running request is stored."""
        for tracked in self._take_wanted_loads():
            self._fail_load(self.metadata, tracked)
        for tracked in self.tracked.values():
            # A request that waits for its load gets no new blocks, and its failed blocks are among those it has.
            if not tracked.loading:
                tracked.block_ids = []
        return self.metadata

    def _take_wanted_loads(self) -> Iterator[Tracked]:
        for tracked in self.tracked.values():
            if tracked.wants_load:
                tracked.wants_load, tracked.loading = False, True
                yield tracked

    @falls_back(by="_forget_blocks")
    def _advance(
        self, metadata: StepMetadata, tracked: Tracked, block_ids: Any, is_whole: bool, computed: int
    ) -> None:
        """Notes a request's blocks (``is_whole``: all of them, otherwise additional ones), and stores complete chunks."""
        if self.has_windows:
            # Blocks that have left a window are null in the current table only.
            return self._store(metadata, tracked, computed)
        if is_whole:
            tracked.block_ids = self._cached(block_ids)
        elif block_ids and tracked.block_ids:
            for ids, more in zip(tracked.block_ids, self._cached(block_ids), strict=True):
                ids.extend(more)
        if tracked.block_ids:
            self._store(metadata, tracked, computed)

    def _forget_blocks(self, metadata: StepMetadata, tracked: Tracked, *step: Any) -> None:
        tracked.block_ids = []

    @falls_back(by="_fail_load")
    def _load(self, metadata: StepMetadata, tracked: Tracked) -> None:
        request, end = tracked.request, tracked.cached_tokens
        local, start = tracked.local_tokens, tracked.local_tokens // self.chunk * self.chunk
        blocks = blocks_of_range(tracked.block_ids, self.groups, self.chunk, start, end)
        check_windows(blocks, self.groups, start, local, end)
        prompt = self.keys.prompt(request, end)
        metadata.loads.append(Move(request.request_id, prompt, start, end, blocks, tracked.salt, skip=local - start))

    def _fail_load(self, metadata: StepMetadata, tracked: Tracked) -> None:
        metadata.failed[tracked.request.request_id] = self._external(tracked, tracked.block_ids)

    def _store(self, metadata: StepMetadata, tracked: Tracked, computed: int) -> None:
        """Adds stores of the chunks that this step completes."""
        request, chunk = tracked.request, self.chunk
        if not chunk or not self.can_store or not self.adapter.is_healthy or tracked.is_stale:
            return
        if self.has_windows and self.holds is None:
            return
        # Speculated tokens, and tokens not sampled yet, are no part of the request.
        known = request.num_tokens if self.save_decode else request.num_prompt_tokens
        end = min(computed, known, request.num_tokens, tracked.parameters.store) // chunk * chunk
        start = tracked.stored_tokens
        if end <= start or not self.keys.can_identify(request):
            return
        end = self._holdable(tracked, start, end)
        if end == start:
            return
        table = self._current_blocks(request.request_id) if self.has_windows else tracked.block_ids
        blocks = blocks_of_range(table, self.groups, chunk, start, end)
        kept = {"keep_seconds": tracked.parameters.keep_seconds, "session": tracked.parameters.session}
        move = Move(request.request_id, self.keys.prompt(request, end), start, end, blocks, tracked.salt, **kept)
        events = self._store_events(tracked, move)
        move.number, self.next_number = self.next_number, self.next_number + 1
        if self.holds is not None:
            held = [[block for block in ids if block != NO_BLOCK] for ids in blocks]
            self.holds.take(move.number, move.request_id, held)
        self.in_flight_stores[move.number] = InFlightStore(events=events)
        tracked.stored_tokens = end
        tracked.stores += 1
        metadata.stores.append(move)

    @falls_back()
    def _follow_announced(self) -> None:
        """Removes announced chunks that the server or vLLM has lost."""
        if self.announcements is None:
            return
        client, connection, changes = self.adapter.client, None, ({}, {})
        if client.is_healthy and (news := self.server_events.take()) is not None:
            epoch, changes = news
            connection = client.connections, epoch
        if connection != self.announcements.connection and (why := self.server_events.obstacle) is not None:
            logger.warning("%s: KV events of evicted chunks come only with a lookup that does not find them", why)
        self.announcements.follow(connection, *changes)

    @falls_back(dict)
    def _store_events(self, tracked: Tracked, move: Move) -> dict[int, ChunkEvents]:
        """Returns the events of a store. Without them it is stored nevertheless."""
        if self.announcements is None:
            return {}
        keys = self._server_hashes(tracked, move.prompt)
        return self.announcements.chunks(tracked.request, move.start, move.end, self.chunk, keys, move.block_ids)

    @falls_back()
    def _announce_hit(self, tracked: Tracked, found: int) -> None:
        if self.announcements is not None and found:
            keys = self._server_hashes(tracked, self.keys.prompt(tracked.request, found))
            self.announcements.found(tracked.request, found, self.chunk, keys)

    @falls_back()
    def _withdraw_missing(self, request: Any, found: int, end: int) -> None:
        if self.announcements is not None:
            self.announcements.missed(request, found, end, self.chunk)

    def _server_hashes(self, tracked: Tracked, prompt: Prompt) -> list[bytes]:
        """Returns the hashes of a prompt's chunks, and maybe later ones, in the server's events; none if there are no events of them, as
        of chunks with a salt."""
        if tracked.salt or self.server_events.obstacle is not None:
            return []
        tracked.server_hashes += prompt.chunk_hashes(self.chunk, tracked.server_hashes)
        return tracked.server_hashes

    def _current_blocks(self, request_id: str) -> Any:
        """Returns a request's blocks by vLLM's tables of this step."""
        table = self._cached(self.block_state.get_block_ids(request_id))
        if not self.has_states:
            return table
        place = {number: at for at, number in enumerate(self.group_numbers)}
        offered = self.block_state.boundary_state_offloads.get(request_id, ())
        known = [(place[number], block, tokens) for number, block, tokens in offered if number in place]
        return with_offered_states(table, self.groups, known)

    def _holdable(self, tracked: Tracked, start: int, end: int) -> int:
        """Returns the end of the chunks whose blocks may be held now; the rest is put off to the request's next step."""
        if self.holds is None:
            return end
        per_chunk = blocks_per_chunk(self.groups, self.chunk)
        if per_chunk == 0:
            # Recurrent states alone: they are held beyond the limit.
            return end
        if per_chunk > self.holds.max_held:
            self.warnings.warning(
                "chunk",
                "nothing is stored: a chunk of %d tokens has %d blocks, and a store may hold half of vLLM's blocks, %d; make its cache "
                "larger, or kvtier.chunk_tokens smaller",
                self.chunk,
                per_chunk,
                self.holds.max_held,
            )
        chunks = self.holds.free_capacity(per_chunk) // per_chunk
        holdable = min(end, start + chunks * self.chunk)
        # Counted once, although each step tries again.
        late = max(holdable, tracked.put_off_tokens)
        if late < end:
            self.stats.add(put_off_tokens=end - late)
            tracked.put_off_tokens = end
        return holdable

    # -- workers have answered ---------------------------------------------------------------

    def apply_output(self, output: Any) -> None:
        """Applies the workers' reports of a step."""
        # Releases before 0.30 report no failures by request.
        failed = getattr(output, "failed_recving", None) or ()
        if output.invalid_block_ids or failed:
            # One worker's failure may be steps before the last worker's end, and is reported only once.
            for request_id, tracked in self.tracked.items():
                if tracked.loading and (
                    request_id in failed
                    or any(not output.invalid_block_ids.isdisjoint(ids) for ids in tracked.block_ids)
                ):
                    tracked.load_failed = True
        for request_id in output.finished_recving or ():
            tracked = self.tracked.get(request_id)
            if tracked is None:
                continue
            tracked.received |= not tracked.loading
            tracked.loading = False
            if tracked.load_failed:
                # Missing chunks are stored again once they are computed.
                tracked.load_failed, tracked.bypass = False, "load_failed"
                self._count_miss(tracked, tracked.bypass)
                tracked.stored_tokens = tracked.local_tokens // self.chunk * self.chunk if self.chunk else 0
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._apply_report(report)

    def _apply_report(self, report: WorkerReport) -> None:
        """Applies ended stores, and chunks whose pieces are stored by every worker."""
        self._follow_announced()
        for (number, chunk), workers in sorted(report.stored.items()):
            store = self.in_flight_stores.get(number)
            if store is None:
                continue
            store.stored[chunk] += workers
            if self.announcements is not None and store.stored[chunk] == self.pieces and chunk in store.events:
                self.announcements.stored(store.events[chunk])
        for number, workers in report.ended.items():
            store = self.in_flight_stores.get(number)
            if store is not None:
                store.ended += workers
                if store.ended >= self.pieces:
                    self._end_store(number)
        for number, workers in report.unknown.items():
            # All workers' answers to one question: none reads these blocks, though a report of that was lost.
            if workers >= self.pieces:
                self._end_store(number)

    def _end_store(self, number: int) -> None:
        self.in_flight_stores.pop(number, None)
        if self.holds is not None:
            self.holds.release(number)

    def take_events(self) -> list[KVCacheEvent]:
        """Returns the events since the last call."""
        self._follow_announced()
        return self.announcements.take() if self.announcements is not None else []

    def take_stats(self) -> KvTierStats | None:
        """Returns the counters since the last call."""
        failed, self.adapter.failed_lookups = self.adapter.failed_lookups, 0
        self.stats.add(failed_lookups=failed, errors=self.errors.take())
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, KvTierStats()
        return stats

    # -- a request ends ----------------------------------------------------------------------

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the request's blocks wait for the workers' report before they are reused, and parameters for the request that
        decodes it, if it asked for them."""
        request_id = request.request_id
        tracked = self.tracked.pop(request_id, None)
        # Held blocks do not wait for their request's end. vLLM itself waits for the end of a load.
        if self.holds is None and tracked is not None and tracked.stores and not tracked.loading:
            self.held.add(request_id)
        self.keys.forget(request_id)
        if tracked is not None:
            self.adapter.end_session(request_id)
        handed_over = None
        if not self.options.hand_over and not self.has_warned_of_prefill and is_prefill(request):
            self.has_warned_of_prefill = True
            what = "a request has do_remote_decode: unless another connector answers it, set kvtier.hand_over, or its decode may compute it again"
            logger.warning(what)
        if self.options.hand_over and is_prefill(request):
            # After a reset no other engine has this one's keys. If a load failed, what vLLM itself had may be lost in the server too.
            has_stored = tracked is not None and not self.was_reset and tracked.bypass != "load_failed"
            handed_over = {STORED_TOKENS: tracked.stored_tokens if has_stored else 0}
        return request_id in self.held, handed_over

    # -- vLLM's prefix cache is reset --------------------------------------------------------

    def bind_pool(self, pool: Any) -> None:
        """Holds blocks of stores in vLLM's pool, and makes a reset of its prefix cache, after which weights may differ, one of this
        cache too."""
        if self.options.follow_resets:
            self.pool_resets = PoolResets(pool)
        if self.announcements is not None:
            self.announcements.bind_pool(pool)
        # A state that is put off is never offered again, and no hit ends where its prompt does.
        self.holds = Holds.of(pool, is_large=self.has_states)
        if self.holds is None and self.has_windows:
            logger.error(
                "the blocks of this vLLM cannot be held one by one: a model with sliding windows or recurrent states stores nothing"
            )
        elif self.holds is None:
            logger.info("the blocks of this vLLM cannot be held one by one: ended requests keep theirs until they are stored")

    def shutdown(self) -> None:
        """Releases all blocks, and disconnects."""
        if self.holds is not None:
            self.holds.release_all()
        self.adapter.shutdown()

    def reset_cache(self) -> bool:
        """Renews the keys, so that no earlier object is found any more; returns true. Never waits.

        A load in flight continues: its request has blocks, so vLLM's own reset has already refused. Clearing the server would
        not suffice: its tiers keep their objects, other engines lease or store old ones, and it may be away.
        """
        self.keys.renew()
        if self.announcements is not None:
            self.announcements.reset()
        for tracked in self.tracked.values():
            tracked.matched, tracked.is_stale = False, True
        for request_id in self.tracked:
            # Requests whose hit is not loaded yet are looked up again.
            if self.adapter.has_lookup(request_id):
                self.adapter.end_session(request_id)
        if not self.was_reset:
            self.was_reset = True
            logger.warning(
                "the prefix cache was reset: from now on this engine finds only its own stores. Engines started with the same "
                "kvtier.model_name share; under a new name no earlier objects of other engines are found"
            )
        if self.options.reset_server and self.adapter.is_healthy:
            self.adapter.client.clear(False)
        return True
