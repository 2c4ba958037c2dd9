#!/usr/bin/env python3
"""A real vLLM on CPU whose OffloadingConnector has kvtier's tier below its host memory.

  tiered.py --package DIR             the gate's case; DIR has the Python package kvtier
  tiered.py --package DIR --more      those beside the gate
  tiered.py --package DIR NAME ...    these

Engines are forked from one process that has imported vLLM, as in tests/trust. Exit status: 0 when every check passed.
"""

import argparse
import contextlib
import glob
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / each) for each in ("harness", "vllm", "trust")]

import forked
from engine import cores_of_each
from forked import Died, Engine, prompt_of
from kvrig import tiers
from kvrig.report import Report
from kvrig.server import Server, our_command
from kvrig.waiting import wait_until

BLOCK = 32
PROMPT = 1100
WHOLE = PROMPT // BLOCK * BLOCK
MIB = 1 << 20
# Bytes of KV per token of the model llama, in float32.
TOKEN_BYTES = 4096
LOOKUP_TIMEOUT, TIMEOUT = 1.0, 3.0
# Seconds that no call of a tier on the scheduler's thread may take, however busy the machine is.
WAIT = 0.3
# A trace in which most prompts are asked again soon or never, and the first ones often. Half of it fits.
SESSIONS, REQUESTS, RESTART = 64, 160, 120
COMMON, COMMON_SHARE = 4, 0.3
PRIMARY_MIB, L1_MIB, DISK_MIB = 32, 16, 48
# Files of vLLM's host memory.
REGIONS = "/dev/shm/vllm_offload_{}.mmap"
KEYS = 128
CASES = {}


class Inside(forked.Inside):
    """The engine's side, with what a tier's calls took."""

    def __init__(self, *args):
        from vllm import envs

        # Workers; an attribute takes precedence over the environment, where vLLM's CPU platform writes "spawn".
        envs.VLLM_WORKER_MULTIPROC_METHOD = "fork"
        super().__init__(*args)
        self.scheduler = self.engine.engine_core.engine_core.scheduler

    def tier(self):
        """The first tier."""
        return self.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]

    def is_served(self):
        """Whether the tier uses the server."""
        return self.tier()._check_server()

    def figures(self, rounds):
        """Milliseconds of the scheduler's thread for all that it does for the lookups of 128 new keys, missed and hit, and of a load of
        them beside a copy of as many bytes in memory, the least of some rounds each."""
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        tier, best = self.tier(), {}
        context = ReqContext("figures")
        view = np.asarray(tier._primary_kv_view).view(np.uint8)
        view[:] = np.random.default_rng(1).integers(0, 255, view.shape[1], np.uint8)
        target = np.empty((KEYS, view.shape[1]), np.uint8)
        target[:] = 1
        numbers = itertools.count(1 << 40)

        wait_until(lambda: tier._check_server() and tier._features is None, 60, "the server")

        def note(name, seconds):
            best[name] = min(best.get(name, 1e9), 1000 * seconds)

        def lookups(keys):
            """Two steps, between which the server answers."""
            own, began = 0.0, time.perf_counter()
            tier.on_new_request(context)
            for key in keys:
                tier.lookup(key, context)
            tier.on_schedule_end(None)
            own += time.perf_counter() - began
            wait_until(lambda: all(find.future.done() for find in tier._finds), 5, "an answer", 0.0005)
            began = time.perf_counter()
            found = [tier.lookup(key, context) for key in keys]
            tier.on_schedule_end(None)
            return own + time.perf_counter() - began, {each.name for each in found}

        def moved(keys, is_load):
            job = TransferJob(next(numbers), keys, np.arange(KEYS, dtype=np.int32), is_load, context)
            began = time.perf_counter()
            (tier.submit_load if is_load else tier.submit_store)(job)
            submitted = time.perf_counter() - began
            results = []
            while not results:
                tier._take(0.1)
                results = tier.get_finished_jobs()
            assert [(each.job_id, each.success) for each in results] == [(job.job_id, True)], results
            return submitted, time.perf_counter() - began

        for number in range(20 * rounds):
            keys = [os.urandom(36) for _ in range(KEYS)]
            seconds, found = lookups(keys)
            assert found == {"MISS"}, found
            note("lookups of 128 keys that miss", seconds)
            if number < rounds:
                note("store of 128 keys", moved(keys, False)[1])
                stored = keys
            tier.on_request_finished(context)
        for number in range(20 * rounds):
            seconds, found = lookups(stored)
            assert found == {"HIT"}, found
            note("lookups of 128 keys that hit", seconds)
            if number < rounds:
                submitted, seconds = moved(stored, True)
                note("submission of a load of 128 keys", submitted)
                note("load of 128 keys", seconds)
                began = time.perf_counter()
                np.copyto(target, view[:KEYS])
                note(f"copy of {target.nbytes >> 20} MiB in memory", time.perf_counter() - began)
            tier.on_request_finished(context)
        return best

    def timed(self, prompt, broken=None):
        """An answer, its seconds, and the longest call of the tier meanwhile. `broken`: a process, and the signal that it gets at the
        first load."""
        tier, calls, load = self.tier(), [0.0], self.tier().submit_load

        def breaks(job):
            nonlocal broken
            if broken:
                os.kill(*broken)
                broken = None
            load(job)

        tier.submit_load = breaks

        def measured(method):
            def call(*args):
                began = time.perf_counter()
                try:
                    return method(*args)
                finally:
                    calls.append(time.perf_counter() - began)

            return call

        names = ("lookup", "on_schedule_end", "get_finished_jobs", "submit_store", "submit_load", "on_request_finished")
        for name in names:
            setattr(tier, name, measured(getattr(tier, name)))
        began = time.monotonic()
        try:
            [answer] = self.ask([prompt])
        finally:
            for name in names:
                delattr(tier, name)
        return answer, time.monotonic() - began, max(calls)


