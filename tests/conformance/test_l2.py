"""A second tier below L1: what was stored comes back from it, in every configuration, and L1 never waits for it."""

import stat

import pytest
from kvrig import tiers
from kvrig.engine import Group
from kvrig.layouts import layout
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("its tiers lose what ours must not; the exchange tests have it as the other side")

MODES = ["lmcache_driven", "engine_shm", "engine_pickle"]
MIB = 1 / 1024  # of a GiB

# 96 KiB per chunk.
BIG = [Group(layout("kv_first_nhd", heads=8, size=64))]

OPTIONS = {
    "fs": {},
    "fs_native": {"kind": "fs_native", "num_workers": 1},
    "direct": {"use_odirect": True},
    "sharded": {"layout": "sharded"},
    "synced": {"fsync": "file+dir", "relative_tmp_dir": "tmp/deeper"},
    "old-names": {"names": "0.4", "read_ahead_size": 4096},
    "all": {
        "kind": "fs_native", "use_odirect": True, "layout": "sharded", "relative_tmp_dir": "tmp", "names": "0.4",
        "fsync": "file", "max_capacity_gb": 1, "eviction": {"eviction_policy": "LRU"},
    },
}  # fmt: skip


def in_l1(server):
    """Objects in L1."""
    return server.get("/status")[1]["storage_manager"]["l1_manager"]["total_object_count"]


@pytest.mark.parametrize("mode", MODES)
def test_what_l1_forgot_comes_from_the_tier(serve, engines, tmp_path, mode):
    """Stored, forgotten by L1, loaded; prefixes, tenants and ranks as in L1; counted as found in a tier."""
    server = serve(mode, flags=tiers.fs(tmp_path / "tier"))
    engine = engines(server, ranks=2)
    tiers.store(engine, 1)
    tiers.store(engine, 2, salt="alice")
    tiers.wait_files(tmp_path / "tier", 16)
    assert tiers.recall(engine, 1) == 64
    assert tiers.metric(server, "lmcache_mp_lookup_hit_l2_tokens_total") == 0, "L1 had it"
    tiers.forget(engine)
    assert in_l1(server) == 0
    assert tiers.recall(engine, 1) == 64
    assert tiers.recall(engine, 2, salt="alice") == 64
    assert tiers.recall(engine, 2) == 0
    assert tiers.recall(engine, 1, salt="alice") == 0
    assert tiers.metric(server, "lmcache_mp_lookup_hit_l2_tokens_total") == 128
    # Loaded objects stay in L1 now.
    assert tiers.recall(engine, 1) == 64
    assert tiers.metric(server, "lmcache_mp_lookup_hit_l2_tokens_total") == 128
    tiers.forget(engine)
    assert engine.hits(tiers.tokens(64, 1)[:40] + tiers.tokens(24)) == 32


# proves: docs/compare.md#restart
# proves: docs/compare.md#tiers-on-disk
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_tier_survives_the_server(serve, engines, tmp_path, options, end):
    """Stopped or killed and started again, with every option: all hits, adopted and counted, private files."""
    directory = tmp_path / "tier"
    server = serve(flags=tiers.fs(directory, **OPTIONS[options]))
    server.expect_trouble(r"instance")
    before = engines(server)
    tiers.store(before, 1)
    tiers.store(before, 2, salt="alice")
    if end == "stopped":
        server.stop()  # what still waits is stored first
        assert len(tiers.files(directory)) == 8
        assert tiers.temporary(directory) == []
    else:
        tiers.wait_files(directory, 8)
        server.kill()
    server.start()
    after = engines(server)
    before.close()
    assert tiers.recall(after, 1) == 64
    assert tiers.recall(after, 2, salt="alice") == 64
    recovery = tiers.adopted(server)
    size = sum(path.stat().st_size for path in tiers.files(directory))
    assert (recovery["objects"], recovery["bytes"], recovery["foreign"]) == (8, size, 0)
    status = tiers.tier(server)
    assert (status["stored_object_count"], status["current_size_bytes"]) == (8, size)
    assert (status["unverified_loads"], status["quarantined_files"]) == (0, 0)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in [directory, *directory.rglob("*")] if path.is_dir()}
    assert modes == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tiers.files(directory)} == {0o600}


def test_found_before_the_scan_is_done(serve, engines, tmp_path):
    """A lookup does not wait until everything is adopted: many files, and the first question at once."""
    directory = tmp_path / "tier"
    server = serve(flags=tiers.fs(directory))
    server.expect_trouble(r"instance")
    before = engines(server)
    tiers.store(before, 1)
    [sample, *_] = tiers.wait_files(directory, 4)
    server.stop()
    model, rank, group, _ = sample.name.split("@")
    for number in range(20_000):
        (directory / f"{model}@{rank}@{group}@{number:064x}.data").touch()
    server.start()
    after = engines(server)
    before.close()
    assert tiers.recall(after, 1) == 64
    assert tiers.adopted(server)["objects"] == 20_004


