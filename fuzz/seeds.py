"""Writes starting points for the fuzz targets from the recorded messages of the protocol crate's tests."""

import hashlib
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent
VECTORS = ROOT.parent / "crates" / "kvtier-proto" / "tests" / "vectors"


def seed(target: str, data: bytes) -> None:
    folder = ROOT / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


def load(name: str):
    return json.loads((VECTORS / name).read_text())


def hex_lists(value):
    """Every list of at least two texts that are all hexadecimal: the messages, wherever they stand."""
    if isinstance(value, dict):
        for member in value.values():
            yield from hex_lists(member)
    elif isinstance(value, list):
        try:
            frames = [bytes.fromhex(member) for member in value]
        except (TypeError, ValueError):
            for member in value:
                yield from hex_lists(member)
        else:
            if len(frames) >= 2:
                yield frames


for path in sorted(VECTORS.glob("*.json")):
    for frames in hex_lists(json.loads(path.read_text())):
        if all(len(frame) < 1 << 16 for frame in frames):
            seed("frames", b"".join(len(frame).to_bytes(2, "little") + frame for frame in frames))
        for frame in frames[2:]:
            if b"token_ids" in frame:
                seed("keys", frame)

wrappers = load("ipc_wrappers.json")
for row in wrappers["valid"]:
    seed("descriptors", bytes.fromhex(row["descriptor_msgpack"]))
for row in wrappers["invalid"]:
    if "descriptor" in row:
        seed("descriptors", bytes.fromhex(row["descriptor"]))
for row in load("legacy_wrappers.json")["rows"]:
    seed("descriptors", bytes.fromhex(row["pickle"]))
for row in load("pickles.json")["vectors"]:
    target = "pickle" if row["name"].startswith("engine_driven") else "descriptors"
    seed(target, bytes.fromhex(row["hex"]))
for row in load("pickle.json")["cases"] + load("written.json")["rows"]:
    seed("pickle", bytes.fromhex(row["pickle"]))

# A peer on the request port: greeting and READY, then traffic. A fuzzer alone does not find the 64 bytes of a greeting.
greeting = (b"\xff" + bytes(7) + b"\x01\x7f\x03\x01NULL").ljust(64, b"\0")
ready = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
identity = b"\x04\x2b\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x02id"
ping, unknown, error = b"\x04\x09\x04PING\0\x0ahi", b"\x04\x04\x03FOO", b"\x04\x09\x05ERROR\x02no"
small, parts = b"\0\1x", b"\1\1a\1\0" + ping + b"\0\1b"
large = b"\3" + (300).to_bytes(8, "big") + bytes(300) + b"\2" + (40_000).to_bytes(8, "big") + bytes(40_000)
for first in (0, 1, 14, 15, 254, 255):
    for traffic in (ready + ping + small, ready + unknown + parts, identity + large + small, ready + b"\1\0" * 40, error):
        # The second bit makes us the DEALER.
        peer = b"ROUTER" if first & 2 else b"DEALER"
        seed("zmtp", bytes([first]) + greeting + traffic.replace(b"DEALER", peer))

# Replies of a Redis server, of every type.
for reply in [
    b"+OK\r\n:4096\r\n$-1\r\n$3\r\nabc\r\n*-1\r\n",
    b"*2\r\n*3\r\n:0\r\n:8191\r\n*3\r\n$9\r\n127.0.0.1\r\n:7000\r\n$2\r\nid\r\n*3\r\n:8192\r\n:16383\r\n*2\r\n$-1\r\n:7001\r\n",
    b"-MOVED 3999 127.0.0.1:6381\r\n-ASK 1 ::1:7000\r\n-OOM command not allowed\r\n",
    b"*2\r\n$2\r\n17\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n",
]:
    seed("resp", reply)

# Answers of a tier in a process of its own; the first byte of the header is the number of results.
for count, answer in [
    (1, b'{"results":[{"len":4096,"meta":"6b7674720200"}]}'),
    (2, b'{"results":[null,{"error":"full","message":"no space"}]}'),
    (3, b'{"results":[true,false,{"error":"busy"}]}'),
    (0, b'{"objects":[{"key":"m@01000100@0@' + b"ab" * 32 + b'","len":1,"used_at":7}],"next":"x"}'),
    (0, b'{"version":1,"tier":"t","capabilities":{"delete":true},"overhead_bytes":64,"max_batch":9}'),
    (0, b'{"free_bytes":123}'),
]:
    seed("tier", bytes([count]) + bytes(15) + answer)
