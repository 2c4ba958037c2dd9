"""The server as a process: flags, ports, signals, what it leaves behind."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from kvrig.engine import tokens
from kvrig.server import ANSI, free_port

pytestmark = pytest.mark.ours("raw tracebacks, and wrong values that are accepted")

# flags to add, and what the message must name
WRONG = [
    (["--chunk-size", "0"], "--chunk-size"),
    (["--chunk-size", "many"], "--chunk-size"),
    (["--eviction-trigger-watermark", "5"], "--eviction-trigger-watermark"),
    (["--eviction-ratio", "-1"], "--eviction-ratio"),
    (["--eviction-policy", "FIFO"], "--eviction-policy"),
    (["--hash-algorithm", "nope"], "--hash-algorithm"),
    (["--hash-algorithm", "builtin"], "--hash-algorithm"),
    (["--l1-size-gb", "-1"], "--l1-size-gb"),
    (["--l1-size-gb", "nan"], "--l1-size-gb"),
    (["--l1-align-bytes", "3"], "--l1-align-bytes"),
    (["--port", "99999"], "--port"),
    (["--supported-transfer-mode", "magic"], "--supported-transfer-mode"),
    (["--worker-reap-timeout-seconds", "5"], "--worker-reap-timeout-seconds"),
    (["--no-such-flag"], "--no-such-flag"),
    (["stray"], "stray"),
]


def run(command, flags, ports=None):
    """Start the server with these flags; it must end by itself. (exit status, lines of stderr)"""
    port, http = ports or (free_port(), free_port())
    defaults = {
        "--host": "127.0.0.1", "--port": str(port), "--http-host": "127.0.0.1", "--http-port": str(http),
        "--prometheus-port": str(free_port()), "--l1-size-gb": "0.01", "--eviction-policy": "LRU",
    }  # fmt: skip
    argv = list(command)
    for flag, value in defaults.items():
        if flag not in flags:
            argv += [flag, value]
    done = subprocess.run(argv + flags, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, [line for line in ANSI.sub("", done.stderr).splitlines() if line.strip()]


@pytest.mark.parametrize("flags, named", WRONG, ids=[" ".join(flags) for flags, _ in WRONG])
def test_wrong_flag_is_refused_in_one_line(command, flags, named):
    """Exit status not 0, one line on stderr, which names the flag."""
    status, lines = run(command, flags)
    assert status not in (0, 101), lines  # 101 is a Rust panic
    assert len(lines) == 1, lines
    assert named in lines[0]


def test_port_in_use(command):
    """The message names the address, for both ports."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        for ports in ((busy, free_port()), (free_port(), busy)):
            status, lines = run(command, [], ports)
            assert status not in (0, 101), lines
            assert str(busy) in lines[-1], lines


# proves: docs/operate.md#restart-and-upgrade
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_shm", "engine_pickle"])
def test_signal_ends_it_cleanly(serve, engines, mode, end):
    """With an engine registered, data cached and a lookup pinned: exit 0 within seconds, nothing in /dev/shm."""
    server = serve(mode)
    engine = engines(server, mq_timeout=5)
    prompt = tokens(32)
    engine.store_prompt(prompt)
    assert engine.lookup(prompt)[1] == 32
    files = server.shm_files()
    assert bool(files) == (mode == "engine_shm"), files
    process, server.process = server.process, None
    process.send_signal(end)
    # Below the limit of a stop, at which it ends anyway.
    assert process.wait(18) == 0, server.tail()
    assert not [path for path in files if os.path.exists(path)]


# proves: docs/operate.md#restart-and-upgrade
def test_shm_pool_is_private_and_replaced(serve, engines):
    """The pool is readable by its owner only, and one left by a killed server does not stop the next."""
    server = serve("engine_shm")
    [pool] = server.shm_files()
    assert Path(pool).stat().st_mode & 0o777 == 0o600
    server.kill()
    assert os.path.exists(pool), "SIGKILL leaves no chance to clean up; else this test proves nothing"
    server.start()
    engine = engines(server)
    engine.store_prompt(tokens(32))


@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_shm", "engine_pickle", "cuda", "tiers"])
def test_without_work_it_sleeps(serve, engines, tmp_path, mode):
    """Behind stores, lookups and retrieves it uses next to no processor, with its engine still connected."""
    tiers = []
    if mode == "tiers":
        mode, mock = "engine_shm", {"type": "mock", "max_size_gb": 2, "mock_bandwidth_gb": 1}
        for tier in ({"type": "fs", "base_path": str(tmp_path / "tier")}, mock):
            tiers += ["--l2-adapter", json.dumps(tier)]
    server = serve(mode, flags=tiers)
    engine = engines(server)
    prompt = tokens(32)
    engine.store_prompt(prompt)
    assert engine.lookup(prompt)[1] == 32
    assert engine.lookup(tokens(32))[1] == 0

    def busy():
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def sleeps():
        began = busy()
        time.sleep(3)
        # A thread that never sleeps uses a second each second, or half of one beside other work.
        return busy() - began < 0.5

    # L1 may still be pre-faulted at first.
    assert any(sleeps() for _ in range(3))
