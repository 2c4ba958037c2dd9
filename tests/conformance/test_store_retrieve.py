"""What one engine stores comes back byte for byte, in every transfer mode, and nothing else does.

Prompts are random token ids, KV blocks random bytes. Chunks hold 16 tokens, blocks 4.
"""

import pytest
import torch
from kvrig import gpu
from kvrig.engine import Group, tokens
from kvrig.layouts import BLOCK_TOKENS, NUM_BLOCKS, layout
from kvrig.waiting import wait_until

MODES = ["lmcache_driven", "engine_shm", "engine_pickle", gpu.MODE]
LAYOUTS = ["kv_first_nhd", "kv_first_hnd", "blocks_first_nhd", "fused_hnd", "fused_nhd", "mla"]


def same(ours, theirs):
    """Whether two lists of block bytes are equal."""
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def all_but(blocks):
    """Every block id except these."""
    return [b for b in range(NUM_BLOCKS) if b not in set(blocks)]


@pytest.fixture(params=MODES)
def server(request, serve):
    """A server in each of the three transfer modes."""
    return serve(request.param)


# proves: docs/compare.md#clients-of-lmcache
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_stored_comes_back(server, engines, name):
    """Miss, store, hit, retrieve into other blocks: the bytes are equal and no other block changed."""
    engine = engines(server, groups=[Group(layout(name))], mla=name == "mla")
    prompt = tokens(70)  # four whole chunks and a rest
    request, hit = engine.lookup(prompt)
    assert hit == 0
    assert engine.worker.store(request, prompt, 0, 64, engine.blocks_for(64, first=1)) is True
    engine.end(request)
    engine.wait_hit(prompt, 64)

    source, target = engine.blocks_for(64, first=1), engine.blocks_for(64, first=30)
    stored, rest = engine.worker.read(source), engine.worker.read(all_but(target))
    engine.worker.fill(target)
    request, hit = engine.lookup(prompt)
    assert hit == 64
    assert engine.worker.retrieve(request, prompt, 0, 64, target).ok
    engine.end(request)
    assert same(engine.worker.read(target), stored)
    assert same(engine.worker.read(all_but(target)), rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_every_element_type(server, engines, dtype):
    """Bytes are bytes, whatever the element type is called."""
    check_element_type(engines(server, groups=[Group(layout("kv_first_nhd", dtype=dtype))]))


@pytest.mark.ours("torch has no fp8 copies on CPU")
def test_fp8(serve, engines):
    """The same for 8-bit floats where the server copies; in engine-driven modes the client's torch cannot."""
    check_element_type(engines(serve(), groups=[Group(layout("kv_first_nhd", dtype=torch.float8_e4m3fn))]))


def check_element_type(engine):
    """Store, overwrite, load again."""
    prompt, blocks = tokens(32), engine.blocks_for(32)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 32)
    stored = engine.worker.read(blocks)
    engine.worker.fill(blocks)
    request, _ = engine.lookup(prompt)
    assert engine.worker.retrieve(request, prompt, 0, 32, blocks).ok
    assert same(engine.worker.read(blocks), stored)
    engine.end(request)


def test_partial_prefix(server, engines):
    """Only whole chunks of the common prefix hit; a prompt that differs in its first token hits nothing."""
    engine = engines(server)
    prompt = tokens(64)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 64)
    assert engine.hits(prompt[:40] + tokens(40)) == 32
    assert engine.hits(prompt + tokens(40)) == 64
    assert engine.hits(prompt[:17]) == 16
    assert engine.hits(prompt[:15]) == 0
    assert engine.hits([prompt[0] ^ 1] + prompt[1:]) == 0

    longer = prompt[:48] + tokens(30)
    request, hit = engine.lookup(longer)
    assert hit == 48
    stored = engine.worker.read(engine.blocks_for(48))
    target = engine.blocks_for(48, first=40)
    assert engine.worker.retrieve(request, longer, 0, 48, target).ok
    assert same(engine.worker.read(target), stored)
    engine.end(request)


