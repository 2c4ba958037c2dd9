"""Who may touch memory when an answer does not come: the engine's pages, and what the server has lent."""

import gc
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from conftest import CHUNK
from kvrig.proxy import Proxy
from kvrig.server import free_port
from kvrig.waiting import wait_until
from kvtier import Client
from rig import Engine, tokens

TIMEOUT = 1.0

# How long behind a deadline pages may be the server's without its word.
MARGIN = 1.0


class Bed:
    """A server, a proxy before it, and engines that know only the proxy."""

    def __init__(self, place):
        self.server, self.engines = place.server(), []
        self.server.expect_trouble("instance|worker|register|deadline|prepared")
        self.proxy = Proxy(self.server.url, free_port())

    def engine(self, **options):
        """An engine whose heartbeats come only with new connections."""
        engine = Engine(self.proxy.url, heartbeat=600, **options)
        self.engines.append(engine)
        engine.healthy()
        return engine

    def unread(self):
        """Bytes that have reached the server's socket and were not read."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        port, established = f":{self.server.port:04X}", "01"
        return sum(int(line[4].split(":")[1], 16) for line in lines if line[1].endswith(port) and line[3] == established)

    def status(self, *names):
        """These figures of the server's status."""
        status = self.server.get("/status")[1]
        return tuple(status[name] for name in names)

    def workers(self):
        """Numbers of the workers that the server knows."""
        return sum(self.status("registered_gpu_ids", "registered_non_cuda_instance_ids"), [])

    def close(self):
        """End all but the server, which is the fixture's."""
        for engine in self.engines:
            engine.close()
        self.proxy.close()


@pytest.fixture
def bed(place):
    """See the class."""
    made = Bed(place)
    yield made
    made.close()


def works(engine, fresh):
    """A store, a hit and the right bytes."""
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


def test_lost_connection_does_not_end_transfers(bed, fresh):
    """What was asked for on it may still be done: the pages are the server's until it says that it is not."""
    engine = bed.engine(mode="lmcache_driven")
    cached, stored, request = tokens(CHUNK, "cached"), tokens(CHUNK, "stored late"), fresh()
    assert engine.store(fresh(), cached, 0, CHUNK, [1, 2, 3, 4])
    assert engine.lookup(request, cached) == CHUNK
    expected = engine.read([9, 10, 11, 12])
    with bed.server.frozen():
        engine.worker.submit_retrieve_request(request, engine.op(cached, 0, CHUNK, [5, 6, 7, 8]))
        engine.worker.submit_store_request(fresh(), engine.op(stored, 0, CHUNK, [9, 10, 11, 12]))
        wait_until(lambda: bed.proxy.seen[-1] == ("store", False) and bed.unread(), 30, "both to reach the server")
        bed.proxy.cut()
        wait_until(lambda: not engine.worker.is_healthy, 30, "degraded")
        assert engine.worker.get_finished(()) == (set(), set())
        assert engine.worker._storing
    bed.proxy.mend()
    assert engine.finish_retrieve(request) == {5, 6, 7, 8}
    engine.finish_stores()
    # The engine has other uses for these blocks now.
    engine.fill([5, 6, 7, 8], 55)
    engine.fill([9, 10, 11, 12], 99)
    engine.healthy()
    works(engine, fresh)
    assert are(engine, [5, 6, 7, 8], 55)
    again = fresh()
    if engine.lookup(again, stored):
        assert engine.retrieve(again, stored, 0, CHUNK, [9, 10, 11, 12]) == set()
        assert engine.has([9, 10, 11, 12], expected)


def test_pages_without_answer_are_free_after_deadline(bed, fresh):
    """The server was told the deadline, and keeps it also when it goes on later."""
    engine = bed.engine(mode="lmcache_driven", timeout=TIMEOUT)
    cached, request = tokens(CHUNK, "cached"), fresh()
    assert engine.store(fresh(), cached, 0, CHUNK, [1, 2, 3, 4])
    assert engine.lookup(request, cached) == CHUNK
    with bed.server.frozen():
        began = time.monotonic()
        engine.worker.submit_retrieve_request(request, engine.op(cached, 0, CHUNK, [5, 6, 7, 8]))
        wait_until(bed.unread, 30, "it to reach the server")
        bed.proxy.cut()
        assert engine.finish_retrieve(request) == {5, 6, 7, 8}
        assert TIMEOUT <= time.monotonic() - began < TIMEOUT + MARGIN + 2
        engine.fill([5, 6, 7, 8], 55)
    bed.proxy.mend()
    engine.healthy()
    works(engine, fresh)
    assert are(engine, [5, 6, 7, 8], 55)


def test_each_registration_has_its_own_id(bed, mode, fresh):
    """What still comes under an earlier one finds nobody; the server forgets that one."""
    engine = bed.engine(mode=mode)
    first = bed.workers()
    bed.proxy.cut()
    wait_until(lambda: not engine.worker.is_healthy, 30, "degraded")
    bed.proxy.mend()
    engine.healthy()
    assert len(first) == len(bed.workers()) == 1 and first != bed.workers()
    works(engine, fresh)


