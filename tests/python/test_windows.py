"""Models with sliding windows, chunked local attention or recurrent states, whose blocks vLLM reuses while their requests run: its own scheduler beside
the connector."""

import itertools
import random
from collections import Counter
from contextlib import closing

import pytest
from conftest import CHUNK
from kvtier.transfer import Group
from rig import tokens
from simulated import ChunkedLocalAttentionSpec, MambaSpec, Simulation, chunked, full, latent_window, latents, ring, state, window

from kvtier.vllm.kinds import _window, blocks_of_range, with_offered_states
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

# Groups of one model: blocks of different sizes, windows shorter and longer than a chunk, and not of whole blocks.
MODELS = {
    "short": [window(4, 8), full(4)],
    "gemma": [window(4, 5), window(4, 5), full(4)],
    "long": [full(4), window(4, 40)],
    "uneven": [window(8, 23), full(4), window(4, 2)],
    "only": [window(4, 24)],
    "larger-than-a-chunk": [full(16), window(16, 50)],
    "chunked": [chunked(4, 32), full(4)],
    "chunked-shorter-than-a-chunk": [full(4), chunked(4, 8)],
    "chunked-of-other-blocks": [chunked(8, 24), window(4, 9), full(4)],
    "latent-windows": [latents(16), latent_window(4, 9), latent_window(8, 40)],
    # Latents of four tokens; what is between two of them is in scratch memory, which is not cached.
    "compressed": [ring(4), latents(16, 4)],
    "compressed-and-windows": [latents(8, 4), ring(8), window(4, 9), full(4)],
}
# Of a model with recurrent states all blocks have one size, and vLLM keeps states only if it caches prefixes.
STATES = {
    "states": [state(16), full(16)],
    "several": [state(32), state(32), state(32), full(32)],
    "states-and-windows": [state(16), window(16, 37), full(16)],
}
# Answers as long as prompts, so that requests outgrow few blocks and are preempted.
LONGEST, ANSWER = 4 * CHUNK, 60


def prompts(source, count):
    """Prompts that begin alike, of up to four chunks."""
    trunk = tokens(LONGEST, source.random())
    made = []
    for _ in range(count):
        shared = source.choice([0, source.randrange(LONGEST), LONGEST])
        length = max(1, source.choice([source.randrange(1, LONGEST), source.randrange(1, 5) * CHUNK]))
        made.append([each % 4000 for each in (trunk[:shared] + tokens(LONGEST, source.random()))[:length]])
    return made


# How vLLM schedules, and what a simulation counts then. A step may be scheduled before the last one has ended. vLLM's own hits may end at
# half a block, whose state it copies (tails), or which its kernels write into a block of its own (checkpoints). With drafts, states are
# in their places behind sampling only. With priorities any request may be preempted, also one that this step has scheduled already.
SCHEDULES = {
    "plain": ({}, None),
    "async": ({"is_async": True}, "ahead"),
    "tails": ({"hash_parts": 2}, "copies"),
    "tails-async": ({"hash_parts": 2, "is_async": True}, "copies"),
    "checkpoints": ({"hash_parts": 2, "checkpoints": True}, "checkpoints"),
    "drafts": ({"drafts": 3}, "moves"),
    "priorities": ({"policy": "priority"}, "overtaken"),
}
# Beside windows vLLM finds whole blocks only.
COMBINED = [pair for pair in itertools.product(STATES, SCHEDULES) if pair[0] != "states-and-windows" or "tails" not in pair[1]]


