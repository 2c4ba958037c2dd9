#!/usr/bin/env python3
"""The raw_block tier beside fio: 2 MiB with O_DIRECT and io_uring, in turn, on two files of one file system.

    benches/raw_block.py DIRECTORY [--count 256] [--rounds 5] [--out benches/runs/DATE/raw_block.json]

fio      4 threads with 16 transfers in flight each; its buffers are filled once
kvtier   `kvtier bench l2` with 4 threads: every store computes a checksum and writes a record, every load compares one

GB/s, medians, and the ratio within a round. The first round is not counted, as it allocates the files. Needs fio and
`cargo build --profile dist -p kvtier`, or KVTIER_BIN.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from beside import KVTIER

STEPS = {"store": "write", "load": "read"}
THREADS = 4


def kvtier(directory, count):
    """Our tier, whole; GB/s."""
    adapter = {"type": "raw_block", "device_path": str(directory / "kvtier.img"), "max_capacity_gb": count / 256}
    adapter |= {"num_workers": THREADS, "slot_bytes": 2 << 20}
    with tempfile.NamedTemporaryFile() as report:
        arguments = ["--num-keys", str(count), "--rounds", "1", "--json", report.name]
        subprocess.run(
            [KVTIER, "bench", "l2", "--l2-adapter", json.dumps(adapter), *arguments], check=True, stdout=subprocess.DEVNULL
        )
        rows = {row["step"]: row for row in json.load(report)["steps"]}
    return {step: rows[step]["gb_per_second"] for step in STEPS}


def fio(directory, count):
    """The same transfers without anything around them; GB/s."""
    part = count * 2 // THREADS
    flags = [f"--filename={directory / 'fio.img'}", "--direct=1", "--ioengine=io_uring", "--iodepth=16", "--bs=2M"]
    flags += [f"--numjobs={THREADS}", f"--size={part}M", f"--offset_increment={part}M", "--group_reporting", "--thread"]
    flags += ["--name=x", "--output-format=json", "--fallocate=none"]
    rates = {}
    for step, mode in STEPS.items():
        done = subprocess.run(["fio", *flags, f"--rw={mode}"], check=True, capture_output=True, text=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        rates[step] = job[mode]["bw_bytes"] / 1e9
    return rates


def main():
    """Rounds in which each has its turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for number in range(args.rounds + 1):
            found = {client.__name__: client(Path(directory), args.count) for client in (fio, kvtier)}
            print(f"round {number} of {args.rounds}: {json.dumps(found)}", flush=True)
            rounds += [found] if number else []
    for step in STEPS:
        ratio = statistics.median(found["kvtier"][step] / found["fio"][step] for found in rounds)
        rates = {name: statistics.median(found[name][step] for found in rounds) for name in ("fio", "kvtier")}
        print(f"{step}: fio {rates['fio']:.2f} GB/s, kvtier {rates['kvtier']:.2f} GB/s, ratio {ratio:.2f}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"count": args.count, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
