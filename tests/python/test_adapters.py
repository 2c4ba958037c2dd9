"""Every method of the two adapters against the built server."""

import errno
import glob
import hashlib
import os
import pickle
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import CHUNK
from kvrig.proxy import Proxy
from kvrig.server import free_port
from kvrig.waiting import wait_until
from kvtier import KvTierError, LoadStoreOp, Prompt, SchedulerAdapter, WorkerAdapter
from kvtier.tensors import Segment, cuda_storage
from kvtier.worker import Group
from rig import BLOCK, tokens

PER_CHUNK = CHUNK // BLOCK


def hashes(count, seed):
    """Returns chained block hashes in the form of engines."""
    made, last = [], seed.encode()
    for _ in range(count):
        last = hashlib.sha256(last).digest()
        made.append(last)
    return made


LAYOUTS = ["fused_hnd", "fused_nhd", "kv_first_nhd", "kv_first_hnd", "blocks_first_nhd", "mla"]


# proves: docs/compare.md#kvtiers-connector-for-vllm
@pytest.mark.parametrize("layout", LAYOUTS)
def test_retrieve_returns_stored_bytes(place, mode, layout, fresh):
    """Another engine retrieves what one stored, also into other blocks in another order."""
    server = place.server()
    first = place.engine(server, mode=mode, layout=layout, model=f"m/{layout}")
    second = place.engine(server, mode=mode, layout=layout, model=f"m/{layout}", seed=2)
    prompt, blocks = tokens(3 * CHUNK + 5, layout), [3, 4, 5, 6, 9, 8, 20, 21, 40, 41, 42, 43]
    expected = first.read(blocks)
    assert first.store(fresh(), prompt, 0, 3 * CHUNK, blocks)
    request, target = fresh(), [50, 7, 1, 2, 30, 31, 32, 33, 60, 61, 62, 10]
    assert second.lookup(request, prompt) == 3 * CHUNK
    others = [b for b in range(64) if b not in target]
    untouched = second.read(others)
    assert second.retrieve(request, prompt, 0, 3 * CHUNK, target) == set()
    assert second.has(target, expected)
    assert second.has(others, untouched)
    assert second.worker.transport == {"engine_driven": "pool", "pickle": "pickle", "lmcache_driven": "server"}[mode]


def test_engine_driven_modes_share_objects(place, fresh):
    """A chunk has the same bytes through the pool and pickled; pages copied by the server have another layout."""
    server = place.server()
    writer = place.engine(server, mode="pickle")
    prompt, blocks = tokens(CHUNK, "shared"), [1, 2, 3, 4]
    expected = writer.read(blocks)
    assert writer.store(fresh(), prompt, 0, CHUNK, blocks)
    reader, request = place.engine(server, mode="engine_driven", seed=5), fresh()
    assert reader.lookup(request, prompt) == CHUNK
    assert reader.retrieve(request, prompt, 0, CHUNK, blocks) == set()
    assert reader.has(blocks, expected)
    assert place.engine(server, mode="lmcache_driven", seed=6).lookup(fresh(), prompt) == 0


def test_partial_prefix_retrieve_skips_blocks(place, mode, fresh):
    """A hit ends where prompts differ; blocks of the engine's own prefix are not written."""
    engine = place.engine(place.server(), mode=mode)
    prompt = tokens(4 * CHUNK, "partial")
    assert engine.store(fresh(), prompt, 0, 2 * CHUNK, list(range(1, 9)))
    assert engine.store(fresh(), prompt, 2 * CHUNK, 3 * CHUNK, list(range(9, 13)))
    expected = engine.read(list(range(1, 13)))
    request, other = fresh(), prompt[: 3 * CHUNK] + tokens(CHUNK, "other end")
    assert engine.lookup(request, other) == 3 * CHUNK
    engine.fill(list(range(1, 13)), 7)
    skip = CHUNK + 2 * BLOCK + 1
    assert engine.retrieve(request, other, 0, 3 * CHUNK, list(range(1, 13)), skip=skip) == set()
    kept = skip // BLOCK
    assert engine.has(list(range(kept + 1, 13)), [layer[kept:] for layer in expected])
    assert all((layer == 7).all() for layer in engine.read(list(range(1, kept + 1))))


