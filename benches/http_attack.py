#!/usr/bin/env python3
"""Effect of large bodies and idle connections on the HTTP port on the server's memory and on health probes.

    benches/http_attack.py [--hold 30] [--json FILE]      # KVTIER_BIN or target/dist/kvtier

Each attack runs from a process of its own against a server of its own on loopback. Memory is RssAnon above what it was when idle; a probe is one
`GET /healthcheck` on a connection of its own, one after the other as long as the attack lasts.

| attack | what is sent |
| --- | --- |
| none | nothing, for 5 s: what the machine does meanwhile |
| checksums | 40 bodies of 8 MiB of block ids to /cache/checksums at once |
| clear | 40 bodies of 8 MiB of one list to /cache/clear at once |
| mixed | 20 of each |
| held | 60 bodies of 32 MiB for PUT /quota, each without its last byte, for --hold seconds |
| idle | 300 connections that send nothing |
| slow | 256 requests whose body does not come |
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import socket
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20


def head(method, path, length):
    """Returns a request without its body."""
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n".encode()


def padded(prefix, item, suffix, size):
    """Returns a body of about this size."""
    return prefix + item * ((size - len(prefix) - len(suffix)) // len(item)) + suffix


def exchange(port, parts, timeout=60):
    """Returns the status of the answer; 0 if the server closed the connection."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout) as stream:
        with contextlib.suppress(OSError):
            for part in parts:
                stream.sendall(part)
        answer = stream.recv(64)
        if answer:
            return int(answer.split(b" ")[1])
    return 0


class Server:
    """A server under attack."""

    def __init__(self):
        binary = os.environ.get("KVTIER_BIN", str(ROOT / "target/dist/kvtier"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        flags = ["--l1-size-gb", "0.05", "--no-l1-prefault", "--shm-name", "", "--port", "0", "--http-port", str(self.port), "--log-level", "warn"]
        self.process = subprocess.Popen([binary, "server", "--state-dir", "none", *flags])
        while self.probe() is None:
            time.sleep(0.05)
        time.sleep(0.5)
        self.idle = self.anonymous()

    def probe(self):
        """Returns the seconds until a health probe is answered; None if it is refused."""
        began = time.monotonic()
        status = exchange(self.port, [head("GET", "/healthcheck", 0)])
        return time.monotonic() - began if status == 200 else None

    def anonymous(self):
        """Returns the bytes of private memory."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no RssAnon")

    def stop(self):
        self.process.terminate()
        self.process.wait()


def watch(name, attack):
    """Runs an attack; returns its figures."""
    server = Server()
    done = threading.Event()
    peak, probes, refused = [server.idle], [], [0]

    def sample():
        while not done.is_set():
            peak[0] = max(peak[0], server.anonymous())
            time.sleep(0.002)

    def ask():
        while not done.is_set():
            took = server.probe()
            if took is None:
                refused[0] += 1
            else:
                probes.append(took)
            time.sleep(0.005)

    answers = multiprocessing.SimpleQueue()
    attacker = multiprocessing.Process(target=lambda: answers.put(attack(server.port)))
    watchers = [threading.Thread(target=work) for work in (sample, ask)]
    for thread in watchers:
        thread.start()
    attacker.start()
    answers = answers.get()
    attacker.join()
    done.set()
    for thread in watchers:
        thread.join()
    alive = server.probe() is not None
    server.stop()
    probes.sort()
    figures = {
        "attack": name,
        "answers": {str(status): count for status, count in sorted(answers.items(), key=str)},
        "peak_above_idle_mib": round((peak[0] - server.idle) / MIB, 1),
        "probes": len(probes),
        "probes_refused": refused[0],
        "probe_p50_ms": round(probes[len(probes) // 2] * 1e3, 2),
        "probe_p99_ms": round(probes[len(probes) * 99 // 100] * 1e3, 2),
        "probe_max_ms": round(probes[-1] * 1e3, 2),
        "alive": alive,
    }
    print(json.dumps(figures), flush=True)
    return figures


def at_once(requests):
    """Runs all of them on threads that begin together."""

    def attack(port):
        answers, start = Counter(), threading.Barrier(len(requests))

        def send(parts):
            start.wait()
            answers[exchange(port, parts)] += 1

        threads = [threading.Thread(target=send, args=(parts,)) for parts in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    return attack


def holding(parts, count, seconds):
    """Opens connections that send these bytes and then nothing."""

    def attack(port):
        answers, streams = Counter(), []
        for _ in range(count):
            stream = socket.create_connection(("127.0.0.1", port), 60)
            streams.append(stream)
            with contextlib.suppress(OSError):
                for part in parts:
                    stream.sendall(part)
        time.sleep(seconds)
        for stream in streams:
            stream.setblocking(False)
            try:
                answer = stream.recv(64)
                answers[int(answer.split(b" ")[1]) if answer else 0] += 1
            except BlockingIOError:
                answers["waiting"] += 1
            except OSError:
                answers[0] += 1
            stream.close()
        return answers

    return attack


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--hold", type=float, default=30, help="seconds that bodies and connections are held")
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file too")
    args = parser.parse_args()
    ids = padded(b'{"instance_id": 1, "chunk_size": 1, "block_ids": [', b"1,", b"1]}", 8 * MIB)
    objects = padded(b'{"x": [', b"{},", b"1]}", 8 * MIB)
    checksums = [head("POST", "/cache/checksums", len(ids)), ids]
    clear = [head("POST", "/cache/clear", len(objects)), objects]
    quota = padded(b'{"users": {', b" ", b"}}", 32 * MIB)
    held = [head("PUT", "/quota", len(quota)), quota[:-1]]
    attacks = {
        "none": holding([], 0, 5),
        "checksums": at_once([checksums] * 40),
        "clear": at_once([clear] * 40),
        "mixed": at_once([checksums, clear] * 20),
        "held": holding(held, 60, args.hold),
        "idle": holding([], 300, min(args.hold, 5)),
        "slow": holding([head("POST", "/cache/clear", 10), b"{"], 256, min(args.hold, 5)),
    }
    figures = [watch(name, attack) for name, attack in attacks.items()]
    if args.json:
        report = {"machine": platform.platform(), "cpus": os.cpu_count(), "attacks": figures}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
