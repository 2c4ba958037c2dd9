"""vLLM's connector: after a reset of the prefix cache nothing from before is found."""

import time

from conftest import CHUNK
from kvrig.waiting import wait_until
from rig import BLOCK, tokens
from vllm_rig import request, same  # skips without vLLM

from kvtier.vllm import KvTierConnector


def test_reset_and_stats(place, engines, caplog):
    """After a reset nothing from before is found, whatever the server keeps; the counters match."""
    server, prompt = place.server(), tokens(CHUNK + 1, "reset")
    engine, careful = engines(server, **{"kvtier.reset_server": "true"}), engines(server)
    engine.prefill(request("a", prompt), range(1, 6))
    req = request("b", prompt)
    assert engine.match(req) == (CHUNK, True)
    engine.allocate(req, range(1, 6), 0)
    engine.finish(req)
    stats = engine.scheduler.get_kv_connector_stats()
    assert stats.data == {"lookups": 2, "hit_tokens": CHUNK, "misses_not_found": 1}
    assert KvTierConnector.build_kv_connector_stats(stats.to_dict()).aggregate(stats).data["lookups"] == 4
    assert engine.scheduler.get_kv_connector_stats() is None
    for _ in range(2):
        # The reset of another engine keeps the KV, as a second tier does.
        assert careful.scheduler.reset_cache() is True
    assert sum("prefix cache was reset" in record.message for record in caplog.records) == 1, "logged once"
    assert careful.match(request("c", prompt)) == (0, False)
    assert engine.match(request("d", prompt)) == (CHUNK, True), "the others' keys are what they were"
    careful.prefill(request("e", prompt), range(1, 6))
    own = request("f", prompt)
    assert careful.match(own) == (CHUNK, True), "what it stored since then is found"
    assert careful.load(own, range(11, 16), 0, CHUNK) == set()
    assert same(careful.read([11, 12, 13, 14]), careful.read([1, 2, 3, 4]))
    careful.finish(own)
    assert engine.scheduler.reset_cache() is True
    wait_until(lambda: engine.match(request("g", prompt)) == (0, False) and objects(server) <= 1, 60, "the server is emptied, too")


def objects(server):
    """Returns the number of chunks in L1."""
    return server.get("/status")[1]["storage_manager"]["l1_manager"]["total_object_count"]


def test_reset_in_block_hashes_mode_finds_nothing(place, engines):
    """After it vLLM's hashes are the same, and the keys differ."""
    engine = engines(place.server(), **{"kvtier.key_mode": "block_hashes", "kvtier.reset_server": False})
    prompt = engine.stored(2 * CHUNK + 1, "hr")
    assert engine.scheduler.reset_cache() is True
    engine.prefill(request("b", prompt[: CHUNK + 1]), range(1, 6))
    assert engine.match(request("c", prompt)) == (CHUNK, True), "of the old the second chunk is there, and not found"


def test_reset_never_waits(place, engines):
    """The scheduler's thread continues while the server hangs; nothing from before is found when the server resumes."""
    server, prompt = place.server(), tokens(CHUNK + 1, "away")
    engine = engines(server, **{"kvtier.heartbeat": 3})
    engine.prefill(request("a", prompt), range(1, 6))
    client = engine.scheduler._scheduling.adapter.client
    assert client.timeout == 60
    with server.frozen():
        began = time.monotonic()
        assert engine.scheduler.reset_cache() is True
        assert time.monotonic() - began < client.timeout / 2
        wait_until(lambda: not client.is_healthy, 60, "the missed heartbeat")
        # The adapter's reset_cache clears the server's memory, and returns false at once.
        began = time.monotonic()
        assert engine.scheduler._scheduling.adapter.reset_cache() is False
        assert time.monotonic() - began < client.timeout / 2
    wait_until(lambda: client.is_healthy, 60, "the server goes on")
    assert engine.match(request("b", prompt)) == (0, False)


def test_reset_drops_hits_and_stores_in_flight(place, engines):
    """Neither an earlier lookup's result is loaded, nor the chunks of a store in flight or of a running request."""
    engine, old, late = engines(place.server()), tokens(CHUNK + 1, "old"), tokens(2 * CHUNK + 1, "late")
    engine.prefill(request("a", old), range(1, 6))
    waits = request("b", old)
    assert engine.match(waits) == (CHUNK, True)
    assert engine.scheduler.reset_cache() is True
    assert engine.match(waits) == (0, False), "looked up again, and not held through the reset"
    # The worker has not begun this store; the request continues with its earlier KV.
    stores = request("c", late)
    assert engine.match(stores) == (0, False)
    engine.allocate(stores, range(1, 10), 0)
    submit, held = engine.workers[0].wait_for_save, []
    engine.workers[0].wait_for_save = lambda: held.append(engine.workers[0]._get_connector_metadata())
    engine.step(new=[(stores, range(1, 10), 0, CHUNK)])
    assert engine.scheduler.reset_cache() is True
    engine.workers[0].wait_for_save = submit
    engine.workers[0].bind_connector_metadata(held[0])
    submit()
    engine.step(cached=[(stores, None, CHUNK, CHUNK + 1)])
    engine.wait_for_stores()
    assert engine.stats["stores"] == 2, "a request that ran at the reset stores no more"
    assert engine.match(request("d", late)) == (0, False)
    engine.prefill(request("e", late[: CHUNK + 1]), range(11, 16))
    assert engine.match(request("f", late)) == (CHUNK, True), "its second chunk is from before"
    # A preempted request computes again.
    engine.step(preempted=["c"])
    assert engine.match(stores) == (CHUNK, True)


def test_request_running_at_reset_uses_no_new_keys(place, engines):
    """It had computed less than a chunk before the reset."""
    engine = engines(place.server(), **{"kvtier.reset_server": False})
    req = request("a", tokens(CHUNK + 1, "slow"))
    assert engine.match(req) == (0, False)
    engine.scheduler._scheduling.keys._made.clear()
    engine.allocate(req, range(1, 6), 0)
    engine.step(new=[(req, range(1, 6), 0, BLOCK)])
    assert engine.scheduler.reset_cache() is True
    engine.step(cached=[(req, None, BLOCK, CHUNK + 1 - BLOCK)])
    assert engine.finish(req) is False, "nothing of it is stored"
    assert engine.match(request("b", req.all_token_ids)) == (0, False)


def test_reset_during_load_succeeds(place, engines):
    """vLLM's own reset then refuses; the connector does not make a pause or a sleep fail."""
    engine = engines(place.server())
    prompt = engine.stored(CHUNK + 1, "load on")
    req = request("b", prompt)
    assert engine.match(req) == (CHUNK, True)
    engine.allocate(req, range(11, 16), CHUNK)
    assert engine.scheduler.reset_cache() is True
    assert engine.match(request("c", prompt)) == (0, False), "it finds nothing from before"
    engine.wait_for_load()