def test_tenants_share_nothing(place, mode, fresh):
    """cache_salt is part of the key of every operation."""
    engine = place.engine(place.server(), mode=mode)
    prompt = tokens(CHUNK, "salt")
    for number, salt in enumerate(["", "alice", "bob"]):
        assert engine.store(fresh(), prompt, 0, CHUNK, [4 * number + i for i in range(1, 5)], salt=salt)
    kept = {salt: engine.read([4 * n + i for i in range(1, 5)]) for n, salt in enumerate(["", "alice", "bob"])}
    assert engine.lookup(fresh(), prompt, salt="carol") == 0
    for salt in ["bob", "", "alice"]:
        request = fresh()
        assert engine.lookup(request, prompt, salt=salt) == CHUNK
        assert engine.retrieve(request, prompt, 0, CHUNK, [30, 31, 32, 33], salt=salt) == set()
        assert engine.has([30, 31, 32, 33], kept[salt])
    # A lookup of one tenant grants no access to another's chunks.
    request = fresh()
    assert engine.lookup(request, prompt, salt="alice") == CHUNK
    assert engine.retrieve(request, prompt, 0, CHUNK, [30, 31, 32, 33], salt="bob") == {30, 31, 32, 33}


def test_block_hashes_as_keys(place, mode, fresh):
    """In hash mode only the engine's hashes, strided to chunks, find what was stored under them."""
    engine = place.engine(place.server(), mode=mode)
    chain, blocks = hashes(2 * PER_CHUNK + 1, "a"), list(range(1, 9))
    expected = engine.read(blocks)
    assert engine.store(fresh(), chain, 0, 2 * CHUNK, blocks)
    request = fresh()
    assert engine.lookup(request, chain) == 2 * CHUNK
    engine.fill(blocks)
    # Without positions the range is all whole chunks.
    engine.worker.submit_retrieve_request(request, LoadStoreOp(blocks, block_hashes=chain))
    assert engine.finish_retrieve(request) == set()
    assert engine.has(blocks, expected)
    # Only the last hash of a chunk counts, since it covers those before it.
    strided = list(chain)
    strided[0] = bytes(32)
    assert engine.lookup(fresh(), strided) == 2 * CHUNK
    parted = chain[:PER_CHUNK] + hashes(PER_CHUNK, "b")
    assert engine.lookup(fresh(), parted) == CHUNK
    assert engine.lookup(fresh(), hashes(2 * PER_CHUNK, "b")) == 0
    assert engine.lookup(fresh(), chain, salt="alice") == 0
    assert engine.lookup(fresh(), chain[: PER_CHUNK - 1]) == 0


def test_repeated_request_is_one_lookup(place, fresh):
    """Also with other tokens. A prompt shorter than a chunk is not sent."""
    server = place.server()
    engine, request = place.engine(server), fresh()
    prompt = tokens(CHUNK, "twice")
    engine.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])
    scheduler = engine.scheduler
    scheduler.maybe_submit_lookup_request(request, token_ids=prompt)
    scheduler.maybe_submit_lookup_request(request, token_ids=tokens(CHUNK, "else"))
    wait_until(lambda: scheduler.check_lookup_result(request) is not None, 60, "lookup")
    assert scheduler.check_lookup_result(request) == CHUNK
    assert scheduler.check_lookup_result(request) == CHUNK, "reported again until it is cleaned up"
    scheduler.cleanup_lookup_result(request)
    with pytest.raises(KeyError):
        scheduler.check_lookup_result(request)
    sessions = server.get("/status")[1]["active_sessions"]
    scheduler.maybe_submit_lookup_request("short", token_ids=tokens(CHUNK - 1, "short"))
    assert scheduler.check_lookup_result("short") == 0
    assert server.get("/status")[1]["active_sessions"] == sessions


