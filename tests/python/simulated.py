"""vLLM's own scheduler and block pool, the connector's two sides, and a model that only checks what it attends to.

The KV of a token is a number that all tokens up to it determine. Before a step, the model compares the KV of every token that a
layer attends to, in the blocks that vLLM's tables name. So a hit with wrong bytes, or without a token of a window,
fails at the first step that would have used it. Groups overlay each other in memory, as vLLM's do. A recurrent state is the number
of the last token in it, moved from block to block as vLLM's worker does (`mamba_utils`). A token that is sampled depends on its request
and place only, so drafts can be right. With asynchronous scheduling a step is computed when the next one is scheduled already.
"""

import copy
import functools
import os
import random
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from conftest import CHUNK
from kvrig.waiting import wait_until

pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.config import KVEventsConfig, KVTransferConfig  # noqa: E402
from vllm.distributed.kv_events import KVEventBatch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_cache_hit_alignment_tokens  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

PAGE = 64  # values
MODEL = Path(os.environ.get("KVTIER_E2E_HOME") or os.path.expanduser("~/.cache/kvtier-e2e"), "models-trust", "llama")
LAYERS = 2  # of each group

init_none_hash(sha256)


@functools.cache
def _vllm_config(drafts):
    if not MODEL.exists():
        pytest.skip(f"no model at {MODEL}: run tests/setup.sh")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 4} if drafts else None
    return EngineArgs(
        model=str(MODEL), max_model_len=1024, dtype="float32", enforce_eager=True, speculative_config=speculative
    ).create_engine_config()


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


def latents(block, per_state=1):
    """Full attention to latents, one for this many tokens."""
    size = PAGE // (block // per_state)
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=size, dtype=torch.float32, tokens_per_state=per_state)


