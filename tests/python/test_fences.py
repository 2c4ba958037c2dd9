"""Access to memory of transfers without an answer: the engine's pages, and memory granted by the server."""

import gc
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import rig
from conftest import CHUNK
from kvrig.proxy import Proxy
from kvrig.server import free_port
from kvrig.waiting import wait_until
from kvtier import Client
from rig import Engine, tokens

# Seconds of requests that are lost. All others have those of the rig, which no lost one may take.
TIMEOUT = 2.0


class Context:
    """A server, a proxy before it, and engines that know only the proxy."""

    def __init__(self, place):
        self.server, self.engines = place.server(), []
        self.server.expect_trouble("instance|worker|register|deadline|prepared")
        self.proxy = Proxy(self.server.url, free_port())

    def engine(self, **options):
        """Returns an engine with heartbeats only on new connections."""
        engine = Engine(self.proxy.url, heartbeat=600, **options)
        self.engines.append(engine)
        engine.healthy()
        return engine

    def unread(self):
        """Returns the bytes that have reached the server's socket and were not read."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        port, established = f":{self.server.port:04X}", "01"
        return sum(int(line[4].split(":")[1], 16) for line in lines if line[1].endswith(port) and line[3] == established)

    def status(self, *names):
        """Returns these values of the server's status."""
        status = self.server.get("/status")[1]
        return tuple(status[name] for name in names)

    def workers(self):
        """Returns the ids of the workers that the server knows."""
        return sum(self.status("registered_gpu_ids", "registered_non_cuda_instance_ids"), [])

    def close(self):
        """Ends all except the server, which the fixture ends."""
        for engine in self.engines:
            engine.close()
        self.proxy.close()


@pytest.fixture
def context(place):
    """Factory of contexts."""
    made = Context(place)
    yield made
    made.close()


def works(engine, fresh):
    """Asserts a store, a hit and the right bytes."""
    prompt, blocks, request = tokens(CHUNK, fresh()), [20, 21, 22, 23], fresh()
    expected = engine.read(blocks)
    assert engine.store(fresh(), prompt, 0, CHUNK, blocks)
    assert engine.lookup(request, prompt) == CHUNK
    engine.fill(blocks)
    assert engine.retrieve(request, prompt, 0, CHUNK, blocks) == set()
    assert engine.has(blocks, expected)


def are(engine, blocks, value):
    """Whether all bytes of these blocks are this one."""
    return all((layer == value).all() for layer in engine.read(blocks))


# proves: docs/python.md#pages-of-transfers-without-an-answer
def test_lost_connection_does_not_end_transfers(context, fresh):
    """The server may still handle its requests: it may touch the pages until it answers the unregistration."""
    engine = context.engine(mode="lmcache_driven")
    cached, stored, request = tokens(CHUNK, "cached"), tokens(CHUNK, "stored late"), fresh()
    assert engine.store(fresh(), cached, 0, CHUNK, [1, 2, 3, 4])
    assert engine.lookup(request, cached) == CHUNK
    expected = engine.read([9, 10, 11, 12])
    with context.server.frozen():
        engine.worker.submit_retrieve_request(request, engine.op(cached, 0, CHUNK, [5, 6, 7, 8]))
        engine.worker.submit_store_request(fresh(), engine.op(stored, 0, CHUNK, [9, 10, 11, 12]))
        wait_until(lambda: context.proxy.seen[-1] == ("store", False) and context.unread(), 60, "both to reach the server")
        context.proxy.cut()
        wait_until(lambda: not engine.worker.is_healthy, 60, "degraded")
        assert engine.worker.get_finished(()) == (set(), set())
        assert engine.worker._storing
    context.proxy.mend()
    assert engine.finish_retrieve(request) == {5, 6, 7, 8}
    engine.finish_stores()
    # The engine reuses these blocks now.
    engine.fill([5, 6, 7, 8], 55)
    engine.fill([9, 10, 11, 12], 99)
    engine.healthy()
    works(engine, fresh)
    assert are(engine, [5, 6, 7, 8], 55)
    again = fresh()
    if engine.lookup(again, stored):
        assert engine.retrieve(again, stored, 0, CHUNK, [9, 10, 11, 12]) == set()
        assert engine.has([9, 10, 11, 12], expected)


