"""vLLM's connector in both roles, with a simulated vLLM scheduler, for cases that a tiny model on CPU cannot show.

The scheduler's part follows vLLM 0.32: matched tokens, allocation, step, answers, end.
"""

import time
from types import SimpleNamespace

import pytest
import torch
from conftest import CHUNK
from kvrig import layouts
from kvrig.waiting import wait_until
from rig import BLOCK, tokens

pytest.importorskip("vllm")

from kvtier import Prompt  # noqa: E402
from kvtier.vllm import KvTierConnector  # noqa: E402
from kvtier.vllm.options import Identity, Options  # noqa: E402
from kvtier.vllm.requests import with_pictures  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402

PER_CHUNK = CHUNK // BLOCK


class FullAttentionSpec(SimpleNamespace):
    """Recognized by its name, like vLLM's."""


class MLAAttentionSpec(SimpleNamespace):
    """One latent vector per token, the same in every tensor-parallel rank."""


class SlidingWindowSpec(SimpleNamespace):
    """A kind of cache whose blocks are reused while their request runs."""


class UniformTypeKVCacheSpecs(SimpleNamespace):
    """Layers of one group with different caches."""


class MambaSpec(SimpleNamespace):
    """A kind of cache that cannot be served."""


def vllm_config(server, tensor=1, stages=1, rank=0, mla=False, events=False, role="kv_both", **extra):
    """Returns the used parts of vLLM's configuration."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={
                "kvtier.url": server.url, "kvtier.heartbeat": 3, "kvtier.store_timeout": 10, "kvtier.lookup_timeout": 10,
                "kvtier.start": "wait 10", **extra,
            },  # fmt: skip
            kv_load_failure_policy="fail",
            is_kv_producer=role != "kv_consumer",
            is_kv_consumer=role != "kv_producer",
        ),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=stages, rank=rank),
        model_config=SimpleNamespace(model="test/vllm", use_mla=mla),
    )


def cache_config(names, spec=FullAttentionSpec):
    """Returns one group of layers."""
    group = SimpleNamespace(layer_names=list(names), kv_cache_spec=spec(block_size=BLOCK))
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

    def __init__(self, server, ranks=1, mla=False, seed=1, **options):
        config = cache_config((f"layer.{i}" for i in range(2)), MLAAttentionSpec if mla else FullAttentionSpec)
        self.layout = layouts.layout("mla" if mla else "fused_hnd")
        if mla:
            config.kv_cache_layout = "LBNHC"
        shape = {"tensor": ranks, "mla": mla, **options}
        self.config = vllm_config(server, **shape)
        self.scheduler = KvTierConnector(self.config, KVConnectorRole.SCHEDULER, config)
        self.workers, self.tensors = [], []
        for rank in range(ranks):
            worker = KvTierConnector(vllm_config(server, rank=rank, **shape), KVConnectorRole.WORKER, config)
            tensors = layouts.allocate(self.layout, 2, torch.Generator().manual_seed(seed + (0 if mla else rank)))
            worker.register_kv_caches({f"layer.{i}": tensor for i, tensor in enumerate(tensors)})
            self.workers.append(worker)
            self.tensors.append(tensors)
        self.aggregator = KVOutputAggregator(ranks)
        self.stats = {}

    def match(self, req, computed=0):
        """Asks until the connector has the result."""
        answer = []

        def known():
            answer[:] = self.scheduler.get_num_new_matched_tokens(req, computed)
            return answer[0] is not None

        wait_until(known, 15, "a lookup")
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

        wait_until(enough, 15, "the workers' answer")
        return failed

    def prefill(self, req, blocks):
        """Computes and stores a whole prompt, and ends the request."""
        assert self.match(req) == (0, False)
        self.allocate(req, blocks, 0)
        self.step(new=[(req, blocks, 0, req.num_tokens)])
        self.finish(req)

    def finish(self, req):
        """Ends a request in the engine."""
        name = req.request_id
        held, _ = self.scheduler.request_finished_all_groups(req, ([],))
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


@pytest.fixture
def engines(place):
    """Factory of engines, which end with the test."""
    made = []

    def make(server, **options):
        made.append(Vllm(server, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def same(one, other):
    """Asserts equal bytes."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("transfer", ["engine_driven", "lmcache_driven"])
def test_store_and_load(place, engines, transfer):
    """Another engine loads the prefix and computes its last token; a longer prompt loads the common part."""
    server = place.server()
    first = engines(server, **{"kvtier.transfer_mode": transfer})
    second = engines(server, seed=7, **{"kvtier.transfer_mode": transfer})
    assert first.config.kv_transfer_config.kv_load_failure_policy == "recompute"
    prompt, blocks = tokens(2 * CHUNK, "sl"), list(range(1, 9))
    first.prefill(request("a", prompt), blocks)
    exact = request("b", prompt)
    assert second.match(exact) == (2 * CHUNK - 1, True)
    assert second.load(exact, range(11, 19), 0, 2 * CHUNK - 1) == set()
    assert same(second.read(list(range(11, 19))), first.read(blocks))
    assert second.finish(exact) is False, "it stored nothing"
    longer = request("c", prompt + tokens(5, "more"))
    assert second.match(longer, computed=BLOCK) == (2 * CHUNK - BLOCK, True)
    assert second.load(longer, range(21, 31), BLOCK, 2 * CHUNK - BLOCK) == set()
    assert same([x[1:] for x in second.read(list(range(21, 29)))], [x[1:] for x in first.read(blocks)])
    assert second.stats["retrieved_tokens"] == 4 * CHUNK
    # vLLM's own cache has the whole prompt: nothing is loaded, nothing stays leased.
    own = request("d", prompt)
    assert second.match(own, computed=2 * CHUNK - BLOCK) == (BLOCK - 1, True)
    second.allocate(own, range(1, 9), 0)
    assert second.step().metadata.loads == []
    second.finish(own)
    second.finish(longer)

    def leased():
        text = server.get("/metrics")[1]
        return next(line for line in text.splitlines() if line.startswith("kvtier_l1_leased_objects ")).split()[1]

    wait_until(lambda: leased() == "0", 30, "no leases")