@pytest.mark.parametrize("l1_has", ["front", "back", "holes"])
def test_l1_and_tier_together(serve, engines, tmp_path, l1_has):
    """Each has a part of a prompt: the hit is the whole, and only what L1 lacks is loaded."""
    directory = tmp_path / "tier"
    engine = engines(serve(flags=tiers.fs(directory)))
    prompt = tiers.store(engine, 1)
    tiers.wait_files(directory, 4)
    tiers.forget(engine)
    parts = {"front": [(0, 32)], "back": [(32, 64)], "holes": [(16, 32), (48, 64)]}[l1_has]
    tiers.paint(engine.worker, engine.blocks_for(64), "1/")
    for start, end in parts:
        request = engine.new_request()
        blocks = engine.blocks_for(64)[start // 4 : end // 4]
        assert engine.worker.store(request, prompt[:end], start, end, blocks) is True
        engine.end(request)
    assert tiers.recall(engine, 1) == 64
    assert tiers.metric(engine.server, "kvtier_l2_loaded_objects_total") == 2


def test_gap_in_the_tier_ends_the_hit(serve, engines, tmp_path):
    """What lies behind a missing chunk is neither promised nor loaded."""
    directory = tmp_path / "tier"
    engine = engines(serve(flags=tiers.fs(directory)))
    paths = tiers.store_in_order(engine, 1, directory)
    tiers.forget(engine)
    paths[2].unlink()
    assert tiers.recall(engine, 1) == 32
    # The tier believed to have it, so it was asked for once; now it knows.
    tiers.forget(engine)
    assert tiers.recall(engine, 1) == 32
    assert in_l1(engine.server) == 2


def test_four_engines_load_a_cold_prefix_once(serve, engines, tmp_path):
    """They ask in one moment; one load serves all of them."""
    directory = tmp_path / "tier"
    server = serve(flags=tiers.fs(directory))
    crew = [engines(server, groups=BIG) for _ in range(4)]
    prompt = tiers.store(crew[0], 1)
    tiers.wait_files(directory, 4)
    tiers.forget(crew[0])
    for engine in crew:
        engine.scheduler.maybe_submit_lookup_request("together", prompt)
    for engine in crew:
        request, hit = engine.lookup(prompt, request="together")
        assert hit == 64
        assert engine.worker.retrieve(request, prompt, 0, 64, engine.blocks_for(64)).ok
        assert tiers.is_painted(engine.worker, engine.blocks_for(64), "1/")
        engine.end(request)
    assert tiers.metric(server, "kvtier_l2_loaded_objects_total") == 4


def test_second_tier_serves_what_the_first_lost(serve, engines, tmp_path):
    """Every tier gets every object; one that lacks it, or has it damaged, costs nothing but the next question."""
    first, second = tmp_path / "first", tmp_path / "second"
    server = serve(flags=tiers.fs(first) + tiers.adapter("fs_native", base_path=second))
    server.expect_trouble(r"not what was stored")
    engine = engines(server)
    paths = tiers.store_in_order(engine, 1, first)
    tiers.wait_files(second, 4)
    assert [path.name for path in tiers.files(first)] == [path.name for path in tiers.files(second)]
    paths[0].unlink()
    tiers.flip(paths[1], 100)
    paths[3].write_bytes(b"")
    tiers.forget(engine)
    assert tiers.recall(engine, 1) == 64
    assert tiers.tier(server, 0)["quarantined_files"] == 2


@pytest.mark.parametrize("policy", ["retain", "default"])
def test_prefetch_policies(serve, engines, tmp_path, policy):
    """What was loaded stays in L1 (retain), or leaves it with its request and is loaded again (default)."""
    directory = tmp_path / "tier"
    server = serve(flags=[*tiers.fs(directory), "--l2-prefetch-policy", policy])
    engine = engines(server)
    tiers.store(engine, 1)
    tiers.wait_files(directory, 4)
    tiers.forget(engine)
    for again in (1, 2):
        assert tiers.recall(engine, 1) == 64
        left = 4 if policy == "retain" else 0
        wait_until(lambda left=left: in_l1(server) == left, 60, f"{left} objects in L1")
        loaded = 64 if policy == "retain" else 64 * again
        assert tiers.metric(server, "lmcache_mp_lookup_hit_l2_tokens_total") == loaded


def test_store_policy_skip_l1(serve, engines, tmp_path):
    """What every tier has leaves L1, and still hits."""
    directory = tmp_path / "tier"
    server = serve(flags=[*tiers.fs(directory), "--l2-store-policy", "skip_l1"])
    engine = engines(server)
    tiers.store(engine, 1)
    tiers.wait_files(directory, 4)
    wait_until(lambda: in_l1(server) == 0, 60, "an empty L1")
    assert tiers.recall(engine, 1) == 64


@pytest.mark.parametrize("kind", ["fs", "fs_native"])
def test_capacity_is_kept_by_eviction_and_after_a_restart(serve, engines, tmp_path, kind):
    """A bound of 2 MiB: never more on the disk than that, the newest survive, what was adopted is evicted too."""
    directory, bound = tmp_path / "tier", 2 << 20
    eviction = {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.2}
    flags = tiers.fs(directory, kind=kind, max_capacity_gb=2 * MIB, eviction=eviction)
    server = serve(l1_gb=2 * MIB, flags=flags)
    server.expect_trouble(r"instance")
    most = 0

    def used():
        found = 0
        for path in tiers.files(directory):
            try:
                found += path.stat().st_size
            except FileNotFoundError:
                pass
        return found

    engine = engines(server, groups=BIG)
    for seed in range(30):
        if seed == 15:
            tiers.settled(server)
            server.kill()
            server.start()
            old, engine = engine, engines(server, groups=BIG)
            old.close()
        tiers.store(engine, seed)
        tiers.settled(server)
        most = max(most, used())
        status = tiers.tier(server)
        assert status["current_size_bytes"] <= bound
        assert not status["is_full"]
    assert bound // 2 < most <= bound
    tiers.forget(engine)
    # Newest first: what was just asked for is not what leaves next.
    found = [tiers.recall(engine, seed) for seed in reversed(range(30))]
    assert found[0] == found[1] == 64, found
    assert found[15] == found[29] == 0, found

    def is_counted():
        # Eviction ahead of demand may delete meanwhile.
        return tiers.tier(server)["stored_object_count"] == len(tiers.files(directory))

    wait_until(is_counted, 60, "as many objects counted as there are files", interval=0.05)
    assert tiers.metric(server, "kvtier_accounting_errors_total") == 0


def test_capacity_where_nothing_may_leave(serve, engines, tmp_path):
    """Nothing may leave, so what is new is not stored there: said in the status, and L1 goes on."""
    directory = tmp_path / "tier"
    server = serve(flags=tiers.fs(directory, max_capacity_gb=1 * MIB, eviction={"eviction_policy": "noop"}))
    server.expect_trouble(r"out of space")
    engine = engines(server, groups=BIG)
    for seed in range(6):
        tiers.store(engine, seed)
        tiers.settled(server)
    assert tiers.tier(server)["is_full"] is True
    assert sum(path.stat().st_size for path in tiers.files(directory)) <= 1 << 20
    assert [tiers.recall(engine, seed) for seed in range(6)] == [64] * 6
    tiers.forget(engine)
    assert tiers.recall(engine, 0) == tiers.recall(engine, 1) == 64
    assert tiers.recall(engine, 5) == 0


@pytest.mark.parametrize("mode", MODES)
def test_new_data_at_speed_is_never_refused(serve, engines, tmp_path, mode):
    """Far more new data than a small L1 holds, as fast as it comes, with a tier below: LMCache refuses most of it.

    L1's memory is held while it is written to the tier, yet every store succeeds, and the newest data is there.
    """
    # 1.5 MiB per chunk, 6 MiB per prompt; L1 has capacity for 21 of the 45.
    huge = [Group(layout("kv_first_nhd", heads=32, size=256))]
    server = serve(mode, l1_gb=0.125, flags=tiers.fs(tmp_path / "tier"))
    engine = engines(server, groups=huge)
    for seed in range(45):
        engine.worker.fill(engine.blocks_for(64), seed)
        engine.store_prompt(tiers.tokens(64, seed))
    assert tiers.metric(server, "lmcache_mp_l1_allocation_failure_chunks_total") == 0
    assert tiers.metric(server, "kvtier_l1_evicted_chunks_total") > 50, "else there was no pressure"
    controller = tiers.settled(server, 120)
    found = []
    for seed in reversed(range(45)):
        prompt = tiers.tokens(64, seed)
        request, hit = engine.lookup(prompt)
        found.append(hit)
        if hit:
            blocks = engine.blocks_for(hit, 20)
            engine.worker.fill(blocks, 0xEE)
            assert engine.worker.retrieve(request, prompt, 0, hit, blocks).ok
            assert all((layer == seed).all() for layer in engine.worker.read(blocks)), f"prompt {seed}: other bytes"
        engine.end(request)
    assert found[:10] == [64] * 10, "the newest"
    assert controller["dropped_objects"] or found == [64] * 45, found
    assert tiers.metric(server, "lmcache_mp_l1_allocation_failure_chunks_total") == 0
