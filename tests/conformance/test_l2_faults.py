"""Bad disks, damaged files, crashes: a miss or the right bytes, never others, and it mends itself."""

import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import pytest
import torch
from kvrig import tiers
from kvrig.engine import Group
from kvrig.layouts import layout

pytestmark = pytest.mark.ours("it serves what is damaged and forgets what it has written")

MIB = 1 / 1024  # of a GiB
DAMAGE = r"not what was stored"
CANNOT_STORE = r"objects cannot be stored"

# 96 KiB per chunk.
BIG = [Group(layout("kv_first_nhd", heads=8, size=64))]


def damaged_files(server):
    """Number of damaged files that were quarantined or discarded; metrics and status must agree."""
    status = tiers.tier(server)
    found = status["quarantined_files"] + status["discarded_files"]
    assert tiers.metric(server, "kvtier_l2_load_failures_total", reason="corrupt") == found
    assert tiers.metric(server, "kvtier_l2_quarantined_objects_total") == found
    return found


# -- damaged files ----------------------------------------------------------------------------


@dataclass
class Damage:
    """What is done to the file of a prompt's third chunk, of four."""

    do: Callable  # (path, file of another prompt, file of another tenant's same chunk, file of the next chunk)
    hit: tuple = (32,)  # tokens that may hit then
    noticed: bool = True  # it is quarantined or discarded, and counted
    written: bool = True  # the next store writes the object again


def cut(path, left):
    """Leave `left` bytes; a negative number counts from the end."""
    size = path.stat().st_size
    os.truncate(path, left if left >= 0 else size + left)


def replace(path, make):
    """Put something else in a file's place."""
    path.unlink()
    make()


