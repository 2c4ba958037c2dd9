"""Secondary tier of vLLM's OffloadingConnector: chunks of its host memory in a kvtier server.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_module_path": "kvtier.vllm.tier",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [
            {"type": "KvTier", "module_path": "kvtier.vllm.tier", "url": "tcp://localhost:5555"}]}}'

:class:`OffloadingConnector` is vLLM's, and passes on what vLLM keeps from a tier: the identity of the model, and each request's salt and
adapter. Everything here runs on the thread of vLLM's scheduler and never waits, except :meth:`KvTier.drain_jobs` and :meth:`KvTier.shutdown`.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import random
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingCounterMetadata, OffloadingEvent
from vllm.v1.kv_offload.tiering.base import JobResult, RequestOffloadingContext, SecondaryTierManager, TransferJob

from .._native import Future, KvTierError, Prompt
from ..connecting import DEFAULT_HEARTBEAT, DEFAULT_LOOKUP_TIMEOUT, DEFAULT_TIMEOUT, check_model_name, check_seconds, connect
from ..limited import RateLimited
from ..plain import digest, plain
from ..registration import Registration
from ..transfer import Group
from .contents import Contents
from .fingerprint import fingerprint, unknown_weights, weights_path
from .logs import use_vllm_log
from .pages import byte_order

logger = logging.getLogger(__name__)

# Tokens that stand for one chunk of vLLM's: the least that a server serves. A row is divided by them.
_TOKENS = 16

# Key of a request's facts in what vLLM shows a tier of the request.
_FACTS = "kvtier.facts"

# Feature of servers with operations by key.
_OBJECTS = "kvtier.objects.1"

# Seconds between two checks in drain_jobs.
_POLL_INTERVAL = 0.1

# Names of their own: those of an enum's class are slow.
_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY

_SKIPPED = "vllm:kv_offload_kvtier_skipped_keys"
_METRICS = {
    "vllm:kv_offload_kvtier_finds": "Lookups sent to the kvtier server, each with the new keys of a request and step",
    "vllm:kv_offload_kvtier_failed_finds": "Lookups that failed or were not answered in time; their keys were misses",
    "vllm:kv_offload_kvtier_find_seconds": "Seconds from sending lookups to the use of their answers",
    _SKIPPED: "Lookups that were misses since the kvtier server was away, each for a key, request and step",
    "vllm:kv_offload_kvtier_stored_keys": "Keys of stores that the kvtier server took; it has the others, or no space",
}


@dataclass(frozen=True)
class Facts:
    """Facts about a request that vLLM keeps from a tier."""

    salt: str = ""
    adapter: bytes = b""
    is_known: bool = True
    """Whether key, salt and adapter have all that the KV depends on."""


class OffloadingConnector(offloading_connector.OffloadingConnector):
    """vLLM's connector, whose tiers of kvtier know the identity of the model and the facts about each request."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role == KVConnectorRole.SCHEDULER:
            use_vllm_log()
            self._contents = Contents(vllm_config)
            for tier in vllm_config.kv_transfer_config.kv_connector_extra_config.get("secondary_tiers", ()):
                if tier.get("module_path") == __name__:
                    tier["identity"] = _identity(vllm_config, kv_cache_config, tier.get("model_name", ""))
        super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        """Notes a request, with its facts among the parameters that tiers see."""
        given = request.kv_transfer_params
        request.kv_transfer_params = {**(given or {}), _FACTS: self._facts(request)}
        try:
            super().on_new_request(request)
        finally:
            request.kv_transfer_params = given

    def _facts(self, request: Any) -> Facts:
        adapter = request.lora_request and self._contents.adapter(request.lora_request)
        return Facts(request.cache_salt or "", adapter or b"", self._contents.are_known(request))


