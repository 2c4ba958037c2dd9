"""Hybrid models: several layer groups, block spaces of their own, sliding windows."""

import pytest
import torch
from kvrig import gpu
from kvrig.engine import Group, tokens
from kvrig.layouts import layout

MODES = ["lmcache_driven", gpu.MODE]
WINDOWS = ("--windowed-clients", "allow")


def same(ours, theirs):
    """Whether two lists of block bytes are equal."""
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def groups(window=-1):
    """A full-attention group and one of other geometry that may have a sliding window (in tokens)."""
    return [
        Group(layout("kv_first_nhd", heads=2, size=8), layers=3, engine_group=0),
        Group(layout("kv_first_nhd", heads=4, size=8), layers=2, engine_group=1, window=window),
    ]


# proves: docs/compare.md#lmcache_driven-in-cpu-memory
@pytest.mark.parametrize("mode", MODES)
def test_each_group_has_its_own_blocks(serve, engines, mode):
    """Store and retrieve name other blocks in each group; both groups come back."""
    engine = engines(serve(mode), groups=groups())
    prompt = tokens(64)
    source = [engine.blocks_for(64, 1), engine.blocks_for(64, 20)]
    target = [engine.blocks_for(64, 40), engine.blocks_for(64, 3)]
    request = engine.new_request()
    assert engine.worker.store(request, prompt, 0, 64, source) is True
    engine.end(request)
    engine.wait_hit(prompt, 64)
    stored = [engine.worker.read(source[g], group=g) for g in (0, 1)]
    untouched = engine.worker.read(engine.blocks_for(4, 60))
    for g in (0, 1):
        engine.worker.fill(target[g], group=g)
    request, hit = engine.lookup(prompt)
    assert hit == 64
    assert engine.worker.retrieve(request, prompt, 0, 64, target).ok
    engine.end(request)
    for g in (0, 1):
        assert same(engine.worker.read(target[g], group=g), stored[g])
    assert same(engine.worker.read(engine.blocks_for(4, 60)), untouched)


@pytest.mark.parametrize("mode", MODES)
def test_mixed_formats_and_types_in_one_registration(serve, engines, mode):
    """Split K/V in bf16, MLA in fp16, and split K/V in uint8, all drawing on one block space."""
    mixed = [
        Group(layout("kv_first_nhd", heads=2, size=8), layers=2),
        Group(layout("mla", heads=1, size=24, dtype=torch.float16), layers=3),
        Group(layout("kv_first_nhd", heads=1, size=16, dtype=torch.uint8), layers=1),
    ]
    engine = engines(serve(mode), groups=mixed)
    prompt = tokens(48)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 48)
    stored = engine.worker.read(engine.blocks_for(48))
    target = engine.blocks_for(48, 30)
    request, _ = engine.lookup(prompt)
    assert engine.worker.retrieve(request, prompt, 0, 48, target).ok
    engine.end(request)
    assert same(engine.worker.read(target), stored)


# proves: docs/compare.md#lmcache_driven-in-cpu-memory
@pytest.mark.parametrize("mode", MODES)
def test_sliding_window_needs_only_its_tail(serve, engines, mode):
    """A window of 32 tokens (2 chunks): the engine has kept only the last blocks of the windowed group.

    The blocks that slid out are the null block, 0, and are not stored. The whole prompt still hits, because its
    last window is there; a shorter prompt misses, because its window is not.
    """
    engine = engines(serve(mode, flags=WINDOWS), groups=groups(window=32))
    prompt = tokens(80)
    full, windowed = engine.blocks_for(80, 1), engine.blocks_for(80, 30)
    kept = [0] * 12 + windowed[12:]  # chunks 3 and 4 of 0..4
    request = engine.new_request()
    assert engine.worker.store(request, prompt, 0, 80, [full, kept]) is True
    engine.end(request)
    engine.wait_hit(prompt, 80)
    assert engine.hits(prompt[:64]) == 0
    assert engine.hits(prompt[:72]) == 0
    assert engine.hits(prompt + tokens(32)) == 80

    stored_full = engine.worker.read(full, group=0)
    stored_tail = engine.worker.read(windowed[12:], group=1)
    target_full, target_tail = engine.blocks_for(80, 22), engine.blocks_for(32, 50)
    engine.worker.fill(target_tail, group=1)
    null_block = engine.worker.read([0], group=1)
    request, hit = engine.lookup(prompt)
    assert hit == 80
    assert engine.worker.retrieve(request, prompt, 0, 80, [target_full, [0] * 12 + target_tail]).ok
    engine.end(request)
    assert same(engine.worker.read(target_full, group=0), stored_full)
    assert same(engine.worker.read(target_tail, group=1), stored_tail)
    assert same(engine.worker.read([0], group=1), null_block), "the null block was written"


def test_layers_of_one_object_are_stored_together_or_not_at_all(serve, engines):
    """One object for all layers: a chunk that slid out of a window has no data of some of them.

    Stored all the same, it would give a later and shorter prompt what happened to be in the null block.
    """
    engine = engines(serve(flags=("--no-separate-object-groups", *WINDOWS)), groups=groups(window=32))
    prompt = tokens(80)
    full, windowed = engine.blocks_for(80, 1), engine.blocks_for(80, 30)
    request = engine.new_request()
    assert engine.worker.store(request, prompt, 0, 80, [full, [0] * 5 + windowed[5:]]) is True
    engine.end(request)
    assert engine.hits(prompt) == 0
    request = engine.new_request()
    assert engine.worker.store(request, prompt, 0, 80, [full, windowed]) is True
    engine.end(request)
    engine.wait_hit(prompt, 80)


@pytest.mark.parametrize("stored", [16, 48])
def test_group_that_lacks_blocks_is_refused(serve, engines, stored):
    """Fewer blocks than the range needs in one group: the store fails and nothing becomes visible."""
    server = serve()
    server.expect_trouble(r"block")
    engine = engines(server, groups=groups())
    prompt = tokens(64)
    request = engine.new_request()
    short = [engine.blocks_for(64, 1), engine.blocks_for(stored, 20)]
    assert engine.worker.store(request, prompt, 0, 64, short) is False
    engine.end(request)
    assert engine.hits(prompt) == 0


# proves: docs/clients.md#a-model-has-sliding-windows-or-recurrent-states
@pytest.mark.ours("LMCache's server serves windows")
def test_windows_are_not_served_unless_allowed(serve, engines):
    """The worker registers and goes on without a cache: its stores get a "no", its lookups 0, and the log says why."""
    server = serve()
    server.expect_trouble(r"registered without a cache: some of its layers have sliding windows")
    engine = engines(server, groups=groups(window=32))
    prompt = tokens(64)
    request = engine.new_request()
    assert engine.worker.store(request, prompt, 0, 64, [engine.blocks_for(64, 1), engine.blocks_for(64, 20)]) is False
    engine.end(request)
    assert engine.hits(prompt) == 0
