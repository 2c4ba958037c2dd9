"""``python -m kvtier.doctor``: for each thing that can be wrong it fails, and says what to mend."""

import os
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import kvtier
import msgspec
import pytest
import zmq
from conftest import CHUNK
from kvrig.proxy import OPERATIONS
from kvrig.server import free_port
from kvtier import doctor
from rig import tokens

NUMBERS = {name: number for number, name in OPERATIONS.items()} | {
    "unregister": 2, "unregister_engine_driven": 15, "noop": 24, "get_experimental": 32,
}  # fmt: skip
REFUSED = "error: this server runs with --supported-transfer-mode lmcache_driven"


class Scripted:
    """A server that answers each operation with what the script has for it; "error: ..." takes the operation's place."""

    # Of one that says yes to everything and keeps nothing, for workers whose pages it copies.
    YES = {
        "get_chunk_size": CHUNK, "ping": True, "noop": "OK", "register_kv_cache": None, "unregister": None, "store": (b"", True),
        "lookup": None, "wait_prefetch_status": 1, "retrieve": (b"", True), "end_session": None,
        "register_kv_cache_engine_driven_context": REFUSED, "get_experimental": [],
    }  # fmt: skip

    def __init__(self, **script):
        """``script``: what is answered otherwise; Ellipsis for no answer."""
        self.script = {NUMBERS[name]: answer for name, answer in {**self.YES, **script}.items()}
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.url = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.stopping = False
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        while not self.stopping:
            if not self.socket.poll(20):
                continue
            client, uid, number, *_ = self.socket.recv_multipart()
            answer = self.script.get(msgspec.msgpack.decode(number), ...)
            if isinstance(answer, str) and answer.startswith("error:"):
                self.socket.send_multipart([client, uid, msgspec.msgpack.encode(answer)])
            elif answer is None:
                self.socket.send_multipart([client, uid, number])
            elif answer is not ...:
                self.socket.send_multipart([client, uid, number, msgspec.msgpack.encode(answer)])

    def close(self):
        """End it."""
        self.stopping = True
        self.thread.join()
        self.context.destroy(linger=0)


@pytest.fixture
def scripted():
    """Makes scripted servers."""
    made = []

    def make(**script):
        made.append(Scripted(**script))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def http():
    """Makes HTTP servers that answer each path with the JSON given for it."""
    made = []

    def make(paths):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                known = self.path in paths
                self.send_response(200 if known else 404)
                self.end_headers()
                self.wfile.write(msgspec.json.encode(paths.get(self.path)))

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


@pytest.fixture
def examine(capsys):
    """Runs the doctor; its exit status, and {check: (verdict, text with the remedy)}."""

    def run(url, *flags):
        status = doctor.main([url, "--timeout", "2", *flags])
        said = capsys.readouterr().out
        print(said)
        return status, told(said)

    return run


def told(said):
    """See :func:`examine`; the last line is under ""."""
    checks = {}
    for line in said.splitlines():
        found = re.match(r"(ok|skipped|warning|FAILED) +([^:]+): (.*)", line)
        if found:
            checks[last := found[2]] = (found[1], found[3])
        elif line.startswith(" "):
            checks[last] = (checks[last][0], checks[last][1] + line)
        else:
            checks[""] = ("", line)
    return checks


def fails(result, check, *words):
    """This check has failed, no other, with these words; so has the whole."""
    status, checks = result
    assert status == 1
    assert [name for name, (verdict, _) in checks.items() if verdict == "FAILED"] == [check]
    assert "FAILED" in checks[""][1] and "works" not in checks[""][1]
    for word in words:
        assert word in checks[check][1], word


STORE_ENGINE, STORE_SERVER = "store and retrieve, engine_driven", "store and retrieve, lmcache_driven"


def test_working_setup_passes(place, examine):
    """Against a server with both modes: all is tried but GPUs, and that is said."""
    server = place.server()
    status, checks = examine(server.url, "--http", server.http)
    assert status == 0
    assert {verdict for name, (verdict, _) in checks.items() if name not in ("", "GPU")} == {"ok"}
    assert "by pool" in checks[STORE_ENGINE][1] and "by server" in checks[STORE_SERVER][1]
    assert checks["GPU"][0] == "skipped" and "no CUDA" in checks["GPU"][1]
    assert "everything works" in checks[""][1] and "not checked: GPU" in checks[""][1]


