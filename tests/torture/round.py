"""One round: a server with its tiers, engines, the faults of its plan, and what must hold during it and after it."""

import contextlib
import os
import re
import shutil
import signal
import time
import traceback
from collections import Counter
from pathlib import Path

import actor
import backends
import checker
from chaos import Faults
from checker import Violation
from kvrig import tiers
from kvrig.server import Server, free_port, our_command
from kvrig.waiting import TimedOut, wait_until
from link import Link
from paint import CHUNKS, PROMPTS, TENANTS
from plan import READ_TTL, REAP, SESSION_TTL, WRITE_TTL, EngineSpec

# What a server may have beyond the level after its start: while engines work, and after they have gone.
BUSY = {"descriptors": 400, "threads": 40, "segments": 2, "rss_mib": 200}
IDLE = {"descriptors": 12, "threads": 8, "segments": 0}
# More with a GPU: its driver's threads, and memory that the fake driver shares.
BUSY_GPU, IDLE_GPU = {"threads": 12, "segments": 30}, {"threads": 12, "segments": 1}
# Connections that the client of a Redis or a bucket keeps.
KEPT_CONNECTIONS = 64
# Seconds until nothing is held for engines that were killed: they fall silent, and their memory stays for one more TTL.
IDLE_SECONDS = REAP + 2 * WRITE_TTL + 40

# Lines that faults cause, by kind; the first entry is what a round of any kind may log.
OF_TIERS = r"WARN kvtier_l2(?!.*not what was stored)"
EXPECTED = {
    "": [r"prepared and not committed in time", r"did not commit what they were granted"],
    **dict.fromkeys(["kill", "term", "damage_ledger"], [r"the worker registered with an earlier process of the server", r"the pages are being closed"]),
    "engine_kill": [r"fell silent", r"process has ended", r"registration refused.*living process"],
    **dict.fromkeys(["flip", "truncate", "remove"], [r"WARN kvtier_l2"]),
    **dict.fromkeys(["stop", "base_away", "disk_full", "redis_kill", "redis_stop", "redis_pause", "s3_kill", "s3_stop"], [OF_TIERS]),
}


