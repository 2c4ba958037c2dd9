"""An engine without a model: SGLang's radix tree, pools and allocators on CPU tensors, filled with random bytes."""

import json
from array import array
from types import SimpleNamespace

import fakes
import torch
from kvrig.waiting import wait_until
from sglang.srt import runtime_context
from sglang.srt.arg_groups import overrides
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import common, mha, mla
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

PAGE, SLOTS = 4, 256
# Tokens that layers with a window see.
WINDOW = 2 * PAGE

_SHAPE = {"size": SLOTS, "page_size": PAGE, "layer_num": 3, "device": "cpu", "enable_memory_saver": False}


def arguments(path, **options):
    """Arguments of SGLang."""
    return SimpleNamespace(model_path=str(path), tp_size=1, **options)


def _pools(kind, dtype):
    """The pool of the device, that of requests, and the components of the tree."""
    requests = {"size": 8, "max_context_len": SLOTS, "device": "cpu", "enable_memory_saver": False}
    heads = {"dtype": dtype, "head_num": 2, "head_dim": 8, "enable_alt_stream": False}
    if kind == "mla":
        return MLATokenToKVPool(dtype=dtype, kv_lora_rank=16, qk_rope_head_dim=8, **_SHAPE), ReqToTokenPool(**requests), ()
    if kind == "swa":
        layers = {"swa_attention_layer_ids": [1], "full_attention_layer_ids": [0, 2]}
        shape = {name: value for name, value in _SHAPE.items() if name != "layer_num"}
        return SWAKVPool(size_swa=SLOTS, **layers, **heads, **shape), ReqToTokenPool(**requests), (ComponentType.SWA,)
    if kind == "mamba":
        overrides.mamba_cache_chunk_size = lambda _: PAGE
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=8, conv_kernel=4
        )
        states = {"cache_params": Mamba2CacheParams(shape=shape, layers=[0, 2]), "mamba_layer_ids": [0, 2], "mamba_size": 16}
        hybrid = HybridReqToTokenPool(**requests, **states, mamba_spec_state_size=8, enable_mamba_extra_buffer=True)
        linear = HybridLinearKVPool(
            size=SLOTS, dtype=dtype, page_size=PAGE, head_num=2, head_dim=8, full_attention_layer_ids=[1], device="cpu",
            mamba_pool=hybrid.mamba_pool,
        )  # fmt: skip
        return linear, hybrid, (ComponentType.MAMBA,)
    return MHATokenToKVPool(**heads, **_SHAPE), ReqToTokenPool(**requests), ()


