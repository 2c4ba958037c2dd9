"""SGLang's own radix tree, host pools and cache controller with KvTierStorage, on CPU tensors."""

import random

import pytest
from rig import PAGE
from test_linker import equal

TOKENS = random.Random(2).sample(range(1 << 16), 20)


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_stored_pages_are_loaded_after_a_reset(serve, model, engines, layout, kind):
    """Write-through to the host pool and the storage, reset, prefetch, load: the same bytes."""
    engine = engines(serve(), model("a"), kind, layout)
    computed = engine.compute(TOKENS)
    assert engine.settle() == [True] * (len(TOKENS) // PAGE)
    engine.reset()
    engine.host.kv_buffer.zero_()
    assert engine.match(TOKENS)[1] == 0
    request, hit = engine.prefetch(TOKENS)
    assert hit == len(TOKENS)
    slots = engine.load(request)
    assert len(slots) == len(TOKENS) and equal(engine.read(slots), computed)
