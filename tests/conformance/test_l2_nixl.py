"""Directories of LMCache's types that use NIXL: its server and ours read what the other wrote."""

import subprocess
from types import SimpleNamespace

import pytest
from kvrig import nixl, tiers
from kvrig.engine import Group
from kvrig.layouts import BLOCK_TOKENS, block_bytes, layout
from kvrig.server import Server, peer_command
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("it is the other side of these tests")

MODES = ["lmcache_driven", "engine_driven"]

# Pages whose chunks are no multiple of LMCache's alignment, so that its files are padded.
PAGES = {"groups": [Group(layout("kv_first_nhd", heads=1, size=8), layers=5)]}
ALIGN = 4096

# LMCache's files do not say their layout, and the pages of CPU workers depend on it.
TRUST = {"trust_missing_layout": True}

# What each directory is configured with, in both servers; LMCache takes texts only.
DIRECTORIES = {
    "flat": {"use_direct_io": "false"},
    "sharded": {"use_direct_io": "false", "shard_dirs": "true"},
    "direct": {"use_direct_io": "true", "shard_dirs": "true"},
}


def dynamic(path, kind, **keys):
    """Flags for a directory of `nixl_store_dynamic`."""
    params = {"file_path": str(path), "max_capacity_gb": "1", **DIRECTORIES[kind]}
    return tiers.adapter("nixl_store_dynamic", backend="POSIX", backend_params=params, **keys)


def ours(path, kind, **keys):
    return [*dynamic(path, kind, **keys), "--l2-min-free-gb", "0"]


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory):
    """A real LMCache server with a directory of each kind, and these by name. It needs seconds to start."""
    base = tmp_path_factory.mktemp("lmcache")
    directories = {kind: base / kind for kind in DIRECTORIES}
    flags = ["--separate-object-groups"]
    for kind, path in directories.items():
        flags += dynamic(path, kind)
    env = nixl.environment(base / "python")
    server = Server(peer_command(), base / "lmcache.log", "both", flags=flags, peer=True, env=env)
    server.start(120)
    yield SimpleNamespace(server=server, **directories)
    server.stop()


def of_model(directory, engine):
    """The files of an engine's model: other tests use the directory too."""
    return sorted(path for path in directory.rglob("*.bin") if engine.model.rsplit("/")[-1] in path.name)


def wait_of_model(directory, engine, count):
    """Wait until a model has `count` files, and no more."""
    wait_until(lambda: len(of_model(directory, engine)) >= count, 60, f"{count} files in {directory}", interval=0.02)
    found = of_model(directory, engine)
    assert len(found) == count, found
    return found


def object_bytes(engine):
    """Bytes of an object."""
    blocks = [block_bytes(tensor, group.layout.block_axis) for tensor, group in engine.worker.layers]
    return sum(blocks) * engine.chunk // BLOCK_TOKENS


# proves: docs/compare.md#other-tiers
# proves: docs/compare.md#tiers-on-disk
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_we_read_what_lmcache_wrote(lmcache, serve, engines, kind, mode):
    """Every hit has LMCache's bytes, tenants stay apart, and each load is counted as one that had no checksum."""
    directory = getattr(lmcache, kind)
    writer = engines(lmcache.server, mode, ranks=2, **PAGES)
    tiers.store(writer, 1)
    tiers.store(writer, 2, salt="alice")
    found = wait_of_model(directory, writer, 16)
    assert object_bytes(writer) % ALIGN and all(path.stat().st_size % ALIGN == 0 for path in found)

    server = serve("both", flags=ours(directory, kind, **TRUST))
    reader = engines(server, mode, ranks=2, **PAGES)
    assert tiers.recall(reader, 1) == 64
    assert tiers.recall(reader, 2, salt="alice") == 64
    assert tiers.recall(reader, 2) == 0
    assert tiers.recall(reader, 1, salt="alice") == 0
    assert tiers.tier(server)["unverified_loads"] == 16
    # What is there is not stored again.
    tiers.store(reader, 1)
    tiers.settled(server)
    assert of_model(directory, writer) == found


