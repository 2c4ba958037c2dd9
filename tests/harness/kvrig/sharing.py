"""An engine of one LMCache release among those of others, which all store and load the same prompts: a process per release.

    PYTHONPATH=WHEEL:tests/harness python -m kvrig.sharing URL cpu|gpu

Reads commands from stdin, a line each, and answers each with a line: `store MODE NAME`, `load MODE NAME`. MODE is the
transfer mode of the engine (`lmcache_driven` or `engine_driven`). The prompt of a NAME and its bytes are the same
everywhere, but GPUs have them tokens-first, and CPUs heads-first. Each MODE has a model name of its own.
"""

import sys
from types import SimpleNamespace

import lmcache

from . import layouts
from .engine import Engine, Group, tokens

CHUNK = 16
LENGTH = 3 * CHUNK
TARGET = 30


def rows_of(worker, name, heads_first):
    """The bytes of a prompt in each layer, as `Worker.read` returns them."""
    rows = []
    for number, layer in enumerate(worker.read(range(LENGTH // layouts.BLOCK_TOKENS))):
        blocks, planes, *inner, width = layer.shape
        token, head = reversed(inner) if heads_first else inner
        raw = layouts.noise(f"{name}/{number}", blocks, planes * token * head * width)
        raw = raw.view(blocks, planes, token, head, width)
        rows.append(raw.transpose(2, 3).contiguous() if heads_first else raw)
    return rows


def store(engine, name, heads_first):
    """Store a prompt."""
    prompt = tokens(LENGTH, name)
    engine.worker.write(engine.blocks_for(LENGTH), rows_of(engine.worker, name, heads_first))
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, LENGTH)


def load(engine, name, heads_first):
    """Find a prompt and compare its bytes."""
    prompt, target = tokens(LENGTH, name), engine.blocks_for(LENGTH, TARGET)
    engine.worker.fill(target, 0xEE)
    request, hit = engine.lookup(prompt)
    assert hit == LENGTH, f"{hit} of {LENGTH} tokens"
    assert engine.worker.retrieve(request, prompt, 0, hit, target).ok
    engine.end(request)
    for ours, theirs in zip(engine.worker.read(target), rows_of(engine.worker, name, heads_first), strict=True):
        assert ours.equal(theirs), "other bytes"


def main():
    """Commands until stdin ends."""
    url, side = sys.argv[1:]
    if side == "gpu":
        from .torch_gpu import TorchEngine

        kind, layout = TorchEngine, "kv_first_nhd"
    else:
        kind, layout = Engine, "kv_first_hnd"
    print("LMCache", lmcache.__file__, flush=True)
    engines = {}
    for line in sys.stdin:
        what, mode, name = line.split()
        if mode not in engines:
            groups = [Group(layouts.layout(layout))]
            server = SimpleNamespace(url=url, chunk=CHUNK)
            engines[mode] = kind(server, mode, groups, f"test/{side}/{mode}", process=len(engines))
        {"store": store, "load": load}[what](engines[mode], name, side == "cpu")
        print("done", line.strip(), flush=True)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
