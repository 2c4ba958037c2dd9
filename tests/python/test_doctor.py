"""``python -m kvtier.doctor``: it fails for each kind of fault, and says what to fix."""

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
from kvrig.server import free_port, our_command
from kvrig.tiers import adapter
from kvrig.waiting import wait_until
from kvtier import doctor
from rig import tokens

NUMBERS = {name: number for number, name in OPERATIONS.items()} | {
    "unregister": 2, "unregister_engine_driven": 15, "noop": 24,
}  # fmt: skip
REFUSED = "error: this server runs with --supported-transfer-mode lmcache_driven"


class Scripted:
    """A server that answers each operation from the script; "error: ..." replaces the operation."""

    # Answers of a server that accepts everything and keeps nothing, for workers whose pages it copies.
    YES = {
        "get_chunk_size": CHUNK, "ping": True, "noop": "OK", "register_kv_cache": None, "unregister": None, "store": (b"", True),
        "lookup": None, "wait_prefetch_status": 1, "retrieve": (b"", True), "end_session": None,
        "register_kv_cache_engine_driven_context": REFUSED, "get_experimental": [],
    }  # fmt: skip

    def __init__(self, **script):
        """``script``: other answers; Ellipsis for no answer."""
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
        """Ends the server."""
        self.stopping = True
        self.thread.join()
        self.context.destroy(linger=0)


@pytest.fixture
def scripted():
    """Factory of scripted servers."""
    made = []

    def make(**script):
        made.append(Scripted(**script))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def http():
    """Factory of HTTP servers with a JSON answer per path, and a status for others."""
    made = []

    def make(paths, other=404):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                known = self.path in paths
                self.send_response(200 if known else other)
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


# For servers that do not answer; all others have time enough on a busy machine.
BRIEF = ("--timeout", "2")


@pytest.fixture
def examine(capsys):
    """Runs the doctor; returns its exit status, and {check: (verdict, text with the remedy)}."""

    def run(url, *flags):
        status = doctor.main([url, "--timeout", "30", *flags])
        output = capsys.readouterr().out
        print(output)
        return status, parse(output)

    return run


def parse(output):
    """Parses the doctor's output as :func:`examine` returns it; the last line is under ""."""
    checks = {}
    for line in output.splitlines():
        found = re.match(r"(ok|skipped|warning|FAILED) +([^:]+): (.*)", line)
        if found:
            checks[last := found[2]] = (found[1], found[3])
        elif line.startswith(" "):
            checks[last] = (checks[last][0], checks[last][1] + line)
        else:
            checks[""] = ("", line)
    return checks


def fails(result, check, *words):
    """Asserts that only this check has failed, with these words, and the whole run."""
    status, checks = result
    assert status == 1
    assert [name for name, (verdict, _) in checks.items() if verdict == "FAILED"] == [check]
    assert "FAILED" in checks[""][1] and "works" not in checks[""][1]
    for word in words:
        assert word in checks[check][1], word


STORE_ENGINE, STORE_SERVER = "store and retrieve, engine_driven", "store and retrieve, lmcache_driven"


# proves: docs/compare.md#command-line
def test_working_setup_passes(place, examine):
    """Against a server with both modes all checks run except GPUs, and the last line says so."""
    server = place.server()
    status, checks = examine(server.url, "--http", server.http)
    assert status == 0
    assert {verdict for name, (verdict, _) in checks.items() if name not in ("", "GPU")} == {"ok"}
    assert "by pool" in checks[STORE_ENGINE][1] and "by server" in checks[STORE_SERVER][1]
    assert checks["GPU"][0] == "skipped" and "no CUDA" in checks["GPU"][1]
    assert "everything works" in checks[""][1] and "not checked: GPU" in checks[""][1]


def test_exit_status_of_command(place):
    """The process has the exit status."""
    server = place.server()
    for url, status, timeout in ((server.url, 0, "30"), (f"tcp://127.0.0.1:{free_port()}", 1, "1")):
        command = [sys.executable, "-m", "kvtier.doctor", url, "--timeout", timeout, "--http", ""]
        assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == status


# -- the address ---------------------------------------------------------------------------------