class Case:
    """One case: its servers and engines, which end with it, and named checks."""

    def __init__(self, name, options, report):
        self.name, self.options, self.report = name, options, report
        self.logs = options.logs / name
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        self.engines, self.servers = [], []
        self.numbers, self.prefix = itertools.count(), f"tiered-{os.getpid()}-{name}"

    def check(self, name, ok, detail):
        """Note one result."""
        self.report.check(f"tiered/{self.name}/{name}", ok, detail)

    def server(self, l1_mib=256, flags=()):
        """A running server."""
        server = Server(our_command(), self.logs / f"server-{len(self.servers)}.log", "engine_shm", l1_gb=l1_mib / 1024, flags=flags)
        self.servers.append(server)
        server.start()
        return server

    def engine(self, server, model="llama", tier=None, extra=None, ours=True, primary_mib=64, **options):
        """An engine over a server's tier, or over another `tier`; `ours`: with kvtier's form of the connector."""
        tier = tier or {"type": "KvTier", "module_path": "kvtier.vllm.tier", "url": server.url, "heartbeat": 1, "lookup_timeout": LOOKUP_TIMEOUT, "timeout": TIMEOUT}
        connection = {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": f"{self.prefix}-{next(self.numbers)}",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering", "cpu_bytes_to_use": primary_mib * MIB,
                "secondary_tiers": [tier], **(extra or {}),
            },
        }  # fmt: skip
        if ours:
            connection["kv_connector_module_path"] = "kvtier.vllm.tier"
        defaults = {"block_size": BLOCK, "num_gpu_blocks_override": 256, "enable_prefix_caching": True}
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_each(options.get("tensor_parallel_size", 1))
        path = model if isinstance(model, Path) else self.options.models / model
        made = Engine(f"engine-{len(self.engines)}", self.logs, path, connection, **defaults | options)
        self.engines.append(made)
        return made

    def hits(self, name, engine, prompts, hit, **options):
        """Each prompt loads `hit` tokens, and its answer is that of the same engine alone."""
        answers = [(engine.ask(prompt, **options), engine.alone(prompt)) for prompt in prompts]
        wrong, loaded = sum(one.ids != alone.ids for one, alone in answers), [one.external for one, _ in answers]
        self.check(name, not wrong and all(each == hit for each in loaded), f"{wrong} of {len(prompts)} answers wrong, tokens loaded {loaded}, expected {hit} each")

    @contextlib.contextmanager
    def running(self):
        """End everything with the case; whatever goes wrong is a failed check."""
        try:
            yield
        except Exception as problem:
            self.check("runs-to-the-end", False, repr(problem))
        for engine in self.engines:
            engine.leave()
        for engine in self.engines:
            engine.stop()
        left = glob.glob(REGIONS.format(f"{self.prefix}-*"))
        self.check("nothing-left", not left, left)
        for server in self.servers:
            if server.running():
                status, _ = server.stop()
                self.check("server", status == 0 and not server.unexpected_trouble(), server.unexpected_trouble()[:3])


def case(function):
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


