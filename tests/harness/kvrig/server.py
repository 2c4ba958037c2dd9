"""A cache server process under test: our binary, or LMCache's own server for comparison.

Everything listens on loopback. A server is stopped by its own process id, never by name.
"""

import fcntl
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from . import logs
from .waiting import TimedOut, wait_until

# Servers of tests keep no state on the machine, unless a flag names a directory.
os.environ.setdefault("KVTIER_STATE_DIR", "none")

REPOSITORY = Path(__file__).resolve().parents[3]

# Name of a server mode -> the flags that select it, and what a client must ask for.
MODES = {
    "lmcache_driven": ["--supported-transfer-mode", "lmcache_driven"],
    "engine_shm": ["--supported-transfer-mode", "engine_driven", "--shm-name", "{shm}", "--no-l1-use-lazy"],
    "engine_pickle": ["--supported-transfer-mode", "engine_driven", "--shm-name", ""],
    # Workers on a GPU, which is the fake CUDA driver.
    "cuda": ["--supported-transfer-mode", "lmcache_driven", "--cuda-driver", "{fake_driver}"],
    "all": ["--supported-transfer-mode", "auto", "--shm-name", "{shm}", "--no-l1-use-lazy", "--cuda-driver", "{fake_driver}"],
    "both": ["--supported-transfer-mode", "auto", "--shm-name", "{shm}", "--no-l1-use-lazy"],
}

ANSI = re.compile(r"\x1b\[[0-9;]*m")
# The fake driver says when the driver is used as no correct caller does.
TROUBLE = re.compile(r"\b(WARN|WARNING|ERROR)\b|panicked at|cuda fake driver:")

# Ports of test processes, below those that the kernel assigns to clients (`ip_local_port_range`), in blocks.
FIRST_PORT, PORTS_PER_BLOCK, PORT_BLOCKS = 20000, 500, 24

# The process that has the block, the file whose lock reserves it, and its ports from the next one on.
_block = (None, None, None)


def await_pings(state):
    """Until the only worker whose registration this state directory keeps has sent two pings: their interval is known."""
    (folder,) = Path("/dev/shm").glob(f"kvtier_*_{(state / 'id').read_text()}")
    (file,) = folder.iterdir()
    wait_until(lambda: any(file.read_bytes()[16:24]), 60, "two pings")


def client_mode(mode):
    """The transfer mode a client of a server in `mode` uses."""
    return "lmcache_driven" if mode in ("lmcache_driven", "cuda", "both") else "engine_driven"


def free_port():
    """A loopback TCP port that nothing listens on, from a block that is reserved for this process until it ends."""
    global _block
    if _block[0] != os.getpid():
        number, lock = reserve_block()
        first = FIRST_PORT + number * PORTS_PER_BLOCK
        _block = (os.getpid(), lock, itertools.cycle(range(first, first + PORTS_PER_BLOCK)))
    for port in itertools.islice(_block[2], PORTS_PER_BLOCK):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of the {PORTS_PER_BLOCK} ports of this process is free")