def test_prompt_needs_exactly_one_form(place):
    """None and two forms are errors."""
    engine = place.engine(place.server())
    for given in [{}, {"token_ids": [1], "block_hashes": [b"1"]}]:
        with pytest.raises(ValueError, match="exactly one"):
            engine.scheduler.maybe_submit_lookup_request("r", **given)
        with pytest.raises(ValueError, match="exactly one"):
            engine.worker.submit_store_request("r", LoadStoreOp([1], start=0, end=CHUNK, **given))
    assert engine.scheduler.num_blocks_per_chunk() == engine.worker.num_blocks_per_chunk() == PER_CHUNK


def leased(server):
    """Returns the number of leased objects."""
    text = server.get("/metrics")[1]
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("kvtier_l1_leased_objects"))


def test_leases_end_when_freed_or_session_ends(place, mode, fresh):
    """Leases of a lookup without a retrieve end on request, for its own tenant only."""
    server = place.server()
    engine, prompt = place.engine(server, mode=mode), tokens(2 * CHUNK, "leases")
    engine.store(fresh(), prompt, 0, 2 * CHUNK, list(range(1, 9)), salt="alice")
    first, second = fresh(), fresh()
    for request in (first, second):
        assert engine.lookup(request, prompt, salt="alice") == 2 * CHUNK
    assert leased(server) == 2
    engine.scheduler.free_lookup_locks(first, prompt, start=0, end=2 * CHUNK, cache_salt="alice")
    engine.scheduler.end_session(second)
    wait_until(lambda: leased(server) == 0, 60, "leases to end")
    assert engine.retrieve(first, prompt, 0, 2 * CHUNK, list(range(1, 9)), salt="alice") == set(range(1, 9))


def test_batches_finish_together(place, mode, fresh):
    """Merged requests are reported together and fail together."""
    engine = place.engine(place.server(), mode=mode)
    names, prompts = [fresh(), fresh(), fresh()], [tokens(CHUNK, n) for n in "abc"]
    blocks = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    expected = [engine.read(each) for each in blocks]
    ops = [engine.op(prompt, 0, CHUNK, each) for prompt, each in zip(prompts, blocks, strict=True)]
    engine.worker.batched_submit_store_requests(names, ops, None, ["", "x", ""])
    assert engine.worker.get_finished(set())[0] == set(), "the engine has finished none of them"
    ended = set()

    def all_ended():
        new, _ = engine.worker.get_finished(names)
        assert new in (set(), set(names)), "together"
        ended.update(new)
        return ended == set(names)

    wait_until(all_ended, 60, "stores")
    for name, prompt, salt in zip(names, prompts, ["", "x", ""], strict=True):
        assert engine.lookup(name, prompt, salt=salt) == CHUNK
    engine.fill(range(1, 13))
    engine.worker.batched_submit_retrieve_requests(names, ops, None, ["", "x", ""])
    assert engine.finish_retrieve(names[0]) == set()
    assert all(engine.has(each, what) for each, what in zip(blocks, expected, strict=True))
    # The second request's session has ended, so all three fail.
    engine.scheduler.client.end_session(names[1]).result()
    engine.worker.batched_submit_retrieve_requests(names, ops, None, ["", "x", ""])
    retrieved = set()
    wait_until(lambda: retrieved.update(engine.worker.get_finished(())[1]) or retrieved, 60, "retrieves")
    assert retrieved == set(names)
    assert engine.worker.get_block_ids_with_load_errors() == set(range(1, 13))
    assert engine.worker.get_failed_request_ids() == set(names)
    assert engine.worker.get_failed_request_ids() == set(), "reported once"


def test_store_is_reported_once_after_engine_finished(place, mode, fresh):
    """Asynchronous scheduling repeats ids, also before their store has ended."""
    engine, request = place.engine(place.server(), mode=mode), fresh()
    worker = engine.worker
    engine.store(request, tokens(CHUNK, "once"), 0, CHUNK, [1, 2, 3, 4])
    assert worker.get_finished(set()) == (set(), set())
    assert worker.get_finished({request}) == ({request}, set())
    assert worker.get_finished({request}) == (set(), set())
    assert worker.get_finished({request, "never stored"}) == ({"never stored"}, set())
    # The engine finishes the request first.
    worker.submit_store_request(request, engine.op(tokens(CHUNK, "again"), 0, CHUNK, [1, 2, 3, 4]))
    reported = list(worker.get_finished({request})[0])
    wait_until(lambda: reported.extend(worker.get_finished({request})[0]) or reported, 60, "store")
    assert reported == [request]
    assert worker.get_finished({request}) == (set(), set())


