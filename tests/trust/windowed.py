"""The scenarios of models whose layers attend to a window or keep a state: their blocks are reused while their requests run.

With LMCache's connector such models have no cache. kvtier's holds the blocks of its stores in vLLM's pool.
"""

import signal

from forked import prompt_of
from rig import CHUNK
from scenarios import PATIENT, ROUNDING, each, scenario

SERVER_COPIES = ("lmcache_driven",)

# Six layers of Gemma's kind, four of GPT-OSS's with sinks, windows only, of more than a chunk, and chunks of Llama 4's kind.
MODELS = ("windows", "sinks", "windows-only", "chunked")
# Shorter than the last token of each model's hit.
LENGTHS = (2 * CHUNK, 3 * CHUNK + 1, 5 * CHUNK - 1, 7 * CHUNK + 90)


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
        for number, prompt in enumerate(prompts):
            alone = both.alone(prompt).ids
            engine.ask(prompt, salt=f"both-{number}")
            answer = both.ask(prompt, salt=f"both-{number}")
            # vLLM's own hit ends at one of its last blocks.
            right = answer.ids == alone and 1900 // CHUNK * CHUNK - 640 <= answer.external < 1900 // CHUNK * CHUNK - CHUNK
            case.check(f"{model}-local-and-loaded-{number}", right, f"{answer}, alone {alone}")
        engine.stop()
        before, together = both.call("external"), both.call("ask", prompts)
        loaded = both.call("external") - before
        right = [answer.ids for answer in together] == [both.alone(prompt).ids for prompt in prompts]
        case.check(f"{model}-together", right and loaded == 3 * (1900 // CHUNK * CHUNK), f"three at once, {loaded} tokens loaded")
        both.stop()
    case.pages_as_stored()


@scenario(*each(connectors=["kvtier"], modes=SERVER_COPIES))
def windows_held_crowded(case):
    """Few blocks, so that requests are preempted and windows' blocks reused at once, while the server is frozen or killed."""
    options = {"max_model_len": 1024, "max_num_batched_tokens": 256}
    crowded(case, "windows", options, lengths=range(530, 610, 10), answer=260, blocks=38, tie=ROUNDING)


def crowded(case, model, options, lengths, answer, blocks, tie):
    """Answers that grow by several blocks each, so that requests are preempted, beside a server that hangs, then beside one that dies."""
    server = case.server(l1_gb=1)
    case.witness()
    prompts = [prompt_of(f"{model}-{number}-{length}", length) for number in range(2) for length in lengths]
    asked = list(zip(prompts, case.answers_alone(model, prompts, answer, tie, **options), strict=True))
    first, second = asked[: len(lengths)], asked[len(lengths) :]
    engine = case.engine(model, server, PATIENT, num_gpu_blocks_override=blocks, **options)
    case.crowded("frozen", engine, server, first, 130)
    engine.stop()
    # A server that died may have read until its stores' deadline.
    hasty = PATIENT | {"kvtier.timeout": 5, "kvtier.store_timeout": 5}
    engine = case.engine(model, server, hasty, num_gpu_blocks_override=blocks, **options)
    prompts, alone = zip(*second, strict=True)
    found = engine.call("ask_broken", prompts, server.process.pid, signal.SIGKILL, count=130)
    server.kill()
    case.agree("killed-answers", found["answers"], alone, 130)
    case.check("killed-no-leak", found["free"] == found["free_before"], f"{found['free']} of {found['free_before']} blocks free")
    engine.stop()
    case.pages_as_stored()


# Models whose layers keep a recurrent state, or the last tokens of a convolution: tokens per block, at whose ends vLLM keeps them.
STATES = {"states": 256, "convolutions": 128}
# vLLM keeps states beside its own prefix cache only. Its CPU kernels for them have only bfloat16, so answers are the same only where all of
# a prompt was computed in the same steps.
STATEFUL = {"enable_prefix_caching": True, "dtype": "bfloat16", "block_size": None}


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


@scenario(*each(connectors=["kvtier"], modes=SERVER_COPIES))
def states_held_crowded(case):
    """Few blocks, so that requests are preempted and blocks of states reused at once, while the server is frozen or killed."""
    # Steps of one block beside what other requests sample.
    options = STATEFUL | {"max_model_len": 1024, "max_num_batched_tokens": 300}
    crowded(case, "states", options, lengths=range(690, 770, 10), answer=160, blocks=64, tie=0.5)


def stateful_engine(case, server, model):
    """Steps of 512 tokens."""
    return case.engine(model, server, {"kvtier.follow_resets": False}, max_num_batched_tokens=512, num_gpu_blocks_override=200, **STATEFUL)


def windowed_engine(case, server, model="windows", **options):
    """Steps of 512 tokens."""
    return case.engine(model, server, **{"max_num_batched_tokens": 512, "num_gpu_blocks_override": 100} | options)


def prefixes(engine):
    """Ask six prompts; then seven prefixes of each, as prompts of their own."""
    prompts = [prompt_of(f"window-{number}", 1900) for number in range(6)]
    for prompt in prompts:
        engine.ask(prompt)
    return [prompt[: CHUNK * chunks + 60] for prompt in prompts for chunks in range(1, 8)]
