"""External linker of SGLang's radix cache: pages of the device's pools, which the server reads and writes itself on a GPU."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from .identity import Ranks, model_name, shared_nonce
from .options import Options
from .pages import Store, restorable, view

# A lookup blocks the scheduler.
_LOOKUP_TIMEOUT = 0.02
# Requests whose leases are remembered. Those of a request that ends without a load expire at the server.
_MAX_SESSIONS = 4096


class DevicePool(NamedTuple):
    """A pool of the device."""

    buffers: list[torch.Tensor]
    rows_per_page: int
    """Rows of each buffer that a page has."""

    indices_per_page: int
    """Indices by which SGLang names a page."""

    indices_from: PoolName
    """The pool of the tree that has the indices."""

    is_replicated: bool
    translate: Callable[[torch.Tensor], torch.Tensor] | None = None


class LoadCounter:
    """Batches of loads: a forward waits for the whole batch, since its layers land together."""

    def __init__(self) -> None:
        self.consumer_index = -1
        # Index -> the started transfers of a batch.
        self.batches: dict[int, Future[list[Future[bool]]]] = {}

    def set_consumer(self, index: int) -> None:
        """Chooses the batch that the next forward waits for."""
        self.consumer_index = index

    def wait_until(self, _: int) -> None:
        """Waits for the batch. A failed one is reported by :meth:`KvTierLinker.finish_layer_wise_loading`."""
        self.has_landed(self.consumer_index)

    def has_landed(self, index: int) -> bool:
        """Waits for a batch; whether all of it was loaded."""
        batch = self.batches.get(index)
        return batch is None or _succeeded(batch)


class KvTierLinker(UnifiedCacheLinker):
    """Pages of one rank's device pools. Without a server each lookup misses and each offload fails, at once."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Registers the pools with the server, now or when it answers.

        Raises:
            ValueError: an option, or the kind of a pool, is not allowed.
        """
        self.forward_stream = forward_stream
        options = Options.read(extra_config, lookup_timeout=_LOOKUP_TIMEOUT)
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self._devices = _device_pools(kvcache, params, components)
        self._ranks = _ranks(server_args, params)
        group = params.attn_tp_cache_group or params.tp_cache_group
        self._store = Store(options, options.model_name or model_name(server_args), params.page_size, self._ranks, shared_nonce(group))
        for name, pool in self._devices.items():
            tensors = [_tensor(buffer, pool, self._store.page_tokens) for buffer in pool.buffers]
            self._store.register(
                str(name),
                tensors,
                pool.is_replicated,
                kind=f"linker {type(kvcache).__qualname__}",
                dtype=[str(kvcache.dtype), *(str(buffer.dtype) for buffer in pool.buffers)],
                layout=getattr(kvcache, "kv_cache_layout", None),
                layers=[kvcache.start_layer, getattr(kvcache, "end_layer", None)],
            )
        self.pools = dict(self._devices)
        self.layer_done_counter = LoadCounter()
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._on_cuda = self._devices[PoolName.KV].buffers[0].is_cuda
        # Request id -> the session of its leases.
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._queued: dict[str, list[PoolTransfer]] = {}
        self._batches = itertools.count()
        # Batch -> its requests.
        self._loading: dict[int, list[str]] = {}
        self._offloads: deque[Future[list[Future[bool]]]] = deque()
        # Indices come from the device, which the scheduler must not wait for. One thread each keeps the order.
        self._load_thread = ThreadPoolExecutor(1, "kvtier-load")
        self._offload_thread = ThreadPoolExecutor(1, "kvtier-offload")

    # -- lookups -----------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Returns the lengths, in pages, of prefixes that can be restored. They are leased until the load ends."""
        by_name = {each.name: each for each in transfers}
        if not all(pool.indices_from in by_name for pool in self._devices.values()):
            return []
        found = self._store.find(by_name[PoolName.KV].keys, list(self._store.pools))
        lengths: list[int] = []
        if found is not None:
            session, bits = found
            sources = {str(name): by_name[pool.indices_from] for name, pool in self._devices.items()}
            windowed = {name: each for name, each in sources.items() if each.hit_policy == PoolHitPolicy.TRAILING_PAGES}
            lengths = restorable(bits, {name: max(1, len(each.keys)) for name, each in windowed.items()})
        # The lookup before this one is ended after it, so that what both found stays.
        self._end(rid)
        if found is not None and lengths:
            self._sessions[rid] = session
            while len(self._sessions) > _MAX_SESSIONS:
                self._end(next(iter(self._sessions)))
        elif found is not None:
            self._store.end(session, list(self._store.pools))
        return lengths

    def _end(self, rid: str) -> None:
        """Ends the leases of a request."""
        if session := self._sessions.pop(rid, None):
            self._store.end(session, list(self._store.pools))

    # -- loads -------------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queues a load. The answer depends on the transfers alone: all ranks must give the same."""
        if not any(each.keys for each in transfers):
            return False
        self._queued[rid] = transfers
        return True

    def start_layer_wise_loading(self) -> int:
        """Starts the queued loads."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index = next(self._batches)
        self._loading[index] = list(queued)
        transfers = [each for transfers in queued.values() for each in transfers]
        # The slots are free after what the scheduler's stream has queued.
        events = self.record_offload_ready()[:1] if self._on_cuda else []
        self.layer_done_counter.batches[index] = self._load_thread.submit(self._start, transfers, events, False)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits for a batch, and ends its leases; whether all of it was loaded."""
        landed = self.layer_done_counter.has_landed(counter_index)
        self.layer_done_counter.batches.pop(counter_index, None)
        for rid in self._loading.pop(counter_index, ()):
            self._end(rid)
        return landed

    def cancel_queued_load(self, rid: str) -> bool:
        """Removes a queued load."""
        self._end(rid)
        return self._queued.pop(rid, None) is not None

    # -- offloads ----------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Starts an offload. The answer depends on the transfers alone, as that of :meth:`load`."""
        if not any(each.keys for each in transfers):
            return False
        events = self.record_offload_ready() if self._on_cuda else []
        self._offloads.append(self._offload_thread.submit(self._start, transfers, events, True))
        return True

    def num_completed_offloads(self) -> int:
        """Returns the number of offloads at the front of the queue that have ended."""
        ended = itertools.takewhile(_has_ended, self._offloads)
        return sum(1 for _ in ended)

    def pop_completed_offload(self) -> bool:
        """Removes the oldest offload; whether all of it was stored."""
        return _succeeded(self._offloads.popleft())

    def _start(self, transfers: list[PoolTransfer], events: list[Any], is_store: bool) -> list[Future[bool]]:
        """Starts transfers once the device has passed the events."""
        for event in events:
            event.synchronize()
        parts = []
        for name, pool in self._devices.items():
            # Other ranks have the same bytes, and the first stores them.
            if is_store and pool.is_replicated and self._ranks.tp_rank:
                continue
            keys: list[str] = []
            pages: list[int] = []
            for each in transfers:
                if each.name == pool.indices_from and each.keys:
                    indices = pool.translate(each.device_indices) if pool.translate else each.device_indices
                    keys += each.keys
                    pages += (indices[:: pool.indices_per_page] // pool.indices_per_page).tolist()
            if keys:
                parts.append((str(name), keys, pages))
        return [each for part in parts for each in self._store.transfer(*part, is_store=is_store)]

    # -- the end -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Waits for all transfers to end, and forgets their results, the queue and all leases. SGLang calls it after an update of the
        weights, so nothing from before is found afterwards."""
        self._queued.clear()
        for index in list(self.layer_done_counter.batches):
            self.finish_layer_wise_loading(index)
        while self._offloads:
            self.pop_completed_offload()
        for rid in list(self._sessions):
            self._end(rid)
        self.layer_done_counter.set_consumer(-1)
        self._store.forget()

    def close(self) -> None:
        """Resets, unregisters and disconnects."""
        self.reset()
        self._load_thread.shutdown()
        self._offload_thread.shutdown()
        self._store.close()


def _has_ended(started: Future[list[Future[bool]]]) -> bool:
    return started.done() and (started.exception() is not None or all(each.done() for each in started.result()))


def _succeeded(started: Future[list[Future[bool]]]) -> bool:
    """Waits for transfers; whether all succeeded."""
    return started.exception() is None and all([each.result() for each in started.result()])


def _ranks(server_args: Any, params: Any) -> Ranks:
    if getattr(server_args, "dcp_size", 1) > 1:
        raise ValueError(f"dcp_size: {server_args.dcp_size}; KvTierLinker serves 1 only")
    rank, size = 0, server_args.tp_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = params.attn_tp_cache_group or params.tp_cache_group
        rank, size = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    return Ranks(rank, size, params.pp_rank, params.pp_size, params.attn_cp_rank, params.attn_cp_size)


def _device_pools(kvcache: Any, params: Any, components: Any) -> dict[PoolName, DevicePool]:
    """Returns the device's pools: those of plain models here, others as SGLang describes them to its own linkers.

    Raises:
        ValueError: SGLang has no description of them.
    """
    page = params.page_size
    parts = {PoolName.KV: kvcache}
    if type(kvcache) is SWAKVPool:
        parts = {PoolName.KV: kvcache.full_kv_pool, PoolName.SWA: kvcache.swa_kv_pool}
    elif type(kvcache) is HybridLinearKVPool:
        parts = {PoolName.KV: kvcache.full_kv_pool}
    drafts = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools, *params.mtp_draft_mamba_pools)
    if drafts or not all(_is_plain(part) for part in parts.values()):
        group = resolve_hybrid_device_pool_group(kvcache=kvcache, page_size=page, params=params, components=components)
        return {each.name: _described(each, group.rank_replicated) for each in group.entries}
    pools = {}
    for name, part in parts.items():
        is_latent = type(part) is MLATokenToKVPool
        buffers = [*part.kv_buffer] if is_latent else [*part.k_buffer, *part.v_buffer]
        pools[name] = DevicePool(buffers, page, page, name, is_latent)
    if ComponentType.MAMBA in components:
        pools[PoolName.MAMBA] = _states(params.req_to_token_pool)
    return pools


def _is_plain(pool: Any) -> bool:
    """Whether the rows of a pool's buffers are its slots, and the buffers are all it has."""
    scales = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")
    is_nhd = getattr(pool, "kv_cache_layout", "nhd") == "nhd" and not pool.layer_shard_enabled
    return type(pool) in (MHATokenToKVPool, MLATokenToKVPool) and is_nhd and all(getattr(pool, name, None) is None for name in scales)


def _described(entry: Any, is_replicated: bool) -> DevicePool:
    """Returns a pool as SGLang describes it."""
    buffer, page_bytes = entry.kv_buffer[0], entry.buffer_meta[0][0][2]
    rows = page_bytes * buffer.shape[0] // buffer.nbytes
    return DevicePool(entry.kv_buffer, rows, entry.page_size, entry.indices_from_pool, is_replicated, entry.translate_indices)


def _states(requests: Any) -> DevicePool:
    """Returns the pool of recurrent states, a row each."""
    if requests.mamba_ckpt_pool is not None or requests.short_conv_pool.enabled or requests.ngram_pool.enabled:
        raise ValueError("int8 checkpoints or side states of recurrent layers; KvTierLinker serves neither, KvTierStorage may")
    cache = requests.mamba_pool.mamba_cache
    layers = [layer for state in (cache.temporal, *cache.conv) if state.numel() for layer in state]
    return DevicePool(layers, 1, 1, PoolName.MAMBA, False)


def _tensor(buffer: torch.Tensor, pool: DevicePool, page_tokens: int) -> torch.Tensor:
    """Returns a buffer's pages.

    Raises:
        ValueError: they are not contiguous.
    """
    rows, item = pool.rows_per_page, buffer.element_size()
    row_bytes, stride = buffer.nbytes // buffer.shape[0], buffer.stride(0) * item
    if not buffer[0].is_contiguous() or (rows > 1 and stride != row_bytes):
        raise ValueError(f"strides {buffer.stride()} of a KV buffer; KvTierLinker serves contiguous pages")
    storage, offset = buffer.untyped_storage(), buffer.storage_offset() * item
    return view(storage, offset, buffer.shape[0] // rows, stride * rows, row_bytes * rows, page_tokens)