# proves: docs/vllm.md#below-vllms-offloadingconnector
@case
def attention(case):
    """A second engine hits all that the first has stored, and no other tenant does."""
    server, prompts = case.server(), [prompt_of(f"tier-{number}", PROMPT) for number in range(3)]
    first = case.engine(server)
    case.hits("misses", first, prompts, 0)
    first.ask(prompts[0], salt="alice")
    first.stop()
    second = case.engine(server)
    case.hits("hits", second, prompts, WHOLE)
    case.hits("salt-hits", second, prompts[:1], WHOLE, salt="alice")
    case.hits("other-salt-misses", second, prompts[:1], 0, salt="bob")
    # Each request asks once, also those that are compared with.
    finds, failed = (second.call("metric", f"vllm:kv_offload_kvtier_{name}") for name in ("finds", "failed_finds"))
    case.check("metrics", finds == 10 and failed == 0, f"{finds:.0f} lookups sent, {failed:.0f} failed")


@case
def windows(case):
    """Groups of layers with windows: one object for each key and group."""
    engines(case, "windows")


@case
def states(case):
    """Recurrent states."""
    engines(case, "states", hit=PROMPT // 256 * 256, dtype="bfloat16", block_size=None)


def engines(case, model="llama", hit=WHOLE, second=None, **options):
    """An engine, with the options `second` if there are any, hits what the first has stored."""
    server, prompts = case.server(), [prompt_of(f"{case.name}-{number}", PROMPT) for number in range(3)]
    first = case.engine(server, model, **options)
    case.hits("misses", first, prompts, 0)
    first.stop()
    case.hits("hits", case.engine(server, model, **(options if second is None else second)), prompts, hit)


# proves: docs/vllm.md#below-vllms-offloadingconnector
@case
def checkpoints(case):
    """Two checkpoints under one path share nothing; a tier without a name of the model is refused."""
    server, prompts, path = case.server(), [prompt_of(f"checkpoints-{number}", PROMPT) for number in range(2)], case.logs / "model"
    for model in ("llama", "llama-other-weights"):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(case.options.models / model, path)
        engine = case.engine(server, path)
        case.hits(f"{model}-misses", engine, prompts, 0)
        engine.stop()
    engine = case.engine(server, path)
    case.hits("same-weights-hit", engine, prompts, WHOLE)
    engine.stop()
    try:
        case.engine(server, ours=False)
        case.check("unnamed-is-refused", False, "it started")
    except Died as problem:
        case.check("unnamed-is-refused", "model_name" in str(problem), str(problem)[:300])
    # vLLM leaves its host memory behind a failed start.
    [path] = glob.glob(REGIONS.format(f"{case.prefix}-*"))
    os.unlink(path)


@case
def workers(case):
    """Two tensor-parallel ranks: a row has the KV of both."""
    engines(case, tensor_parallel_size=2)


# proves: docs/vllm.md#below-vllms-offloadingconnector
@case
def canonical(case):
    """With a canonical layout, one rank loads what two have stored."""
    extra = {"canonical_layout": True}
    engines(case, tensor_parallel_size=2, extra=extra, second={"extra": extra})


# proves: docs/vllm.md#below-vllms-offloadingconnector
@case
def failures(case):
    """A server that hangs, dies and returns: the same answers, no call waits, and no request waits longer than a lookup may take."""
    server = case.server()
    prompts = [prompt_of(f"failures-{number}", PROMPT) for number in range(7)]
    first = case.engine(server)
    alone = [first.alone(prompt) for prompt in prompts]
    for prompt in prompts:
        first.ask(prompt)
    first.stop()
    engine = case.engine(server)
    usual = engine.call("timed", prompts[0])

    def check(name, prompt, hit, broken=None):
        answer, seconds, longest = engine.call("timed", prompt, broken)
        right = answer.ids == alone[prompts.index(prompt)].ids and answer.external == hit
        bounded = seconds < usual[1] + LOOKUP_TIMEOUT + 1 + (TIMEOUT if broken else 0) and longest < WAIT
        case.check(name, right and bounded, f"{answer.external} tokens loaded in {seconds:.2f} s, longest call {1000 * longest:.1f} ms")

    check("hits", prompts[1], WHOLE)
    with server.frozen():
        check("frozen", prompts[2], 0)
    wait_until(lambda: engine.call("is_served"), 60, "the server")
    check("frozen-in-a-load", prompts[3], 0, (server.process.pid, signal.SIGSTOP))
    server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: engine.call("is_served"), 60, "the server")
    check("killed-in-a-load", prompts[4], 0, (server.process.pid, signal.SIGKILL))
    check("killed", prompts[5], 0)
    server.kill()
    server.start()
    wait_until(lambda: engine.call("is_served"), 60, "the next server")
    check("restarted", prompts[6], 0)
    case.hits("hits-after-restart", case.engine(server), prompts[6:7], WHOLE)


