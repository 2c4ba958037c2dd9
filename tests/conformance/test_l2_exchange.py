"""One directory, LMCache's server and ours: each reads what the other wrote, also while both write."""

import re
from types import SimpleNamespace

import pytest
from kvrig import tiers
from kvrig.engine import Group
from kvrig.layouts import BLOCK_TOKENS, block_bytes, layout
from kvrig.server import Server, peer_command
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("it is the other side of these tests")

MODES = ["lmcache_driven", "engine_driven"]
# Both servers split hybrid models by window; it is our default and LMCache's option.
SPLIT = "--separate-object-groups"

TEMPORARY = "tmp"

# What LMCache's server writes: every store goes to all four directories.
PEER_TIERS = {
    "fs": {"kind": "fs"},
    "fs_native": {"kind": "fs_native"},
    "fs_direct": {"kind": "fs", "use_odirect": True, "relative_tmp_dir": TEMPORARY},
    "fs_native_direct": {"kind": "fs_native", "use_odirect": True, "relative_tmp_dir": TEMPORARY},
}


# LMCache's files do not say their layout, and the pages of CPU workers depend on it.
TRUST = {"trust_missing_layout": True}


def failing_loads(directory):
    """Flags for a tier whose loads fail, three in ten, always the same ones."""
    return tiers.adapter("fault_inject", inner={"type": "fs", "base_path": directory}, rate=0.3, seed=7)


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory):
    """A real LMCache server with a tier of each kind, and their directories by name. It needs seconds to start."""
    base = tmp_path_factory.mktemp("lmcache")
    directories = {name: base / name for name in PEER_TIERS}
    directories["faulty"] = base / "faulty"
    flags = [SPLIT, *failing_loads(directories["faulty"])]
    for name, keys in PEER_TIERS.items():
        flags += tiers.adapter(base_path=directories[name], **keys)
    server = Server(peer_command(), base / "lmcache.log", "both", flags=flags, peer=True)
    server.start(120)
    yield SimpleNamespace(server=server, **directories)
    server.stop()


def hybrid():
    """Two layer groups; a sliding window of 32 tokens makes the second one an object group of its own."""
    return [
        Group(layout("kv_first_nhd", heads=2, size=8), layers=3, engine_group=0),
        Group(layout("kv_first_nhd", heads=4, size=8), layers=2, engine_group=1, window=32),
    ]


def of_model(directory, engine):
    """The files of an engine's model: other tests use the directory too. What LMCache still writes has its name already,
    in the directory for that."""
    name = engine.model.rsplit("/")[-1]
    return [path for path in tiers.files(directory) if name in path.name and path.parent.name != TEMPORARY]


def wait_of_model(directory, engine, count):
    """Wait until a model has `count` files, and no more."""
    wait_until(lambda: len(of_model(directory, engine)) >= count, 60, f"{count} files in {directory}", interval=0.02)
    found = of_model(directory, engine)
    assert len(found) == count, found
    return found


# proves: docs/compare.md#tiers-on-disk
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", PEER_TIERS)
def test_we_read_what_lmcache_wrote(lmcache, serve, engines, kind, mode):
    """Every hit has LMCache's bytes, tenants stay apart, and each load is counted as one that had no checksum."""
    directory = getattr(lmcache, kind)
    writer = engines(lmcache.server, mode, ranks=2)
    tiers.store(writer, 1)
    tiers.store(writer, 2, salt="alice")
    wait_of_model(directory, writer, 16)

    server = serve("both", flags=tiers.fs(directory, **PEER_TIERS[kind], **TRUST))
    reader = engines(server, mode, ranks=2)
    assert tiers.recall(reader, 1) == 64
    assert tiers.recall(reader, 2, salt="alice") == 64
    assert tiers.recall(reader, 2) == 0
    assert tiers.recall(reader, 1, salt="alice") == 0
    assert tiers.tier(server)["unverified_loads"] == 16
    assert len(of_model(directory, writer)) == 16


@pytest.mark.parametrize("mode", MODES)
def test_files_of_lmcache_are_not_loaded_for_cpu_pages_unless_trusted(lmcache, serve, engines, mode):
    """They say neither block size nor processor. One line in the log says so; a store of ours replaces them."""
    writer = engines(lmcache.server, mode)
    tiers.store(writer, 1)
    wait_of_model(lmcache.fs, writer, 4)
    server = serve("both", flags=tiers.fs(lmcache.fs))
    server.expect_trouble(r"files without a layout are not loaded")
    # What is adopted after a lookup counts as there until a load fails; stores skip it until then.
    tiers.adopted(server)
    reader = engines(server, mode)
    assert tiers.recall(reader, 1) == 0
    tiers.store(reader, 1)
    tiers.settled(server)
    tiers.forget(reader)
    assert tiers.recall(reader, 1) == 64
    assert tiers.tier(server)["unverified_loads"] == 0


