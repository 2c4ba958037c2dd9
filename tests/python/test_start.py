"""Engines and servers that start, end and return in any order: nothing waits, and no unproven size is used."""

from types import SimpleNamespace

import pytest
from conftest import CHUNK
from kvrig.waiting import wait_until
from kvtier import SchedulerAdapter, WorkerAdapter, registration
from rig import BLOCK, tokens
from test_failures import works


def logged(caplog, text, count):
    """The levels of the log lines with a text, once there are `count`: a client's state is set before its line is written."""

    def levels():
        return [each.levelname for each in list(caplog.records) if text in each.getMessage()]

    wait_until(lambda: len(levels()) >= count, 60, f"{count} lines")
    return levels()


def replace(server, proxy, engine, chunk):
    """Replaces the server behind a proxy by one of another default size, after the engine has lost its connections."""
    proxy.cut()
    wait_until(lambda: not engine.scheduler.is_healthy and not engine.worker.is_healthy, 60, "lost connections")
    server.kill()
    server.chunk = chunk
    server.start()
    proxy.named.clear()
    proxy.mend()


# proves: docs/python.md#when-the-server-is-away
def test_engine_starts_without_server(place, mode, fresh):
    """It computes until then, and uses the server as soon as it is there."""
    server = place.server(start=False)
    engine = place.engine(server, mode=mode, wait_for_server=None)
    prompt, request = tokens(CHUNK, "early"), fresh()
    assert engine.scheduler.chunk_tokens is None and engine.scheduler.num_blocks_per_chunk() == 0
    assert engine.lookup(request, prompt) == 0
    assert not engine.store(request, prompt, 0, CHUNK, [1, 2, 3, 4])
    assert engine.retrieve(request, prompt, 0, CHUNK, [1, 2, 3, 4]) == {1, 2, 3, 4}
    assert engine.worker.get_finished({request})[0] == {request}
    engine.scheduler.end_session(request)
    server.start()
    engine.healthy()
    assert engine.scheduler.chunk_tokens == engine.worker.chunk_tokens == CHUNK
    works(engine, fresh)


def test_start_without_server_does_not_wait(place, monkeypatch):
    """If nothing listens. A registration that waited would last until the end of the test."""
    monkeypatch.setattr(registration, "_CONNECT_TIMEOUT", 1e6)
    engine = place.engine(place.server(start=False), wait_for_server=None)
    assert engine.worker._registration.is_described and engine.worker.transport is None


def test_start_waiting_for_server_fails_without_one(place):
    """At the end of its timeout."""
    url = place.server(start=False).url
    for adapter in (SchedulerAdapter, WorkerAdapter):
        with pytest.raises(ConnectionError, match="no KV-cache server answers at .* within 0.2 s"):
            adapter(url, "m", block_tokens=BLOCK, wait_for_server=0.2)


def test_later_refusal_of_worker_is_logged(place, caplog):
    """Without a server only the model decided the mode."""
    server = place.server("lmcache_driven", start=False)
    server.expect_trouble("registration refused")
    engine = place.engine(server, mode="auto", wait_for_server=None)
    server.start()
    wait_until(lambda: engine.worker.client.obstacle, 60, "a reason")
    assert "--supported-transfer-mode" in engine.worker.client.obstacle
    assert not engine.worker.is_healthy and engine.scheduler.client.wait_healthy(60)
    assert logged(caplog, "--supported-transfer-mode", 1) == ["ERROR"]


