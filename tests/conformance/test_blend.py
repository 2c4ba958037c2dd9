"""Text in the middle of a prompt: found and answered as by LMCache's blend server, and not lost where that one loses it."""

import pytest
import torch
from kvrig import blend, tiers
from kvrig.engine import tokens
from kvrig.server import INSTANCE, Server, our_command, peer_command
from kvrig.waiting import wait_until

DOC, HEAD, OTHER_HEAD = tokens(64, 1), tokens(21, 2), tokens(32, 3)
SHIFTED = HEAD + DOC + tokens(11, 4)
# Each chunk of the document but its first, which a prefix serves: where it was stored, and where it is in SHIFTED.
MOVED = [(16, 37), (32, 53), (48, 69)]

# Lookups once DOC is stored: prompt, salt, tokens of the prefix, and segments, as `blend.segments` has them.
LOOKUPS = {
    "the same prompt": (DOC, "", 64, []),
    "unaligned": (SHIFTED, "", 0, MOVED),
    "two copies of a chunk": (HEAD[:3] + DOC[16:32] + HEAD[:5] + DOC[16:32], "", 0, [(16, 3)]),
    "a part": (HEAD[:7] + DOC[8:56], "", 0, [(16, 15), (32, 31)]),
    "a prefix and a gap": (DOC[:32] + HEAD[:5] + DOC[32:], "", 32, [(32, 37), (48, 53)]),
    "another salt": (SHIFTED, "bob", 0, []),
}
BEHIND_TWO_PREFIXES = {"behind two prefixes": (HEAD[:4] + DOC[16:48], "", 0, [(32, 4), (48, 20)])}


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory):
    """LMCache's blend server."""
    server = Server(peer_command(), tmp_path_factory.mktemp("lmcache") / "log", flags=blend.FLAGS, peer=True)
    server.start(120)
    yield server
    server.stop()


def table():
    """Cosines and sines of no rotation."""
    return torch.cat((torch.ones(512, 4), torch.zeros(512, 4)), 1).to(torch.bfloat16)


def blending(engines, server, **options):
    """An engine whose worker has registered pages and a table."""
    engine = engines(server, **options)
    assert blend.register_rope(engine, [table()], 8) is None
    return engine


def store(engine, prompt, other, segments):
    """Store a prompt; LMCache's server finds its segments in another prompt a little later."""
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, len(prompt))
    wait_until(lambda: blend.segments(engine, other) == segments, 30, "segments of a store", interval=0.05)


def found(engine, cases):
    """The answers to lookups; they are what the table of cases says."""
    answers = {}
    for name, (prompt, salt, prefix, segments) in cases.items():
        request = engine.new_request()
        answer = answers[name] = blend.lookup(engine, prompt, request, salt)
        blend.end(engine, prompt, request, answer, salt)
        pairs = blend.positions(answer.non_prefix_segments)
        assert (answer.prefix_coverage_tokens, pairs) == (prefix, segments), name
        assert answer.segmented_prefix_segments == [], name
    return answers


def answers(engine):
    """The scenario: all answers, hashes of segments among them."""
    said = {f"handshake {version}": tuple(blend.ask(engine, "cb_protocol_handshake", version)) for version in (1, 2)}
    said |= found(engine, {"no worker": (SHIFTED, "", 0, [])})
    engine.worker.register()
    ropes = {"rope": ([table()], (0,)), "again": ([table()], (0,)), "no tables": ([], ()), "no groups": ([table()], ())}
    said |= {name: blend.register_rope(engine, tables, 8, groups) for name, (tables, groups) in ropes.items()}
    store(engine, DOC, SHIFTED, MOVED)
    said |= found(engine, LOOKUPS)
    request = engine.new_request()
    matches = blend.lookup(engine, SHIFTED, request).non_prefix_segments
    for name, segments, blocks in (("none", [], 24), ("beyond the table", matches, 5), ("partly beyond", matches, 14)):
        said[name] = blend.retrieve(engine, SHIFTED, request, segments, list(range(24, 24 + blocks)))
    engine.end(request)
    store(engine, OTHER_HEAD + DOC[16:48], HEAD[:4] + DOC[16:48], [(32, 4), (48, 20)])
    said |= found(engine, BEHIND_TWO_PREFIXES)
    instance = engine.worker.adapter.instance_id
    return said | {str(known): blend.ask(engine, "cb_unregister_rope", instance if known else 99) for known in (True, False)}