def test_exit_status_of_command(place):
    """The exit status is that of the process."""
    server = place.server()
    for url, status in ((server.url, 0), (f"tcp://127.0.0.1:{free_port()}", 1)):
        command = [sys.executable, "-m", "kvtier.doctor", url, "--timeout", "1", "--http", ""]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == status


# -- the address ---------------------------------------------------------------------------------


def test_unreachable_server_fails(examine, tmp_path):
    """A port without a server, a host without a name, a path without a socket, no address."""
    fails(examine(f"tcp://127.0.0.1:{free_port()}"), "server", "cannot be reached", "Connection refused", "start `kvtier server`")
    fails(examine("tcp://no-such-host.invalid:5555"), "server", "cannot be reached", "correct the address")
    fails(examine(f"ipc://{tmp_path}/none"), "server", "cannot be reached", "No such file", "start `kvtier server`")
    fails(examine("bogus://x"), "server", "give an address such as")


def test_frozen_server_fails(place, examine):
    """It accepts connections and answers nothing."""
    server = place.server()
    with server.frozen():
        result = examine(server.url)
    fails(result, "server", "does not answer" if "does not answer" in result[1]["server"][1] else "says nothing", "hangs")


def test_other_protocol_fails(place, examine):
    """The HTTP port; a port that says nothing; a ZMQ socket of something else."""
    server = place.server()
    fails(examine(server.url.replace(str(server.port), str(server.http_port))), "server", "speaks HTTP", "--port")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fails(examine(f"tcp://127.0.0.1:{silent.getsockname()[1]}"), "server", "says nothing", "request port")
    context = zmq.Context()
    other = context.socket(zmq.PUB)
    port = other.bind_to_random_port("tcp://127.0.0.1")
    try:
        fails(examine(f"tcp://127.0.0.1:{port}"), "server", "does not answer", "no kvtier server")
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("answer", ["a text", -1, 0, "error: no such operation", ...])
def test_operations_of_other_release_fail(scripted, examine, answer):
    """Numbers of operations that mean something else."""
    fails(examine(scripted(get_chunk_size=answer).url), "chunk size", "no kvtier server", doctor.PROTOCOL)


# -- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.5.6+kvtier.0.999.0", "0.6.0+kvtier.9.0.0", "0.4.2"])
def test_other_version_fails(place, examine, http, version):
    """By the HTTP API: another release of kvtier, or another one of LMCache's server."""
    server = place.server()
    fails(examine(server.url, "--http", http({"/version": version})), "version", version.rpartition("kvtier.")[2], "one release")


def test_compatible_versions_pass(place, examine, http):
    """The last number alone differs; or it is LMCache's server of the release that is spoken."""
    server, series = place.server(), kvtier.__version__.rpartition(".")[0]
    for version in (f"0.5.6+kvtier.{series}.999", doctor.PROTOCOL):
        status, checks = examine(server.url, "--http", http({"/version": version}))
        assert status == 0 and checks["version"][0] == "ok"


def test_unknown_version_is_skipped_or_fails(place, examine):
    """A skip, that is announced, where the HTTP API was not named; a failure where it was."""
    one, other = place.server(), place.server()
    status, checks = examine(one.url, "--http", "")
    assert status == 0 and checks["version"][0] == "skipped" and "not checked: version" in checks[""][1]
    fails(examine(one.url, "--http", f"http://127.0.0.1:{free_port()}"), "version", "refused", "--http URL")
    fails(examine(one.url, "--http", other.http), "version", "another server")


def test_default_address_of_http_api():
    """On the server's host, unless it is told."""
    assert doctor.Doctor("tcp://example:5555").http == doctor.Doctor("example:1").http == "http://example:8080"
    assert doctor.Doctor("ipc:///run/kvtier.sock").http == "http://127.0.0.1:8080"
    assert doctor.Doctor("tcp://[::1]:5555").http == "http://[::1]:8080"
    assert doctor.Doctor("tcp://a:1", http="https://b:2/").http == "https://b:2"
    assert doctor.Doctor("tcp://a:1", http="").http == ""


