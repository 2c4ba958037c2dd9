#!/usr/bin/env python3
"""What a build takes on this machine, in a copy of the last commit, and how much Rust there is.

    benches/build.py [--out benches/runs/DATE/build.txt]

first     `cargo build --release` from nothing but downloaded crates; the units of this repository that took longest
one line  the same after a line was added to a function of the server; median of three
lines     Rust by crate, without tests, comments and blank lines
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or REPOSITORY / "target")
# Of tests alone.
TEST_FOLDERS = {"tests", "testing", "examples", "fuzz", "kvtier-cuda-fake"}
EDITED = "crates/kvtier-server/src/server.rs"


def lines_of(text):
    """Lines of code, without modules and functions that only tests compile."""
    left, number = text.split("\n"), 0
    while left:
        line = left.pop(0)
        code = line.strip()
        if re.match(r"#\[cfg\((all\()?(any\()?test", code):
            indent = len(line) - len(line.lstrip())
            while left:
                ended = left.pop(0)
                is_end = ended.strip() and len(ended) - len(ended.lstrip()) == indent
                if is_end and (ended.strip()[0] == "}" or ended.rstrip().endswith((";", ",", "{}"))):
                    break
        elif code and not code.startswith("//"):
            number += 1
    return number


def count(copy):
    """Lines of code of each crate."""
    found = {}
    for path in sorted(copy.rglob("*.rs")):
        parts = path.relative_to(copy).parts
        is_test = TEST_FOLDERS & set(parts[:-1]) or re.fullmatch(r"(.*_)?tests\.rs|testing\.rs", parts[-1])
        if "target" not in parts and not is_test:
            crate = "/".join(parts[:2])
            found[crate] = found.get(crate, 0) + lines_of(path.read_text())
    return found


def build(copy, *more):
    """Seconds of a build."""
    # Nothing of this shell's settings but where crates are kept: neither a cache of a compiler's output nor flags.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("CARGO_", "RUSTC_", "RUSTFLAGS"))}
    environment |= {key: os.environ[key] for key in ("CARGO_HOME",) if key in os.environ}
    began = time.monotonic()
    command = ["cargo", "build", "--release", "--quiet", "--locked", "--offline", *more]
    subprocess.run(command, cwd=copy, env=environment, check=True)
    return time.monotonic() - began


def slowest(copy):
    """The units of this repository with their seconds, from cargo's report."""
    report = max((copy / "target/cargo-timings").glob("*.html"), key=lambda path: path.stat().st_mtime).read_text()
    units = json.loads(re.search(r"UNIT_DATA = (\[.*?\]);", report, re.DOTALL)[1])
    own = [(unit["duration"], f"{unit['name']}{unit['target']}") for unit in units if unit["name"].startswith("kvtier")]
    return sorted(own, reverse=True)[:5]


def main():
    """Measures all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET) as folder:
        copy = Path(folder)
        committed = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, capture_output=True, check=True).stdout
        tarfile.open(fileobj=BytesIO(committed)).extractall(copy, filter="data")
        subprocess.run(["cargo", "fetch", "--quiet", "--locked"], cwd=copy, check=True)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        told = [f"commit {commit.stdout.strip()}, {os.cpu_count()} processors"]
        told.append(f"first build: {build(copy, '--timings'):.0f} s")
        told += [f"  {seconds:5.1f} s  {name}" for seconds, name in slowest(copy)]
        edited, took = copy / EDITED, []
        for number in range(3):
            text = edited.read_text()
            begin = re.search(r"pub fn start\b.*?\{\n", text, re.DOTALL).end()
            edited.write_text(f'{text[:begin]}        tracing::trace!("{number}");\n{text[begin:]}')
            took.append(build(copy))
        told.append(f"one line of the server: {statistics.median(took):.0f} s ({', '.join(f'{seconds:.0f}' for seconds in took)})")
        lines = count(copy)
        told.append(f"lines of Rust: {sum(lines.values())}")
        told += [f"  {number:6}  {crate}" for crate, number in sorted(lines.items(), key=lambda found: -found[1])]
    print("\n".join(told))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(told) + "\n")


if __name__ == "__main__":
    main()