class Round(Faults):
    """A round in its folder."""

    def __init__(self, plan, logs):
        self.plan, self.logs = plan, logs
        self.windows, self.violations, self.levels = [], [], []
        self.pids, self.killed, self.specs, self.deleted = {}, set(), {}, set()
        self.done, self.compared_objects = [], Counter()
        # Engines by process id: when they started, and those of LMCache's client that were perhaps not registered when they were killed.
        self.started, self.unregistered = {}, set()

    # -- the server ----------------------------------------------------------------------------

    def make_server(self):
        """The server, not started."""
        plan = self.plan
        flags = [
            *plan.flags, "--state-dir", str(self.logs / "state"), "--instance-id", "torture",
            "--l1-restore", "on" if plan.restore else "off", "--l1-write-ttl-seconds", str(WRITE_TTL),
            "--l1-read-ttl-seconds", str(READ_TTL), "--session-ttl-seconds", str(SESSION_TTL),
            "--worker-reap-timeout-seconds", str(REAP), "--worker-registration-grace-seconds", str(REAP),
            *(["--l2-load-timeout-seconds", "5"] if plan.tiers else []),
            *(flag for backend in self.backends.values() for flag in backend.flags),
        ]  # fmt: skip
        server = Server(our_command(), self.logs / "server.log", plan.mode, l1_gb=plan.l1_mib / 1024, flags=flags)
        server.flags = [flag for flag in server.flags if flag]
        return server

    def objects(self, tier, adapter=None):
        """Keys of a tier's objects, as texts, and their sizes; several of a key if they have several layouts."""
        found, token = [], ""
        while token is not None:
            path = f"/cache/objects?tier={tier}&page_size=5000" + (f"&adapter={adapter}" if adapter else "") + (f"&page_token={token}" if token else "")
            # A directory that was away is found again within a second.
            status, page = wait_until(lambda path=path: (answer := self.server.get(path))[0] == 200 and answer, 30, f"GET {path}")
            for entry in page["entries"]:
                key = entry["key"]
                text = "{model_name}@{kv_rank}@{object_group_id}@{chunk_hash_hex}@{cache_salt}".format(**key)
                found.append((text, entry["size_bytes"]))
            token = page["next_page_token"]
        return found

    def level(self):
        """What the process has open."""
        proc = Path(f"/proc/{self.server.process.pid}")
        with contextlib.suppress(OSError):
            rss = int(re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())[1]) / 1024
            return {
                "descriptors": len(list((proc / "fd").iterdir())),
                "threads": len(list((proc / "task").iterdir())),
                "segments": len(self.server.shm_files()),
                "rss_mib": rss,
            }
        return None

    def limits(self, usual, with_gpu):
        """What the server may have: that much more than after its start. L1 is touched in the background."""
        more = {name: count + (with_gpu.get(name, 0) if self.plan.mode == "all" else 0) for name, count in usual.items()}
        if {"redis", "s3"} & {*self.plan.tiers}:
            more["descriptors"] += KEPT_CONNECTIONS
        return {name: count + (self.plan.l1_mib if name == "rss_mib" else self.first_level[name]) for name, count in more.items()}

    def idle_state(self):
        """What is held for engines, and bytes by all that count them."""
        status = self.server.get("/status")[1]
        l1 = status["storage_manager"]["l1_manager"]
        usage = {salt: self.server.get(f"/quota/{salt or '_default'}")[1]["tiers"] for salt in TENANTS}
        state = {
            "leased": l1["read_locked_count"], "being written": l1["write_locked_count"], "staging bytes": l1["staging_bytes"],
            "pending transfers": status["pending_transfers"], "withheld transfers": status["withheld_transfers"],
            "sessions": status["active_sessions"], "connections": status["request_port"]["connections"],
            "instances": len(status["cache_context_meta"]) + len(status["non_cuda_context_meta"]),
            "accounting errors": l1["accounting_errors"] + int(tiers.metric(self.server, "kvtier_accounting_errors_total")),
            "panics": int(tiers.metric(self.server, "kvtier_handler_panics_total")),
            "bytes of l1": {
                "status": l1["memory_used_bytes"],
                "listing": sum(-(-size // 4096) * 4096 for _, size in self.objects("l1")),
                "tenants": sum(each["l1"]["usage_bytes"] for each in usage.values()),
                "total - free": l1["memory_total_bytes"] - l1["memory_free_bytes"],
            },
        }  # fmt: skip
        for tier in status["storage_manager"]["l2_adapters"]:
            name = tier["name"]
            state[f"bytes of {name}"] = {"status": tier["current_size_bytes"], "tenants": sum(each[name]["usage_bytes"] for each in usage.values())}
        return state

    # -- the course of it ------------------------------------------------------------------------

    def start_engine(self, spec, work=actor.Actor.work):
        """Forks an engine."""
        self.specs[spec.number] = spec
        url = self.link.url if spec.is_proxied else self.server.url
        self.pids[spec.number] = pid = actor.start(spec, url, self.logs, work)
        self.started[pid] = time.monotonic()

    def wait_engines(self, timeout):
        """Waits until all have ended well; kills the others."""
        deadline = time.monotonic() + timeout
        for number, pid in list(self.pids.items()):
            ended = 0
            while not ended and time.monotonic() < deadline:
                ended, status = os.waitpid(pid, os.WNOHANG)
                time.sleep(0 if ended else 0.02)
            if not ended:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            if status:
                self.violations.append(Violation("engine", f"engine {number} ended with {status:#x}: see engine-{number}.log"))
        self.pids.clear()

    def run(self):
        """All of it; the violations."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.backends, self.server, self.link = {}, None, None
        try:
            for kind in self.plan.tiers:
                self.backends[kind] = backends.KINDS[kind](self.logs / kind)
            self.server = self.make_server()
            self.server.start()
            if "fs" in self.plan.tiers:
                tiers.adopted(self.server)
            self.first_level = self.level()
            self.link = Link(free_port(), self.server.port)
            self.play()
            self.finish()
        except Exception as error:  # noqa: BLE001
            self.violations.append(Violation("exception", f"{error!r}: {traceback.format_exc()[-1500:]}"))
        finally:
            self.close()
        events = checker.read(sorted(self.logs.glob("engine-*.jsonl")))
        asked = checker.requests(events)
        self.violations += checker.check_bytes(asked)
        self.violations += checker.check_answers(asked, self.windows, self.killed, self.plan.is_roomy)
        self.violations += checker.check_audits(events)
        if self.levels:
            self.violations += checker.check_levels(self.levels, self.limits(BUSY, BUSY_GPU))
        self.operations, self.compared, self.slowest = checker.count(asked)
        return self.violations

    def play(self):
        """Engines and faults."""
        for spec in self.plan.engines:
            self.start_engine(spec)
        began = time.monotonic()
        for fault in [*self.plan.faults, None]:
            while time.monotonic() < began + (fault.at if fault else self.plan.seconds):
                if level := self.level():
                    self.levels.append(level)
                self.watch()
                time.sleep(0.1)
            if fault and time.monotonic() < began + self.plan.seconds:
                at, is_done = time.monotonic(), self.do(fault)
                with open(self.logs / "faults.log", "a") as log:
                    print(f"{at - began:6.2f} to {time.monotonic() - began:6.2f} ({at:.2f}) {fault} {is_done}", file=log)
                if is_done:
                    self.done.append(fault.kind)

    def watch(self):
        """The server and the engines live."""
        if not self.server.running():
            raise AssertionError(f"the server has died:\n{self.server.tail()}")
        for number, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[number]
                raise AssertionError(f"engine {number} ended with {status:#x}: see engine-{number}.log")

    def finish(self):
        """Engines leave; nothing stays behind but what was stored."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGTERM)
        self.wait_engines(150)
        if self.plan.tiers:
            tiers.settled(self.server)
        asked = checker.requests(checker.read(sorted(self.logs.glob("engine-*.jsonl"))))
        # In a small L1, and behind a quota, anything may have been evicted.
        kept = checker.guaranteed(asked, self.windows) if self.plan.keeps_stored else set()
        for model in sorted({spec.model for spec in self.plan.engines}):
            mode = ["engine_driven", "lmcache_driven", "cuda"][model // 2]
            wanted = checker.wanted_prompts(kept, model, len(TENANTS), PROMPTS, CHUNKS)
            self.start_engine(EngineSpec(1000 + model, "lmcache", mode, model, False, "audit"), lambda engine, wanted=wanted: engine.audit(wanted))
        self.wait_engines(150)
        self.link.close()
        self.link = None
        with contextlib.suppress(TimedOut):
            wait_until(lambda: not list(checker.check_idle(self.idle_state())), IDLE_SECONDS, "nothing to be held", interval=0.2)
        self.violations += checker.check_idle(self.idle_state())
        self.violations += checker.check_levels([self.level()], self.limits(IDLE, IDLE_GPU))
        self.clear_all()
        segments = self.server.shm_files()
        self.stop_server()
        if self.plan.restore:
            # The next server without it removes what was kept for it.
            self.server.flags[self.server.flags.index("--l1-restore") + 1] = "off"
            self.server.start()
            segments |= self.server.shm_files()
            self.stop_server()
        left = [path for path in segments if os.path.exists(path)]
        # A killed engine's counters are PyTorch's to remove.
        left += [path.name for path in self.in_memory(self.unregistered) if not path.name.startswith("torch_")]
        if left:
            self.violations.append(Violation("leak", f"left in /dev/shm: {left}"))
        for kind in ("fs", "small_fs"):
            if kind in self.backends and (found := tiers.temporary(self.backends[kind].path)):
                self.violations.append(Violation("leak", f"temporary files: {found[:5]}"))
        for expected in EXPECTED[""] + [line for kind in {*self.done} for line in EXPECTED.get(kind, [])]:
            self.server.expect_trouble(expected)
        for line in self.server.unexpected_trouble()[:20]:
            self.violations.append(Violation("log", line))

    def in_memory(self, without=()):
        """What is in /dev/shm of this round: of the server, and of engines by their process ids."""
        pids = "|".join(map(str, self.started.keys() - without)) or "none"
        names = [rf"lmcache_l1_pool_{self.server.shm_name}(\.ledger)?", rf"lmcache_kv_({pids})_.*", rf"torch_\d+_({pids})_.*"]
        with contextlib.suppress(OSError):
            names.append(rf"kvtier_.*_{(self.logs / 'state' / 'torture' / 'id').read_text()}")
        return [path for path in Path("/dev/shm").iterdir() if re.fullmatch("|".join(names), path.name)]

    def clear_all(self):
        """L1 can be emptied to the last byte, into one piece."""
        status, answer = self.server.post("/cache/clear", {"force": True})
        assert status == 200, answer
        l1 = self.server.get("/status")[1]["storage_manager"]["l1_manager"]
        if l1["total_object_count"] or l1["memory_used_bytes"] or l1["memory_largest_free_bytes"] != l1["memory_total_bytes"]:
            self.violations.append(Violation("leak", f"L1 is not empty after a clear: {l1}"))

    def close(self):
        """Ends what still runs."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if self.link:
            self.link.close()
        if self.server:
            segments = self.server.shm_files() if self.server.running() else ()
            self.server.kill()
            # Of a round that has failed, all of it; otherwise only what killed engines have left to PyTorch.
            for path in {*self.in_memory(), *map(Path, segments)}:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        for backend in self.backends.values():
            backend.close()