def test_unreachable_server_fails(examine, tmp_path):
    """A port without a server, a host without a name, a path without a socket, no address."""
    fails(examine(f"tcp://127.0.0.1:{free_port()}", *BRIEF), "server", "cannot be reached", "Connection refused", "start `kvtier server`")
    fails(examine("tcp://no-such-host.invalid:5555", *BRIEF), "server", "cannot be reached", "correct the address")
    fails(examine(f"ipc://{tmp_path}/none", *BRIEF), "server", "cannot be reached", "No such file", "start `kvtier server`")
    fails(examine("bogus://x"), "server", "use an address such as")


def test_frozen_server_fails(place, examine):
    """The server accepts connections and answers nothing."""
    server = place.server()
    with server.frozen():
        result = examine(server.url, *BRIEF)
    fails(result, "server", "does not answer" if "does not answer" in result[1]["server"][1] else "sends nothing", "hangs")


def test_other_protocol_fails(place, examine):
    """The HTTP port, a silent port, and another program's ZMQ socket."""
    server = place.server()
    fails(examine(server.url.replace(str(server.port), str(server.http_port)), *BRIEF), "server", "speaks HTTP", "--port")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fails(examine(f"tcp://127.0.0.1:{silent.getsockname()[1]}", *BRIEF), "server", "sends nothing", "request port")
    context = zmq.Context()
    other = context.socket(zmq.PUB)
    port = other.bind_to_random_port("tcp://127.0.0.1")
    try:
        fails(examine(f"tcp://127.0.0.1:{port}", *BRIEF), "server", "does not answer", "no kvtier server")
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("answer", ["a text", -1, 0, "error: no such operation", ...])
def test_operations_of_other_release_fail(scripted, examine, answer):
    """Operations with other meanings of their numbers."""
    fails(examine(scripted(get_chunk_size=answer).url), "chunk size", "no kvtier server", doctor.PROTOCOL)


@pytest.mark.parametrize("answer", ["error: no such operation", "a text"])
def test_server_without_features_passes(scripted, examine, answer):
    """The connector works with it in its own chunk size."""
    _, checks = examine(scripted(get_experimental=answer).url)
    assert checks["chunk size"] == ("ok", f"{CHUNK} tokens; vLLM's --block-size must divide it")


# -- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.5.6+kvtier.0.999.0", "0.6.0+kvtier.9.0.0", "0.4.2"])
def test_other_version_fails(place, examine, http, version):
    """By the HTTP API: another release of kvtier, or another one of LMCache's server."""
    server = place.server()
    fails(examine(server.url, "--http", http({"/version": version})), "version", version.rpartition("kvtier.")[2], "one release")


def test_compatible_versions_pass(place, examine, http):
    """Releases that differ only in the last number, and LMCache's server of the protocol's release."""
    server, series = place.server(), kvtier.__version__.rpartition(".")[0]
    for version in (f"0.5.6+kvtier.{series}.999", doctor.PROTOCOL):
        status, checks = examine(server.url, "--http", http({"/version": version}))
        assert status == 0 and checks["version"][0] == "ok"


def test_unknown_version_is_skipped_or_fails(place, examine):
    """Skipped and announced without --http; a failure with it."""
    one, other = place.server(), place.server()
    status, checks = examine(one.url, "--http", "")
    assert status == 0 and checks["version"][0] == "skipped" and "not checked: version" in checks[""][1]
    fails(examine(one.url, "--http", f"http://127.0.0.1:{free_port()}"), "version", "refused", "--http URL")
    fails(examine(one.url, "--http", other.http), "version", "another server")


def test_token_that_is_missing_or_refused_is_named(place, examine, http, monkeypatch):
    """No failed installation."""
    server, guarded = place.server(), http({}, 401)
    for flags, verdict, words in (({}, "skipped", "needs a token; set KVTIER_TOKEN"), ({"KVTIER_TOKEN": "x"}, "warning", "refuses the token")):
        for name, value in flags.items():
            monkeypatch.setenv(name, value)
        status, checks = examine(server.url, "--http", guarded)
        assert (status, checks["version"][0]) == (0, verdict)
        assert words in checks["version"][1]


