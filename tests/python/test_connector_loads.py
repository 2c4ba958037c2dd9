"""vLLM's connector: loads that fail, are aborted, or end earlier."""

from types import SimpleNamespace

import pytest
import torch
from conftest import CHUNK
from kvrig import layouts
from kvrig.waiting import wait_until
from rig import BLOCK, tokens
from vllm_rig import FullAttentionSpec, cache_config, request, same, vllm_config  # skips without vLLM

from kvtier.vllm import KvTierConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole


def test_request_aborted_while_loading_is_reported_once(place, engines):
    """vLLM frees its blocks at the end of the load; a second report would be an error."""
    engine = engines(place.server())
    prompt = engine.stored(CHUNK + 1, "ab")
    req = request("b", prompt)
    assert engine.match(req) == (CHUNK, True)
    engine.allocate(req, range(11, 16), CHUNK)
    steps = [engine.step()]
    held, _ = engine.scheduler.request_finished_all_groups(req, ([],))
    assert held is False
    steps.append(engine.step(finished=["b"]))
    wait_until(lambda: steps.append(engine.step()) or any("b" in ids for step in steps for ids in step.received), 60, "the load's end")
    assert sum("b" in ids for step in steps for ids in step.received) == 1
    assert not any("b" in ids for step in steps for ids in step.sent)


def test_request_aborted_before_lookup_ends_is_released(place, engines):
    """No state of it is left."""
    engine = engines(place.server())
    req = request("a", tokens(CHUNK, "early"))
    engine.scheduler.get_num_new_matched_tokens(req, 0)
    assert engine.scheduler.request_finished(req, []) == (False, None)
    assert engine.scheduler._scheduling.tracked == {} and not engine.scheduler._scheduling.adapter.has_lookup("a")
    assert engine.scheduler.request_finished(request("never seen", [1]), []) == (False, None)


def test_failed_load_is_computed_and_stored_again(place, engines):
    """Its blocks are reported, and the request is not looked up again."""
    engine = engines(place.server())
    prompt = engine.stored(2 * CHUNK + 1, "fail")
    req = request("b", prompt)
    assert engine.match(req, computed=BLOCK) == (2 * CHUNK - BLOCK, True)
    engine.scheduler._scheduling.adapter.client.clear(True).result()
    assert engine.load(req, range(1, 10), BLOCK, 2 * CHUNK - BLOCK) == set(range(2, 9)), "block 1 is vLLM's own"
    assert engine.stats["failed_retrieves"] == 1
    assert engine.match(req) == (0, False)
    engine.allocate(req, range(1, 10), 0)
    stores = engine.step(new=[(req, range(1, 10), 0, 2 * CHUNK + 1)]).metadata.stores
    assert [(move.start, move.end) for move in stores] == [(0, 2 * CHUNK)]
    engine.finish(req)
    assert engine.match(request("c", prompt)) == (2 * CHUNK, True)


def test_load_failed_in_one_rank_fails(place, engines):
    """The failure is reported steps before the last rank's end, by one rank only: the request is not looked up again."""
    server = place.server()
    engine = engines(server, ranks=2)
    prompt = engine.stored(CHUNK + 1, "one first")
    req = request("b", prompt)
    assert engine.match(req) == (CHUNK, True)
    engine.scheduler._scheduling.adapter.client.clear(True).result()
    slow = engine.workers[1]._adapter
    its_own, slow.get_finished = slow.get_finished, lambda ids: (set(), set())
    engine.allocate(req, range(11, 16), CHUNK)
    failed = set()
    wait_until(lambda: failed.update(engine.step().failed) or failed, 60, "the first rank's word")
    slow.get_finished, slow.get_block_ids_with_load_errors = its_own, set
    engine.wait_for_load()
    engine.prefill(request("c", prompt), range(21, 26))
    assert engine.match(request("d", prompt)) == (CHUNK, True), "it is cached"
    assert engine.match(req) == (0, False)
    engine.allocate(req, range(11, 16), 0)
    stores = engine.step(new=[(req, range(11, 16), 0, CHUNK + 1)]).metadata.stores
    assert [(move.start, move.end) for move in stores] == [(0, CHUNK)]


def test_load_ends_where_vllm_decides(place, engines):
    """vLLM may load less than was found. With too few blocks the load fails, and nothing raises."""
    engine = engines(place.server())
    prompt = engine.stored(3 * CHUNK + 1, "less")
    less = request("b", prompt)
    assert engine.match(less) == (3 * CHUNK, True)
    engine.allocate(less, range(21, 29), CHUNK + BLOCK)
    step = engine.step()
    assert [(move.start, move.end, move.block_ids) for move in step.metadata.loads] == [(0, 2 * CHUNK, [list(range(21, 29))])]
    if not step.ended:
        engine.wait_for_load()
    assert same(engine.read(list(range(21, 29))), engine.read(list(range(1, 9))))
    engine.finish(less)
    few = request("c", prompt)
    assert engine.match(few) == (3 * CHUNK, True)
    engine.allocate(few, range(31, 36), CHUNK + BLOCK)
    step = engine.step()
    assert step.metadata.loads == [] and step.ended == {"c"} and step.failed == set(range(31, 36))


