"""Slow, dead and failing tiers: L1 answers as if there were none, and no request waits longer than the deadlines."""

import statistics
import time

import pytest
from kvrig import tiers
from kvrig.engine import Group
from kvrig.layouts import layout
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("a tier that does not answer blocks it")

MODES = ["lmcache_driven", "engine_shm", "engine_pickle"]
MIB = 1 / 1024  # of a GiB
KIB = MIB / 1024

# 96 KiB per chunk.
BIG = [Group(layout("kv_first_nhd", heads=8, size=64))]


def mock(kib_per_second, **keys):
    """Flags for a tier in memory behind a link of this speed; a stop does not wait for it."""
    flags = tiers.adapter("mock", max_size_gb=1, mock_bandwidth_gb=kib_per_second * KIB, **keys)
    return [*flags, "--l2-drain-timeout-seconds", "0.01", "--l2-min-free-gb", "0"]


def dead():
    """A tier that takes days to store one object."""
    return mock(0.001)


def in_l1(server):
    """Objects in L1."""
    return server.get("/status")[1]["storage_manager"]["l1_manager"]["total_object_count"]


def round_trips(server):
    """How often lookups, and their results, were asked for."""
    operations = ("lookup", "query_prefetch_status")
    return [tiers.metric(server, "kvtier_requests_total", operation=name) for name in operations]


@pytest.mark.parametrize("mode", MODES)
def test_dead_tier_delays_no_hit(serve, engines, mode):
    """Beside a server without tiers: as many round trips, one a question, for the same hits; no tier is asked."""
    stuck, free = serve(mode, flags=dead()), serve(mode)
    stuck.expect_trouble(r"not stored in time")
    took = {}
    crew = [(server, engines(server, groups=BIG)) for server in (stuck, free)]
    for _, engine in crew:
        for seed in range(6):
            tiers.store(engine, seed)
    before = {server: round_trips(server) for server, _ in crew}
    for _ in range(5):
        for server, engine in crew:
            for seed in range(6):
                began = time.monotonic()
                assert tiers.recall(engine, seed) == 64
                took.setdefault(server, []).append(time.monotonic() - began)
    for server, _ in crew:
        assert [now - then for now, then in zip(round_trips(server), before[server], strict=True)] == [30, 30]
    assert tiers.metric(stuck, "kvtier_l2_queued_objects") > 0, "else nothing was stuck"
    assert tiers.metric(stuck, "lmcache_mp_l2_prefetch_lookup_requests_total") == 0
    print("median seconds of a hit beside a dead tier and without:", *(statistics.median(took[each]) for each in (stuck, free)))


def test_dead_tier_does_not_fill_l1(serve, engines):
    """What waits for it is bounded: everything beyond is dropped there, and stores go on in L1 as without it."""
    server = serve(l1_gb=8 * MIB, flags=dead())
    server.expect_trouble(r"not stored in time|waits? to be stored|too many bytes")
    engine = engines(server, groups=BIG)
    for seed in range(60):
        tiers.store(engine, seed)
    assert tiers.metric(server, "kvtier_l2_queued_bytes") <= 2 << 20
    assert tiers.metric(server, "kvtier_l2_dropped_objects_total") >= 200
    assert tiers.metric(server, "lmcache_mp_l1_allocation_failure_chunks_total") == 0
    assert [tiers.recall(engine, seed) for seed in range(56, 60)] == [64] * 4
    # Cold prompts are misses at once: what a dead tier does not have it need not load.
    assert tiers.recall(engine, 1000) == 0
    assert tiers.metric(server, "kvtier_l2_prefetch_timeouts_total") == 0


def test_late_load_is_not_waited_for_and_not_lost(serve, engines):
    """A lookup answers at its deadline with what L1 has; the load goes on and serves the next one."""
    # 6 KiB at 1 KiB/s; six seconds each way.
    server = serve(flags=[*mock(1), "--l2-load-timeout-seconds", "0.05"])
    engine = engines(server)
    tiers.store(engine, 1, count=32)
    tiers.forget(engine)
    request, hit = engine.lookup(tiers.tokens(32, 1))
    loading = tiers.metric(server, "kvtier_l2_loading_objects")
    assert hit < 32 and loading > 0, f"{hit} tokens hit, {loading} objects still being loaded"
    engine.end(request)
    assert tiers.metric(server, "kvtier_l2_prefetch_timeouts_total", phase="load") >= 1
    wait_until(lambda: tiers.recall(engine, 1, count=32) == 32, 60, "the late load", interval=0.1)
    assert in_l1(server) == 2
    assert tiers.metric(server, "kvtier_l2_loaded_objects_total") == 2, "it was loaded once"