def test_default_address_of_http_api():
    """On the server's host, unless --http has another one."""
    assert doctor.Doctor("tcp://example:5555").http == doctor.Doctor("example:1").http == "http://example:8080"
    assert doctor.Doctor("ipc:///run/kvtier.sock").http == "http://127.0.0.1:8080"
    assert doctor.Doctor("tcp://[::1]:5555").http == "http://[::1]:8080"
    assert doctor.Doctor("tcp://a:1", http="https://b:2/").http == "https://b:2"
    assert doctor.Doctor("tcp://a:1", http="").http == ""


# -- second tiers --------------------------------------------------------------------------------


def test_failed_second_tier_is_a_warning(place, examine, tmp_path):
    """The server works without it; tiers that work are named."""
    disk, away = tmp_path / "disk", free_port()
    flags = adapter("fs", name="disk", base_path=disk)
    one, two = place.server(flags=flags), place.server(flags=[*flags, *adapter("resp", name="away", host="127.0.0.1", port=away)])
    two.expect_trouble("away")
    assert "second tiers" not in examine(one.url, "--http", "")[1]
    status, checks = examine(one.url, "--http", one.http)
    assert status == 0 and checks["second tiers"] == ("ok", "disk")
    wait_until(lambda: "1 of 2 second tiers failed" in subprocess.run(
        [our_command()[0], "status", two.http], capture_output=True, text=True, check=False).stdout, 30, "the failure")  # fmt: skip
    status, checks = examine(two.url, "--http", two.http)
    verdict, text = checks["second tiers"]
    assert status == 0 and verdict == "warning" and text.startswith("1 of 2 failed: away (") and "computed again" in text
    assert "works, with warnings: second tiers" in checks[""][1]


# -- clients -------------------------------------------------------------------------------------


# proves: docs/clients.md#releases-that-are-not-served
def test_clients_that_are_not_served_are_a_warning(place, examine):
    """As ``kvtier status`` has it: the release, and what to install."""
    server = place.server()
    server.expect_trouble("LMCache 0.3.10")
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(server.url)
        client.send_multipart([b"\0", b"\7"])
        assert client.poll(30_000) and client.recv_multipart() == [b"\0", b"\7"]
    status, checks = examine(server.url, "--http", server.http)
    verdict, text = checks["clients"]
    assert status == 0 and verdict == "warning" and "install lmcache 0.4.2 to" in text
    shown = subprocess.run([our_command()[0], "status", server.http], capture_output=True, text=True, check=False).stdout
    assert f"warning   {text}" in shown


# -- shared memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["engine_shm", "lmcache_driven", "both"])
def test_separate_dev_shm_fails(place, mode):
    """As with another container: neither side can open the other's memory."""
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
        return done.returncode, parse(done.stdout)

    status, checks = examined()
    wrong = {"engine_shm": {STORE_ENGINE}, "lmcache_driven": {STORE_SERVER}, "both": {STORE_ENGINE, STORE_SERVER}}[mode]
    assert status == 1 and {name for name, (verdict, _) in checks.items() if verdict == "FAILED"} == wrong
    for name in wrong:
        assert "--ipc=host" in checks[name][1] and "--remote" in checks[name][1]
    # With a server on another host only messages work, and without them nothing does.
    status, checks = examined("--remote")
    if mode == "lmcache_driven":
        assert status == 1 and "--supported-transfer-mode auto" in checks["transfer modes"][1]
    else:
        assert status == 0 and "by pickle" in checks[STORE_ENGINE][1]


def test_disallowed_mode_is_skipped(place, examine):
    """One allowed mode is enough."""
    for mode, other in (("engine_shm", STORE_SERVER), ("lmcache_driven", STORE_ENGINE)):
        server = place.server(mode)
        server.expect_trouble("regist")
        status, checks = examine(server.url, "--http", server.http)
        assert status == 0 and checks[other][0] == "skipped" and other in checks[""][1]


def test_no_allowed_mode_fails(scripted, examine):
    """Both are refused."""
    result = examine(scripted(register_kv_cache=REFUSED).url)
    fails(result, "transfer modes", "--supported-transfer-mode auto")


# proves: docs/compare.md#command-line
def test_refused_registration_fails(scripted, examine):
    """The failure has the server's cause."""
    fails(examine(scripted(register_kv_cache="error: too many workers").url), STORE_SERVER, "too many workers")


