"""vLLM's connector with a simulated scheduler: what is stored and loaded."""

from types import SimpleNamespace

import pytest
import torch
from conftest import CHUNK
from kvrig import layouts
from kvrig.waiting import wait_until
from rig import BLOCK, tokens
from vllm_rig import request, same  # skips without vLLM

from vllm import PoolingParams, SamplingParams
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

PER_CHUNK = CHUNK // BLOCK


# proves: docs/compare.md#kvtiers-connector-for-vllm
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

    wait_until(lambda: leased(server) == 0, 60, "no leases")


@pytest.mark.parametrize("transfer", ["engine_driven", "lmcache_driven"])
def test_blocks_divided_by_kernels(place, engines, transfer):
    """Where attention kernels have smaller blocks than vLLM, tensors have several for one of its ids: all are stored and loaded, and no
    other is written."""
    server = place.server()
    first, second = (engines(server, seed=seed, kernel_blocks=2, **{"kvtier.transfer_mode": transfer}) for seed in (1, 7))
    prompt, blocks = tokens(2 * CHUNK, "kernel blocks"), list(range(1, 9))
    first.prefill(request("a", prompt), blocks)
    first.wait_for_stores()
    others = [block for block in range(second.layout.shape[0]) if not 12 <= block < 19]
    before = second.read(others)
    exact = request("b", prompt)
    assert second.match(exact, computed=BLOCK) == (2 * CHUNK - BLOCK - 1, True)
    assert second.load(exact, range(11, 19), BLOCK, 2 * CHUNK - BLOCK - 1) == set()
    assert same(second.read(list(range(12, 19))), first.read(blocks[1:]))
    assert same(second.read(others), before)


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
    engine.wait_for_stores()
    assert engine.match(loads) == (2 * CHUNK, True)
    engine.allocate(loads, range(31, 40), 2 * CHUNK)
    assert engine.match(computes) == (0, False)
    engine.allocate(computes, range(41, 45), 0)
    both = ["a", "b"]
    step = engine.step(preempted=both, resumed=["b"], cached=[(computes, range(41, 45), 0, CHUNK)])
    assert [move.block_ids for move in step.metadata.loads] == [[list(range(31, 39))]]
    assert [move.block_ids for move in step.metadata.stores] == [[list(range(41, 45))]]
    if not step.ended:
        engine.wait_for_load()
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


def test_tenants(place, engines):
    """cache_salt is part of the key on every path."""
    engine = engines(place.server())
    prompt = engine.stored(CHUNK + 1, "salt", salt="alice")
    assert engine.match(request("b", prompt)) == (0, False)
    assert engine.match(request("c", prompt, salt="bob")) == (0, False)
    req = request("d", prompt, salt="alice")
    assert engine.match(req) == (CHUNK, True)
    assert engine.load(req, range(11, 16), 0, CHUNK) == set()
    assert same(engine.read([11, 12, 13, 14]), engine.read([1, 2, 3, 4]))


# proves: docs/compare.md#more-ranks-than-kv-heads
@pytest.mark.parametrize("transfer", ["engine_driven", "lmcache_driven"])
@pytest.mark.parametrize("ranks, shape, pieces", [(2, {}, 2), (2, {"mla": True}, 1), (2, {"heads": 1}, 1), (4, {"heads": 2}, 2)])
def test_tensor_parallel_ranks(place, engines, transfer, ranks, shape, pieces):
    """A hit needs every piece. Ranks with the same KV, latents or a head, have one piece, written once and read by all of them."""
    server, shape = place.server(), shape | {"ranks": ranks, "kvtier.transfer_mode": transfer}
    first, second = engines(server, **shape), engines(server, seed=9, **shape)
    prompt = tokens(CHUNK + 1, "tp")
    first.prefill(request("a", prompt), range(1, 6))
    first.wait_for_stores()
    assert first.stats["stores"] == pieces
    req = request("b", prompt)
    assert second.match(req) == (CHUNK, True)
    assert second.load(req, range(11, 16), 0, CHUNK) == set()
    for rank in range(ranks):
        assert same(second.read([11, 12, 13, 14], rank), first.read([1, 2, 3, 4], rank))
    # Every rank has read its piece, so none is leased before the request's end.
    wait_until(lambda: leased(server) == 0, 60, "no leases")
    # What vLLM has itself is freed for all ranks.
    own = request("c", prompt)
    assert second.match(own, computed=CHUNK) == (0, False)
    second.allocate(own, range(11, 16), 0)
    wait_until(lambda: leased(server) == 0, 60, "no leases")


