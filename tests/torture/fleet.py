"""Three servers that read from each other, each with an engine, while hosts, servers and what joins them fail: each kind of fault
in turn, then at random.

Each server is in a network namespace and listens on its address there, with a bandwidth. Of the two readers of a server one connects
directly, where packets are lost in bursts (a port of the bridge that passes nothing); the other one by a proxy (`link`) that has
what this test cannot ask of a kernel without netem: delay, and late pieces in place of single lost packets.
"""

import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import actor
import checker
from checker import Violation
from kvrig import tiers
from kvrig.report import Report
from kvrig.server import our_command
from kvrig.waiting import TimedOut, wait_until
from link import TO_CLIENT, Link
from network import address
from paint import PROMPTS, TENANTS
from plan import EngineSpec, Fault, Plan
from round import BUSY, IDLE, IDLE_SECONDS, Round
from round import EXPECTED as EXPECTED_IN_ROUND

HOSTS = range(3)
PORT, PROXIED_PORT, PASSWORD = 6380, 6381, "of-peers"
# Connections of a reader to a peer: for objects, and one for lookups.
CONNECTIONS = 5
BANDWIDTH, SLOW = "200mbit", "256kbit"
# Of the proxy: seconds per piece and direction, and the share of pieces that are late by a retransmission.
DELAY, LOST = 0.001, 0.005
# Seconds after which a lookup is answered with what L1 has by then (--l2-load-timeout-seconds), and what a busy machine adds.
LOOKUP_BOUND = 5 + 3
# Clients and ways of transfer of the engines. Those of one phase read what the others have stored.
IN_TURN = [("kvtier", "lmcache_driven"), ("lmcache", "lmcache_driven"), ("kvtier", "lmcache_driven")]
AT_RANDOM = [("lmcache", "engine_driven"), ("kvtier", "engine_driven"), ("kvtier", "pickle")]
KINDS = ["kill", "freeze", "half_open", "slow", "version", "password", "flood", "full", "loss", "damage", "delay", "stall", "cut"]
# What a reader counts of what the proxy has changed.
REFUSED = {"version": "other_layout_loads", "damage": "corrupt_objects"}
# Seconds until a peer is read again after its fault.
RECOVERED = 40
STATES, TURNS = ["healthy", "killed", "frozen"], 5
# What servers log besides what a server of the torture test does.
EXPECTED = [r"WARN kvtier_l2", r"the worker registered with an earlier process of the server", r"the pages are being closed", r"travel in clear"]


