"""The checks: what must hit, how much, and that the model says the same as without a cache server."""

import concurrent.futures
import json
import os
import random
import re
import threading
import time

from engine import Vllm
from evidence import Events
from kvrig import tiers
from kvrig.waiting import wait_until

CHUNK = 256
PROMPT = 2000  # tokens, not a multiple of a chunk
WHOLE = PROMPT // CHUNK * CHUNK  # what of it can hit
SHARED = 3 * CHUNK  # what the "partial" prompt has in common with the first
FRESH = 5 * CHUNK + 20


def random_tokens(seed, count):
    """Token ids that depend on the seed only."""
    source = random.Random(seed)
    return [source.randrange(300, 8000) for _ in range(count)]


class Prompts:
    """The prompts of a run."""

    def __init__(self, seed):
        self.main = random_tokens(f"{seed}-main", PROMPT)
        # Only the first chunk differs: everything behind it would be wrong if it hit.
        self.other_start = random_tokens(f"{seed}-start", CHUNK) + self.main[CHUNK:]
        self.exact = random_tokens(f"{seed}-exact", WHOLE)
        self.partial = self.main[: SHARED + 10] + random_tokens(f"{seed}-partial", PROMPT - SHARED - 10)
        # Same prefix as `main` up to its last whole chunk, then something else.
        self.sibling = self.main[:WHOLE] + random_tokens(f"{seed}-sibling", PROMPT - WHOLE)
        self.parallel = [random_tokens(f"{seed}-parallel-{i}", FRESH) for i in range(4)]
        self.crowd = [random_tokens(f"{seed}-crowd-{i}", 2 * CHUNK + 88) for i in range(6)]
        # With blocks of 128 tokens they take 23, 23 and 2 of the 47 that an engine has (one of its 48 is vLLM's own).
        self.fillers = [random_tokens(f"{seed}-filler-{i}", count) for i, count in enumerate((2900, 2900, 200))]

    def named(self):
        """Those that have a baseline."""
        return {"main": self.main, "other_start": self.other_start, "exact": self.exact, "partial": self.partial}


def baseline(options, prompts, report):
    """What vLLM alone answers; taken from the file of an earlier run with the same seed when there is one."""
    path = os.path.join(options.logs, "baseline.json")
    wanted = {"seed": options.seed, "model": options.model, "dtype": options.dtype}
    if options.reuse_baseline and os.path.exists(path):
        with open(path) as file:
            known = json.load(file)
        if known.get("of") == wanted:
            return known
    vllm = Vllm(options, "baseline")
    try:
        answers = {name: vllm.ask(prompt, salt=f"base-{name}") for name, prompt in prompts.named().items()}
        again = vllm.ask(prompts.main, salt="base-again")
        known = {"of": wanted, "ttft": min(again.ttft, answers["main"].ttft)}
        known |= {name: [answer.ids] for name, answer in answers.items()}
        # The computation that follows an external hit, made by vLLM's own prefix cache: in 16-bit types the
        # other split of the prompt alone may flip a near-tie, which is not the cache server's fault.
        for name, before in (("main", prompts.sibling), ("partial", prompts.main)):
            vllm.ask(before, salt=f"split-{name}")
            known[name].append(vllm.ask(prompts.named()[name], salt=f"split-{name}").ids)
    finally:
        vllm.stop()
    report.check("baseline/deterministic", again.ids == answers["main"].ids, f"ttft {known['ttft']:.3f} s")
    report.check(
        "baseline/sensitive",
        answers["main"].ids != answers["other_start"].ids,
        "another first chunk changes the output, so wrong KV would show",
    )
    with open(path, "w") as file:
        json.dump(known, file)
    return known


def run_name(options, mode):
    """What the checks and the logs of a mode are called."""
    ours = "-ours" if options.connector == "kvtier" else ""
    tensor, stages = options.tensor_parallel, options.pipeline_parallel
    workers = f"{f'-tp{tensor}' if tensor > 1 else ''}{f'-pp{stages}' if stages > 1 else ''}"
    return f"{mode}{ours}{'-mla' if options.mla else ''}{workers}{f'-{options.remote}' if options.remote else ''}"