def leased(server):
    """The number of leased objects."""
    text = server.get("/metrics")[1]
    return int(next(line for line in text.splitlines() if line.startswith("kvtier_l1_leased_objects ")).split()[1])


# proves: docs/compare.md#more-ranks-than-kv-heads
# proves: docs/identity.md#parallelconfig
def test_pieces_are_the_same_at_each_number_of_ranks(place, engines):
    """With two heads, engines of two and of four ranks have the same two pieces."""
    server, prompt = place.server(), tokens(CHUNK + 1, "sizes")
    two, four = engines(server, ranks=2, heads=2), engines(server, ranks=4, heads=2, seed=9)
    two.prefill(request("a", prompt), range(1, 6))
    req = request("b", prompt)
    assert four.match(req) == (CHUNK, True)
    assert four.load(req, range(11, 16), 0, CHUNK) == set()
    for rank in range(4):
        assert same(four.read([11, 12, 13, 14], rank), two.read([1, 2, 3, 4], rank // 2))


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


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_block_hashes_as_keys(place, engines):
    """With kvtier.key_mode vLLM's hashes identify prefixes, and tokens do not."""
    engine = engines(place.server(), **{"kvtier.key_mode": "block_hashes"})
    prompt = tokens(2 * CHUNK + 1, "hm")
    engine.prefill(request("a", prompt, prompt_embeds=torch.zeros(1)), range(1, 10))
    assert engine.match(request("b", tokens(2 * CHUNK + 1, "other tokens"))) == (2 * CHUNK, True)
    other = request("c", prompt)
    other.block_hashes[PER_CHUNK - 1] = b"another"
    assert engine.match(other) == (0, False)


def stored(engine, req, blocks):
    """Computes a request in one step; returns the ranges that it stores."""
    assert engine.scheduler.get_num_new_matched_tokens(req, 0) == (0, False), "at once: there is no lookup"
    engine.allocate(req, blocks, 0)
    moves = engine.step(new=[(req, blocks, 0, req.num_tokens)]).metadata.stores
    engine.finish(req)
    return [(move.start, move.end) for move in moves]


@pytest.mark.parametrize(
    ("sampling", "pooling"),
    [(SamplingParams(prompt_logprobs=1, max_tokens=1), None), (None, PoolingParams(task="token_embed", skip_reading_prefix_cache=True))],
    ids=["prompt-logprobs", "pooling"],
)
def test_requests_that_need_every_token_store_only(place, engines, sampling, pooling):
    """vLLM must compute their whole prompt; others load what they have stored."""
    engine, prompt = engines(place.server()), tokens(2 * CHUNK + 1, "every")
    for name in ("a", "b"):
        req = Request(name, prompt, sampling, pooling)
        assert stored(engine, req, range(1, 10)) == [(0, 2 * CHUNK)]
    assert engine.match(request("c", prompt)) == (2 * CHUNK, True)


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_prompt_embeddings_are_not_cached_by_tokens(place, engines):
    """Their token ids are zeros, whatever they are: neither such a request nor a prompt of zeros finds them."""
    engine, zeros = engines(place.server()), [0] * (2 * CHUNK + 1)
    sampling = SamplingParams(max_tokens=1)
    embeds = Request("a", None, sampling, None, prompt_embeds=torch.zeros(len(zeros), 8))
    assert list(embeds.all_token_ids) == zeros
    assert stored(engine, embeds, range(1, 10)) == []
    engine.prefill(request("b", zeros), range(11, 20))
    assert engine.match(request("c", zeros)) == (2 * CHUNK, True)
    assert stored(engine, Request("d", None, sampling, None, prompt_embeds=torch.ones(len(zeros), 8)), range(21, 30)) == []


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
        engine.wait_for_stores()
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
    engine.scheduler._scheduling.tracked["a"].bypass = "load_failed" if role == "kv_both" else ""
    assert engine.match(req) == (0, False)
    engine.allocate(req, range(11, 16), 0)
    stores = engine.step(preempted=["a"], resumed=["a"], cached=[(req, range(11, 16), 0, CHUNK + 1)]).metadata.stores
    assert [(move.start, move.end, move.block_ids) for move in stores] == [(0, CHUNK, [[11, 12, 13, 14]])]