# proves: docs/compare.md#tiers-on-disk
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", PEER_TIERS)
def test_lmcache_reads_what_we_wrote(lmcache, serve, engines, kind, mode):
    """The other way round: names, places and the first bytes of our files are what LMCache expects."""
    directory = getattr(lmcache, kind)
    server = serve("both", flags=tiers.fs(directory, **PEER_TIERS[kind]))
    writer = engines(server, mode, ranks=2)
    tiers.store(writer, 1)
    tiers.store(writer, 2, salt="alice")
    wait_of_model(directory, writer, 16)

    reader = engines(lmcache.server, mode, ranks=2)
    assert tiers.recall(reader, 1) == 64
    assert tiers.recall(reader, 2, salt="alice") == 64
    assert tiers.recall(reader, 2) == 0


@pytest.mark.parametrize("writes", ["lmcache", "ours"])
def test_object_groups_are_exchanged(lmcache, serve, engines, writes):
    """A hybrid model: full attention and a sliding window are objects of two groups, with numbers in their names."""
    ours = serve(flags=[*tiers.fs(lmcache.fs, **TRUST), "--windowed-clients", "allow"])
    servers = [lmcache.server, ours] if writes == "lmcache" else [ours, lmcache.server]
    writer, reader = (engines(server, "lmcache_driven", groups=hybrid()) for server in servers)
    prompt = tiers.tokens(64, 3)
    blocks = [writer.blocks_for(64, 1), writer.blocks_for(64, 20)]
    tiers.paint(writer.worker, blocks, "hybrid")
    request = writer.new_request()
    assert writer.worker.store(request, prompt, 0, 64, blocks) is True
    writer.end(request)
    names = [path.name for path in wait_of_model(lmcache.fs, writer, 8)]
    assert sum("@0@" in name for name in names) == sum("@1@" in name for name in names) == 4

    request, hit = reader.lookup(prompt)
    assert hit == 64
    # The window needs the last two chunks only.
    target = [reader.blocks_for(64, 30), [0] * 8 + reader.blocks_for(32, 50)]
    for group in (0, 1):
        reader.worker.fill(target[group], 0xEE, group)
    assert reader.worker.retrieve(request, prompt, 0, 64, target).ok
    reader.end(request)
    theirs = [writer.worker.read(blocks[0], 0), writer.worker.read(blocks[1][8:], 1)]
    ours = [reader.worker.read(target[0], 0), reader.worker.read(target[1][8:], 1)]
    assert all((a == b).all() for g in (0, 1) for a, b in zip(theirs[g], ours[g], strict=True))


@pytest.mark.parametrize("reads", MODES)
@pytest.mark.parametrize("writes", MODES)
def test_workers_read_a_directory_of_their_mode(serve, engines, tmp_path, writes, reads):
    """A worker that copies does not say in which format its pages are: its files are not those of pages."""
    directory = tmp_path / "tier"
    first = serve("both", flags=tiers.fs(directory))
    tiers.store(engines(first, writes), 1)
    tiers.wait_files(directory, 4)
    second = serve("engine_pickle" if reads == "engine_driven" else "both", flags=tiers.fs(directory))
    if reads != writes:
        second.expect_trouble("is of another layout")
    assert tiers.recall(engines(second, reads), 1) == (64 if reads == writes else 0)
    assert tiers.tier(second)["unverified_loads"] == 0


def test_objects_in_files_are_equal_in_all_transfer_modes(serve, engines, tmp_path):
    """Names and objects; what follows an object says which pages it is from."""
    seen, trailers = set(), set()
    for mode in ("lmcache_driven", "engine_shm", "engine_pickle"):
        server = serve(mode, flags=tiers.fs(tmp_path / mode))
        engine = engines(server)
        tiers.store(engine, 1)
        found = tiers.wait_files(tmp_path / mode, 4)
        tiers.settled(server)
        blocks = [block_bytes(tensor, group.layout.block_axis) for tensor, group in engine.worker.layers]
        size = sum(blocks) * engine.chunk // BLOCK_TOKENS
        seen.add(tuple((path.name, path.read_bytes()[:size]) for path in found))
        trailers.add(tuple(path.read_bytes()[size:] for path in found))
    assert len(seen) == 1 and len(trailers) == 2


@pytest.mark.parametrize("salt", ["", "alice"])
def test_names_of_both_generations_are_read(lmcache, serve, engines, tmp_path, salt):
    """Releases before 0.5 had no group in their names: such files are found, and written if configured."""
    writer = engines(lmcache.server, "lmcache_driven")
    tiers.store(writer, 1, salt=salt)
    wait_of_model(lmcache.fs_native, writer, 4)
    directory = tmp_path / "tier"
    directory.mkdir()
    for path in of_model(lmcache.fs_native, writer):
        (directory / re.sub("@0@", "@", path.name, count=1)).write_bytes(path.read_bytes())
    old_names = {path.name for path in tiers.files(directory)}

    reader = engines(serve(flags=tiers.fs(directory, **TRUST)))
    assert tiers.recall(reader, 1, salt=salt) == 64
    # What is there under an old name is not stored again under a new one.
    tiers.store(reader, 1, salt=salt)
    tiers.settled(reader.server)
    assert {path.name for path in tiers.files(directory)} == old_names

    writes_old = engines(serve(flags=tiers.fs(tmp_path / "old", names="0.4")))
    tiers.store(writes_old, 1, salt=salt)
    assert {path.name for path in tiers.wait_files(tmp_path / "old", 4)} == old_names


