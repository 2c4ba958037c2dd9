"""vLLM's connector: one object in the scheduler's process and one in each worker's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from ..operation import LoadStoreOp
from ..worker import WorkerAdapter
from .fingerprint import unknown_weights
from .guard import Errors, falls_back
from .kinds import chunk_tokens, chunk_unit, has_windows, scratch_layers, served_groups
from .logs import use_vllm_log
from .metadata import Move, StepMetadata, WorkerReport
from .metrics import KvTierPromMetrics, KvTierStats
from .options import Identity, Options
from .pages import page_format
from .registered import Registered
from .releases import note_untested
from .replicas import tp_replicas
from .scheduling import Scheduling

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


# vLLM's name of a dimension order (layers, blocks, heads, tokens, content) -> the protocol's.
_LAYOUTS = {"LBNHC": "NHD", "LBHNC": "HND", "NHD": "NHD", "HND": "HND", "BLHNC": "BLHNC", "BLNHC": "BLNHC"}


class _AlwaysFalse:
    """False, as a value and as a method's result."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        return False


class KvTierConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector that stores the KV of prompts in a kvtier server, and loads it instead of computing it.

    Loads are asynchronous: a request that waits for one delays no other. If the server is slow, hangs, ends or is
    replaced, at any time, requests are computed, within ``kvtier.timeout``.

    After the start no method raises: each ends as a miss, a failed load, or a skipped store.
    """

    supports_sleep_mode = _AlwaysFalse()
    """With sleep mode KV tensors are in CUDA's virtual memory, which the server cannot open as it is registered (vLLM 0.33 checks this)."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        use_vllm_log()
        self.errors = Errors(logger)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._options = Options.read(transfer.kv_connector_extra_config or {})
        self._groups = served_groups(kv_cache_config)
        # Block ids repeat across groups, and the blocks before a window were freed: vLLM then computes the whole request. Groups that are
        # not cached count: vLLM takes failed blocks of models with one group only.
        self._fails_whole_requests = len(kv_cache_config.kv_cache_groups) > 1 or has_windows(self._groups)
        self._registered: Registered | None = None
        # Of a worker, by request: blocks of loads in the adapter, of loads that failed without it, and of failed ones to report.
        self._loads: dict[str, list[int]] = {}
        self._local_failures: dict[str, list[int]] = {}
        self._failed: dict[str, list[int]] = {}
        # Numbers of stores in the adapter, and of those to report that failed without it.
        self._stores: set[int] = set()
        self._failed_stores: set[int] = set()
        # Finished requests whose blocks vLLM keeps until this worker reports that no store reads them.
        self._held: set[str] = set()
        # Stores that the scheduler asks for.
        self._asked: set[int] = set()
        self._is_off = False
        self._scheduling: Scheduling | None = None
        self._adapter: WorkerAdapter | None = None
        pages, replicas = page_format(vllm_config, kv_cache_config), tp_replicas(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            note_untested(__version__)
            if self._options.recompute_failed_loads:
                transfer.kv_load_failure_policy = "recompute"
            identity = Identity.of(vllm_config, replicas, model_name=self._options.model_name, pages=pages)
            logger.info("kvtier server %s: the model's name in keys is %s", self._options.url, identity.model_name)
            if replicas > 1:
                logger.info("each %d neighbouring tensor-parallel ranks have the same KV, which the first of them stores", replicas)
            if not self._options.model_name and (reason := unknown_weights(vllm_config)):
                logger.warning("replaced weights of the same name are not noticed (%s); change kvtier.model_name with them", reason)
            self._scheduling = Scheduling(vllm_config, kv_cache_config, self._options, identity, self._groups)
        else:
            rank = vllm_config.parallel_config.rank
            identity = Identity.of(vllm_config, replicas, rank, self._options.model_name, pages)
            self._adapter, self._is_writer = self._connect_worker(identity), identity.is_writer

    def _connect_worker(self, identity: Identity) -> WorkerAdapter:
        return WorkerAdapter(
            self._options.url,
            identity.model_name,
            block_tokens=chunk_unit(self._kv_cache_config, self._groups),
            world_size=identity.world_size,
            worker_id=identity.worker_id,
            num_kv_readers=identity.num_kv_readers,
            is_writer=identity.is_writer,
            mode=self._options.transfer_mode,
            timeout=self._options.timeout,
            store_timeout=self._options.store_timeout,
            heartbeat=self._options.heartbeat,
            wait_for_server=self._options.wait_for_server,
            chunk_tokens=chunk_tokens(self._options.chunk_tokens, self._kv_cache_config, self._groups),
        )

    @property
    def _worker(self) -> WorkerAdapter:
        assert self._adapter is not None, "a worker's method was called in the scheduler's process"
        return self._adapter

    @property
    def _scheduler(self) -> Scheduling:
        assert self._scheduling is not None, "a scheduler's method was called in a worker's process"
        return self._scheduling

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache, whose misses are computed again."""
        return False

    # -- worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the KV tensors with the server."""
        layout = getattr(self._kv_cache_config, "kv_cache_layout", None)
        if layout is None:
            from vllm.v1.attention.backends.utils import get_kv_cache_layout

            layout = get_kv_cache_layout()
        if layout not in _LAYOUTS:
            raise ValueError(f"KvTierConnector serves the KV layouts {', '.join(_LAYOUTS)}; this engine has {layout}")
        scratch = scratch_layers(self._kv_cache_config)
        self._registered = registered = Registered(
            {name: tensor for name, tensor in kv_caches.items() if name not in scratch},
            self._groups,
            getattr(self._kv_cache_config, "num_blocks", None),
        )
        self._worker.register_kv_caches(
            registered.tensors, registered.groups, _LAYOUTS[layout], holds_blocks=has_windows(self._groups)
        )

    def _blocks(self, move: Move) -> list[list[int]]:
        """Returns a transfer's blocks, by registered group."""
        return move.block_ids if self._registered is None else self._registered.blocks(move.block_ids)

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def _event(self) -> Any:
        """Records a device event after the engine's queued work; None on CPU, where that has run."""
        if not self._worker.on_cuda:
            return None
        import torch

        event = torch.cuda.Event(interprocess=True)
        event.record()
        return event

    @falls_back(by="_fail_step_loads")
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts this step's loads, which the step does not wait for."""
        step = self._step()
        for request_id, groups in step.failed.items():
            self._local_failures[request_id] = [block for group in groups for block in group]
        event = self._event() if step.loads else None
        for move in step.loads:
            self._start_load(move, event)

    def _fail_step_loads(self, forward_context: Any, **kwargs: Any) -> None:
        for move in self._step().loads:
            self._fail_load(move)

    @falls_back(by="_fail_load")
    def _start_load(self, move: Move, event: Any) -> None:
        if self._is_off:
            return self._fail_load(move)
        op = LoadStoreOp(
            self._blocks(move), prompt=move.prompt, start=move.start, end=move.end, skip_first_n_tokens=move.skip
        )
        self._worker.submit_retrieve_request(move.request_id, op, event, move.salt)
        self._loads[move.request_id] = self._written(move)

    def _fail_load(self, move: Move, event: Any = None) -> None:
        self._local_failures[move.request_id] = self._written(move)

    def _written(self, move: Move) -> list[int]:
        """Returns the blocks that a load writes: not those of vLLM's own prefix, which other requests may share."""
        groups = zip(move.block_ids, self._groups, strict=True)
        return [block for ids, group in groups for block in ids[move.skip // group.block_tokens :]]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: no step reads blocks that are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: whole chunks of all layers are stored after the step."""

    @falls_back(by="_fail_step_stores")
    def wait_for_save(self) -> None:
        """Starts this step's stores. Their blocks are not overwritten until they have ended."""
        stores = self._step().stores
        event = self._event() if stores and not self._is_off else None
        for move in stores:
            self._start_store(move, event)

    def _fail_step_stores(self) -> None:
        for move in self._step().stores:
            self._fail_store(move)

    @falls_back(by="_fail_store")
    def _start_store(self, move: Move, event: Any) -> None:
        if self._is_off:
            return self._fail_store(move)
        kept = {"keep_seconds": move.keep_seconds, "session": move.session}
        op = LoadStoreOp(self._blocks(move), prompt=move.prompt, start=move.start, end=move.end, **kept)
        self._worker.submit_store_request(move.request_id, op, event, move.salt, tag=move.number)
        if self._is_writer:
            self._stores.add(move.number)

    def _fail_store(self, move: Move, event: Any = None) -> None:
        if self._is_writer:
            self._failed_stores.add(move.number)

    @falls_back(by="_turn_off")
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Waits until no store reads the blocks that are overwritten afterwards: of preempted requests where vLLM's pool cannot
        hold single blocks, and of stores that a reset of the prefix cache has overtaken."""
        # vLLM 0.18 passes the requests' ids.
        preempted = getattr(kv_connector_metadata, "preempted", kv_connector_metadata)
        if preempted and not self._is_off:
            self._worker.wait_for_stores(preempted, self._options.preemption_patience)

    @falls_back(lambda: (None, None), by="_end_all")
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns requests whose blocks no store reads any more, and requests whose load has ended."""
        self._held |= self._step().held
        self._asked = self._step().asked
        if self._is_off:
            return self._end_all(finished_req_ids)
        stored, loaded = self._worker.get_finished(self._held)
        failed = self._worker.get_failed_request_ids()
        self._held -= stored
        for request_id in loaded:
            blocks = self._loads.pop(request_id, [])
            if request_id in failed:
                self._failed[request_id] = blocks
        return stored, loaded | self._take_local_failures()

    def _take_local_failures(self) -> set[str]:
        lost, self._local_failures = self._local_failures, {}
        self._failed.update(lost)
        return set(lost)

    def _turn_off(self, *args: Any) -> None:
        """Ends all copies and fails all transfers for good: the adapter raised, so its state is unknown."""
        if self._is_off:
            return
        self._is_off = True
        self._local_failures.update(self._loads)
        self._loads.clear()
        self._failed_stores |= self._stores
        self._stores.clear()
        logger.error("this worker continues without the kvtier server; restart the engine to use it again")
        with contextlib.suppress(Exception):
            self._worker.disable()

    def _end_all(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self._turn_off()
        held, self._held = self._held, set()
        return held, self._take_local_failures()

    @falls_back(lambda: base.KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Returns the results with failed loads by request, for models with windows or several groups of layers."""
        results = super().get_transfer_results(finished_req_ids)
        if self._fails_whole_requests:
            results.failed_recving = set(self._failed)
            self._failed.clear()
        return results

    @falls_back(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns blocks whose load has failed; vLLM computes them."""
        if self._fails_whole_requests:
            return set()
        failed, self._failed = self._failed, {}
        return {block for blocks in failed.values() for block in blocks}

    @falls_back(by="_turn_off")
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Returns the stores that have ended, with their stored chunks."""
        report = WorkerReport()
        ended = [] if self._is_off else self._worker.take_ended_stores()
        lost, self._failed_stores = self._failed_stores, set()
        for number, chunks in [*ended, *((number, []) for number in lost)]:
            self._stores.discard(number)
            report.ended[number] += 1
            report.stored.update((number, chunk) for chunk in chunks)
        asked, self._asked = self._asked, set()
        if self._is_writer:
            report.unknown.update(asked - self._stores)
        return report if report.ended or report.unknown else None

    @falls_back()
    def get_kv_connector_stats(self) -> KvTierStats | None:
        """Returns the counters since the last step."""
        if self._scheduling is not None:
            self._scheduling.errors.count += self.errors.take()
            return self._scheduling.take_stats()
        stats = KvTierStats()
        stats.add(errors=self.errors.take(), **vars(self._worker.take_counters()))
        return None if stats.is_empty() else stats

    @falls_back()
    def shutdown(self) -> None:
        """Waits for transfers to end, and disconnects."""
        if self._adapter is not None:
            self._adapter.shutdown()
        if self._scheduling is not None:
            self._scheduling.shutdown()

    # -- scheduler ---------------------------------------------------------------------------

    @falls_back(lambda: None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Holds the blocks of stores in vLLM's pool, and follows resets of its prefix cache (``kvtier.follow_resets``)."""
        self._scheduler.bind_pool(gpu_block_pool)

    @falls_back(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Whether blocks are held: an idle engine then makes steps, so that the ends of stores arrive."""
        return bool(self._scheduler.holds)

    @falls_back(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Whether held blocks are about to be free, so that no running request must be preempted."""
        holds = self._scheduler.holds
        return holds is not None and holds.soon_free()

    @falls_back(lambda: (0, False), by="_bypass_cache")
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the cached tokens beyond vLLM's own; None while the lookup is in flight."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def _bypass_cache(self, request: Any, num_computed_tokens: int) -> None:
        self._scheduler.bypass_cache(request)

    @falls_back(by="_fail_allocated_load")
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes the blocks allocated to a request."""
        self._scheduler.allocated(request, blocks.get_block_ids() or (), num_external_tokens)

    def _fail_allocated_load(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.fail_load(request, blocks.get_block_ids() or (), num_external_tokens)

    @falls_back(StepMetadata, by="_partial_step")
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Returns the workers' part of a step."""
        return self._scheduler.step(scheduler_output)

    def _partial_step(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduler.partial_step(scheduler_output)

    @falls_back()
    def update_connector_output(self, connector_output: Any) -> None:
        """Applies the workers' reports."""
        self._scheduler.apply_output(connector_output)

    @falls_back(lambda: (False, None), by="_is_held")
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the request's blocks must wait for stores, and what a proxy hands to the engine that decodes (``kvtier.hand_over``)."""
        return self._scheduler.finished(request)

    @falls_back(lambda: (False, None), by="_is_held")
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the request's blocks must wait for stores, and what a proxy hands to the engine that decodes (``kvtier.hand_over``)."""
        return self._scheduler.finished(request)

    def _is_held(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return request.request_id in self._scheduler.held, None

    @falls_back(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Returns where loaded tokens came from: all from the host's memory. The server moves what it finds in a tier there first, and
        does not say so."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    @falls_back(tuple)
    def take_events(self) -> Iterable[Any]:
        """Returns events of stored and of removed chunks since the last call, if vLLM publishes them."""
        return self._scheduler.take_events()

    @falls_back(lambda: True)
    def reset_cache(self) -> bool | None:
        """Makes all earlier objects misses; see also the option ``kvtier.reset_server``."""
        return self._scheduler.reset_cache()

    # -- class ------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvTierStats:
        """Returns counters received from another process."""
        return KvTierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvTierPromMetrics:
        """Returns the connector's Prometheus metrics."""
        return KvTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
