"""`lmcache bench server`, LMCache's own self-checking client, passes every check of every request.

For each sequence the tool looks up (miss), stores, looks up again at once (full hit), retrieves and compares
checksums: of its own memory in engine-driven modes, through POST /cache/checksums in lmcache_driven mode.
"""

import itertools

import pytest
from kvrig import bench

CLASSICAL = "(2,256,16,2,32):float16:4"
MLA = "(1,256,16,1,64):bfloat16:4"
GROUPS = "(2,256,16,2,32):float16:4;(2,256,16,4,32):bfloat16:2;(1,256,16,1,48):float16:3"
FP8 = "(2,256,16,2,32):uint8:4"

CASES = {
    # name: (shape, flags, ranks that store, ranks that retrieve)
    "classical": (CLASSICAL, [], 1, 1),
    "fp8": (FP8, [], 1, 1),
    "mla": (MLA, [], 1, 1),
    "tp2": (CLASSICAL, ["--tp-size", "2"], 2, 2),
    "mla_tp2": (MLA, ["--use-mla", "--tp-size", "2"], 1, 2),
    "groups": (GROUPS, [], 1, 1),
}
TOKENS, CHUNK, SEQUENCES = 1024, 256, 3

# Every run uses one model name: sequence numbers must not repeat on a server that is shared.
first_sequence = itertools.count(0, 10)


def cases():
    """All shapes in all modes; engine-driven transfer knows a single layer group only."""
    for mode in ("lmcache_driven", "engine_shm", "engine_pickle"):
        for name in CASES:
            if name == "groups" and mode != "lmcache_driven":
                continue
            marks = []
            if name == "mla_tp2":
                # The tool announces one reader and then retrieves on both ranks.
                marks = [pytest.mark.ours("it drops the second reader of a lookup")]
            yield pytest.param(mode, name, marks=marks, id=f"{mode}-{name}")


# proves: docs/compare.md#clients-of-lmcache
@pytest.mark.parametrize("mode, name", cases())
def test_every_check_passes(serve, peer, mode, name):
    """Nothing but full misses, successful stores, full hits, successful retrieves, equal checksums."""
    spec, flags, writers, readers = CASES[name]
    server = serve(mode, chunk=CHUNK)
    transfer = "lmcache_driven" if mode == "lmcache_driven" else "engine_driven"
    report = bench.run(
        server, transfer, spec, next(first_sequence), SEQUENCES, TOKENS, flags,
        interval=0.3 if peer else 0.0,  # LMCache's server commits a store after it has answered
    )  # fmt: skip
    problems = report.problems(SEQUENCES, TOKENS // CHUNK, writers, readers)
    assert not problems, "\n".join(problems) + "\n--- output ---\n" + report.output


@pytest.mark.ours("the peer is the server of another release")
@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_shm", "engine_pickle"])
@pytest.mark.parametrize("name", ["classical", "mla", "tp2"])
def test_every_check_of_0_5_7_passes(serve, mode, name):
    """The same with the tool of LMCache 0.5.7, whose keys have packed token ids."""
    spec, flags, writers, readers = CASES[name]
    server = serve(mode, chunk=CHUNK)
    transfer = "lmcache_driven" if mode == "lmcache_driven" else "engine_driven"
    report = bench.run(
        server, transfer, spec, next(first_sequence), SEQUENCES, TOKENS, flags, release="0.5.7rc2"
    )  # fmt: skip
    problems = report.problems(SEQUENCES, TOKENS // CHUNK, writers, readers)
    assert not problems, "\n".join(problems) + "\n--- output ---\n" + report.output


@pytest.mark.ours("it serves objects whose size is not the one registered")
@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_shm", "engine_pickle"])
def test_same_key_with_another_geometry(serve, mode):
    """The model name is reused for a cache of other shape: no wrong bytes, and no hit that cannot be loaded."""
    server = serve(mode, chunk=CHUNK)
    server.expect_trouble(r"size|shape|layout|geometry")
    transfer = "lmcache_driven" if mode == "lmcache_driven" else "engine_driven"
    first = bench.run(server, transfer, CLASSICAL, 900, 2, TOKENS)
    assert not first.problems(2, TOKENS // CHUNK, 1, 1), first.output
    second = bench.run(server, transfer, "(2,256,16,2,64):float16:4", 900, 2, TOKENS)
    assert second.status == 0, second.output
    assert sorted(second.sequences) == [900, 901], second.output
    for seen in second.sequences.values():
        for step in ("cold", "warm"):
            hit = seen[f"{step}.lookup"].split("/")[0] != "0"
            assert not hit or seen.get(f"{step}.retrieve") == "retrieved by 1", second.output
        assert seen.get("checksum", "CHECKSUM MATCH OK") == "CHECKSUM MATCH OK", second.output
