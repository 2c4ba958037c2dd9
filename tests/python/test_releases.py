"""The release of vLLM that the connector is tested with, and newer ones."""

import inspect
import logging

import pytest

pytest.importorskip("vllm")

import vllm  # noqa: E402
from kvtier.vllm.releases import NEWEST_TESTED, note_untested  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA  # noqa: E402

# What vLLM calls, or has for connectors to use. A method that is new may be one that the connector needs; one that
# was removed is called no more.
RECORDED = set(
    """
    bind_connector_metadata bind_gpu_block_pool bind_kv_cache_manager build_connector_meta build_connector_worker_meta
    build_kv_connector_stats build_prom_metrics clear_connector_metadata finish_forward get_block_ids_with_load_errors
    get_external_cache_hit_sources get_finished get_finished_count get_handshake_metadata get_kv_connector_kv_cache_events
    get_kv_connector_stats get_loaded_kv_cache_group_ids get_mem_pool_context get_num_new_matched_tokens
    get_required_kvcache_layout get_transfer_results handle_preemptions has_connector_metadata has_pending_block_frees
    has_pending_push_work on_new_request register_finished_partial_tail register_kv_caches request_finished
    request_finished_all_groups requires_kv_delivery requires_piecewise_for_cudagraph reset_cache reset_capture_state role
    save_kv_layer set_host_xfer_buffer_ops set_xfer_handshake_metadata set_xfer_handshake_metadata_pp_aware shutdown start_load_kv
    supports_divergent_local_hybrid_hits take_events update_connector_output update_state_after_alloc wait_for_layer_load
    wait_for_save
    """.split()
)


def test_base_class_is_the_recorded_one():
    """A vLLM whose base class gained or lost a method is noticed by its names."""
    names = {
        name
        for base in (KVConnectorBase_V1, SupportsHMA)
        for name, value in vars(base).items()
        if not name.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    }
    assert (sorted(names - RECORDED), sorted(RECORDED - names)) == ([], [])
    assert tuple(map(int, vllm.__version__.split(".")[:2])) == NEWEST_TESTED


@pytest.mark.parametrize("version", ["0.33.0", "0.100.1rc2.dev3+cpu", "1.0"])
def test_newer_release_is_said(caplog, version):
    """It is no failure: one line in the log."""
    with caplog.at_level(logging.WARNING, "kvtier"):
        note_untested(version)
    assert [record.message for record in caplog.records] == [
        f"untested release: this vLLM is {version}, and the connector is tested up to 0.32"
    ]


@pytest.mark.parametrize("version", [vllm.__version__, "0.19.0", "0.32.9", "dev"])
def test_tested_release_is_not_mentioned(caplog, version):
    """Nor one whose number is unknown."""
    note_untested(version)
    assert not caplog.records


def test_connector_says_it_once(place, engines, caplog, monkeypatch):
    """By the scheduler's side, not by each worker."""
    monkeypatch.setattr("kvtier.vllm.connector.__version__", "0.99.0")
    with caplog.at_level(logging.WARNING, "kvtier"):
        engines(place.server(), ranks=2)
    assert sum("untested release" in record.message for record in caplog.records) == 1
