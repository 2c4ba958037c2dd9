#!/usr/bin/env python3
"""The Redis tier beside other clients of the same server, in turn, with the same number of connections.

    benches/redis.py [--rounds 5] [--connections 4] [--out benches/runs/DATE/redis.json]

bare             threads of this program with a socket each, from one buffer and into one buffer per thread
bare, places     the same from and into memory of its own for each value, 256 MiB in all: what a cache has to do
redis-benchmark  of Redis' own package: SET and GET of random keys, which receives into one buffer and keeps nothing
lmcache          the native client of LMCache's resp, if this is run by a Python that has it; memory as for "bare, places"
kvtier           `kvtier bench l2`, with all its limits: as configured by default (companion_sums: each loaded byte is compared
                 with a checksum beside the object), and "bare", without any checksum, as the others are

Values of 2 MiB and of 512 KiB, in GB/s; a lookup of 512 keys of 88 bytes, in ms: EXISTS of LMCache, a pipeline of STRLEN (bare,
and kvtier without checksums), or STRLEN and GET of the companion (kvtier, and "bare, companions"). Medians, and the ratio of
kvtier to the others of the same round. Needs redis-server and `cargo build --profile dist -p kvtier`, or KVTIER_BIN. Servers
listen on loopback and end with this program.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from beside import KVTIER, seconds_of, start_redis

PORT = 17591
SIZES = [2 << 20, 512 << 10]
BYTES = 512 << 20
# Memory that the values of a client share, as in `kvtier bench l2`.
PLACES = 256 << 20
LOOKUP = 512
# Lookups of a round, whose median counts: one takes milliseconds.
LOOKUPS = 7
# Bytes of the checksum beside an object.
COMPANION = 64


def command(*parts):
    """A command of RESP2."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


class Bare:
    """A connection that reads into one buffer, or into the one of each value."""

    def __init__(self, size, places=None):
        self.socket = socket.create_connection(("127.0.0.1", PORT))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.head = len(b"$%d\r\n" % size)
        self.size, self.places = size, places or [memoryview(bytearray(os.urandom(self.head + size + 2)))]
        self.buffer = self.places[0]

    def read(self, count):
        """Exactly `count` bytes."""
        got = 0
        while got < count:
            part = self.socket.recv_into(self.buffer[got:count])
            assert part, "closed"
            got += part

    def store(self, key, number):
        """SET."""
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, self.size)
        value = self.places[number % len(self.places)][: self.size]
        parts = [memoryview(head), value, memoryview(b"\r\n")]
        while parts:
            sent = self.socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
        self.buffer = memoryview(bytearray(5))
        self.read(5)

    def load(self, key, number):
        """GET."""
        self.socket.sendall(command("GET", key))
        self.buffer = self.places[number % len(self.places)]
        self.read(self.head + self.size + 2)


def places_of(size):
    """Memory of its own for each value, all written once."""
    memory = memoryview(bytearray(os.urandom(1 << 20) * (PLACES >> 20)))
    # Behind each value there is a page for its head and its end.
    return [memory[at : at + size + 64] for at in range(0, len(memory) - size - 64, size + 4096)]


def bare(size, connections, places=None):
    """Stores and loads, one after the other on each connection; GB/s."""
    clients = [Bare(size, places) for _ in range(connections)]
    count = BYTES // size
    keys = [b"bare-%d" % number for number in range(count)]

    def timed(name):
        def work(number):
            for at in range(number, count, connections):
                getattr(clients[number], name)(keys[at], at)

        return BYTES / seconds_of(connections, work) / 1e9

    return {"store": timed("store"), "load": timed("load")}


def fill_lookup():
    """Objects that have as many bytes in their keys as kvtier's, and their companions."""
    client = Bare(4096)
    for number in range(LOOKUP):
        client.store(lookup_key(number).encode(), number)
        client.socket.sendall(command("SET", companion_key(number), "c" * COMPANION))
        client.buffer = memoryview(bytearray(5))
        client.read(5)


def lookup_key(number):
    """88 bytes, as `kvtier bench l2` has them."""
    return f"bench@0@{number:080}"


def companion_key(number):
    """101 bytes."""
    return f"kvtier.sum@{{{lookup_key(number)}}}"


