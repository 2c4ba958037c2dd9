#!/usr/bin/env python3
"""Effect of hostile bytes on the request port: latency of another client, and the server's private memory.

    benches/hostile_frames.py [--rounds 3] [--frames 1000000] [--connections 1000] [--kinds KIND,...] [--out benches/runs/DATE]

A client (`kvtier bench --scenario ping,lookup-hit`) runs in each round once per row of this table, all against one server on
loopback. KVTIER_BIN or target/dist/kvtier.

| beside | what runs at the same time |
| --- | --- |
| quiet | nothing |
| elsewhere | `flood`, against a process that only reads: what the flood itself takes from the machine |
| flood | a thread per kind of `KINDS` sends as fast as the server reads, while the client runs and until --frames were sent |
| slow | --connections connections that send a byte per second: one half of a handshake, the other of a frame of 1 MiB |
| flood, idle | `flood`, whose process gets only what server and client leave of the processors (SCHED_IDLE) |
| slow, idle | `slow`, likewise |

The attackers read no replies. Each runs in a process of its own; where there are few cores, it shares them with the server. An attacker
on another machine does not: the idle rows are what the attack costs through the server alone.
Memory is RssAnon: before, the most during, and a second after the attack.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import re
import resource
import selectors
import socket
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KVTIER = os.environ.get("KVTIER_BIN") or str(ROOT / "target/dist/kvtier")
MIB = 1 << 20
BESIDE = ["quiet", "elsewhere", "flood", "slow", "flood, idle", "slow, idle"]
PERCENTILES = {"p50": "p50", "p99": "p99", "p999": "p99.9"}

SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
GREETING = (SIGNATURE + b"\x03\x01NULL").ljust(64, b"\0")
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
HANDSHAKE = GREETING + READY
PING = b"\x04\x07\x04PING\0\0"
# Frames per buffer of a stream.
BATCH = 10_000
# Frames that count as much work for the sender as one connection.
FRAMES_PER_CONNECTION = 100


def long_frame(flags, length):
    """Returns the head of a frame with a length of 8 bytes."""
    return bytes([flags | 2]) + struct.pack(">Q", length)


# Streams: sent after the handshake, again and again. (a buffer, its frames)
STREAMS = {
    "endless MORE frames": (b"\x01\x01x" * BATCH, BATCH),
    "messages of one frame": (b"\x00\x01x" * BATCH, BATCH),
    "commands inside messages": ((b"\x01\x01x" + b"\x04\x04\x03FOO" + PING) * (BATCH // 3), BATCH // 3 * 3),
    "repeated READY": (READY * BATCH, BATCH),
    "unknown operations": ((b"\x01\x01\x00" + b"\x01\x03\xcd\xff\xff" + b"\x00\x01\xc0") * (BATCH // 3), BATCH // 3 * 3),
}
_random = random.Random(1)
# Sent once per connection, in turn; all but the last end it.
ONCE = {
    "random bytes": [_random.randbytes(4096) for _ in range(16)],
    "bad greetings": [
        SIGNATURE + b"\x01\x05\0\0", b"\x01\x00\x01\x15", b"GET / HTTP/1.1\r\n\r\n",
        (SIGNATURE + b"\x03\x01CURVE").ljust(64, b"\0"),
        GREETING + b"\x04\x10\x05READY\xffSocket-Ty", GREETING + READY.replace(b"DEALER", b"PUBPUB"), GREETING + b"\x00\x01x",
    ],
    "bad flags": [HANDSHAKE + bytes([flags]) + b"\x01x" for flags in (5, 7, 8, 0x80, 0xFF)],
    "random bytes after the handshake": [HANDSHAKE + _random.randbytes(4096) for _ in range(16)],
    "huge lengths": [
        HANDSHAKE + long_frame(0, (1 << 63) - 1), HANDSHAKE + long_frame(4, 1 << 40), HANDSHAKE + long_frame(1, (1 << 64) - 1),
        HANDSHAKE + long_frame(0, 1 << 27) + bytes(4096),
    ],
}  # fmt: skip
KINDS = [*STREAMS, *ONCE]


def anonymous(pid):
    """Returns the bytes of private memory of a process."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) << 10


def discard(read_bytes, ready):
    """Reads what connections send, and discards it."""
    selector = selectors.DefaultSelector()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        selector.register(listener, selectors.EVENT_READ)
        ready.put(listener.getsockname()[1])
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                    continue
                with contextlib.suppress(OSError):
                    if key.fileobj.recv(read_bytes):
                        continue
                selector.unregister(key.fileobj)
                key.fileobj.close()


