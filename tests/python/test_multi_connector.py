"""vLLM's MultiConnector with kvtier's connector and another one: both store, one loads."""

from contextlib import closing

import pytest
from conftest import CHUNK
from kvrig.waiting import wait_until
from rig import BLOCK, tokens
from simulated import Simulation, full
from vllm_rig import KVConnectorOutput, Vllm, request

from kvtier.vllm import scheduling
from other_connector import DONE
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

KINDS = [(False, False), (False, True), (True, False), (True, True)]


# proves: docs/vllm.md#beside-other-connectors
@pytest.mark.parametrize("holds", [True, False], ids=["holds", "without holds"])
@pytest.mark.parametrize(("is_first", "is_async"), KINDS)
def test_one_loads_and_both_store(place, monkeypatch, is_first, is_async, holds):
    """A hit of the other one leaves no lease, blocks are free after all saves, and no layer attends to wrong KV."""
    server, name = place.server("lmcache_driven"), f"{is_first} {is_async} {holds}"
    if not holds:
        monkeypatch.setattr(scheduling.Holds, "of", lambda pool, is_large=False: None)
    other = {
        "kv_connector": "OtherConnector", "kv_role": "kv_both", "kv_connector_module_path": "other_connector",
        "kv_connector_extra_config": {"name": name, "is_async": is_async},
    }  # fmt: skip
    made = [[each % 4000 for each in tokens(3 * CHUNK + 5, f"multi {number}")] for number in range(4)]
    loaded = []
    for engine_name in ("first", "second"):
        engine = Simulation(server, "multi", [full(4)], blocks=200, caching=True, step_tokens=32, beside=(other, is_first))
        with closing(engine):
            free = engine.free_blocks()
            for number, prompt in enumerate(made):
                engine.add(f"{engine_name}-{number}", prompt + [number] * number, answer=3)
                engine.step()
            engine.run()
            engine.finish_stores()
            wait_until(lambda engine=engine: engine.step() or engine.free_blocks() == free, 60, "the blocks")
            assert engine.errors == 0 and engine.left == 0
            loaded.append((engine.external > 0, DONE[name, "loads"] > 0))
            assert DONE[name, "saves"] >= len(made)
            assert leased(server) == "0"
    # The first of them in the configuration loads what both have.
    assert loaded == [(False, False), (not is_first, is_first)]
    # And kvtier has all of it.
    with closing(Simulation(server, "multi", [full(4)], blocks=200, caching=False, step_tokens=32)) as engine:
        assert [engine.matched(f"last-{number}", prompt) for number, prompt in enumerate(made)] == [3 * CHUNK] * len(made)


def leased(server):
    """Objects that a lookup keeps."""
    text = server.get("/metrics")[1]
    return next(line for line in text.splitlines() if line.startswith("kvtier_l1_leased_objects ")).split()[1]


# proves: docs/vllm.md#beside-other-connectors
def test_what_another_connector_is_loading_is_not_stored(place, engines):
    """A load within the step may fail, and vLLM learns of it after the step; one of several steps has ended before the request runs."""
    engine, prompt = engines(place.server()), tokens(2 * CHUNK, "other")
    blocks = list(range(1, 9))
    for name, has_ended in (("within", False), ("before", True)):
        req = request(name, prompt)
        assert engine.match(req) == (0, False)
        engine.allocate(req, blocks, 0)
        if has_ended:
            engine.scheduler.update_connector_output(KVConnectorOutput(finished_recving={name}))
        step = engine.step(new=[(req, blocks, CHUNK, CHUNK)])
        assert [(move.start, move.end) for move in step.metadata.stores] == ([(0, 2 * CHUNK)] if has_ended else [])
        engine.finish(req)
    engine.wait_for_stores()
    # Of vLLM's own prefix everything is stored, and behind a load of our own what follows.
    for computed, found in ((2 * BLOCK, 0), (0, 2 * CHUNK)):
        req = request(f"own-{computed}", tokens(2 * CHUNK, "own") + tokens(CHUNK, f"own {computed}"))
        assert engine.match(req, computed) == (found, bool(found))
        engine.allocate(req, range(1, 13), found)
        if found:
            engine.wait_for_load()
        step = engine.step(new=[(req, range(1, 13), computed + found, 3 * CHUNK - computed - found)])
        assert [(move.start, move.end) for move in step.metadata.stores] == [(found, 3 * CHUNK)]
        engine.finish(req)
        engine.wait_for_stores()


def test_statistics_of_another_process_are_read():
    """MultiConnector finds the class by its name."""
    found = MultiConnector.build_kv_connector_stats({"KvTierConnector": {"lookups": 2}})
    assert found.reduce() == {"KvTierConnector": {"lookups": 2}}
