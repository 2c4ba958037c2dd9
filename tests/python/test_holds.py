"""Blocks of stores in flight are kept by references in vLLM's block pool: no request waits, nothing leaks, nothing is freed twice."""

import random
from types import SimpleNamespace

import pytest
from conftest import CHUNK
from kvrig import layouts
from kvrig.waiting import wait_until
from rig import BLOCK, tokens
from vllm_rig import request, same  # skips without vLLM

from kvtier.vllm import holds as holds_module
from kvtier.vllm import scheduling
from kvtier.vllm.holds import Holds
from vllm.v1.core.block_pool import BlockPool

PER_CHUNK = CHUNK // BLOCK


def block_pool(count, caching=True):
    """vLLM's own pool."""
    return BlockPool(num_gpu_blocks=count, enable_caching=caching, hash_block_size=BLOCK)


def ids(blocks):
    """The ids of blocks."""
    return [block.block_id for block in blocks]


class Clock:
    """A time that tests set."""

    now = 0.0

    def __call__(self):
        return self.now


# proves: docs/compare.md#kvtiers-connector-for-vllm
@pytest.mark.parametrize("seed", range(40))
def test_held_blocks_are_never_given_away(seed):
    """Random requests, ends, stores, reports and resets: what is held is in no queue, and at the end all is free."""
    source, size = random.Random(seed), 20 + seed * 3
    pool = block_pool(size, caching=seed % 2 == 0)
    holds, running, stores, number = Holds(pool), {}, {}, 0
    free = pool.get_num_free_blocks()
    assert free == size - 1
    for _ in range(400):
        action = source.choice(["begin", "store", "end", "report", "again", "reset"])
        if action == "begin" and pool.get_num_free_blocks() >= 5:
            number += 1
            running[number] = pool.get_new_blocks(source.randint(1, 5))
            held = {block for blocks in stores.values() for block in blocks}
            assert held.isdisjoint(ids(running[number])), "a store reads it"
        elif action == "store" and running:
            blocks = ids(running[source.choice(list(running))])[: holds.free_capacity(0)]
            number += 1
            # The null block needs no hold.
            holds.take(number, f"r{number}", [[0, *blocks], [0]])
            stores[number] = blocks
        elif action == "end" and running:
            pool.free_blocks(reversed(running.pop(source.choice(list(running)))))
        elif action == "report" and stores:
            ended = source.choice(list(stores))
            del stores[ended]
            holds.release(ended)
        elif action == "again":
            holds.release(source.randint(0, number + 1) if not stores else -1)
        elif action == "reset":
            done = pool.reset_prefix_cache()
            assert done is (not running)
            if done:
                stores.clear()
                assert len(holds) == 0
        assert len({block for blocks in stores.values() for block in blocks}) <= holds.limit
        expected = {block for blocks in stores.values() for block in blocks} | {
            block for blocks in running.values() for block in ids(blocks)
        }
        assert pool.get_num_free_blocks() == free - len(expected)
        for block in expected:
            readers = sum(block in blocks for blocks in stores.values())
            assert pool.blocks[block].ref_cnt == readers + sum(block in ids(blocks) for blocks in running.values())
    for blocks in running.values():
        pool.free_blocks(reversed(blocks))
    holds.release_all()
    assert pool.get_num_free_blocks() == free
    assert all(block.ref_cnt == 0 for block in pool.blocks)
    assert len(set(ids(pool.get_new_blocks(free)))) == free, "each is in the queue once"


def test_block_of_no_request_is_refused():
    """Its contents are not the store's. Nothing of the store is held then."""
    pool = block_pool(8)
    holds, (mine,) = Holds(pool), pool.get_new_blocks(1)
    for wrong in (mine.block_id + 1, 8, -1):
        with pytest.raises(RuntimeError, match="belongs to no request"):
            holds.take(1, "a", [[mine.block_id, wrong]])
    assert (len(holds), mine.ref_cnt) == (0, 1)
    holds.take(1, "a", [[mine.block_id]])
    with pytest.raises(RuntimeError, match="already"):
        holds.take(1, "a", [[mine.block_id]])
    assert mine.ref_cnt == 2