def latent_window(block, tokens):
    """A window of this many latents."""
    return SlidingWindowMLASpec(block_size=block, num_kv_heads=1, head_size=PAGE // block, dtype=torch.float32, sliding_window=tokens)


def ring(tokens):
    """A request's scratch memory of its last tokens, from which latents of several are made."""
    return CircularBufferSpec(block_size=tokens, num_kv_heads=1, head_size=PAGE // tokens, head_size_v=0, dtype=torch.float32)


def _next_kv(known, token):
    """The KV of a token behind those that are known."""
    return hash((known[-1] if known else 1, token)) % (1 << 20)


class Wrong(AssertionError):
    """A layer would attend to other KV than that of its tokens."""


class Published:
    """A publisher that keeps its encoded batches."""

    def __init__(self):
        self.batches = []

    def publish(self, batch):
        """Takes one step's events."""
        payload = msgspec.msgpack.encode(batch)
        assert msgspec.msgpack.encode(msgspec.msgpack.decode(payload, type=KVEventBatch)) == payload, "vLLM's own decoder reads another one"
        self.batches.append(payload)

    def shutdown(self):
        """Nothing to end."""


class Simulation:
    """One engine with a simulated model. `close` ends it."""

    def __init__(
        self, server, name, specs, blocks, caching, step_tokens, seed=0, hash_parts=1, checkpoints=False, is_async=False, drafts=0, policy="fcfs",
        draft_group=None, beside=None, events=False, connector=("KvTierConnector", "kvtier.vllm"), **options,
    ):
        """`hash_parts`: vLLM's prefix cache finds such parts of blocks too; `checkpoints`: a step has states of such parts;
        `drafts`: tokens that are speculated in each step; `draft_group`: the group of the model that drafts them, as EAGLE's, whose KV
        depends on the next token too; `beside`: another connector's configuration and whether it comes first, in vLLM's MultiConnector;
        `events`: vLLM's KV events are published, to `published`; `connector`: the names of kvtier's class and of its module."""
        config = copy.deepcopy(_vllm_config(drafts))
        if draft_group is not None:
            for option in ("use_eagle", "use_eagle_block_drop"):
                object.__setattr__(config.speculative_config, option, lambda: True)
        cached = [spec.block_size for spec in specs if spec.prefix_cacheable]
        hash_block = min(cached) // hash_parts
        kept = {"num_speculative_blocks": drafts}
        if checkpoints:
            kept |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": hash_block}
        specs = [replace(spec, **kept) if isinstance(spec, MambaSpec) else spec for spec in specs]
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.enable_prefix_caching = caching
        config.cache_config.block_size = max(cached)
        if any(isinstance(spec, MambaSpec) for spec in specs):
            config.cache_config.mamba_cache_mode = "align"
        config.scheduler_config.max_num_batched_tokens = step_tokens
        config.scheduler_config.max_num_scheduled_tokens = step_tokens
        config.scheduler_config.max_num_seqs = 4
        config.scheduler_config.async_scheduling, config.scheduler_config.policy = is_async, policy
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=events, publisher="null") if events else None
        extra = {
            "kvtier.url": server.url, "kvtier.model_name": name, "kvtier.start": "wait 60", "kvtier.lookup_timeout": 60,
            "kvtier.transfer_mode": "lmcache_driven", "kvtier.follow_resets": False, **options,
        }  # fmt: skip
        ours = {
            "kv_connector": connector[0], "kv_role": "kv_both", "kv_connector_module_path": connector[1], "kv_connector_extra_config": extra
        }  # fmt: skip
        at, connectors = 0, [ours]
        if beside is not None:
            other, is_first = beside
            at, connectors = int(is_first), [other, ours] if is_first else [ours, other]
            ours = {
                "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": connectors},
            }  # fmt: skip
        config.kv_transfer_config = KVTransferConfig(**ours)
        groups = [KVCacheGroupSpec([f"g{g}.l{layer}" for layer in range(LAYERS)], spec) for g, spec in enumerate(specs)]
        if draft_group is not None:
            groups[draft_group].is_eagle_group = True
        self.draft_group = draft_group
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        cache.kv_cache_layout, cache.hash_block_size = "LBHNC", hash_block
        self.specs, self.block_tokens, self.hash_block, self.drafts = specs, max(cached), hash_block, drafts
        self.cache = cache
        self.alignment = resolve_cache_hit_alignment_tokens(cache, config, max(cached), hash_block)
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            config, cache, StructuredOutputManager(config), block_size=max(cached), hash_block_size=hash_block, log_stats=True
        )
        if events:
            self.published = self.scheduler.kv_event_publisher = Published()
        self.worker = KVConnectorFactory.create_connector(copy.deepcopy(config), KVConnectorRole.WORKER, cache)
        # kvtier's own connectors, and its part of a step's metadata.
        self.ours, self.our_worker = self.scheduler.connector, self.worker
        self.our_part = lambda metadata: metadata
        if beside is not None:
            self.ours, self.our_worker = self.ours.sub_connectors[at], self.worker.sub_connectors[at]
            self.our_part = lambda metadata: metadata.metadata[at]
        pages = [torch.zeros(blocks * PAGE) for _ in range(LAYERS)]
        slots = [1 if isinstance(spec, MambaSpec) else spec.num_states for spec in specs]
        self.tensors = {
            f"g{g}.l{layer}": page.view(blocks, 1, count, PAGE // count) for layer, page in enumerate(pages) for g, count in enumerate(slots)
        }
        # Steps that are not computed yet, and how many may be.
        self.ahead, self.is_ahead = deque(), int(is_async)
        # Request -> its prompt; its blocks, as the worker knows them; the place of the block with its running state, and how many
        # tokens of the last step were right.
        self.prompts, self.ends, self.tables, self.places = {}, {}, {}, {}
        self.worker.register_kv_caches(self.tensors)
        self.source = random.Random(seed)
        self.hasher = get_request_block_hasher(hash_block, sha256)
        self.values, self.external, self.preempted, self.steps, self.checked = {}, 0, 0, 0, 0
        self.scheduled, self.left = 0, 0
        # Ended request -> the parameters in its answer.
        self.handed_over = {}
        # What a schedule is about: steps scheduled ahead, copied states, states of checkpoints, tokens sampled behind right drafts,
        # preemptions in favour of later requests.
        self.seen = Counter()

    def add(self, name, tokens, salt=None, answer=4, priority=0, more=(), **sampling):
        """A request arrives."""
        self.prompts[name], self.ends[name] = tokens, len(tokens) + answer
        self.scheduler.add_request(self.request(name, tokens, salt, answer, priority, more, **sampling))

    def request(self, name, tokens, salt=None, answer=1, priority=0, more=(), **sampling):
        """vLLM's request. `more`: its other arguments."""
        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0, **sampling)
        params.update_from_generation_config({}, eos_token_id=1)
        return Request(name, tokens, params, None, cache_salt=salt, priority=priority, block_hasher=self.hasher, **dict(more))

    def matched(self, name, tokens, salt=None):
        """The tokens that the connector finds for a request, which then ends."""
        connector, request, answer = self.scheduler.connector, self.request(name, tokens, salt), []

        def known():
            answer[:] = connector.get_num_new_matched_tokens(request, 0)
            return answer[0] is not None

        wait_until(known, 60, "a lookup")
        connector.request_finished_all_groups(request, tuple([] for _ in self.specs))
        return answer[0]

    def _token(self, name, at):
        """The token at this place of a request."""
        prompt = self.prompts[name]
        return prompt[at] if at < len(prompt) else random.Random(f"{name}-{at}").randrange(2, 4000)

    def tokens_of(self, name):
        """A request's prompt and answer."""
        return [self._token(name, at) for at in range(self.ends[name])]

    def _kv(self, name, count, drafts):
        """The KV of a request's first `count` tokens, behind which are `drafts`: one number each, that depends on the tokens before it."""
        known = self.values.setdefault(name, [])
        while len(known) < count:
            known.append(_next_kv(known, self._token(name, len(known))))
        speculated = known[:count]
        for token in drafts:
            speculated.append(_next_kv(speculated, token))
        return torch.tensor(speculated, dtype=torch.float32)

    def _pages(self, group, table, at):
        """Of each layer, the pages of the tokens `at`, as (tensor, blocks, places in them)."""
        spec = self.specs[group]
        blocks, places = torch.tensor(table)[at // spec.block_size], at % spec.block_size // spec.tokens_per_state
        return [(self.tensors[f"g{group}.l{layer}"], blocks, places) for layer in range(LAYERS)]

    @staticmethod
    def _expected(values, group, layer, width):
        """What a page has of these tokens."""
        return values[:, None] * 8 + (group * LAYERS + layer) + torch.zeros(width)

    def _attend(self, name, computed, scheduled, drafts):
        """Checks what each layer attends to, then computes."""
        target, table = self._kv(name, computed + scheduled - len(drafts), drafts), self.tables[name]
        for group, spec in enumerate(self.specs):
            values = self._kv(name, computed + scheduled + 1, [])[1:] if group == self.draft_group else target
            if isinstance(spec, MambaSpec):
                self._advance_state(name, group, values, computed, scheduled, len(drafts))
                continue
            if isinstance(spec, CircularBufferSpec):
                self._turn_ring(name, group, values, computed, scheduled)
                continue
            if isinstance(spec, ChunkedLocalAttentionSpec):
                first = computed // spec.attention_chunk_size * spec.attention_chunk_size
            else:
                first = max(0, computed - (spec.sliding_window or computed + 1) + 1)
            # A latent of several tokens is that of the last of them.
            whole = spec.tokens_per_state
            known, new = torch.arange(first, computed // whole * whole, whole), torch.arange(computed // whole * whole, computed + scheduled, whole)
            new = new[new + whole <= computed + scheduled]
            for layer, (tensor, blocks, places) in enumerate(self._pages(group, table[group], known)):
                wanted = self._expected(values[known + whole - 1], group, layer, tensor.shape[-1])
                found = tensor[blocks, 0, places]
                if not torch.equal(found, wanted):
                    wrong = known[(found != wanted).any(1)]
                    if group == self.draft_group and not ((wrong + 1) % CHUNK).any():
                        self.seen["stale"] += len(wrong)
                        continue
                    raise Wrong(
                        f"step {self.steps}: request {name} at {computed}: group {group} ({spec.block_size} tokens per block) attends to "
                        f"wrong KV of tokens {wrong[:8].tolist()}.. {wrong[-1].item()}; table {table[group]}"
                    )
                self.checked += len(places)
            for layer, (tensor, blocks, places) in enumerate(self._pages(group, table[group], new)):
                tensor[blocks, 0, places] = self._expected(values[new + whole - 1], group, layer, tensor.shape[-1])

    def _turn_ring(self, name, group, values, computed, scheduled):
        """Checks the tokens that no latent has yet, and puts the `scheduled` ones behind them."""
        [block], size = self.tables[name][group], self.specs[group].block_size
        unfinished = max(spec.tokens_per_state for spec in self.specs if isinstance(spec, MLAAttentionSpec))
        old, new = torch.arange(computed // unfinished * unfinished, computed), torch.arange(computed, computed + scheduled)[-size:]
        for layer in range(LAYERS):
            tensor = self.tensors[f"g{group}.l{layer}"]
            found, wanted = tensor[block, 0, old % size], self._expected(values[old], group, layer, tensor.shape[-1])
            if not torch.equal(found, wanted):
                raise Wrong(f"step {self.steps}: request {name} at {computed}: its ring lacks tokens behind {computed // unfinished * unfinished}")
            tensor[block, 0, new % size] = self._expected(values[new], group, layer, tensor.shape[-1])
            self.checked += len(old)

    def _advance_state(self, name, group, values, computed, scheduled, drafts):
        """Checks the state after the `computed` tokens, and moves it behind those that are `scheduled`: behind each draft in a block of its
        own."""
        spec, table, end = self.specs[group], self.tables[name][group], computed + scheduled
        size = spec.block_size
        place, right = self.places.get(name, ((computed - 1) // size, 1))
        [offset], [checkpoint] = compute_mamba_prefill_checkpoints(
            [end], [scheduled], self.hash_block, size, spec.prefill_checkpoint_alignment if spec.num_prefill_checkpoint_blocks else None,
            False, self.alignment,
        )  # fmt: skip
        for layer in range(LAYERS):
            tensor = self.tensors[f"g{group}.l{layer}"]
            if computed:
                block = table[place + right - 1]
                wanted = self._expected(values[computed - 1 : computed], group, layer, PAGE)[0]
                if not torch.equal(tensor[block, 0, 0], wanted):
                    raise Wrong(
                        f"step {self.steps}: request {name} at {computed}: group {group} has another state in block {block}; table {table}"
                    )
                self.checked += 1
            if offset:
                self.seen["checkpoints"] += 1
                at = computed + offset
                tensor[table[checkpoint], 0, 0] = self._expected(values[at - 1 : at], group, layer, PAGE)[0]
            for draft in range(drafts + 1):
                at = end - drafts + draft
                tensor[table[-(-end // size) - 1 + draft], 0, 0] = self._expected(values[at - 1 : at], group, layer, PAGE)[0]

    def _settle_states(self, name, end, drafts, right):
        """Moves the state that `right` of the tokens behind `end` have brought to the end of a block there."""
        place = -(-(end + drafts) // self.block_tokens) - 1
        reached = (end + right - 1) // self.block_tokens * self.block_tokens
        if reached >= end:
            whole = reached // self.block_tokens - 1
            for group, spec in enumerate(self.specs):
                if isinstance(spec, MambaSpec):
                    table = self.tables[name][group]
                    for layer in range(LAYERS):
                        tensor = self.tensors[f"g{group}.l{layer}"]
                        tensor[table[whole]] = tensor[table[place + reached - end]]
                        self.seen["moves"] += reached > end
            if place == whole:
                right = 1
        self.places[name] = place, right

    def _sample(self, name, end, drafts):
        """The tokens behind a request's first `end`: the drafts that are right, and one more."""
        sampled = []
        for draft in [*drafts, None]:
            sampled.append(self._token(name, end + len(sampled)))
            if draft != sampled[-1]:
                return sampled

    def _speculate(self, name):
        """Drafts; most are right."""
        at = self.scheduler.requests[name].num_tokens
        return [self._token(name, at + number) if self.source.random() < 0.7 else 1 for number in range(self.drafts)]

    def step(self):
        """One step: schedule, load, compute, store, report."""
        self.steps += 1
        scheduled = self.scheduler.schedule()
        self.scheduled = scheduled.total_num_scheduled_tokens
        self.preempted += len(scheduled.preempted_req_ids or ())
        for name in scheduled.preempted_req_ids or ():
            requests, lost = self.scheduler.requests, self.scheduler.requests[name]
            running = [requests[other] for other in scheduled.num_scheduled_tokens]
            self.seen["overtaken"] += any(one.priority < lost.priority and one.arrival_time > lost.arrival_time for one in running)
        # Those that have no more of their prompt to compute.
        samples = {name for name in scheduled.num_scheduled_tokens if not self.scheduler.requests[name].is_prefill_chunk}
        self.ahead.append((scheduled, samples))
        self.seen["ahead"] += len(self.ahead) > 1
        while self.ahead and (len(self.ahead) > self.is_ahead or not self.scheduled):
            self._compute(*self.ahead.popleft())

    def _update_tables(self, scheduled):
        """Applies new blocks as vLLM's worker does, which appends. Returns the tokens computed before of each request."""
        computed, cached = {}, scheduled.scheduled_cached_reqs
        for name in [*scheduled.finished_req_ids, *cached.resumed_req_ids, *(new.req_id for new in scheduled.scheduled_new_reqs)]:
            self.places.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            computed[new.req_id], self.tables[new.req_id] = new.num_computed_tokens, [list(ids) for ids in new.block_ids]
        for name, count, more in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            computed[name] = count
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(ids) for ids in more]
            elif more is not None:
                for ids, new in zip(self.tables[name], more, strict=True):
                    ids.extend(new)
        return computed

    def _compute(self, scheduled, samples):
        """A step on the worker, and its report."""
        metadata, worker = scheduled.kv_connector_metadata, self.worker
        worker.handle_preemptions(metadata)
        computed = self._update_tables(scheduled)
        for source, target in scheduled.kv_cache_block_copies or ():
            self.seen["copies"] += 1
            for layer in range(LAYERS):
                self.tensors[f"g0.l{layer}"][target] = self.tensors[f"g0.l{layer}"][source]
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        self.external += sum(move.end - move.start - move.skip for move in self.our_part(metadata).loads)
        sampled, names = [], list(scheduled.num_scheduled_tokens)
        for name in names:
            count, drafts = scheduled.num_scheduled_tokens[name], scheduled.scheduled_spec_decode_tokens.get(name, [])
            self._attend(name, computed[name], count, drafts)
            end = computed[name] + count - len(drafts)
            sampled.append(self._sample(name, end, drafts) if name in samples else [])
            self._settle_states(name, end, len(drafts), max(1, len(sampled[-1])))
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
        answers = self.scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled, kv_connector_output=output
            ),
        )
        ended = (answer for each in answers.values() for answer in each.outputs if answer.finish_reason is not None)
        self.handed_over |= {answer.request_id: answer.kv_transfer_params for answer in ended}
        running = [name for name in names if name in self.scheduler.requests]
        for name in running:
            tokens = self.scheduler.requests[name].all_token_ids
            assert tokens[-1] == self._token(name, len(tokens) - 1)
        if self.drafts:
            self.scheduler.update_draft_token_ids(DraftTokenIds(running, [self._speculate(name) for name in running]))

    def run(self):
        """Steps until nothing is left to do."""
        idle = 0
        while self.scheduler.has_requests() or self.ahead:
            self.step()
            idle = 0 if self.is_busy else idle + 1
            if idle == 200:
                self._leave()
                idle = 0

    def finish_stores(self):
        """Steps until no store is in flight."""
        state = self.ours._scheduling
        wait_until(lambda: self.step() or not state.in_flight_stores, 60, "the stores")

    @property
    def is_busy(self):
        """Whether the last step computed something, or something is in flight that the next one may continue with."""
        state = self.ours._scheduling
        waits = any(state.adapter.has_lookup(name) and state.adapter.check_lookup_result(name) is None for name in self.scheduler.requests)
        waits = waits or any(each.wait is not None and not each.wait.has_ended for each in state.tracked.values())
        return bool(self.scheduled or self.ahead or self.our_worker._loads or state.holds or state.in_flight_stores or waits)

    def _leave(self):
        """The last request with blocks leaves. In few blocks vLLM stalls when loaded requests have those that the first in its queue needs."""
        self.left += 1
        blocks = self.scheduler.kv_cache_manager.get_block_ids
        having = [name for name in self.scheduler.requests if any(blocks(name))]
        self.scheduler.finish_requests(having[-1], RequestStatus.FINISHED_ABORTED)

    @property
    def errors(self):
        """Exceptions that ended in a fallback."""
        return self.ours._scheduling.errors.count + self.ours.errors.count + self.our_worker.errors.count

    def free_blocks(self):
        """Blocks that nothing uses."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self):
        """Ends the engine."""
        self.worker.shutdown()
        self.scheduler.connector.shutdown()
