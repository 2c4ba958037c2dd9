"""More data than memory: stores keep succeeding, old entries go, what hits is right, what is pinned stays."""

import pytest
import torch
from kvrig.engine import Group, tokens
from kvrig.layouts import layout

pytestmark = pytest.mark.ours("it frees space once per second, not when a store needs it")

# 96 KiB per chunk; 20 MiB hold about 200 of the 270 chunks stored below.
BIG = layout("kv_first_nhd", heads=8, size=64)
L1_GB = 20 / 1024


# proves: docs/compare.md#l1-in-host-memory
# proves: docs/troubleshoot.md#the-cache-is-full
@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_shm", "engine_pickle"])
def test_newest_prompts_survive(serve, engines, mode):
    """After far more stores than fit, the newest prompt hits whole, the oldest not, and no bytes are mixed up."""
    server = serve(mode, l1_gb=L1_GB)
    engine = engines(server, groups=[Group(BIG)])
    pinned, prompts = tokens(48), []
    engine.store_prompt(pinned, first=40)
    held, hit = engine.lookup(pinned)
    assert hit == 48
    kept = engine.worker.read(engine.blocks_for(48, 40))
    for i in range(90):
        prompt = tokens(48)
        engine.worker.fill(engine.blocks_for(48), value=i)
        engine.store_prompt(prompt)
        prompts.append(prompt)

    assert engine.hits(prompts[-1]) == 48
    assert engine.hits(prompts[0]) < 48
    found = 0
    for i, prompt in enumerate(prompts):
        request, hit = engine.lookup(prompt)
        if hit:
            found += 1
            blocks = engine.blocks_for(hit, 20)
            engine.worker.fill(blocks, 255)
            assert engine.worker.retrieve(request, prompt, 0, hit, blocks).ok
            assert all((layer == i).all() for layer in engine.worker.read(blocks)), f"prompt {i} got other bytes"
        engine.end(request)
    assert 20 <= found < 90, f"{found} of 90 prompts hit"

    blocks = engine.blocks_for(48, 20)
    assert engine.worker.retrieve(held, pinned, 0, 48, blocks).ok
    assert all(torch.equal(a, b) for a, b in zip(engine.worker.read(blocks), kept, strict=True))
    engine.end(held)
