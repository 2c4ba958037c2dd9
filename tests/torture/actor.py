"""An engine in a process of its own: it stores, looks up and retrieves at random until it is ended, checks every byte that it
gets, and writes what it asked and what was answered into a file that survives its death."""

import atexit
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from types import SimpleNamespace

import torch
from kvrig.engine import Engine as LMCacheEngine
from kvrig.engine import Group
from kvrig.gpu import GpuEngine
from kvrig.waiting import TimedOut, wait_until

import rig
from paint import CHUNK_TOKENS, CHUNKS, LAYOUT, MODELS, PROMPTS, TENANTS, identity, read_chunks, rows, tokens
from kvrig.layouts import BLOCK_TOKENS, NUM_BLOCKS

HEARTBEAT = 3.0
# Seconds after which a request counts as never answered.
NEVER = 90.0
# Blocks that prompts are stored from and loaded into; between and behind them is what nothing may write.
SOURCE, TARGET = 1, 32
GUARDS = [0, *range(SOURCE + CHUNKS * 4, TARGET), *range(TARGET + CHUNKS * 4, NUM_BLOCKS)]
UNTOUCHED, UNLOADED = 0x5A, 0xEE


class OfLMCache:
    """LMCache's adapters."""

    def __init__(self, url, spec):
        server = SimpleNamespace(url=url, chunk=CHUNK_TOKENS)
        kind, mode = (GpuEngine, "lmcache_driven") if spec.mode == "cuda" else (LMCacheEngine, spec.mode)
        self.engine = kind(server, mode, [Group(LAYOUT)], MODELS[spec.model], heartbeat=HEARTBEAT, mq_timeout=12.0, seed=spec.number)
        self.engine.deadline = NEVER
        self.worker = self.engine.worker
        self.close, self.lookup = self.engine.close, self.engine.lookup
        self.end, self.abandon = self.engine.end, self.engine.abandon

    def store(self, request, prompt, start, end, blocks, salt):
        """True, False, or None if it was not answered because the server was away."""
        adapter = self.worker.adapter
        self.worker.submit_store(request, prompt, start, end, blocks, salt)
        future = self.worker.stores.pop(request)

        def ended():
            adapter.get_finished(set())
            return future is None or future.query() or request not in adapter.store_futures

        wait_until(ended, NEVER, "store")
        self.worker.held_events.pop(request, None)
        if future is not None and future.query():
            return future.result(timeout=0)
        self.registered_again()
        return None

    def retrieve(self, request, prompt, end, blocks, salt, skip):
        """Whether the blocks are loaded."""
        is_loaded = self.worker.retrieve(request, prompt, 0, end, blocks, salt, skip).ok
        if not is_loaded:
            self.registered_again()
        return is_loaded

    def registered_again(self):
        """This client abandons what it has sent when it believes the server away, and a server that was only stopped may still
        read or write those blocks: they are left alone until the worker has registered again, which ends that."""
        if not self.worker.adapter.is_healthy:
            wait_until(lambda: STOPPING or self.worker.adapter.is_healthy, NEVER, "registration again")

    @property
    def is_healthy(self):
        """Whether requests are sent."""
        return self.engine.scheduler.is_healthy and self.worker.adapter.is_healthy

    def read(self, blocks):
        return self.worker.read(blocks)

    def write(self, blocks, content):
        if not isinstance(self.engine, GpuEngine):
            self.worker.write(blocks, content)
            return
        self.worker.pull()
        self.worker.write(blocks, content)
        self.worker.push()

    def fill(self, blocks, value):
        self.worker.fill(blocks, value)