def test_unwritable_dev_shm_fails(place, examine, monkeypatch):
    """It is missing or full."""
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
    """Only tenants without a quota are refused."""
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
    """Nothing can be evicted, so nothing can be stored."""
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
    """Without an HTTP API for the cause."""
    fails(examine(scripted(store=(b"", False)).url), STORE_SERVER, "the store failed", "refused", "--l1-size-gb", "quota")


def test_store_without_answer_fails(scripted, examine):
    """It ends by its deadline."""
    fails(examine(scripted(store=...).url, *BRIEF), STORE_SERVER, "the store failed", "no reply")


def test_store_not_found_fails(scripted, examine):
    """The server accepted the store and kept nothing."""
    fails(examine(scripted(wait_prefetch_status=0).url), STORE_SERVER, "not found")


def test_lookup_without_answer_fails(scripted, examine):
    """It ends by its deadline."""
    fails(examine(scripted(wait_prefetch_status=...).url, *BRIEF), STORE_SERVER, "the lookup failed")


def test_refused_retrieve_fails(scripted, examine):
    """After a successful lookup."""
    fails(examine(scripted(retrieve=(b"", False)).url), STORE_SERVER, "the retrieve failed", "log")


def test_retrieve_without_bytes_fails(scripted, examine):
    """The server answered true and copied nothing."""
    fails(examine(scripted().url), STORE_SERVER, "returned no bytes", "do not use this server")


def test_retrieve_of_other_bytes_fails(place, examine, monkeypatch):
    """With one flipped bit."""
    server = place.server("engine_pickle")
    server.expect_trouble("regist")
    real = doctor.Worker.take_finished

    class Flipping:
        """A worker whose pages something else writes."""

        def __init__(self, client, *, storages, **rest):
            self.address, self.worker = storages[0]["address"], doctor_worker(client, storages=storages, **rest)

        def take_finished(self, patience):
            """Returns the results after flipping a bit."""
            finished = real(self.worker, patience)
            ctypes_flip(self.address + 64)
            return finished

        def __getattr__(self, name):
            return getattr(self.worker, name)

    doctor_worker = doctor.Worker
    monkeypatch.setattr(doctor, "Worker", Flipping)
    fails(examine(server.url, "--http", server.http), STORE_ENGINE, "returned other bytes", "do not use this server")


def ctypes_flip(address):
    """Flips a bit at this address."""
    import ctypes

    ctypes.c_ubyte.from_address(address).value ^= 1


# -- GPUs ----------------------------------------------------------------------------------------


class FakeCuda:
    """The used part of PyTorch with a CUDA device."""

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
        """Returns a contiguous tensor."""
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
    """Replaces PyTorch by such a fake."""
    return lambda **options: monkeypatch.setitem(sys.modules, "torch", FakeCuda(**options))


def test_unshareable_gpu_memory_fails(place, examine, cuda):
    """PyTorch raises."""

    def share():
        raise RuntimeError("CUDA error: invalid argument")

    cuda(share=share)
    server = place.server()
    fails(examine(server.url, "--http", server.http), "GPU", "invalid argument", "--ipc=host", "expandable_segments")


def test_gpu_memory_refused_by_server_fails(scripted, place, examine, cuda):
    """The server refuses: it serves only CPUs, or the handle is of another host."""
    cuda()
    server = place.server()
    server.expect_trouble("regist")
    fails(examine(server.url, "--http", server.http), "GPU", "the server refused memory of Test GPU", "support CUDA", "--ipc=host")


def test_gpu_memory_opened_by_server_passes(scripted, examine, cuda):
    """With a server that accepts any registration."""
    cuda()
    _, checks = examine(scripted().url)
    assert checks["GPU"] == ("ok", "the server opens memory of Test GPU")


def test_missing_torch_is_skipped(place, examine, monkeypatch):
    """The check is reported as skipped."""
    monkeypatch.setitem(sys.modules, "torch", None)
    server = place.server()
    status, checks = examine(server.url, "--http", server.http)
    assert status == 0 and checks["GPU"] == ("skipped", "torch is not installed here")
