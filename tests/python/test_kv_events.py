"""KV events of vLLM's connector: fields as vLLM has them for its own blocks, and removals that routers follow."""

import hashlib
import random
from contextlib import closing
from types import SimpleNamespace

import msgspec
import pytest
from conftest import CHUNK
from kvrig import tiers
from kvrig.kv_readers import DynamoReader, LlmdReader
from kvrig.waiting import wait_until
from rig import tokens
from simulated import Simulation, chunked, full, latents, state, window  # skips without vLLM

from vllm_rig import request

from kvtier._native import Prompt
from kvtier.operation import NO_BLOCK
from kvtier.transfer import Group
from kvtier.vllm import events as events_module
from kvtier.vllm.events import Announcements
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

MODELS = {
    "full": [full(4)],
    "latents": [latents(8)],
    "windows": [full(4), window(4, 8), full(4)],
    "windows-of-other-blocks": [window(8, 23), full(4)],
    "local": [full(4), chunked(4, 8)],
    "states": [state(16), full(16)],
}
# How many chunks each prompt has that is asked for.
CHUNKS = 3


def prompt(seed, chunks=CHUNKS):
    """A prompt of whole chunks and one token, of the model's vocabulary."""
    return [each % 4000 for each in tokens(chunks * CHUNK + 1, seed)]


def events_of(payloads):
    """The events of batches, as maps."""
    return [event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]


def blocks_of(events, medium):
    """(group, hash) -> what `BlockStored` events say of this block. vLLM leaves hashes out of events of windows and states, whose
    tokens and parents are then not known."""
    found = {}
    for event in events:
        if event["type"] != "BlockStored" or event["medium"] != medium:
            continue
        hashes, size, parent = event["block_hashes"], event["block_size"], event["parent_block_hash"]
        is_dense = len(event["token_ids"]) == size * len(hashes)
        assert is_dense or medium == "GPU"
        assert len(event["extra_keys"]) == len(hashes)
        for place, each in enumerate(hashes):
            facts = {name: event.get(name) for name in event if name not in ("block_hashes", "medium")}
            facts |= {"extra_keys": event["extra_keys"][place], "parent_block_hash": parent, "token_ids": event["token_ids"][place * size : place * size + size]}
            parent = each
            if not is_dense:
                del facts["parent_block_hash"], facts["token_ids"]
            found[event.get("group_idx"), each] = facts
    return found