class Engine:
    """One rank: its pools, its tree."""

    def __init__(self, args, kind="mha", dtype=torch.bfloat16):
        runtime_context._CONTEXT._server_args = args
        self.kind = kind
        self.pool, self.requests, more = _pools(kind, dtype)
        sizes = {"size": SLOTS, "page_size": PAGE, "dtype": dtype, "device": "cpu", "kvcache": self.pool, "need_sort": False}
        if kind == "swa":
            self.allocator = SWATokenToKVPoolAllocator(size_swa=SLOTS, **sizes)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(**sizes)
        self.params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL, *more),
            sliding_window_size=WINDOW if kind == "swa" else None,
            enable_mamba_extra_buffer=kind == "mamba",
        )
        self.tree = UnifiedRadixCache(self.params)
        self._requests = 0
        # Other weights compute other KV.
        self.weights = 0

    def buffers(self):
        """The buffers of all layers with full attention."""
        pool = getattr(self.pool, "full_kv_pool", self.pool)
        return pool.kv_buffer if isinstance(pool, MLATokenToKVPool) else [*pool.k_buffer, *pool.v_buffer]

    def read(self, slots):
        """The bytes of slots, with those of a window before their end in other layers."""
        found = [buffer[slots].view(torch.uint8).clone() for buffer in self.buffers()]
        if self.kind == "swa":
            window = self.allocator.full_to_swa_index_mapping[slots[-WINDOW:]]
            found += [buffer[window].view(torch.uint8).clone() for buffer in self._windowed()]
        return found

    def states(self, slot):
        """The bytes of a recurrent state."""
        cache = self.requests.mamba_pool.mamba_cache
        return [state[:, slot].contiguous().view(torch.uint8).clone() for state in (cache.temporal, *cache.conv)]

    def _windowed(self):
        return [*self.pool.swa_kv_pool.k_buffer, *self.pool.swa_kv_pool.v_buffer] if self.kind == "swa" else []

    def compute(self, tokens, salt=None, adapter=None):
        """Inserts a prompt, as at the end of a request; returns its KV and state, which are the same each time."""
        source, state = torch.Generator().manual_seed(hash((tuple(tokens), salt, adapter, self.weights))), None

        def fill(buffer, rows):
            buffer[rows] = torch.randint(0, 100, buffer[rows].shape, generator=source).to(buffer.dtype)

        full = self.allocator.full_attn_allocator if self.kind == "swa" else self.allocator
        slots = full.alloc(len(tokens))
        for buffer in self.buffers():
            fill(buffer, slots)
        if self.kind == "swa":
            windowed = self.allocator.swa_attn_allocator.alloc(len(tokens))
            self.allocator.set_full_to_swa_mapping(slots, windowed)
            for buffer in self._windowed():
                fill(buffer, windowed)
        computed = self.read(slots)
        if self.kind == "mamba":
            state = self.requests.mamba_allocator.alloc(1)
            cache = self.requests.mamba_pool.mamba_cache
            for each in (cache.temporal, *cache.conv):
                fill(each.transpose(0, 1), state)
            computed += self.states(state[0])
        key = RadixKey(array("q", tokens), extra_key=adapter, cache_salt=salt)
        self.tree.insert(InsertParams(key=key, value=slots, mamba_value=state))
        return computed

    def reset(self):
        """Empties the tree as evictions do; the pools are overwritten."""
        self.tree._reset_full()
        self.allocator.clear()
        states = []
        if self.kind == "mamba":
            self.requests.mamba_allocator.clear()
            states = [self.requests.mamba_pool.mamba_cache.temporal, *self.requests.mamba_pool.mamba_cache.conv]
        for buffer in (*self.buffers(), *self._windowed(), *states):
            buffer.zero_()

    def match(self, tokens, salt=None, adapter=None):
        """Matches a prompt that has one more page; returns the request and the tokens that can be loaded."""
        self._requests += 1
        names = ("last_node", "swa_branching_seqlen", "session", "priority")
        request = SimpleNamespace(rid=f"r{self._requests}", extra_key=adapter, cache_salt=salt, **dict.fromkeys(names))
        request.kv = SimpleNamespace(
            holds_mamba=False, mamba_pool_idx=None, get_evicted_seqlen=lambda _: 0, set_evicted_seqlen=lambda *_: None
        )
        key = RadixKey(array("q", [*tokens, *range(PAGE)]), extra_key=adapter, cache_salt=salt)
        request.result = self.tree.match_prefix(MatchPrefixParams(key=key, req=request))
        request.last_node = request.result.last_device_node
        return request, request.result.host_hit_length


class Linked(Engine):
    """A rank whose tree is linked to the server."""

    def __init__(self, args, kind="mha", dtype=torch.bfloat16, **extra):
        super().__init__(args, kind, dtype)
        config = {"linker": "KvTierLinker", "linker_module_path": "kvtier.sglang", "linker_extra_config": extra}
        self.linker = create_unified_cache_linker(
            args, self.params, backend="dynamic", config=config, components=set(self.tree.components)
        )
        self.tree.init_cache_linker(self.linker)

    def settle(self):
        """Waits until all offloads have ended; returns how many succeeded, and how many failed."""
        ended, commit = [], self.tree.linker.commit_completed_offloads
        self.tree.linker.commit_completed_offloads = lambda results: ended.extend(results) or commit(results)

        def are_ended():
            self.tree.check_hicache_events()
            return not self.tree.linker.pending_offloads

        wait_until(are_ended, 30, "the offloads")
        del self.tree.linker.commit_completed_offloads
        return sum(ended), len(ended) - sum(ended)

    def load(self, request):
        """Loads what a match has found, as around a forward; returns the slots, and the requests whose load failed."""
        count, _ = self.tree.linker.load_back(request)
        slots = self.tree.linker.private_load_indices[request.rid]
        assert len(slots) == count
        self.linker.layer_done_counter.set_consumer(self.tree.ready_to_load_host_cache())
        for layer in range(3):
            self.linker.layer_done_counter.wait_until(layer)
        return slots, self.tree.linker.finish_loads()

    def close(self):
        """Ends the linker."""
        self.tree.linker.close()


