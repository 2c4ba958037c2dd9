"""The server dies and comes back; the unmodified client recovers by itself."""

import time

import pytest
import torch
from kvrig import gpu, tiers
from kvrig.engine import tokens
from kvrig.server import INSTANCE, await_pings, our_command
from kvrig.waiting import wait_until

MODES = ["lmcache_driven", "engine_shm", "engine_pickle", gpu.MODE]
# Seconds; also how long the client waits for the answer to one.
HEARTBEAT = 2.0


def round_trip(engine):
    """Store a new prompt, find it, load it elsewhere, compare."""
    prompt = tokens(32)
    # Prompts of different lengths show a restarted server which chunk size the client has.
    engine.hits(tokens(63))
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 32)
    stored = engine.worker.read(engine.blocks_for(32))
    request, hit = engine.lookup(prompt)
    target = engine.blocks_for(32, 30)
    engine.worker.fill(target)
    assert engine.worker.retrieve(request, prompt, 0, hit, target).ok
    engine.end(request)
    assert all(torch.equal(a, b) for a, b in zip(engine.worker.read(target), stored, strict=True))
    return prompt


# proves: docs/compare.md#restart
# proves: docs/operate.md#restart-and-upgrade
@pytest.mark.ours("it answers true to the ping of an instance it does not know, so the client never re-registers")
@pytest.mark.parametrize("mode", MODES)
def test_restart_faster_than_a_heartbeat(serve, engines, mode):
    """SIGKILL and immediate start: no ping is lost, yet the worker registers again by a heartbeat."""
    server = serve(mode)
    server.expect_trouble(r"instance")
    engine = engines(server, heartbeat=HEARTBEAT, mq_timeout=300)
    prompt = round_trip(engine)
    before = engine.worker.adapter.transfer_ctx

    server.kill()
    server.start()
    restarted = time.monotonic()
    # What the engine sends before it has noticed is answered at once, not after mq_timeout.
    request = engine.new_request()
    began = time.monotonic()
    engine.worker.store(request, prompt, 0, 32, engine.blocks_for(32))
    assert time.monotonic() - began < 60
    engine.end(request)

    adapter = engine.worker.adapter
    wait_until(
        lambda: adapter.transfer_ctx is not before and adapter.is_healthy, 60, "registration again"
    )
    print(f"registered again after {time.monotonic() - restarted:.2f} s, heartbeat {HEARTBEAT} s")
    round_trip(engine)


def kept_flags(tmp_path):
    """Flags of a server whose next process goes on with its L1 and its workers."""
    return ["--state-dir", str(tmp_path / "state"), "--instance-id", INSTANCE, "--l1-restore", "on"]


def forget(server):
    """Leave nothing in shared memory: the last process of the server removes what the earlier ones have kept."""
    server.kill()
    server.command[server.command.index("on")] = "off"
    server.start()


# proves: docs/operate.md#workers-after-a-restart
@pytest.mark.ours("it forgets its workers")
@pytest.mark.parametrize("mode", MODES)
def test_first_requests_after_a_kill_are_served(serve, engines, mode, tmp_path):
    """SIGKILL and immediate start: before the client notices anything, its first store, lookup and retrieve are served
    with the right bytes, since the instance has told clients one chunk size only. Its next ping is refused, since it waits
    for ever for what was lost; then it registers again."""
    server = serve(mode, command=[*our_command(), *kept_flags(tmp_path)])
    server.expect_trouble(r"instance")
    engine = engines(server, heartbeat=8.0, mq_timeout=300)
    prompt = round_trip(engine)
    stored = engine.worker.read(engine.blocks_for(32))
    adapter = engine.worker.adapter
    before = adapter.transfer_ctx
    await_pings(tmp_path / "state" / INSTANCE)

    server.kill()
    server.start()
    state = server.get("/status")[1]["state"]
    assert (state["restored_workers"], state["left_out_workers"]) == (1, {}), state
    # The first store, of other blocks than before.
    other, blocks = tokens(32), engine.blocks_for(32, 20)
    engine.worker.fill(blocks, 5)
    written = engine.worker.read(blocks)
    request = engine.new_request()
    assert engine.worker.store(request, other, 0, 32, blocks)
    engine.end(request)
    # What the earlier process had, and what this one has.
    for wanted, content in ((prompt, stored), (other, written)):
        request, hit = engine.lookup(wanted)
        assert hit == 32
        target = engine.blocks_for(32, 30)
        engine.worker.fill(target)
        assert engine.worker.retrieve(request, wanted, 0, hit, target).ok
        engine.end(request)
        loaded = engine.worker.read(target)
        assert all(torch.equal(a, b) for a, b in zip(loaded, content, strict=True))
    assert adapter.transfer_ctx is before, "the client has noticed nothing"
    wait_until(
        lambda: adapter.transfer_ctx is not before and adapter.is_healthy, 60, "registration again"
    )
    round_trip(engine)
    forget(server)


