"""vLLM's own scheduler and block pool, the connector's two sides, and a model that only checks what it attends to.

The KV of a token is a number that all tokens up to it determine. Before a step, the model compares the KV of every token that a
layer attends to, in the blocks that vLLM's tables name. So a hit with wrong bytes, or without a token of a window,
fails at the first step that would have used it. Groups overlay each other in memory, as vLLM's do. A recurrent state is the number
of the last token in it, moved from block to block as vLLM's worker does.
"""

import copy
import functools
import os
import random
from pathlib import Path

import pytest
import torch
from kvrig.waiting import wait_until

pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from kvtier.vllm import KvTierConnector  # noqa: E402

PAGE = 64  # values
MODEL = Path(os.environ.get("KVTIER_E2E_HOME") or os.path.expanduser("~/.cache/kvtier-e2e"), "models-trust", "llama")
LAYERS = 2  # of each group

init_none_hash(sha256)


@functools.cache
def _vllm_config():
    if not MODEL.exists():
        pytest.skip(f"no model at {MODEL}: run tests/setup.sh")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return EngineArgs(model=str(MODEL), max_model_len=1024, dtype="float32", enforce_eager=True).create_engine_config()


def full(block):
    """Full attention with blocks of this many tokens."""
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=PAGE // block // 2, dtype=torch.float32)


def window(block, tokens):
    """A window of this many tokens."""
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=PAGE // block // 2, dtype=torch.float32, sliding_window=tokens
    )


def chunked(block, tokens):
    """Attention within chunks of this many tokens."""
    return ChunkedLocalAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=PAGE // block // 2, dtype=torch.float32, attention_chunk_size=tokens
    )


def state(block):
    """A recurrent state, kept at the ends of blocks of this many tokens."""
    return MambaSpec(block_size=block, shapes=((PAGE,),), dtypes=(torch.float32,), mamba_cache_mode="align")


class Wrong(AssertionError):
    """A layer would attend to other KV than that of its tokens."""


