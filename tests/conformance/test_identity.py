"""What shares KV with what: salts, models, ranks, engines, and the two transfer modes."""

import itertools
import threading

import pytest
import torch
from kvrig.engine import Group, tokens
from kvrig.layouts import layout

MODES = ["lmcache_driven", "engine_shm", "engine_pickle"]


def same(ours, theirs):
    """Whether two lists of block bytes are equal."""
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def load(engine, prompt, target, salt="", worker=None):
    """Look up and retrieve a prompt's whole chunks into `target`; the bytes that arrived."""
    worker = worker or engine.worker
    request, hit = engine.lookup(prompt, salt=salt)
    assert hit == len(prompt) // engine.chunk * engine.chunk
    worker.fill(target)
    assert worker.retrieve(request, prompt, 0, hit, target, salt=salt).ok
    engine.end(request)
    return worker.read(target)


@pytest.fixture(params=MODES)
def server(request, serve):
    """A server in each of the three transfer modes."""
    return serve(request.param)


# proves: docs/compare.md#hits
# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_salts_never_share(server, engines):
    """The same tokens under three salts are three entries; an unknown salt sees none of them."""
    engine = engines(server)
    prompt = tokens(32)
    salts = {"": 1, "alice": 10, "bob": 20}
    for salt, first in salts.items():
        assert engine.hits(prompt, salt) == 0
        engine.store_prompt(prompt, first=first, salt=salt)
        engine.wait_hit(prompt, 32, salt)
    assert engine.hits(prompt, "carol") == 0
    assert engine.hits(prompt, "alic") == 0
    for salt, first in salts.items():
        stored = engine.worker.read(engine.blocks_for(32, first))
        assert same(load(engine, prompt, engine.blocks_for(32, 40), salt), stored)


@pytest.mark.parametrize("salt", ["a" * 128, "Zoë-日本語", "a b%20;:?#[]{}'\"", "..", "_default"])
def test_unusual_salts(server, engines, salt):
    """Every salt the protocol allows works."""
    engine = engines(server)
    prompt = tokens(32)
    engine.store_prompt(prompt, salt=salt)
    engine.wait_hit(prompt, 32, salt)
    assert engine.hits(prompt) == 0
    stored = engine.worker.read(engine.blocks_for(32))
    assert same(load(engine, prompt, engine.blocks_for(32, 40), salt), stored)


# proves: docs/compare.md#hits
def test_models_never_share(server, engines):
    """Two models with the same shape and prompt do not see each other."""
    one, two = engines(server, model="family/one"), engines(server, model="family/two", seed=1)
    prompt = tokens(32)
    one.store_prompt(prompt)
    one.wait_hit(prompt, 32)
    assert two.hits(prompt) == 0
    two.store_prompt(prompt)
    two.wait_hit(prompt, 32)
    for engine in (one, two):
        stored = engine.worker.read(engine.blocks_for(32))
        assert same(load(engine, prompt, engine.blocks_for(32, 40)), stored)


# proves: docs/compare.md#hits
# proves: docs/identity.md#the-fingerprint
def test_second_engine_gets_what_the_first_stored(server, engines):
    """Two engines of one model share; the cache outlives the engine that filled it."""
    first, second = engines(server), engines(server, seed=1)
    prompt = tokens(48)
    first.store_prompt(prompt)
    first.wait_hit(prompt, 48)
    stored = first.worker.read(first.blocks_for(48))
    assert same(load(second, prompt, second.blocks_for(48, 10)), stored)
    first.worker.close()  # unregisters
    assert same(load(second, prompt, second.blocks_for(48, 30)), stored)
    other = tokens(32)
    second.store_prompt(other)
    second.wait_hit(other, 32)


