#!/usr/bin/env python3
"""What the dashboard costs: lookups beside open ones, an idle server, the page's first paint.

    benches/dashboard.py KVTIER [--dashboards 20] [--duration 60s] [--tenants 0] > benches/runs/DATE/dashboard.json

The dashboards read the stream of /ui/events and ask for /tenants every 5 s, as pages do that show the table of tenants; with
--tenants both servers have series of that many. For the first paint there must be a
`chromium` (KVTIER_CHROMIUM), and Python's websockets.
"""

import argparse
import contextlib
import json
import os
import re
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from idle_connections import cpu_seconds

IDLE_SECONDS = int(os.environ.get("IDLE_SECONDS", 30))
PAINTS = 5
# As assets/ui/tenants.js has it.
TENANTS_REFRESH = 5


class Server:
    """A server on ports that the system chooses."""

    def __init__(self, kvtier, folder):
        log = Path(folder, "log")
        flags = ["--state-dir", "none", "--port", "0", "--http-port", "0", "--l1-size-gb", "0.5", "--shm-name", f"kvtier_dashboard_{os.getpid()}_{Path(folder).name}",
                 "--eviction-policy", "IsolatedLRU"]  # fmt: skip
        with open(log, "wb") as out:
            self.process = subprocess.Popen([kvtier, "server", *flags], stderr=out, stdout=out)
        while "L1 is pre-faulted" not in log.read_text():
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.05)
        text = log.read_text()
        self.address = re.search(r"tcp://(127\.0\.0\.1:\d+)", text)[1]
        self.http = re.search(r"http://(127\.0\.0\.1:\d+)", text)[1]

    def seconds(self):
        """Processor time so far."""
        return cpu_seconds(self.process.pid)

    def private_bytes(self):
        """Memory of its own, without the arena."""
        rollup = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", rollup)[1]) * 1024

    def stop(self):
        self.process.terminate()
        self.process.wait()


def serve_tenants(kvtier, server, count):
    """Stores and lookups of this number of tenants, so that the metrics have series of each of them."""
    command = [kvtier, "bench", server.address, "--scenario", "tenants", "--tenants", str(count), "--duration", "20s", "--json", "-"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with urllib.request.urlopen(f"http://{server.http}/metrics") as answer:
        return len(answer.read())


def ask_for_tenants(http, count, stop, counts):
    """Asks for the table as `count` pages do, evenly spread, until `stop` is set; `counts` gets answers, bytes and seconds."""
    while not stop.wait(TENANTS_REFRESH / count):
        began = time.monotonic()
        with urllib.request.urlopen(f"http://{http}/tenants?sort=usage&order=desc&search=&offset=0&limit=50") as answer:
            counts["tenants_bytes"] += len(answer.read())
        counts["tenants_answers"] += 1
        counts["tenants_seconds"] += time.monotonic() - began


def watch(http, count, stop, counts):
    """Reads `count` streams until `stop` is set; `counts` gets ticks and bytes."""
    host, port = http.split(":")
    selector = selectors.DefaultSelector()
    for _ in range(count):
        peer = socket.create_connection((host, int(port)))
        peer.sendall(b"GET /ui/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        peer.setblocking(False)
        selector.register(peer, selectors.EVENT_READ)
    while not stop.is_set():
        for key, _ in selector.select(0.2):
            data = key.fileobj.recv(1 << 20)
            assert data, "a stream has ended"
            counts["bytes"] += len(data)
            counts["ticks"] += data.count(b"event: tick")


def lookups(kvtier, servers, duration):
    """Rows of lookups at both servers, in turn."""
    command = [kvtier, "bench", servers[0].address, "--beside", servers[1].address, "--scenario", "lookup-hit",
               "--duration", duration, "--json", "-"]  # fmt: skip
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def first_paints(http):
    """Milliseconds until something is seen, and until the values are there; a new profile each time."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests/harness"))
    from kvrig.browser import Browser, find

    if find() is None:
        return "no chromium"
    paints, values = [], []
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(Browser(find(), folder)) as browser:
            browser.open("about:blank")
            for _ in range(PAINTS):
                page = browser.open(f"http://{http}/ui")
                page.wait("document.querySelectorAll('#tiles .value').length > 0")
                values.append(page.run("performance.now()"))
                page.wait("performance.getEntriesByName('first-contentful-paint').length > 0")
                paints.append(page.run("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    return {"first_contentful_paint_ms": paints, "median_ms": statistics.median(paints), "values_shown_before_ms": values}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kvtier")
    parser.add_argument("--dashboards", type=int, default=20)
    parser.add_argument("--duration", default="60s")
    parser.add_argument("--tenants", type=int, default=0, help="with series of their own, at both servers")
    parser.add_argument("--idle", action="store_true", help="only the idle server")
    arguments = parser.parse_args()
    kvtier = shutil.which(arguments.kvtier) or arguments.kvtier
    with tempfile.TemporaryDirectory(prefix="a") as one, tempfile.TemporaryDirectory(prefix="b") as other:
        servers = [Server(kvtier, one), Server(kvtier, other)]
        try:
            metrics = None
            # An idle server is measured alone.
            for server in servers[: 1 if arguments.idle else 2] if arguments.tenants else []:
                metrics = serve_tenants(kvtier, server, arguments.tenants)
            began = servers[0].seconds()
            time.sleep(IDLE_SECONDS)
            idle = {
                "cpu_seconds_per_second": (servers[0].seconds() - began) / IDLE_SECONDS,
                "private_bytes": servers[0].private_bytes(),
            }
            if arguments.idle:
                return print(json.dumps({"tenants": arguments.tenants, "metrics_bytes": metrics, "idle": idle}))
            stop = threading.Event()
            counts = {"ticks": 0, "bytes": 0, "tenants_answers": 0, "tenants_bytes": 0, "tenants_seconds": 0.0}
            viewers = [threading.Thread(target=each, args=(servers[1].http, arguments.dashboards, stop, counts))
                       for each in (watch, ask_for_tenants)]  # fmt: skip
            for viewer in viewers:
                viewer.start()
            try:
                rows = lookups(kvtier, servers, arguments.duration)
            finally:
                stop.set()
                for viewer in viewers:
                    viewer.join()
            result = {
                "dashboards": arguments.dashboards, "tenants": arguments.tenants, "metrics_bytes": metrics, "idle": idle, "received": counts,
                "private_bytes": {"unwatched": servers[0].private_bytes(), "watched": servers[1].private_bytes()},
                "lookups": rows, "page": first_paints(servers[0].http),
            }  # fmt: skip
        finally:
            for server in servers:
                server.stop()
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