def test_request_waits_for_all_its_stores(place, mode, fresh):
    """With chunked prefill the request ends with its last store."""
    engine, request = place.engine(place.server(), mode=mode), fresh()
    prompt = tokens(8 * CHUNK, "many")
    for chunk in range(8):
        blocks = list(range(1 + chunk * PER_CHUNK, 1 + (chunk + 1) * PER_CHUNK))
        engine.worker.submit_store_request(request, engine.op(prompt, chunk * CHUNK, (chunk + 1) * CHUNK, blocks))
    reported = []
    wait_until(lambda: reported.extend(engine.worker.get_finished({request})[0]) or reported, 60, "stores")
    assert engine.worker.counters.stores == 8
    assert engine.lookup(fresh(), prompt) == 8 * CHUNK
    # Preemption: after this returns the blocks may be overwritten, and their contents are cached.
    engine.worker.submit_store_request(request, engine.op(tokens(CHUNK, "p"), 0, CHUNK, [1, 2, 3, 4]))
    engine.worker.wait_for_stores([request, "other"])
    assert engine.worker.counters.stores == 9


# proves: docs/python.md#stores
@pytest.mark.parametrize("how", ["engine_driven", "pickle"])
def test_stores_not_begun_are_abandoned(place, how, fresh):
    """A preemption does not wait for copies of this process that have not begun, and they never begin."""
    place.mode = "engine_pickle" if how == "pickle" else "both"
    server = place.server()
    server.expect_trouble("the data was refused")
    engine = place.engine(server, mode=how, heartbeat=600)
    worker, names, prompts = engine.worker, [fresh(), fresh()], [tokens(CHUNK, "one"), tokens(CHUNK, "two")]
    with server.frozen():
        for name, prompt in zip(names, prompts, strict=True):
            worker.submit_store_request(name, engine.op(prompt, 0, CHUNK, [1, 2, 3, 4]))
        worker.wait_for_stores(names, patience=0)
        assert worker.counters.failed_stores == 0, "before their deadline"
        assert worker.get_finished(names)[0] == set(names)
        engine.fill([1, 2, 3, 4], 99)
    wait_until(lambda: worker.get_finished(()) and worker.counters.failed_stores == 2, 60, "their end")
    assert [engine.lookup(fresh(), prompt) for prompt in prompts] == [0, 0]


# proves: docs/python.md#stores
def test_server_driven_stores_are_awaited_until_deadline(place, fresh):
    """For preempted and finished requests a server that hangs costs at most the deadline."""
    server = place.server()
    server.expect_trouble("deadline|instance|register")
    engine = place.engine(server, mode="lmcache_driven", timeout=3.0, heartbeat=3.0)
    worker, names, prompt = engine.worker, [fresh(), fresh()], tokens(CHUNK, "late")
    with server.frozen():
        worker.submit_store_request(names[0], engine.op(prompt, 0, CHUNK, [1, 2, 3, 4]))
        worker.submit_store_request(names[1], engine.op(prompt, 0, CHUNK, [5, 6, 7, 8]))
        assert worker.get_finished({names[1]})[0] == set()
        worker.wait_for_stores([names[0]], patience=0)
        reported = set(worker.get_finished(())[0])
        wait_until(lambda: reported.update(worker.get_finished(())[0]) or reported == {names[1]}, 60, "the second")
        assert worker.counters.failed_stores == 2
        engine.fill(range(1, 9), 99)
    engine.healthy()
    assert engine.lookup(fresh(), prompt) == 0
    wait_until(lambda: engine.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4]), 60, "a store after the registration")


