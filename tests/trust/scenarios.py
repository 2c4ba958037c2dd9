"""The scenarios: two engines that differ in one thing, or a server that changes beside a running engine.

Engines have no prefix cache of their own unless it is part of the scenario, so each request asks the server.
"""

import shutil
import signal

from forked import Died, prompt_of
from kvrig import tiers
from kvrig.waiting import TimedOut
from rig import CHUNK

PROMPT = 1100
WHOLE = PROMPT // CHUNK * CHUNK
BOTH = ("lmcache_driven", "engine_shm")
SCENARIOS = {}
# Between logarithms of probabilities, with float32: what other batches change.
ROUNDING = 1e-3
# Of an engine whose server hangs: stores that wait for it, but no lookup.
PATIENT = {
    "kvtier.timeout": 60, "kvtier.store_timeout": 60, "kvtier.heartbeat": 30, "kvtier.lookup_timeout": 1, "kvtier.follow_resets": False,
}  # fmt: skip


def scenario(*pairs, name=None):
    """Register a scenario, under its function's name if no other is given, with the pairs of connector and mode that it runs with."""

    def register(function):
        SCENARIOS[name or function.__name__] = (function, pairs)
        return function

    return register


def each(connectors=("kvtier", "lmcache"), modes=BOTH):
    """All pairs of both."""
    return [(connector, mode) for connector in connectors for mode in modes]


