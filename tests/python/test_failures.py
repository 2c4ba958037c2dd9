"""The server hangs, dies and returns at each stage of a request: deadlines hold, bytes are right, work continues."""

import time
from contextlib import contextmanager

import pytest
import rig
from conftest import CHUNK
from kvrig.proxy import Proxy
from kvrig.server import free_port
from kvrig.waiting import wait_until
from rig import Engine, tokens

# Seconds of requests that a failing server does not answer. All others have those of the rig, which no failure may take.
TIMEOUT = 3.0

# Stages of a request, and its messages in flight.
LOOKUP = ["lookup", "wait_prefetch_status"]
STORE = {
    "engine_driven": ["prepare_store", "commit_store"],
    "pickle": ["prepare_store", "commit_store"],
    "lmcache_driven": ["store"],
}
RETRIEVE = {
    "engine_driven": ["prepare_retrieve", "commit_retrieve"],
    "pickle": ["prepare_retrieve", "commit_retrieve"],
    "lmcache_driven": ["retrieve"],
}


class Broken:
    """A server behind a proxy, and an engine that knows only the proxy."""

    def __init__(self, place, mode):
        self.server, self.place = place.server(), place
        self.server.expect_trouble("instance|worker|register")
        self.proxy = Proxy(self.server.url, free_port())
        self.engine = Engine(self.proxy.url, mode=mode)

    def die(self):
        """Kills the server, as the OOM killer does."""
        self.server.kill()
        self.proxy.cut()

    def back(self):
        """Starts another server at the same address; the engine finds it by itself."""
        self.server.start()
        self.proxy.mend()
        self.engine.healthy()

    def close(self):
        """Ends all except the server, which the fixture ends."""
        self.engine.close()
        self.proxy.close()


@pytest.fixture
def broken(place, mode):
    """Factory of contexts."""
    made = Broken(place, mode)
    yield made
    made.close()