# -- shared memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["engine_shm", "lmcache_driven", "both"])
def test_separate_dev_shm_fails(place, mode):
    """As in another container: neither side can open the other's memory."""
    own = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    script = 'mount -t tmpfs none /dev/shm && exec "$@"'
    if subprocess.run([*own, "sh", "-c", script, "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare and mount are not allowed here")
    server = place.server(mode)
    server.expect_trouble("regist|cannot map the pool")
    command = [*own, "sh", "-c", script, "sh", sys.executable, "-m", "kvtier.doctor", server.url, "--http", server.http]

    def examined(*flags):
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, check=False)
        print(done.stdout, done.stderr)
        return done.returncode, told(done.stdout)

    status, checks = examined()
    wrong = {"engine_shm": {STORE_ENGINE}, "lmcache_driven": {STORE_SERVER}, "both": {STORE_ENGINE, STORE_SERVER}}[mode]
    assert status == 1 and {name for name, (verdict, _) in checks.items() if verdict == "FAILED"} == wrong
    for name in wrong:
        assert "--ipc=host" in checks[name][1] and "--remote" in checks[name][1]
    # A server on another host: messages are what is left, and where they are not there is nothing.
    status, checks = examined("--remote")
    if mode == "lmcache_driven":
        assert status == 1 and "--supported-transfer-mode auto" in checks["transfer modes"][1]
    else:
        assert status == 0 and "by pickle" in checks[STORE_ENGINE][1]


def test_disallowed_mode_is_skipped(place, examine):
    """One is enough; none is not."""
    for mode, other in (("engine_shm", STORE_SERVER), ("lmcache_driven", STORE_ENGINE)):
        server = place.server(mode)
        server.expect_trouble("regist")
        status, checks = examine(server.url, "--http", server.http)
        assert status == 0 and checks[other][0] == "skipped" and other in checks[""][1]


def test_no_allowed_mode_fails(scripted, examine):
    """Both are refused."""
    result = examine(scripted(register_kv_cache=REFUSED).url)
    fails(result, "transfer modes", "--supported-transfer-mode auto")


def test_refused_registration_fails(scripted, examine):
    """For a reason of its own, which is told."""
    fails(examine(scripted(register_kv_cache="error: too many workers").url), STORE_SERVER, "too many workers")


def test_unwritable_dev_shm_fails(place, examine, monkeypatch):
    """There is none, or no room in it."""
    server = place.server()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    status, checks = examine(server.url, "--http", server.http)
    assert status == 1 and checks["shared memory"][0] == "FAILED"
    assert "No space left" in checks["shared memory"][1] and "tmpfs" in checks["shared memory"][1]


# -- stores and retrieves ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["engine_shm", "engine_pickle", "lmcache_driven"])
def test_tenant_with_zero_quota_fails(place, examine, mode):
    """Quotas: refused for some, and for others not."""
    server = place.server(mode, eviction="IsolatedLRU", flags=["--quota-default", "0", "--quota-mode", "strict"])
    server.expect_trouble("regist|quota|refused")
    check = STORE_SERVER if mode == "lmcache_driven" else STORE_ENGINE
    fails(examine(server.url, "--http", server.http), check, "without cache_salt may have 0 bytes", "kvtier quota set")
    fails(examine(server.url, "--http", ""), check, "--quota-default")
    assert server.request("PUT", "/quota/alice", {"limit_gb": 0.01})[0] == 200
    assert examine(server.url, "--http", server.http, "--cache-salt", "alice")[0] == 0
    fails(examine(server.url, "--http", server.http, "--cache-salt", "bob"), check, "'bob' may have 0 bytes")


@pytest.mark.parametrize("mode", ["engine_shm", "engine_pickle", "lmcache_driven"])
def test_full_l1_fails(place, examine, fresh, mode):
    """Nothing may leave it, so nothing comes in."""
    server = place.server(mode, l1_gb=0.004, eviction="noop")
    server.expect_trouble("regist|room|full|refused")
    engine = place.engine(server, mode="lmcache_driven" if mode == "lmcache_driven" else "engine_driven")
    used = -1
    while used != (used := server.get("/status")[1]["storage_manager"]["l1_manager"]["memory_used_bytes"]):
        for _ in range(16):
            engine.store(fresh(), tokens(6 * CHUNK), 0, 6 * CHUNK, list(range(1, 25)))
    check = STORE_SERVER if mode == "lmcache_driven" else STORE_ENGINE
    fails(examine(server.url, "--http", server.http), check, "L1 is full", "--l1-size-gb", "noop")
    fails(examine(server.url, "--http", ""), check, "--l1-size-gb")


def test_refused_store_fails(scripted, examine):
    """Without an HTTP API that says why."""
    fails(examine(scripted(store=(b"", False)).url), STORE_SERVER, "the store failed", "refused", "--l1-size-gb", "quota")


def test_store_without_answer_fails(scripted, examine):
    """It ends by its deadline."""
    fails(examine(scripted(store=...).url), STORE_SERVER, "the store failed", "no reply")


