"""The clients of LMCache's releases but the installed one, unmodified, in every mode: see `kvrig.release` and `kvrig.sharing`.

A process per release and side (CPU or GPU), several at once: most of the time they wait for heartbeats.
"""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvrig import older, torch_cuda
from kvrig.packages import HOME
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("each release is tested with its own server elsewhere")

HARNESS = Path(__file__).parents[1] / "harness"

# The modes that CPU workers of a release have; a GPU worker has `cuda`.
CPU_MODES = {
    **dict.fromkeys(["0.4.2", "0.4.3", "0.4.4", "0.4.5"], []),
    "0.4.6": ["engine_pickle"],
    **dict.fromkeys(
        ["0.4.7", "0.5.0", "0.5.1", "0.5.2", "0.5.3", "0.5.4", "0.5.5", "0.5.7rc2"],
        ["engine_pickle", "engine_shm", "lmcache_driven"],
    ),
}
SIDES = [(release, "gpu") for release in CPU_MODES] + [(release, "cpu") for release, modes in CPU_MODES.items() if modes]
# One of each numbering, and those that differ in what they notice: the gate runs these, the stage `releases` all.
IN_GATE = {("0.4.2", "gpu"), ("0.4.4", "gpu"), ("0.4.6", "cpu"), ("0.4.7", "cpu"), ("0.5.2", "cpu"), ("0.5.4", "cpu"), ("0.5.5", "gpu"),
           ("0.5.7rc2", "cpu")}  # fmt: skip
AT_ONCE = 4
# Of one process.
TIMEOUT = 150


@pytest.fixture(scope="session")
def environments(tmp_path_factory):
    """Variables of a process: environments(release, side)."""
    gpu = torch_cuda.environment(tmp_path_factory.mktemp("libraries"))

    def environment(release, side):
        variables = dict(gpu if side == "gpu" else os.environ)
        # What is installed is the current release.
        wheel = [str(HOME / "clients" / release)] if release in CPU_MODES else []
        quiet = {"LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false"}
        return variables | quiet | {"PYTHONPATH": os.pathsep.join([*wheel, str(HARNESS)])}

    return environment


class Conversations:
    """Runs `kvrig.release` for each release and side once, `AT_ONCE` at a time, also if several test processes
    (pytest-xdist) share the tests. `folder` is theirs together: it has a file per slot, claim and result."""

    def __init__(self, folder, environments, wanted):
        self.folder, self.environments, self.stopped = folder, environments, threading.Event()
        self.pool = ThreadPoolExecutor(AT_ONCE)
        for which in wanted:
            self.pool.submit(self._run, *which)

    def _run(self, release, side):
        name = f"{release}-{side}"
        with self._slot():
            if self.stopped.is_set():
                return
            try:
                (self.folder / f"{name}.claim").touch(exist_ok=False)
            except FileExistsError:
                return
            try:
                result = self._converse(release, side, self.folder / name)
            except Exception as error:  # noqa: BLE001  for the test that waits for it
                result = -1, repr(error)
            (self.folder / f"{name}.part").write_text(json.dumps(result))
            (self.folder / f"{name}.part").rename(self.folder / f"{name}.result")

    def _converse(self, release, side, logs):
        logs.mkdir()
        command, began = [sys.executable, "-m", "kvrig.release", str(logs), side], time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.environments(release, side)
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        return process.returncode, f"{output.decode(errors='replace')}{release} {side}: {time.monotonic() - began:.1f} s\n"

    def _slot(self):
        """One of `AT_ONCE` locked files, as a context."""
        while True:
            for number in range(AT_ONCE):
                file = open(self.folder / f"{number}.slot", "w")  # noqa: SIM115
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return file
                except BlockingIOError:
                    file.close()
            time.sleep(0.05)

    def result(self, release, side):
        """(exit status, output) of one, when it has ended."""
        path = self.folder / f"{release}-{side}.result"
        wait_until(path.exists, TIMEOUT * len(SIDES) / AT_ONCE, f"{release} on {side}", interval=0.05)
        return json.loads(path.read_text())

    def close(self):
        """Begins no other; another test process may wait for those that run."""
        self.stopped.set()
        self.pool.shutdown()


