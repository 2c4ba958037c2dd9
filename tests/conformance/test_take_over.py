"""A server takes over from another one; the unmodified client notices nothing."""

import contextlib
import itertools
import threading

import pytest
import torch
from kvrig import gpu, tiers
from kvrig.engine import tokens
from kvrig.server import INSTANCE

MODES = ["lmcache_driven", "engine_shm", "engine_pickle", gpu.MODE]
PROMPT = 32


@pytest.fixture
def lasting(serve, tmp_path):
    """Starts a server that another one can take over from."""

    def start(mode):
        return serve(mode, flags=["--l1-restore", "on", "--state-dir", str(tmp_path), "--instance-id", INSTANCE])

    return start


@pytest.fixture
def lasting_with_tier(serve, tmp_path):
    """The same with a directory as a tier, and that directory."""

    def start(mode):
        directory = tmp_path / "tier"
        flags = ["--l1-restore", "on", "--state-dir", str(tmp_path / "state"), "--instance-id", INSTANCE]
        return serve(mode, flags=[*flags, *tiers.fs(directory)]), directory

    return start


def round_trip(engine, between=lambda: None):
    """Stores a prompt, looks it up, and after `between` loads it into other blocks: the bytes are right. Returns the prompt."""
    prompt = tokens(PROMPT)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, PROMPT)
    stored = engine.worker.read(engine.blocks_for(PROMPT))
    request, hit = engine.lookup(prompt)
    assert hit == PROMPT
    between()
    target = engine.blocks_for(PROMPT, 30)
    engine.worker.fill(target)
    assert engine.worker.retrieve(request, prompt, 0, hit, target).ok
    loaded = engine.worker.read(target)
    engine.end(request)
    assert all(torch.equal(a, b) for a, b in zip(loaded, stored, strict=True))
    return prompt


@contextlib.contextmanager
def working(work):
    """Calls `work(number)`, from 1000 on, on a thread of its own, until the block ends: each must succeed. Yields those that have."""
    stop, done, failed = threading.Event(), [], []

    def loop():
        try:
            for number in itertools.count(1000):
                if stop.is_set():
                    return
                work(number)
                done.append(number)
        except BaseException as problem:  # noqa: BLE001
            failed.append(problem)

    worker = threading.Thread(target=loop)
    worker.start()
    try:
        yield done
    finally:
        stop.set()
        worker.join()
    assert not failed and done, failed


@pytest.mark.ours("LMCache's server cannot hand over")
@pytest.mark.parametrize("mode", MODES)
def test_client_notices_no_take_over(lasting, engines, mode):
    """Lookups before and retrieves after, stores and hits, and no other registration."""
    server = lasting(mode)
    engine = engines(server, heartbeat=2.0, mq_timeout=60)
    registered = engine.worker.adapter.transfer_ctx
    for _ in range(4):
        prompt = round_trip(engine, between=server.take_over)
        assert engine.hits(prompt) == PROMPT
        assert engine.worker.adapter.is_healthy
    assert engine.worker.adapter.transfer_ctx is registered


@pytest.mark.ours("LMCache's server cannot hand over")
@pytest.mark.parametrize("mode", MODES)
def test_every_answer_is_right_while_servers_take_over(lasting, engines, mode):
    """An engine works on a thread of its own, all the time."""
    server = lasting(mode)
    engine = engines(server, heartbeat=2.0, mq_timeout=60)
    with working(lambda _: round_trip(engine)):
        for _ in range(10):
            server.take_over()


@pytest.mark.ours("LMCache's server cannot hand over")
@pytest.mark.parametrize("mode", MODES)
def test_objects_of_a_tier_are_hits_after_take_overs(lasting_with_tier, engines, mode):
    """What only the directory has, while another engine stores and loads all the time."""
    server, directory = lasting_with_tier(mode)
    engine, other = engines(server, heartbeat=2.0, mq_timeout=60), engines(server, heartbeat=2.0, mq_timeout=60)
    for seed in range(8):
        tiers.store(engine, seed)
    tiers.forget(engine)
    stored = len(tiers.files(directory))

    def store_and_recall(seed):
        tiers.store(other, seed)
        assert tiers.recall(other, seed) == 64

    with working(store_and_recall) as rounds:
        for seed in range(8):
            server.take_over()
            assert tiers.recall(engine, seed) == 64
    # Every store that was answered has reached the directory.
    tiers.settled(server)
    assert len(tiers.files(directory)) == stored + len(rounds) * stored // 8
    tiers.forget(engine)
    for seed in [*range(8), *rounds]:
        assert tiers.recall(engine if seed < 8 else other, seed) == 64


@pytest.mark.ours("LMCache's server cannot hand over")
def test_stores_that_wait_reach_the_tier(lasting_with_tier, engines):
    """Take-overs right behind the answers to stores: what waits is written by the next server."""
    server, directory = lasting_with_tier("engine_shm")
    engine = engines(server, heartbeat=2.0, mq_timeout=60)
    for seed in range(40):
        tiers.store(engine, seed)
        if seed % 4 == 3:
            server.take_over()
    tiers.settled(server)
    assert len(tiers.files(directory)) == 40 * 64 // engine.chunk
    tiers.forget(engine)
    for seed in range(40):
        assert tiers.recall(engine, seed) == 64
    server.stop()
    assert not tiers.temporary(directory)
