"""The scenarios of models whose layers attend to a window or keep a state: their blocks are reused while their requests run.

With LMCache's connector such models have no cache. kvtier's holds the blocks of its stores in vLLM's pool.
"""

import functools
from dataclasses import dataclass

from forked import prompt_of
from rig import CHUNK, MLA
from scenarios import PATIENT, ROUNDING, each, scenario

SERVER_COPIES = ("lmcache_driven",)

# Six layers of Gemma's kind, four of GPT-OSS's with sinks, windows only, of more than a chunk, six of Gemma 4's kind, whose windows have
# blocks of 256 tokens beside others of 128, and chunks of Llama 4's kind.
MODELS = ("windows", "sinks", "windows-only", "block-sizes", "chunked")
# Shorter than the last token of each model's hit.
LENGTHS = (2 * CHUNK, 3 * CHUNK + 1, 5 * CHUNK - 1, 7 * CHUNK + 90)


# proves: docs/compare.md#hits
# proves: docs/compare.md#sliding-windows
@scenario(("lmcache", "lmcache_driven"))
def window_blocks(case):
    """Layers with windows and prompts that are prefilled in steps: prefixes of them, asked later."""
    server = case.server(l1_gb=1)
    engine = windowed_engine(case, server)
    said = [line for line in server.lines() if "window" in line]
    case.check("is-named", said, (said or ["nothing about windows in the log"])[0][-200:])
    case.compare("prefixes", engine, prefixes(engine))


@scenario(("lmcache", "lmcache_driven"))
def window_blocks_allowed(case):
    """The same where the operator allows it: what is documented as wrong."""
    engine = windowed_engine(case, case.server(flags=["--windowed-clients", "allow"], l1_gb=1))
    asked = prefixes(engine)
    wrong = sum(engine.ask(prompt).ids != engine.alone(prompt).ids for prompt in asked)
    case.note("prefixes", f"{wrong} of {len(asked)} answers wrong")