# proves: docs/python.md#stores
def test_server_driven_stores_have_their_own_deadline(place, fresh):
    """A preemption waits for it. Retrieves, and copies by this process, have the whole timeout."""
    server = place.server()
    server.expect_trouble("deadline|instance|register")
    engine = place.engine(server, mode="lmcache_driven", timeout=30.0, store_timeout=0.3, heartbeat=600)
    worker, names, prompt = engine.worker, [fresh(), fresh()], tokens(CHUNK, "short")
    with server.frozen():
        worker.submit_retrieve_request(names[0], engine.op(prompt, 0, CHUNK, [5, 6, 7, 8]))
        worker.submit_store_request(names[1], engine.op(prompt, 0, CHUNK, [1, 2, 3, 4]))
        began = time.monotonic()
        worker.wait_for_stores([names[1]], patience=0)
        assert time.monotonic() - began < 15
        assert worker.counters.failed_stores == 1 and worker.counters.failed_retrieves == 0
        assert worker.client.timeout == 30.0


def test_reused_id_is_reported_again(place, fresh):
    """Also for a worker that is not its tensor-parallel group's writer."""
    engine, request = place.engine(place.server(), is_writer=False), fresh()
    for _ in range(2):
        engine.worker.submit_store_request(request, engine.op(tokens(CHUNK, "reader"), 0, CHUNK, [1, 2, 3, 4]))
        assert engine.worker.get_finished({request})[0] == {request}
        assert engine.worker.get_finished({request})[0] == set(), "asynchronous scheduling repeats it"


def test_full_dev_shm_error_names_remedies(monkeypatch):
    """It names the needed and free bytes and what to do; no segment is left."""
    before = set(os.listdir("/dev/shm"))
    needed = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize * 4

    def full(file, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(KvTierError, match=f"/dev/shm: lmcache_driven needs {needed} bytes .* bytes of .* are free .*No space.*--shm-size.*engine_driven"):
        Segment(needed)
    assert {name for name in set(os.listdir("/dev/shm")) - before if f"_{os.getpid()}_" in name} == set()


class DeviceEvent:
    """The used part of a CUDA event; the server answers its handle."""

    def __init__(self, done=True):
        self.done, self.is_waited_for = done, False

    def ipc_handle(self):
        return b"a device event"

    def query(self):
        return self.done

    def wait(self):
        self.is_waited_for = True


def test_gpu_memory_that_no_server_can_open_names_the_flags():
    """CUDA has no IPC handle for memory of vLLM's cumem allocator, which sleep mode needs."""

    class Virtual:
        def _share_cuda_(self):
            raise RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be asynchronously reported")

    with pytest.raises(ValueError, match=r"cuda:1 \(CUDA error: invalid argument\).* without --enable-sleep-mode and --enable-cumem"):
        cuda_storage(SimpleNamespace(device="cuda:1"), Virtual())


def test_engine_event_lives_until_server_opened_it(place, fresh):
    """The handle is valid only as long as the event."""
    server = place.server()
    engine, event = place.engine(server, mode="lmcache_driven"), DeviceEvent()
    known = weakref.ref(event)
    with server.frozen():
        engine.worker.submit_store_request(fresh(), engine.op(tokens(CHUNK, "event"), 0, CHUNK, [1, 2, 3, 4]), event)
        del event
        assert known() is not None
    engine.finish_stores()
    assert known() is None and engine.worker.counters.stores == 1


def test_unopenable_event_fails_only_its_transfer(place, fresh, monkeypatch):
    """Other transfers are reported, also by the same call."""
    engine, names = place.engine(place.server(), mode="lmcache_driven"), [fresh(), fresh(), fresh()]
    worker, worker.on_cuda = engine.worker, True

    def broken(device, handle):
        raise RuntimeError("no such event")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.Event, "from_ipc_handle", broken)
    for number, name in enumerate(names):
        event = DeviceEvent() if number != 2 else None
        worker.submit_store_request(name, engine.op(tokens(CHUNK, name), 0, CHUNK, [1, 2, 3, 4]), event)
    reported = set()
    wait_until(lambda: reported.update(worker.get_finished(names)[0]) or reported == set(names), 60, "all three")
    assert (worker.counters.failed_stores, worker.counters.stores) == (2, 1)