@case
def beside_fs(case):
    """Hits after a restart of the engine, of a trace with more KV than fits, beside vLLM's own tier `fs` with the same memory and disk."""
    source, trace = random.Random("trace"), []
    for at in range(REQUESTS):
        newest = at * SESSIONS // REQUESTS
        is_common = source.random() < COMMON_SHARE
        trace.append(source.randrange(COMMON) if is_common else max(0, newest - int(source.expovariate(1 / 8))))
    prompts, found = [prompt_of(f"trace-{number}", 548) for number in range(SESSIONS)], {}
    fits = case.logs / "disk"
    fits.mkdir()
    for tier in ("fs", "kvtier"):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(fits)]
        if subprocess.run(mount, check=False).returncode:
            print(f"SKIP tiered/{case.name}: no tmpfs can be mounted", flush=True)
            return
        try:
            if tier == "fs":
                options = {"server": None, "tier": {"type": "fs", "root_dir": str(fits), "n_read_threads": 2, "n_write_threads": 2}, "ours": False}
                options |= {"primary_mib": PRIMARY_MIB + L1_MIB}
            else:
                limit = {"max_capacity_gb": (DISK_MIB - 2) / 1024, "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.97, "eviction_ratio": 0.03}}
                options = {"server": case.server(L1_MIB, [*tiers.fs(fits, **limit), "--eviction-trigger-watermark", "0.95", "--eviction-ratio", "0.05"]), "primary_mib": PRIMARY_MIB}
            options |= {"num_gpu_blocks_override": 40, "max_model_len": 1024}
            engine, loaded = case.engine(**options), []
            for at, number in enumerate(trace):
                if at == RESTART:
                    engine.stop()
                    used = shutil.disk_usage(fits).used // MIB
                    engine = case.engine(**options)
                loaded.append(engine.ask(prompts[number]).external)
            found[tier] = sum(loaded[:RESTART]), sum(loaded[RESTART:])
            engine.stop()
            print(f"FIGURE {tier}: {found[tier][1]} tokens hit after the restart, {found[tier][0]} before it, {used} MiB of disk at it", flush=True)
            if tier == "kvtier":
                case.servers[-1].stop()
        finally:
            subprocess.run(["umount", "-l", str(fits)], check=True)
    kib = 548 // BLOCK * BLOCK * TOKEN_BYTES // 1024
    detail = f"{found['kvtier'][1]} tokens, {found['fs'][1]} with fs, of {(REQUESTS - RESTART) * (548 // BLOCK * BLOCK)}; {SESSIONS} prompts of {kib} KiB"
    case.check("hits-after-restart", found["kvtier"][1] >= found["fs"][1] > 0, detail)


@case
def figures(case):
    """What 128 lookups take of the scheduler's thread, and a load of 64 MiB beside a copy in memory."""
    engine = case.engine(case.server(l1_mib=1024), block_size=128, primary_mib=96, num_gpu_blocks_override=48)
    best = engine.call("figures", 10)
    for name, milliseconds in best.items():
        print(f"FIGURE {name}: {milliseconds:.3f} ms", flush=True)
    longest = max(best["lookups of 128 keys that miss"], best["lookups of 128 keys that hit"])
    case.check("lookups", longest < 0.3, f"{longest:.3f} ms")


def arguments():
    """The command line."""
    home = Path(os.environ.get("KVTIER_E2E_HOME") or os.path.expanduser("~/.cache/kvtier-e2e"))
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--more", action="store_true", help="all but the gate's")
    parser.add_argument("--package", required=True, type=Path, help="directory with the Python package kvtier")
    parser.add_argument("--models", type=Path, default=home / "models-trust", help="made by tests/trust/models.py")
    parser.add_argument("--logs", type=Path, default=home / "logs" / "tiered")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(CASES):
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    chosen.names = chosen.names or ([name for name in CASES if name != "attention"] if chosen.more else ["attention"])
    chosen.logs = chosen.logs.resolve()
    return chosen


def main():
    """Run the cases one after the other."""
    options, began, report = arguments(), time.monotonic(), Report()
    # As tests/vllm/patches for two workers.
    os.sched_yield = lambda: time.sleep(0.0001)
    print(f"# vLLM {forked.prepare(options.package)[1]}, imported in {time.monotonic() - began:.0f} s", flush=True)
    forked.Inside = Inside
    for name in options.names:
        started, made = time.monotonic(), Case(name, options, report)
        with made.running():
            CASES[name](made)
        print(f"# {name}: {time.monotonic() - started:.0f} s", flush=True)
    failed = report.failed()
    print(f"tiered: {len(report.rows) - failed} passed, {failed} failed ({time.monotonic() - began:.0f} s)")
    return 1 if failed or not report.rows else 0


if __name__ == "__main__":
    sys.exit(main())