def adapter(directory):
    """An adapter whose files are there."""
    (directory / "adapter").mkdir()
    (directory / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    return LoRARequest("lora-name", 3, str(directory / "adapter"))


def picture(offset, length, name="a"):
    """A picture at this place."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return MultiModalFeatureSpec(None, "image", digest, PlaceholderRange(offset, length), digest)


KINDS = {
    "plain": lambda directory: {},
    "salted": lambda directory: {"cache_salt": "alice"},
    "adapter": lambda directory: {"lora_request": adapter(directory)},
    "pictures": lambda directory: {"mm_features": [picture(3, 8), picture(14, 20, "b"), picture(36, 2, "c")]},
    "all": lambda directory: {
        "cache_salt": "alice", "lora_request": adapter(directory), "mm_features": [picture(0, 40)], "session_id": "s1"
    },
}  # fmt: skip


# proves: docs/python.md#kv-events
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_stored_blocks_are_described_as_vllms_own(place, tmp_path, model, kind):
    """Field by field, except for the medium."""
    directory = tmp_path / "files"
    directory.mkdir()
    more = KINDS[kind](directory)
    with closing(Simulation(place.server(), model, MODELS[model], blocks=600, caching=True, step_tokens=CHUNK, events=True)) as engine:
        engine.scheduler.encoder_cache_manager, engine.scheduler.max_num_encoder_input_tokens = EncoderCacheManager(10_000), 10_000
        contents = engine.ours._scheduling.keys._contents
        contents._has_hashes, contents._started = True, contents._started + 10**12
        engine.add("a", prompt(kind), more.pop("cache_salt", None), more=more)
        engine.run()
        engine.finish_stores()
        events = events_of(engine.published.batches)
        own, ours = blocks_of(events, "GPU"), blocks_of(events, "CPU")
        plain = engine.request("b", prompt(kind))
        assert engine.errors == 0
    known = {key: facts for key, facts in own.items() if key in ours}
    assert {key: {name: ours[key].get(name) for name in facts} for key, facts in known.items()} == known
    assert {group for group, _ in known} == set(range(len(MODELS[model]))), "each group has blocks in both"
    for number, spec in enumerate(MODELS[model]):
        whole = {key for key in ours if key[0] == number}
        if getattr(spec, "sliding_window", 0) is None:
            assert len(whole) == CHUNKS * CHUNK // spec.block_size and whole <= own.keys()
    hashes = {maybe_convert_block_hash(each) for each in plain.block_hashes}
    assert hashes.isdisjoint(each for _, each in ours) == (kind != "plain")


class Router:
    """Both readers of one engine's batches. They get every third; the others are replayed."""

    def __init__(self, batches):
        self.batches = batches
        self.readers = [reader(self.batches.__getitem__) for reader in (LlmdReader, DynamoReader)]

    def check(self, announcements, groups):
        """Checks that each reader has what is announced of these groups."""
        for number in [*range(2, len(self.batches), 3), len(self.batches) - 1]:
            for reader in self.readers:
                if reader.next <= number:
                    reader.receive(number, self.batches[number])
        expected, in_tiers = (announced(announcements, groups, medium) for medium in ("CPU", "STORAGE"))
        llmd, dynamo = self.readers
        assert llmd.resident("cpu") == expected and dynamo.resident("host") == {each for _, each in expected}
        assert llmd.resident("storage") == in_tiers and dynamo.resident("disk") == {each for _, each in in_tiers}
        assert llmd.rejected == [] and dynamo.rejected == []
        assert announcements._hashes == sum(len(hashes) for chunk in announcements._chunks.values() for hashes in chunk.hashes.values())
        return expected


def announced(announcements, groups, medium="CPU"):
    """(group, hash) of the blocks of these groups that are announced in a medium."""
    chunks = [chunk for chunk in announcements._chunks.values() if medium in chunk.media]
    return {(number, each) for chunk in chunks for number, hashes in chunk.hashes.items() for each in hashes if number in groups}


def removals(batches):
    """(group, hash) of all removals in this medium."""
    return [(event.get("group_idx"), each) for event in events_of(batches) if event["type"] == "BlockRemoved" and event["medium"] == "CPU" for each in event["block_hashes"]]


# proves: docs/python.md#kv-events
@pytest.mark.parametrize("model", ["full", "windows"])
def test_readers_end_with_what_is_resident(place, model):
    """Over stores, equal stores, evictions, another server, a server that hangs, resets, and batches that were missed."""
    server, groups = place.server(), {number for number, spec in enumerate(MODELS[model]) if spec == full(4)}
    server.expect_trouble("worker")
    options = {"kvtier.follow_resets": True, "kvtier.heartbeat": 1}
    engine = Simulation(server, model, MODELS[model], blocks=600, caching=True, step_tokens=64, events=True, **options)
    with closing(engine):
        scheduling = engine.ours._scheduling
        router, announcements = Router(engine.published.batches), scheduling.announcements

        def asks(name, seed, salt=None):
            engine.add(name, prompt(seed), salt)
            engine.run()
            engine.finish_stores()

        def steps_until(what, condition):
            wait_until(lambda: engine.step() or condition(), 60, what)

        def are_healthy():
            return scheduling.adapter.is_healthy and engine.our_worker._adapter.is_healthy

        def check(*found):
            """Of these prompts everything is resident and announced, of others nothing."""
            expected = router.check(announcements, groups)
            assert len(expected) == len(found) * CHUNKS * CHUNK // 4 * len(groups)
            for number, (seed, salt) in enumerate(found):
                # The rest of a chunk is needed: vLLM computes the last token.
                assert engine.matched(f"check-{engine.steps}-{number}", prompt(seed), salt) == CHUNKS * CHUNK
                hashes = engine.request("r", prompt(seed), salt).block_hashes[: CHUNKS * CHUNK // 4]
                assert {(group, maybe_convert_block_hash(each)) for each in hashes for group in groups} <= expected

        asks("a", "one")
        asks("b", "one", "alice")
        asks("c", "two")
        check(("one", None), ("one", "alice"), ("two", None))
        # The server evicts everything that no lookup leases. Its events say so of chunks without a salt, and a lookup of the others.
        salted = CHUNKS * CHUNK // 4 * len(groups)
        steps_until("the removals", lambda: server.post("/cache/clear") and len(announced(announcements, groups)) == salted)
        assert engine.matched("d", prompt("one"), "alice") == 0
        engine.step()
        check()
        for name, seed, salt in (("e", "one", None), ("f", "one", "alice")):
            asks(name, seed, salt)
        check(("one", None), ("one", "alice"))
        # Another server at this address has nothing.
        server.kill()
        steps_until("the lost server", lambda: not scheduling.adapter.is_healthy)
        engine.step()
        assert router.check(announcements, groups) == set()
        server.start()
        steps_until("the next server", are_healthy)
        check()
        asks("g", "two")
        check(("two", None))
        # A server that hangs has the same as before, which a hit shows.
        with server.frozen():
            steps_until("the missed heartbeat", lambda: not scheduling.adapter.is_healthy)
            engine.step()
            assert router.check(announcements, groups) == set()
        steps_until("the server goes on", are_healthy)
        check()
        asks("h", "two")
        check(("two", None))
        # vLLM itself announces resets; what was stored before is not found any more.
        before = len(removals(engine.published.batches))
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.step()
        check()
        assert engine.matched("old", prompt("two")) == 0
        asks("i", "two")
        check(("two", None))
        assert len(removals(engine.published.batches)) == before > 0
        assert engine.errors == 0


# proves: docs/python.md#kv-events
def test_readers_follow_evictions(place):
    """Of more prompts than fit, the readers end with those that the server has, without a lookup."""
    server, seeds, chunks = place.server(l1_gb=1 / 512), range(40), 40
    with closing(Simulation(server, "evicted", MODELS["full"], blocks=600, caching=False, step_tokens=1024, events=True)) as engine:
        router, announcements = Router(engine.published.batches), engine.ours._scheduling.announcements
        for seed in seeds:
            engine.add(f"r{seed}", prompt(seed, chunks))
            engine.run()
            engine.finish_stores()

        def agrees():
            engine.step()
            objects = server.get("/status")[1]["storage_manager"]["l1_manager"]["total_object_count"]
            return len(announcements._chunks) == objects

        wait_until(agrees, 60, "the removals")
        expected = router.check(announcements, {0})
        assert 0 < len(expected) < len(seeds) * chunks * CHUNK // 4

        def is_right(seed):
            hashes = engine.request("r", prompt(seed, chunks)).block_hashes[: chunks * CHUNK // 4]
            known = [(0, maybe_convert_block_hash(each)) in announced(announcements, {0}) for each in hashes]
            return engine.matched(f"m{seed}", prompt(seed, chunks)) == 4 * (known + [False]).index(False)

        # The server may still be evicting.
        wait_until(lambda: engine.step() or all(map(is_right, seeds)), 60, "readers that know what hits")
        assert engine.errors == 0


# proves: docs/python.md#kv-events
def test_readers_follow_tiers(place, tmp_path):
    """What L1 has lost stays with another medium until its tier loses it too, and is back in L1 after a hit."""
    tier = tiers.fs(tmp_path / "tier", max_capacity_gb=40 * (CHUNK * 256 + 4096) / 2**30)
    server = place.server(flags=tier)
    with closing(Simulation(server, "tiers", MODELS["full"], blocks=600, caching=False, step_tokens=64, events=True)) as engine:
        router, announcements = Router(engine.published.batches), engine.ours._scheduling.announcements
        count = lambda medium: len(announced(announcements, {0}, medium)) * 4 // CHUNK  # noqa: E731

        def stores(seed):
            engine.add(f"r{seed}", prompt(seed))
            engine.run()
            engine.finish_stores()
            tiers.settled(server)

        def steps_until(expected):
            wait_until(lambda: engine.step() or (count("CPU"), count("STORAGE")) == expected, 60, f"{expected} chunks in L1 and the tier")
            router.check(announcements, {0})

        stores("first")
        steps_until((CHUNKS, 0))
        wait_until(lambda: server.post("/cache/clear") and engine.step() or count("CPU") == 0, 60, "an empty L1")
        steps_until((0, CHUNKS))
        assert engine.matched("again", prompt("first")) == CHUNKS * CHUNK
        steps_until((CHUNKS, CHUNKS))
        # Others take the place of the first in the tier, which L1 still has.
        known = announced(announcements, {0}, "STORAGE")
        seeds = iter(range(100))

        def displaces():
            stores(next(seeds))
            engine.step()
            return not known & announced(announcements, {0}, "STORAGE")

        wait_until(displaces, 60, "evictions from the tier")
        assert known <= router.check(announcements, {0})
        assert engine.errors == 0


@pytest.mark.parametrize("flags, obstacle", [(["--kv-event-log-size", "0"], "--kv-event-log-size 0"), (["--hash-algorithm", "sha256_cbor"], "BLAKE3")])
def test_lookup_tells_of_evictions_that_events_do_not(place, flags, obstacle):
    """The connector goes on without the server's events, and knows why."""
    server = place.server(flags=flags)
    with closing(Simulation(server, "alone", MODELS["full"], blocks=600, caching=False, step_tokens=64, events=True)) as engine:
        router, scheduling = Router(engine.published.batches), engine.ours._scheduling
        for turn in range(2):
            engine.add(f"r{turn}", prompt("one"))
            engine.run()
            engine.finish_stores()
            wait_until(lambda: engine.step() or obstacle in (scheduling.server_events.obstacle or ""), 60, "the obstacle")
        assert len(router.check(scheduling.announcements, {0})) == CHUNKS * CHUNK // 4
        # Nothing is hashed for events that do not come.
        assert {chunk.key for chunk in scheduling.announcements._chunks.values()} == {None}
        objects = lambda: server.get("/status")[1]["storage_manager"]["l1_manager"]["total_object_count"]  # noqa: E731
        wait_until(lambda: server.post("/cache/clear") and objects() == 0, 60, "an empty server")
        assert len(router.check(scheduling.announcements, {0})) == CHUNKS * CHUNK // 4
        assert engine.matched("m", prompt("one")) == 0
        engine.step()
        assert router.check(scheduling.announcements, {0}) == set()


def test_missed_events_remove_all(place):
    """A log that forgets before it is read: what may be stale is removed, and a hit is announced again."""
    server = place.server(flags=["--kv-event-log-size", "1"])
    with closing(Simulation(server, "gap", MODELS["full"], blocks=600, caching=False, step_tokens=64, events=True)) as engine:
        router, scheduling = Router(engine.published.batches), engine.ours._scheduling
        first, _ = scheduling.server_events.take()
        for name, seed in (("a", "one"), ("b", "two"), ("c", "one")):
            engine.add(name, prompt(seed))
            engine.run()
            engine.finish_stores()
        assert scheduling.announcements.connection[1] > first
        assert len(router.check(scheduling.announcements, {0})) == CHUNKS * CHUNK // 4
        assert engine.errors == 0


def test_hit_is_announced(place):
    """What another engine has stored, and what a server that was away still has; once."""
    server = place.server()
    for name in ("first", "second"):
        with closing(Simulation(server, "hits", [full(4)], blocks=600, caching=True, step_tokens=CHUNK, events=True)) as engine:
            for turn in range(2):
                engine.add(f"{name}-{turn}", prompt("hit"))
                engine.run()
                engine.finish_stores()
            ours = [event for event in events_of(engine.published.batches) if event.get("medium") == "CPU"]
            assert len(ours) == CHUNKS and len(blocks_of(ours, "CPU")) == CHUNKS * CHUNK // 4
            assert [event["token_ids"] for event in ours] == [prompt("hit")[at : at + CHUNK] for at in range(0, CHUNKS * CHUNK, CHUNK)]
            assert {chunk.key for chunk in engine.ours._scheduling.announcements._chunks.values()} == set(Prompt(prompt("hit")).chunk_hashes(CHUNK))
            assert (engine.external > 0) == (name == "second")


@pytest.mark.parametrize("follows", [True, False])
def test_reset_without_the_connector_is_followed(place, follows):
    """vLLM announces it for all media, whether keys change or not; what is still found is announced again."""
    options = {"kvtier.follow_resets": follows}
    with closing(Simulation(place.server(), "alone", [full(4)], blocks=600, caching=True, step_tokens=64, events=True, **options)) as engine:
        router, announcements = Router(engine.published.batches), engine.ours._scheduling.announcements
        for name in ("a", "b"):
            engine.add(name, prompt("alone"))
            engine.run()
            engine.finish_stores()
            assert len(router.check(announcements, {0})) == CHUNKS * CHUNK // 4
            assert engine.scheduler.reset_prefix_cache()
            engine.step()
            assert router.check(announcements, {0}) == set()
        assert removals(engine.published.batches) == [] and (engine.external > 0) != follows


def test_store_before_reset_is_not_announced(place):
    """Its report arrives when vLLM has announced that everything is cleared, and no request finds it any more."""
    with closing(Simulation(place.server(), "late", [full(4)], blocks=600, caching=True, step_tokens=64, events=True)) as engine:
        engine.add("a", prompt("late"))
        engine.run()
        engine.finish_stores()
        scheduling = engine.ours._scheduling
        before = announced(scheduling.announcements, {0})
        reports, apply, scheduling._apply_report = [], scheduling._apply_report, lambda report: reports.append(report)
        engine.add("b", prompt("later"))
        wait_until(lambda: engine.step() or any(report.stored for report in reports), 60, "the report")
        # vLLM's own cache is not reset, so vLLM announces nothing.
        scheduling.reset_cache()
        for report in reports:
            apply(report)
        engine.step()
        assert announced(scheduling.announcements, {0}) == set()
        assert sorted(removals(engine.published.batches)) == sorted(before) != []
        scheduling._apply_report = apply
        engine.run()


def announcements_of(specs, **options):
    """The announcements of a model that is connected, and its groups."""
    groups = [Group([f"g{number}"], spec.block_size, -1 if getattr(spec, "sliding_window", 0) is None else 8) for number, spec in enumerate(specs)]
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([f"g{number}"], spec) for number, spec in enumerate(specs)])
    cache.hash_block_size = 4
    made = Announcements(cache, groups, **options)
    made.follow((1, 0), {})
    return made


def keys_of(asked):
    """The server's hashes of the chunks of vLLM's request."""
    return [] if asked.cache_salt else Prompt(list(asked.all_token_ids)).chunk_hashes(CHUNK)


def vllm_request(name, ids, **more):
    """vLLM's request."""
    return Request(name, ids, SamplingParams(max_tokens=1), None, block_hasher=get_request_block_hasher(4, sha256), **more)


@pytest.mark.parametrize("seed", range(20))
def test_readers_follow_random_lives(seed):
    """Prompts that begin alike are stored, found and evicted in any order, with a small limit: nothing is announced or removed twice. The
    server's events and the workers' reports come late."""
    source, specs = random.Random(seed), MODELS["windows"]
    announcements, batches, connection = announcements_of(specs, max_hashes=40 + 20 * seed), [], (1, 0)
    resident, in_tier, late, late_tier = set(), set(), [], {}
    router, trunk, waiting = Router(batches), prompt(seed, 6), []
    for turn in range(250):
        rare = ["missed", "server", "reset"] if connection is not None else ["server"]
        action = source.choice(rare if turn % 8 == 7 else ["store", "report", "report", "find", "events", "evict", "tier"])
        cleared = []
        shared = source.randrange(6 * CHUNK)
        asked = vllm_request(f"r{turn}", trunk[:shared] + prompt(f"{seed}-{source.randrange(4)}", 6)[shared:], cache_salt=source.choice([None, "alice"]))
        if action == "store":
            start = source.randrange(3) * CHUNK
            places = (6 * CHUNK - start) // 4
            held = [[1] * places, [source.choice([NO_BLOCK, 1]) for _ in range(places)], [1] * places]
            made = announcements.chunks(asked, start, 6 * CHUNK, CHUNK, keys_of(asked), held)
            for number, chunk in made.items():
                first = number * CHUNK // 4
                places = [start // 4 + place for place in range(first, first + CHUNK // 4) if held[1][place] != NO_BLOCK]
                hashes = [each for group, event in chunk.events if group == 1 for each in event.block_hashes]
                assert hashes == [maybe_convert_block_hash(asked.block_hashes[place]) for place in places]
            waiting += made.values()
            late += [(chunk.key, True) for chunk in made.values() if chunk.key not in resident]
            resident |= {chunk.key for chunk in made.values()}
        elif action == "report" and waiting:
            # Mostly in order.
            for _ in range(min(len(waiting), source.randrange(8))):
                announcements.stored(waiting.pop(source.choice([0, 0, source.randrange(len(waiting))])))
        elif action == "find":
            keys = keys_of(asked)
            count = [*(key in resident for key in keys), False].index(False) if keys else source.randrange(7)
            announcements.found(asked, count * CHUNK, CHUNK, keys)
        elif action == "missed":
            announcements.missed(asked, source.randrange(7) * CHUNK, 6 * CHUNK, CHUNK)
        elif action == "evict" and (evicted := resident - {None}):
            # Mostly an announced one.
            evicted = evicted & {chunk.key for chunk in announcements._chunks.values()} or evicted
            gone = set(source.sample(sorted(evicted), min(len(evicted), source.choice([1, 1, 3]))))
            late += [(key, False) for key in gone]
            resident -= gone
            moved = {key for key in gone if source.random() < 0.7}
            in_tier |= moved
            late_tier |= dict.fromkeys(moved, True)
        elif action == "tier" and in_tier:
            late_tier[source.choice(sorted(in_tier))] = False
            in_tier -= {key for key, is_stored in late_tier.items() if not is_stored}
        elif action == "events" and connection is not None:
            count = source.choice([source.randrange(len(late) + 1), len(late)])
            # Those of tiers come behind what L1 has lost.
            announcements.follow(connection, dict(late[:count]), late_tier if count == len(late) else {})
            late_tier = {} if count == len(late) else late_tier
            del late[:count]
        elif action == "server" and connection != (after := source.choice([None, connection, (turn, 0)])):
            connection = after if connection is not None else (turn, 0)
            for each in (resident, in_tier, late, late_tier):
                each.clear()
            announcements.follow(connection, {})
        elif action == "reset":
            announcements.reset()
            cleared.append(AllBlocksCleared())
        batch = KVEventBatch(ts=0.0, events=[*cleared, *announcements.take()])
        batches.append(msgspec.msgpack.encode(batch))
        router.check(announcements, {0, 2})
        assert announcements._hashes <= announcements._max_hashes
        # Nothing is announced that the server is known not to have, whatever comes first.
        for medium, held in (("CPU", resident), ("STORAGE", in_tier)):
            assert late or late_tier or {chunk.key for chunk in announcements._chunks.values() if medium in chunk.media} - {None} <= held
    assert removals(batches)


# proves: docs/python.md#kv-events
def test_chunk_moves_from_medium_to_medium():
    """Its events in another medium are those of its store; without the chunk before it there are none."""
    announcements, asked = announcements_of([full(4)]), vllm_request("r", prompt("moved", 2), session_id="s", mm_features=[picture(8, 2)])
    first, second = keys = keys_of(asked)
    announcements.found(asked, 2 * CHUNK, CHUNK, keys)
    stored = announcements.take()
    assert [event.medium for event in stored] == ["CPU", "CPU"]

    def follows(changes, tiers):
        announcements.follow((1, 0), changes, tiers)
        events = announcements.take()
        return [(type(event).__name__, event.medium, stored[1].block_hashes == event.block_hashes) for event in events], events

    changes, events = follows({second: False}, {second: True})
    assert changes == [("BlockStored", "STORAGE", True), ("BlockRemoved", "CPU", True)]
    assert msgspec.structs.replace(events[0], medium="CPU") == stored[1]
    assert follows({second: True}, {})[0] == [("BlockStored", "CPU", True)]
    assert follows({second: False}, {second: True})[0] == [("BlockRemoved", "CPU", True)]
    assert follows({}, {second: False})[0] == [("BlockRemoved", "STORAGE", True)]
    announcements.follow((1, 0), {second: True})
    announcements.found(asked, 2 * CHUNK, CHUNK, keys)
    announcements.follow((1, 0), {first: False})
    announcements.take()
    assert follows({second: False}, {second: True})[0] == [("BlockRemoved", "CPU", True)]
    assert announcements._chunks == announcements._identities == {} and announcements._hashes == 0


def test_removed_chunk_waits_until_it_is_stored_again():
    """Its report is earlier than the server's event, and a chunk behind it waits too."""
    announcements, asked = announcements_of([full(4)]), vllm_request("r", prompt("again", 2))
    first, second = keys = keys_of(asked)
    announcements.found(asked, 2 * CHUNK, CHUNK, keys)
    announcements.follow((1, 0), {first: False, second: False})
    for changes, known in (({}, 0), ({second: True}, 0), ({first: True}, 2)):
        announcements.found(asked, 2 * CHUNK, CHUNK, keys)
        announcements.follow((1, 0), changes)
        assert len(announcements._chunks) == known
    announcements.follow((1, 1), {})
    assert announcements._chunks == announcements._identities == {}


@pytest.mark.parametrize("removed, expected", [([0], []), ([1, 0], [0])])
def test_chunk_of_a_forgotten_removal_waits_no_more(monkeypatch, removed, expected):
    """It was evicted long ago: the chunk itself, one that waits behind it, and one that is behind a later removal."""
    monkeypatch.setattr(events_module, "_MAX_REMOVED", 4)
    announcements, asked = announcements_of([full(4)]), vllm_request("r", prompt("forgotten", 2))
    keys = keys_of(asked)
    announcements.follow((1, 0), {keys[number]: False for number in removed})
    announcements.found(asked, 2 * CHUNK, CHUNK, keys)
    announcements.follow((1, 0), {keys[1]: False, **{bytes([number]): False for number in range(5 - len(removed))}})
    announcements.follow((1, 0), {keys[0]: True})
    assert [chunk.key for chunk in announcements._chunks.values()] == [keys[number] for number in expected]
    assert announcements._waiting == {}


def test_earliest_waiting_chunk_gives_way(monkeypatch):
    """Of more than the limit the latest are announced when they are stored, and only they are looked at."""
    monkeypatch.setattr(events_module, "_MAX_WAITING", 3)
    announcements, prompts = announcements_of([full(4)]), [vllm_request(f"r{number}", prompt(f"wait-{number}", 1)) for number in range(5)]
    keys = [keys_of(asked)[0] for asked in prompts]
    announcements.follow((1, 0), dict.fromkeys(keys, False))
    for asked, key in zip(prompts, keys, strict=True):
        announcements.found(asked, CHUNK, CHUNK, [key])
    looked, stored = [], announcements.stored
    monkeypatch.setattr(announcements, "stored", lambda chunk: (looked.append(chunk.key), stored(chunk)))
    for key in keys:
        announcements.follow((1, 0), {key: True})
    assert looked == [chunk.key for chunk in announcements._chunks.values()] == keys[2:]
    assert announcements._waiting == announcements._removed == {}


def test_limit_leaves_no_chunk_without_the_one_before():
    """Beyond the limit the oldest prompts are removed, each with its end."""
    announcements, order = announcements_of([full(4)], max_hashes=40), []
    for number in range(6):
        asked = vllm_request(f"r{number}", prompt(f"limit-{number}", 6))
        for chunk in announcements.chunks(asked, 0, 6 * CHUNK, CHUNK, []).values():
            announcements.stored(chunk)
            order.append(chunk.identity)
            chunks = announcements._chunks
            assert all(each.parent is None or each.parent in chunks for each in chunks.values())
    assert 0 < len(announcements._chunks) < len(order)
    assert order[-1] in announcements._chunks and order[0] not in announcements._chunks


RELEASES = {
    "0.19": ["extra_keys"],
    "0.25": ["extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"],
    "0.33": ["extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id", "lookahead_token_ids"],
}


# proves: docs/python.md#kv-events
@pytest.mark.parametrize("release", RELEASES)
def test_events_have_the_fields_of_each_release(monkeypatch, release):
    """Those that a release does not know are left out."""
    first = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    kind = msgspec.defstruct("BlockStored", [*first, *((name, object, None) for name in RELEASES[release])], tag=True, omit_defaults=True)
    removed = msgspec.defstruct("BlockRemoved", ["block_hashes", "medium"] if release == "0.19" else ["block_hashes", "medium", "group_idx"], tag=True)
    monkeypatch.setattr(events_module, "BlockStored", kind)
    monkeypatch.setattr(events_module, "BlockRemoved", removed)
    if release == "0.19":
        for name in ("get_kv_cache_spec_kind", "get_kv_cache_spec_sliding_window"):
            monkeypatch.delattr(events_module.kv_cache_interface, name)
    ahead = 2 if release == "0.33" else 0
    announcements = announcements_of([full(4)], lookahead=ahead)
    asked = vllm_request("r", prompt("fields", 1), cache_salt="alice", session_id="s", mm_features=[picture(8, 2)])
    announcements.found(asked, CHUNK, CHUNK, [])
    announcements.follow(None, {})
    stored, gone = announcements.take()
    assert set(stored.__struct_fields__) == {*first, *RELEASES[release]}
    # A hash that covers tokens ahead covers the pictures among them.
    near = [("alice",), (((picture(8, 2).identifier, 4),) if ahead else None), ((picture(8, 2).identifier, 0),), None]
    assert stored.extra_keys == near
    if ahead:
        ids = asked.all_token_ids
        assert stored.lookahead_token_ids == [list(ids[end : end + 2]) for end in (4, 8, 12, 16)] and stored.session_id == "s"
    assert gone.block_hashes == stored.block_hashes and gone.medium == "CPU"


def test_request_without_hashes_has_no_events():
    """vLLM without a prefix cache makes none."""
    announcements = announcements_of([full(4)])
    bare = SimpleNamespace(block_hashes=[], all_token_ids=prompt("none", 2))
    assert announcements.chunks(bare, 0, 2 * CHUNK, CHUNK, []) == {}
    announcements.found(bare, 2 * CHUNK, CHUNK, [])
    assert announcements.take() == []


@pytest.mark.parametrize("broken", ["chunks", "found"])
def test_request_without_events_is_cached(place, engines, monkeypatch, broken):
    """If they cannot be made, as of a request that is not vLLM's, chunks are stored and loaded."""
    engine, ids = engines(place.server(), events=True), tokens(CHUNK + 1, broken)

    def raises(*arguments):
        raise RuntimeError("as a bug has it")

    monkeypatch.setattr(Announcements, broken, raises)
    engine.prefill(request("a", ids), range(1, 6))
    again = request("b", ids)
    assert engine.match(again) == (CHUNK, True)
    assert engine.load(again, range(11, 16), 0, CHUNK) == set()
    engine.finish(again)
    assert engine.scheduler._scheduling.errors.count > 0


def test_hits_count_as_host_memory(engines, place):
    """The connector does not know which chunks the server read from a tier first."""
    engine = engines(place.server())
    sources = engine.scheduler.get_external_cache_hit_sources
    assert sources(None, 0) == {} and {source.value: count for source, count in sources(None, 48).items()} == {"host": 48}


def test_fields_of_this_release_are_known():
    """One that vLLM adds is noticed: it may be one that routers need."""
    known = {*RELEASES["0.33"], "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
    assert set(BlockStored.__struct_fields__) <= known