def test_chunked_prefill_stores_each_chunk(place, engines):
    """Steps store whole chunks, each once, as they complete them; the rest of the prompt and decoding store nothing."""
    engine = engines(place.server())
    req = request("a", tokens(3 * CHUNK + 6, "cp"))
    assert engine.match(req) == (0, False)
    engine.allocate(req, range(1, 6), 0)
    ranges = []

    def stores(**step):
        ranges.append([(move.start, move.end, move.block_ids) for move in engine.step(**step).metadata.stores])

    stores(new=[(req, range(1, 6), 0, CHUNK + 3)])
    stores(cached=[(req, range(6, 9), CHUNK + 3, 5)])
    stores(cached=[(req, range(9, 15), CHUNK + 8, 2 * CHUNK - 2)])
    req.all_token_ids = req.all_token_ids + tokens(2 * CHUNK, "decoded")
    req.num_tokens += 2 * CHUNK
    stores(cached=[(req, None, 3 * CHUNK + 6, 2 * CHUNK)])
    assert ranges == [[(0, CHUNK, [[1, 2, 3, 4]])], [], [(CHUNK, 3 * CHUNK, [list(range(5, 13))])], []]
    assert engine.finish(req) is True
    assert engine.match(request("b", req.all_token_ids)) == (3 * CHUNK, True)


def test_save_decode_stores_generated_tokens(place, engines):
    """With the option kvtier.save_decode."""
    engine = engines(place.server(), **{"kvtier.save_decode": True})
    req = request("a", tokens(CHUNK - 2, "sd"))
    engine.match(req)
    engine.allocate(req, range(1, 5), 0)
    engine.step(new=[(req, range(1, 5), 0, CHUNK - 2)])
    req.all_token_ids = req.all_token_ids + tokens(3, "decoded")
    req.num_tokens += 3
    stores = engine.step(cached=[(req, [], CHUNK - 2, 2)]).metadata.stores
    assert [(move.start, move.end) for move in stores] == [(0, CHUNK)]
    engine.finish(req)


def test_preemption_and_resumption_in_one_step(place, engines):
    """As in a reset of the prefix cache with running requests: the new blocks count, with a load and without."""
    engine = engines(place.server())
    loads, computes = request("a", tokens(2 * CHUNK + 1, "pr")), request("b", tokens(CHUNK, "short"))
    for req, blocks in ((loads, range(1, 10)), (computes, range(11, 15))):
        assert engine.match(req) == (0, False)
        engine.allocate(req, blocks, 0)
    engine.step(new=[(loads, range(1, 10), 0, 2 * CHUNK + 1), (computes, range(11, 15), 0, 2)])
    expected = engine.read(list(range(1, 9)))
    # vLLM's next schedule() preempts all, and allocates blocks again.
    wait_until(lambda: engine.step() and engine.scheduler._scheduling.in_flight_stores == {}, 30, "the store")
    assert engine.match(loads) == (2 * CHUNK, True)
    engine.allocate(loads, range(31, 40), 2 * CHUNK)
    assert engine.match(computes) == (0, False)
    engine.allocate(computes, range(41, 45), 0)
    both = ["a", "b"]
    metadata = engine.step(
        preempted=both, resumed=["b"], cached=[(computes, range(41, 45), 0, CHUNK)]
    ).metadata
    assert [move.block_ids for move in metadata.loads] == [[list(range(31, 39))]]
    assert [move.block_ids for move in metadata.stores] == [[list(range(41, 45))]]
    wait_until(lambda: engine.step().ended, 30, "the load")
    assert same(engine.read(list(range(31, 39))), expected)


def test_preemption(place, engines):
    """A preemption waits for stores before blocks are reused; a resumed request loads what it had stored."""
    engine = engines(place.server(), **{"kvtier.preemption_patience": 7.5})
    req = request("a", tokens(2 * CHUNK + 1, "pre"))
    engine.match(req)
    engine.allocate(req, range(1, 10), 0)
    engine.step(new=[(req, range(1, 10), 0, 2 * CHUNK + 1)])
    expected = engine.read(list(range(1, 9)))
    worker, waited = engine.workers[0]._adapter, []
    wait = worker.wait_for_stores
    worker.wait_for_stores = lambda names, patience: waited.append((names, patience)) or wait(names, patience)
    engine.step(preempted=["a"])
    assert waited == [({"a"}, 7.5)]
    # Now another request has the blocks.
    for tensor in engine.tensors[0]:
        layouts.fill_blocks(tensor, engine.layout.block_axis, list(range(1, 10)), 0)
    assert engine.match(req) == (2 * CHUNK, True)
    assert engine.load(req, range(31, 40), 0, 2 * CHUNK) == set()
    assert same(engine.read(list(range(31, 39))), expected)
    stores = engine.step(cached=[(req, range(31, 40), 2 * CHUNK, 1)], resumed=["a"]).metadata.stores
    assert stores == [], "it is cached already"
    assert engine.finish(req) is True