class OfKvTier:
    """kvtier's own adapters."""

    def __init__(self, url, spec):
        self.engine = rig.Engine(url, spec.mode, LAYOUT, timeout=10.0, store_timeout=10.0, heartbeat=HEARTBEAT, model=MODELS[spec.model],
                                 seed=spec.number)  # fmt: skip
        self.close, self.read, self.fill = self.engine.close, self.engine.read, self.engine.fill
        self.numbers = itertools.count()

    def lookup(self, prompt, salt):
        """(request id, hit tokens)."""
        request = f"{os.getpid()}-{next(self.numbers)}"
        return request, self.engine.lookup(request, prompt, salt, NEVER)

    def store(self, request, prompt, start, end, blocks, salt):
        """True, also if the server has the chunks already; False for a failed one; None if nothing was sent."""
        counters = self.engine.worker.counters
        before = counters.stores + counters.skipped_stores, counters.failed_stores
        self.engine.store(request, prompt, start, end, blocks, salt)
        after = counters.stores + counters.skipped_stores, counters.failed_stores
        return None if after == before else after[1] == before[1]

    def retrieve(self, request, prompt, end, blocks, salt, skip):
        """Whether the blocks are loaded."""
        return not self.engine.retrieve(request, prompt, 0, end, blocks, salt, skip, NEVER)

    def end(self, request):
        self.engine.scheduler.end_session(request)

    def abandon(self, request, prompt, salt):
        """Releases what a lookup has found."""
        self.engine.scheduler.free_lookup_locks(request, start=0, end=len(prompt), token_ids=prompt, cache_salt=salt)
        self.end(request)

    @property
    def is_healthy(self):
        """Whether requests are sent."""
        return self.engine.scheduler.is_healthy and self.engine.worker.is_healthy

    def write(self, blocks, content):
        for tensor, layer in zip(self.engine.tensors, content, strict=True):
            rig.layouts.write_blocks(tensor, LAYOUT.block_axis, blocks, layer)


CLIENTS = {"lmcache": OfLMCache, "kvtier": OfKvTier}
STOPPING = []