class Host(Round):
    """A server that reads the others, and its engines. The last digit of an engine's number is its host."""

    def __init__(self, fleet, number):
        policy = "retain" if number == 0 else "default"
        flags = ("--eviction-policy", "LRU", "--l2-prefetch-policy", policy)
        super().__init__(Plan(fleet.seed, 0, "both", ("peers",), False, False, flags), fleet.logs / f"host-{number}")
        self.fleet, self.number, self.windows, self.violations = fleet, number, fleet.windows, fleet.violations
        self.logs.mkdir(parents=True)
        others = [(number + 1) % len(HOSTS), (number + 2) % len(HOSTS)]
        peers = [f"{address(other)}:{port}" for other, port in zip(others, (PORT, PROXIED_PORT), strict=True)]
        flags = [*tiers.adapter("peers", peers=peers, first_byte_ms=50), "--peer-host", address(number), "--peer-port", str(PORT)]
        self.backends = {"peers": SimpleNamespace(flags=flags, close=lambda: None)}
        self.server, self.link = self.make_server(), None
        self.server.env["KVTIER_PEER_PASSWORD"] = PASSWORD

    def inside(self):
        """The namespace."""
        return self.fleet.network.inside(self.number)

    def open(self):
        """Starts the server and the proxy before its port."""
        self.server.start()
        self.link = Link(PROXIED_PORT, PORT, address(self.number))
        self.link.say("delay", DELAY, 1e9)
        self.link.say("lose", LOST)

    def engine(self, seed, way, work=actor.Actor.work):
        """Starts an engine; its number."""
        client, mode = way
        number = 10 * len(self.specs) + self.number
        self.start_engine(EngineSpec(number, client, mode, 2 if mode == "lmcache_driven" else 0, False, seed), work)
        return number

    def port(self):
        """What its port for peers counts."""
        return self.server.get("/status")[1]["peer_port"]

    def connected(self):
        """Whether it reads from both others."""
        return tiers.tier(self.server)["connected_peers"] == 2

    def refused(self, counter):
        """A count of what it has from the other host that it reads by a proxy."""
        with self.inside():
            return tiers.tier(self.server)["peers"][1][counter]

    def left(self):
        """What is held though all engines have gone, and every peer is there."""
        found = list(checker.check_idle(self.idle_state())) + list(checker.check_levels([self.level()], self.limits(IDLE, {})))
        if (connections := self.port()["connections"]) != 2 * CONNECTIONS:
            found.append(Violation("leak", f"{connections} connections of peers, not {2 * CONNECTIONS}"))
        return found

    # -- faults; those of a server concern its own engines, all others none ------------------------

    def away(self, kind):
        """The window of a fault that takes the server away."""
        return self.window(kind, [*self.specs])

    def unnoticed(self, kind):
        """The window of another one."""
        return self.window(kind, [-1])

    def kill(self, fault):
        with self.away("kill"):
            self.server.kill()
            time.sleep(fault.length)
            self.server.start()

    def freeze(self, fault):
        with self.away("freeze"), self.server.frozen():
            time.sleep(fault.length)

    def half_open(self, fault):
        """No packet of its end arrives."""
        with self.away("half_open"):
            self.fleet.network.connect(self.number, False)
            self.server.kill()
            self.server.start()
            time.sleep(1 + fault.length)
            self.fleet.network.connect(self.number, True)

    def slow(self, fault):
        with self.unnoticed("slow"):
            self.fleet.network.limit(self.number, SLOW)
            time.sleep(fault.length)
            self.fleet.network.limit(self.number, BANDWIDTH)

    def loss(self, fault):
        """Packets are lost in bursts."""
        source, until = random.Random(fault.pick), time.monotonic() + fault.length
        with self.unnoticed("loss"):
            while time.monotonic() < until:
                self.fleet.network.connect(self.number, False)
                time.sleep(source.uniform(0.02, 0.4))
                self.fleet.network.connect(self.number, True)
                time.sleep(source.uniform(0.05, 0.5))

    def password(self, fault):
        """It has another password, as its port and for those of the others."""
        with self.away("password"):
            for password, length in (("wrong", fault.length), (PASSWORD, 0)):
                self.stop_server()
                self.server.env["KVTIER_PEER_PASSWORD"] = password
                self.server.start()
                time.sleep(length)

    def version(self, fault):
        """Its objects are of another version."""
        with self.unnoticed("version"):
            self.link.say("version", fault.length)
            time.sleep(fault.length)

    def damage(self, fault):
        with self.unnoticed("damage"):
            self.link.say("damage", fault.length)
            time.sleep(fault.length)

    def delay(self, fault):
        with self.unnoticed("delay"):
            self.link.say("delay", fault.pick / 5, fault.length)
            time.sleep(fault.length)
            self.link.say("delay", DELAY, 1e9)

    def stall(self, fault):
        """Nothing arrives from it."""
        with self.unnoticed("stall"):
            self.link.say("freeze", TO_CLIENT, fault.length)
            time.sleep(fault.length)

    def cut(self, fault):
        with self.unnoticed("cut"):
            self.link.say("cut")

    def full(self, fault):
        """An engine leases all that it can."""

        def hoard(engine):
            until = time.monotonic() + fault.length
            while time.monotonic() < until:
                engine.lookup(engine.source.randrange(len(TENANTS)), engine.source.randrange(PROMPTS))

        with self.unnoticed("full"):
            number = self.engine(fault.pick, ("kvtier", [*self.specs.values()][-1].mode), hoard)
            _, status = os.waitpid(self.pids.pop(number), 0)
            assert status == 0, f"engine {number} ended with {status:#x}"

    def flood(self, fault):
        """Another host has more connections than there may be: some ask for all objects and read nothing, some send no requests."""
        keys = []
        for entry in self.server.get("/cache/objects?tier=l1&page_size=500")[1]["entries"]:
            key = entry["key"]
            salt = f"@{key['cache_salt']}" if key["cache_salt"] else ""
            keys.append(f"{key['model_name']}@{key['kv_rank']:08x}@{key['object_group_id']}@{key['chunk_hash_hex']}{salt}")
        admitted = request("AUTH", PASSWORD)
        texts = [admitted + request("MGET", *keys) * 20, admitted + request("STRLEN", "x" * 4000) * 500,
                 admitted + b"*2\r\n$3\r\nGET\r\n$536870912\r\n", b"GET / HTTP/1.1\r\n\r\n", b""]  # fmt: skip
        source, streams = random.Random(fault.pick), []
        with self.unnoticed("flood"):
            until = time.monotonic() + fault.length
            with self.fleet.network.inside((self.number + 1) % len(HOSTS)):
                while time.monotonic() < until:
                    if len(streams) == 300:
                        streams.pop(source.randrange(300)).close()
                    with contextlib.suppress(OSError):
                        streams.append(socket.create_connection((address(self.number), PORT), 1))
                        streams[-1].setblocking(False)
                        streams[-1].send(source.choice(texts))
                    time.sleep(0.003)
            connections = self.port()["connections"]
            for stream in streams:
                stream.close()
        assert connections > len(streams) / 2, f"{connections} of {len(streams)} connections"