def test_request_aborted_while_loading_is_reported_once(place, engines):
    """vLLM frees its blocks at the end of the load; a second report would be an error."""
    engine = engines(place.server())
    prompt = tokens(CHUNK + 1, "ab")
    engine.prefill(request("a", prompt), range(1, 6))
    req = request("b", prompt)
    assert engine.match(req) == (CHUNK, True)
    engine.allocate(req, range(11, 16), CHUNK)
    steps = [engine.step()]
    held, _ = engine.scheduler.request_finished_all_groups(req, ([],))
    assert held is False
    steps.append(engine.step(finished=["b"]))
    wait_until(lambda: steps.append(engine.step()) or any("b" in ids for step in steps for ids in step.received), 30, "the load's end")
    assert sum("b" in ids for step in steps for ids in step.received) == 1
    assert not any("b" in ids for step in steps for ids in step.sent)


def test_request_aborted_before_lookup_ends_is_released(place, engines):
    """No state of it is left."""
    engine = engines(place.server())
    req = request("a", tokens(CHUNK, "early"))
    engine.scheduler.get_num_new_matched_tokens(req, 0)
    assert engine.scheduler.request_finished(req, []) == (False, None)
    assert engine.scheduler._scheduling.tracked == {} and not engine.scheduler._scheduling.adapter.has_lookup("a")
    assert engine.scheduler.request_finished(request("never seen", [1]), []) == (False, None)


def test_failed_load_is_computed_and_stored_again(place, engines):
    """Its blocks are reported, and the request is not looked up again."""
    engine = engines(place.server())
    prompt = tokens(2 * CHUNK + 1, "fail")
    engine.prefill(request("a", prompt), range(1, 10))
    req = request("b", prompt)
    assert engine.match(req, computed=BLOCK) == (2 * CHUNK - BLOCK, True)
    engine.scheduler._scheduling.adapter.client.clear(True).result()
    assert engine.load(req, range(1, 10), BLOCK, 2 * CHUNK - BLOCK) == set(range(2, 9)), "block 1 is vLLM's own"
    assert engine.stats["failed_retrieves"] == 1
    assert engine.match(req) == (0, False)
    engine.allocate(req, range(1, 10), 0)
    stores = engine.step(new=[(req, range(1, 10), 0, 2 * CHUNK + 1)]).metadata.stores
    assert [(move.start, move.end) for move in stores] == [(0, 2 * CHUNK)]
    engine.finish(req)
    assert engine.match(request("c", prompt)) == (2 * CHUNK, True)


def test_load_failed_in_one_rank_fails(place, engines):
    """The failure is reported steps before the last rank's end, by one rank only: the request is not looked up again."""
    server = place.server()
    engine, prompt = engines(server, ranks=2), tokens(CHUNK + 1, "one first")
    engine.prefill(request("a", prompt), range(1, 6))
    req = request("b", prompt)
    assert engine.match(req) == (CHUNK, True)
    engine.scheduler._scheduling.adapter.client.clear(True).result()
    slow = engine.workers[1]._adapter
    its_own, slow.get_finished = slow.get_finished, lambda ids: (set(), set())
    engine.allocate(req, range(11, 16), CHUNK)
    failed = set()
    wait_until(lambda: failed.update(engine.step().failed) or failed, 30, "the first rank's word")
    slow.get_finished, slow.get_block_ids_with_load_errors = its_own, set
    wait_until(lambda: engine.step().ended, 30, "the second's")
    engine.prefill(request("c", prompt), range(21, 26))
    assert engine.match(request("d", prompt)) == (CHUNK, True), "it is cached"
    assert engine.match(req) == (0, False)
    engine.allocate(req, range(11, 16), 0)
    stores = engine.step(new=[(req, range(11, 16), 0, CHUNK + 1)]).metadata.stores
    assert [(move.start, move.end) for move in stores] == [(0, CHUNK)]


def test_tenants(place, engines):
    """cache_salt is part of the key on every path."""
    engine, prompt = engines(place.server()), tokens(CHUNK + 1, "salt")
    engine.prefill(request("a", prompt, salt="alice"), range(1, 6))
    assert engine.match(request("b", prompt)) == (0, False)
    assert engine.match(request("c", prompt, salt="bob")) == (0, False)
    req = request("d", prompt, salt="alice")
    assert engine.match(req) == (CHUNK, True)
    assert engine.load(req, range(11, 16), 0, CHUNK) == set()
    assert same(engine.read([11, 12, 13, 14]), engine.read([1, 2, 3, 4]))


