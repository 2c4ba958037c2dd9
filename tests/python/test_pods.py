"""Server and engines as in pods of their own: only a directory, mounted at /dev/shm in each, is common.

Each has mount, PID and IPC namespaces of its own, where it is process 1, another user than root, no capability, and no other
file that it may write; engines have no network either.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kvrig.server import INSTANCE, Server, our_command
from kvrig.waiting import wait_until

UNSHARE = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]

# Everything but the directory and a /var/tmp of its own is read-only; the last command leaves the process without capabilities and as another user.
POD = """
mount --bind "$1" /dev/shm && mount -t tmpfs tmpfs /var/tmp && shift || exit
export TMPDIR=/var/tmp HOME=/var/tmp
for place in $(awk '$5 !~ "^/(dev/shm|var/tmp|proc)$" {print $5}' /proc/self/mountinfo); do mount -o remount,bind,ro "$place" || exit; done
exec unshare --user --map-user=65532 --map-group=65532 setpriv --no-new-privs "$@"
"""

# Reads "store N" and "load N", and answers each when the bytes are in place. The blocks of prompt N have the same bytes in every
# engine.
ENGINE = """
import os, sys, types
from pathlib import Path

assert (os.getpid() == 1) == (sys.argv[4] == "first") and os.getuid() == 65532
assert "CapEff:\\t" + 16 * "0" in Path("/proc/self/status").read_text()
for place in ("/tmp", "/etc", sys.prefix):
    try:
        Path(place, "written-in-a-pod").touch()
    except OSError:
        continue
    raise AssertionError(f"{place} is writable")

import torch
from kvrig.waiting import wait_until

client, mode, url, TARGET = sys.argv[1], sys.argv[2], "ipc:///dev/shm/requests", list(range(40, 48))

if client == "kvtier":
    from rig import Engine, tokens
    engine = Engine(url, mode={"engine_shm": "engine_driven", "engine_pickle": "pickle"}.get(mode, mode), heartbeat=1.0, timeout=5)
    memory, number = engine, iter(range(10**6))

    def store(prompt, blocks):
        return engine.store(f"{os.getpid()}-{next(number)}", prompt, 0, 32, blocks)

    def load(prompt):
        request = f"{sys.argv[3]}-{next(number)}"
        return engine.lookup(request, prompt) == 32 and not engine.retrieve(request, prompt, 0, 32, TARGET)
else:
    from kvrig.engine import Engine, tokens
    server = types.SimpleNamespace(url=url, chunk=16)
    engine = Engine(server, mode if mode == "lmcache_driven" else "engine_driven", heartbeat=1.0, mq_timeout=5)
    memory = engine.worker

    def store(prompt, blocks):
        request = engine.new_request()
        stored = memory.store(request, prompt, 0, 32, blocks)
        engine.end(request)
        return stored

    def load(prompt):
        request, hit = engine.lookup(prompt)
        loaded = hit == 32 and memory.retrieve(request, prompt, 0, 32, TARGET).ok
        engine.end(request)
        return loaded

print("ready", flush=True)
for line in sys.stdin:
    verb, n = line.split()
    prompt, blocks = tokens(32, seed=int(n)), list(range(1 + 8 * int(n), 9 + 8 * int(n)))
    memory.fill(TARGET)
    if verb == "store":
        # A server that started meanwhile may not know the worker yet.
        wait_until(lambda: store(prompt, blocks), 60, line)
    else:
        wait_until(lambda: load(prompt), 60, line)
        assert all(torch.equal(a, b) for a, b in zip(memory.read(TARGET), memory.read(blocks), strict=True)), line
    print("done", flush=True)
engine.close()
"""


def process_in(unshare):
    """The process that `unshare` started."""
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    return int(children.read_text())


class PodServer(Server):
    """A server in a pod."""

    url = "ipc:///dev/shm/requests"

    def listens(self):
        return True

    def stop(self, timeout=60):
        os.kill(process_in(self.process), 15)
        process, self.process = self.process, None
        return process.wait(timeout)


class PodEngine:
    """An engine in a pod, as its first process, or below that."""

    def __init__(self, shared, client, mode, name, place):
        init = [] if place == "first" else ["sh", "-c", '"$@"; exit', "init"]
        command = [*UNSHARE, "--net", "sh", "-c", POD, "pod", shared, *init, sys.executable, "-c", ENGINE, client, mode, name, place]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
        self.process = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.expect("ready")

    def expect(self, answer):
        while (line := self.process.stdout.readline().strip()) != answer:
            assert line, "the engine has ended"

    def __call__(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self.expect("done")

    def kill(self):
        self.process.kill()
        self.process.communicate()

    def close(self):
        self.process.communicate()
        assert self.process.returncode == 0


@pytest.fixture
def shared():
    """The directory: in a tmpfs."""
    done = subprocess.run([*UNSHARE, "--net", "true"], capture_output=True, text=True, check=False)
    # The last: the user may have no namespaces.
    if any(refusal in done.stderr for refusal in ("not permitted", "denied", "No space left")):
        pytest.skip(f"namespaces are not allowed here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvtier-pods-") as directory:
        yield directory


# proves: docs/operate.md#kubernetes
@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_shm", "engine_pickle"])
@pytest.mark.parametrize("client", ["kvtier", "lmcache"])
def test_pods_share_one_directory(shared, tmp_path, client, mode):
    """Every engine loads what every other has stored, byte for byte, and each side may be killed and started again."""
    kept = ["--state-dir", "/dev/shm/state", "--instance-id", INSTANCE, "--l1-restore", "on"]
    command = [*UNSHARE, "sh", "-c", POD, "pod", shared, *our_command()]
    server = PodServer(command, tmp_path / "server.log", mode, flags=["--host", PodServer.url, *kept])
    server.expect_trouble("instance|worker|register|process has ended")
    engines = {}

    def start(name):
        # LMCache's client names its segments by its process id.
        place = "below" if (client, mode, name) == ("lmcache", "lmcache_driven", "b") else "first"
        engines[name] = PodEngine(shared, client, mode, name, place)

    def segments():
        return sorted(path.name for path in Path(shared).glob("lmcache_kv_*"))

    try:
        server.start()
        assert Path(shared, "requests").stat().st_mode & 0o777 == 0o600
        for name in ("a", "b"):
            start(name)
        engines["a"]("store 0")
        engines["b"]("load 0")
        engines["b"]("store 1")
        engines["a"]("load 1")

        every = segments()
        assert bool(every) == (mode == "lmcache_driven")
        engines["a"].kill()
        wait_until(lambda: len(segments()) == len(every) // 2, 60, "removal of the segments")
        start("a")
        engines["a"]("load 0")
        engines["a"]("store 2")

        server.kill()
        server.start()
        if client == "kvtier" and every:
            # Those of living engines: each has the memory that the former server knew.
            assert server.get("/status")[1]["state"]["restored_workers"] == 2
        for engine in engines.values():
            engine("load 2")
        engines["b"]("store 3")

        server.kill()
        engines["a"].kill()
        server.start()
        wait_until(lambda: len(segments()) == len(every) // 2, 60, "removal of the segments")
        start("a")
        engines["a"]("load 3")
        for engine in engines.values():
            engine.close()
        assert not segments()
        assert server.stop() == 0, server.tail()
    finally:
        for process in (server, *engines.values()):
            process.kill()
    assert not server.unexpected_trouble()