class Actor:
    """The requests of an engine."""

    def __init__(self, spec, url, path):
        self.spec, self.source = spec, random.Random(spec.seed)
        self.out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.numbers = itertools.count(1)
        self.client = None
        while self.client is None and not STOPPING:
            # The server may be away at the start.
            try:
                self.client = CLIENTS[spec.client](url, spec)
            except Exception as error:  # noqa: BLE001
                self.note(op="connect", error=str(error)[:200])
        if self.client:
            self.client.fill(GUARDS, UNTOUCHED)

    def note(self, **event):
        """One line; a single write survives a kill whole or not at all."""
        event = {"engine": self.spec.number, "t": time.monotonic(), **event}
        os.write(self.out, json.dumps(event).encode() + b"\n")

    def ask(self, op, request, **about):
        """Sends a request: `request()` returns the answer's fields."""
        number = next(self.numbers)
        self.note(begin=number, op=op, client=self.spec.client, **about)
        try:
            answer = request(number)
        except TimedOut as error:
            answer = {"result": "never", "error": str(error)}
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            answer = {"result": "error", "error": repr(error)[:300]}
        self.note(end=number, healthy=self.client.is_healthy, **answer)
        return answer

    def store(self, tenant, prompt, first, last, request=None):
        """Stores chunks from `first` to `last`, painted with a version of their own."""
        owners = [identity(tenant, self.spec.model, prompt, chunk) for chunk in range(first, last)]
        blocks = list(range(SOURCE + 4 * first, SOURCE + 4 * last))

        def send(number):
            version = self.spec.number << 32 | number
            self.client.write(blocks, [rows(owners, version, layer) for layer in range(3)])
            name = request or f"store-{os.getpid()}-{number}"
            prompt_tokens = tokens(prompt, last)
            result = self.client.store(name, prompt_tokens, first * CHUNK_TOKENS, last * CHUNK_TOKENS, blocks, TENANTS[tenant])
            if request is None:
                self.client.end(name)
            return {"result": result}

        self.ask("store", send, tenant=tenant, model=self.spec.model, prompt=prompt, first=first, last=last)

    def lookup(self, tenant, prompt, chunks=CHUNKS):
        """(request id, chunks found)."""
        box = []

        def send(_):
            # As prompts have, with tokens behind the last whole chunk; by them a server that has returned knows the chunk size.
            tail = [self.source.randrange(1 << 17) for _ in range(self.source.randrange(CHUNK_TOKENS))]
            request, hit = self.client.lookup(tokens(prompt, chunks) + tail, salt=TENANTS[tenant])
            box.append(request)
            return {"result": hit}

        hit = self.ask("lookup", send, tenant=tenant, model=self.spec.model, prompt=prompt, last=chunks)["result"]
        return (box[0], hit // CHUNK_TOKENS) if isinstance(hit, int) else (None, 0)

    def retrieve(self, request, tenant, prompt, last, skip=0):
        """Loads the first `last` chunks but for `skip` blocks, and reads what is there then."""
        blocks = list(range(TARGET, TARGET + 4 * last))

        def send(_):
            self.client.fill(blocks, UNLOADED)
            is_loaded = self.client.retrieve(request, tokens(prompt, last), last * CHUNK_TOKENS, blocks, TENANTS[tenant], skip * BLOCK_TOKENS)
            answer = {"result": is_loaded}
            if is_loaded:
                whole = -(-skip // 4)
                answer["chunks"] = [whole, *read_chunks(self.client.read(blocks[4 * whole :]))] if whole < last else [whole]
            skipped = not skip or is_filled(self.client.read(blocks[:skip]), UNLOADED)
            answer["stray"] = not (skipped and is_filled(self.client.read(GUARDS), UNTOUCHED))
            return answer

        self.ask("retrieve", send, tenant=tenant, model=self.spec.model, prompt=prompt, last=last, skip=skip)

    def turn(self):
        """One request of a user, as engines treat it, or as engines that do something else than the usual."""
        source, tenant = self.source, self.source.randrange(len(TENANTS))
        prompt, chunks = source.randrange(PROMPTS), source.randint(1, CHUNKS)
        what = source.choices(["usual", "store", "forget", "abandon", "end"], [60, 20, 5, 10, 5])[0]
        if what == "store":
            first = source.randrange(chunks)
            self.store(tenant, prompt, first, chunks)
            return
        request, hit = self.lookup(tenant, prompt, chunks)
        if request is None or what == "forget":
            return
        if what == "abandon":
            self.client.abandon(request, tokens(prompt, chunks), salt=TENANTS[tenant])
            return
        if what == "usual":
            if hit:
                last = source.choice([hit, source.randint(1, hit)])
                self.retrieve(request, tenant, prompt, last, source.choice([0, 0, source.randrange(4 * last)]))
            if hit < chunks:
                self.store(tenant, prompt, hit, chunks, request)
        self.client.end(request)

    def work(self):
        """Until SIGTERM."""
        while not STOPPING:
            self.turn()
            # What an engine computes meanwhile; more of it while nothing is sent.
            time.sleep(0.002 if self.client.is_healthy else 0.05)

    def audit(self, wanted):
        """Loads each prompt whole: (tenant, prompt, chunks that must be there)."""
        for tenant, prompt, least in wanted:
            request, hit = self.lookup(tenant, prompt)
            if hit < least:
                # Again: the first lookup may have timed out on a tier.
                self.client.end(request)
                request, hit = self.lookup(tenant, prompt)
            self.note(op="audit", tenant=tenant, model=self.spec.model, prompt=prompt, least=least, hit=hit)
            if hit:
                self.retrieve(request, tenant, prompt, hit)
            self.client.end(request)


def is_filled(layers, value):
    """Whether all bytes have this value."""
    return all(bool((layer == value).all()) for layer in layers)


def start(spec, url, logs, work=Actor.work):
    """Forks an engine, which ends after its work; its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        STOPPING.clear()
        signal.signal(signal.SIGTERM, lambda *_: STOPPING.append(True))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        out = os.open(logs / f"engine-{spec.number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        torch.set_num_threads(1)
        actor = Actor(spec, url, logs / f"engine-{spec.number}.jsonl")
        if actor.client:
            work(actor)
            actor.client.close()
        # Segments of tensors are removed at the exit of the interpreter, which a forked process does not reach.
        atexit._run_exitfuncs()
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
