#!/usr/bin/env python3
"""`POST /prefix/match` of a 32k-token prompt that is resident: the time of whole requests over a kept connection.

    PYTHONPATH=target/python benches/prefix_match.py > benches/runs/DATE/prefix-match.txt

128 chunks of 256 tokens in L1; token ids below 128,000, as a JSON list and as base64; each body is sent 500 times. Needs the
Python package, PyTorch (tests/setup.sh) and `cargo build --release`, or KVTIER_BIN. The server listens on loopback and ends with it.
"""

import base64
import http.client
import json
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "harness"), str(ROOT / "tests" / "python")]
from kvrig.server import Server, our_command  # noqa: E402
from rig import BLOCK, Engine, tokens  # noqa: E402

CHUNK, COUNT, ROUNDS = 256, 32_768, 500


def main():
    """Prints a line per form of the body."""
    server = Server(our_command(), Path(tempfile.mkdtemp()) / "log", "both", chunk=CHUNK)
    server.start()
    engine = Engine(server.url)
    try:
        prompt = [token % 128_000 for token in tokens(COUNT, 1)]
        blocks = list(range(CHUNK // BLOCK))
        for start in range(0, COUNT, CHUNK):
            assert engine.store("r", prompt, start, start + CHUNK, blocks)
        packed = base64.b64encode(struct.pack(f">{COUNT}I", *prompt)).decode()
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port)
        print(f"{COUNT} tokens, {COUNT // CHUNK} chunks of {CHUNK} in L1, {ROUNDS} requests each; us")
        for name, ids in (("base64", packed), ("list", prompt), ("one token", [1])):
            body = json.dumps({"model_name": "test/model", "token_ids": ids}, separators=(",", ":")).encode()
            times = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                connection.request("POST", "/prefix/match", body)
                answer = json.loads(connection.getresponse().read())
                times.append((time.perf_counter() - began) * 1e6)
            assert answer["hit_tokens_l1"] == (0 if ids == [1] else COUNT), answer
            p50, p99 = statistics.median(times), sorted(times)[int(0.99 * ROUNDS)]
            print(f"{name:10} body {len(body):>7} bytes  p50 {p50:>6.0f}  p99 {p99:>6.0f}  min {min(times):>6.0f}")
    finally:
        engine.close()
        server.stop()


if __name__ == "__main__":
    main()