# proves: docs/operate.md#workers-after-a-restart
@pytest.mark.ours("it forgets its workers")
def test_requests_that_a_client_has_abandoned_are_not_served(serve, engines, tmp_path):
    """The client notices the kill, abandons a store that still waits in its socket, and uses the blocks for other data: the
    next process must not read them for that store."""
    server = serve("lmcache_driven", command=[*our_command(), *kept_flags(tmp_path)])
    server.expect_trouble(r"instance")
    engine = engines(server, heartbeat=2.0, mq_timeout=300)
    round_trip(engine)
    await_pings(tmp_path / "state" / INSTANCE)
    server.kill()
    lost, blocks = tokens(32), engine.blocks_for(32)
    engine.worker.submit_store(engine.new_request(), lost, 0, 32, blocks)
    wait_until(lambda: not engine.worker.adapter.is_healthy, 60, "degraded mode")
    engine.worker.adapter.get_finished(set())
    # As another request has it.
    engine.worker.fill(blocks, 9)
    server.start()
    state = server.get("/status")[1]["state"]
    assert (state["restored_workers"], state["left_out_workers"]) == (0, {"silent": 1}), state
    wait_until(lambda: engine.scheduler.is_healthy and engine.worker.adapter.is_healthy, 60, "recovery")
    assert engine.hits(lost) == 0
    round_trip(engine)
    forget(server)


# proves: docs/operate.md#restart-and-upgrade
@pytest.mark.parametrize("mode", MODES)
def test_restart_after_the_client_noticed(serve, engines, mode):
    """Down for longer than a heartbeat: the client degrades without errors, recovers, and everything works again."""
    server = serve(mode, fresh=True)
    server.expect_trouble(r"instance")
    # The first registration on a GPU measures how it copies, which takes the fake driver seconds.
    engine = engines(server, heartbeat=HEARTBEAT, mq_timeout=20 if mode == "cuda" else 4)
    prompt = round_trip(engine)
    scheduler, worker = engine.scheduler, engine.worker

    server.kill()
    wait_until(lambda: not scheduler.is_healthy and not worker.adapter.is_healthy, 60, "degraded mode")
    assert engine.lookup(prompt)[1] == 0
    assert worker.store(engine.new_request(), prompt, 0, 32, engine.blocks_for(32)) is None
    lost = worker.retrieve(engine.new_request(), prompt, 0, 32, engine.blocks_for(32, 20))
    assert lost.error_blocks == set(engine.blocks_for(32, 20))

    server.start()
    wait_until(lambda: scheduler.is_healthy and worker.adapter.is_healthy, 60, "recovery")
    assert engine.hits(prompt) == 0, "L1 does not survive a kill"
    round_trip(engine)


@pytest.mark.ours("it never notifies an engine whose ping it missed")
def test_two_engines_both_return(serve, engines):
    """Each instance is notified on its own; one that has registered again is not asked to do it twice."""
    server = serve("lmcache_driven")
    server.expect_trouble(r"instance")
    crew = [engines(server, heartbeat=HEARTBEAT, seed=i) for i in range(2)]
    for engine in crew:
        round_trip(engine)
    before = [engine.worker.adapter.transfer_ctx for engine in crew]
    server.kill()
    server.start()

    def all_back():
        adapters = [engine.worker.adapter for engine in crew]
        return all(a.transfer_ctx is not old and a.is_healthy for a, old in zip(adapters, before, strict=True))

    wait_until(all_back, 60, "both registered again")
    after = [engine.worker.adapter.transfer_ctx for engine in crew]
    for engine in crew:
        round_trip(engine)
    # Two more pings of each worker and scheduler: they are known now, so nothing may change.
    pings = lambda: tiers.metric(server, "kvtier_requests_total", operation="ping")  # noqa: E731
    enough = pings() + 12
    wait_until(lambda: pings() >= enough, 60, "pings")
    assert [engine.worker.adapter.transfer_ctx for engine in crew] == after


# proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
@pytest.mark.ours("its clients count its chunks as their own: more tokens than they asked for")
@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_shm", "engine_pickle"])
def test_restart_with_another_chunk_size(serve, engines, mode):
    """A client with chunks of 16 never hears of more tokens than it asked for, also of what other engines store; an
    engine that starts later is served."""
    server = serve(mode)
    server.expect_trouble(r"instance|chunk size|failed|registration refused|store|retrieve")
    engine = engines(server, heartbeat=HEARTBEAT, mq_timeout=4)
    round_trip(engine)
    before = engine.worker.adapter.transfer_ctx
    server.kill()
    server.chunk = 8
    server.start()
    wait_until(lambda: engine.worker.adapter.transfer_ctx is not before, 60, "registration tried again")
    other = engines(server, seed=1)
    lengths = (64, 32, 96)
    prompts = [tokens(length) for length in lengths]
    for prompt in prompts:
        other.store_prompt(prompt)
        other.wait_hit(prompt, len(prompt))
    for prompt in prompts + prompts:
        request, hit = engine.lookup(prompt)
        assert hit <= len(prompt)
        if hit and engine.worker.adapter.is_healthy:
            target = engine.blocks_for(hit, 30)
            loaded = engine.worker.retrieve(request, prompt, 0, hit, target)
            stored = other.worker.read(other.blocks_for(hit))
            assert loaded.error_blocks or all(
                torch.equal(a, b) for a, b in zip(engine.worker.read(target), stored, strict=True)
            )
        engine.end(request)
    # Its own stores are refused or right: others never load what it has stored as something else.
    mine = tokens(64)
    if engine.worker.adapter.is_healthy:
        engine.worker.store(engine.new_request(), mine, 0, 64, engine.blocks_for(64))
        written = engine.worker.read(engine.blocks_for(64))
        request, hit = other.lookup(mine)
        if hit:
            target = other.blocks_for(hit, 30)
            assert other.worker.retrieve(request, mine, 0, hit, target).ok
            read = other.worker.read(target)
            rows = len(target)
            assert all(torch.equal(a, b[:rows]) for a, b in zip(read, written, strict=True))
        other.end(request)