# proves: docs/blend.md#requests
@pytest.mark.ours("it is what the answers are compared with")
def test_answers_are_lmcaches(serve, engines, lmcache):
    """The scenario that was recorded of LMCache's server, at both: every answer is equal."""
    server = serve(flags=blend.FLAGS)
    ours, theirs = (answers(engines(one, register=False)) for one in (server, lmcache))
    assert ours == theirs
    assert (ours["handshake 1"], ours["handshake 2"]) == ((1, True), (1, False))
    assert [ours[name] for name in ("none", "beyond the table", "partly beyond")] == [True, True, False]


# proves: docs/blend.md#requests
@pytest.mark.ours("it never replies")
def test_refused_requests_are_answered(serve, engines):
    """What LMCache's server leaves without a reply: registrations that cannot be, with their reason, and retrieves without one."""
    server = serve(flags=blend.FLAGS)
    server.expect_trouble("cb_register_rope refused|retrieve failed")
    engine = engines(server)
    engine.store_prompt(DOC)
    request = engine.new_request()
    matches = blend.lookup(engine, SHIFTED, request).non_prefix_segments
    assert len(matches) == len(MOVED)
    retrieve = lambda **options: blend.retrieve(engine, SHIFTED, request, matches, engine.blocks_for(96, 24), **options)  # noqa: E731
    for refused, reason in (
        ({"instance": 4711}, "instance 4711"),
        ({"group_to_table": (1,)}, "group_to_cache"),
        ({"group_to_table": (-2,)}, "group_to_cache"),
        ({"quant": "int4"}, "kv_quant"),
    ):
        with pytest.raises(ValueError, match=f"{reason}.*; allowed: "):
            blend.register_rope(engine, [table()], 8, **refused)
        assert retrieve() is False, refused
    assert blend.register_rope(engine, [table()], 8) is None
    assert retrieve(instance=99) is False
    assert retrieve() is True
    engine.end(request)


# proves: docs/blend.md#what-is-found
@pytest.mark.ours("two lookups of another tenant take the fingerprints away, and a store does not bring them back")
def test_segments_are_lost_to_a_clear_only(serve, engines):
    """Lookups of another tenant take nothing away; after a clear nothing is found, and a store brings it back."""
    server = serve(flags=blend.FLAGS)
    engine = blending(engines, server)
    engine.store_prompt(DOC)
    for _ in range(3):
        assert blend.segments(engine, SHIFTED, "bob") == []
    assert blend.segments(engine, SHIFTED) == MOVED
    for _ in range(3):
        # What a request still leases stays.
        cleared = lambda: server.post("/cache/clear")[0] == 200 and tiers.metric(server, "kvtier_l1_objects") == 0  # noqa: E731
        wait_until(cleared, 30, "an empty L1")
        assert [blend.segments(engine, SHIFTED) for _ in range(3)] == [[]] * 3
        engine.store_prompt(DOC)
        assert blend.segments(engine, SHIFTED) == MOVED


# proves: docs/blend.md#requests
@pytest.mark.ours("on a CPU it copies no segment")
def test_segments_are_for_the_prompt_that_found_them(serve, engines):
    """Other tokens in the place of a segment, and a segment that is named twice, are refused."""
    engine = blending(engines, serve(flags=blend.FLAGS))
    engine.store_prompt(DOC)
    request = engine.new_request()
    matches = blend.lookup(engine, SHIFTED, request).non_prefix_segments
    retrieve = lambda prompt, named: blend.retrieve(engine, prompt, request, named, engine.blocks_for(96, 24))  # noqa: E731
    for at in (37, 84):
        assert retrieve(SHIFTED[:at] + tokens(1, 9) + SHIFTED[at + 1 :], matches) is False
    assert retrieve(tokens(21, 9) + SHIFTED[21:], matches) is True
    for named in (matches[:1] * 2, matches * 1000):
        assert retrieve(SHIFTED, named) is False
    assert retrieve(SHIFTED, matches) is True
    engine.end(request)


# proves: docs/blend.md#requests
@pytest.mark.ours("its leases are in no metric")
def test_segments_are_leased_until_the_request_ends(serve, engines):
    """A lookup leases what it finds, a second one of the request no more than that; a retrieve or the end releases it."""
    server = serve(flags=blend.FLAGS)
    engine = blending(engines, server)
    engine.store_prompt(DOC)
    leased = lambda: tiers.metric(server, "kvtier_l1_leased_objects")  # noqa: E731
    for retrieves in (False, True):
        request = engine.new_request()
        for _ in range(2):
            matches = blend.lookup(engine, SHIFTED, request).non_prefix_segments
            assert leased() == len(matches) == len(MOVED)
        # First no block of theirs is there, then all are; the third time there is nothing left to do.
        for blocks in [[1]] + [engine.blocks_for(96, 24)] * 2 if retrieves else []:
            assert blend.retrieve(engine, SHIFTED, request, matches, blocks) is True
        engine.end(request)
        wait_until(lambda: leased() == 0, 30, "the release of all leases")


