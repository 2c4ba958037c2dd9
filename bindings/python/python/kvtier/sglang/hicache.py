"""Storage backend of SGLang's HiCache: pages of its host pools, which this process copies from and to the server."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult
from sglang.srt.runtime_context import get_parallel, get_server_args

from .identity import Ranks, model_name, shared_nonce
from .options import Options
from .pages import Store, restorable, view

logger = logging.getLogger(__name__)

# Seconds for which the pages that a lookup found stay in the server's memory: SGLang loads them next.
_LEASE_SECONDS = 10.0


@dataclass
class _Lease:
    """A find whose pages are leased."""

    names: list[str]
    last_key: str
    """The end of the prefix that SGLang loads unless another rank has found less."""

    waiting: set[str]
    """Pools whose last page was not loaded yet."""

    began: float


class KvTierStorage(HiCacheStorage):
    """Pages of one rank's host pools. SGLang calls it on threads of its own; every call is bounded, and each failure is a miss."""

    def __init__(self, storage_config: HiCacheStorageConfig, _: Any = None) -> None:
        """Reads the options.

        Raises:
            ValueError: an option is not allowed.
        """
        extra = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise ValueError(f"interface_v1: {extra.get('interface_v1')!r}; KvTierStorage needs 1, since it copies pages in place")
        self._config, self._options = storage_config, Options.read(extra)
        self._store: Store | None = None
        # Pools without bytes: SGLang only counts their pages.
        self._empty: set[str] = set()
        # Session -> a find whose pages are leased, the oldest first.
        self._leases: dict[str, _Lease] = {}

    # -- set-up ------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers the pool of KV."""
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Registers a pool.

        Raises:
            ValueError: its layout does not have each page at a place of its own.
        """
        name = str(host_pool_name)
        if getattr(self, "registered_pools", {}).get(host_pool_name) is host_pool:
            return
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        config = self._config
        if self._store is None:
            ranks = Ranks(config.tp_rank, config.tp_size, config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size)
            name_in_keys = self._options.model_name or model_name(get_server_args())
            group = get_parallel().attn_tp_group.cpu_group if torch.distributed.is_initialized() else None
            self._store = Store(self._options, name_in_keys, host_pool.page_size, ranks, shared_nonce(group))
        tensors = _tensors(host_pool, self._store.page_tokens)
        if tensors is None:
            self._empty.add(name)
            return
        self._store.register(
            name,
            tensors,
            # The first rank stores the other pools of a replicated model.
            config.is_mla_model and host_pool_name != PoolName.MAMBA,
            kind=type(host_pool).__qualname__,
            layout=host_pool.layout,
            dtype=str(host_pool.dtype),
            layers=[host_pool.start_layer, host_pool.end_layer],
            format=host_pool.storage_format_tag,
        )

    # -- lookups -----------------------------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None) -> PoolTransferResult:
        """Returns the longest prefix that all pools can restore."""
        transfers = {str(each.name): each for each in pool_transfers or () if each.hit_policy != PoolHitPolicy.BLOCK_GROUPS}
        names = [str(PoolName.KV), *(name for name in transfers if name != str(PoolName.KV))]
        if self._store is None or not keys:
            return PoolTransferResult.empty()
        self._end_old()
        stored = [name for name in names if name not in self._empty]
        answer = self._store.find(keys, stored)
        if answer is None:
            return PoolTransferResult.empty()
        session, found = answer
        found |= {name: [True] * len(keys) for name in names if name in self._empty}
        windows = {
            name: max(1, len(transfers[name].keys or ()))
            for name in names[1:]
            if transfers[name].hit_policy == PoolHitPolicy.TRAILING_PAGES
        }
        lengths = restorable(found, windows)
        if lengths:
            self._leases[session] = _Lease(stored, keys[lengths[-1] - 1], set(stored), time.monotonic())
        else:
            self._store.end(session, stored)
        kv = {names[0]: found[names[0]]}
        each = {name: restorable(kv | {name: found[name]}, {k: v for k, v in windows.items() if k == name}) for name in names}
        hits = {PoolName(name): each[name][-1] for name in names if each[name]}
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Returns the length of the longest prefix whose KV is there."""
        return self.batch_exists_v2(keys).kv_hit_pages

    def exists(self, key: str) -> bool:
        """Whether a page of KV is there."""
        return self.batch_exists([key]) == 1

    def _end_old(self) -> None:
        """Ends leases whose pages were loaded, or were not for long."""
        for session, lease in list(self._leases.items()):
            if not lease.waiting or lease.began + _LEASE_SECONDS < time.monotonic():
                self._end(session)

    def _end(self, session: str) -> None:
        # SGLang looks up and loads on two threads.
        if (lease := self._leases.pop(session, None)) and self._store is not None:
            self._store.end(session, lease.names)

    # -- transfers ---------------------------------------------------------------------------

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Loads pages; all of a pool's, or none."""
        result = self._transfer(transfers, is_store=False)
        for name, keys in ((str(each.name), each.keys or ()) for each in transfers):
            lease = next((lease for lease in list(self._leases.values()) if name in lease.waiting and lease.last_key in keys), None)
            if lease is not None:
                lease.waiting.remove(name)
        self._end_old()
        return result

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Stores pages."""
        return self._transfer(transfers, is_store=True)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Loads pages of KV; all or none."""
        return self.batch_get_v2([PoolTransfer(PoolName.KV, host_indices, keys=keys)])[PoolName.KV]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages of KV."""
        return self.batch_set_v2([PoolTransfer(PoolName.KV, host_indices, keys=keys)])[PoolName.KV]

    def _transfer(self, transfers: list[PoolTransfer], *, is_store: bool) -> dict[str, list[bool]]:
        started = [(each, self._started(each, is_store)) for each in transfers]
        return {each.name: [ended()] * len(each.keys or ()) for each, ended in started}

    def _started(self, transfer: PoolTransfer, is_store: bool) -> Callable[[], bool]:
        """Starts a transfer; returns a function that waits for its result."""
        keys, indices, pool = transfer.keys or [], transfer.host_indices, self.registered_pools.get(transfer.name)
        if not keys or str(transfer.name) in self._empty:
            return lambda: True
        if self._store is None or pool is None or indices is None or indices.numel() != len(keys) * pool.page_size:
            logger.error("%s: %d keys do not fit the pages of the pool; not transferred", transfer.name, len(keys))
            return lambda: False
        pages = (indices[:: pool.page_size] // pool.page_size).tolist()
        parts = self._store.transfer(str(transfer.name), keys, pages, is_store=is_store)
        return lambda: all([part.result() for part in parts])

    # -- the rest ----------------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets all pages. Other engines still find them: the server is shared."""
        if self._store is not None:
            self._store.forget()

    def close(self) -> None:
        """Waits for transfers to end, unregisters and disconnects."""
        if self._store is not None:
            self._store.close()

    def get(self, *_: Any) -> None:
        """Not called with ``interface_v1``."""
        raise NotImplementedError("KvTierStorage copies pages in place: interface_v1")

    batch_get = set = batch_set = get


def _tensors(pool: Any, page_tokens: int) -> list[Any] | None:
    """Returns the parts of a host pool's pages, as the pool gives their addresses; None for a pool without bytes.

    Raises:
        ValueError: its pages are not at even distances.
    """
    count = pool.size // pool.page_size

    def parts(page: int) -> list[tuple[int, int]]:
        addresses, sizes = pool.get_page_buffer_meta(torch.arange(page * pool.page_size, (page + 1) * pool.page_size)) or ((), ())
        return list(zip(addresses, sizes, strict=True))

    try:
        first, second, last = parts(0), parts(1), parts(count - 1)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(f"{error}; KvTierStorage needs --hicache-mem-layout page_first or page_first_direct for this model") from error
    tensors = []
    for (begin, size), (next_begin, _), (end, _) in zip(first, second, last, strict=True):
        stride = next_begin - begin
        if stride < size or end != begin + stride * (count - 1):
            raise ValueError(f"hicache_mem_layout: {pool.layout}; allowed are page_first, page_first_direct and layer_first")
        memory = (ctypes.c_uint8 * (end + size - begin)).from_address(begin)
        tensors.append(view(torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(), 0, count, stride, size, page_tokens))
    return tensors or None