def connect(port):
    """Opens a connection whose sends fail after a second in which nothing was taken."""
    return socket.create_connection(("127.0.0.1", port), 1)


def stream(port, kind, wanted, stop, counts):
    """Sends a stream until `stop` is set and `wanted` frames were sent."""
    buffer, frames = STREAMS[kind]
    while not stop.is_set() or counts[kind, "frames"] < wanted:
        with contextlib.suppress(OSError), connect(port) as peer:
            counts[kind, "connections"] += 1
            peer.sendall(HANDSHAKE)
            while not stop.is_set() or counts[kind, "frames"] < wanted:
                peer.sendall(buffer)
                counts[kind, "frames"] += frames


def once(port, kind, wanted, stop, counts):
    """Opens connections that send one thing each, and waits for the end of each."""
    while not stop.is_set() or counts[kind, "frames"] < wanted:
        payload = ONCE[kind][counts[kind, "connections"] % len(ONCE[kind])]
        with contextlib.suppress(OSError), connect(port) as peer:
            counts[kind, "connections"] += 1
            peer.sendall(payload)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):
                pass
        counts[kind, "frames"] += FRAMES_PER_CONNECTION


def flood(port, args, started, stop, results):
    """Runs a thread per kind."""
    counts, wanted = Counter(), -(-args.frames // len(args.kinds))
    threads = [
        threading.Thread(target=stream if kind in STREAMS else once, args=(port, kind, wanted, stop, counts))
        for kind in args.kinds
    ]
    for thread in threads:
        thread.start()
    started.set()
    for thread in threads:
        thread.join()
    sent = {kind: {"connections": counts[kind, "connections"]} for kind in args.kinds}
    for kind in sent.keys() & STREAMS:
        sent[kind]["frames"] = counts[kind, "frames"]
    results.put(sent)


def slow(port, args, started, stop, results):
    """Sends a byte per second on each connection; those that the server ends are replaced."""
    handshake, frame, connections = HANDSHAKE, HANDSHAKE + long_frame(0, MIB), args.connections
    peers, counts = [None] * connections, Counter()

    def send(number):
        if peers[number] is None:
            peer = connect(port)
            peer.setblocking(False)
            is_frame = number % 2
            if is_frame:
                peer.send(frame)
            peers[number] = (peer, iter(b"" if is_frame else handshake))
            counts["connections"] += 1
        peer, left = peers[number]
        try:
            peer.send(bytes([next(left, 0)]))
            counts["bytes"] += 1
        except OSError:
            peer.close()
            peers[number] = None
            counts["ended by the server"] += 1

    for number in range(connections):
        send(number)
    started.set()
    began, sent = time.monotonic(), 0
    while not stop.wait(0.01):
        due = int((time.monotonic() - began) * connections)
        for sent in range(sent, due):  # noqa: B020
            with contextlib.suppress(OSError):
                send(sent % connections)
        sent = due
    results.put({"slow": dict(counts)})


def attacker(is_idle, attack, *args):
    """Runs an attack in this process."""
    if is_idle:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    attack(*args)


class Server:
    """The server under attack."""

    def __init__(self, log):
        flags = ["--port", "0", "--http-port", "0", "--shm-name", f"kvtier_bench_{os.getpid()}"]
        flags += ["--l1-size-gb", "0.5", "--no-l1-prefault"]
        self.log = log
        with open(log, "wb") as out:
            self.process = subprocess.Popen([KVTIER, "server", "--state-dir", "none", *flags], stderr=out)
        while not (found := re.search(r"tcp://127.0.0.1:(\d+)", log.read_text())):
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended:\n{log.read_text()}")
            time.sleep(0.01)
        self.port = int(found[1])

    def stop(self):
        """Ends it; returns its exit status."""
        self.process.terminate()
        return self.process.wait(30)


def client(port, duration):
    """Runs the client; returns its report."""
    command = [KVTIER, "bench", f"127.0.0.1:{port}", "--scenario", "ping,lookup-hit", "--duration", duration, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout) if done.stdout.startswith("{") else {"rows": []}
    return {"exit": done.returncode, "stderr": done.stderr.splitlines(), **report}


def measure(server, beside, args):
    """Runs the client beside an attack; returns its report, the attack's counts and the server's memory."""
    run = {"beside": beside, "load_1m": os.getloadavg()[0], "before": anonymous(server.process.pid), "attack": None}
    started, stop, results = multiprocessing.Event(), multiprocessing.Event(), multiprocessing.SimpleQueue()
    port, processes, peak, done = server.port, [], [run["before"]], threading.Event()

    def start(*job):
        processes.append(multiprocessing.Process(target=job[0], args=job[1:]))
        processes[-1].start()

    def sample():
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous(server.process.pid))

    if beside == "elsewhere":
        ready = multiprocessing.SimpleQueue()
        start(discard, MIB, ready)
        port = ready.get()
    sampler = threading.Thread(target=sample)
    sampler.start()
    if beside != "quiet":
        attack, _, idle = beside.partition(", ")
        start(attacker, bool(idle), slow if attack == "slow" else flood, port, args, started, stop, results)
        started.wait()
    began = time.monotonic()
    run["client"] = client(server.port, args.duration)
    if beside != "quiet":
        stop.set()
        run["attack"] = results.get()
        run["attack_seconds"] = time.monotonic() - began
        processes[-1].join()
    done.set()
    sampler.join()
    if beside == "elsewhere":
        processes[0].terminate()
        processes[0].join()
    time.sleep(1)
    run |= {"peak": peak[0], "after": anonymous(server.process.pid)}
    print(f"{beside}: {total(run)}, exit {run['client']['exit']}", *run["client"]["stderr"], flush=True)
    return run