def test_store_with_device_event_waits_on_device(place, fresh, monkeypatch):
    """In a preemption the engine's next work on the device follows the copy; the thread does not wait."""
    engine, name, theirs = place.engine(place.server(), mode="lmcache_driven"), fresh(), DeviceEvent(done=False)
    worker, worker.on_cuda = engine.worker, True
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.Event, "from_ipc_handle", lambda device, handle: theirs)
    worker.submit_store_request(name, engine.op(tokens(CHUNK, name), 0, CHUNK, [1, 2, 3, 4]), DeviceEvent())
    worker.wait_for_stores([name])
    assert theirs.is_waited_for
    assert worker.get_finished({name})[0] == {name} and worker.counters.stores == 0
    theirs.done = True
    worker.get_finished(())
    assert worker.counters.stores == 1


def test_skipped_store_is_not_counted_as_stored(place, fresh):
    """The server has all chunks, or no space. If it takes a part, that part counts."""
    engine, prompt = place.engine(place.server(), mode="engine_driven"), tokens(3 * CHUNK, "again")
    assert engine.store(fresh(), prompt, 0, 2 * CHUNK, list(range(1, 9)))
    engine.worker.submit_store_request(fresh(), engine.op(prompt, 0, 2 * CHUNK, list(range(1, 9))), tag="all")
    engine.finish_stores()
    engine.worker.submit_store_request(fresh(), engine.op(prompt, 0, 3 * CHUNK, list(range(1, 13))), tag="part")
    engine.finish_stores()
    counted = engine.worker.counters
    assert (counted.stores, counted.skipped_stores, counted.stored_tokens) == (2, 1, 3 * CHUNK)
    assert engine.worker.take_ended_stores() == [("all", []), ("part", [2])]
    assert engine.worker.take_ended_stores() == [], "reported once"


def test_reading_order_of_results_changes_nothing(place, mode, fresh, monkeypatch):
    """Only get_finished collects results: errors are reported with it, not before."""
    engine, request = place.engine(place.server(), mode=mode), fresh()
    worker = engine.worker
    worker.submit_retrieve_request(request, engine.op(tokens(CHUNK, "order"), 0, CHUNK, [1, 2, 3, 4]))
    worker._apply(worker._worker.take_finished(10.0))
    polls = []
    monkeypatch.setattr(worker, "_poll", lambda: polls.append(True))
    assert worker.get_failed_request_ids() == {request} and worker.get_block_ids_with_load_errors() == {1, 2, 3, 4}
    assert polls == []
    assert worker.get_finished(())[1] == {request} and polls == [True]


# proves: docs/python.md#pages-of-transfers-without-an-answer
def test_session_ended_while_server_hangs_is_released(place, fresh):
    """Its leases do not last until the server's timeouts."""
    server = place.server()
    engine, prompt = place.engine(server, heartbeat=3.0), tokens(2 * CHUNK, "hang")
    engine.store(fresh(), prompt, 0, 2 * CHUNK, list(range(1, 9)), salt="alice")
    first, second = fresh(), fresh()
    for request in (first, second):
        assert engine.lookup(request, prompt, salt="alice") == 2 * CHUNK
    with server.frozen():
        wait_until(lambda: not engine.scheduler.is_healthy, 60, "degraded")
        engine.scheduler.free_lookup_locks(first, prompt, start=0, end=2 * CHUNK, cache_salt="alice")
        engine.scheduler.end_session(second)
    wait_until(lambda: leased(server) == 0, 60, "leases to end")


def test_auto_mode_uses_allowed_mode(place, fresh, caplog):
    """The first choice, or the second with a log line. An explicit mode is not replaced."""
    for kind, transport, words in [("lmcache_driven", "server", 1), ("engine_pickle", "pickle", 0), ("both", "pool", 0)]:
        server = place.server(mode=kind)
        server.expect_trouble("register|mode")
        caplog.clear()
        engine, request, prompt = place.engine(server, mode="auto"), fresh(), tokens(CHUNK, kind)
        assert engine.worker.transport == transport
        lines = [each.getMessage() for each in caplog.records if "trying lmcache_driven" in each.getMessage()]
        assert len(lines) == words, lines
        assert engine.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])
        assert engine.lookup(request, prompt) == CHUNK
        assert engine.retrieve(request, prompt, 0, CHUNK, [5, 6, 7, 8]) == set()
        assert engine.has([5, 6, 7, 8], engine.read([1, 2, 3, 4]))
    refused = place.engine(place.servers[0], mode="engine_driven", register=False)
    with pytest.raises(KvTierError):
        refused.worker.register_kv_caches({f"layer.{i}": t for i, t in enumerate(refused.tensors)}, kv_layout="HND")


