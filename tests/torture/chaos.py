"""The faults of a round, by the names that a plan has for them. Those of tiers are in `backends`."""

import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path

import checker
from actor import HEARTBEAT
from checker import Violation, Window
from kvrig import tiers
from kvrig.waiting import wait_until
from paint import TENANTS

# Seconds in which a server stops: --stop-timeout-seconds and --l2-drain-timeout-seconds.
STOP_SECONDS = 30
# After these an engine registers again with its next heartbeats. The segments of one that is killed before stay: no server sees its end.
AWAY = ("kill", "term", "damage_ledger", "stop", "freeze", "cut")
# Faults of tiers that choose a file; the others last.
OF_FILES = ("flip", "truncate", "remove")


class Faults:
    """What happens to the server, the engines, connections and tiers of a round, which is a subclass."""

    @contextlib.contextmanager
    def window(self, kind, engines=(), removes=False, recovery=checker.RECOVERY):
        """Notes a fault, whose length is that of the block."""
        window = Window(kind, time.monotonic(), float("inf"), tuple(engines), removes, recovery)
        self.windows.append(window)
        try:
            yield window
        finally:
            window.end = time.monotonic()

    def do(self, fault):
        """Inflicts a fault; whether there was anything to inflict it on."""
        for backend in self.backends.values():
            if hasattr(backend, fault.kind):
                method = getattr(backend, fault.kind)
                argument = fault.pick if fault.kind in OF_FILES else fault.length
                with self.window(fault.kind, recovery=checker.BRIEF):
                    return method(argument)
        return getattr(self, fault.kind)(fault) is not False

    def restart(self, fault, end, damage=None):
        """The server ends, is away, and returns; it keeps what it should, but for what `damage()` changes meanwhile."""
        with self.window(fault.kind, removes=not self.plan.restore or damage is not None):
            before = self.kept()
            end()
            if damage:
                damage()
                before.pop("l1", None)
            time.sleep(fault.length / 3)
            self.server.start()
            if "fs" in self.plan.tiers:
                tiers.adopted(self.server)
            self.compare(fault, before)

    def kept(self):
        """What the server's end may not remove, by the names of tiers or `l1`. A disk that may be full keeps what it can."""
        listed = self.server.get("/status")[1]["storage_manager"]["l2_adapters"]
        names = [tier["name"] for kind, tier in zip(self.plan.tiers, listed, strict=True) if kind != "small_fs"]
        found = {name: set(self.objects("l2", name)) for name in names}
        if self.plan.restore and self.plan.keeps_stored:
            found["l1"] = set(self.objects("l1"))
        return found

    def compare(self, fault, before):
        """What was listed before is listed now."""
        excused = self.deleted | (self.backends["fs"].damaged if "fs" in self.plan.tiers else set())
        for tier, keys in before.items():
            after = set(self.objects("l1") if tier == "l1" else self.objects("l2", tier))
            self.compared_objects[tier] += len(keys)
            self.violations += checker.check_kept(keys, after, excused, f"{fault.kind} at {fault.at:.1f}, {tier}")

    def kill(self, fault):
        self.restart(fault, self.server.kill)

    def term(self, fault):
        self.restart(fault, self.stop_server)

    def damage_ledger(self, fault):
        ledgers = [Path(path) for path in self.server.shm_files() if path.endswith(".ledger")]

        def damage():
            for ledger in ledgers:
                flip_written(ledger, fault.pick)

        self.restart(fault, self.server.kill, damage)
        return bool(ledgers)

    def stop_server(self):
        """SIGTERM, and what must hold of a stop."""
        status, seconds = self.server.stop()
        if status != 0 or seconds > STOP_SECONDS:
            self.violations.append(Violation("stop", f"exit status {status} after {seconds:.1f} s"))

    def stop(self, fault):
        with self.window("stop"), self.server.frozen():
            time.sleep(fault.length)

    def hangup(self, fault):
        self.server.process.send_signal(signal.SIGHUP)

    def pick_engine(self, fault):
        """The number of a running engine."""
        return sorted(self.pids)[int(fault.pick * len(self.pids))]

    def engine_kill(self, fault):
        """SIGKILL; another one takes its place."""
        number = self.pick_engine(fault)
        pid = self.pids.pop(number)
        recently = time.monotonic() - 3 * HEARTBEAT
        spec = self.specs[number]
        was_away = any(window.kind in AWAY and window.end > recently for window in self.windows)
        if spec.client == "lmcache" and (self.started[pid] > recently or was_away):
            self.unregistered.add(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.killed.add(number)
        self.start_engine(dataclasses.replace(spec, number=number + 100, seed=f"{spec.seed}+"))

    def engine_stop(self, fault):
        number = self.pick_engine(fault)
        with self.window("engine_stop", [number], recovery=checker.BRIEF):
            os.kill(self.pids[number], signal.SIGSTOP)
            time.sleep(fault.length)
            os.kill(self.pids[number], signal.SIGCONT)

    def proxied(self):
        """Engines behind the proxy."""
        return [number for number, spec in self.specs.items() if spec.is_proxied] or [-1]

    def cut(self, fault):
        with self.window("cut", self.proxied()):
            self.link.say("cut")

    def delay(self, fault):
        with self.window("delay", self.proxied(), recovery=checker.BRIEF):
            self.link.say("delay", fault.pick / 5, fault.length)
            time.sleep(fault.length)

    def freeze(self, fault):
        with self.window("freeze", self.proxied()):
            self.link.say("freeze", int(fault.pick * 2), fault.length)
            time.sleep(fault.length)

    def clear(self, fault):
        with self.window("clear", removes=True, recovery=checker.BRIEF):
            status, answer = self.server.post("/cache/clear", {"force": fault.pick < 0.5})
            assert status == 200, answer

    def delete(self, fault):
        """Some objects, in all tiers."""
        with self.window("delete", removes=True, recovery=checker.BRIEF):
            keys = self.server.get("/cache/objects?tier=l1&page_size=50")[1]["entries"]
            keys = [entry["key"] for entry in keys]
            self.deleted |= {key["chunk_hash_hex"] for key in keys}
            body = {"keys": keys, "tier": "all" if self.plan.tiers else "l1", "force": fault.pick < 0.5}
            status, answer = self.server.request("DELETE", "/cache/objects", body)
            assert status == 200, answer
        return bool(keys)

    def quota(self, fault):
        with self.window("quota", removes=True, recovery=checker.BRIEF):
            salt = TENANTS[int(fault.pick * len(TENANTS))] or "_default"
            body = {"limit_gb": self.plan.l1_mib / 1024 * fault.length / 3}
            status, answer = self.server.request("PUT", f"/quota/{salt}", body)
            assert status == 200, answer


def flip_written(path, pick):
    """Flips a bit of a file that is mostly a hole, in a page that has been written."""
    with open(path, "r+b") as file:
        pages, at = [], 0
        with contextlib.suppress(OSError):
            while True:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
                at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
                pages += range(begin, at, 4096)
        place = pages[int(pick * len(pages))] + int(pick * 1e6) % 4096
        before = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([before[0] ^ 1]), place)