# proves: docs/compare.md#sliding-windows
# proves: docs/vllm.md#sliding-windows
@scenario(*each(connectors=["kvtier"]))
def windows_kept(case):
    """Layers with windows whose blocks vLLM keeps (`--disable-hybrid-kv-cache-manager`), and prompts prefilled in steps."""
    server = case.server(l1_gb=1)
    engine = windowed_engine(case, server, disable_hybrid_kv_cache_manager=True)
    asked = prefixes(engine)
    before = engine.call("external")
    case.compare("prefixes", engine, asked)
    loaded, wanted = engine.call("external") - before, sum(len(prompt) // CHUNK * CHUNK for prompt in asked)
    case.check("loaded", loaded == wanted, f"{loaded} of {wanted} tokens")


# proves: docs/compare.md#sliding-windows
@scenario(*each(connectors=["kvtier"], modes=SERVER_COPIES))
def windows_held(case):
    """Layers with windows whose blocks vLLM reuses, and prompts prefilled in steps: prefixes, next turns, both caches, tenants."""
    server = case.server(l1_gb=1)
    case.witness()
    for model in MODELS:
        if model == "sinks" and case.release < (0, 32):
            case.skip(model, "vLLM 0.30 has no kernel for sinks in float32 on CPUs")
            continue
        engine = windowed_engine(case, server, model)
        if model == "block-sizes":
            sizes = engine.call("block_sizes")
            case.check(f"{model}-differ", set(sizes) == {128, 256}, f"groups of layers have blocks of {sizes} tokens")
        prompts = [prompt_of(f"{model}-{number}", 1900) for number in range(3)]
        for prompt in prompts:
            engine.ask(prompt)
        for length in LENGTHS:
            asked = [prompt[:length] for prompt in prompts]
            # The last token is computed: a window at the end of a whole hit lacks its first one.
            case.compare(f"{model}-first-{length}", engine, asked, hit=(length - 1) // CHUNK * CHUNK)
        turn = [prompt + prompt_of(f"turn-{model}-{number}", 100) for number, prompt in enumerate(prompts)]
        case.compare(f"{model}-next-turn", engine, turn, hit=1900 // CHUNK * CHUNK)
        case.compare(f"{model}-other-tenant", engine, prompts[:1], hit=0, salt=f"alice-{model}")
        case.compare(f"{model}-tenant", engine, prompts[:1], hit=1900 // CHUNK * CHUNK, salt=f"alice-{model}")
        # vLLM's own cache has the first 640 tokens, of a window its end only.
        both = windowed_engine(case, server, model, enable_prefix_caching=True, num_gpu_blocks_override=240)
        for number, prompt in enumerate(prompts):
            both.ask(prompt[:640], salt=f"both-{number}")
        alone = []
        for number, prompt in enumerate(prompts):
            alone.append(both.alone(prompt).ids)
            engine.ask(prompt, salt=f"both-{number}")
            answer = both.ask(prompt, salt=f"both-{number}")
            # vLLM's own hit ends at one of its last blocks.
            right = answer.ids == alone[number] and 1900 // CHUNK * CHUNK - 640 <= answer.external < 1900 // CHUNK * CHUNK - CHUNK
            case.check(f"{model}-local-and-loaded-{number}", right, f"{answer}, alone {alone[number]}")
        engine.stop()
        before, together = both.call("external"), both.call("ask", prompts)
        loaded = both.call("external") - before
        right = [answer.ids for answer in together] == alone
        case.check(f"{model}-together", right and loaded == 3 * (1900 // CHUNK * CHUNK), f"three at once, {loaded} tokens loaded")
        both.stop()
    case.pages_as_stored()


@dataclass
class Crowd:
    """A model's engines with few blocks: prompts of these lengths, and the tokens of each answer."""

    options: dict
    lengths: range
    answer: int
    blocks: int
    tie: float | None = ROUNDING
    """None: the engine alone, with few blocks and without a connector, says something else than with many; bytes are compared."""
    model: str = ""
    """Its directory, if that is not its name."""


def crowded_name(name):
    """Of the scenario of a crowded engine."""
    return f"{name.replace('-', '_')}_held_crowded"


# Models whose layers keep a recurrent state, or the last tokens of a convolution: tokens per block, at whose ends vLLM keeps them.
STATES = {"states": 256, "convolutions": 128}
# vLLM keeps states beside its own prefix cache only. Its CPU kernels for them have only bfloat16, so answers are the same only where all of
# a prompt was computed in the same steps.
STATEFUL = {"enable_prefix_caching": True, "dtype": "bfloat16", "block_size": None}


# proves: docs/compare.md#hits
# proves: docs/compare.md#recurrent-states
@scenario(*each(connectors=["kvtier"], modes=SERVER_COPIES))
def states_held(case):
    """Layers with recurrent states, and prompts prefilled in steps of 512 tokens: prefixes, next turns, tenants, beside vLLM's own cache."""
    server = case.server(l1_gb=1)
    case.witness()
    for model, block in STATES.items():
        if model == "convolutions" and case.release < (0, 32):
            case.skip(model, "vLLM before 0.32 has no kernel for their width on CPUs")
            continue
        other = stateful_engine(case, server, model)
        prompts = [prompt_of(f"{model}-{number}", 1900) for number in range(3)]
        for prompt in prompts:
            other.ask(prompt)
        engine = stateful_engine(case, server, model)
        whole = 1900 // block * block
        case.compare(f"{model}-again", engine, prompts, hit=whole)
        # vLLM's own cache has forgotten everything, the server nothing.
        case.check(f"{model}-reset", engine.call("reset"), "vLLM's own prefix cache")
        turn = [prompt + prompt_of(f"turn-{model}-{number}", 100) for number, prompt in enumerate(prompts)]
        case.compare(f"{model}-next-turn", engine, turn, hit=whole)
        case.check(f"{model}-reset-again", engine.call("reset"), "vLLM's own prefix cache")
        # vLLM keeps the last state of a prompt. That of a shorter one, of two whole steps, is there once it was asked.
        shorter = [prompt[:1044] for prompt in prompts]
        case.compare(f"{model}-prefix", engine, shorter, hit=0)
        case.check(f"{model}-reset-once-more", engine.call("reset"), "vLLM's own prefix cache")
        case.compare(f"{model}-prefix-again", engine, shorter, hit=1024)
        case.compare(f"{model}-other-tenant", engine, prompts[:1], hit=0, salt=f"alice-{model}")
        case.check(f"{model}-reset-at-last", engine.call("reset"), "vLLM's own prefix cache")
        # vLLM's own cache has what was computed in the first step: with other steps, numbers would be rounded otherwise.
        for prompt in prompts:
            engine.ask(prompt[:520], salt="both")
        case.compare(f"{model}-tenant", engine, prompts[:1], hit=whole, salt=f"alice-{model}")
        for prompt in prompts:
            other.ask(prompt, salt="both")
        other.stop()
        case.compare(f"{model}-local-and-loaded", engine, prompts, hit=whole - 512, salt="both")
        engine.stop()
    case.pages_as_stored()


# Few blocks, so that requests are preempted and blocks that leave a window, or of states, reused at once.
_WINDOWED = {"max_model_len": 1024, "max_num_batched_tokens": 256}
# Steps of one block beside what other requests sample.
_STATEFUL = STATEFUL | {"max_model_len": 1024, "max_num_batched_tokens": 300}
_LENGTHS = range(530, 610, 10)
CROWDED = {
    "windows": Crowd(_WINDOWED, _LENGTHS, answer=260, blocks=38),
    "sinks": Crowd(_WINDOWED, _LENGTHS, answer=260, blocks=30),
    "block-sizes": Crowd(_WINDOWED, _LENGTHS, answer=260, blocks=38),
    "chunked": Crowd(_WINDOWED, _LENGTHS, answer=260, blocks=80),
    "states": Crowd(_STATEFUL, range(690, 770, 10), answer=160, blocks=64, tie=0.5),
    "convolutions": Crowd(_STATEFUL, range(690, 770, 10), answer=160, blocks=48, tie=None),
    # vLLM's kernel has blocks of 16 tokens only.
    "mla": Crowd(_WINDOWED | {"block_size": 16}, _LENGTHS, answer=260, blocks=330, tie=None, model=MLA),
}
# Beside the gate, where all of them are: one kind is in it.
CROWDED_IN_THE_GATE = ("windows",)


# proves: docs/compare.md#recurrent-states
# proves: docs/compare.md#sliding-windows
def crowded(case, name):
    """Answers that grow by several blocks each, so that requests are preempted, beside a server that hangs, one that dies, and one that is
    started again at once."""
    crowd = CROWDED[name]
    model = crowd.model or name
    if name in ("sinks", "convolutions") and case.release < (0, 32):
        case.skip(name, "vLLM before 0.32 has no kernel for it on CPUs")
        return
    case.is_comparable = crowd.tie is not None
    server = case.server(l1_gb=1)
    case.witness()
    prompts = [prompt_of(f"{name}-{number}-{length}", length) for number in range(2) for length in crowd.lengths]
    asked = list(zip(prompts, case.answers_alone(model, prompts, crowd.answer, crowd.tie, **crowd.options), strict=True))
    first, second = asked[: len(crowd.lengths)], asked[len(crowd.lengths) :]
    engine = case.engine(model, server, PATIENT, num_gpu_blocks_override=crowd.blocks, **crowd.options)
    case.crowded("frozen", engine, server, first, 130)
    engine.stop()
    # A server that died may have read until its stores' deadline.
    hasty = PATIENT | {"kvtier.timeout": 5, "kvtier.store_timeout": 5, "kvtier.heartbeat": 1}
    engine = case.engine(model, server, hasty, num_gpu_blocks_override=crowd.blocks, **crowd.options)
    case.killed("killed", engine, server, second, 130, returns=False)
    server.start()
    case.recovered(engine, resets=True)
    # This server has none of them.
    case.killed("restarted", engine, server, first, 130, returns=True)
    case.recovered(engine, resets=True)
    prompts, alone = zip(*first, strict=True)
    for step in ("stores-again", "hits-again"):
        again = engine.call("ask", prompts, count=8)
        case.agree(f"restarted-{step}", again, alone, 8)
        case.check(f"restarted-{step}-reset", engine.call("reset"), "vLLM's own prefix cache")
    case.check("restarted-loaded", again[0].external > 0, f"{again[0].external} tokens of what the new server has")
    engine.stop()
    case.pages_as_stored()


for _name in CROWDED:
    scenario(*each(connectors=["kvtier"], modes=SERVER_COPIES), name=crowded_name(_name))(functools.partial(crowded, name=_name))


def stateful_engine(case, server, model):
    """Steps of 512 tokens."""
    return case.engine(model, server, {"kvtier.follow_resets": False}, max_num_batched_tokens=512, num_gpu_blocks_override=200, **STATEFUL)


def windowed_engine(case, server, model="windows", **options):
    """Steps of 512 tokens."""
    return case.engine(model, server, **{"max_num_batched_tokens": 512, "num_gpu_blocks_override": 100} | options)


def prefixes(engine):
    """Ask three prompts; then seven prefixes of each, as prompts of their own."""
    prompts = [prompt_of(f"window-{number}", 1900) for number in range(3)]
    for prompt in prompts:
        engine.ask(prompt)
    return [prompt[: CHUNK * chunks + 60] for prompt in prompts for chunks in range(1, 8)]