@pytest.mark.parametrize("mla", [False, True])
def test_tensor_parallel_ranks(place, engines, mla):
    """A hit needs every piece; with MLA there is one, written once and read by both ranks."""
    server = place.server()
    first, second = engines(server, ranks=2, mla=mla), engines(server, ranks=2, mla=mla, seed=9)
    prompt = tokens(CHUNK + 1, "tp")
    first.prefill(request("a", prompt), range(1, 6))
    assert first.stats["stores"] == (1 if mla else 2)
    req = request("b", prompt)
    assert second.match(req) == (CHUNK, True)
    assert second.load(req, range(11, 16), 0, CHUNK) == set()
    for rank in range(2):
        assert same(second.read([11, 12, 13, 14], rank), first.read([1, 2, 3, 4], rank))


def test_roles(place, engines):
    """A consumer stores nothing, a producer loads nothing."""
    server, prompt = place.server(), tokens(CHUNK + 1, "roles")
    producer = engines(server, role="kv_producer")
    consumer = engines(server, role="kv_consumer")
    req = request("a", prompt)
    assert consumer.match(req) == (0, False)
    consumer.allocate(req, range(1, 6), 0)
    assert consumer.step(new=[(req, range(1, 6), 0, CHUNK + 1)]).metadata.stores == []
    producer.prefill(request("b", prompt), range(1, 6))
    assert producer.match(request("c", prompt)) == (0, False)
    assert consumer.match(request("d", prompt)) == (CHUNK, True)


def test_block_hashes_as_keys(place, engines):
    """With kvtier.key_mode vLLM's hashes identify prefixes, and tokens do not."""
    engine = engines(place.server(), **{"kvtier.key_mode": "block_hashes"})
    prompt = tokens(2 * CHUNK + 1, "hm")
    engine.prefill(request("a", prompt, prompt_embeds=torch.zeros(1)), range(1, 10))
    assert engine.match(request("b", tokens(2 * CHUNK + 1, "other tokens"))) == (2 * CHUNK, True)
    other = request("c", prompt)
    other.block_hashes[PER_CHUNK - 1] = b"another"
    assert engine.match(other) == (0, False)


def test_events(place, engines, tmp_path):
    """A chunk has an event once every rank has stored it, in vLLM's own hashes; chunks that were there have none."""
    engine = engines(place.server(), ranks=2, events=True)
    # As if the engine had started after the adapter was written.
    engine.scheduler._scheduling.keys._contents._started += 10**12
    # Not in the directory of the server's log, whose growth would change the adapter.
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"weights")
    lora = SimpleNamespace(lora_name="l", lora_path=str(path), adapter_id=3)
    prompt = tokens(3 * CHUNK + 1, "ev")
    req = request("a", prompt[: 2 * CHUNK + 1], lora_request=lora)
    # Looked up before the first request has stored anything: it also stores all of it.
    longer = request("b", prompt, lora_request=lora)
    assert engine.match(longer) == (0, False)
    engine.prefill(req, range(1, 10))

    def published():
        events = []
        wait_until(lambda: engine.step() and engine.scheduler._scheduling.in_flight_stores == {}, 30, "the stores")
        events.extend(engine.scheduler.take_events())
        return events

    first, second = published()
    hashes = [maybe_convert_block_hash(each) for each in longer.block_hashes]
    assert first.block_hashes == hashes[:PER_CHUNK] and first.parent_block_hash is None
    assert second.block_hashes == hashes[PER_CHUNK : 2 * PER_CHUNK] and second.parent_block_hash == hashes[PER_CHUNK - 1]
    assert (first.block_size, first.medium, first.lora_name) == (BLOCK, "CPU", "l")
    assert [*first.token_ids, *second.token_ids] == prompt[: 2 * CHUNK]
    engine.allocate(longer, range(21, 34), 0)
    engine.step(new=[(longer, range(21, 34), 0, 3 * CHUNK + 1)])
    (third,) = published()
    assert third.block_hashes == hashes[2 * PER_CHUNK :]
    assert engine.stats["stored_tokens"] == 2 * 3 * CHUNK


def test_reset_and_stats(place, engines, caplog):
    """After a reset nothing from before is found, whatever the server keeps; the counters match."""
    server, prompt = place.server(), tokens(CHUNK + 1, "reset")
    engine, careful = engines(server, **{"kvtier.reset_server": "true"}), engines(server)
    engine.prefill(request("a", prompt), range(1, 6))
    req = request("b", prompt)
    assert engine.match(req) == (CHUNK, True)
    engine.allocate(req, range(1, 6), 0)
    engine.finish(req)
    stats = engine.scheduler.get_kv_connector_stats()
    assert stats.data == {"lookups": 2, "hit_tokens": CHUNK}
    assert KvTierConnector.build_kv_connector_stats(stats.to_dict()).aggregate(stats).data["lookups"] == 4
    assert engine.scheduler.get_kv_connector_stats() is None
    for _ in range(2):
        # The reset of another engine keeps the KV, as a second tier does.
        assert careful.scheduler.reset_cache() is True
    assert sum("prefix cache was reset" in record.message for record in caplog.records) == 1, "logged once"
    assert careful.match(request("c", prompt)) == (0, False)
    assert engine.match(request("d", prompt)) == (CHUNK, True), "the others' keys are what they were"
    careful.prefill(request("e", prompt), range(1, 6))
    own = request("f", prompt)
    assert careful.match(own) == (CHUNK, True), "what it stored since then is found"
    assert careful.load(own, range(11, 16), 0, CHUNK) == set()
    assert same(careful.read([11, 12, 13, 14]), careful.read([1, 2, 3, 4]))
    careful.finish(own)
    assert engine.scheduler.reset_cache() is True
    wait_until(lambda: engine.match(request("g", prompt)) == (0, False) and objects(server) <= 1, 30, "the server is emptied, too")