def reserve_block():
    """(number, lock file) of a block of ports that no other test process has; one that is forked takes its own."""
    directory = Path(tempfile.gettempdir(), f"kvtier-test-ports-{os.getuid()}")
    directory.mkdir(exist_ok=True)
    for number in range(PORT_BLOCKS):
        lock = open(directory / f"{number}.lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return number, lock
    raise RuntimeError(f"{PORT_BLOCKS} test processes have reserved all ports, see {directory}")


def our_command():
    """The built server binary: $KVTIER_BIN, else the release build of this checkout."""
    target = Path(os.environ.get("CARGO_TARGET_DIR") or REPOSITORY / "target")
    binary = Path(os.environ.get("KVTIER_BIN") or target / "release" / "kvtier")
    if not os.access(binary, os.X_OK):
        raise FileNotFoundError(f"no server binary at {binary}: run `cargo build --release` or set KVTIER_BIN")
    return [str(binary), "server"]


def fake_driver_library():
    """The fake CUDA driver that was built with the server: $KVTIER_CUDA_FAKE_LIB, else beside it."""
    if path := os.environ.get("KVTIER_CUDA_FAKE_LIB"):
        return path
    beside = Path(our_command()[0]).parent
    for path in (beside / "libkvtier_cuda_fake.so", beside / "deps" / "libkvtier_cuda_fake.so"):
        if path.exists():
            return str(path)
    raise FileNotFoundError(f"no fake CUDA driver in {beside}: run `cargo build --release -p kvtier-cuda-fake`")


def peer_command():
    """LMCache's own server from the Python environment that runs the tests."""
    return [str(Path(sys.prefix) / "bin" / "lmcache"), "server"]


# Name of servers that keep L1, of this process: memory that no client maps is named by instance and user, so tests beside these
# would find it.
INSTANCE = f"kept-{os.getpid()}"


class Server:
    """One server process on ports of its own; can be killed and started again on the same ports."""

    def __init__(self, command, log, mode="lmcache_driven", chunk=16, l1_gb=0.0625, eviction="LRU", flags=(), peer=False, env=None):
        """`command` starts the server, flags are appended; `log` is the file its output goes to; `env` is added to ours."""
        self.mode, self.chunk, self.peer = mode, chunk, peer
        self.command, self.log = list(command), Path(log)
        self.port, self.http_port, self.metrics_port = free_port(), free_port(), free_port()
        self.shm_name = f"kvtier_test_{os.getpid()}_{self.port}"
        self.l1_gb, self.eviction, self.flags = l1_gb, eviction, list(flags)
        self.env = dict(env or {})
        self.process = None
        # Tests that register uint8 do so under the names of all others.
        self.expected_trouble = [re.compile("registered pages of untyped bytes")]

    @property
    def url(self):
        """Where clients of the request protocol connect."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def http(self):
        """Base of the admin API."""
        return f"http://127.0.0.1:{self.http_port}"

    def argv(self):
        """The whole command line."""
        return self.command + [
            "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(self.http_port),
            "--prometheus-port", str(self.metrics_port),
            "--l1-size-gb", str(self.l1_gb), "--eviction-policy", self.eviction,
            "--chunk-size", str(self.chunk),
            *(self._filled(flag) for flag in MODES[self.mode]),
            *self.flags,
        ]  # fmt: skip

    def _filled(self, flag):
        if flag == "{fake_driver}":
            return fake_driver_library()
        return flag.replace("{shm}", self.shm_name)

    def listens(self):
        """Whether the request port is open."""
        return listening(self.port)

    def start(self, timeout=60):
        """Start the process and wait until both ports answer. Returns the seconds it took."""
        assert self.process is None, "already running"
        began = time.monotonic()
        env = dict(os.environ, LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="INFO")
        env |= {"KVTIER_CUDA_FAKE_LOUD": "1", **self.env}
        logs.opened(self.log)
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                self.argv(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )

        def ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"server exited with {self.process.returncode} at start:\n{self.tail()}")
            try:
                return self.get("/healthcheck")[0] == 200 and self.listens()
            except OSError:
                return False

        try:
            wait_until(ready, timeout, "server start")
        except BaseException as error:
            self.kill()
            if isinstance(error, TimedOut):
                raise TimedOut(f"{error}\n{self.tail()}") from None
            raise
        return time.monotonic() - began

    def stop(self, timeout=60):
        """SIGTERM; returns (exit status, seconds). Kills and fails when it takes longer than `timeout`."""
        began = time.monotonic()
        process, self.process = self.process, None
        process.send_signal(signal.SIGTERM)
        logs.closed(self.log)
        try:
            return process.wait(timeout), time.monotonic() - began
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"server ignored SIGTERM for {timeout} s:\n{self.tail()}") from None

    def kill(self):
        """SIGKILL, as a crash or the OOM killer would."""
        if self.process is not None:
            process, self.process = self.process, None
            process.kill()
            process.wait()
            logs.closed(self.log)

    @contextmanager
    def frozen(self):
        """Stop all threads of the process; they go on afterwards. The signal alone returns before they stand still."""
        process, tasks = self.process, Path(f"/proc/{self.process.pid}/task")

        def stopped():
            return all((task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T" for task in tasks.iterdir())

        process.send_signal(signal.SIGSTOP)
        try:
            wait_until(stopped, 60, "all threads to stop")
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def running(self):
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def shm_files(self):
        """Shared-memory files of the server's own (not its clients') that it has mapped."""
        found, clients = set(), re.compile(rf"/lmcache_kv_|/torch_|/cuda\.shm\.(?!\d+\.{self.process.pid:x}\.)|/kvtier-cuda-fake-(?!{self.process.pid}-)")
        for line in Path(f"/proc/{self.process.pid}/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[5:]
            if path and path[0].startswith("/dev/shm/") and not clients.search(path[0]):
                found.add(path[0].removesuffix(" (deleted)"))
        return found

    # -- log ---------------------------------------------------------------------------------

    def lines(self):
        """Everything the server has printed, without colours."""
        return ANSI.sub("", self.log.read_text(errors="replace")).splitlines()

    def tail(self, count=25):
        """The last lines of the log, for messages."""
        return "\n".join(self.lines()[-count:])

    def expect_trouble(self, pattern):
        """Warnings and errors whose line matches `pattern` are part of the test."""
        self.expected_trouble.append(re.compile(pattern))

    def unexpected_trouble(self):
        """Warning, error and panic lines no test has announced."""
        return [
            line
            for line in self.lines()
            if TROUBLE.search(line) and not any(known.search(line) for known in self.expected_trouble)
        ]

    # -- admin API ---------------------------------------------------------------------------

    def request(self, method, path, body=None, timeout=60):
        """(status, decoded JSON or text) of one admin call; HTTP errors are returned, not raised."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.http + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                status, raw = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read().decode()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw

    def get(self, path):
        """GET an admin path."""
        return self.request("GET", path)

    def post(self, path, body=None):
        """POST JSON to an admin path."""
        return self.request("POST", path, body)


def listening(port):
    """Whether something accepts TCP connections on this loopback port."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False