# proves: docs/vllm.md#chunk-size
def test_server_with_other_chunk_size_is_unused(place, mode, fresh, caplog):
    """If it reads no other than its own: a smaller chunk would make an engine count twice the tokens."""
    server = place.server()
    server.expect_trouble("instance|worker|register")
    older = place.older(server)
    engine = place.engine(older, mode=mode)
    works(engine, fresh)

    replace(server, older, engine, CHUNK // 2)
    sides = (engine.scheduler.client, engine.worker.client)
    wait_until(lambda: all(side.obstacle for side in sides), 60, "a reason on both sides")
    text = f"chunks of {CHUNK // 2} tokens and this engine works with chunks of {CHUNK}: start the server with --chunk-size {CHUNK}"
    assert all(text in side.obstacle for side in sides)
    prompt, request = tokens(2 * CHUNK, "other"), fresh()
    assert not engine.scheduler.is_healthy and not engine.worker.is_healthy
    assert not engine.store(request, prompt, 0, 2 * CHUNK, list(range(1, 9)))
    assert engine.lookup(request, prompt) == 0
    assert server.get("/status")[1]["storage_manager"]["l1_manager"]["total_object_count"] == 0
    assert logged(caplog, text, 2) == ["ERROR", "ERROR"], "once for each side"
    replace(server, older, engine, CHUNK)
    engine.healthy()
    works(engine, fresh)
    assert older.named == set()


def test_required_chunk_size_is_checked(place):
    """Without a server that reads it a start that waits fails, and a start that does not wait leaves the server unused."""
    server = place.older(place.server())
    with pytest.raises(ValueError, match=f"chunks of {CHUNK} tokens and this engine works with chunks of {4 * CHUNK}"):
        SchedulerAdapter(server.url, "m", block_tokens=BLOCK, chunk_tokens=4 * CHUNK)
    scheduler = SchedulerAdapter(server.url, "m", block_tokens=BLOCK, chunk_tokens=4 * CHUNK, wait_for_server=None)
    wait_until(lambda: scheduler.client.obstacle, 60, "a reason")
    assert not scheduler.is_healthy
    scheduler.shutdown()
    with pytest.raises(ValueError, match="chunk_tokens: 10; allowed are multiples of the engine's block of 4 tokens"):
        SchedulerAdapter(server.url, "m", block_tokens=BLOCK, chunk_tokens=10)
    with pytest.raises(ValueError, match="chunk_tokens: 65540; allowed are whole numbers from 1 to 65536"):
        SchedulerAdapter(server.url, "m", block_tokens=BLOCK, chunk_tokens=65540)


# proves: docs/python.md#when-the-server-is-away
def test_lookup_result_beyond_request_fails(place):
    """For any answer of a server."""
    scheduler = SchedulerAdapter(place.server().url, "m", block_tokens=BLOCK)
    real, future = scheduler.client, SimpleNamespace(done=lambda: True, result=lambda: 3)
    scheduler.client = SimpleNamespace(is_healthy=True, chunk_tokens=CHUNK, timeout=1.0, lookup=lambda *_: future)
    for number, (count, found) in enumerate([(2 * CHUNK, 0), (3 * CHUNK, 3 * CHUNK)]):
        scheduler.maybe_submit_lookup_request(str(number), token_ids=tokens(count))
        assert scheduler.check_lookup_result(str(number)) == found
    assert scheduler.failed_lookups == 1
    real.close()


# proves: docs/python.md#when-the-server-is-away
@pytest.mark.parametrize("bound", ["deadline", "heartbeat"])
def test_lookup_does_not_wait_for_frozen_server(place, fresh, bound):
    """It has its own deadline, and fails with an unanswered heartbeat."""
    server = place.server()
    server.expect_trouble("instance|worker|register")
    spans = {"deadline": {"lookup_timeout": 0.3, "heartbeat": 600}, "heartbeat": {"lookup_timeout": 600, "heartbeat": 0.3}}
    scheduler = SchedulerAdapter(server.url, "m", block_tokens=BLOCK, timeout=600, **spans[bound])
    with server.frozen():
        request = fresh()
        scheduler.maybe_submit_lookup_request(request, token_ids=tokens(CHUNK))
        wait_until(lambda: scheduler.check_lookup_result(request) == 0, 60, "a failed lookup")
        assert scheduler.failed_lookups <= 1
    assert scheduler.client.wait_healthy(60)
    scheduler.shutdown()


def test_invalid_salt_fails(place, mode, fresh):
    """Its store counts as failed, not skipped, and its lookup as failed, not as a miss."""
    engine, prompt = place.engine(place.server(), mode=mode), tokens(CHUNK, "salt")
    for salt in ("a@b", "x" * 129, "\ud800"):
        assert not engine.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4], salt=salt)
        assert engine.lookup(fresh(), prompt, salt=salt) == 0
    counters = engine.worker.take_counters()
    assert (counters.failed_stores, counters.skipped_stores) == (3, 0)
    assert engine.scheduler.failed_lookups == 3


def test_prompts_beyond_protocol_fail(place, fresh):
    """They find nothing, and the next prompt is served."""
    engine = place.engine(place.server())
    for prompt in ([-1] * CHUNK, [2**40] * CHUNK, ["a"] * CHUNK, [None] * CHUNK):
        assert engine.lookup(fresh(), prompt) == 0
    for name in ("\ud800", "a" * 100):
        engine.scheduler.maybe_submit_lookup_request(name, token_ids=tokens(CHUNK))
        engine.scheduler.free_lookup_locks(name, tokens(CHUNK), start=0, end=CHUNK)
        engine.scheduler.end_session(name)
    assert engine.scheduler.failed_lookups == 5
    works(engine, fresh)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"world_size": 0}, "world_size: 0; allowed are whole numbers from 1"),
        ({"worker_id": 5}, "worker_id: 5; allowed are whole numbers from 0 to 0"),
        ({"num_kv_readers": -3}, "num_kv_readers: -3; allowed are whole numbers from 1"),
        ({"block_tokens": 0}, "block_tokens: 0; allowed are whole numbers from 1"),
        ({"timeout": float("inf")}, "timeout: inf; a positive number"),
        ({"store_timeout": 1e300}, r"store_timeout: 1e\+300; a positive number"),
        ({"heartbeat": float("nan")}, "heartbeat: nan; a positive number"),
        ({"wait_for_server": -1}, "wait_for_server: -1; a positive number"),
        ({"model_name": "a@b"}, "model_name: 'a@b'; allowed is a printable text without @"),
        ({"mode": "x"}, "mode: 'x'; allowed are auto"),
    ],
)
def test_arguments_are_checked(arguments, error):
    """Before they have any effect."""
    given = {"server_url": "tcp://127.0.0.1:9", "model_name": "m", "block_tokens": BLOCK, "wait_for_server": None, **arguments}
    with pytest.raises(ValueError, match=error):
        WorkerAdapter(**given)
    of_scheduler = {name: value for name, value in given.items() if name not in ("worker_id", "store_timeout", "mode")}
    if of_scheduler.keys() >= arguments.keys():
        with pytest.raises(ValueError, match=error):
            SchedulerAdapter(**of_scheduler)
    if "store_timeout" in arguments:
        with pytest.raises(ValueError, match="lookup_timeout"):
            SchedulerAdapter(**of_scheduler, lookup_timeout=arguments["store_timeout"])