# proves: docs/compare.md#recurrent-states
# proves: docs/compare.md#sliding-windows
@pytest.mark.parametrize(
    ("model", "schedule"),
    [*itertools.product(MODELS, ["plain"]), *itertools.product(["gemma", "chunked"], ["async", "priorities"]), *COMBINED],
)
def test_every_hit_has_the_kv_of_its_tokens(place, model, schedule):
    """Random prompts, steps, caches, tenants and numbers of blocks, with preemptions: no layer attends to wrong KV."""
    server, loaded, preempted, left = place.server("lmcache_driven"), 0, 0, 0
    seen = Counter()
    specs, (options, counted) = (MODELS | STATES)[model], SCHEDULES[schedule]
    # Blocks of the longest request at its end, with those that its windows have left.
    whole = sum((-(-(LONGEST + ANSWER) // spec.block_size) if spec.prefix_cacheable else 1) + options.get("drafts", 0) * isinstance(spec, MambaSpec) for spec in specs)
    for seed in range(3):
        source = random.Random(f"{model}-{seed}")
        engine = Simulation(
            server, model, specs, blocks=whole + [2, 6, 4 * whole][seed], caching=seed % 2 == 0 or model in STATES,
            step_tokens=source.choice([12, 32, 100, 1024]), seed=seed, **options, **{"kvtier.save_decode": True},
        )  # fmt: skip
        with closing(engine):
            free, asked = engine.free_blocks(), []
            for number, prompt in enumerate(prompts(random.Random(model), 14)):
                asked.append((prompt, source.choice([None, "alice"])))
                # The later, the more urgent.
                engine.add(f"{seed}-{number}", *asked[-1], answer=source.choice([1, ANSWER]), priority=-number)
                for _ in range(source.choice([0, 1, 4])):
                    engine.step()
            engine.run()
            # How much of these was stored before the next was looked up depends on the machine; from here on all is found.
            engine.finish_stores()
            for number, (prompt, salt) in enumerate(asked):
                # Again, and with its answer.
                engine.add(f"{seed}-again-{number}", prompt, salt, answer=1)
                engine.add(f"{seed}-turn-{number}", engine.tokens_of(f"{seed}-{number}"), salt, answer=1)
            engine.run()
            assert engine.free_blocks() == free
            assert engine.errors == 0
            loaded, preempted, left = loaded + engine.external, preempted + engine.preempted, left + engine.left
            seen += engine.seen
    print(f"{model}: {loaded} tokens loaded, {preempted} preemptions, {left} requests left, {dict(seen)}")
    assert loaded > 12 * CHUNK
    # A model of windows alone fits into few blocks.
    assert preempted > 0 or model == "only"
    assert left < 12
    # Of a model with few preemptions, few are by a later request.
    assert counted is None or seen[counted] > (0 if counted == "overtaken" else 5)


@pytest.mark.parametrize("specs", [[full(4), full(4)], [full(16), window(4, 9)], [window(4, 23), full(4)]])
def test_stale_kv_of_drafts_is_of_last_tokens_only(place, specs):
    """The KV of a model that drafts tokens depends on the next token. vLLM drops the last block of its own hits for it; a hit of a whole
    chunk has its last token's KV for the token that followed when it was stored. Drafts behind it may be worse; all that the model itself
    attends to is right, and so are its answers."""
    server, stale = place.server("lmcache_driven"), 0
    trunk = [each % 4000 for each in tokens(3 * CHUNK, "drafts")]
    for name in ("first", "second"):
        engine = Simulation(server, "drafts", specs, blocks=600, caching=True, step_tokens=64, drafts=3, draft_group=len(specs) - 1)
        with closing(engine):
            for number in range(6):
                shared = trunk[: (number % 3 + 1) * CHUNK]
                engine.add(f"{name}-{number}", shared + [each % 4000 for each in tokens(CHUNK + 1, f"{name}-{number}")], answer=20)
                engine.run()
                engine.finish_stores()
            assert engine.errors == 0 and engine.left == 0
            stale += engine.seen["stale"]
            assert name == "first" or engine.external > 0
    assert stale > 0


# proves: docs/compare.md#sliding-windows
@pytest.mark.parametrize("model", MODELS)
def test_hits_are_as_long_as_they_can_be(place, model):
    """Of what another engine has stored all whole chunks before the last token are loaded."""
    server, made = place.server("lmcache_driven"), prompts(random.Random(f"{model}-whole"), 8)
    for caching, name in ((True, "first"), (False, "second")):
        with closing(Simulation(server, model, MODELS[model], blocks=600, caching=caching, step_tokens=64)) as engine:
            found = []
            for number, prompt in enumerate(made):
                before = engine.external
                engine.add(f"{name}-{number}", prompt, answer=1)
                engine.run()
                found.append(engine.external - before)
            assert engine.errors == 0 and engine.left == 0
    assert found == [(len(prompt) - 1) // CHUNK * CHUNK for prompt in made]


# proves: docs/compare.md#recurrent-states
def test_only_offered_states_are_stored():
    """Blocks of a state's group that vLLM does not offer may be in use for other tokens by now, or for speculated ones."""
    groups = [Group(["a"], 16, 16, recurrent_state=True), Group(["b"], 16), Group(["c"], 32, 32, recurrent_state=True)]
    table = ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10])
    # One inside a block, one behind the table's end, and one of a group without states.
    offered = [(0, 11, 32), (2, 12, 64), (0, 13, 40), (0, 14, 80), (1, 15, 16)]
    found = with_offered_states(table, groups, offered)
    assert found == [[0, 11, 0, 0], [5, 6, 7, 8], [0, 12]]
    assert blocks_of_range(found, groups, 32, 0, 64) == [[-1, 11, -1, -1], [5, 6, 7, 8], [-1, 12]]


def test_states_are_not_put_off(place):
    """vLLM offers a state once. Two long prompts in one step are stored whole, though they are more blocks than other models may hold."""
    server, specs, made = place.server("lmcache_driven"), STATES["states"], [tokens(900, seed) for seed in (1, 2)]
    found = []
    for name in ("first", "second"):
        with closing(Simulation(server, "put-off", specs, blocks=600, caching=True, step_tokens=2048)) as engine:
            for number, prompt in enumerate(made):
                engine.add(f"{name}-{number}", [each % 4000 for each in prompt], answer=1)
            engine.run()
            engine.finish_stores()
            found.append(engine.external)
            assert engine.errors == 0
    assert found == [0, 2 * (899 // 16 * 16)]


# proves: docs/compare.md#recurrent-states
@pytest.mark.parametrize(("model", "schedule"), [pair for pair in COMBINED if pair[1] not in ("checkpoints", "priorities")])
def test_hits_end_at_the_last_state(place, model, schedule):
    """Of what another engine has stored everything up to the last state that vLLM keeps of a prompt is loaded, by chunks of one block."""
    server, made = place.server("lmcache_driven"), prompts(random.Random(f"{model}-whole"), 8)
    found = []
    for name in ("first", "second"):
        options = SCHEDULES[schedule][0]
        with closing(Simulation(server, model, STATES[model], blocks=600, caching=True, step_tokens=64, **options)) as engine:
            for number, prompt in enumerate(made):
                before = engine.external
                engine.add(f"{name}-{number}", prompt, f"{number}", answer=1)
                engine.run()
                engine.finish_stores()
                found.append(engine.external - before)
            assert engine.errors == 0 and engine.left == 0
    block = STATES[model][0].block_size
    assert found[: len(made)] == [0] * len(made)
    assert found[len(made) :] == [(len(prompt) - 1) // block * block for prompt in made]


def random_specs(source):
    """One to three groups: with blocks that divide a chunk, or where vLLM needs it, all with blocks of a chunk."""
    kind = source.choice(["windows", "windows", "states", "chunked"])
    sizes = [4, 8, CHUNK] if kind == "windows" else [CHUNK]
    attention = {
        "full": lambda: full(source.choice(sizes)),
        "window": lambda: window(source.choice(sizes), source.randrange(2, 5 * CHUNK)),
        "chunked": lambda: chunked(CHUNK, source.randrange(1, 5) * CHUNK),
        "state": lambda: state(CHUNK),
    }
    # Without full attention vLLM computes no chunk at whose end its own chunked attention needs nothing.
    first = {"windows": ["window"], "states": ["state"], "chunked": ["chunked", "full"]}[kind]
    more = source.choices(["full", "window", first[0]], k=source.randrange(4 - len(first)))
    specs = [attention[name]() for name in first + more]
    source.shuffle(specs)
    return specs


def groups_by_object(specs):
    """The groups of each object of a chunk: those that need the same chunks are in one."""
    found = {}
    for group, spec in enumerate(specs):
        window = _window(spec)
        key = "state" if isinstance(spec, MambaSpec) else -(-window // CHUNK) if window > 0 else "all"
        found.setdefault(key, []).append(group)
    return list(found.values())


def listed(server):
    """The keys of all objects in L1."""
    return [entry["key"] for entry in server.get("/cache/objects?tier=l1&page_size=5000")[1]["entries"]]


# proves: docs/compare.md#sliding-windows
@pytest.mark.parametrize("seed", range(16))
def test_hits_are_those_of_vllm(place, seed):
    """The same chunks of the same groups are in vLLM's own prefix cache and in the server, and are removed from both in random order: the
    connector finds what `find_longest_cache_hit` finds, in whole chunks. Of chunked attention it asks for a whole chunk of it before the
    end of a hit, and so may find less."""
    source, server, chunks = random.Random(f"vllm-{seed}"), place.server("lmcache_driven"), 8
    specs = random_specs(source)
    prompt = [each % 4000 for each in tokens(chunks * CHUNK + 1, seed)]
    with closing(Simulation(server, f"vllm-{seed}", specs, blocks=600, caching=True, step_tokens=64)) as engine:
        # A chunk more each time, so that each window and each state is stored at each end.
        places = {}
        for count in range(1, chunks + 1):
            engine.add(f"{count}", prompt[: count * CHUNK + 1], answer=1)
            engine.run()
            engine.finish_stores()
            for key in listed(server):
                places.setdefault(key["chunk_hash_hex"], count - 1)
        objects, of_object = listed(server), groups_by_object(specs)
        assert len(objects) == chunks * len(of_object) and len(places) == chunks and engine.errors == 0
        asked, coordinator = engine.request("asked", prompt), coordinator_of(engine)
        cached = {}
        for group, spec in enumerate(specs):
            pool, count = coordinator.single_type_managers[group].block_pool, chunks * CHUNK // spec.block_size
            cached[group] = pool.get_new_blocks(count)
            pool.cache_full_blocks(asked, cached[group], 0, count, spec.block_size, group)
        source.shuffle(objects)
        found, wanted = [], []
        for key in [None, *objects]:
            if key is not None:
                first = places[key["chunk_hash_hex"]] * CHUNK
                for group in of_object[key["object_group_id"]]:
                    size = specs[group].block_size
                    removed = {block.block_id for block in cached[group][first // size : (first + CHUNK) // size]}
                    coordinator.single_type_managers[group].block_pool.evict_blocks(removed)
                status, answer = server.request("DELETE", "/cache/objects", {"keys": [key], "tier": "l1", "force": True})
                assert status == 200, answer
            wanted.append(coordinator.find_longest_cache_hit(asked.block_hashes, chunks * CHUNK)[1])
            found.append(engine.matched(f"{len(found)}", prompt))
        assert found[0] == wanted[0] == chunks * CHUNK and found[-1] == wanted[-1] == 0
        print(f"{specs}: {found}")
        if any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in specs):
            assert all(one <= other for one, other in zip(found, wanted, strict=True)), (found, wanted)
        else:
            assert found == wanted


def coordinator_of(engine):
    """vLLM's own search for hits in the groups of an engine, in whole chunks."""
    return HybridKVCacheCoordinator(
        engine.cache, max_model_len=1024, max_in_flight_tokens=1024, use_eagle=False, enable_caching=True, enable_kv_cache_events=False,
        dcp_world_size=1, pcp_world_size=1, scheduler_block_size=CHUNK, hash_block_size=engine.hash_block, allow_partial_hash_hits=False,
    )  # fmt: skip