def objects(server):
    """Returns the number of chunks in L1."""
    return server.get("/status")[1]["storage_manager"]["l1_manager"]["total_object_count"]


def test_reset_in_block_hashes_mode_finds_nothing(place, engines):
    """After it vLLM's hashes are the same, and the keys differ."""
    engine = engines(place.server(), **{"kvtier.key_mode": "block_hashes", "kvtier.reset_server": False})
    prompt = tokens(2 * CHUNK + 1, "hr")
    engine.prefill(request("a", prompt), range(1, 10))
    assert engine.scheduler.reset_cache() is True
    engine.prefill(request("b", prompt[: CHUNK + 1]), range(1, 6))
    assert engine.match(request("c", prompt)) == (CHUNK, True), "of the old the second chunk is there, and not found"


def test_reset_never_waits(place, engines):
    """The scheduler's thread continues while the server hangs; nothing from before is found when the server resumes."""
    server, prompt = place.server(), tokens(CHUNK + 1, "away")
    engine = engines(server)
    engine.prefill(request("a", prompt), range(1, 6))
    client = engine.scheduler._scheduling.adapter.client
    assert client.timeout == 10
    with server.frozen():
        began = time.monotonic()
        assert engine.scheduler.reset_cache() is True
        assert time.monotonic() - began < client.timeout / 2
        wait_until(lambda: not client.is_healthy, 30, "the missed heartbeat")
        # The adapter's reset_cache clears the server's memory, and returns false at once.
        began = time.monotonic()
        assert engine.scheduler._scheduling.adapter.reset_cache() is False
        assert time.monotonic() - began < client.timeout / 2
    wait_until(lambda: client.is_healthy, 30, "the server goes on")
    assert engine.match(request("b", prompt)) == (0, False)


def test_reset_drops_hits_and_stores_in_flight(place, engines):
    """Neither an earlier lookup's result is loaded, nor the chunks of a store in flight or of a running request."""
    engine, old, late = engines(place.server()), tokens(CHUNK + 1, "old"), tokens(2 * CHUNK + 1, "late")
    engine.prefill(request("a", old), range(1, 6))
    waits = request("b", old)
    assert engine.match(waits) == (CHUNK, True)
    assert engine.scheduler.reset_cache() is True
    assert engine.match(waits) == (0, False), "looked up again, and not held through the reset"
    # The worker has not begun this store; the request continues with its earlier KV.
    stores = request("c", late)
    assert engine.match(stores) == (0, False)
    engine.allocate(stores, range(1, 10), 0)
    submit, held = engine.workers[0].wait_for_save, []
    engine.workers[0].wait_for_save = lambda: held.append(engine.workers[0]._get_connector_metadata())
    engine.step(new=[(stores, range(1, 10), 0, CHUNK)])
    assert engine.scheduler.reset_cache() is True
    engine.workers[0].wait_for_save = submit
    engine.workers[0].bind_connector_metadata(held[0])
    submit()
    engine.step(cached=[(stores, None, CHUNK, CHUNK + 1)])
    wait_until(lambda: engine.step() and engine.scheduler._scheduling.in_flight_stores == {}, 30, "the stores")
    assert engine.stats["stores"] == 2, "a request that ran at the reset stores no more"
    assert engine.match(request("d", late)) == (0, False)
    engine.prefill(request("e", late[: CHUNK + 1]), range(11, 16))
    assert engine.match(request("f", late)) == (CHUNK, True), "its second chunk is from before"
    # A preempted request computes again.
    engine.step(preempted=["c"])
    assert engine.match(stores) == (CHUNK, True)


def test_request_running_at_reset_uses_no_new_keys(place, engines):
    """It had computed less than a chunk before the reset."""
    engine = engines(place.server(), **{"kvtier.reset_server": False})
    req = request("a", tokens(CHUNK + 1, "slow"))
    assert engine.match(req) == (0, False)
    engine.scheduler._scheduling.keys._made.clear()
    engine.allocate(req, range(1, 6), 0)
    engine.step(new=[(req, range(1, 6), 0, BLOCK)])
    assert engine.scheduler.reset_cache() is True
    engine.step(cached=[(req, None, BLOCK, CHUNK + 1 - BLOCK)])
    assert engine.finish(req) is False, "nothing of it is stored"
    assert engine.match(request("b", req.all_token_ids)) == (0, False)


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_preempted_request_stores_from_start(place, engines, role):
    """Also without a lookup: its first store may have failed, or have been abandoned."""
    engine = engines(place.server(), role=role)
    req = request("a", tokens(CHUNK + 1, "ps"))
    engine.match(req)
    engine.allocate(req, range(1, 6), 0)
    lost = []
    submit, engine.workers[0].wait_for_save = engine.workers[0].wait_for_save, lambda: lost.append(1)
    engine.step(new=[(req, range(1, 6), 0, CHUNK + 1)])
    engine.workers[0].wait_for_save = submit
    engine.scheduler._scheduling.tracked["a"].bypass = role == "kv_both"
    assert engine.match(req) == (0, False)
    engine.allocate(req, range(11, 16), 0)
    stores = engine.step(preempted=["a"], resumed=["a"], cached=[(req, range(11, 16), 0, CHUNK + 1)]).metadata.stores
    assert [(move.start, move.end, move.block_ids) for move in stores] == [(0, CHUNK, [[11, 12, 13, 14]])]