class HiCache(Engine):
    """A rank with host pools and the storage backend behind them. The kernels that move pages between device and host are faked."""

    def __init__(self, args, layout, kind="mha", **extra):
        super().__init__(args, kind)
        common._cuda_host_register = lambda *_: None
        mha._cuda_host_unregister = mla._cuda_host_unregister = lambda *_: None
        ranks = ("tp", "pp", "attn_tp", "attn_cp", "attn_dcp")
        sizes = {f"{name}_size": 1 for name in ranks} | {f"{name}_rank": 0 for name in ranks}
        runtime_context.get_parallel().override_permanently(**sizes, attn_dp_rank=0, dcp_enabled=False)
        names = {"backend_name": "kvtier", "module_path": "kvtier.sglang", "class_name": "KvTierStorage"}
        extra |= {**names, "interface_v1": 1, "prefetch_threshold": PAGE}
        fakes.MEMORY |= {
            "hicache_ratio": 2.0,
            "hicache_size": 0,
            "hicache_mem_layout": layout,
            "hicache_io_backend": "kernel" if layout == "page_first" else "direct",
            "hicache_write_policy": "write_through",
            "hicache_host_memory_mode": "cache",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(extra),
        }
        self.tree.init_hicache(SimpleNamespace(file_storage_path=None, **vars(args)), self.params)
        self.storage = self.tree.cache_controller.storage_backend
        self._taken, store = [], self.storage.batch_set_v1
        self.storage.batch_set_v1 = lambda *args: self._taken.extend(taken := store(*args)) or taken
        self.host = self.tree.cache_controller.storage_host_pool
        self.host.backup_from_device_all_layer = self._to_host
        self.host.load_to_device_per_layer = self._to_device

    def _layers(self):
        """The buffers of the device, each with its mirror in the host pool."""
        if isinstance(self.pool, MLATokenToKVPool):
            mirrors = self.host.kv_buffer if self.host.layout == "layer_first" else self.host.kv_buffer.transpose(0, 1)
        else:
            mirrors = self.host.host_kv_data_refs
        return zip(self.buffers(), mirrors, strict=True)

    def _place(self, indices):
        """Where slots of the host pool are in a layer's mirror."""
        return (indices // PAGE, indices % PAGE) if self.host.layout == "page_first_direct" else (indices,)

    def _to_host(self, _, host, device, backend):
        for buffer, mirror in self._layers():
            mirror[self._place(host)] = buffer[device]

    def _to_device(self, _, host, device, layer, backend, *, is_draft=False):
        if layer == 0:
            for buffer, mirror in self._layers():
                buffer[device] = mirror[self._place(host)]

    def settle(self):
        """Waits until no page is being stored; returns which pages the storage took since the last call."""

        def are_stored():
            self.tree.check_hicache_events()
            return not self.tree.ongoing_write_through and not self.tree.ongoing_backup

        wait_until(are_stored, 30, "the storage")
        taken, self._taken = self._taken, []
        return taken

    def prefetch(self, tokens, salt=None, adapter=None):
        """Loads a prompt's pages from the storage into the host pool, as for a waiting request; returns how it then matches."""
        request, _ = self.match(tokens, salt, adapter)
        handle = CacheRequestHandle(request.rid, 0)
        self.tree.prefetch_from_storage(handle, request.result.last_host_node, array("q", [*tokens, *range(PAGE)]), extra_key=adapter, cache_salt=salt)

        def is_prefetched():
            self.tree.check_hicache_events()
            return self.tree.check_prefetch_progress(handle)

        wait_until(is_prefetched, 30, "the prefetch")
        return self.match(tokens, salt, adapter)

    def load(self, request):
        """Loads a match from the host pool to the device; returns the slots."""
        node, count = request.result.best_match_node, request.result.host_hit_length
        self.tree.init_load_back(InitLoadBackParams(node, count, req=request))
        self.tree.ready_to_load_host_cache()
        self.tree.check_hicache_events()
        return self.tree.tree_core.collect_full_device_indices(node, request.last_node)

    def close(self):
        """Ends the storage."""
        self.tree.cache_controller.detach_storage_backend()