def test_tail_after_the_engines_own_prefix(server, engines):
    """The engine already has 20 tokens: it frees chunk 0, loads [16, 64) and skips the 4 tokens it has."""
    engine = engines(server)
    prompt = tokens(64)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 64)
    stored = engine.worker.read(engine.blocks_for(64))

    request, hit = engine.lookup(prompt)
    assert hit == 64
    engine.scheduler.free_lookup_locks(prompt, 0, 20, request)
    target = engine.blocks_for(48, first=40)
    engine.worker.fill(target, 7)
    assert engine.worker.retrieve(request, prompt, 16, 64, target, skip=4).ok
    engine.end(request)
    loaded = engine.worker.read(target)
    assert all((layer[0] == 7).all() for layer in loaded), "the skipped block was written"
    assert same([layer[1:] for layer in loaded], [layer[5:16] for layer in stored])


@pytest.mark.parametrize("skip", [1, 4, 7, 16, 21, 32])
def test_skipped_tokens_are_whole_blocks(server, engines, skip):
    """floor(skip / block) blocks at the front stay as they are; the rest is written."""
    engine = engines(server)
    prompt = tokens(32)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 32)
    stored = engine.worker.read(engine.blocks_for(32))
    target = engine.blocks_for(32, first=20)
    engine.worker.fill(target, 9)
    request, _ = engine.lookup(prompt)
    assert engine.worker.retrieve(request, prompt, 0, 32, target, skip=skip).ok
    engine.end(request)
    loaded, kept = engine.worker.read(target), skip // BLOCK_TOKENS
    assert all((layer[:kept] == 9).all() for layer in loaded)
    assert same([layer[kept:] for layer in loaded], [layer[kept:] for layer in stored])