def test_blocks_of_one_token(place, monkeypatch):
    """A whole prompt's load ends a chunk earlier: vLLM allocates no block for the token that it computes."""
    config = cache_config(["layer.0"])
    config.hash_block_size = config.kv_cache_groups[0].kv_cache_spec.block_size = 1
    scheduler = KvTierConnector(vllm_config(place.server()), KVConnectorRole.SCHEDULER, config)
    scheduling = scheduler._scheduling
    monkeypatch.setattr(scheduling.adapter, "maybe_submit_lookup_request", lambda name, prompt, **_: found.append(len(prompt)))
    monkeypatch.setattr(scheduling.adapter, "check_lookup_result", lambda name: found[-1])
    found = []
    for length, loads in ((2 * CHUNK, CHUNK), (2 * CHUNK + 1, 2 * CHUNK)):
        req = request(f"r{length}", tokens(length, "one"))
        assert scheduler.get_num_new_matched_tokens(req, 0) == (loads, True)
        scheduler.update_state_after_alloc(req, SimpleNamespace(get_block_ids=lambda n=loads: (list(range(n)),)), loads)
        step = SimpleNamespace(
            scheduled_new_reqs=[], num_scheduled_tokens={}, finished_req_ids=set(), preempted_req_ids=None,
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()),
        )  # fmt: skip
        (move,) = scheduler.build_connector_meta(step).loads
        assert (move.start, move.end, move.block_ids) == (0, loads, [list(range(loads))])
    scheduler.shutdown()


def test_reset_during_load_succeeds(place, engines):
    """vLLM's own reset then refuses; the connector does not make a pause or a sleep fail."""
    engine, prompt = engines(place.server()), tokens(CHUNK + 1, "load on")
    engine.prefill(request("a", prompt), range(1, 6))
    req = request("b", prompt)
    assert engine.match(req) == (CHUNK, True)
    engine.allocate(req, range(11, 16), CHUNK)
    assert engine.scheduler.reset_cache() is True
    assert engine.match(request("c", prompt)) == (0, False), "it finds nothing from before"
    wait_until(lambda: engine.step().ended, 30, "the load")


def test_load_ends_where_vllm_decides(place, engines):
    """vLLM may load less than was found. With too few blocks the load fails, and nothing raises."""
    engine, prompt = engines(place.server()), tokens(3 * CHUNK + 1, "less")
    engine.prefill(request("a", prompt), range(1, 14))
    less = request("b", prompt)
    assert engine.match(less) == (3 * CHUNK, True)
    engine.allocate(less, range(21, 29), CHUNK + BLOCK)
    metadata = engine.step().metadata
    assert [(move.start, move.end, move.block_ids) for move in metadata.loads] == [(0, 2 * CHUNK, [list(range(21, 29))])]
    wait_until(lambda: engine.step().ended, 30, "the load")
    assert same(engine.read(list(range(21, 29))), engine.read(list(range(1, 9))))
    engine.finish(less)
    few = request("c", prompt)
    assert engine.match(few) == (3 * CHUNK, True)
    engine.allocate(few, range(31, 36), CHUNK + BLOCK)
    step = engine.step()
    assert step.metadata.loads == [] and step.ended == {"c"} and step.failed == set(range(31, 36))


