"""Engines with chunk sizes of their own: they share a server and never an object, and no older server is asked for a size."""

import random
from contextlib import closing

import pytest
from conftest import CHUNK
from kvrig import tiers
from kvrig.waiting import wait_until
from kvtier import Client
from rig import tokens
from test_failures import works
from test_start import replace

SMALL, LARGE = 2 * CHUNK, 4 * CHUNK
BLOCKS = list(range(1, 17))
OTHERS = list(range(31, 47))


def holds(engine, fresh, prompt, expected):
    """Asserts that an engine finds the whole prompt, with these bytes."""
    request = fresh()
    assert engine.lookup(request, prompt) == len(prompt)
    engine.fill(OTHERS)
    assert engine.retrieve(request, prompt, 0, len(prompt), OTHERS) == set()
    assert engine.has(OTHERS, expected)
    engine.scheduler.end_session(request)


# proves: docs/clients.md#a-chunk-size-of-ones-own
@pytest.mark.parametrize("tier", [False, True], ids=["L1", "L2"])
def test_sizes_share_a_server_and_no_object(place, mode, fresh, tmp_path, tier):
    """Of one model and one prompt, in memory and in a tier of files: each size finds what was stored in it."""
    server = place.server(flags=tiers.fs(tmp_path / "tier") if tier else ())
    prompt, stored = tokens(LARGE, "sizes"), {}
    # The last one has the server's default.
    for seed, size in enumerate((SMALL, LARGE, None)):
        engine = place.engine(server, mode=mode, seed=seed, chunk_tokens=size)
        assert engine.scheduler.chunk_tokens == engine.worker.chunk_tokens == (size or CHUNK)
        assert engine.lookup(fresh(), prompt) == 0
        stored[size] = engine.read(BLOCKS)
        assert engine.store(fresh(), prompt, 0, LARGE, BLOCKS)
    if tier:
        tiers.settled(server)
    for size, expected in stored.items():
        # Forgets what other sizes have loaded, too.
        if tier:
            with closing(Client(server.url, timeout=60)) as client:
                client.clear(True).result()
        holds(place.engine(server, mode=mode, seed=7, chunk_tokens=size), fresh, prompt, expected)


# proves: docs/clients.md#a-chunk-size-of-ones-own
def test_scheduler_and_worker_that_disagree_load_nothing(place, mode, fresh):
    """Whichever has the larger chunks. Other workers of the scheduler's size are there, and have the prompt."""
    server = place.server()
    server.expect_trouble("chunk")
    prompt = tokens(LARGE, "disagree")
    engines = [place.engine(server, mode=mode, seed=seed, chunk_tokens=size) for seed, size in enumerate((SMALL, LARGE))]
    for engine in engines:
        assert engine.store(fresh(), prompt, 0, LARGE, BLOCKS)
    for one, other in (engines, engines[::-1]):
        request, before = fresh(), other.read(OTHERS)
        assert one.lookup(request, prompt) == LARGE
        assert other.retrieve(request, prompt, 0, LARGE, OTHERS) == set(OTHERS)
        assert other.has(OTHERS, before)
        one.scheduler.end_session(request)
    small, large = engines
    # A scheduler of small chunks asks for ranges that are no chunks of the other worker.
    assert not large.store(fresh(), tokens(SMALL, "part"), 0, SMALL, BLOCKS[:8])
    assert small.lookup(fresh(), tokens(SMALL, "part")) == 0


# proves: docs/clients.md#a-chunk-size-of-ones-own
def test_older_clients_and_servers_share_the_default_size(place, mode, fresh):
    """A key that names it is the key that does not."""
    server = place.server()
    older = place.older(server)
    before, after = place.engine(older, mode=mode, seed=1), place.engine(server, mode=mode, seed=2)
    assert (before.scheduler.client.named_chunk_tokens, after.scheduler.client.named_chunk_tokens) == (None, CHUNK)
    for number, (one, other) in enumerate(((before, after), (after, before))):
        prompt, expected = tokens(LARGE, number), one.read(BLOCKS)
        assert one.store(fresh(), prompt, 0, LARGE, BLOCKS)
        holds(other, fresh, prompt, expected)
    assert "lookup" in {name for name, _ in older.seen} and older.named == set()