def test_server_without_heartbeats_is_not_used(place):
    """Its connection would never be checked again."""
    proxy = Proxy(place.server().url, free_port())

    def again():
        proxy.at("ping", again)

    again()
    try:
        with pytest.raises(ConnectionError, match="no KV-cache server answers"):
            SchedulerAdapter(proxy.url, "m", block_tokens=BLOCK, wait_for_server=1.0, heartbeat=0.2)
    finally:
        proxy.close()


def test_failed_retrieve_reports_its_blocks(place, mode, fresh):
    """Without a lookup, or after a clear. Blocks of the engine's own prefix are not reported."""
    server = place.server()
    engine, prompt = place.engine(server, mode=mode), tokens(2 * CHUNK, "gone")
    assert engine.retrieve(fresh(), prompt, 0, 2 * CHUNK, list(range(1, 9))) == set(range(1, 9))
    engine.store(fresh(), prompt, 0, 2 * CHUNK, list(range(1, 9)))
    request = fresh()
    assert engine.lookup(request, prompt) == 2 * CHUNK
    engine.scheduler.client.clear(True).result()
    failed = engine.retrieve(request, prompt, 0, 2 * CHUNK, list(range(1, 9)), skip=2 * BLOCK)
    assert failed == set(range(3, 9))
    assert engine.worker.counters.failed_retrieves == 2


def test_invalid_ranges_and_blocks_fail(place, mode, fresh):
    """The engine gets a failure, and later requests are served."""
    server = place.server()
    server.expect_trouble("store failed|retrieve failed")
    engine, prompt = place.engine(server, mode=mode), tokens(2 * CHUNK, "bad")
    for start, end, blocks in [(0, CHUNK, [1, 2]), (0, CHUNK, [1, 2, 3, 9999]), (1, CHUNK, [1, 2, 3, 4])]:
        assert not engine.store(fresh(), prompt, start, end, blocks)
        assert engine.retrieve(fresh(), prompt, start, end, blocks)
    assert engine.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])



def test_reader_does_not_store(place, fresh):
    """With MLA several workers have the same KV; one writes it, all may read it."""
    server = place.server()
    writer = place.engine(server, layout="mla", num_kv_readers=2)
    reader = place.engine(server, layout="mla", num_kv_readers=2, is_writer=False, seed=2)
    prompt, request = tokens(CHUNK, "mla"), fresh()
    assert not reader.store(request, prompt, 0, CHUNK, [1, 2, 3, 4])
    assert reader.worker.get_finished({request})[0] == {request}
    assert writer.store(request, prompt, 0, CHUNK, [1, 2, 3, 4])
    assert writer.lookup(request, prompt) == CHUNK
    for engine in (writer, reader):
        assert engine.retrieve(request, prompt, 0, CHUNK, [5, 6, 7, 8]) == set()
        assert engine.has([5, 6, 7, 8], writer.read([1, 2, 3, 4]))


def test_each_rank_has_its_own_piece(place, mode, fresh):
    """With tensor parallelism a hit needs every rank's piece, and each rank retrieves its own."""
    server, prompt = place.server(), tokens(CHUNK, "ranks")
    ranks = [place.engine(server, mode=mode, world_size=2, seed=9 + rank) for rank in (0,)]
    other = place.engine(server, mode=mode, world_size=2, seed=20, register=False)
    other.worker.worker_id = 1
    other.worker.register_kv_caches(
        {f"layer.{i}": t for i, t in enumerate(other.tensors)}, kv_layout=other.layout.hints["kv_layout"]
    )
    ranks.append(other)
    kept = [rank.read([1, 2, 3, 4]) for rank in ranks]
    assert ranks[0].store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])
    assert ranks[0].lookup(fresh(), prompt) == 0
    assert ranks[1].store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])
    request = fresh()
    assert ranks[0].lookup(request, prompt) == CHUNK
    for rank, expected in zip(ranks, kept, strict=True):
        rank.fill([1, 2, 3, 4])
        assert rank.retrieve(request, prompt, 0, CHUNK, [1, 2, 3, 4]) == set()
        assert rank.has([1, 2, 3, 4], expected)