def test_groups_of_layers(place, engines):
    """Each group has its own blocks; failures are reported by request, since block ids are ambiguous across groups."""
    server = place.server()
    # A window in the spec that is not used, as without vLLM's hybrid cache manager.
    other = SimpleNamespace(
        layer_names=["layer.1"], kv_cache_spec=FullAttentionSpec(block_size=BLOCK, sliding_window=2 * CHUNK)
    )
    made = []
    for seed in (1, 2):
        config = cache_config(["layer.0"])
        config.kv_cache_groups.append(other)
        with pytest.raises(ValueError, match="use lmcache_driven"):
            refused = KvTierConnector(
                vllm_config(server, **{"kvtier.transfer_mode": "engine_driven"}), KVConnectorRole.WORKER, config
            )
            tensors = layouts.allocate(layouts.layout("fused_hnd"), 2, torch.Generator().manual_seed(seed))
            try:
                refused.register_kv_caches({"layer.0": tensors[0], "layer.1": tensors[1]})
            finally:
                refused.shutdown()
        scheduler = KvTierConnector(vllm_config(server), KVConnectorRole.SCHEDULER, config)
        worker = KvTierConnector(vllm_config(server), KVConnectorRole.WORKER, config)
        worker.register_kv_caches({"layer.0": tensors[0], "layer.1": tensors[1]})
        made.append((scheduler, worker, tensors))

    def step(scheduler, worker, **parts):
        metadata = scheduler.build_connector_meta(scheduled(**parts))
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        assert worker.get_block_ids_with_load_errors() == set()
        return results

    def scheduled(new=None):
        return SimpleNamespace(
            scheduled_new_reqs=[] if new is None else [SimpleNamespace(req_id=new[0].request_id, block_ids=new[1], num_computed_tokens=0)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()),
            num_scheduled_tokens={} if new is None else {new[0].request_id: new[0].num_tokens},
            finished_req_ids=set(), preempted_req_ids=None,
        )  # fmt: skip

    def matched(scheduler, req):
        wait_until(lambda: scheduler.get_num_new_matched_tokens(req, 0)[0] is not None, 30, "lookup")
        return scheduler.get_num_new_matched_tokens(req, 0)

    def read(tensors, ids):
        return [layouts.read_blocks(tensor, 0, group) for tensor, group in zip(tensors, ids, strict=True)]

    prompt, ids = tokens(CHUNK + 1, "groups"), ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
    scheduler, worker, tensors = made[0]
    req = request("a", prompt)
    assert matched(scheduler, req) == (0, False)
    scheduler.update_state_after_alloc(req, SimpleNamespace(get_block_ids=lambda: ids), 0)
    step(scheduler, worker, new=(req, ids))
    wait_until(lambda: step(scheduler, worker) and worker.get_kv_connector_stats(), 30, "the store")
    expected = read(tensors, [group[:4] for group in ids])
    scheduler, worker, tensors = made[1]
    for number, there in enumerate((True, False)):
        req, ids = request(f"b{number}", prompt), ([21, 22, 23, 24, 25], [31, 32, 33, 34, 35])
        assert matched(scheduler, req) == (CHUNK, True)
        scheduler.update_state_after_alloc(req, SimpleNamespace(get_block_ids=lambda: ids), CHUNK)
        if not there:
            scheduler._scheduling.adapter.client.clear(True).result()
        ended = []
        wait_until(lambda: ended.append(step(scheduler, worker)) or ended[-1].finished_recving, 30, "the load")
        assert ended[-1].finished_recving == {req.request_id}
        assert ended[-1].failed_recving == (set() if there else {req.request_id})
        if there:
            assert same(read(tensors, [group[:4] for group in ids]), expected)
    for scheduler, worker, _ in made:
        worker.shutdown()
        scheduler.shutdown()


def test_keys_differ_by_non_token_content():
    """Pictures and sounds are part of the key; equal ones give equal keys."""
    prompt = Prompt(tokens(64, "mm"))

    def key(pictures=(), of=prompt):
        features = [
            SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=20)) for name, offset in pictures
        ]
        return with_pictures(of, SimpleNamespace(mm_features=features), CHUNK)

    keys = [key(), key([("cat", 20)]), key([("dog", 20)]), key([("cat", 21)]), key([("cat", 20), ("dog", 50)])]
    assert len(set(keys)) == len(keys) and all(len(each) == 64 for each in keys)
    assert key([("cat", 20)]) == keys[1]
    # Chunks before the picture are shared, and those of equal pictures, whatever tokens follow in the last chunk.
    assert key([("cat", 20)]).prefix(CHUNK) == prompt.prefix(CHUNK)
    pictured = key([("cat", 4)], of=Prompt(tokens(24, "mm") + tokens(40, "other")))
    assert pictured.prefix(CHUNK) == key([("cat", 4)]).prefix(CHUNK)
    assert pictured.prefix(2 * CHUNK) != key([("cat", 4)]).prefix(2 * CHUNK)


def test_single_placeholder_distinguishes_pictures():
    """An id in a token's place has only 32 bits, so a chunk with a single placeholder needs more of them."""
    replaced = []

    class Recorded:
        def __len__(self):
            return 4 * CHUNK

        def with_identity(self, start, length, identity):
            replaced.append((start, start + length))
            return self

    def ranges(offset, length):
        replaced.clear()
        feature = SimpleNamespace(identifier="x", mm_position=SimpleNamespace(offset=offset, length=length))
        with_pictures(Recorded(), SimpleNamespace(mm_features=[feature]), CHUNK)
        return list(replaced)

    assert ranges(5, 1) == [(0, CHUNK)]
    assert ranges(CHUNK - 1, 2) == [(0, CHUNK), (CHUNK, 2 * CHUNK)]
    assert ranges(CHUNK - 1, 2 * CHUNK + 2) == [(0, CHUNK), (CHUNK, 3 * CHUNK), (3 * CHUNK, 4 * CHUNK)]
    assert ranges(CHUNK, 2 * CHUNK) == [(CHUNK, 2 * CHUNK), (2 * CHUNK, 3 * CHUNK)]
    assert ranges(3 * CHUNK, 100) == [(3 * CHUNK, 4 * CHUNK)]