# proves: docs/blend.md#what-is-found
@pytest.mark.ours("on a CPU it copies no segment")
def test_segments_are_those_of_all_ranks(serve, engines):
    """A chunk that one rank has not stored is no segment; those of both go to the pages of each, values bit by bit."""
    engine = engines(serve(flags=blend.FLAGS), ranks=2)
    source, target = engine.blocks_for(64), engine.blocks_for(96, 24)
    for worker in engine.workers:
        assert blend.segments(engine, SHIFTED) == []
        assert blend.register_rope(engine, [table()], 8, instance=worker.adapter.instance_id) is None
        assert worker.store(engine.new_request(), DOC, 0, 64, source) is True
    assert blend.segments(engine, SHIFTED) == MOVED
    request = engine.new_request()
    matches = blend.lookup(engine, SHIFTED, request).non_prefix_segments
    for worker in engine.workers:
        assert blend.retrieve(engine, SHIFTED, request, matches, target, worker=worker) is True
    engine.end(request)
    for worker in engine.workers:
        stored, loaded = (torch.stack([t.flatten(1, 2)[1] for t in worker.tensors()])[:, 4 * blocks[0] :] for blocks in (source, target))
        assert torch.equal(loaded[:, 37:85].view(torch.int16), stored[:, 16:64].view(torch.int16))


# proves: docs/blend.md#what-is-found
@pytest.mark.ours("two lookups that fail take a fingerprint away")
def test_segments_outlast_a_tier_that_fails(serve, engines, tmp_path):
    """Lookups while a tier cannot load, which is tried three times, find no segments; later ones do."""
    faults = [{"kind": "fail", "operation": "load", "limit": 4 * len(MOVED)}]
    tier = tiers.adapter("fault_inject", inner={"type": "fs", "base_path": str(tmp_path / "tier")}, faults=faults)
    server = serve(flags=[*blend.FLAGS, *tier])
    server.expect_trouble("load|tier")
    engine = blending(engines, server)
    engine.store_prompt(DOC)
    tiers.forget(engine)
    assert blend.segments(engine, SHIFTED) == []
    wait_until(lambda: blend.segments(engine, SHIFTED) == MOVED, 60, "segments from the tier")


# proves: docs/blend.md#what-is-found
@pytest.mark.ours("its index is empty after a restart")
@pytest.mark.parametrize("kept", ["tier", "l1"])
def test_segments_are_found_after_a_restart(serve, engines, tmp_path, kept):
    """What the tier has after a kill, or the restored L1 after a stop, is found in the middle of a prompt, by its tenant."""
    flags = [*blend.FLAGS, "--state-dir", str(tmp_path), "--instance-id", INSTANCE]
    flags += [*tiers.fs(tmp_path / "tier"), "--l1-restore", "off"] if kept == "tier" else ["--l1-restore", "on"]
    server = serve(command=[*our_command(), *flags])
    server.expect_trouble("instance")
    engine = blending(engines, server)
    engine.store_prompt(DOC, salt="alice")
    assert blend.segments(engine, SHIFTED, "alice") == MOVED
    engine.close()
    if kept == "tier":
        tiers.settled(server)
        # They are written each second: 72 bytes for each, behind 64.
        file = tmp_path / INSTANCE / "segments"
        wait_until(lambda: file.stat().st_size >= 64 + 72 * len(MOVED), 60, "the file of segments")
        server.kill()
    else:
        server.stop()
    server.start()
    engine = blending(engines, server)
    if kept == "tier":
        tiers.adopted(server)
    assert blend.segments(engine, SHIFTED, "alice") == MOVED
    assert blend.segments(engine, SHIFTED) == []
    request = engine.new_request()
    matches = blend.lookup(engine, SHIFTED, request, "alice").non_prefix_segments
    assert blend.retrieve(engine, SHIFTED, request, matches, engine.blocks_for(96, 24), "alice") is True
    engine.end(request)
    engine.close()
    if kept == "l1":
        server.kill()
        server.command[server.command.index("on")] = "off"
        server.start()