DAMAGES = {
    "shortened-by-a-byte": Damage(lambda path, *_: cut(path, -1)),
    "shortened-to-half": Damage(lambda path, *_: cut(path, path.stat().st_size // 2)),
    "shortened-to-a-page": Damage(lambda path, *_: cut(path, 4096)),
    # What LMCache would have written: right bytes, but of pages that nothing describes.
    "trailer-cut-off": Damage(lambda path, *_: cut(path, -64), noticed=False),
    "emptied": Damage(lambda path, *_: cut(path, 0)),
    "lengthened": Damage(lambda path, *_: path.write_bytes(path.read_bytes() + b"\0" * 100)),
    "zeroed": Damage(lambda path, *_: path.write_bytes(b"\0" * path.stat().st_size)),
    "end-zeroed": Damage(lambda path, *_: path.write_bytes(path.read_bytes()[:-5000] + b"\0" * 5000)),
    "first-bit-flipped": Damage(lambda path, *_: tiers.flip(path, 0)),
    "middle-bit-flipped": Damage(lambda path, *_: tiers.flip(path, path.stat().st_size // 2)),
    "last-bit-flipped": Damage(lambda path, *_: tiers.flip(path, -65)),
    "trailer-flipped": Damage(lambda path, *_: tiers.flip(path, -20)),
    "another-prompts-file": Damage(lambda path, other, *_: shutil.copy(other, path)),
    "another-tenants-file": Damage(lambda path, _, tenant, __: shutil.copy(tenant, path)),
    "the-next-chunks-file": Damage(lambda path, _, __, following: shutil.copy(following, path)),
    "deleted": Damage(lambda path, *_: path.unlink(), noticed=False),
    # Not files, so not ours to remove.
    "link-to-another-file": Damage(
        lambda path, other, *_: replace(path, lambda: path.symlink_to(other)), noticed=False, written=False
    ),
    "link-to-nothing": Damage(
        lambda path, *_: replace(path, lambda: path.symlink_to("/nowhere/at/all")), noticed=False, written=False
    ),
    "link-to-itself": Damage(
        lambda path, *_: replace(path, lambda: path.symlink_to(path)), noticed=False, written=False
    ),
    "a-directory": Damage(lambda path, *_: replace(path, path.mkdir), noticed=False, written=False),
    "a-pipe": Damage(
        lambda path, *_: replace(path, lambda: os.mkfifo(path)), noticed=False, written=False
    ),
}


# proves: docs/compare.md#tiers-on-disk
@pytest.mark.parametrize("when", ["while-running", "between-two-runs"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_file(serve, engines, tmp_path, name, when):
    """The hit ends before the damaged chunk, what is beside it is untouched, and the next store mends it."""
    damage, directory = DAMAGES[name], tmp_path / "tier"
    server = serve(flags=tiers.fs(directory))
    for expected in (DAMAGE, r"instance", CANNOT_STORE + r".*in the place of .* is no file", "files without a layout"):
        server.expect_trouble(expected)
    engine = engines(server, groups=BIG)
    paths = tiers.store_in_order(engine, 1, directory)
    others = tiers.store_in_order(engine, 2, directory)
    tenants = tiers.store_in_order(engine, 1, directory, salt="alice")
    if when == "between-two-runs":
        server.stop()
    damage.do(paths[2], others[2], tenants[2], paths[3])
    if when == "between-two-runs":
        server.start()
        # A lookup during the scan sees a wrong length and misses; only a load notices the damage.
        tiers.adopted(server)
        before, engine = engine, engines(server, groups=BIG)
        before.close()
    tiers.forget(engine)

    assert tiers.recall(engine, 1) in damage.hit
    assert damaged_files(server) == damage.noticed
    tiers.forget(engine)
    # It is known by now, and nothing worse happens the second time.
    assert tiers.recall(engine, 1) in damage.hit
    assert tiers.recall(engine, 2) == 64
    assert tiers.recall(engine, 1, salt="alice") == 64

    tiers.forget(engine)
    tiers.store(engine, 1)
    tiers.settled(server)
    tiers.forget(engine)
    mended = 64 if damage.written else damage.hit[0]
    assert tiers.recall(engine, 1) == mended
    assert damaged_files(server) == damage.noticed
    if damage.written:
        assert stat.S_ISREG(paths[2].lstat().st_mode)
        assert {path.stat().st_size for path in tiers.files(directory)} == {96 * 1024 + 64}


def test_store_replaces_damaged_file_before_any_load(serve, engines, tmp_path):
    """A damaged file of another server's in the way of a store is replaced when its length or its trailer shows it."""
    directory = tmp_path / "tier"
    ours, theirs = serve(flags=tiers.fs(directory)), serve(flags=tiers.fs(directory))
    tiers.adopted(ours)
    paths = tiers.store_in_order(engines(theirs), 1, directory)
    cut(paths[0], 0)
    cut(paths[1], -1)
    tiers.flip(paths[2], -20)
    shutil.copy(paths[0], paths[3])
    engine = engines(ours)
    tiers.store(engine, 1)
    tiers.settled(ours)
    tiers.forget(engine)
    assert tiers.recall(engine, 1) == 64
    assert tiers.tier(ours)["replaced_files"] == 4


def test_many_damaged_files_do_not_fill_the_quarantine(serve, engines, tmp_path):
    """Some are kept to be looked at, the others deleted; all are counted."""
    directory = tmp_path / "tier"
    server = serve(flags=tiers.fs(directory))
    server.expect_trouble(DAMAGE)
    engine = engines(server)
    for seed in range(40):
        [first, *_] = tiers.store_in_order(engine, seed, directory, count=16)
        tiers.flip(first, 0)
    tiers.forget(engine)
    assert [tiers.recall(engine, seed, count=16) for seed in range(40)] == [0] * 40
    status = tiers.tier(server)
    kept = len(list((directory / ".quarantine").iterdir()))
    assert 0 < kept == status["quarantined_files"] < 40
    assert status["discarded_files"] == 40 - kept
    assert tiers.files(directory) == []


def test_objects_of_another_layout_are_never_given(serve, engines, tmp_path):
    """The same model name with another element type of the same size: a miss, however the bytes fit."""
    directory = tmp_path / "tier"
    server = serve(flags=tiers.fs(directory))
    for expected in (r"instance", r"layout"):
        server.expect_trouble(expected)
    before = engines(server)
    tiers.store(before, 1)
    tiers.wait_files(directory, 4)
    server.stop()
    server.start()
    half = engines(server, groups=[Group(layout("kv_first_nhd", dtype=torch.float16))])
    before.close()
    assert tiers.recall(half, 1) == 0
    # The engine that stores last has it.
    tiers.store(half, 1)
    tiers.settled(server)
    tiers.forget(half)
    assert tiers.recall(half, 1) == 64


def test_foreign_files_are_left_alone(serve, engines, tmp_path):
    """Anything may lie in the directory: it is neither served nor removed, and the tier works beside it."""
    directory = tmp_path / "tier"
    server = serve(flags=tiers.fs(directory))
    server.expect_trouble(r"instance")
    before = engines(server)
    paths = tiers.store_in_order(before, 1, directory)
    server.stop()
    name = paths[0].name
    model, rank, group, chunk = name.split("@")
    foreign = [
        "notes.txt", "x.data", "a@b.data", "@@@.data", "@@@@@@@@.data", "x" * 255, ".hidden", "#" + "0" * 64 + ".data",
        f"{model}@{rank}@{group}@{chunk[:-5]}.tmp", f"{model}@{rank}@zz@{chunk}", f"{model}@0x0100@{group}@{chunk}",
        f"{model}@{rank}@{group}@{'0' * 63}.data", f"{model}@{rank}@{group}@{'AB' * 32}.data", f"{name}~",
    ]  # fmt: skip
    for other in foreign:
        (directory / other).write_bytes(b"something else")
    (directory / "more").mkdir()
    (directory / "more" / name).write_bytes(paths[0].read_bytes())
    for folder in ("ab", "ab/cd", "zz", f"{model}@{rank}@{group}@{'1' * 64}.data"):
        (directory / folder).mkdir()
        (directory / folder / "something").write_bytes(b"something else")
    (directory / "link").symlink_to("/")
    (directory / f"{model}@{rank}@{group}@{'2' * 64}.data").symlink_to(paths[0])
    with open(os.fsencode(directory) + b"/\xff\xfe.data", "wb") as file:
        file.write(b"a name that is no text")

    def contents():
        return {path: os.lstat(path) for path in directory.rglob("*")}

    as_it_was = contents()
    server.start()
    engine = engines(server)
    before.close()
    recovery = tiers.adopted(server)
    assert (recovery["objects"], recovery["foreign"]) == (4, len(foreign) + 7), recovery
    assert tiers.recall(engine, 1) == 64
    tiers.store(engine, 2)
    tiers.settled(server)
    tiers.forget(engine)
    assert tiers.recall(engine, 1) == tiers.recall(engine, 2) == 64
    now = contents()
    assert all((now[path].st_ino, now[path].st_size) == (was.st_ino, was.st_size) for path, was in as_it_was.items())


# -- crashes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, options",
    [
        ("lmcache_driven", {}),
        ("engine_shm", {"kind": "fs_native", "use_odirect": True}),
        ("engine_pickle", {"relative_tmp_dir": "tmp", "layout": "sharded", "fsync": "file"}),
    ],
    ids=["lmcache_driven", "engine_shm-direct", "engine_pickle-sharded"],
)
def test_kill_in_the_middle_of_stores(serve, engines, tmp_path, mode, options):
    """SIGKILL while files are being written, again and again: what hits afterwards is whole, and no leftovers stay."""
    directory, rounds = tmp_path / "tier", 12
    # 1.5 MiB per chunk; L1 holds sixteen of them, so almost all that hits comes from the tier.
    huge = [Group(layout("kv_first_nhd", heads=32, size=256))]
    flags = [*tiers.fs(directory, **options), "--l2-store-queue-gb", str(12 * MIB)]
    server = serve(mode, l1_gb=24 * MIB, flags=flags)
    server.expect_trouble(r"instance")
    engine, found, caught = engines(server, groups=huge, mq_timeout=10), {}, 0
    # A disk may be faster than a kill; then more are tried.
    while len(found) < 3 * rounds or (not caught and len(found) < 15 * rounds):
        seeds = range(len(found), len(found) + 3)
        for place, seed in enumerate(seeds):
            blocks = engine.blocks_for(32, 1 + 8 * place)
            tiers.paint(engine.worker, blocks, f"{seed}/")
            engine.worker.submit_store(f"{seed}", tiers.tokens(32, seed), 0, 32, blocks)
        wait_for_a_write(engine, directory)
        server.kill()
        server.start()
        last, engine = engine, engines(server, groups=huge, mq_timeout=10)
        last.close()
        tiers.adopted(server)
        assert tiers.being_written(directory) == [], "left by the killed server"
        for seed in seeds:
            found[seed] = tiers.recall(engine, seed, count=32)
        # A file that has no name yet leaves no trace but what is missing.
        caught += any(found[seed] < 32 for seed in seeds)
    assert caught, "no kill met a store, so nothing was proved"
    assert damaged_files(server) == 0, "a file had its name before it was whole"
    again = {seed: tiers.recall(engine, seed, count=32) for seed in found}
    assert all(again[seed] >= hit for seed, hit in found.items()), (again, found)
    # And it goes on: what was lost is stored again.
    for seed in found:
        tiers.store(engine, seed, count=32)
        tiers.settled(server)
    tiers.forget(engine)
    assert {tiers.recall(engine, seed, count=32) for seed in found} == {32}
    assert tiers.being_written(directory) == []
    assert len(tiers.temporary(directory)) == 1, "the lock of the running server"


def wait_for_a_write(engine, directory):
    """Wait until the server has a file open that it writes there; or until all is stored, when that was missed."""
    futures = list(engine.worker.stores.values())
    descriptors = f"/proc/{engine.server.process.pid}/fd"

    def writes(number):
        try:
            path = os.readlink(f"{descriptors}/{number}")
        except FileNotFoundError:
            return False
        name = os.path.basename(path)
        # Without a name it is shown by its number; the lock has a name with one "-" less.
        return path.startswith(f"{directory}/") and (name.startswith("#") or name.count("-") > 2)

    for look in range(1_000_000):
        if any(writes(number) for number in os.listdir(descriptors)):
            return
        # Asking the server takes long, so it is done once per 50 rounds.
        if look % 50 == 49 and all(future.query() for future in futures) and tiers.is_settled(engine.server):
            return


# -- directories ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"relative_tmp_dir": "tmp", "layout": "sharded"}], ids=["flat", "sharded"])
def test_directory_removed_while_running(serve, engines, tmp_path, options):
    """Everything in it is a miss, the next store makes it again, and both go on as before."""
    directory = tmp_path / "tier"
    server = serve(flags=tiers.fs(directory, **options))
    engine = engines(server)
    tiers.store(engine, 1)
    tiers.wait_files(directory, 4)
    tiers.forget(engine)
    shutil.rmtree(directory)
    assert tiers.recall(engine, 1) == 0
    assert tiers.recall(engine, 2) == 0
    tiers.store(engine, 1)
    tiers.store(engine, 2)
    tiers.wait_files(directory, 8)
    tiers.forget(engine)
    assert tiers.recall(engine, 1) == tiers.recall(engine, 2) == 64
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert tiers.tier(server)["is_healthy"]
    # Another directory in its place is used as it is, until the server's periodic check notices it and warns.
    server.expect_trouble("base_path is not the directory that was opened")
    directory.rename(tmp_path / "moved")
    directory.mkdir()
    tiers.store(engine, 3)
    tiers.settled(server)
    tiers.forget(engine)
    assert tiers.recall(engine, 3) == 64


def test_directory_that_cannot_be_made_again(serve, engines, tmp_path):
    """A file lies where the directory was: stores and status say so, L1 goes on, and it recovers by itself."""
    directory = tmp_path / "tier"
    server = serve(flags=tiers.fs(directory))
    server.expect_trouble(CANNOT_STORE)
    engine = engines(server)
    tiers.store(engine, 1)
    tiers.wait_files(directory, 4)
    shutil.rmtree(directory)
    directory.write_bytes(b"in the way")
    for seed in (2, 4, 5):
        tiers.store(engine, seed)
        tiers.settled(server)
    assert not tiers.tier(server)["is_healthy"]
    assert tiers.tier(server)["last_store_error"]
    assert len([line for line in server.lines() if "cannot be stored" in line]) == 1, "once, when it begins"
    assert tiers.recall(engine, 1) == tiers.recall(engine, 2) == 64
    directory.unlink()
    tiers.store(engine, 3)
    tiers.wait_files(directory, 4)
    tiers.settled(server)
    tiers.forget(engine)
    assert tiers.recall(engine, 3) == 64
    assert tiers.tier(server)["is_healthy"]
    assert not tiers.tier(server)["last_store_error"]


@pytest.fixture
def unprivileged():
    """How to start our server so that modes of directories bind it, and a place that it can reach."""
    from kvrig.server import our_command

    with tempfile.TemporaryDirectory(prefix="kvtier-test-") as place:
        place = Path(place)
        command = our_command()
        if os.geteuid() == 0:
            if shutil.which("setpriv") is None:
                pytest.skip("root, and no setpriv to start the server as another user")
            place.chmod(0o755)
            binary = shutil.copy(command[0], place / "kvtier")
            command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(binary), *command[1:]]
            (place / "tier").mkdir()
            os.chown(place / "tier", 65534, 65534)
        else:
            (place / "tier").mkdir()
        yield command, place / "tier"
        (place / "tier").chmod(0o700)


def test_read_only_directory(unprivileged, serve, engines):
    """Made read-only while running: loads go on, stores fail and say so; writable again, it recovers by itself."""
    command, directory = unprivileged
    server = serve("engine_pickle", command=command, flags=tiers.fs(directory))
    server.expect_trouble(CANNOT_STORE)
    engine = engines(server)
    tiers.store(engine, 1)
    tiers.wait_files(directory, 4)
    tiers.settled(server)
    directory.chmod(0o500)
    tiers.store(engine, 2)
    tiers.settled(server)
    assert not tiers.tier(server)["is_healthy"]
    assert "ermission denied" in tiers.tier(server)["last_store_error"]
    assert len(tiers.files(directory)) == 4
    tiers.forget(engine)
    assert tiers.recall(engine, 1) == 64
    assert tiers.recall(engine, 2) == 0
    directory.chmod(0o700)
    tiers.store(engine, 2)
    tiers.settled(server)
    tiers.forget(engine)
    assert tiers.recall(engine, 2) == 64
    assert tiers.tier(server)["is_healthy"]


def test_unreadable_file(unprivileged, serve, engines):
    """A file that the server may not open is a miss, and is replaced by the next store."""
    command, directory = unprivileged
    server = serve("engine_pickle", command=command, flags=tiers.fs(directory))
    server.expect_trouble(DAMAGE)
    engine = engines(server)
    paths = tiers.store_in_order(engine, 1, directory)
    paths[2].chmod(0)
    tiers.forget(engine)
    assert tiers.recall(engine, 1) == 32
    tiers.forget(engine)
    tiers.store(engine, 1)
    tiers.settled(server)
    tiers.forget(engine)
    assert tiers.recall(engine, 1) == 64


def test_read_only_from_the_start(unprivileged, serve):
    """A directory in which nothing can be written is refused at the start, in one line that names it."""
    command, directory = unprivileged
    directory.chmod(0o500)
    with pytest.raises(RuntimeError) as refused:
        serve("engine_pickle", command=command, flags=tiers.fs(directory))
    line = f"base_path {directory} cannot be used: {directory} is no directory that the server's user can write to"
    assert line in str(refused.value)


# -- full disks -------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["bytes", "bytes-direct", "files"])
def test_full_disk(small_disk, serve, engines, lacks):
    """Where nothing may be evicted, stores stop and the status says so, loads go on; with free space again it goes on by itself."""
    directory = small_disk("nr_inodes=24" if lacks == "files" else "size=2m") / "tier"
    server = serve(flags=tiers.fs(directory, use_odirect=lacks == "bytes-direct", eviction={"eviction_policy": "noop"}))
    server.expect_trouble(r"out of space")
    engine = engines(server, groups=BIG)
    for seed in range(8):
        tiers.store(engine, seed)
        tiers.settled(server)
    assert tiers.tier(server)["is_full"] is True and tiers.metric(server, "kvtier_l2_full") == 1
    stopped = len(tiers.files(directory))
    assert 8 <= stopped < 32
    assert tiers.metric(server, "kvtier_l2_store_failures_total", reason="full") == 32 - stopped
    assert len({path.stat().st_size for path in tiers.files(directory)}) == 1, "each one is whole"
    assert tiers.being_written(directory) == []
    # L1 has everything, the tier what came first.
    assert [tiers.recall(engine, seed) for seed in range(8)] == [64] * 8
    tiers.forget(engine)
    assert tiers.recall(engine, 0) == tiers.recall(engine, 1) == 64
    assert tiers.recall(engine, 7) == 0
    for seed in range(8, 14):
        tiers.store(engine, seed)
        tiers.settled(server)
    assert len(tiers.files(directory)) - stopped <= 3
    said = [line for line in server.lines() if "out of space" in line]
    assert 1 <= len(said) <= 3, "once each time it begins"

    for path in tiers.files(directory):
        path.unlink()
    tiers.store(engine, 20)
    tiers.settled(server)
    assert tiers.tier(server)["is_full"] is False
    tiers.forget(engine)
    assert tiers.recall(engine, 20) == 64
    assert damaged_files(server) == 0


@pytest.mark.parametrize("capacity", [0, 1])
@pytest.mark.parametrize("lacks", ["bytes", "files"])
def test_full_disk_evicts_the_oldest(small_disk, serve, engines, lacks, capacity):
    """A disk that has less than `max_capacity_gb`, or no more inodes, keeps what was stored last, also beside another program."""
    disk = small_disk("nr_inodes=60" if lacks == "files" else "size=4m")
    server = serve(flags=tiers.fs(disk / "tier", max_capacity_gb=capacity))
    server.expect_trouble(r"max_capacity_gb of 1.00, and its file system")
    engine = engines(server, groups=BIG)
    for seed in range(30):
        if seed == 5:
            names = [disk / f"other-{number}" for number in range(8 if lacks == "files" else 1)]
            for path in names:
                path.write_bytes(b"x" * (0 if lacks == "files" else os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        tiers.store(engine, seed)
        tiers.settled(server)
        assert tiers.tier(server)["is_full"] is False, seed
    assert "warnings" not in server.get("/healthcheck")[1]
    tiers.forget(engine)
    assert tiers.recall(engine, 29) == tiers.recall(engine, 28) == 64
    assert tiers.recall(engine, 0) == 0
    assert tiers.tier(server)["stored_object_count"] == len(tiers.files(disk))
    assert tiers.being_written(disk) == []


def test_disk_filled_by_another_program(small_disk, serve, engines):
    """Free space is used up between two checks: writes fail half-way, and nothing of them is left or served."""
    disk = small_disk("size=3m")
    server = serve(flags=tiers.fs(disk / "tier"))
    server.expect_trouble(r"out of space")
    engine = engines(server, groups=BIG)
    ballast = disk / "ballast"
    for seed in range(20):
        free = os.statvfs(disk)
        prompt = tiers.tokens(64, seed)
        tiers.paint(engine.worker, engine.blocks_for(64), f"{seed}/")
        engine.worker.submit_store(f"{seed}", prompt, 0, 64, engine.blocks_for(64))
        try:
            ballast.write_bytes(b"x" * (free.f_bavail * free.f_frsize))
        except OSError:
            pass
        assert engine.worker.finish_store(f"{seed}") is True
        engine.end(f"{seed}")
        tiers.settled(server)
        ballast.unlink(missing_ok=True)
    assert tiers.being_written(disk) == []
    tiers.forget(engine)
    for seed in range(20):
        tiers.recall(engine, seed)
    assert damaged_files(server) == 0
    for path in tiers.files(disk):
        path.unlink()
    tiers.store(engine, 99)
    tiers.settled(server)
    tiers.forget(engine)
    assert tiers.recall(engine, 99) == 64


def test_reserve_of_the_disk(small_disk, serve, engines):
    """So much stays free as `--l2-min-free-gb` says, by more than nothing less; what was stored last is there."""
    disk = small_disk("size=4m")
    reserve = 2 << 20
    flags = tiers.adapter("fs", base_path=disk / "tier") + ["--l2-min-free-gb", str(2 * MIB)]
    server = serve(flags=flags)
    engine = engines(server, groups=BIG)
    for seed in range(12):
        tiers.store(engine, seed)
        tiers.settled(server)
        space = os.statvfs(disk)
        # One batch, of four objects, may be on its way.
        assert space.f_bavail * space.f_frsize >= reserve - 4 * 100 * 1024
    assert tiers.tier(server)["is_full"] is False
    assert len(tiers.files(disk)) >= 12
    tiers.forget(engine)
    assert tiers.recall(engine, 11) == tiers.recall(engine, 10) == 64
    assert tiers.recall(engine, 0) == 0