def test_hanging_loads_do_not_block_other_requests(serve, engines):
    """The only place for prefetches is taken by a load that does not end: others miss at their deadline, L1 hits."""
    flags = ["--l2-load-timeout-seconds", "0.1", "--l2-lookup-timeout-seconds", "0.1", "--l2-prefetch-max-in-flight", "1"]
    server = serve(flags=[*mock(4), *flags])
    engine = engines(server)
    for seed in (1, 2, 3):
        tiers.store(engine, seed, count=16)
    tiers.forget(engine)
    tiers.store(engine, 9, count=16, first=40)
    cold = [engine.new_request() for _ in range(3)]
    for seed, request in enumerate(cold, 1):
        engine.scheduler.maybe_submit_lookup_request(request, tiers.tokens(16, seed))
    assert tiers.recall(engine, 9, count=16, first=40) == 16
    hits = [engine.lookup(tiers.tokens(16, seed), request)[1] for seed, request in enumerate(cold, 1)]
    assert 0 in hits, hits
    for request in cold:
        engine.end(request)
    for seed in (1, 2, 3):
        wait_until(lambda seed=seed: tiers.recall(engine, seed, count=16) == 16, 60, "the hit", interval=0.1)


def test_breaker_leaves_a_dead_tier_alone(serve, engines):
    """Stores that miss their deadline open it: what comes next is refused at once, and the status says so."""
    server = serve(flags=mock(0.001, store_timeout_ms=50, breaker_failures=2, breaker_pause_ms=600_000,
                              breaker_pause_max_ms=600_000))  # fmt: skip
    server.expect_trouble(r"objects cannot be stored|not stored in time|breaker|closing it takes")
    engine = engines(server)
    for seed in range(6):
        tiers.store(engine, seed)
    # A late store stays queued until the tier releases it.
    wait_until(lambda: tiers.tier(server)["breaker"]["store"]["state"] == "open", 60, "an open breaker")
    assert tiers.metric(server, "kvtier_l2_breaker_open", call="store") == 1
    assert tiers.metric(server, "kvtier_l2_late_calls_total", call="store") >= 2
    tiers.store(engine, 7)
    refused = lambda: tiers.metric(server, "kvtier_l2_breaker_refused_calls_total", call="store") >= 1  # noqa: E731
    wait_until(refused, 60, "a store that is refused at once")
    assert [tiers.recall(engine, seed) for seed in (0, 1, 2, 3, 4, 5, 7)] == [64] * 7
    # Lookups have a breaker of their own.
    assert tiers.tier(server)["breaker"]["lookup"]["state"] == "closed"


def test_mock_tier_is_a_tier(serve, engines):
    """Fast enough, it behaves as any other; full, it says so."""
    flags = tiers.adapter("mock", max_size_gb=1 * MIB, mock_bandwidth_gb=10, eviction={"eviction_policy": "noop"})
    server = serve(flags=[*flags, "--l2-min-free-gb", "0"])
    server.expect_trouble(r"out of space")
    engine = engines(server, groups=BIG)
    for seed in range(6):
        tiers.store(engine, seed)
        tiers.settled(server)
    assert tiers.tier(server)["is_full"] is True
    tiers.forget(engine)
    found = [tiers.recall(engine, seed) for seed in range(6)]
    assert found[:2] == [64, 64] and found[-1] == 0, found


@pytest.mark.parametrize("mode", MODES)
def test_failing_loads_are_misses(serve, engines, tmp_path, mode):
    """If loads of a tier fail, hits end there, the bytes returned are right, and nothing stays leased."""
    inner = {"type": "fs", "base_path": tmp_path / "tier"}
    server = serve(mode, flags=tiers.adapter("fault_inject", inner=inner, rate=0.25, seed=3))
    server.expect_trouble(r"fault_inject")
    engine = engines(server, groups=BIG)
    for seed in range(16):
        tiers.store(engine, seed)
    tiers.wait_files(tmp_path / "tier", 64)
    tiers.forget(engine)
    found = [tiers.recall(engine, seed) for seed in range(16)]
    assert min(found) < 64 and len(set(found)) > 2, found
    tiers.forget(engine)
    assert [tiers.recall(engine, seed) for seed in range(16)] == found, "always the same ones"
    tiers.forget(engine)
    assert in_l1(server) == 0, "nothing is left leased"


def test_what_one_tier_fails_to_load_the_next_one_gives(serve, engines, tmp_path):
    """If all loads of a tier fail and the next one works, every prompt hits in full."""
    failing = tiers.adapter("fault_inject", inner={"type": "fs", "base_path": tmp_path / "first"}, rate=1.0)
    server = serve(flags=failing + tiers.fs(tmp_path / "second"))
    server.expect_trouble(r"fault_inject")
    engine = engines(server, groups=BIG)
    for seed in range(4):
        tiers.store(engine, seed)
    tiers.wait_files(tmp_path / "second", 16)
    tiers.forget(engine)
    assert [tiers.recall(engine, seed) for seed in range(4)] == [64] * 4