def test_every_rank_has_its_own_bytes(server, engines):
    """Tensor parallel: a chunk hits when all ranks have stored it, and each rank gets its own back."""
    engine = engines(server, ranks=2)
    prompt = tokens(32)
    request = engine.new_request()
    blocks = engine.blocks_for(32)
    assert engine.workers[0].store(request, prompt, 0, 32, blocks) is True
    assert engine.hits(prompt) == 0
    assert engine.workers[1].store(request, prompt, 0, 32, blocks) is True
    engine.end(request)
    engine.wait_hit(prompt, 32)
    stored = [worker.read(blocks) for worker in engine.workers]
    assert not same(*stored)
    request, hit = engine.lookup(prompt)
    assert hit == 32
    target = engine.blocks_for(32, first=30)
    for worker in engine.workers:
        assert worker.retrieve(request, prompt, 0, 32, target).ok
    engine.end(request)
    for worker, bytes_stored in zip(engine.workers, stored, strict=True):
        assert same(worker.read(target), bytes_stored)


def test_mla_ranks_read_one_object(server, engines):
    """MLA: rank 0 stores, all three ranks retrieve what one lookup pinned, even when the cache is cleared between."""
    engine = engines(server, ranks=3, mla=True)
    prompt = tokens(32)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 32)
    stored = engine.worker.read(engine.blocks_for(32))
    request, hit = engine.lookup(prompt)
    assert hit == 32
    target = engine.blocks_for(32, first=30)
    for worker in engine.workers:
        assert engine.scheduler.reset_cache() is True
        assert worker.retrieve(request, prompt, 0, 32, target).ok
        assert same(worker.read(target), stored)
    engine.end(request)


def test_engines_at_the_same_time(server, engines):
    """Three engines store and load their own prompts in parallel threads; every load is checked."""
    crew = [engines(server, seed=i) for i in range(3)]
    failures = []

    def work(engine):
        try:
            for _ in range(5):
                prompt = tokens(32)
                engine.store_prompt(prompt)
                engine.wait_hit(prompt, 32)
                stored = engine.worker.read(engine.blocks_for(32))
                assert same(load(engine, prompt, engine.blocks_for(32, 30)), stored)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(engine,)) for engine in crew]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def own_bytes_alone(server, engines, first, second):
    """Neither engine hits what the other stored, and each loads its own."""
    # Lookups are for all layouts that are registered, so the second comes later.
    one = engines(server, **first)
    prompt = tokens(64)
    one.store_prompt(prompt)
    one.wait_hit(prompt, 64)
    server.expect_trouble("different KV layouts")
    two = engines(server, **second, seed=1)
    assert two.hits(prompt) == 0
    two.store_prompt(prompt)
    two.wait_hit(prompt, 64)
    for engine in (one, two):
        stored = engine.worker.read(engine.blocks_for(64))
        assert same(load(engine, prompt, engine.blocks_for(64, 20)), stored)


# proves: docs/compare.md#engine_driven
@pytest.mark.ours("either reads the other's objects")
@pytest.mark.parametrize("name", ["kv_first_nhd", "fused_hnd", "mla"])
@pytest.mark.parametrize("modes", [("lmcache_driven", "engine_driven"), ("engine_driven", "lmcache_driven")], ids="-to-".join)
def test_modes_share_nothing(serve, engines, name, modes):
    """A worker that copies does not say in which format its pages are."""
    group = {"groups": [Group(layout(name))], "mla": name == "mla"}
    own_bytes_alone(serve("both"), engines, *({"mode": mode, **group} for mode in modes))


# proves: docs/compare.md#lmcache_driven-in-cpu-memory
@pytest.mark.ours("it takes pages in CPU memory for what their shape says")
@pytest.mark.parametrize("names", itertools.permutations(["kv_first_nhd", "kv_first_hnd", "blocks_first_nhd"], 2), ids="-to-".join)
def test_cpu_pages_of_other_formats_share_nothing(serve, engines, names):
    """Attention kernels for CPUs pack a page."""
    own_bytes_alone(serve("lmcache_driven"), engines, *({"groups": [Group(layout(name))]} for name in names))
