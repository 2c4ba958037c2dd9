"""Pauses of take-overs with a tier of many objects: `take_over_tier.py KVTIER OBJECTS [ROUNDS]`.

The tier is a directory of sparse files, which have names and sizes and no bytes: its index is what is handed over. The pause is the one
that the new server logs. One JSON object per take-over; the median last.
"""

import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

BYTES = 8192


def fill(folder: str, objects: int) -> None:
    for number in range(objects):
        name = f"m@0x01020102@0@{hashlib.sha256(number.to_bytes(8)).hexdigest()}.data"
        file = os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY, 0o600)
        os.truncate(file, BYTES)
        os.close(file)


class Server:
    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r'serving .*http="([^"]+)"', line)
            if found:
                self.http = found[1]
                return
        raise SystemExit("".join(self.log))

    def tier(self) -> dict:
        with urllib.request.urlopen(f"{self.http}/status") as answer:
            return json.load(answer)["storage_manager"]["l2_adapters"][0]


def main() -> None:
    kvtier, objects, rounds = sys.argv[1], int(sys.argv[2]), int((sys.argv[3:] or ["5"])[0])
    pool = f"kvtier_take_over_tier_{os.getpid()}"
    with tempfile.TemporaryDirectory() as base:
        folder = f"{base}/tier"
        os.mkdir(folder)
        fill(folder, objects)
        adapter = json.dumps({"type": "fs", "base_path": folder})
        command = [kvtier, "server", "--port", "0", "--http-port", "0", "--instance-id", "tier", "--state-dir", f"{base}/state"]
        command += ["--l1-restore", "on", "--l1-size-gb", "0.0625", "--shm-name", pool, "--cuda-driver", "off"]
        command += ["--l2-adapter", adapter, "--l2-min-free-gb", "0"]
        began = time.monotonic()
        server = Server(command)
        while server.tier()["recovery"]["state"] != "done":
            time.sleep(0.1)
        print(json.dumps({"objects": objects, "scan_s": round(time.monotonic() - began, 1), "tier": server.tier()["recovery"]}), flush=True)
        pauses = []
        for round_ in range(rounds):
            new = Server([*command, "--take-over"])
            assert server.process.wait() == 0
            server = new
            pauses.append(float(re.search(r"milliseconds=([0-9.]+)", "".join(new.log))[1]))
            print(json.dumps({"objects": objects, "take_over": round_, "pause_ms": pauses[-1]}), flush=True)
            while server.tier()["recovery"]["state"] != "done":
                time.sleep(0.1)
        print(json.dumps({"objects": objects, "pause_ms_median": statistics.median(pauses), "pause_ms_longest": max(pauses)}))
        server.process.terminate()
        server.process.wait()
        for name in ("", ".ledger"):
            os.unlink(f"/dev/shm/lmcache_l1_pool_{pool}{name}")


main()