def test_store_not_found_fails(scripted, examine):
    """The server said yes and kept nothing."""
    fails(examine(scripted(wait_prefetch_status=0).url), STORE_SERVER, "not found")


def test_lookup_without_answer_fails(scripted, examine):
    """It ends by its deadline."""
    fails(examine(scripted(wait_prefetch_status=...).url), STORE_SERVER, "the lookup failed")


def test_refused_retrieve_fails(scripted, examine):
    """Though it was found."""
    fails(examine(scripted(retrieve=(b"", False)).url), STORE_SERVER, "the retrieve failed", "log")


def test_retrieve_without_bytes_fails(scripted, examine):
    """The server said yes and copied nothing."""
    fails(examine(scripted().url), STORE_SERVER, "nothing came back", "do not use this server")


def test_retrieve_of_other_bytes_fails(place, examine, monkeypatch):
    """One bit of those that came."""
    server = place.server("engine_pickle")
    server.expect_trouble("regist")
    real = doctor.Worker.take_finished

    class Flipping:
        """A worker beside which something writes into the pages."""

        def __init__(self, client, *, storages, **rest):
            self.address, self.worker = storages[0]["address"], doctor_worker(client, storages=storages, **rest)

        def take_finished(self, patience):
            """As it is, and a bit more."""
            finished = real(self.worker, patience)
            ctypes_flip(self.address + 64)
            return finished

        def __getattr__(self, name):
            return getattr(self.worker, name)

    doctor_worker = doctor.Worker
    monkeypatch.setattr(doctor, "Worker", Flipping)
    fails(examine(server.url, "--http", server.http), STORE_ENGINE, "other bytes came back", "do not use this server")


def ctypes_flip(address):
    """Flip a bit, somewhere."""
    import ctypes

    ctypes.c_ubyte.from_address(address).value ^= 1


# -- GPUs ----------------------------------------------------------------------------------------


class FakeCuda:
    """PyTorch with a CUDA device, as far as the doctor asks."""

    bfloat16 = "torch.bfloat16"

    def __init__(self, share=None):
        self.share = share or (lambda: (0, b"\x01c" + bytes(64), 1 << 20, 0, b"/torch_1", 0, bytes(64), False))
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            get_device_name=lambda: "Test GPU",
            get_device_properties=lambda device: SimpleNamespace(uuid="GPU-1234"),
            Event=lambda interprocess: SimpleNamespace(ipc_handle=lambda: bytes(64)),
        )

    def zeros(self, *shape, dtype, device):
        """A contiguous tensor."""
        strides = [1]
        for size in shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        storage = SimpleNamespace(data_ptr=lambda: 0x7000_0000, nbytes=lambda: 1 << 20, _share_cuda_=self.share)
        return SimpleNamespace(
            shape=shape, dtype=dtype, is_cuda=True, device=SimpleNamespace(type=device), stride=lambda: strides,
            storage_offset=lambda: 0, untyped_storage=lambda: storage,
        )  # fmt: skip


@pytest.fixture
def cuda(monkeypatch):
    """Puts such a PyTorch in the real one's place."""
    return lambda **options: monkeypatch.setitem(sys.modules, "torch", FakeCuda(**options))


def test_unshareable_gpu_memory_fails(place, examine, cuda):
    """PyTorch says so."""

    def share():
        raise RuntimeError("CUDA error: invalid argument")

    cuda(share=share)
    server = place.server()
    fails(examine(server.url, "--http", server.http), "GPU", "invalid argument", "--ipc=host", "expandable_segments")


def test_gpu_memory_refused_by_server_fails(scripted, place, examine, cuda):
    """The server says so: it serves CPUs alone, or the handle is of another host."""
    cuda()
    server = place.server()
    server.expect_trouble("regist")
    fails(examine(server.url, "--http", server.http), "GPU", "the server does not take memory of Test GPU", "serves CUDA", "--ipc=host")


def test_gpu_memory_opened_by_server_passes(scripted, examine, cuda):
    """A server that takes any registration."""
    cuda()
    _, checks = examine(scripted().url)
    assert checks["GPU"] == ("ok", "the server opens memory of Test GPU")


def test_missing_torch_is_skipped(place, examine, monkeypatch):
    """Nothing to check, which is said."""
    monkeypatch.setitem(sys.modules, "torch", None)
    server = place.server()
    status, checks = examine(server.url, "--http", server.http)
    assert status == 0 and checks["GPU"] == ("skipped", "torch is not installed here")