@pytest.fixture(scope="module")
def conversations(request, tmp_path_factory, environments):
    """Those of the tests that were selected."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "releases"
    folder.mkdir(exist_ok=True)
    selected = {item.callspec.params["which"] for item in request.session.items if "conversations" in item.fixturenames}
    running = Conversations(folder, environments, [which for which in SIDES if which in selected])
    yield running
    running.close()


def marked(which):
    """A parameter with the mark by which the gate leaves it out."""
    return pytest.param(which, marks=[] if which in IN_GATE else pytest.mark.beside_the_gate, id="-".join(which))


# proves: docs/clients.md#registrations-up-to-044
# proves: docs/clients.md#releases
# proves: docs/compare.md#clients-of-lmcache
@pytest.mark.parametrize("which", [marked(which) for which in SIDES])
def test_release_works_in_every_mode(conversations, which):
    """Registered, stored, found and loaded with every byte compared; a refused retrieve is noticed; workers with equal
    ids have their own pages; a restart of the server, also with another chunk size, is survived."""
    release, side = which
    status, output = conversations.result(release, side)
    assert status == 0, output[-6000:]
    assert f"/{release}/lmcache" in output, "another release was imported"
    for mode in ["cuda"] if side == "gpu" else CPU_MODES[release]:
        assert f"\n{mode}: " in output, f"{mode} was left out"
    print(output)


class Peer:
    """A process of `kvrig.sharing`."""

    def __init__(self, environments, url, release, side, log):
        self.log = log
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvrig.sharing", url, side],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environments(release, side), text=True,
            )  # fmt: skip
        # Reading from it ends then.
        self.watchdog = threading.Timer(TIMEOUT, self.process.kill)
        self.watchdog.start()

    def expect(self, beginning):
        """The next line, which must begin so."""
        line = self.process.stdout.readline()
        assert line.startswith(beginning), f"{beginning!r}, not {line!r}:\n{self.log.read_text()[-4000:]}"
        return line

    def do(self, command):
        """Run a command to its end."""
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        self.expect(f"done {command}")

    def close(self):
        """End it."""
        self.process.stdin.close()
        assert self.process.wait() == 0, self.log.read_text()[-4000:]

    def kill(self):
        """End it in any case."""
        self.watchdog.cancel()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


CURRENT = "0.5.6"
# Side and transfer mode -> releases whose engines share objects. The first and the last store, and all load. Layouts that
# differ in one of these share nothing, by the server's design. Engine-driven workers of 0.4.6 pickle their chunks, all
# others use the pool.
SHARING = {
    ("gpu", "lmcache_driven"): ["0.4.2", "0.5.5", CURRENT],
    ("cpu", "lmcache_driven"): ["0.4.7", CURRENT, "0.5.7rc2"],
    ("cpu", "engine_driven"): ["0.4.6", "0.4.7", CURRENT, "0.5.7rc2"],
}


# The same of every release that has the mode.
EVERY = {
    (side, mode): [
        release for release in [*CPU_MODES, CURRENT]
        if wanted & set(["cuda"] if side == "gpu" else CPU_MODES.get(release, ["engine_shm", "lmcache_driven"]))
    ]
    for (side, mode), wanted in {
        ("gpu", "lmcache_driven"): {"cuda"},
        ("cpu", "lmcache_driven"): {"lmcache_driven"},
        ("cpu", "engine_driven"): {"engine_shm", "engine_pickle"},
    }.items()
}  # fmt: skip


# proves: docs/clients.md#releases
# proves: docs/compare.md#clients-of-lmcache
@pytest.mark.parametrize(
    "sharing", [pytest.param(SHARING, id="some"), pytest.param(EVERY, id="every", marks=pytest.mark.beside_the_gate)]
)
def test_releases_share_objects(serve, environments, tmp_path, sharing):
    """What a client of one release has stored, clients of others find on the same server and load: the same bytes."""
    server = serve("all")
    peers, starting = {}, threading.Semaphore(AT_ONCE)

    def start(release, side):
        with starting:
            peer = peers[release, side] = Peer(environments, server.url, release, side, tmp_path / f"{release}-{side}.log")
            line = peer.expect("LMCache")
            assert release == CURRENT or f"/{release}/lmcache" in line, "another release was imported"

    wanted = {(release, side) for (side, _), releases in sharing.items() for release in releases}
    try:
        with ThreadPoolExecutor(len(wanted)) as pool:
            list(pool.map(lambda which: start(*which), sorted(wanted)))
        for (side, mode), releases in sharing.items():
            for release in (releases[0], releases[-1]):
                peers[release, side].do(f"store {mode} by-{release}")
        for (side, mode), releases in sharing.items():
            for release in releases:
                for stored_by in (releases[0], releases[-1]):
                    peers[release, side].do(f"load {mode} by-{stored_by}")
        for peer in peers.values():
            peer.close()
    finally:
        for peer in peers.values():
            peer.kill()


# The page's columns behind the release.
COLUMNS = ["cuda", "lmcache_driven", "engine_shm", "engine_pickle"]


# proves: docs/clients.md#releases
def test_page_has_what_is_tested():
    """docs/clients.md says of each release which modes it has, whether it has salts, and whether it registers again."""
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    table = page[page.index("| LMCache | `lmcache_driven`, GPU |") :].split("\n\n")[0].splitlines()[2:]
    stated = {}
    for row in table:
        releases, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        first, _, last = releases.replace(",", " to").partition(" to ")
        stated |= {release: cells for release in [*CPU_MODES, "0.5.6"] if first <= release <= (last or first)}
    for release in [*CPU_MODES, "0.5.6"]:
        traits = older.traits_of(older.numbers(release))
        if release in CPU_MODES:
            assert ["cuda", *CPU_MODES[release]] == list(traits.modes), release
        modes = ["yes" if mode in traits.modes else "-" for mode in COLUMNS]
        others = ["yes" if has else "no" for has in (traits.salts, traits.registers_again)]
        assert stated[release] == [*modes, *others], release
