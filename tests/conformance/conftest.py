"""Fixtures: servers that are checked when a test ends, and engines that connect to them."""

import gc
import os
import subprocess
import uuid
from pathlib import Path

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", DO_NOT_TRACK="1")

import pytest
from kvrig.log_reports import pytest_runtest_makereport as pytest_runtest_makereport
from kvrig.server import Server, our_command, peer_command


def pytest_addoption(parser):
    parser.addoption("--peer", action="store_true", help="test LMCache's own server instead of ours")


def pytest_collection_modifyitems(config, items):
    # They wait more than they compute: begun last, they would be awaited alone.
    items.sort(key=lambda item: item.path.stem != "test_restart")
    if not config.getoption("--peer"):
        return
    for item in items:
        if marker := item.get_closest_marker("ours"):
            item.add_marker(pytest.mark.skip(reason=f"peer: {marker.args[0]}"))


def pytest_collection_finish():
    """What is imported stays: no collection of garbage looks through torch and LMCache again."""
    gc.freeze()


@pytest.fixture(scope="session")
def peer(request):
    """Whether LMCache's own server is under test."""
    return request.config.getoption("--peer")


@pytest.fixture(scope="session")
def command(peer):
    """How to start the server under test."""
    return peer_command() if peer else our_command()


# Seconds of a stop after which a server ends without waiting for what is in flight, by default.
STOP_TIMEOUT = 20


def check_and_stop(server):
    """A server must stop cleanly, leave nothing in shared memory, and have logged nothing unexpected."""
    if server.running():
        leftovers = server.shm_files()
        status, seconds = server.stop()
        assert status == 0 or server.peer, f"exit status {status} after SIGTERM\n{server.tail()}"
        left = [path for path in leftovers if os.path.exists(path)]
        if "--l1-restore" in server.flags:
            # For the next server of the instance, and there is none.
            for path in left:
                os.unlink(path)
            left = []
        assert not left, f"left in shared memory: {left}"
        assert seconds < STOP_TIMEOUT or server.peer, f"took {seconds:.1f} s to stop"
    else:
        assert server.process is None, f"server died:\n{server.tail()}"
    trouble = server.unexpected_trouble()
    assert server.peer or not trouble, "unexpected lines in the server's log:\n" + "\n".join(trouble[:20])


@pytest.fixture(scope="session")
def peer_pool(tmp_path_factory):
    """LMCache's server needs many seconds to start: tests that allow it share one a configuration."""
    pool = {}
    yield pool
    for server in pool.values():
        if server.running():
            server.stop()


@pytest.fixture
def serve(command, peer, peer_pool, tmp_path):
    """Start servers: serve(mode, ...) -> Server. Each is stopped and checked after the test.

    `fresh=True` asks for a process no other test uses (always so for ours).
    """
    started, usual = [], command

    def start(mode="lmcache_driven", fresh=False, command=usual, **options):
        key = (mode, repr(sorted(options.items())))
        if peer and not fresh and key in peer_pool and peer_pool[key].running():
            return peer_pool[key]
        server = Server(command, tmp_path / f"server-{len(started)}.log", mode, peer=peer, **options)
        server.start()
        if peer and not fresh:
            peer_pool[key] = server
        else:
            started.append(server)
        return server

    yield start
    problems = []
    for server in started:
        try:
            check_and_stop(server)
        except AssertionError as problem:
            problems.append(str(problem))
    assert not problems, "\n".join(problems)


@pytest.fixture
def engines(serve):
    """Connect engines: engines(server, ...) -> Engine. All are closed before the servers stop.

    Engines of one test share one model name that no other test uses.
    """
    from kvrig.engine import Engine
    from kvrig.gpu import GpuEngine
    from kvrig.server import client_mode

    opened, model = [], f"models/{uuid.uuid4().hex}"

    def connect(server, mode=None, **options):
        kind = GpuEngine if server.mode == "cuda" else Engine
        engine = kind(server, mode or client_mode(server.mode), **{"model": model, **options})
        opened.append(engine)
        return engine

    yield connect
    for engine in reversed(opened):
        engine.close()


# Mounts where no other process sees it, prints that, and keeps the mount until its stdin is closed.
KEEP_MOUNTED = 'mount -t tmpfs -o "$1" tmpfs "$0" && echo mounted && read -r _'


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of a given size: small_disk("size=2m") -> directory. Gone after the servers ended.

    It is mounted in a namespace of its own, which needs no root, and is reached through a process there.
    """
    keepers = []

    def mount(options):
        place, said = tmp_path / f"disk-{len(keepers)}", "no unshare"
        place.mkdir()
        # Root can do without a user namespace, where these are forbidden.
        for namespaces in (["--map-root-user", "--mount"], ["--mount"]):
            command = ["unshare", *namespaces, "sh", "-c", KEEP_MOUNTED, str(place), options]
            pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
            try:
                keeper = subprocess.Popen(command, text=True, **pipes)
            except FileNotFoundError:
                break
            if keeper.stdout.readline() == "mounted\n":
                keepers.append(keeper)
                return Path(f"/proc/{keeper.pid}/root", place.relative_to("/"))
            said = keeper.communicate()[1].strip()
        pytest.skip(f"cannot mount a small file system: {said}")

    yield mount
    for keeper in keepers:
        keeper.communicate()
