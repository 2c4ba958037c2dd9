"""Mooncake Store as a second tier, by the program of the Python package, over TCP."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvrig import tiers
from kvrig.mooncake import Mooncake, package
from kvrig.server import free_port, our_command
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("LMCache's type of this name needs an extension that no package of it has")

SOURCES = Path(__file__).parents[2] / "bindings" / "python" / "python"

# What Mooncake's library writes, and what a server says of a master that has ended.
LINES = r"output of a tier's command|backend|second tier|objects cannot be|did not end within"

# Reads one value as any client of Mooncake does.
READ = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup(sys.argv[1], sys.argv[2], 0, 16 << 20, "tcp", "", sys.argv[3]) == 0
sys.stdout.buffer.write(b"".join(store.get(key) for key in sys.argv[4:]))
"""


@pytest.fixture(name="mooncake")
def _mooncake(tmp_path):
    server = Mooncake(tmp_path / "mooncake")
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCES), str(package())]))


def tier(mooncake, path):
    """The flags of a tier that kvtier starts itself."""
    return tiers.adapter("process", socket_path=str(path), command=mooncake.command())


def test_suite_passes(mooncake, tmp_path):
    """`kvtier tier-test`, which is the suite that every adapter passes. Mooncake may return other bytes of an object that is removed
    while it is read, which kvtier notices: a miss, as its last case finds."""
    command = [our_command()[0], "tier-test", "--socket", str(tmp_path / "s"), "--command", *mooncake.command("512MiB")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
    torn = [line for line in failed if "many_tasks_at_once" in line and line.endswith("Some(Corrupt)")]
    assert failed == torn and done.returncode == (1 if failed else 0), done.stdout + done.stderr
    passed = [line for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert len(passed) >= 20, done.stdout


def test_another_server_hits_what_this_one_stored(mooncake, serve, engines, tmp_path):
    """Two servers with a program each: shared by all, but not between tenants; the program's death costs only misses."""
    first = serve(flags=tier(mooncake, tmp_path / "first"))
    first.expect_trouble(LINES)
    engine = engines(first)
    tiers.store(engine, 1)
    tiers.store(engine, 2, salt="alice")
    tiers.settled(first)
    second = serve(flags=tier(mooncake, tmp_path / "second"))
    second.expect_trouble(LINES)
    other = engines(second)
    assert tiers.recall(other, 1) == 64
    assert tiers.recall(other, 2, salt="alice") == 64
    assert tiers.recall(other, 2) == 0
    assert tiers.recall(other, 1, salt="alice") == 0
    mooncake.stop()
    # What L1 has is served without it.
    assert tiers.recall(other, 1) == 64


def test_values_are_those_of_lmcache(mooncake, serve, engines, tmp_path):
    """Under the text of its key is an object's bytes, and nothing else."""
    server = serve(flags=tier(mooncake, tmp_path / "socket") + tiers.fs(tmp_path / "files"))
    server.expect_trouble(LINES)
    engine = engines(server)
    tiers.store(engine, 1)
    tiers.settled(server)
    [file, *_] = tiers.wait_files(tmp_path / "files", 4) or tiers.files(tmp_path / "files")
    # The file's name has the rank in another form.
    model, rank, group, chunk = file.name.removesuffix(".data").replace("-SEP-", "/").split("@")
    key = f"{model}@{int(rank, 16):08x}@{group}@{chunk}"
    places = [f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{mooncake.metadata}/metadata", f"127.0.0.1:{mooncake.port}"]
    value = lambda: subprocess.run(  # noqa: E731
        [sys.executable, "-c", READ, *places, key], capture_output=True, check=True, timeout=60
    ).stdout
    found = wait_until(value, 60, "the value")
    assert found == file.read_bytes()[: len(found)] and len(found) > 1000