@pytest.mark.parametrize("is_reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("lost", ["prepare_store", "commit_store"])
def test_memory_of_unanswered_store_is_freed(bed, fresh, lost, is_reply):
    """The worker says that it has given up."""
    engine = bed.engine(timeout=TIMEOUT)
    bed.proxy.at(lost, reply=is_reply)
    assert not engine.store(fresh(), tokens(CHUNK, "lost"), 0, CHUNK, [1, 2, 3, 4])
    lent = ("pending_transfers", "withheld_transfers")
    wait_until(lambda: bed.status(*lent) == (0, 0), 30, "nothing to be lent")
    works(engine, fresh)


def test_worker_that_cannot_free_memory_registers_again(bed, fresh):
    """Else it would be lent nothing more one day: the server would wait for it for ever."""
    engine = bed.engine(timeout=TIMEOUT)
    bed.proxy.at("prepare_store", reply=True)
    bed.proxy.at("commit_store")
    assert not engine.store(fresh(), tokens(CHUNK, "lost"), 0, CHUNK, [1, 2, 3, 4])
    wait_until(lambda: bed.status("pending_transfers", "withheld_transfers") == (0, 1), 30, "another number")
    engine.healthy()
    works(engine, fresh)


def test_dropped_worker_touches_no_page(bed, fresh):
    """As after an error, without a shutdown: the pages are freed next."""
    engine = bed.engine(timeout=TIMEOUT)
    cached, request = tokens(CHUNK, "cached"), fresh()
    assert engine.store(fresh(), cached, 0, CHUNK, [1, 2, 3, 4])
    assert engine.lookup(request, cached) == CHUNK
    engine.worker.client.timeout = 30.0
    with bed.server.frozen():
        engine.worker.submit_retrieve_request(request, engine.op(cached, 0, CHUNK, [5, 6, 7, 8]))
        wait_until(bed.unread, 30, "it to reach the server")
        dropped = threading.Thread(target=_drop, args=(engine.worker,))
        dropped.start()
        # The server is not asked for anything meanwhile.
        wait_until(lambda: engine.worker._worker is None, 30, "the drop to begin")
        engine.fill([5, 6, 7, 8], 55)
    dropped.join()
    wait_until(lambda: bed.status("pending_transfers") == (0,), 30, "the retrieve to end")
    assert are(engine, [5, 6, 7, 8], 55)


def _drop(adapter):
    adapter._registration.worker = None
    gc.collect()


@pytest.mark.parametrize("bad", [{"start": -CHUNK}, {"end": 1 << 70}, {"skip_first_n_tokens": -1}])
def test_invalid_operation_ends_with_its_batch(bed, mode, fresh, bad):
    """No exception half-way: all requests of the batch end, and nothing is left under way."""
    engine = bed.engine(mode=mode)
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


def test_several_threads_wait_for_one_result(bed):
    """All get it, whichever goes on first."""
    client, results = Client(bed.server.url), []
    assert client.wait_healthy(10)
    interval = sys.getswitchinterval()
    try:
        with bed.server.frozen():
            futures = [client.get_chunk_size() for _ in range(20)]
            started = []

            def wait(future):
                started.append(future)
                results.append(future.result())

            threads = [threading.Thread(target=wait, args=(future,)) for future in futures for _ in range(4)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(started) == len(threads), 30, "all threads to wait")
            # From here to the last reply no other thread runs in Python, so all of a future's go on at the same time.
            sys.setswitchinterval(30)
        while client.in_flight:
            pass
    finally:
        sys.setswitchinterval(interval)
    for thread in threads:
        thread.join()
    client.close()
    assert results == [CHUNK] * 80


def test_loading_worker_without_pool_receives_pickled_chunks(bed, fresh):
    """It says so when it registers, rather than be lent slots that it cannot read until its first store."""
    writer, prompt, request = bed.engine(), tokens(CHUNK, "shared"), fresh()
    assert writer.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])
    reader = bed.engine(mode="pickle")
    assert reader.lookup(request, prompt) == CHUNK
    assert reader.retrieve(request, prompt, 0, CHUNK, [5, 6, 7, 8]) == set()
    assert reader.has([5, 6, 7, 8], writer.read([1, 2, 3, 4]))
    assert bed.status("pending_transfers", "withheld_transfers") == (0, 0)


def test_pages_live_as_long_as_native_worker(bed):
    """Of a cycle, the collector may take the pages apart before the worker whose threads copy them."""
    adapter = bed.engine().worker
    registration = adapter._registration
    pages, native = weakref.ref(registration._storages), registration.worker
    registration._storages = registration.worker = None
    gc.collect()
    assert pages() is not None
    del native
    gc.collect()
    assert pages() is None