class ModeCases:
    """All checks against one server in one transfer mode."""

    def __init__(self, options, prompts, known, server, report, directory=None):
        """`directory`: the server's second tier, if it has one."""
        self.options, self.prompts, self.known, self.report = options, prompts, known, report
        self.server, self.directory, self.vllm = server, directory, None

    def run(self, quick):
        """`quick` leaves out concurrency and the run without vLLM's own prefix cache."""
        try:
            self.first_engine()
            self.hits()
            self.salts()
            if not quick or self.options.connector == "kvtier":
                self.concurrent_requests()
            self.vllm.stop()
            self.vllm = None
            if self.directory:
                self.from_l1_alone()
                self.fresh_server()
            flags = [] if quick else ["--no-enable-prefix-caching"]
            self.vllm = Vllm(self.options, self.log_name(2), self.server, flags)
            self.new_engine(apc=quick)
            if self.directory:
                self.from_the_tier("new-vllm", 2 * WHOLE)
            self.server_restart(apc=quick)
            if self.directory and not self.server.peer:
                self.damaged_files()
            if self.options.connector == "kvtier":
                self.connector_metrics()
                self.killed_while_loading()
        finally:
            if self.vllm:
                self.vllm.stop()

    # proves: docs/compare.md#kvtiers-connector-for-vllm
    def run_brief(self):
        """One engine, and the checks in which the modes differ: how bytes travel, and what is in flight when the server dies."""
        try:
            self.first_engine()
            self.hits()
            self.server_restart(apc=True)
            self.connector_metrics()
            self.killed_while_loading()
            if self.server.mode == "lmcache_driven":
                self.vllm.stop()
                self.vllm = None
                self.crowded()
        finally:
            if self.vllm:
                self.vllm.stop()

    def run_with_workers(self):
        """Tensor or pipeline parallelism: each piece of the KV has its objects, and a hit needs those of all. Workers with the same KV head
        have one piece."""
        with open(os.path.join(self.options.model, "config.json")) as file:
            heads = json.load(file)["num_key_value_heads"]
        pieces, prompts = min(self.options.tensor_parallel, heads) * self.options.pipeline_parallel, self.prompts
        try:
            vllm = self.first_engine()
            answer = self.stored(lambda: vllm.measured(prompts.main), pieces * (WHOLE // CHUNK))
            # Several workers add in another order than one: what they say without a hit is what they must say with one.
            self.known = {**self.known, "main": [answer.ids, *self.known["main"]]}
            self.expect("miss", answer, "main", 0, local=0)
            vllm.forget()
            other = self.stored(lambda: vllm.measured(prompts.other_start), pieces * (WHOLE // CHUNK))
            sensitive = other.external == 0 and other.ids not in self.known["main"]
            self.check("other-first-chunk", sensitive, f"{other}; wrong KV would show")
            self.overwrite()
            self.expect("hit", vllm.measured(prompts.main), "main", WHOLE, local=0)
            self.events_published()
            self.connector_metrics()
            self.killed_while_loading()
        finally:
            if self.vllm:
                self.vllm.stop()

    # -- helpers -----------------------------------------------------------------------------

    def first_engine(self):
        """An engine; with our connector its KV events are subscribed to."""
        events = Events() if self.options.connector == "kvtier" else None
        self.vllm = Vllm(self.options, self.log_name(1), self.server, events=events)
        return self.vllm

    def log_name(self, number):
        """What an engine's log is called."""
        return f"{run_name(self.options, self.server.mode)}-{number}"

    def check(self, name, ok, detail):
        """Note a result under this mode's name."""
        self.report.check(f"{run_name(self.options, self.server.mode)}/{name}", ok, detail)

    def expect(self, name, answer, prompt, external, local=None, comparable=True):
        """The external hit must be exactly this long and the output that of vLLM alone, if that is comparable."""
        alone = self.known[prompt]
        # The second baseline went through a split prefill, as any hit does.
        same = answer.ids == alone[0] or (answer.external > 0 and answer.ids in alone[1:])
        right = same or not comparable
        as_wanted = answer.external == external and (local is None or answer.local == local)
        self.check(name, as_wanted and right, f"{answer} expected={external} same_tokens={same}")

    @property
    def is_exact(self):
        """Whether other batches and splits of a prompt say the same. In 16-bit types rounding flips near-ties of this model;
        with our connector the bytes of each loaded block are compared anyway."""
        return self.options.dtype == "float32"

    def objects(self):
        """Chunks in L1."""
        return self.server.get("/status")[1]["storage_manager"]["l1_manager"]["total_object_count"]

    def stored(self, ask, chunks):
        """`ask()`, then wait until `chunks` more chunks are in L1: the engine stores behind its answer."""
        before = self.objects()
        answer = ask()
        wait_until(lambda: self.objects() >= before + chunks, 120, f"{chunks} chunks stored")
        return answer

    def overwrite(self):
        """Forget vLLM's own prefixes and write other KV into every block it has."""
        self.vllm.forget()
        for filler in self.prompts.fillers:
            self.vllm.ask(filler, 1, salt="filler")
        self.vllm.forget()

    def tier_tokens(self):
        """Tokens that the second tier added to hits since the server's start."""
        return tiers.metric(self.server, "lmcache_mp_lookup_hit_l2_tokens_total")

    def files(self, salt):
        """The files of one tenant."""
        return [path for path in tiers.files(self.directory) if path.name.endswith(f"@{salt}.data")]

    # -- checks ------------------------------------------------------------------------------

    # proves: docs/compare.md#clients-of-lmcache
    def hits(self):
        """Miss, hit, near miss, partial hit, a prompt of whole chunks."""
        vllm, prompts = self.vllm, self.prompts
        answer = self.stored(lambda: vllm.measured(prompts.main), WHOLE // CHUNK)
        self.expect("miss", answer, "main", 0, local=0)
        self.overwrite()
        answer = vllm.measured(prompts.main)
        self.expect("hit", answer, "main", WHOLE, local=0)
        print(f"# {self.server.mode}: ttft {answer.ttft:.3f} s with the hit, {self.known['ttft']:.3f} s alone")
        vllm.forget()
        answer = self.stored(lambda: vllm.measured(prompts.other_start), WHOLE // CHUNK)
        self.expect("other-first-chunk", answer, "other_start", 0, local=0)
        vllm.forget()
        answer = self.stored(lambda: vllm.measured(prompts.partial), (WHOLE - SHARED) // CHUNK)
        self.expect("partial", answer, "partial", SHARED)
        vllm.forget()
        answer = self.stored(lambda: vllm.measured(prompts.exact), WHOLE // CHUNK)
        self.expect("exact-miss", answer, "exact", 0)
        self.overwrite()
        answer = vllm.measured(prompts.exact)
        # vLLM computes at least one token itself. Behind a hit in its own prefix cache it would compute a whole block.
        found = answer.external if answer.external in (WHOLE - 1, WHOLE) else WHOLE
        self.expect("exact-hit", answer, "exact", found, comparable=self.is_exact)
        if self.options.connector == "kvtier":
            self.parameters()
        if vllm.events:
            self.events_published()

    # proves: docs/vllm.md#parameters-of-a-request
    def parameters(self):
        """What a request asks of the cache reaches the connector through vLLM's API."""
        self.overwrite()
        limits = {"kvtier.max_load_tokens": SHARED + 1, "kvtier.store": False}
        answer = self.vllm.measured(self.prompts.main, kv_transfer_params=limits)
        self.expect("limited-hit", answer, "main", SHARED, local=0)

    def events_published(self):
        """Each chunk was published once until all were cleared, by vLLM's hashes of its blocks, also when it was loaded; none was lost."""
        events, wanted = self.vllm.events, (self.prompts.main, CHUNK, self.options.block_size)
        wait_until(lambda: all(events.published(*wanted)), 60, "events of what was stored")
        numbers, counts = events.sequence, events.published(*wanted)
        whole = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        once = counts == [1] * (WHOLE // CHUNK)
        self.check("events", once and whole, f"chunks were published {counts} times, in {len(numbers)} batches")

    # proves: docs/compare.md#tenants
    def salts(self):
        """OpenAI's cache_salt separates tenants."""
        vllm, prompts = self.vllm, self.prompts
        vllm.forget()
        answer = self.stored(lambda: vllm.measured(prompts.main, "alice"), WHOLE // CHUNK)
        self.expect("salt-alice-misses", answer, "main", 0, local=0)
        self.overwrite()
        self.expect("salt-alice-hits", vllm.measured(prompts.main, "alice"), "main", WHOLE, local=0)
        self.expect("salt-bob-misses", vllm.measured(prompts.main, "bob"), "main", 0, local=0)
        self.expect("no-salt-still-hits", vllm.measured(prompts.main), "main", WHOLE, local=0)

    def concurrent_requests(self):
        """Four requests at once, first missing, then hitting."""
        vllm = self.vllm
        vllm.forget()

        def together():
            before = vllm.counters()[0]
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(vllm.ask, self.prompts.parallel))
            return vllm.counters()[0] - before, [answer.ids for answer in answers]

        missed, first = self.stored(together, 4 * (FRESH // CHUNK))
        self.overwrite()
        hit, second = together()
        alike = sum(a == b for a, b in zip(first, second, strict=True))
        starts = sum(a[:4] == b[:4] for a, b in zip(first, second, strict=True))
        # Other batching may flip one late near-tie.
        ok = missed == 0 and hit == 4 * (FRESH // CHUNK) * CHUNK and (not self.is_exact or (alike >= 3 and starts == 4))
        self.check("concurrent", ok, f"external {missed} then {hit}; identical outputs {alike}/4")

    def crowded(self):
        """An engine with few blocks: requests are preempted while they are stored, and others cancelled while they load."""
        # Prompts of five blocks; four prompts fit. Forty tokens later each needs a sixth block.
        crowd, long = self.prompts.crowd, 56
        flags = ["--num-gpu-blocks-override", "22", "--max-model-len", "1024"]
        self.vllm = vllm = Vllm(self.options, self.log_name(3), self.server, flags)
        alone = [vllm.ask(prompt, salt="alone").ids for prompt in crowd]
        starts, cancelled = 0, 0
        # At first all are computed, then loaded. One of three is cancelled, in its midst or before its first token.
        for midst in (long // 2, 0):
            vllm.forget()
            ends = [midst if number % 3 == 2 else None for number in range(len(crowd))]
            with concurrent.futures.ThreadPoolExecutor(len(crowd)) as pool:
                answers = list(pool.map(lambda prompt, end: vllm.ask(prompt, long, cancelled_after=end), crowd, ends))
            cancelled += sum(len(answer.ids) < long for answer in answers)
            # Other batching may flip a near-tie later on.
            starts += sum(
                answer.ids[:4] == ids[:4] for answer, ids, end in zip(answers, alone, ends, strict=True) if end is None
            )
        preempted = vllm.metric("vllm:num_preemptions_total")
        well = preempted > 0 and cancelled == 4 and starts == 8
        self.check("crowded", well, f"{preempted} preemptions, {cancelled} cancelled, {starts} of 8 begin as alone")
        # This needs all blocks back.
        vllm.forget()
        answers = [vllm.measured(prompt) for prompt in crowd]
        alike = sum(answer.ids == ids for answer, ids in zip(answers, alone, strict=True))
        hits = sum(answer.external == 2 * CHUNK for answer in answers)
        starts = sum(answer.ids[:4] == ids[:4] for answer, ids in zip(answers, alone, strict=True))
        # A hit is a split prefill, which may flip one late near-tie.
        well = hits == starts == len(crowd) and alike >= len(crowd) - 1
        self.check("after-the-crowd", well, f"{alike} of {len(crowd)} say the same, {hits} hit")

    # proves: docs/compare.md#hits
    def new_engine(self, apc):
        """Another vLLM process, whose memory has never held these prompts."""
        vllm, prompts = self.vllm, self.prompts
        self.expect("new-vllm-hits", vllm.measured(prompts.main), "main", WHOLE, local=0)
        if not apc:
            self.expect("hits-again-without-own-cache", vllm.measured(prompts.main), "main", WHOLE, local=0)
        self.expect("new-vllm-salt-alice", vllm.measured(prompts.main, "alice"), "main", WHOLE)
        answer = self.stored(lambda: vllm.measured(prompts.main, "carol"), WHOLE // CHUNK)
        self.expect("new-vllm-salt-carol-misses", answer, "main", 0)

    def from_l1_alone(self):
        """No hit so far needed the tier."""
        tokens = self.tier_tokens()
        self.check("hits-from-l1", tokens == 0 or self.server.peer, f"{tokens:.0f} tokens came from the tier")

    def fresh_server(self):
        """The server is stopped and started again between two engines, so the second one can hit only from disk."""
        tiers.settled(self.server)
        status, seconds = self.server.stop()
        left = len(tiers.files(self.directory))
        self.check("tier-written", left >= 4 * WHOLE // CHUNK, f"{left} files, stopped with {status} in {seconds:.1f} s")
        self.server.start()

    def from_the_tier(self, name, tokens):
        """Exactly `tokens` were hits because of the tier."""
        found = self.tier_tokens()
        self.check(f"{name}-hits-from-tier", found == tokens or self.server.peer, f"{found:.0f} of {tokens:.0f} tokens")

    def damaged_files(self):
        """Files damaged while the server was down are misses, and the model still says the same.

        One flipped bit in a file of alice's ends her hit somewhere; all of carol's are too short.
        """
        vllm, prompts = self.vllm, self.prompts
        answer = vllm.measured(prompts.main, "alice")
        whole = answer.external % CHUNK == 0 and answer.external < WHOLE
        right = answer.ids in self.known["main"]
        self.check("damaged-file-ends-the-hit", whole and right, f"{answer} same_tokens={right}")
        self.expect("shortened-files-miss", vllm.measured(prompts.main, "carol"), "main", 0)
        self.expect("salt-dave-misses", vllm.measured(prompts.main, "dave"), "main", 0)
        corrupt = tiers.metric(self.server, "kvtier_l2_load_failures_total", reason="corrupt")
        self.check("damage-counted", corrupt >= 2, f"{corrupt:.0f} objects")

    def connector_metrics(self):
        """Our connector's numbers are among vLLM's."""
        text = self.vllm.call("GET", "/metrics").decode()
        found = dict(re.findall(r"^vllm:kvtier_(\w+)_total\{[^}]*\} ([0-9.e+]+)$", text, re.MULTILINE))
        good = all(float(found.get(name, 0)) > 0 for name in ("lookups", "hit_tokens", "stores", "retrieved_tokens"))
        # The first prompts of all were not there.
        misses = sum(map(float, re.findall(r'^vllm:kvtier_misses_total\{[^}]*reason="not_found"[^}]*\} ([0-9.e+]+)$', text, re.MULTILINE)))
        self.check("connector-metrics", good and misses > 0 and float(found["failed_retrieves"]) == 0, found)

    # proves: docs/compare.md#kvtiers-connector-for-vllm
    # proves: docs/vllm.md#restarts
    def killed_while_loading(self):
        """The server dies when it was asked for the KV of a hit: the engine computes, and goes on."""
        vllm, server = self.vllm, self.server
        self.overwrite()
        loading = "retrieve" if server.mode == "lmcache_driven" else "prepare_retrieve"
        dead = threading.Event()
        server.proxy.at(loading, lambda: (server.kill(), dead.set()))
        answer = vllm.measured(self.prompts.main)
        right = answer.ids in self.known["main"]
        # Its end, which is waited for in the proxy, can come after the answer.
        self.check("killed-while-loading", right and dead.wait(60), f"{answer} same_tokens={right}")
        server.start()

        def stored_again():
            vllm.forget()
            return vllm.measured(self.prompts.main).external

        wait_until(stored_again, 60, "a hit after the server's return", interval=0.5)
        self.overwrite()
        self.expect("hits-after-death-while-loading", vllm.measured(self.prompts.main), "main", WHOLE, local=0)

    def degraded(self):
        """How often LMCache's client has noticed that its server is down: once per scheduler and worker."""
        with open(self.vllm.child.log, errors="replace") as log:
            return log.read().count("entering degraded mode")

    def wait_until_degraded(self, before):
        """Waits until all that ping have noticed. A worker that copies by itself and has not, when the scheduler has,
        ends its engine: the connector does not catch the timeout of its store (docs/vllm.md)."""
        pinging = 1 if self.options.silent_scheduler else 2
        wait_until(lambda: self.degraded() >= before + pinging, 60, "LMCache's client without its server")

    # proves: docs/compare.md#restart
    # proves: docs/operate.md#restart-and-upgrade
    def server_restart(self, apc):
        """The server is killed and started again, and vLLM goes on. Meanwhile files are damaged."""
        vllm, prompts, server = self.vllm, self.prompts, self.server
        if self.directory:
            tiers.settled(server)
        noticed = self.degraded()
        server.kill()
        if self.directory and not server.peer:
            tiers.flip(self.files("alice")[0], 1000)
            for path in self.files("carol"):
                os.truncate(path, path.stat().st_size - 1)
        if apc:
            vllm.forget()
        if server.mode != "lmcache_driven" and self.options.connector != "kvtier":
            self.wait_until_degraded(noticed)
        try:
            answer = vllm.measured(prompts.main)
            self.expect("server-down-still-answers", answer, "main", 0)
        except Exception as problem:
            self.check("server-down-still-answers", False, repr(problem))
        server.start()
        if self.options.silent_scheduler:
            self.restarted_engine()
        else:
            self.registers_again(apc)

    def restarted_engine(self):
        """A scheduler that has missed an answer and never pings asks no more: all is computed until vLLM is started again."""
        self.vllm.forget()
        self.expect("no-hits-until-restarted", self.vllm.measured(self.prompts.main), "main", 0, local=0)
        self.vllm.stop()
        # A worker that pings has registered by then or not, and stored what was computed or not.
        self.server.post("/cache/clear", {"force": True})
        self.vllm = Vllm(self.options, self.log_name(3), self.server)
        before = self.tier_tokens()
        answer = self.vllm.measured(self.prompts.main)
        self.from_the_tier("restarted-vllm", before + WHOLE)
        self.expect("restarted-vllm-hits", answer, "main", WHOLE, local=0)

    def registers_again(self, apc):
        """The engine stores and hits again by itself; with a tier the first hit is from disk."""
        vllm, prompts, server = self.vllm, self.prompts, self.server
        began, tries = time.monotonic(), 0
        # With a tier another prompt shows when the worker has registered again: the first tries miss, and store.
        # A prompt of another length, with a rest of most of a chunk, shows the server that the client's chunk size is its own.
        prompt, wanted = (prompts.exact, 1) if self.directory else (prompts.main, WHOLE)
        while True:
            tries += 1
            if apc:
                vllm.forget()
            vllm.ask([9] * 500, count=1)
            answer = vllm.measured(prompt)
            if answer.external >= wanted or time.monotonic() - began > 60:
                break
            time.sleep(0.5)
        print(f"# {server.mode}: hit again {time.monotonic() - began:.1f} s after the server's start, {tries} tries")
        if self.directory:
            before = self.tier_tokens()
            answer = vllm.measured(prompts.main)
            self.from_the_tier("same-vllm", before + WHOLE)
        self.expect("hits-after-server-restart", answer, "main", WHOLE, local=0)
