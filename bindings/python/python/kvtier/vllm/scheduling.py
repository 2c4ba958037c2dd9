"""The connector in the scheduler's process: what to load and what to store."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from ..scheduler import SchedulerAdapter
from .metadata import Move, StepMetadata, WorkerReport
from .metrics import KvTierStats
from .options import Identity, Options
from .requests import Keys, Tracked, blocks_of_range

logger = logging.getLogger(__name__)

# Stores whose events are kept until every worker has stored.
MOST_UNCONFIRMED = 10_000


class Scheduling:
    """Follows requests from their arrival to their end."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options, block_tokens: list[int]) -> None:
        identity = Identity.of(vllm_config)
        self.adapter = SchedulerAdapter(
            options.url,
            identity.model_name,
            block_tokens=max(block_tokens),
            world_size=identity.world_size,
            num_kv_readers=identity.num_kv_readers,
            timeout=options.timeout,
            heartbeat=options.heartbeat,
        )
        self.adapter.on_health(lambda state: logger.warning("kvtier server %s: %s", options.url, state))
        self.options, self.block_tokens = options, block_tokens
        hash_block = getattr(kv_cache_config, "hash_block_size", None) or block_tokens[0]
        self.keys = Keys(self.adapter, options.key_mode, hash_block)
        self.hash_block_tokens = hash_block
        self.chunk = self.adapter.chunk_tokens
        transfer, events = vllm_config.kv_transfer_config, vllm_config.kv_events_config
        self.can_load, self.can_store = transfer.is_kv_consumer, transfer.is_kv_producer
        self.wants_events = events is not None and events.enable_kv_cache_events
        # Every rank stores its piece; with MLA one rank of each stage does.
        self.pieces = identity.world_size
        self.tracked: dict[str, Tracked] = {}
        self.held: set[str] = set()
        self.stats = KvTierStats()
        self.next_number = 0
        # Stores whose events wait for all workers: number -> (workers that have stored, event).
        self.unconfirmed: dict[int, tuple[int, BlockStored]] = {}
        self.events: list[KVCacheEvent] = []

    # -- a request arrives -------------------------------------------------------------------

    def _track(self, request: Any) -> Tracked:
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            tracked = self.tracked[request.request_id] = Tracked(request, request.cache_salt or "")
        return tracked

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond ``computed``; None while the lookup is under way."""
        tracked = self._track(request)
        end = request.num_tokens // self.chunk * self.chunk
        skips = getattr(request, "skip_reading_prefix_cache", False)
        if not self.can_load or tracked.bypass or skips or not end or not self.keys.can(request):
            return 0, False
        request_id, adapter = request.request_id, self.adapter
        if not adapter.has_lookup(request_id):
            adapter.maybe_submit_lookup_request(
                request_id, prompt=self.keys.prompt(request, end), cache_salt=tracked.salt
            )
        cached = adapter.check_lookup_result(request_id)
        if cached is None:
            return None, False
        tracked.matched, tracked.cached_tokens, tracked.local_tokens = True, cached, computed
        more = cached - computed
        if cached == request.num_tokens:
            # The last token is computed, for its successor.
            more -= 1
        return (more, True) if more > 0 else (0, False)

    def allocated(self, request: Any, block_ids: Iterable[Iterable[int]], external_tokens: int) -> None:
        """vLLM has decided, and given the request blocks."""
        tracked = self._track(request)
        tracked.block_ids = [list(ids) for ids in block_ids]
        if not tracked.matched:
            return
        tracked.matched = False
        self.adapter.cleanup_lookup_result(request.request_id)
        self.stats.add(lookups=1, hit_tokens=tracked.cached_tokens)
        tracked.stored_tokens = max(tracked.stored_tokens, tracked.cached_tokens)
        tracked.wants_load = external_tokens > 0
        # What vLLM has itself is not read.
        unread = tracked.local_tokens // self.chunk * self.chunk if tracked.wants_load else tracked.cached_tokens
        if unread:
            self.adapter.free_lookup_locks(
                request.request_id,
                start=0,
                end=unread,
                cache_salt=tracked.salt,
                prompt=self.keys.prompt(request, tracked.cached_tokens),
            )

    # -- a step is scheduled -----------------------------------------------------------------

    def step(self, scheduled: Any) -> StepMetadata:
        """The workers' part of a step."""
        metadata = StepMetadata(preempted=set(scheduled.preempted_req_ids or ()))
        metadata.held = self.held & set(scheduled.finished_req_ids)
        self.held -= metadata.held
        for request_id in metadata.preempted:
            if tracked := self.tracked.get(request_id):
                tracked.block_ids, tracked.bypass = [], False
        for tracked in self.tracked.values():
            if tracked.wants_load:
                tracked.wants_load, tracked.loading = False, True
                metadata.loads.append(self._load(tracked))
        for new in scheduled.scheduled_new_reqs:
            tracked = self.tracked.get(new.req_id)
            if tracked is not None:
                tracked.block_ids = [list(ids) for ids in new.block_ids]
                self._store(metadata, tracked, new.num_computed_tokens + scheduled.num_scheduled_tokens[new.req_id])
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            tracked = self.tracked.get(request_id)
            if tracked is None:
                continue
            new_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                tracked.block_ids = [list(ids) for ids in new_ids or ()]
            elif new_ids:
                for ids, more in zip(tracked.block_ids, new_ids, strict=True):
                    ids.extend(more)
            computed = cached.num_computed_tokens[index] + scheduled.num_scheduled_tokens[request_id]
            self._store(metadata, tracked, computed)
        return metadata

    def _load(self, tracked: Tracked) -> Move:
        request, end = tracked.request, tracked.cached_tokens
        start = tracked.local_tokens // self.chunk * self.chunk
        return Move(
            request.request_id,
            self.keys.prompt(request, end),
            start,
            end,
            blocks_of_range(tracked.block_ids, self.block_tokens, start, end),
            tracked.salt,
            skip=tracked.local_tokens - start,
        )

    def _store(self, metadata: StepMetadata, tracked: Tracked, computed: int) -> None:
        """Stores what this step completes."""
        request = tracked.request
        # Tokens that are being guessed, or not sampled yet, are no part of the request.
        known = request.num_tokens if self.options.save_decode else request.num_prompt_tokens
        end = min(computed, known, request.num_tokens) // self.chunk * self.chunk
        start = tracked.stored_tokens
        if not self.can_store or end <= start or not self.keys.can(request) or not self.adapter.is_healthy:
            return
        move = Move(
            request.request_id,
            self.keys.prompt(request, end),
            start,
            end,
            blocks_of_range(tracked.block_ids, self.block_tokens, start, end),
            tracked.salt,
        )
        if self.wants_events and (event := self._event(request, start, end)):
            move.number, self.next_number = self.next_number, self.next_number + 1
            self.unconfirmed[move.number] = (0, event)
            # Those that have failed are never confirmed.
            while len(self.unconfirmed) > MOST_UNCONFIRMED:
                del self.unconfirmed[next(iter(self.unconfirmed))]
        tracked.stored_tokens = end
        tracked.stores += 1
        metadata.stores.append(move)

    # -- workers have answered ---------------------------------------------------------------

    def answered(self, output: Any) -> None:
        """What the workers reported of a step."""
        failed = output.invalid_block_ids | set()
        for request_id in output.finished_recving or ():
            tracked = self.tracked.get(request_id)
            if tracked is None:
                continue
            tracked.loading = False
            start = tracked.local_tokens // self.chunk * self.chunk
            if request_id in output.failed_recving or any(failed.intersection(ids) for ids in tracked.block_ids):
                # Whatever is missing there is stored again when it was computed.
                tracked.bypass, tracked.stored_tokens = True, start
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for number, workers in report.stored.items():
                self._confirmed(number, workers)

    def _confirmed(self, number: int, workers: int) -> None:
        known = self.unconfirmed.pop(number, None)
        if known is None:
            return
        stored, event = known[0] + workers, known[1]
        if stored >= self.pieces:
            self.events.append(event)
        else:
            self.unconfirmed[number] = (stored, event)

    def _event(self, request: Any, start: int, end: int) -> BlockStored | None:
        """vLLM's own hashes of the blocks that were stored."""
        size = self.hash_block_tokens
        hashes = request.block_hashes[start // size : end // size]
        if len(hashes) != (end - start) // size:
            return None
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in hashes],
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[start // size - 1]) if start else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium="CPU",
            lora_name=lora.lora_name if lora else None,
        )

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        events, self.events = self.events, []
        return events

    def take_stats(self) -> KvTierStats | None:
        """Numbers since the last call."""
        failed, self.adapter.failed_lookups = self.adapter.failed_lookups, 0
        self.stats.add(failed_lookups=failed)
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, KvTierStats()
        return stats

    # -- a request ends ----------------------------------------------------------------------

    def finished(self, request: Any) -> bool:
        """Whether the workers must say that the request's blocks may be given to others."""
        request_id = request.request_id
        tracked = self.tracked.pop(request_id, None)
        self.keys.forget(request_id)
        if tracked is None:
            return False
        self.adapter.end_session(request_id)
        # The end of a load says so by itself, and vLLM waits for it.
        if tracked.stores and not tracked.loading:
            self.held.add(request_id)
            return True
        return False

    def reset_cache(self) -> bool:
        """Empty the server's memory, if that is wanted."""
        return self.adapter.reset_cache() if self.options.reset_server else True