# proves: docs/clients.md#a-chunk-size-of-ones-own
def test_size_outlives_servers_of_other_defaults(place, mode, fresh):
    """A server that reads sizes may return with any default; one that does not is unused until it has this one."""
    server = place.server()
    server.expect_trouble("instance|worker|register")
    proxy = place.older(server)
    hidden, proxy.hidden = proxy.hidden, set()
    engine = place.engine(proxy, mode=mode)
    works(engine, fresh)

    for chunk in (SMALL, 12):
        replace(server, proxy, engine, chunk)
        engine.healthy()
        works(engine, fresh)
        assert engine.scheduler.chunk_tokens == engine.worker.chunk_tokens == CHUNK
        assert {"lookup", "register_kv_cache" if mode == "lmcache_driven" else "register_kv_cache_engine_driven_context"} <= proxy.named
    proxy.hidden = hidden
    replace(server, proxy, engine, SMALL)
    sides = (engine.scheduler.client, engine.worker.client)
    wait_until(lambda: all(side.obstacle for side in sides), 60, "a reason on both sides")
    prompt, request = tokens(LARGE, "older"), fresh()
    assert not engine.store(request, prompt, 0, LARGE, BLOCKS) and engine.lookup(request, prompt) == 0
    assert engine.retrieve(request, prompt, 0, LARGE, BLOCKS) == set(BLOCKS)
    replace(server, proxy, engine, CHUNK)
    engine.healthy()
    works(engine, fresh)
    assert proxy.named == set(), "not even once"
    proxy.hidden = set()
    replace(server, proxy, engine, LARGE)
    engine.healthy()
    works(engine, fresh)


# proves: docs/vllm.md#chunk-size
@pytest.mark.parametrize("transfer", ["engine_driven", "lmcache_driven"])
def test_connectors_of_two_sizes(place, engines, transfer):
    """Each finds its own, in its own bytes; the one without the option has the server's default."""
    from vllm_rig import request, same

    server, prompt = place.server(), tokens(LARGE + 1, "connectors")
    sizes, found = {SMALL: 1, LARGE: 2, 0: 3}, {}
    for size, seed in sizes.items():
        options = {"kvtier.transfer_mode": transfer, "kvtier.chunk_tokens": size}
        first, second = engines(server, seed=seed, **options), engines(server, seed=9, **options)
        first.prefill(request(f"store-{size}", prompt), range(1, 18))
        first.wait_for_stores()
        req = request(f"load-{size}", prompt)
        assert second.match(req) == (LARGE, True)
        assert second.load(req, range(21, 38), 0, LARGE) == set()
        found[size] = second.read(list(range(21, 37)))
        assert same(found[size], first.read(list(range(1, 17))))
        second.finish(req)
    assert not same(found[SMALL], found[LARGE])


# Block sizes that divide no usual chunk, or that the server's chunk does not contain.
MODELS = {"one-group": [32], "two-groups": [8, 32], "window": [32, (32, 50)]}


# proves: docs/vllm.md#chunk-size
@pytest.mark.parametrize("model", MODELS)
def test_model_gets_the_chunk_that_it_needs(place, model):
    """With vLLM's own scheduler: the server's default of 16 tokens is less than a block, so chunks have 256."""
    from simulated import Simulation, full, window

    specs = [window(*each) if isinstance(each, tuple) else full(each) for each in MODELS[model]]
    server, source = place.server("lmcache_driven"), random.Random(model)
    asked = [[source.randrange(4000) for _ in range(length)] for length in (255, 257, 512, 600)]
    for name in ("first", "second"):
        # Enough blocks that no store is put off.
        with closing(Simulation(server, model, specs, blocks=2000, caching=False, step_tokens=100)) as engine:
            assert engine.scheduler.connector._scheduling.chunk == 256
            found = []
            for number, prompt in enumerate(asked):
                before = engine.external
                engine.add(f"{name}-{number}", prompt, answer=1)
                engine.run()
                found.append(engine.external - before)
                engine.finish_stores()
            assert engine.errors == 0
    # With a window the last token is no part of a hit.
    assert found == [0, 256, 256 if model == "window" else 512, 512]