class Fleet:
    """The hosts, and what must hold of all of them."""

    def __init__(self, network, seed, seconds, logs):
        self.network, self.seed, self.seconds, self.logs = network, seed, seconds, logs
        self.windows, self.violations, self.done, self.report = [], [], Counter(), Report()
        self.hosts, self.began, self.is_ending = [Host(self, number) for number in HOSTS], time.monotonic(), threading.Event()

    def run(self):
        """All of it; how many checks have failed."""
        try:
            for host in self.hosts:
                with host.inside():
                    host.open()
            for host in self.hosts:
                with host.inside():
                    wait_until(lambda host=host: host.connected() and host.port()["connections"] == 2 * CONNECTIONS, 30, "connections of peers")
                    host.first_level = host.level()
            self.measure()
            watcher = threading.Thread(target=self.watch)
            watcher.start()
            try:
                self.began = time.monotonic()
                self.play(IN_TURN, self.in_turn)
                self.play(AT_RANDOM, self.at_random)
            finally:
                self.is_ending.set()
                watcher.join()
            self.finish()
        except Exception:  # noqa: BLE001
            self.violations.append(Violation("exception", traceback.format_exc()[-2000:]))
        finally:
            # Each proxy has the pipes of those before it.
            for host in reversed(self.hosts):
                host.close()
            self.network.close()
        self.judge()
        return self.report.failed()

    # -- the course of it ------------------------------------------------------------------------

    def measure(self):
        """Lookups that L1 of the first host serves, beside some that no server can, while another host is well, killed and frozen.
        That server and its clients have priority over all else on the machine."""
        first, killed, frozen = self.hosts
        schedule(first.server.process.pid, os.SCHED_RR, 1)
        found = {state: [] for state in STATES}
        for state in STATES * TURNS:
            benches = [self.bench(first, "lookup-hit", 400, 5), self.bench(first, "lookup-miss", 15, 6)]
            time.sleep(1)
            with killed.inside(), frozen.server.frozen() if state == "frozen" else contextlib.nullcontext():
                if state == "killed":
                    killed.server.kill()
                reports = [json.loads(bench.communicate(timeout=60)[0]) for bench in benches]
                if state == "killed":
                    killed.server.start()
            found[state].append([report["rows"][0]["latency_us"]["p99"] / 1000 for report in reports])
            with first.inside():
                wait_until(first.connected, RECOVERED, "connections of peers")
        schedule(first.server.process.pid, os.SCHED_OTHER, 0)
        with first.inside():
            first.clear_all()
        p99 = {state: [statistics.median(column) for column in zip(*rows, strict=True)] for state, rows in found.items()}
        for what, column in (("L1 serves", 0), ("no server can", 1)):
            for state in STATES:
                each = ", ".join(f"{row[column]:.2f}" for row in found[state])
                print(f"p99 of lookups that {what}, one peer {state}: {p99[state][column]:.2f} ms, the median of {each}", flush=True)
        for state in STATES[1:]:
            more = p99[state][0] - p99["healthy"][0]
            self.report.check(f"a peer is {state}", more < 1, f"p99 of lookups that L1 serves: {more:+.2f} ms (allowed: below +1)")

    def bench(self, host, scenario, rate, seconds):
        """Starts requests at a rate."""
        command = [our_command()[0], "bench", host.server.url, "--scenario", scenario, "--prompt-tokens", "256", "--json", "-"]
        command += ["--rate", str(rate), "--duration", f"{seconds}s"]
        with host.inside():
            bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        schedule(bench.pid, os.SCHED_RR, 1)
        return bench

    def play(self, ways, faults):
        """Engines work while faults happen, then they end."""
        for host, way in zip(self.hosts, ways, strict=True):
            with host.inside():
                host.engine(f"{self.seed}/{host.number}", way)
        time.sleep(2)
        faults()
        for host in self.hosts:
            for pid in host.pids.values():
                os.kill(pid, signal.SIGTERM)
        for host in self.hosts:
            host.wait_engines(150)

    def inflict(self, host, fault):
        """A fault, noted."""
        begin = time.monotonic() - self.began
        try:
            getattr(host, fault.kind)(fault)
            self.done[fault.kind] += 1
        except Exception:  # noqa: BLE001
            self.violations.append(Violation("exception", f"{fault} at host {host.number}: {traceback.format_exc()[-1500:]}"))
        with open(self.logs / "faults.log", "a") as log:
            print(f"{begin:6.1f} to {time.monotonic() - self.began:6.1f}: host {host.number}, {fault}", file=log)

    def in_turn(self):
        """Each kind once. After it the others read from that host again, and it from them."""
        for number, kind in enumerate(KINDS):
            host = self.hosts[(self.seed + number) % len(HOSTS)]
            with host.inside():
                self.inflict(host, Fault(time.monotonic() - self.began, kind, 4.0, 0.5))
                sent, began = host.port()["sent_objects"], time.monotonic()

                def is_read(host=host, sent=sent):
                    return host.connected() and host.port()["sent_objects"] > sent

                with contextlib.suppress(TimedOut):
                    wait_until(is_read, RECOVERED, kind, interval=0.1)
                seconds = time.monotonic() - began
                if kind in REFUSED:
                    refused = self.hosts[(host.number + 1) % len(HOSTS)].refused(REFUSED[kind])
                    self.report.check(f"objects of a host that are refused: {kind}", refused, refused)
                self.report.check(f"{kind} of host {host.number}", seconds < RECOVERED, f"its peers read from it again after {seconds:.1f} s")

    def at_random(self):
        """At each host one after the other, at all of them at the same time."""
        with ThreadPoolExecutor(len(HOSTS)) as pool:
            try:
                list(pool.map(self.fail, self.hosts))
            finally:
                self.is_ending.set()

    def fail(self, host):
        """Faults of a host until the end."""
        source = random.Random(f"{self.seed}/{host.number}")
        with host.inside():
            while (left := self.began + self.seconds - time.monotonic()) > 0 and not self.is_ending.wait(min(left, source.uniform(1.0, 8.0))):
                self.inflict(host, Fault(time.monotonic() - self.began, source.choice(KINDS), source.uniform(0.2, 5.0), source.random()))

    def watch(self):
        """Notes what servers have open."""
        while not self.is_ending.wait(0.5):
            for host in self.hosts:
                # A server may be away.
                with contextlib.suppress(OSError, AttributeError):
                    if level := host.level():
                        host.levels.append(level)

    def finish(self):
        """Nothing stays behind."""
        for host in self.hosts:
            with host.inside():
                with contextlib.suppress(TimedOut):
                    wait_until(lambda host=host: not host.left(), IDLE_SECONDS, "nothing to be held", interval=0.2)
                self.violations += [Violation(kind, f"host {host.number}: {text}") for kind, text in host.left()]
                host.clear_all()
        for host in self.hosts:
            segments = host.server.shm_files()
            with host.inside():
                host.stop_server()
            left = [path for path in segments if os.path.exists(path)]
            if left := left + [path.name for path in host.in_memory()]:
                self.violations.append(Violation("leak", f"left in /dev/shm: {left}"))
            for line in EXPECTED_IN_ROUND[""] + EXPECTED:
                host.server.expect_trouble(line)
            self.violations += [Violation("log", f"host {host.number}: {line}") for line in host.server.unexpected_trouble()[:20]]

    # -- what must hold --------------------------------------------------------------------------

    def judge(self):
        """Of all answers."""
        asked = checker.requests(checker.read(sorted(self.logs.glob("host-*/engine-*.jsonl"))))
        wrong = list(checker.check_bytes(asked))
        self.violations += checker.check_answers(asked, self.windows)
        for host in self.hosts:
            if host.levels:
                self.violations += checker.check_levels(host.levels, host.limits(BUSY, {}))
        operations, compared, _ = checker.count(asked)
        count = sum(sum(each.values()) for each in operations.values())
        self.report.check("bytes", not wrong and compared, f"{compared} compared, {count} requests; {len(wrong)} wrong")
        crossed = Counter()
        for request in asked:
            if request.op == "retrieve" and request.result is True:
                stored = [chunk[1] >> 32 for chunk in request.answer["chunks"][1:] if not isinstance(chunk, str)]
                crossed.update((number % 10, request.engine % 10) for number in stored)
        for first, second in [(first, second) for first in HOSTS for second in HOSTS if first != second]:
            self.report.check(f"host {second} hits what host {first} stored", crossed[first, second], f"{crossed[first, second]} chunks")
        met = [request for request in asked if request.op == "lookup" and request.end and not checker.disturbances(request, self.windows)]
        slowest = max((request.end - request.begin for request in met), default=0)
        text = f"{len(met)}, the slowest {slowest:.2f} s (allowed: below {LOOKUP_BOUND})"
        self.report.check("lookups at a host without a fault of its own", slowest < LOOKUP_BOUND, text)
        self.violations += wrong
        self.report.check("all else", not self.violations, f"{len(self.violations)} violations")
        for violation in self.violations[:40]:
            print(f"  {violation.kind}: {violation.text}")
        print(f"faults: {sum(self.done.values())}: {dict(sorted(self.done.items()))}")
        for op, results in sorted(operations.items()):
            print(f"{op}: {dict(sorted(results.items()))}")


def schedule(pid, policy, priority):
    """Sets the scheduling of all threads of a process, and of those that they start."""
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setscheduler(int(task), policy, os.sched_param(priority))


def request(*words):
    """A request of Redis' protocol."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)