def bare_lookup(companions):
    """A pipeline of STRLEN, or of STRLEN and GET of the companion; ms."""
    with socket.create_connection(("127.0.0.1", PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(10)
        asked = b""
        for number in range(LOOKUP):
            asked += command("STRLEN", lookup_key(number))
            asked += command("GET", companion_key(number)) if companions else b""
        left = LOOKUP * (len(b":4096\r\n") + (len(b"$64\r\n\r\n") + COMPANION if companions else 0))
        began = time.monotonic()
        connection.sendall(asked)
        while left > 0:
            got = len(connection.recv(65536))
            assert got, "closed"
            left -= got
        took = (time.monotonic() - began) * 1e3
        assert left == 0, "more than was asked for"
        return took


def redis_benchmark(size, connections):
    """Redis' own; GB/s."""
    count = BYTES // size
    arguments = ["-p", str(PORT), "-c", str(connections), "-n", str(count), "-d", str(size), "--csv", "-t", "set,get"]
    # All keys are there before, so that each load finds one; stores replace them.
    arguments += ["-r", str(count)]
    fill = Bare(size)
    for number in range(count):
        fill.store(b"key:%012d" % number, number)
    text = subprocess.run(["redis-benchmark", *arguments], capture_output=True, text=True, check=True).stdout
    rates = dict(re.findall(r'"(SET|GET)","([0-9.]+)"', text))
    return {"store": float(rates["SET"]) * size / 1e9, "load": float(rates["GET"]) * size / 1e9}


def lmcache_client(connections):
    """The native client; None if there is none."""
    try:
        from lmcache.lmcache_redis import LMCacheRedisClient
    except ImportError:
        return None
    return LMCacheRedisClient("127.0.0.1", PORT, connections, "", "")


def lmcache(client, size):
    """Batches as its adapter submits them; GB/s."""
    count = BYTES // size
    keys = [f"lmcache-{size}-{number}" for number in range(count)]
    places = places_of(size)
    buffers = [places[number % len(places)][:size] for number in range(count)]
    found = {}
    for name, submit in [("store", client.submit_batch_set), ("load", client.submit_batch_get)]:
        began = time.monotonic()
        submit(keys, buffers)
        wait(client)
        found[name] = count * size / (time.monotonic() - began) / 1e9
    return found


def lmcache_lookup(client):
    """EXISTS of each key; ms."""
    began = time.monotonic()
    client.submit_batch_exists([lookup_key(number) for number in range(LOOKUP)])
    wait(client)
    return (time.monotonic() - began) * 1e3


def wait(client):
    """Waits for the one call in flight."""
    while not client.drain_completions():
        time.sleep(0.0001)


def kvtier(size, connections, sums, keys=None):
    """Our tier, whole; GB/s, and ms of a lookup of all its keys."""
    count = keys or BYTES // size
    adapter = {"type": "resp", "host": "127.0.0.1", "port": PORT, "num_workers": connections}
    if not sums:
        adapter |= {"companion_sums": False, "checksums": 0}
    with tempfile.NamedTemporaryFile() as report:
        arguments = ["--num-keys", str(count), "--data-size-kb", str(size >> 10), "--rounds", "1", "--json", report.name]
        subprocess.run(
            [KVTIER, "bench", "l2", "--l2-adapter", json.dumps(adapter), *arguments], check=True, stdout=subprocess.DEVNULL
        )
        rows = {row["step"]: row for row in json.load(report)["steps"]}
    rates = {step: rows[step]["gb_per_second"] for step in ("store", "load")}
    return {**rates, "lookup_ms": rows["lookup"]["us_per_object"] * count / 1e3}


def lookups(client, connections):
    """Medians of each client's, in ms."""
    fill_lookup()
    clients = {"bare": lambda: bare_lookup(False), "bare, companions": lambda: bare_lookup(True)}
    if client:
        clients["lmcache"] = lambda: lmcache_lookup(client)
    clients["kvtier"] = lambda: kvtier(4096, connections, True, LOOKUP)["lookup_ms"]
    clients["kvtier bare"] = lambda: kvtier(4096, connections, False, LOOKUP)["lookup_ms"]
    # In turn.
    took = [{name: look() for name, look in clients.items()} for _ in range(LOOKUPS)]
    return {name: statistics.median(each[name] for each in took) for name in clients}


def main():
    """Rounds in which each client has its turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start_redis(PORT, tempfile.mkdtemp())
    client = lmcache_client(args.connections)
    rounds = []
    for number in range(args.rounds):
        found = {}
        for size in SIZES:
            flush()
            found[size] = {"bare": bare(size, args.connections)}
            flush()
            found[size]["bare, places"] = bare(size, args.connections, places_of(size))
            flush()
            if client:
                found[size]["lmcache"] = lmcache(client, size)
            flush()
            found[size]["redis-benchmark"] = redis_benchmark(size, args.connections)
            flush()
            found[size]["kvtier"] = kvtier(size, args.connections, True)
            flush()
            found[size]["kvtier bare"] = kvtier(size, args.connections, False)
        flush()
        found["lookup_ms"] = lookups(client, args.connections)
        rounds.append(found)
        print(f"round {number + 1} of {args.rounds}", flush=True)
    tell(rounds)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"connections": args.connections, "rounds": rounds}, indent=1) + "\n")


def flush():
    """Empties the server."""
    with socket.create_connection(("127.0.0.1", PORT)) as connection:
        connection.sendall(command("FLUSHALL"))
        assert connection.recv(5) == b"+OK\r\n"


def tell(rounds):
    """Medians, and ratios within the rounds: of kvtier, and of kvtier without checksums."""
    for size in SIZES:
        for step in ("store", "load"):
            print(f"{step} of {size >> 10} KiB, GB/s")
            clients = rounds[0][size]
            for name in clients:
                rate = statistics.median(found[size][name][step] for found in rounds)
                whole, bare = (
                    statistics.median(found[size][ours][step] / found[size][name][step] for found in rounds)
                    for ours in ("kvtier", "kvtier bare")
                )
                print(f"  {name:17} {rate:5.2f}   kvtier / this {whole:5.2f}   kvtier bare / this {bare:5.2f}")
    print(f"lookup of {LOOKUP} keys, ms")
    for name in rounds[0]["lookup_ms"]:
        took = [found["lookup_ms"] for found in rounds]
        ratios = [statistics.median(of[ours] / of[name] for of in took) for ours in ("kvtier", "kvtier bare")]
        middle = statistics.median(of[name] for of in took)
        print(f"  {name:17} {middle:6.2f}   kvtier / this {ratios[0]:5.2f}   kvtier bare / this {ratios[1]:5.2f}")


if __name__ == "__main__":
    main()