# proves: docs/python.md#pages-of-transfers-without-an-answer
def test_pages_without_answer_are_free_after_deadline(context, fresh):
    """The server received the deadline, and observes it also after it resumes."""
    engine = context.engine(mode="lmcache_driven")
    cached, request = tokens(CHUNK, "cached"), fresh()
    assert engine.store(fresh(), cached, 0, CHUNK, [1, 2, 3, 4])
    assert engine.lookup(request, cached) == CHUNK
    with context.server.frozen(), engine.timeout(TIMEOUT):
        began = time.monotonic()
        engine.worker.submit_retrieve_request(request, engine.op(cached, 0, CHUNK, [5, 6, 7, 8]))
        wait_until(context.unread, 60, "it to reach the server")
        context.proxy.cut()
        assert engine.finish_retrieve(request) == {5, 6, 7, 8}
        assert TIMEOUT <= time.monotonic() - began < rig.TIMEOUT / 2
        engine.fill([5, 6, 7, 8], 55)
    context.proxy.mend()
    engine.healthy()
    works(engine, fresh)
    assert are(engine, [5, 6, 7, 8], 55)


# proves: docs/python.md#pages-of-transfers-without-an-answer
def test_each_registration_has_its_own_id(context, mode, fresh):
    """Requests under an earlier id find no worker; the server removes that id."""
    engine = context.engine(mode=mode)
    first = context.workers()
    context.proxy.cut()
    wait_until(lambda: not engine.worker.is_healthy, 60, "degraded")
    context.proxy.mend()
    engine.healthy()
    assert len(first) == len(context.workers()) == 1 and first != context.workers()
    works(engine, fresh)