class Simulation:
    """One engine with a simulated model. `close` ends it."""

    def __init__(self, server, name, specs, blocks, caching, step_tokens, seed=0, **options):
        config = copy.deepcopy(_vllm_config())
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.enable_prefix_caching = caching
        config.cache_config.block_size = max(spec.block_size for spec in specs)
        if any(isinstance(spec, MambaSpec) for spec in specs):
            config.cache_config.mamba_cache_mode = "align"
        config.scheduler_config.max_num_batched_tokens = step_tokens
        config.scheduler_config.max_num_scheduled_tokens = step_tokens
        config.scheduler_config.max_num_seqs = 4
        config.scheduler_config.async_scheduling = False
        extra = {
            "kvtier.url": server.url, "kvtier.model_name": name, "kvtier.start": "wait 60", "kvtier.lookup_timeout": 60,
            "kvtier.transfer_mode": "lmcache_driven", "kvtier.follow_resets": False, **options,
        }  # fmt: skip
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvTierConnector", kv_role="kv_both", kv_connector_module_path="kvtier.vllm", kv_connector_extra_config=extra
        )
        sizes = [spec.block_size for spec in specs]
        groups = [KVCacheGroupSpec([f"g{g}.l{layer}" for layer in range(LAYERS)], spec) for g, spec in enumerate(specs)]
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        cache.kv_cache_layout, cache.hash_block_size = "LBHNC", min(sizes)
        self.specs, self.block_tokens = specs, max(sizes)
        self.scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size=max(sizes), hash_block_size=min(sizes), log_stats=True
        )
        self.worker = KvTierConnector(copy.deepcopy(config), KVConnectorRole.WORKER, cache)
        pages = [torch.zeros(blocks * PAGE) for _ in range(LAYERS)]
        slots = [1 if isinstance(spec, MambaSpec) else spec.block_size for spec in specs]
        self.tensors = {
            f"g{g}.l{layer}": page.view(blocks, 1, count, PAGE // count) for layer, page in enumerate(pages) for g, count in enumerate(slots)
        }
        # Request -> place of the block with its running state.
        self.places = {}
        self.worker.register_kv_caches(self.tensors)
        self.source = random.Random(seed)
        self.hasher = get_request_block_hasher(min(sizes), sha256)
        self.values, self.external, self.preempted, self.steps, self.checked = {}, 0, 0, 0, 0
        self.scheduled, self.left = 0, 0

    def add(self, name, tokens, salt=None, answer=4):
        """A request arrives."""
        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0)
        params.update_from_generation_config({}, eos_token_id=1)
        request = Request(name, tokens, params, None, cache_salt=salt, block_hasher=self.hasher)
        self.scheduler.add_request(request)

    def _kv(self, request):
        """The KV of all tokens of a request: one number each, that depends on the tokens before it."""
        known = self.values.setdefault(request.request_id, [])
        tokens = request.all_token_ids
        while len(known) < len(tokens):
            known.append(hash((known[-1] if known else 1, tokens[len(known)])) % (1 << 20))
        return torch.tensor(known, dtype=torch.float32)

    def _pages(self, group, table, first, last):
        """Of each layer, the pages of tokens from `first` to `last`, as (tensor, blocks, places in them)."""
        at = torch.arange(first, last)
        size = self.specs[group].block_size
        blocks, places = torch.tensor(table)[at // size], at % size
        return [(self.tensors[f"g{group}.l{layer}"], blocks, places) for layer in range(LAYERS)]

    @staticmethod
    def _expected(values, group, layer, width):
        """What a page has of these tokens."""
        return values[:, None] * 8 + (group * LAYERS + layer) + torch.zeros(width)

    def _attend(self, request, table, computed, scheduled):
        """Checks what each layer attends to, then computes."""
        values = self._kv(request)
        for group, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec):
                self._advance_state(request, group, table[group], computed, scheduled)
                continue
            if isinstance(spec, ChunkedLocalAttentionSpec):
                first = computed // spec.attention_chunk_size * spec.attention_chunk_size
            else:
                first = max(0, computed - (spec.sliding_window or computed + 1) + 1)
            for layer, (tensor, blocks, places) in enumerate(self._pages(group, table[group], first, computed)):
                wanted = self._expected(values[first:computed], group, layer, tensor.shape[-1])
                found = tensor[blocks, 0, places]
                if not torch.equal(found, wanted):
                    wrong = (found != wanted).any(1).nonzero().flatten() + first
                    raise Wrong(
                        f"step {self.steps}: request {request.request_id} of {request.num_tokens} tokens, at {computed}: group {group} "
                        f"({spec.block_size} tokens per block) attends to wrong KV of tokens {wrong[:8].tolist()}.. "
                        f"{wrong[-1].item()}; table {table[group]}"
                    )
                self.checked += len(places)
            for layer, (tensor, blocks, places) in enumerate(self._pages(group, table[group], computed, computed + scheduled)):
                tensor[blocks, 0, places] = self._expected(values[computed : computed + scheduled], group, layer, tensor.shape[-1])

    def _advance_state(self, request, group, table, computed, scheduled):
        """Checks the state after the `computed` tokens, and moves it behind those that are `scheduled`."""
        values, size, end = self._kv(request), self.specs[group].block_size, computed + scheduled
        place = -(-end // size) - 1
        for layer in range(LAYERS):
            tensor = self.tensors[f"g{group}.l{layer}"]
            if computed:
                block = table[self.places.get(request.request_id, (computed - 1) // size)]
                wanted = self._expected(values[computed - 1 : computed], group, layer, PAGE)[0]
                if not torch.equal(tensor[block, 0, 0], wanted):
                    raise Wrong(
                        f"step {self.steps}: request {request.request_id} of {request.num_tokens} tokens, at {computed}: group {group} "
                        f"has another state in block {block}; table {table}"
                    )
                self.checked += 1
            tensor[table[place], 0, 0] = self._expected(values[end - 1 : end], group, layer, PAGE)[0]

    def step(self):
        """One step: schedule, load, compute, store, report."""
        self.steps += 1
        scheduled = self.scheduler.schedule()
        metadata = scheduled.kv_connector_metadata
        self.scheduled = scheduled.total_num_scheduled_tokens
        self.preempted += len(scheduled.preempted_req_ids or ())
        worker = self.worker
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        self.external += sum(move.end - move.start - move.skip for move in metadata.loads)
        sampled = []
        for name in [*(new.req_id for new in scheduled.scheduled_new_reqs), *scheduled.scheduled_cached_reqs.resumed_req_ids]:
            self.places.pop(name, None)
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            computed = request.num_computed_tokens - count
            self._attend(request, self.scheduler.kv_cache_manager.get_block_ids(name), computed, count)
            self.places[name] = -(-request.num_computed_tokens // self.block_tokens) - 1
            is_last = request.num_computed_tokens >= request.num_tokens
            sampled.append([self.source.randrange(2, 4000)] if is_last else [])
        worker.wait_for_save()
        results = worker.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        names = list(scheduled.num_scheduled_tokens)
        self.scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled, kv_connector_output=output
            ),
        )

    def run(self):
        """Steps until nothing is left to do."""
        idle = 0
        while self.scheduler.has_requests():
            self.step()
            idle = 0 if self.is_busy else idle + 1
            if idle == 200:
                self._leave()
                idle = 0

    def finish_stores(self):
        """Steps until no store is in flight."""
        state = self.scheduler.connector._scheduling
        wait_until(lambda: self.step() or not state.in_flight_stores, 60, "the stores")

    @property
    def is_busy(self):
        """Whether the last step computed something, or something is in flight that the next one may continue with."""
        state = self.scheduler.connector._scheduling
        waits = any(state.adapter.has_lookup(name) and state.adapter.check_lookup_result(name) is None for name in self.scheduler.requests)
        return bool(self.scheduled or self.worker._loads or state.holds or waits)

    def _leave(self):
        """The last request leaves. In few blocks vLLM stalls when loaded requests have those that the first in its queue needs."""
        self.left += 1
        self.scheduler.finish_requests(list(self.scheduler.requests)[-1], RequestStatus.FINISHED_ABORTED)

    @property
    def errors(self):
        """Exceptions that ended in a fallback."""
        return self.scheduler.connector._scheduling.errors.count + self.scheduler.connector.errors.count + self.worker.errors.count

    def free_blocks(self):
        """Blocks that nothing uses."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self):
        """Ends the engine."""
        self.worker.shutdown()
        self.scheduler.connector.shutdown()