def total(run):
    """Returns what an attack sent, in words."""
    if not run["attack"]:
        return "no attack"
    summed = Counter()
    for counts in run["attack"].values():
        summed.update(counts)
    return ", ".join(f"{value} {what}" for what, value in summed.items()) + f" in {run['attack_seconds']:.1f} s"


def latency(run, row, percentile):
    """Returns a latency in microseconds; None if the client failed before."""
    found = [each["latency_us"][percentile] for each in run["client"]["rows"] if each["name"] == row]
    return found[0] if found else None


def summarize(rounds):
    """Returns the medians over rounds of latencies and of their ratios to the quiet run of the round."""
    rows = []
    for row in ("ping", "lookup hit"):
        for percentile, shown in PERCENTILES.items():
            figures = {"request": row, "percentile": shown}
            for beside in BESIDE:
                pairs = [(latency(runs[beside], row, percentile), latency(runs["quiet"], row, percentile)) for runs in rounds]
                pairs = [pair for pair in pairs if None not in pair]
                if pairs:
                    figures[beside] = statistics.median(ours for ours, _ in pairs)
                    figures[f"{beside}_ratio"] = statistics.median(ours / quiet for ours, quiet in pairs)
            rows.append(figures)
    return rows


def show(rows, rounds):
    """Prints the tables."""
    print(f"\n{'us, ratio to quiet':22}" + "".join(f"{beside:>20}" for beside in BESIDE))
    for row in rows:
        cells = [f"{row[beside]:.0f} ({row[beside + '_ratio']:.2f})" if beside in row else "failed" for beside in BESIDE]
        print(f"{row['request']:12}{row['percentile']:10}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"\n{'private memory, MiB':22}" + "".join(f"{beside:>20}" for beside in BESIDE))
    for when in ("before", "peak", "after"):
        cells = [statistics.median(runs[beside][when] for runs in rounds) / MIB for beside in BESIDE]
        print(f"{when:22}" + "".join(f"{cell:20.1f}" for cell in cells))


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", default="3s", help="of each of the client's two scenarios")
    parser.add_argument("--frames", type=int, default=1_000_000, help="least frames of a flood; a connection counts as 100")
    parser.add_argument("--connections", type=int, default=1000, help="slow connections")
    parser.add_argument("--kinds", type=lambda kinds: kinds.split(","), default=KINDS, help="of a flood; default: all of them")
    parser.add_argument("--out", type=Path, help="write hostile-frames.json into this directory")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(unknown)}; allowed: {', '.join(KINDS)}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    multiprocessing.set_start_method("fork")
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory) / "server.log")
        try:
            # Memory that the first requests take for good is in no row.
            client(server.port, "200ms")
            rounds = []
            for number in range(args.rounds):
                # Another order in each round, so that none is always behind the same attack.
                turn = number % len(BESIDE)
                runs = {beside: measure(server, beside, args) for beside in BESIDE[turn:] + BESIDE[:turn]}
                rounds.append(runs)
        finally:
            status = server.stop()
        log = [line for line in server.log.read_text().splitlines() if re.search("WARN|ERROR|panicked", line)]
    rows = summarize(rounds)
    show(rows, rounds)
    print(f"\nserver: exit {status}, {len(log)} warnings", *log[:5], sep="\n")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        report = {
            "machine": platform.platform(), "cpus": os.cpu_count(), "kvtier": Path(KVTIER).name,
            "arguments": vars(args) | {"out": str(args.out)},
            "medians": rows, "rounds": rounds, "server_exit": status, "server_warnings": log,
        }  # fmt: skip
        (args.out / "hostile-frames.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