# proves: docs/python.md#pages-of-transfers-without-an-answer
@pytest.mark.parametrize("is_reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("lost", ["prepare_store", "commit_store"])
def test_memory_of_unanswered_store_is_freed(context, fresh, lost, is_reply):
    """The worker reports the abandoned store."""
    engine = context.engine()
    context.proxy.at(lost, reply=is_reply)
    with engine.timeout(TIMEOUT):
        assert not engine.store(fresh(), tokens(CHUNK, "lost"), 0, CHUNK, [1, 2, 3, 4])
        granted = ("pending_transfers", "withheld_transfers")
        wait_until(lambda: context.status(*granted) == (0, 0), 60, "nothing to be granted")
    works(engine, fresh)


# proves: docs/python.md#pages-of-transfers-without-an-answer
def test_worker_that_cannot_free_memory_registers_again(context, fresh):
    """Otherwise the server would keep waiting for it, and at some time grant it no more memory."""
    engine = context.engine()
    context.proxy.at("prepare_store", reply=True)
    context.proxy.at("commit_store")
    with engine.timeout(TIMEOUT):
        assert not engine.store(fresh(), tokens(CHUNK, "lost"), 0, CHUNK, [1, 2, 3, 4])
        wait_until(lambda: context.status("pending_transfers", "withheld_transfers") == (0, 1), 60, "another number")
    engine.healthy()
    works(engine, fresh)


# proves: docs/python.md#pages-of-transfers-without-an-answer
def test_dropped_worker_touches_no_page(context, fresh):
    """As after an error, without a shutdown: the pages are freed next."""
    engine = context.engine()
    cached, request = tokens(CHUNK, "cached"), fresh()
    assert engine.store(fresh(), cached, 0, CHUNK, [1, 2, 3, 4])
    assert engine.lookup(request, cached) == CHUNK
    with context.server.frozen():
        engine.worker.submit_retrieve_request(request, engine.op(cached, 0, CHUNK, [5, 6, 7, 8]))
        wait_until(context.unread, 60, "it to reach the server")
        dropped = threading.Thread(target=_drop, args=(engine.worker,))
        dropped.start()
        # No request goes to the server meanwhile.
        wait_until(lambda: engine.worker._worker is None, 60, "the drop to begin")
        engine.fill([5, 6, 7, 8], 55)
    dropped.join()
    wait_until(lambda: context.status("pending_transfers") == (0,), 60, "the retrieve to end")
    assert are(engine, [5, 6, 7, 8], 55)


def _drop(adapter):
    adapter._registration.worker = None
    gc.collect()


@pytest.mark.parametrize("bad", [{"start": -CHUNK}, {"end": 1 << 70}, {"skip_first_n_tokens": -1}])
def test_invalid_operation_ends_with_its_batch(context, mode, fresh, bad):
    """No exception half-way: all requests of the batch end, and none stays in flight."""
    engine = context.engine(mode=mode)
    prompt, requests = tokens(2 * CHUNK, "batch"), [fresh(), fresh(), fresh()]
    good = [engine.op(prompt, 0, CHUNK, [1, 2, 3, 4]), engine.op(prompt, CHUNK, 2 * CHUNK, [5, 6, 7, 8])]
    wrong = engine.op(prompt, **{"start": 0, "end": CHUNK, "blocks": [9, 10, 11, 12], **bad})
    engine.worker.batched_submit_store_requests(requests, [good[0], wrong, good[1]])
    engine.finish_stores()
    assert engine.worker.get_finished(set(requests))[0] == set(requests)
    assert engine.worker.counters.failed_stores == 3
    engine.worker.batched_submit_retrieve_requests(requests, [good[0], wrong, good[1]])
    assert engine.finish_retrieve(requests[0]) >= {1, 2, 3, 4, 5, 6, 7, 8}
    assert not engine.worker._parts
    works(engine, fresh)


def test_several_threads_wait_for_one_result(context):
    """All get it, whichever continues first."""
    client, results = Client(context.server.url), []
    assert client.wait_healthy(60)
    interval = sys.getswitchinterval()
    try:
        with context.server.frozen():
            futures = [client.get_chunk_size() for _ in range(20)]
            started = []

            def wait(future):
                started.append(future)
                results.append(future.result())

            threads = [threading.Thread(target=wait, args=(future,)) for future in futures for _ in range(4)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(started) == len(threads), 60, "all threads to wait")
            # From here to the last reply no other thread runs in Python, so all waiters of a future continue together.
            sys.setswitchinterval(30)
        while client.in_flight:
            pass
    finally:
        sys.setswitchinterval(interval)
    for thread in threads:
        thread.join()
    client.close()
    assert results == [CHUNK] * 80


def test_loading_worker_without_pool_receives_pickled_chunks(context, fresh):
    """Its registration says so; otherwise it would be granted slots that it cannot read until its first store."""
    writer, prompt, request = context.engine(), tokens(CHUNK, "shared"), fresh()
    assert writer.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])
    reader = context.engine(mode="pickle")
    assert reader.lookup(request, prompt) == CHUNK
    assert reader.retrieve(request, prompt, 0, CHUNK, [5, 6, 7, 8]) == set()
    assert reader.has([5, 6, 7, 8], writer.read([1, 2, 3, 4]))
    assert context.status("pending_transfers", "withheld_transfers") == (0, 0)


def test_pages_live_as_long_as_native_worker(context):
    """In a cycle the collector may free the pages before the worker whose threads copy them."""
    adapter = context.engine().worker
    registration = adapter._registration
    pages, native = weakref.ref(registration._storages), registration.worker
    registration._storages = registration.worker = None
    gc.collect()
    assert pages() is not None
    del native
    gc.collect()
    assert pages() is None