def _identity(vllm_config: Any, kv_cache_config: Any, model_name: str) -> str:
    """Returns the model's name with digests of what KV and its byte order depend on; ``model_name`` replaces name and first digest.

    Raises:
        ValueError: prompts can be made whose hashes are those of others.
    """
    algorithm = getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256")
    if not algorithm.startswith("sha256"):
        raise ValueError(f"prefix_caching_hash_algo: {algorithm}; the tier needs sha256 or sha256_cbor, whose hashes no two prompts share")
    if not model_name:
        model_name = f"{weights_path(vllm_config.model_config)}#{fingerprint(vllm_config)}"
        if reason := unknown_weights(vllm_config):
            logger.warning("replaced weights of the same name are not noticed (%s); change model_name of the tier with them", reason)
    return f"{model_name}#{digest(byte_order(vllm_config, kv_cache_config))}"


def _row_digest(config: Any, row_bytes: int) -> str:
    """Returns the digest of what the bytes of a row depend on, as vLLM's configuration of offloading has it."""
    parallel = config.parallel
    ranks = [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.world_size]
    if config.canonical_layout and parallel.is_parallelism_agnostic:
        ranks = []
    else:
        ranks += [config.worker_kv_bytes_per_block, os.environ.get("VLLM_PP_LAYER_PARTITION")]
    names = ("groups", "cache", "replicated_layout", "canonical_layout", "kv_cache_layout")
    parts = {name: plain(getattr(config, name)) for name in names}
    return digest({"release": __version__, "dtype": config.model.dtype, "row": row_bytes, "ranks": ranks, **parts})


@dataclass(eq=False)
class _Find:
    """A lookup that was sent, and its leases."""

    session: str
    verdicts: list[_Verdict]
    future: Future[list[bool]] | None = None
    began: float = field(default_factory=time.monotonic)
    users: int = 0
    """Verdicts that rely on its leases."""

    has_leases: bool = False


class _Verdict:
    """Whether the server has a key; RETRY while that is asked. Defaults are the class's, so that making one is cheap."""

    result = _RETRY
    find: _Find | None = None
    users = 0
    """Requests that use it."""


@dataclass(eq=False, slots=True)
class _Request:
    facts: Facts
    verdicts: dict[bytes, _Verdict] = field(default_factory=dict)
    """Verdicts that it uses."""

    new: dict[bytes, _Verdict] = field(default_factory=dict)
    """Those that are asked for at the end of the step."""


@dataclass(eq=False, slots=True)
class _Job:
    job: TransferJob
    keys: list[bytes]
    began: float = field(default_factory=time.monotonic)


