"""vLLM's connector in both roles, with a simulated vLLM scheduler, for cases that a tiny model on CPU cannot show.

The scheduler's part follows vLLM 0.32: matched tokens, allocation, step, answers, end.
"""

from types import SimpleNamespace

import pytest
import torch
from kvrig import layouts
from kvrig.waiting import wait_until
from rig import BLOCK, tokens

pytest.importorskip("vllm")

from kvtier.vllm import KvTierConnector  # noqa: E402
from vllm import ModelRegistry  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402


class FullAttentionSpec(SimpleNamespace):
    """Recognized by its name, like vLLM's."""


class MLAAttentionSpec(SimpleNamespace):
    """One latent vector per token, the same in every tensor-parallel rank."""


class SlidingWindowSpec(SimpleNamespace):
    """A kind of cache whose blocks are reused while their request runs."""


class UniformTypeKVCacheSpecs(SimpleNamespace):
    """Layers of one group with different caches."""


class MambaSpec(SimpleNamespace):
    """A recurrent state, kept at the ends of blocks only in the mode `align`."""

    mamba_cache_mode = "none"
    tokens_per_state = -1


class CrossAttentionSpec(SimpleNamespace):
    """A kind of cache that cannot be served."""


def model_config(heads, architecture="LlamaForCausalLM", mla=False, **more):
    """A model whose layers have this number of KV heads."""
    return SimpleNamespace(**{
        "model": "test/vllm", "use_mla": mla, "architecture": architecture, "registry": ModelRegistry,
        "hf_config": SimpleNamespace(), "hf_text_config": SimpleNamespace(num_key_value_heads=heads),
        "get_total_num_kv_heads": lambda: heads, **more,
    })  # fmt: skip