def test_the_same_loads_are_made_to_fail(lmcache, serve, engines):
    """fault_inject with LMCache's keys fails LMCache's loads: prompts hit as far in both servers."""
    writer = engines(serve(flags=tiers.fs(lmcache.faulty)))
    for seed in range(12):
        tiers.store(writer, seed)
    wait_of_model(lmcache.faulty, writer, 48)
    ours = serve(flags=failing_loads(lmcache.faulty))
    ours.expect_trouble(r"fault_inject")
    here, there = engines(ours), engines(lmcache.server)
    found = [tiers.recall(here, seed) for seed in range(12)]
    assert len(set(found)) > 2, found
    assert [tiers.recall(there, seed) for seed in range(12)] == found


def test_both_servers_write_at_once(lmcache, serve, engines):
    """The same prompts stored by both in one moment, read by a third server meanwhile: never a part of a file."""
    ours, third = (serve(flags=tiers.fs(lmcache.fs, **TRUST)) for _ in range(2))
    big = [Group(layout("kv_first_nhd", heads=8, size=64))]
    writers = [engines(server, "lmcache_driven", groups=big) for server in (lmcache.server, ours)]
    reader = engines(third, groups=big)
    seeds = range(24)
    for seed in seeds:
        for writer, request in tiers.begin_stores(writers, seed):
            while request in writer.worker.stores:
                tiers.recall(reader, seed)
                if writer.worker.stores[request].query():
                    assert writer.worker.finish_store(request) is True
            writer.end(request)
        tiers.recall(reader, seed)
    wait_of_model(lmcache.fs, reader, 4 * len(seeds))
    tiers.settled(ours)
    tiers.forget(reader)
    assert [tiers.recall(reader, seed) for seed in seeds] == [64] * len(seeds)
    for writer in writers:
        assert [tiers.recall(writer, seed) for seed in seeds] == [64] * len(seeds)
    assert tiers.tier(third)["quarantined_files"] == 0


def test_two_of_ours_on_one_directory(serve, engines, tmp_path):
    """What one stores the other serves at once; what one adopted at its start and what came later alike."""
    directory = tmp_path / "tier"
    first = serve(flags=tiers.fs(directory))
    one = engines(first)
    tiers.store(one, 1)
    tiers.wait_files(directory, 4)
    second = serve(flags=tiers.fs(directory))
    other = engines(second)
    tiers.adopted(second)
    for writer, reader, seed in ((one, other, 2), (other, one, 3), (one, other, 4)):
        tiers.store(writer, seed)
        tiers.settled(writer.server)
        assert tiers.recall(reader, seed) == 64
    assert tiers.recall(other, 1) == 64
    # Stored again by the other one, it is not written again.
    before = {path: path.stat().st_ino for path in tiers.files(directory)}
    tiers.store(other, 2)
    tiers.settled(second)
    assert {path: path.stat().st_ino for path in tiers.files(directory)} == before
    # If a file is deleted, it is a miss for both, and either stores it again.
    for path in before:
        path.unlink()
    for engine in (one, other):
        tiers.forget(engine)
        assert [tiers.recall(engine, seed) for seed in (1, 2, 3, 4)] == [0] * 4
    tiers.store(other, 4)
    tiers.settled(second)
    assert tiers.recall(one, 4) == 64


def test_two_of_ours_write_at_once(serve, engines, tmp_path):
    """The same new prompts from two servers, with next to no L1, read by both meanwhile."""
    directory = tmp_path / "tier"
    big = [Group(layout("kv_first_nhd", heads=8, size=64))]
    crew = [engines(serve(l1_gb=4 / 1024, flags=tiers.fs(directory)), groups=big) for _ in range(2)]
    for seed in range(20):
        prompt = tiers.tokens(64, seed)
        for engine in crew:
            tiers.paint(engine.worker, engine.blocks_for(64), f"{seed}/")
            engine.worker.submit_store(f"{seed}", prompt, 0, 64, engine.blocks_for(64))
        for engine in crew:
            tiers.recall(engine, max(seed - 1, 0), first=20)
            assert engine.worker.finish_store(f"{seed}") is True
            engine.end(f"{seed}")
    for engine in crew:
        controller = tiers.settled(engine.server)
        tiers.forget(engine)
        found = [tiers.recall(engine, seed) for seed in range(20)]
        assert controller["dropped_objects"] or found == [64] * 20, found
        assert sum(found) >= 10 * 64
        assert tiers.tier(engine.server)["quarantined_files"] == 0