# proves: docs/compare.md#tiers-on-disk
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_lmcache_reads_what_we_wrote(lmcache, serve, engines, kind, mode):
    """The other way round: names, places and lengths of our files are what LMCache expects."""
    directory = getattr(lmcache, kind)
    server = serve("both", flags=ours(directory, kind))
    writer = engines(server, mode, ranks=2, **PAGES)
    tiers.store(writer, 1)
    tiers.store(writer, 2, salt="alice")
    size = object_bytes(writer)
    for path in wait_of_model(directory, writer, 16):
        found = path.read_bytes()
        padded = -(-size // ALIGN) * ALIGN
        assert len(found) > padded and not any(found[size:padded])

    reader = engines(lmcache.server, mode, ranks=2, **PAGES)
    assert tiers.recall(reader, 1) == 64
    assert tiers.recall(reader, 2, salt="alice") == 64
    assert tiers.recall(reader, 2) == 0


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_nixl_moves_bytes_both_ways(lmcache, serve, engines, kind):
    """The library at run time: our server writes and reads by it what LMCache reads and wrote."""
    directory = getattr(lmcache, kind)
    by_nixl = {"io_engine": "nixl", "nixl_library": nixl.library(), **TRUST}
    server = serve("both", flags=ours(directory, kind, **by_nixl))
    mine, theirs = engines(server, **PAGES), engines(lmcache.server, **PAGES)
    tiers.store(mine, 1)
    tiers.store(theirs, 2)
    wait_of_model(directory, mine, 8)
    tiers.settled(server)
    assert tiers.recall(theirs, 1) == 64
    assert tiers.recall(mine, 2) == 64
    tiers.forget(mine)
    assert tiers.recall(mine, 1) == 64
    status = tiers.tier(server)
    assert status["io_engine"] == "nixl" and str(nixl.library()) in status["io_engine_reason"]
    engine = status["io_engine_status"]
    assert engine["failed_transfers"] == 0 and engine["transfers"] == 12
    assert status["unverified_loads"] == 4


def test_missing_nixl_stops_the_start(command, tmp_path):
    """The line names the library, what was tried, and what to install; another library does not crash the server."""
    for library, why in ((tmp_path / "libnixl_capi.so", "No such file"), (nixl.library().parent / "libnixl_common.so", "nixl_capi_")):
        flags = ours(tmp_path / "tier", "flat", io_engine="nixl", nixl_library=library)
        run = [*command, "--port", "0", "--l1-size-gb", "0.25", *flags]
        ended = subprocess.run(run, capture_output=True, text=True, timeout=60)
        assert ended.returncode > 0, ended
        for word in (str(library), why, "nixl_library", "pip install nixl-cu12"):
            assert word in ended.stderr, (word, ended.stderr)


def test_both_servers_write_at_once(lmcache, serve, engines):
    """The same prompts stored by both in one moment: what is there in the end is whole for both."""
    keys = {"io_engine": "nixl", "nixl_library": nixl.library(), **TRUST}
    server = serve("both", flags=ours(lmcache.sharded, "sharded", **keys))
    writers = [engines(each, "lmcache_driven", **PAGES) for each in (lmcache.server, server)]
    seeds = range(12)
    for seed in seeds:
        for writer, request in tiers.begin_stores(writers, seed):
            assert writer.worker.finish_store(request) is True
            writer.end(request)
    wait_of_model(lmcache.sharded, writers[1], 4 * len(seeds))
    tiers.settled(server)
    tiers.forget(writers[1])
    for writer in writers:
        assert [tiers.recall(writer, seed) for seed in seeds] == [64] * len(seeds)
    assert tiers.tier(server)["quarantined_files"] == 0


def test_a_restarted_server_adopts_files_of_both(lmcache, serve, engines):
    """What is listed at a start is what both wrote, and nothing else."""
    theirs = engines(lmcache.server, "lmcache_driven", **PAGES)
    tiers.store(theirs, 1)
    wait_of_model(lmcache.sharded, theirs, 4)
    first = serve("both", flags=ours(lmcache.sharded, "sharded", **TRUST))
    tiers.adopted(first)
    mine = engines(first, **PAGES)
    tiers.store(mine, 2)
    tiers.settled(first)
    objects = len(list(lmcache.sharded.rglob("*.bin")))
    second = serve("both", flags=ours(lmcache.sharded, "sharded", **TRUST))
    recovery = tiers.adopted(second)
    assert (recovery["objects"], recovery["foreign"]) == (objects, 0)
    assert tiers.recall(mine, 2) == 64
    assert tiers.tier(second)["quarantined_files"] == 0


def test_a_store_of_slots_says_that_it_is_not_exchanged(serve, engines, tmp_path):
    """`nixl_store` keeps what it stores, in files of fs, and one line says why."""
    params = {"file_path": str(tmp_path / "tier"), "use_direct_io": "false", "file_size": str(1 << 20)}
    flags = tiers.adapter("nixl_store", backend="POSIX", backend_params=params, pool_size=64)
    flags += ["--l2-min-free-gb", "0"]
    first = serve("both", flags=flags)
    first.expect_trouble(r"nixl_store.*are not exchanged with LMCache")
    writer = engines(first)
    tiers.store(writer, 1)
    tiers.settled(first)
    assert len(tiers.files(tmp_path / "tier")) == 4
    second = serve("both", flags=flags)
    second.expect_trouble(r"nixl_store.*are not exchanged with LMCache")
    assert tiers.recall(engines(second), 1) == 64