class KvTier(SecondaryTierManager):
    """Tier whose objects are chunks of vLLM's host memory in a kvtier server, copied by this process.

    A lookup is answered by the step after the one that asked for it. Until then, and at most ``lookup_timeout``, its result is RETRY.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        url: str = "tcp://localhost:5555",
        model_name: str = "",
        identity: str = "",
        lookup_timeout: float = DEFAULT_LOOKUP_TIMEOUT,
        timeout: float = DEFAULT_TIMEOUT,
        heartbeat: float = DEFAULT_HEARTBEAT,
        enable_kv_events: bool = False,
        locality: str | None = None,
    ) -> None:
        """Connects to the server, which may start later.

        Args:
            url: the server's address.
            model_name: the model's name in keys. By default it is vLLM's and a digest, which :class:`OffloadingConnector` adds.
            identity: set by :class:`OffloadingConnector`.
            lookup_timeout: seconds a lookup may take; a request waits for it before it is computed.
            timeout: seconds a load or a store may take.
            heartbeat: seconds between two heartbeats.
            enable_kv_events: whether vLLM publishes an event for each stored chunk.
            locality: where the server's memory is, in events and for ``kv_load_tiers``: ``LOCAL`` or ``REMOTE``.

        Raises:
            ValueError: an argument is not allowed, or the model is not identified.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        use_vllm_log()
        if not (identity or model_name):
            raise ValueError(
                f"model_name of the secondary tier {tier_type}: none, and vLLM tells a tier nothing of the weights; set it to a name that no "
                f'other weights have, or load the connector with "kv_connector_module_path": "{__name__}", which adds a digest of them'
            )
        if model_name:
            check_model_name(model_name)
        check_seconds("lookup_timeout", lookup_timeout)
        self.locality = None if locality is None else Locality(locality)
        self._timeout, self._lookup_timeout = timeout, lookup_timeout
        rows, row_bytes = primary_kv_view.shape
        self._model_name = f"{identity or model_name}#{_row_digest(offloading_spec.config, row_bytes)}"
        logger.info("tier %s at %s: the model's name in keys is %s", tier_type, url, self._model_name)
        self._warnings = RateLimited(logger)
        self._instance = random.SystemRandom().getrandbits(62)
        self._numbers = itertools.count()
        self._client = connect(
            url, timeout=timeout, heartbeat=heartbeat, block_tokens=_TOKENS, chunk_tokens=_TOKENS, wait_for_server=None
        )
        self._registration = Registration(self._client, _TOKENS, self._worker_identity, requires_server=False)
        self._register(primary_kv_view, rows, row_bytes)
        # Added to keys: what was stored before a reset is not found.
        self._generation = b""
        self._requests: dict[str, _Request] = {}
        # Requests with new keys.
        self._asking: list[_Request] = []
        self._verdicts: dict[bytes, _Verdict] = {}
        # Lookups in flight.
        self._finds: list[_Find] = []
        self._is_polled = False
        self._is_up = False
        # Number of the last checked connection, and the answer that is awaited.
        self._connection = -1
        self._features: Future[list[str]] | None = None
        self._has_objects = False
        self._jobs: dict[int, _Job] = {}
        self._results: list[JobResult] = []
        publishes = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if publishes else None
        self._counts = dict.fromkeys(_METRICS, 0.0)

    def _register(self, view: memoryview, rows: int, row_bytes: int) -> None:
        import torch

        tensor = torch.frombuffer(view.cast("B"), dtype=torch.uint8).view(rows, _TOKENS, row_bytes // _TOKENS)
        self._registration.start(["engine_driven"], [tensor], [Group(["row"], _TOKENS).described(0, [0])], None)

    def _worker_identity(self) -> dict[str, Any]:
        """Returns the fields of the registration: a row has the KV of all ranks."""
        return {"instance": self._instance, "model_name": self._model_name}

    # -- lookups -----------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Notes a request; its new chunks are stored."""
        # An id may be used again before vLLM has ended the stores of the earlier request.
        self.on_request_finished(req_context)
        facts = (req_context.kv_transfer_params or {}).get(_FACTS)
        self._requests[req_context.req_id] = _Request(facts if isinstance(facts, Facts) else Facts())
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Returns whether the server has a chunk; RETRY while that is asked, MISS at once while the server is away."""
        if not self._is_polled:
            self._poll_finds()
        request = self._requests.get(req_context.req_id)
        if request is None:
            return _MISS
        verdict = request.verdicts.get(key)
        return self._share(key, request) if verdict is None else verdict.result

    def _share(self, key: bytes, request: _Request) -> LookupResult:
        """Returns the verdict of a key that the request has not looked up before. What an earlier one missed is asked again: it may have
        stored it since."""
        if not self._is_up or not request.facts.is_known:
            self._counts[_SKIPPED] += not self._is_up
            return _MISS
        verdict = self._verdicts.get(key)
        if verdict is None or verdict.result is _MISS:
            if verdict is None:
                self._verdicts[key] = verdict = _Verdict()
            else:
                verdict.result = _RETRY
                self._leave(verdict)
            if not request.new:
                self._asking.append(request)
            request.new[key] = verdict
        request.verdicts[key] = verdict
        verdict.users += 1
        return verdict.result

    def on_schedule_end(self, context: Any) -> None:
        """Sends this step's new keys, one lookup per request."""
        self._poll_finds()
        self._is_polled = False
        asking, self._asking = self._asking, []
        for request in asking:
            new, request.new = request.new, {}
            if new:
                self._send(new, list(new.values()), request.facts)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Marks chunks as used, by a lookup whose leases end with its answer. No scheduler of vLLM calls this yet (0.32)."""
        request = self._requests.get(req_context.req_id)
        if request is not None and request.facts.is_known and self._is_up:
            self._send(keys, [], request.facts)

    def _send(self, keys: Iterable[bytes], verdicts: list[_Verdict], facts: Facts) -> None:
        find = _Find(f"tier-{self._instance:x}-{next(self._numbers)}", verdicts, users=len(verdicts))
        for verdict in verdicts:
            # Two requests may ask for a key at once.
            self._leave(verdict)
            verdict.find = find
        self._counts["vllm:kv_offload_kvtier_finds"] += 1
        try:
            find.future = self._client.find(
                self._prompt(keys, facts), find.session, self._model_name, cache_salt=facts.salt, timeout=self._lookup_timeout
            )
        except ValueError as error:  # A salt that no key can have.
            self._answer(find, None, error)
            return
        self._finds.append(find)

    def _prompt(self, keys: Iterable[bytes], facts: Facts) -> Prompt:
        more = self._generation + facts.adapter
        if more:
            return Prompt.from_keys([hashlib.sha256(key + more).digest() for key in keys], _TOKENS)
        return Prompt.from_keys([key if len(key) == 32 else hashlib.sha256(key).digest() for key in keys], _TOKENS)

    def _poll_finds(self) -> None:
        """Applies the answers that have arrived, once per step."""
        self._is_polled = True
        self._is_up = self._check_server()
        if not self._finds:
            return
        finds, self._finds = self._finds, []
        for find in finds:
            assert find.future is not None
            if not find.future.done():
                self._finds.append(find)
                continue
            try:
                self._answer(find, find.future.result(0), None)
            except KvTierError as error:
                self._answer(find, None, error)

    def _check_server(self) -> bool:
        """Whether the server is there, knows this worker, and is not known to lack operations by key. Each new one is asked for them."""
        client, worker = self._client, self._registration.worker
        if not client.is_healthy or worker is None or not worker.is_registered:
            return False
        if self._connection != client.connections:
            self._connection, self._has_objects, self._features = client.connections, True, client.get_experimental()
        if self._features is not None and self._features.done():
            try:
                self._has_objects = _OBJECTS in self._features.result(0)
                if not self._has_objects:
                    logger.warning("the server at %s has no operations by key (%s); computing without it", client.url, _OBJECTS)
            except KvTierError:  # Asked again.
                self._connection = -1
            self._features = None
        return self._has_objects

    def _answer(self, find: _Find, found: list[bool] | None, error: Exception | None) -> None:
        """Applies the result of a lookup. A failed one may have leases, too: the server may have answered too late."""
        find.future = None
        self._counts["vllm:kv_offload_kvtier_find_seconds"] += time.monotonic() - find.began
        if found is None:
            self._counts["vllm:kv_offload_kvtier_failed_finds"] += 1
            self._warnings.warning("find", "a lookup of %d chunks failed: %s; computing them", len(find.verdicts), error)
        find.has_leases = found is None or any(found)
        for verdict, is_found in zip(find.verdicts, found or itertools.repeat(False), strict=False):
            if verdict.find is find and verdict.result is _RETRY:
                verdict.result = _HIT if is_found else _MISS
        self._end_unused(find)

    def _leave(self, verdict: _Verdict) -> None:
        """Takes a verdict from the lookup that it relies on."""
        find, verdict.find = verdict.find, None
        if find is not None:
            find.users -= 1
            self._end_unused(find)

    def _end_unused(self, find: _Find) -> None:
        """Ends the leases of an answered lookup if nothing relies on them."""
        if find.has_leases and find.future is None and not find.users:
            find.has_leases = False
            self._client.end_session(find.session)

    def on_request_finished(self, req_context: Any) -> None:
        """Drops the verdicts that no other request uses, and their leases."""
        request = self._requests.pop(req_context.req_id, None)
        if request is None:
            return
        for key, verdict in request.verdicts.items():
            verdict.users -= 1
            if not verdict.users:
                del self._verdicts[key]
                self._leave(verdict)
        # Others may wait for the rest of what it has not asked yet.
        request.new = {key: verdict for key, verdict in request.new.items() if verdict.users}

    # -- transfers ---------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Starts to store chunks. The server leaves out those that it has."""
        self._submit(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Starts to load chunks: all of them, or none."""
        self._submit(job_metadata)

    def _submit(self, job: TransferJob) -> None:
        # In the order of the prompt, which the keys of stores have not: if the server has no space for all, it takes the first.
        position = job.req_context.get_offload_key_position
        pairs = sorted(zip(job.keys, job.chunk_ids.tolist(), strict=True), key=lambda pair: position(pair[0]) or 0)
        started = _Job(job, [key for key, _ in pairs])
        self._jobs[job.job_id] = started
        request, worker = self._requests.get(job.req_context.req_id), self._registration.worker
        if worker is None or not self._check_server() or self._features is not None:
            self._finish(started, "the server is away", None)
            return
        if request is None or not request.facts.is_known:
            self._finish(started, "the request has contents that no key has", None)
            return
        prompt = self._prompt(started.keys, request.facts)
        worker.submit(
            job.job_id,
            prompt,
            0,
            len(prompt),
            f"tier-{self._instance:x}-job-{job.job_id}",
            request.facts.salt,
            [[row for _, row in pairs]],
            is_store=not job.is_promotion,
            timeout=self._timeout,
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that have ended since the last call, each once."""
        self._take(0.0)
        results, self._results = self._results, []
        return results

    def _take(self, patience: float) -> None:
        worker = self._registration.worker
        if worker is None or not self._jobs:
            return
        for job_id, _, error, positions in worker.take_finished(patience):
            if job_id in self._jobs:
                self._finish(self._jobs[job_id], error, positions)

    def _finish(self, ended: _Job, error: str | None, positions: list[int] | None) -> None:
        """Notes the result of a job. ``positions``: chunks of a store that the server took; None if it does not say."""
        job, keys = ended.job, ended.keys
        del self._jobs[job.job_id]
        if error is not None:
            kind = "load" if job.is_promotion else "store"
            self._warnings.warning(kind, "a %s of %d chunks failed: %s", kind, len(keys), error)
            if job.is_promotion:
                self._mark_missing(keys)
        elif job.is_promotion:
            # vLLM has the chunks: nothing relies on the server's any more.
            for key in keys:
                if (verdict := self._verdicts.get(key)) is not None:
                    self._leave(verdict)
        else:
            taken = keys if positions is None else [keys[position] for position in positions]
            self._counts["vllm:kv_offload_kvtier_stored_keys"] += len(taken)
            if taken and self._events is not None:
                self._events.append(
                    OffloadingEvent(keys=taken, medium=self.medium, removed=False, locality=self.locality, ownership=self.tier_type)
                )
        self._results.append(
            JobResult(
                job.job_id,
                error is None,
                transfer_time=time.monotonic() - ended.began,
                transfer_bytes=len(keys) * self.block_size_bytes if error is None else 0,
            )
        )

    def _mark_missing(self, keys: Collection[bytes]) -> None:
        """Makes chunks that could not be loaded misses, so that vLLM computes them instead of trying again."""
        for key in keys:
            if (verdict := self._verdicts.get(key)) is not None:
                verdict.result = _MISS

    def has_pending_work(self) -> bool:
        """Whether lookups are in flight: an idle engine then makes steps, so that their leases end."""
        return bool(self._finds)

    def drain_jobs(self) -> None:
        """Waits until every job has ended, each within its timeout. vLLM calls this when it resets its caches, as after an update of the
        weights, so nothing from before is found afterwards."""
        while self._jobs:
            self._take(_POLL_INTERVAL)
        self._generation = os.urandom(16)
        for verdict in self._verdicts.values():
            verdict.result = _MISS

    def shutdown(self) -> None:
        """Waits for transfers to end, unregisters and disconnects."""
        self._registration.stop()
        self._registration.release()
        self._client.close()

    # -- reports -----------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns events of stored chunks since the last call."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Returns the Prometheus counters beside those that vLLM has of every tier."""
        return {name: OffloadingCounterMetadata(f"KvTier: {text}.") for name, text in _METRICS.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Returns the counts since the last call."""
        stats = OffloadingConnectorStats()
        for name, count in self._counts.items():
            if count:
                stats.increase_counter(name, count)
                self._counts[name] = 0.0
        return None if stats.is_empty() else stats