def vllm_config(server, tensor=1, stages=1, rank=0, mla=False, heads=None, events=False, role="kv_both", **extra):
    """Returns the used parts of vLLM's configuration. `heads`: KV heads of a model whose layers are known to have as many."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={
                "kvtier.url": server.url, "kvtier.heartbeat": 10, "kvtier.timeout": 60, "kvtier.store_timeout": 60,
                "kvtier.lookup_timeout": 60, "kvtier.start": "wait 60", **extra,
            },  # fmt: skip
            kv_load_failure_policy="fail",
            is_kv_producer=role != "kv_consumer",
            is_kv_consumer=role != "kv_producer",
        ),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=stages, rank=rank),
        model_config=model_config(heads) if heads else SimpleNamespace(model="test/vllm", use_mla=mla),
    )


def cache_config(names, spec=FullAttentionSpec):
    """Returns one group of layers, with one head in each rank."""
    group = SimpleNamespace(layer_names=list(names), kv_cache_spec=spec(block_size=BLOCK, num_kv_heads=1))
    return SimpleNamespace(
        kv_cache_groups=[group], kv_cache_layout="LBHNC", hash_block_size=BLOCK, prefix_cacheable_group_ids=(0,)
    )


def request(name, prompt, salt=None, **more):
    """A request of vLLM's scheduler."""
    made = SimpleNamespace(
        request_id=name, all_token_ids=prompt, num_tokens=len(prompt), num_prompt_tokens=len(prompt),
        cache_salt=salt, mm_features=[], lora_request=None, prompt_embeds=None, skip_reading_prefix_cache=False,
        block_hashes=[bytes([i]) * 32 for i in range(len(prompt) // BLOCK)],
    )  # fmt: skip
    vars(made).update(more)
    return made


class Vllm:
    """A scheduler's connector, the workers' connectors, and vLLM's part between them."""

    def __init__(self, server, ranks=1, mla=False, heads=None, seed=1, kernel_blocks=1, **options):
        """`heads`: KV heads, where ranks share them; `kernel_blocks`: blocks of the attention kernels in one of vLLM's."""
        config = cache_config((f"layer.{i}" for i in range(2)), MLAAttentionSpec if mla else FullAttentionSpec)
        self.layout = layouts.layout("mla" if mla else "fused_hnd")
        if mla:
            config.kv_cache_layout = "LBNHC"
        shape = {"tensor": ranks, "mla": mla, "heads": heads, **options}
        ranks_per_piece = ranks if mla else ranks // (heads or ranks)
        self.config = vllm_config(server, **shape)
        self.scheduler = KvTierConnector(self.config, KVConnectorRole.SCHEDULER, config)
        self.workers, self.tensors = [], []
        for rank in range(ranks):
            worker = KvTierConnector(vllm_config(server, rank=rank, **shape), KVConnectorRole.WORKER, config)
            tensors = layouts.allocate(self.layout, 2, torch.Generator().manual_seed(seed + rank // ranks_per_piece))
            blocks, heads, size, content = self.layout.shape if kernel_blocks > 1 else (None,) * 4
            config.num_blocks = blocks
            views = tensors if kernel_blocks == 1 else [
                tensor.view(blocks * kernel_blocks, heads, size // kernel_blocks, content) for tensor in tensors
            ]  # fmt: skip
            worker.register_kv_caches({f"layer.{i}": view for i, view in enumerate(views)})
            self.workers.append(worker)
            self.tensors.append(tensors)
        self.aggregator = KVOutputAggregator(ranks)
        # Of the last request that has ended: the parameters in its answer.
        self.handed_over = None
        self.stats = {}

    def match(self, req, computed=0):
        """Asks until the connector has the result."""
        answer = []

        def known():
            answer[:] = self.scheduler.get_num_new_matched_tokens(req, computed)
            return answer[0] is not None

        wait_until(known, 60, "a lookup")
        return tuple(answer)

    def allocate(self, req, blocks, external):
        """Allocates blocks for a request."""
        self.scheduler.update_state_after_alloc(
            req, SimpleNamespace(get_block_ids=lambda: (list(blocks),)), external
        )

    def step(self, new=(), cached=(), finished=(), preempted=(), resumed=()):
        """Runs one step. new: (request, blocks, computed, scheduled); cached: (request, new blocks, computed, scheduled)."""
        scheduled = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, block_ids=(list(b),), num_computed_tokens=c) for r, b, c, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r, *_ in cached],
                new_block_ids=[(list(b),) if b is not None else None for _, b, _, _ in cached],
                num_computed_tokens=[c for _, _, c, _ in cached],
                resumed_req_ids=set(resumed),
            ),
            num_scheduled_tokens={r.request_id: n for r, _, _, n in (*new, *cached)},
            finished_req_ids=set(finished),
            preempted_req_ids=set(preempted),
        )
        metadata = self.scheduler.build_connector_meta(scheduled)
        sending, receiving, outputs = [], [], []
        for worker in self.workers:
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(set(finished))
            sending.append(results.finished_sending)
            receiving.append(results.finished_recving)
            output = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            outputs.append(SimpleNamespace(kv_connector_output=output))
            stats = worker.get_kv_connector_stats()
            if stats:
                for key, value in stats.data.items():
                    self.stats[key] = self.stats.get(key, 0) + value
            worker.clear_connector_metadata()
        combined = self.aggregator.aggregate(outputs).kv_connector_output
        self.scheduler.update_connector_output(combined)
        return SimpleNamespace(
            metadata=metadata, sent=sending, received=receiving, failed=combined.invalid_block_ids, ended=combined.finished_recving
        )

    def until(self, what, **first):
        """Runs steps until `what(step)`; returns the ids of all steps together."""
        sent, received, failed = [set() for _ in self.workers], [set() for _ in self.workers], set()

        def enough():
            step = self.step(**first)
            first.clear()
            for all_ids, ids in zip((*sent, *received), (*step.sent, *step.received), strict=True):
                assert not all_ids & ids, "reported once"
                all_ids |= ids
            failed.update(step.failed)
            return what(sent, received)

        wait_until(enough, 60, "the workers' answer")
        return failed

    def prefill(self, req, blocks):
        """Computes and stores a whole prompt, and ends the request."""
        assert self.match(req) == (0, False)
        self.allocate(req, blocks, 0)
        self.step(new=[(req, blocks, 0, req.num_tokens)])
        self.finish(req)

    def stored(self, count, seed, **options):
        """Prefills a new prompt as request "a", in blocks from 1 on; returns the prompt."""
        prompt = tokens(count, seed)
        self.prefill(request("a", prompt, **options), range(1, 1 + -(-count // BLOCK)))
        return prompt

    def wait_for_stores(self):
        """Runs steps until no store is in flight."""
        wait_until(lambda: self.step() and self.scheduler._scheduling.in_flight_stores == {}, 60, "the stores")

    def wait_for_load(self):
        """Runs steps until one reports the end of a load."""
        wait_until(lambda: self.step().ended, 60, "the load")

    def finish(self, req):
        """Ends a request in the engine."""
        name = req.request_id
        held, self.handed_over = self.scheduler.request_finished_all_groups(req, ([],))
        if held:
            self.until(lambda sent, _: all(name in ids for ids in sent), finished=[name])
        else:
            step = self.step(finished=[name])
            assert not any(step.sent), "its blocks were freed already"
        return held

    def load(self, req, blocks, computed, external):
        """Loads what was matched; returns the failed blocks."""
        self.allocate(req, blocks, external)
        return self.until(lambda _, received: all(req.request_id in ids for ids in received))

    def read(self, blocks, rank=0):
        """Returns the bytes of blocks."""
        return [layouts.read_blocks(t, self.layout.block_axis, blocks) for t in self.tensors[rank]]

    def close(self):
        """Ends the engine."""
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()


def same(one, other):
    """Whether the bytes are equal."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
