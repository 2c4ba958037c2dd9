#!/usr/bin/env python3
"""Idle connections to the request port: their cost, and their effect on the disk tier and HTTP.

    benches/idle_connections.py KVTIER [CONNECTIONS] > benches/runs/DATE/idle-connections.json

Starts a server with a disk tier, opens CONNECTIONS (20000) connections that finish the handshake, answer heartbeats and ask
for nothing, and measures before and during. Every process needs a limit of open files above its share of the connections
(`ulimit -n`); the server takes as many as its own limit allows, the others wait or are closed.
"""

import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

GREETING = (b"\xff" + bytes(7) + b"\x01\x7f\x03\x01NULL").ljust(64, b"\0")
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
PONG = b"\x04\x05\x04PONG"
PER_PROCESS = 10_000
# Two heartbeats of the server.
IDLE_SECONDS = 60


def hold(address, count):
    """Opens connections, reports that, and answers their heartbeats until stdin ends."""
    poll, sockets = select.epoll(), {}
    for index in range(count):
        peer = socket.create_connection(address)
        peer.sendall(GREETING + READY)
        peer.setblocking(False)
        sockets[peer.fileno()] = peer
        poll.register(peer, select.EPOLLIN)
        if index % 100 == 99:
            answer(poll, sockets, 0)
    print("ready", flush=True)
    poll.register(0, select.EPOLLIN)
    closed = 0
    while True:
        ended = answer(poll, sockets, 1)
        if ended is None:
            print(len(sockets), flush=True)
            return
        closed += ended


def answer(poll, sockets, timeout):
    ended = 0
    for fd, _ in poll.poll(timeout):
        if fd == 0:
            return None
        try:
            got = sockets[fd].recv(4096)
        except OSError:
            got = b""
        if not got:
            poll.unregister(fd)
            sockets.pop(fd).close()
            ended += 1
        elif b"\x04PING" in got:
            sockets[fd].sendall(PONG)
    return ended


def get(http, path):
    with urllib.request.urlopen(http + path, timeout=30) as answer:
        return answer.read().decode()


def timed(action, times):
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    taken.sort()
    return {"p50_ms": round(1e3 * taken[len(taken) // 2], 3), "max_ms": round(1e3 * taken[-1], 3)}


def cpu_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def anonymous_mib(pid):
    return int(re.search(r"RssAnon:\s+(\d+)", open(f"/proc/{pid}/status").read())[1]) >> 10


def measure(kvtier, endpoint, http, pid):
    """Measures the server: idle, its HTTP, and stores that go to the tier."""
    before, started = cpu_seconds(pid), time.monotonic()
    time.sleep(IDLE_SECONDS)
    idle = (cpu_seconds(pid) - before) / (time.monotonic() - started)
    state = json.loads(get(http, "/status"))
    stored = state["storage_manager"]["l2_adapters"][0]
    bench = [kvtier, "bench", endpoint, "--scenario", "ping,engine-driven", "--duration", "5s"]
    run = subprocess.run(bench, capture_output=True, text=True)
    time.sleep(2)
    after = json.loads(get(http, "/status"))["storage_manager"]["l2_adapters"][0]
    number = lambda tier: {key: value for key, value in tier.items() if isinstance(value, (int, bool))}
    return {
        "request_port": state["request_port"],
        "cpu_share_idle": round(idle, 5),
        "rss_anon_mib": anonymous_mib(pid),
        "healthcheck": timed(lambda: get(http, "/healthcheck"), 200),
        "bench_exit": run.returncode,
        "bench": run.stdout.splitlines() + run.stderr.splitlines(),
        "tier_before": number(stored),
        "tier_after": number(after),
    }


def main(kvtier, count):
    with tempfile.TemporaryDirectory() as directory:
        tier = json.dumps({"type": "fs", "base_path": directory})
        flags = ["--port", "0", "--http-port", "0", "--l1-size-gb", "0.25", "--shm-name", "", "--l2-adapter", tier]
        server = subprocess.Popen([kvtier, "server", "--state-dir", "none", *flags], stderr=subprocess.PIPE, text=True)
        log, found = [], None
        while not found:
            log.append(server.stderr.readline().rstrip())
            found = re.search(r"tcp://([\d.]+):(\d+).*?(http://[\d.]+:\d+)", log[-1])
        (host, port, http), pid = found.groups(), server.pid
        os.set_blocking(server.stderr.fileno(), False)
        # Touching L1 costs time once, which would count as the cost of being idle.
        while (l1 := json.loads(get(http, "/status"))["storage_manager"]["l1_manager"]):
            if l1["prefaulted_bytes"] >= l1["memory_total_bytes"]:
                break
            time.sleep(0.1)
        measured = {"connections": count, "quiet": measure(kvtier, f"{host}:{port}", http, pid)}
        holders = []
        while count > 0:
            share = min(count, PER_PROCESS)
            holder = [sys.executable, __file__, "--hold", host, port, str(share)]
            holders.append(subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            count -= share
        for holder in holders:
            holder.stdout.readline()
        measured["crowded"] = measure(kvtier, f"{host}:{port}", http, pid)
        measured["still_open"] = sum(int(holder.communicate()[0]) for holder in holders)
        server.terminate()
        log += (server.stderr.read() or "").splitlines()
        measured["server_exit"] = server.wait()
        measured["log"] = [line for line in log if re.search("descriptors|WARN|ERROR", line)]
        json.dump(measured, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    if sys.argv[1] == "--hold":
        hold((sys.argv[2], int(sys.argv[3])), int(sys.argv[4]))
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20_000)