def test_reset_cache(place, fresh):
    """Clears the server's memory."""
    engine, prompt = place.engine(place.server()), tokens(CHUNK, "reset")
    engine.store(fresh(), prompt, 0, CHUNK, [1, 2, 3, 4])
    assert engine.scheduler.reset_cache()
    assert engine.lookup(fresh(), prompt) == 0


def test_shutdown_unregisters_and_removes_segments(place, mode):
    """A second call is allowed."""
    engine = place.engine(place.server(), mode=mode)
    mine = f"/dev/shm/lmcache_kv_{os.getpid()}_*"
    assert bool(glob.glob(mine)) == (mode == "lmcache_driven")
    engine.worker.shutdown()
    assert not glob.glob(mine)
    engine.worker.shutdown()
    assert engine.tensors[0].sum() is not None, "the tensors stay usable"


def test_wrong_chunk_size_and_missing_server_raise(place):
    """The errors say what to do."""
    server = place.older(place.server())
    for make in (SchedulerAdapter, WorkerAdapter):
        with pytest.raises(ValueError, match="does not divide the server's chunk of 16 tokens"):
            make(server.url, "m", block_tokens=12)
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="no KV-cache server answers"):
            make(f"127.0.0.1:{free_port()}", "m", block_tokens=4, timeout=0.3, wait_for_server=0.3)
        assert time.monotonic() - began < 30
    with pytest.raises(ValueError, match="mode"):
        WorkerAdapter(server.url, "m", block_tokens=4, mode="psychic")


def test_uncopyable_models_are_refused(place):
    """Several groups of layers need the server's copy."""
    engine = place.engine(place.server(), register=False)
    groups = [Group(["layer.0"], BLOCK), Group(["layer.1", "layer.2"], BLOCK, sliding_window=CHUNK)]
    named = {f"layer.{i}": tensor for i, tensor in enumerate(engine.tensors)}
    with pytest.raises(ValueError, match="use lmcache_driven"):
        engine.worker.register_kv_caches(named, groups, kv_layout="HND")


def test_skipped_blocks_count_per_group(place):
    """Groups may have blocks of different sizes. A failed retrieve reports only blocks that it writes."""
    engine = place.engine(place.server(), register=False)
    groups = [Group(["layer.0"], BLOCK), Group(["layer.1", "layer.2"], 2 * BLOCK)]
    with pytest.raises((KvTierError, ValueError)):
        engine.worker.register_kv_caches({f"layer.{i}": t for i, t in enumerate(engine.tensors)}, groups, kv_layout="HND")
    op = LoadStoreOp([[1, 2, 3, 4], [5, 6]], token_ids=tokens(CHUNK), end=CHUNK, skip_first_n_tokens=2 * BLOCK)
    assert engine.worker._written(op) == [3, 4, 6]


def test_prompts():
    """Prompts are equal, hashable and picklable, and differ by identities beside their tokens."""
    prompt = Prompt(tokens(40, "p"))
    assert pickle.loads(pickle.dumps(prompt)) == prompt and len(prompt) == 40
    assert prompt.prefix(10) == Prompt(tokens(40, "p")[:10])
    hashes = prompt.chunk_hashes(8)
    assert hashes[:2] + prompt.chunk_hashes(8, hashes[:2]) == hashes and prompt.prefix(8).chunk_hashes(8, hashes) == []
    pictured = prompt.with_identity(8, 16, b"picture")
    assert pictured != prompt and len(pictured) == 40
    assert pictured == prompt.with_identity(8, 16, b"picture")
    assert len({pictured, prompt, prompt.with_identity(8, 16, b"other"), pictured}) == 3
    assert pictured.prefix(8) == prompt.prefix(8)
    with pytest.raises(ValueError, match="the prompt has 40 tokens"):
        prompt.with_identity(30, 11, b"x")
    with pytest.raises(OverflowError):
        Prompt([-1])
    with pytest.raises(ValueError, match="at least 9 tokens"):
        Prompt.from_block_hashes([b"x"], 1, 8)