def test_options():
    """Options have defaults and types, and errors say what is allowed."""
    assert Options.read({"kvtier.timeout": "3", "kvtier.save_decode": "true"}).timeout == 3.0
    assert Options.read({}).wait_for_server is None and Options.read({"kvtier.start": "without"}).wait_for_server is None
    for seconds in (30, "30", "wait 30"):
        assert Options.read({"kvtier.start": seconds}).wait_for_server == 30
    assert Options.read({"kvtier.chunk_tokens": 512}).chunk_tokens == 512
    assert Options.read({}).reset_server is False and Options.read({}).lookup_timeout == 1.0
    for wrong, error in [
        ({"kvtier.tiemout": 1}, "kvtier.tiemout: no such option; did you mean kvtier.timeout"),
        ({"url": "x"}, "^url: no such option; did you mean kvtier.url"),
        ({"kvtier_url": "x"}, "^kvtier_url: no such option; did you mean kvtier.url"),
        ({"lmcache.mp.host": "x"}, "^lmcache.mp.host: .*one of LMCache's connector; .*kvtier.url"),
        ({"zzz": 1}, "^zzz: no such option; allowed are kvtier.url"),
        ({"kvtier.timeout": "soon"}, "a number is needed"),
        ({"kvtier.timeout": 0}, "a positive number"),
        ({"kvtier.timeout": "inf"}, "kvtier.timeout: inf; a positive number"),
        ({"kvtier.heartbeat": 1e300}, "kvtier.heartbeat: 1e.300; a positive number"),
        ({"kvtier.lookup_timeout": "nan"}, "kvtier.lookup_timeout: nan; a positive number"),
        ({"kvtier.start": "later"}, "kvtier.start: 'later'; allowed are without, and seconds"),
        ({"kvtier.start": -1}, "kvtier.start: -1.0; a positive number"),
        ({"kvtier.chunk_tokens": "big"}, "a whole number is needed"),
        ({"kvtier.chunk_tokens": -1}, "allowed are whole numbers from 0"),
        ({"kvtier.model_name": "a@b"}, "kvtier.model_name: 'a@b'; allowed is a printable text without @"),
        ({"kvtier.preemption_patience": -1}, "preemption_patience: -1.0; a positive number"),
        ({"kvtier.save_decode": 2}, "allowed are true and false"),
        ({"kvtier.transfer_mode": "x"}, "allowed are auto, engine_driven, lmcache_driven"),
        ({"kvtier.key_mode": "x"}, "allowed are tokens, block_hashes"),
        ({"kvtier.url": 5}, "a text is needed"),
    ]:
        with pytest.raises(ValueError, match=error):
            Options.read(wrong)


def test_identities():
    """Each rank has its piece."""
    server = SimpleNamespace(url="x")

    def of(rank, layers_are_mla=True, **shape):
        made = Identity.of(vllm_config(server, **shape), layers_are_mla, rank)
        return made.world_size, made.worker_id, made.num_kv_readers, made.is_writer

    assert of(1, tensor=2) == (2, 1, 1, True)
    assert [of(rank, tensor=2, mla=True) for rank in (0, 1)] == [(1, 0, 2, True), (1, 0, 2, False)]
    assert of(3, tensor=2, stages=2, mla=True) == (2, 1, 2, False)
    # MLA with layers whose heads are divided among the ranks, such as a draft model's: each rank has its own piece.
    assert of(1, layers_are_mla=False, tensor=2, mla=True) == (2, 1, 1, True)
    staged = Identity.of(vllm_config(server, stages=2), False)
    assert staged.model_name != Identity.of(vllm_config(server, tensor=2), False).model_name, "another cut of the same model"
    context = vllm_config(server)
    context.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ValueError, match="decode_context_parallel_size"):
        Identity.of(context, False)


def test_unsupported_models_are_refused(place):
    """The start fails with the cause."""
    server = place.server()
    for role in KVConnectorRole:
        with pytest.raises(ValueError, match="layer.0 has MambaSpec"):
            KvTierConnector(vllm_config(server), role, cache_config(["layer.0"], MambaSpec))
    window = SlidingWindowSpec(block_size=BLOCK, sliding_window=2 * CHUNK)
    mixed = {"layer.0": FullAttentionSpec(block_size=BLOCK), "layer.1": window}
    for spec in (window, UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=mixed)):
        hybrid = cache_config(["layer.0"])
        hybrid.kv_cache_groups.append(SimpleNamespace(layer_names=["layer.1"], kv_cache_spec=spec))
        for role in KVConnectorRole:
            with pytest.raises(ValueError, match="sliding windows, and layer.1 has .*SlidingWindowSpec.* without a KV connector"):
                KvTierConnector(vllm_config(server), role, hybrid)
    for more, error in (({"non_causal": True}, "non_causal is False"), ({"tokens_per_state": 4}, "tokens_per_state is 1")):
        altered = cache_config(["layer.0"])
        vars(altered.kv_cache_groups[0].kv_cache_spec).update(more)
        with pytest.raises(ValueError, match=error):
            KvTierConnector(vllm_config(server), KVConnectorRole.WORKER, altered)
    uneven = cache_config(["layer.0"])
    uneven.kv_cache_groups.append(SimpleNamespace(layer_names=["layer.1"], kv_cache_spec=FullAttentionSpec(block_size=3)))
    for role in KVConnectorRole:
        with pytest.raises(ValueError, match="does not divide the server's chunk"):
            KvTierConnector(vllm_config(server), role, uneven)
    uneven_size = cache_config(["layer.0"])
    uneven_size.kv_cache_groups[0].kv_cache_spec.block_size = 5
    with pytest.raises(ValueError, match="does not divide the server's chunk"):
        KvTierConnector(vllm_config(server), KVConnectorRole.SCHEDULER, uneven_size)
    layout = cache_config(["layer.0"])
    layout.kv_cache_layout = "LHBNC"
    worker = KvTierConnector(vllm_config(server), KVConnectorRole.WORKER, layout)
    with pytest.raises(ValueError, match="KV layouts"):
        worker.register_kv_caches({})
    worker.shutdown()