def test_blocks_of_one_token(place, monkeypatch):
    """A whole prompt's load ends a chunk earlier: vLLM allocates no block for the token that it computes."""
    config = cache_config(["layer.0"])
    config.hash_block_size = config.kv_cache_groups[0].kv_cache_spec.block_size = 1
    scheduler = KvTierConnector(vllm_config(place.server()), KVConnectorRole.SCHEDULER, config)
    scheduling = scheduler._scheduling
    monkeypatch.setattr(scheduling.adapter, "maybe_submit_lookup_request", lambda name, prompt, **_: found.append(len(prompt)))
    monkeypatch.setattr(scheduling.adapter, "check_lookup_result", lambda name: found[-1])
    found = []
    for length, loads in ((2 * CHUNK, CHUNK), (2 * CHUNK + 1, 2 * CHUNK)):
        req = request(f"r{length}", tokens(length, "one"))
        assert scheduler.get_num_new_matched_tokens(req, 0) == (loads, True)
        scheduler.update_state_after_alloc(req, SimpleNamespace(get_block_ids=lambda n=loads: (list(range(n)),)), loads)
        step = SimpleNamespace(
            scheduled_new_reqs=[], num_scheduled_tokens={}, finished_req_ids=set(), preempted_req_ids=None,
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()),
        )  # fmt: skip
        (move,) = scheduler.build_connector_meta(step).loads
        assert (move.start, move.end, move.block_ids) == (0, loads, [list(range(loads))])
    scheduler.shutdown()


def test_groups_of_layers(place, engines):
    """Each group has its own blocks; failures are reported by request, since block ids are ambiguous across groups."""
    server = place.server()
    # A window in the spec that is not used, as without vLLM's hybrid cache manager.
    other = SimpleNamespace(
        layer_names=["layer.1"], kv_cache_spec=FullAttentionSpec(block_size=BLOCK, sliding_window=2 * CHUNK)
    )
    made = []
    for seed in (1, 2):
        config = cache_config(["layer.0"])
        config.kv_cache_groups.append(other)
        with pytest.raises(ValueError, match="use lmcache_driven"):
            refused = KvTierConnector(
                vllm_config(server, **{"kvtier.transfer_mode": "engine_driven"}), KVConnectorRole.WORKER, config
            )
            tensors = layouts.allocate(layouts.layout("fused_hnd"), 2, torch.Generator().manual_seed(seed))
            try:
                refused.register_kv_caches({"layer.0": tensors[0], "layer.1": tensors[1]})
            finally:
                refused.shutdown()
        scheduler = KvTierConnector(vllm_config(server), KVConnectorRole.SCHEDULER, config)
        worker = KvTierConnector(vllm_config(server), KVConnectorRole.WORKER, config)
        worker.register_kv_caches({"layer.0": tensors[0], "layer.1": tensors[1]})
        made.append((scheduler, worker, tensors))

    def step(scheduler, worker, **parts):
        metadata = scheduler.build_connector_meta(scheduled(**parts))
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        assert worker.get_block_ids_with_load_errors() == set()
        return results

    def scheduled(new=None):
        return SimpleNamespace(
            scheduled_new_reqs=[] if new is None else [SimpleNamespace(req_id=new[0].request_id, block_ids=new[1], num_computed_tokens=0)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()),
            num_scheduled_tokens={} if new is None else {new[0].request_id: new[0].num_tokens},
            finished_req_ids=set(), preempted_req_ids=None,
        )  # fmt: skip

    def matched(scheduler, req):
        wait_until(lambda: scheduler.get_num_new_matched_tokens(req, 0)[0] is not None, 60, "lookup")
        return scheduler.get_num_new_matched_tokens(req, 0)

    def read(tensors, ids):
        return [layouts.read_blocks(tensor, 0, group) for tensor, group in zip(tensors, ids, strict=True)]

    prompt, ids = tokens(CHUNK + 1, "groups"), ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
    scheduler, worker, tensors = made[0]
    req = request("a", prompt)
    assert matched(scheduler, req) == (0, False)
    scheduler.update_state_after_alloc(req, SimpleNamespace(get_block_ids=lambda: ids), 0)
    step(scheduler, worker, new=(req, ids))
    wait_until(lambda: step(scheduler, worker) and worker.get_kv_connector_stats(), 60, "the store")
    expected = read(tensors, [group[:4] for group in ids])
    scheduler, worker, tensors = made[1]
    for number, there in enumerate((True, False)):
        req, ids = request(f"b{number}", prompt), ([21, 22, 23, 24, 25], [31, 32, 33, 34, 35])
        assert matched(scheduler, req) == (CHUNK, True)
        scheduler.update_state_after_alloc(req, SimpleNamespace(get_block_ids=lambda: ids), CHUNK)
        if not there:
            scheduler._scheduling.adapter.client.clear(True).result()
        ended = []
        wait_until(lambda: ended.append(step(scheduler, worker)) or ended[-1].finished_recving, 60, "the load")
        assert ended[-1].finished_recving == {req.request_id}
        assert ended[-1].failed_recving == (set() if there else {req.request_id})
        if there:
            assert same(read(tensors, [group[:4] for group in ids]), expected)
    for scheduler, worker, _ in made:
        worker.shutdown()
        scheduler.shutdown()