def test_soon_free():
    """Only while the oldest hold is young, and only if a block waits for nothing else."""
    pool, clock = block_pool(40), Clock()
    holds = Holds(pool, clock)
    mine, others = pool.get_new_blocks(2), pool.get_new_blocks(2)
    assert not holds.soon_free()
    holds.take(1, "a", [ids(mine)])
    holds.take(2, "b", [ids(others)])
    assert not holds.soon_free(), "their requests run"
    pool.free_blocks(others)
    assert holds.soon_free()
    clock.now = 0.06
    assert not holds.soon_free(), "the oldest is not young"
    assert holds.older_than(0.05) == {1, 2} and holds.older_than(0.07) == set()
    holds.release(1)
    holds.release(2)
    assert not holds.soon_free()


@pytest.mark.parametrize(("count", "limit"), [(16, 8), (100, 50), (500, 64), (5000, 500)])
def test_limit(count, limit):
    """A tenth of the pool; of small ones up to 64 blocks, and at most half. One chunk fits in any case, up to half."""
    holds = Holds(pool := block_pool(count))
    assert holds.limit == holds.free_capacity(1) == limit
    assert holds.free_capacity(count // 2) == holds.free_capacity(count) == count // 2
    holds.take(1, "a", [ids(pool.get_new_blocks(3))])
    assert (holds.free_capacity(1), holds.free_capacity(count)) == (limit - 3, count // 2 - 3)


def test_pools_that_cannot_hold():
    """Those of earlier or later releases."""
    pool = block_pool(4)
    assert Holds.of(pool) is not None and pool.get_num_free_blocks() == 3
    assert Holds.of(SimpleNamespace()) is None

    class Tuples(BlockPool):
        def touch(self, blocks):
            for group in blocks:
                super().touch([*group])

    class Uncounted(BlockPool):
        def touch(self, blocks):
            pass

    class NullUncounted(BlockPool):
        """As vLLM 0.33 has it."""

        def touch(self, blocks):
            super().touch([block for block in blocks if not block.is_null])

    assert Holds.of(NullUncounted(num_gpu_blocks=4, enable_caching=True, hash_block_size=BLOCK)) is not None
    for kind in (Tuples, Uncounted):
        assert Holds.of(kind(num_gpu_blocks=4, enable_caching=True, hash_block_size=BLOCK)) is None


class Pooled:
    """An engine whose scheduler gives blocks of vLLM's pool away."""

    def __init__(self, engine, count=24):
        self.engine, self.pool, self.blocks = engine, block_pool(count), {}
        self.free = self.pool.get_num_free_blocks()
        engine.scheduler.bind_gpu_block_pool(self.pool)
        self.waited = []
        adapter = engine.workers[0]._adapter
        wait = adapter.wait_for_stores
        adapter.wait_for_stores = lambda names, patience: self.waited.append(names) or wait(names, patience)

    def prefill(self, name, prompt, scheduled=None, **step):
        """A request's first step."""
        made = request(name, prompt)
        assert self.engine.match(made)[0] == 0
        self.blocks[name] = self.pool.get_new_blocks(-(-len(prompt) // BLOCK))
        mine = ids(self.blocks[name])
        self.engine.allocate(made, mine, 0)
        self.engine.step(new=[(made, mine, 0, scheduled or len(prompt))], **step)
        return made, mine

    def release(self, name):
        """What vLLM does at a request's end and at its preemption."""
        self.pool.free_blocks(reversed(self.blocks.pop(name)))

    def all_free(self):
        """Steps until nothing is in flight; then all blocks are where they were."""
        scheduler = self.engine.scheduler
        wait_until(lambda: not scheduler.has_pending_push_work() or self.engine.step() and False, 60, "the stores' ends")
        assert self.pool.get_num_free_blocks() == self.free
        assert self.engine.scheduler.errors.take() == 0


def test_end_and_preemption_wait_for_nothing(place, engines):
    """While stores go on: the request's blocks are free at once except those that are read, which hold their bytes."""
    pooled = Pooled(engine := engines(place.server()))
    prompt, other = tokens(2 * CHUNK + BLOCK, "held"), tokens(CHUNK + 1, "other")
    # The worker does not report ends: as a store that takes long.
    adapter = engine.workers[0]._adapter
    take = adapter.take_ended_stores
    adapter.take_ended_stores = list
    stored, mine = pooled.prefill("stored", prompt)
    assert engine.finish(stored) is False, "vLLM frees its blocks at once"
    pooled.release("stored")
    preempted, theirs = pooled.prefill("preempted", other)
    engine.step(preempted=["preempted"])
    pooled.release("preempted")
    assert not any(pooled.waited)
    held = set(mine[: 2 * PER_CHUNK]) | set(theirs[:PER_CHUNK])
    assert pooled.pool.get_num_free_blocks() == pooled.free - len(held)
    # A request that gets all the rest writes over no block that is read.
    rest = pooled.pool.get_new_blocks(pooled.pool.get_num_free_blocks())
    assert held.isdisjoint(ids(rest))
    assert engine.scheduler.has_pending_push_work()
    pooled.pool.free_blocks(rest)
    adapter.take_ended_stores = take
    pooled.all_free()
    assert not engine.scheduler.has_pending_push_work() and not engine.scheduler.has_pending_block_frees()


def test_ends_are_reported_with_a_later_step(place, engines):
    """vLLM before 0.24 makes no empty steps: blocks stay held while the engine is idle, and the next request's step frees them."""
    pooled = Pooled(engine := engines(place.server()))
    adapter = engine.workers[0]._adapter
    take = adapter.take_ended_stores
    adapter.take_ended_stores = list
    stored, mine = pooled.prefill("a", tokens(CHUNK + 1, "idle"))
    assert engine.finish(stored) is False
    pooled.release("a")
    wait_until(lambda: adapter.get_finished(set()) and adapter._ended_stores, 60, "the store's end")
    adapter.take_ended_stores = take
    held = [pooled.pool.blocks[block] for block in mine[:PER_CHUNK]]
    assert all(block.ref_cnt == 1 for block in held)
    pooled.prefill("b", tokens(BLOCK, "next"))
    assert all(block.ref_cnt == 0 for block in held)
    pooled.release("b")
    pooled.all_free()


def test_frozen_server_keeps_no_block(place, engines):
    """Stores end at their deadline, and then their blocks are free; no step waits for a preempted request."""
    server = place.server()
    server.expect_trouble("store|worker|transfer|late|deadline")
    pooled = Pooled(engine := engines(server, **{"kvtier.timeout": 2, "kvtier.store_timeout": 1}))
    prompt = tokens(2 * CHUNK + 1, "frozen")
    made = request("a", prompt)
    assert engine.match(made) == (0, False)
    mine = ids(pooled.pool.get_new_blocks(2 * PER_CHUNK + 1))
    engine.allocate(made, mine, 0)
    with server.frozen():
        engine.step(new=[(made, mine, 0, len(prompt))])
        engine.step(preempted=["a"])
        assert not any(pooled.waited)
        pooled.pool.free_blocks([pooled.pool.blocks[block] for block in mine])
        pooled.all_free()


# proves: docs/compare.md#kvtiers-connector-for-vllm
def test_lost_report_of_an_end(place, engines, monkeypatch):
    """The workers are asked, and nothing is released while one of them reads."""
    pooled = Pooled(engine := engines(place.server(), ranks=2))
    worker, adapter = engine.workers[1], engine.workers[1]._adapter
    take = adapter.take_ended_stores
    monkeypatch.setattr(scheduling, "_LATE", -1000)
    # This worker's store goes on.
    adapter.take_ended_stores = list
    req, mine = pooled.prefill("a", tokens(CHUNK + 1, "lost"))
    first = engine.workers[0]
    wait_until(lambda: engine.step().metadata.asked == {0} and not first._stores, 60, "the first worker's end")
    for _ in range(3):
        assert engine.step().metadata.asked == {0}, "asked again"
    assert engine.scheduler.has_pending_push_work()
    assert all(pooled.pool.blocks[block].ref_cnt == 2 for block in mine[:PER_CHUNK])
    # It ends, and the report is lost.
    worker._stores.clear()
    engine.finish(req)
    pooled.release("a")
    pooled.all_free()
    adapter.take_ended_stores = take
    assert engine.scheduler._scheduling.in_flight_stores == {}
    # The late report is no error, and frees nothing twice.
    engine.step()
    assert engine.scheduler.errors.take() == 0 and pooled.pool.get_num_free_blocks() == pooled.free


def test_reset_overtakes_stores(place, engines):
    """It succeeds; the next step waits for the stores, whose blocks anyone may get now."""
    pooled = Pooled(engine := engines(place.server()))
    adapter = engine.workers[0]._adapter
    take, adapter.take_ended_stores = adapter.take_ended_stores, list
    req, mine = pooled.prefill("a", tokens(CHUNK + 1, "overtaken"))
    assert pooled.pool.reset_prefix_cache() is False, "the request runs"
    assert all(pooled.pool.blocks[block].ref_cnt == 2 for block in mine[:PER_CHUNK]), "so its store holds its blocks"
    engine.finish(req)
    pooled.release("a")
    assert pooled.pool.reset_prefix_cache() is True
    assert pooled.pool.get_num_free_blocks() == pooled.free
    assert engine.step().metadata.preempted == {"a"} and {"a"} in pooled.waited
    assert engine.step().metadata.preempted == set()
    adapter.take_ended_stores = take
    engine.wait_for_stores()
    pooled.all_free()


def test_stores_beyond_the_limit_are_put_off(place, engines):
    """A later step of the request stores them, and they are counted once."""
    pooled = Pooled(engine := engines(place.server()), count=2 * (3 * PER_CHUNK) + 1)
    scheduler = engine.scheduler._scheduling
    assert scheduler.holds.limit == 3 * PER_CHUNK
    adapter = engine.workers[0]._adapter
    take, adapter.take_ended_stores = adapter.take_ended_stores, list
    prompt = tokens(5 * CHUNK + 1, "much")
    req, mine = pooled.prefill("a", prompt)
    assert [store for store in scheduler.in_flight_stores] == [0] and scheduler.tracked["a"].stored_tokens == 3 * CHUNK
    assert engine.step(cached=[(req, None, len(prompt), 1)]).metadata.stores == []
    assert engine.scheduler.get_kv_connector_stats().data["put_off_tokens"] == 2 * CHUNK
    adapter.take_ended_stores = take
    engine.wait_for_stores()
    (move,) = engine.step(cached=[(req, None, len(prompt), 1)]).metadata.stores
    assert (move.start, move.end, move.block_ids) == (3 * CHUNK, 5 * CHUNK, [mine[3 * PER_CHUNK : 5 * PER_CHUNK]])
    assert "put_off_tokens" not in (engine.scheduler.get_kv_connector_stats() or SimpleNamespace(data={})).data
    expected = engine.read(mine[: 5 * PER_CHUNK])
    engine.finish(req)
    pooled.release("a")
    pooled.all_free()
    again = request("b", prompt)
    assert engine.match(again) == (5 * CHUNK, True)
    for tensor in engine.tensors[0]:
        layouts.fill_blocks(tensor, engine.layout.block_axis, mine, 0)
    blocks = ids(pooled.pool.get_new_blocks(5 * PER_CHUNK + 1))
    assert engine.load(again, blocks, 0, 5 * CHUNK) == set()
    assert same(engine.read(blocks[: 5 * PER_CHUNK]), expected)


def test_chunk_beyond_the_limit_is_stored_alone(place, engines, monkeypatch, caplog):
    """Up to half of the pool; beyond that the log has why nothing is stored."""
    monkeypatch.setattr(holds_module, "_SMALL", PER_CHUNK)
    large = {"kvtier.chunk_tokens": 2 * CHUNK}
    pooled = Pooled(engine := engines(place.server(), **large), count=5 * PER_CHUNK)
    assert engine.scheduler._scheduling.holds.limit == PER_CHUNK
    prompt = tokens(2 * CHUNK + 1, "large")
    pooled.prefill("a", prompt)
    engine.wait_for_stores()
    assert engine.match(request("b", prompt)) == (2 * CHUNK, True)
    assert "nothing is stored" not in caplog.text
    pooled = Pooled(engine := engines(place.servers[0], **large), count=4 * PER_CHUNK - 1)
    pooled.prefill("c", tokens(2 * CHUNK + 1, "larger"))
    assert engine.scheduler._scheduling.in_flight_stores == {}
    assert f"a chunk of {2 * CHUNK} tokens has {2 * PER_CHUNK} blocks" in caplog.text


def test_shutdown_releases_all(place, engines):
    """Once; the pool may live on."""
    pooled = Pooled(engine := engines(place.server()))
    engine.workers[0]._adapter.take_ended_stores = list
    _, mine = pooled.prefill("a", tokens(CHUNK + 1, "shutdown"))
    assert pooled.pool.blocks[mine[0]].ref_cnt == 2
    engine.scheduler.shutdown()
    assert pooled.pool.blocks[mine[0]].ref_cnt == 1