def test_prompt_stored_piece_by_piece(server, engines):
    """Chunked prefill: one request stores its prompt in several calls, each with the whole prompt so far."""
    engine = engines(server)
    prompt = tokens(64)
    request, hit = engine.lookup(prompt)
    assert hit == 0
    blocks = engine.blocks_for(64)
    for start, end in ((0, 16), (16, 48), (48, 64)):
        piece = blocks[start // BLOCK_TOKENS : end // BLOCK_TOKENS]
        assert engine.worker.store(request, prompt[:end], start, end, piece) is True
    engine.end(request)
    engine.wait_hit(prompt, 64)
    stored, target = engine.worker.read(blocks), engine.blocks_for(64, first=30)
    request, _ = engine.lookup(prompt)
    assert engine.worker.retrieve(request, prompt, 0, 64, target).ok
    assert same(engine.worker.read(target), stored)
    engine.end(request)


def test_blocks_in_any_order(server, engines):
    """Block ids are scattered over the cache, in an order of their own, different at store and retrieve."""
    engine = engines(server)
    prompt = tokens(64)
    scattered = [(5 * i + 3) % 63 + 1 for i in range(16)]
    target = [b for b in reversed(range(1, NUM_BLOCKS)) if b not in scattered][::2][:16]
    request = engine.new_request()
    assert engine.worker.store(request, prompt, 0, 64, scattered) is True
    engine.end(request)
    engine.wait_hit(prompt, 64)
    stored, rest = engine.worker.read(scattered), engine.worker.read(all_but(target))
    request, _ = engine.lookup(prompt)
    assert engine.worker.retrieve(request, prompt, 0, 64, target).ok
    assert same(engine.worker.read(target), stored)
    assert same(engine.worker.read(all_but(target)), rest)
    engine.end(request)


def test_first_store_of_a_prompt_stays(server, engines):
    """A second store of the same tokens succeeds and changes nothing: what hits is one store, never a mix."""
    engine = engines(server)
    prompt = tokens(48)
    engine.store_prompt(prompt[:32])
    engine.wait_hit(prompt, 32)
    first = engine.worker.read(engine.blocks_for(32))
    engine.store_prompt(prompt, first=20)  # other bytes for the known chunks, and a third chunk
    engine.wait_hit(prompt, 48)
    last = engine.worker.read(engine.blocks_for(16, first=28))
    target = engine.blocks_for(48, first=40)
    request, _ = engine.lookup(prompt)
    assert engine.worker.retrieve(request, prompt, 0, 48, target).ok
    loaded = engine.worker.read(target)
    assert same([layer[:8] for layer in loaded], first)
    assert same([layer[8:] for layer in loaded], last)
    engine.end(request)


def test_clear_spares_what_a_lookup_pinned(server, engines):
    """reset_prefix_cache between a hit and its retrieve: the retrieve still delivers; afterwards all is removed."""
    engine = engines(server)
    prompt, other = tokens(32), tokens(32)
    engine.store_prompt(prompt)
    engine.store_prompt(other, first=20)
    engine.wait_hit(prompt, 32)
    engine.wait_hit(other, 32)
    stored = engine.worker.read(engine.blocks_for(32))
    request, hit = engine.lookup(prompt)
    assert hit == 32
    assert engine.scheduler.reset_cache() is True
    assert engine.hits(other) == 0
    target = engine.blocks_for(32, first=40)
    assert engine.worker.retrieve(request, prompt, 0, 32, target).ok
    assert same(engine.worker.read(target), stored)
    engine.end(request)
    assert engine.scheduler.reset_cache() is True
    assert engine.hits(prompt) == 0


@pytest.mark.ours("what an ended session had pinned stays pinned for minutes")
def test_end_of_session_gives_back_its_pins(server, engines):
    """A request that is aborted between its hit and its retrieve: a clear then removes what it had pinned."""
    engine = engines(server)
    prompt = tokens(32)
    engine.store_prompt(prompt)
    request, hit = engine.lookup(prompt)
    assert hit == 32
    engine.end(request)
    wait_until(lambda: engine.scheduler.reset_cache() and engine.hits(prompt) == 0, 60, "release of the pins")


def test_retrieve_without_lookup_fails(server, engines):
    """Nothing was promised, so nothing is written and the engine has to compute."""
    engine = engines(server)
    prompt = tokens(32)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 32)
    engine.scheduler.reset_cache()
    target = engine.blocks_for(32, first=40)
    before = engine.worker.read(target)
    outcome = engine.worker.retrieve(engine.new_request(), prompt, 0, 32, target)
    assert not outcome.ok
    assert same(engine.worker.read(target), before)


def test_many_requests_at_once(server, engines):
    """Seven stores in flight on one connection before any is polled, then seven hits held; bytes never mix."""
    engine = engines(server)
    prompts = [tokens(32) for _ in range(7)]
    for i, prompt in enumerate(prompts):
        engine.worker.submit_store(f"s{i}-{id(engine)}", prompt, 0, 32, engine.blocks_for(32, first=1 + 8 * i))
    for i in range(len(prompts)):
        assert engine.worker.finish_store(f"s{i}-{id(engine)}") is True
    stored = [engine.worker.read(engine.blocks_for(32, first=1 + 8 * i)) for i in range(7)]
    for prompt in prompts:
        engine.wait_hit(prompt, 32)
    requests = [engine.lookup(prompt) for prompt in prompts]
    assert [hit for _, hit in requests] == [32] * 7
    order = [3, 0, 6, 1, 5, 2, 4]
    for slot, i in enumerate(order):
        target = engine.blocks_for(32, first=1 + 8 * slot)
        assert engine.worker.retrieve(requests[i][0], prompts[i], 0, 32, target).ok
    for slot, i in enumerate(order):
        assert same(engine.worker.read(engine.blocks_for(32, first=1 + 8 * slot)), stored[i])