# proves: docs/compare.md#hits
@scenario(*each())
def block_sizes(case):
    """Engines with 128 and with 32 tokens per block share a server, then its directory after a restart."""
    server = case.server(flags=case.tier())
    prompts = [prompt_of(f"blocks-{number}", PROMPT) for number in range(6)]
    later = [prompt_of(f"later-{number}", PROMPT) for number in range(3)]
    large = case.engine("llama", server, block_size=128)
    for prompt in prompts + later:
        large.ask(prompt)
    case.stored(server, len(prompts + later) * WHOLE // CHUNK)
    small = case.engine("llama", server, block_size=32, num_gpu_blocks_override=256)
    case.compare("smaller-blocks", small, prompts)
    case.compare("same-blocks-hit", large, prompts[:2], hit=WHOLE)
    # A lookup of LMCache's client finds only what all registered layouts of its model's name have.
    small.stop()
    tiers.settled(server)
    server.stop()
    server.start()
    tiers.adopted(server)
    case.recovered(large)
    case.compare("same-blocks-from-disk", large, later[:2], hit=WHOLE)
    small = case.engine("llama", server, block_size=32, num_gpu_blocks_override=256)
    case.compare("smaller-blocks-from-disk", small, later)


# proves: docs/compare.md#hits
@scenario(*each(connectors=["kvtier"]))
def pictures(case):
    """Another picture before the same text, in another engine; with and without the caches that make vLLM hash it."""
    server, text = case.server(), "<picture>" + "x" * 300
    try:
        for name in ("red", "blue"):
            engine = case.engine("pictures", server, mm_processor_cache_gb=0)
            case.compare(f"uncached-{name}", engine, [text], pictures=[name])
    except Died as problem:
        clear = "mm_processor_cache_gb" in str(problem) or "prefix caching" in str(problem)
        case.check("uncached-is-refused-clearly", clear, str(problem)[:300])
    first = case.engine("pictures", server)
    case.compare("hashed-red", first, [text], pictures=["red"], hit=0)
    second = case.engine("pictures", server)
    case.compare("hashed-red-hits", second, [text], pictures=["red"], hit=2 * CHUNK)
    case.compare("hashed-blue", second, [text], pictures=["blue"], hit=0)
    case.compare("uuid-of-alice", first, [text], pictures=["red"], uuids=["mine"], salt="alice", hit=0)
    case.compare("uuid-of-bob", second, [text], pictures=["blue"], uuids=["mine"], salt="bob", hit=0)


# proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
# proves: docs/compare.md#kvtiers-connector-for-vllm
@scenario(*each())
def chunk_sizes(case):
    """The server returns with two other chunk sizes, then with the first; a newer engine stores the prompt each time."""
    server, prompt = case.server(), prompt_of("chunks", PROMPT)
    engine = case.engine("llama", server, extra={"kvtier.heartbeat": 1})
    alone = engine.alone(prompt).ids
    engine.ask(prompt)
    case.stored(server, 2 * WHOLE // CHUNK)
    for chunk in (128, 512):
        server.stop()
        server.chunk = chunk
        server.start()
        newer = case.engine("llama", server)
        newer.ask(prompt)
        case.stored(server, PROMPT // chunk)
        if case.connector == "kvtier":
            # It keeps its chunk size, and names it.
            case.recovered(engine)
        # Through its reconnection, and with stores of its own.
        answers = [engine.ask(prompt) for _ in range(8)]
        wrong = sum(answer.ids != alone for answer in answers)
        loaded = [answer.external for answer in answers]
        case.check(f"chunks-of-{chunk}", not wrong, f"{wrong} of 8 answers wrong; tokens loaded {loaded}")
        newer.stop()
    server.stop()
    server.chunk = CHUNK
    server.start()
    if case.connector == "kvtier":
        case.recovered(engine)
    case.compare("first-size-again", engine, [prompt])


# proves: docs/compare.md#hits
@scenario(("kvtier", "engine_shm"))
def adapters(case):
    """A LoRA adapter is replaced at its path: reloaded in one engine, not in another, and loaded by a third."""
    server, prompt, path = case.server(), prompt_of("adapter", PROMPT), case.logs / "adapter"
    shutil.copytree(case.models / "adapter-a", path)
    options = {"enable_lora": True, "max_lora_rank": 8}
    lora = {"lora_name": "tuned", "lora_int_id": 1, "lora_path": str(path)}
    first = case.engine("llama", server, **options)
    case.compare("first", first, [prompt], lora=lora, hit=0)
    case.compare("base-model", first, [prompt], hit=0)
    second = case.engine("llama", server, **options)
    case.compare("same-adapter-hits", second, [prompt], lora=lora, hit=WHOLE)
    shutil.copytree(case.models / "adapter-b", path, dirs_exist_ok=True)
    case.compare("reloaded-in-place", first, [prompt], lora=lora | {"load_inplace": True})
    case.compare("not-reloaded", second, [prompt], lora=lora)
    third = case.engine("llama", server, **options)
    case.compare("loaded-again", third, [prompt], lora=lora)


# proves: docs/compare.md#hits
@scenario(("kvtier", "engine_shm"))
def weights(case):
    """Weights are changed in place and vLLM's prefix cache is reset without its connector."""
    server = case.server()
    before, after = prompt_of("before", PROMPT), prompt_of("after", PROMPT)
    engine = case.engine("llama", server, enable_prefix_caching=True)
    engine.ask(before)
    case.stored(server, WHOLE // CHUNK)
    engine.call("load_weights", case.models / "llama-other-weights")
    case.check("reset", engine.call("reset"), "without the connector")
    case.compare("changed-weights", engine, [before], hit=0)
    engine.ask(after)
    other = case.engine("llama", server)
    case.compare("unchanged-engine", other, [before, after])


# proves: docs/compare.md#kvtiers-connector-for-vllm
@scenario(*each(connectors=["kvtier"]))
def server_comes_later(case):
    """An engine with default options starts without a server, which comes later: hits within two heartbeats."""
    from kvtier.connecting import DEFAULT_HEARTBEAT

    server = case.server(start=False)
    engine = case.engine("llama", server)
    case.compare("without-a-server", engine, [prompt_of("early", PROMPT)], hit=0)
    server.start()
    case.recovered(engine, timeout=2 * DEFAULT_HEARTBEAT)
    prompt = prompt_of("late", PROMPT)
    engine.ask(prompt)
    case.compare("with-it", engine, [prompt], hit=WHOLE)


# proves: docs/compare.md#kvtiers-connector-for-vllm
@scenario(*each(connectors=["kvtier"]))
def silent_server(case):
    """The server hangs, then dies, while a lookup waits: the engine answers long before `kvtier.timeout`."""
    server = case.server()
    # Nothing but the lookup's own bound can end it in time.
    engine = case.engine("llama", server, extra={"kvtier.timeout": 90, "kvtier.heartbeat": 60})
    known = prompt_of("known", PROMPT)
    alone = engine.alone(known).ids
    for name, end in (("frozen", signal.SIGCONT), ("killed", signal.SIGKILL)):
        server.process.send_signal(signal.SIGSTOP)
        # Its store may take as long as `kvtier.timeout`.
        engine.submit("ask", [known], settles=False)
        if name == "killed":
            server.kill()
        try:
            [answer] = engine.collect(30)
            case.check(name, answer.ids == alone, f"{answer}")
        except TimedOut as problem:
            case.check(name, False, problem)
            return
        finally:
            if server.process is not None:
                server.process.send_signal(end)
        if name == "frozen":
            case.recovered(engine)
    server.start()
    case.recovered(engine)
    case.compare("after-its-return", engine, [known])


# proves: docs/compare.md#disaggregated-prefill
# proves: docs/vllm.md#disaggregated-prefill
@scenario(*each(connectors=["kvtier"]))
def disaggregated_prefill(case):
    """One engine prefills, and another decodes with the parameters of its answer: at once, and asked before the first begins."""
    server = case.server()
    prefill = case.engine("llama", server, {"kvtier.hand_over": True})
    decode = case.engine("llama", server, {"kvtier.hand_over_timeout": 60})
    for number in range(4):
        prompt = prompt_of(f"apart-{number}", PROMPT)
        if is_early := number >= 2:
            decode.submit("ask", [prompt], handed_over={"kvtier.stored_tokens": WHOLE})
        first = prefill.ask(prompt, count=1, settles=False, handed_over={"do_remote_decode": True, "do_remote_prefill": False})
        [answer] = decode.collect(100) if is_early else [decode.ask(prompt, handed_over=first.handed_over)]
        alone = decode.alone(prompt).ids
        handed = first.handed_over == {"kvtier.stored_tokens": WHOLE}
        right = handed and answer.ids == alone and first.ids == alone[:1] and answer.external == WHOLE and answer.handed_over is None
        case.check(f"{'early' if is_early else 'at-once'}-{number}", right, f"{first}; {answer}; alone {alone}")


# proves: docs/compare.md#kvtiers-connector-for-vllm
@scenario(("kvtier", "engine_shm"))
def resets(case):
    """One engine resets its caches with its connector, and pauses: other engines lose nothing."""
    server = case.server()
    one, other = case.engine("llama", server), case.engine("llama", server)
    prompts = {salt: prompt_of(f"reset-{salt}", PROMPT) for salt in ("alice", "bob", "carol")}
    one.ask(prompts["alice"], salt="alice")
    for salt in ("bob", "carol"):
        other.ask(prompts[salt], salt=salt)
    case.stored(server, 3 * WHOLE // CHUNK)
    case.check("reset", one.call("reset", connector=True), "with the connector")
    case.compare("of-its-own-nothing", one, [prompts["alice"]], salt="alice", hit=0)
    case.compare("other-engines-bob", other, [prompts["bob"]], salt="bob", hit=WHOLE)
    one.call("pause")
    case.compare("after-a-pause-carol", other, [prompts["carol"]], salt="carol", hit=WHOLE)
    newer = case.engine("llama", server)
    case.compare("a-new-engine", newer, [prompts["alice"]], salt="alice", hit=WHOLE)


# proves: docs/compare.md#kvtiers-connector-for-vllm
@scenario(*each(connectors=["kvtier"]))
def held_blocks(case):
    """Few blocks, so that requests are preempted while their stores are slow or the server hangs: no step waits for a store."""
    server = case.server(l1_gb=1)
    # Eight prompts of 3 blocks, whose answers need a fourth: not all have one.
    prompts = [prompt_of(f"crowded-{number}", 290 + 10 * number) for number in range(8)]
    options = {"max_num_batched_tokens": 512}
    asked = list(zip(prompts, case.answers_alone("llama", prompts, 160, ROUNDING, **options), strict=True))
    for number, caching in enumerate((False, True)):
        # Under a name of its own, so that the second finds nothing of the first.
        own = PATIENT | {"kvtier.model_name": f"crowded-{number}"}
        engine = case.engine("llama", server, own, num_gpu_blocks_override=24, enable_prefix_caching=caching, **options)
        case.crowded(f"caching-{caching}".lower(), engine, server, asked, 160)
        engine.stop()