@contextmanager
def at_once():
    """Asserts that nothing waits for its deadline, which is that of the rig."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < rig.TIMEOUT / 2


def works(engine, fresh):
    """Asserts a store, a hit and the right bytes."""
    prompt, blocks, request = tokens(2 * CHUNK, fresh()), list(range(20, 28)), fresh()
    expected = engine.read(blocks)
    assert engine.store(fresh(), prompt, 0, 2 * CHUNK, blocks)
    assert engine.lookup(request, prompt) == 2 * CHUNK
    engine.fill(blocks)
    assert engine.retrieve(request, prompt, 0, 2 * CHUNK, blocks) == set()
    assert engine.has(blocks, expected)


# proves: docs/python.md#when-the-server-is-away
@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("ending", ["dies", "loses-it"])
def test_server_fails_during_lookup(broken, fresh, ending, reply):
    """The lookup finds nothing, by the deadline, or at once if the connection is lost."""
    engine, prompt = broken.engine, tokens(CHUNK, "lookup")
    engine.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])
    for operation in LOOKUP:
        broken.proxy.at(operation, broken.die if ending == "dies" else lambda: None, reply)
        with at_once(), engine.timeout(TIMEOUT):
            assert engine.lookup(fresh(), prompt) == 0
        if ending == "dies":
            wait_until(lambda: not engine.scheduler.is_healthy, 60, "degraded")
            broken.back()
            works(engine, fresh)
            engine.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])
    assert engine.lookup(fresh(), prompt) == CHUNK


# proves: docs/python.md#when-the-server-is-away
@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("ending", ["dies", "loses-it"])
def test_server_fails_during_store(broken, mode, fresh, ending, reply):
    """The store ends; a later retrieve returns the right bytes or none."""
    engine, blocks = broken.engine, [1, 2, 3, 4]
    for operation in STORE[mode]:
        prompt, request = tokens(CHUNK, operation), fresh()
        expected = engine.read(blocks)
        broken.proxy.at(operation, broken.die if ending == "dies" else lambda: None, reply)
        with at_once(), engine.timeout(TIMEOUT):
            assert not engine.store(request, prompt, 0, CHUNK, blocks)
        assert engine.worker.get_finished({request})[0] == {request}
        if ending == "dies":
            wait_until(lambda: not engine.worker.is_healthy, 60, "degraded")
            broken.back()
        engine.healthy()
        # A commit whose reply was lost has stored the chunk.
        again = fresh()
        found = engine.lookup(again, prompt)
        if found:
            assert reply and ending != "dies"
            engine.fill(blocks)
            assert engine.retrieve(again, prompt, 0, CHUNK, blocks) == set()
            assert engine.has(blocks, expected)
        works(engine, fresh)


# proves: docs/python.md#when-the-server-is-away
@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("ending", ["dies", "loses-it"])
def test_server_fails_during_retrieve(broken, mode, fresh, ending, reply):
    """The retrieve ends and reports its blocks."""
    engine, blocks = broken.engine, [1, 2, 3, 4]
    for operation in RETRIEVE[mode]:
        prompt, request = tokens(CHUNK, operation), fresh()
        assert engine.store(fresh(), prompt, 0, CHUNK, blocks)
        assert engine.lookup(request, prompt) == CHUNK
        broken.proxy.at(operation, broken.die if ending == "dies" else lambda: None, reply)
        with at_once(), engine.timeout(TIMEOUT):
            assert engine.retrieve(request, prompt, 0, CHUNK, blocks) == set(blocks)
        if ending == "dies":
            broken.back()
        engine.healthy()
        works(engine, fresh)


# proves: docs/python.md#when-the-server-is-away
def test_server_fails_between_lookup_and_retrieve(broken, fresh):
    """The found objects are lost with the server: the retrieve fails at once, also if the next server is already there."""
    engine, blocks = broken.engine, [1, 2, 3, 4]
    for is_back in (False, True):
        prompt, request = tokens(CHUNK, is_back), fresh()
        assert engine.store(fresh(), prompt, 0, CHUNK, blocks)
        assert engine.lookup(request, prompt) == CHUNK
        broken.die()
        wait_until(lambda: not engine.worker.is_healthy, 60, "degraded")
        if is_back:
            broken.back()
        with at_once():
            assert engine.retrieve(request, prompt, 0, CHUNK, blocks) == set(blocks)
        if not is_back:
            broken.back()
    works(engine, fresh)


# proves: docs/python.md#when-the-server-is-away
def test_requests_while_server_is_away_are_computed(broken, fresh):
    """Nothing waits: lookups find nothing, stores are skipped, retrieves fail."""
    engine, states = broken.engine, []
    engine.worker.on_health(states.append)
    broken.die()
    wait_until(lambda: not engine.scheduler.is_healthy and not engine.worker.is_healthy, 60, "degraded")
    with at_once():
        for number in range(20):
            prompt, request = tokens(CHUNK, number), fresh()
            assert engine.lookup(request, prompt) == 0
            assert not engine.store(request, prompt, 0, CHUNK, [1, 2, 3, 4])
            assert engine.retrieve(request, prompt, 0, CHUNK, [1, 2, 3, 4]) == {1, 2, 3, 4}
            assert engine.worker.get_finished({request})[0] == {request}
            engine.scheduler.end_session(request)
    broken.back()
    works(engine, fresh)
    assert states[0] == "degraded" and states[-2:] == ["recovering", "healthy"]


# proves: docs/python.md#when-the-server-is-away
def test_restart_faster_than_heartbeat(place, mode, fresh):
    """The lost connection shows it, without a timeout."""
    server = place.server()
    server.expect_trouble("instance|worker|register")
    engine = place.engine(server, mode=mode, heartbeat=600)
    works(engine, fresh)
    server.kill()
    server.start()
    engine.healthy()
    works(engine, fresh)


# proves: docs/python.md#when-the-server-is-away
def test_frozen_server_times_out(place, mode, fresh):
    """Requests end at their deadlines, heartbeats make the server degraded, and it may resume later."""
    server = place.server()
    server.expect_trouble("instance|worker|register|prepared")
    engine = place.engine(server, mode=mode, heartbeat=3.0)
    works(engine, fresh)
    prompt, request = tokens(CHUNK, "frozen"), fresh()
    assert engine.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])
    assert engine.lookup(request, prompt) == CHUNK
    with server.frozen(), engine.timeout(TIMEOUT):
        with at_once():
            assert engine.retrieve(request, prompt, 0, CHUNK, [1, 2, 3, 4]) == {1, 2, 3, 4}
            assert engine.lookup(fresh(), prompt) == 0
        wait_until(lambda: not engine.worker.is_healthy, 60, "degraded")
        with at_once():
            engine.worker.shutdown()
    place.engine(server, mode=mode)
    works(place.engines[-1], fresh)


# proves: docs/python.md#pages-of-transfers-without-an-answer
def test_resumed_server_writes_no_abandoned_page(place, fresh):
    """Abandoned transfers never begin: their pages may be reused by then, and must not be cached."""
    server = place.server()
    server.expect_trouble("instance|worker|register|deadline")
    engine = place.engine(server, mode="lmcache_driven", heartbeat=3.0)
    cached, stored, request = tokens(CHUNK, "cached"), tokens(CHUNK, "stored late"), fresh()
    assert engine.store(fresh(), cached, 0, CHUNK, [1, 2, 3, 4])
    assert engine.lookup(request, cached) == CHUNK
    with server.frozen(), engine.timeout(TIMEOUT):
        engine.worker.submit_store_request(fresh(), engine.op(stored, 0, CHUNK, [9, 10, 11, 12]))
        assert engine.retrieve(request, cached, 0, CHUNK, [5, 6, 7, 8]) == {5, 6, 7, 8}
        # The engine continues, and reuses these blocks.
        engine.fill([5, 6, 7, 8], 55)
        engine.fill([9, 10, 11, 12], 99)
    engine.finish_stores()
    engine.healthy()
    works(engine, fresh)
    assert all((layer == 55).all() for layer in engine.read([5, 6, 7, 8]))
    assert engine.lookup(fresh(), stored) == 0
