"""Counters of the connector in vLLM's log and Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS = {
    "lookups": "Lookups whose result was used",
    "hit_tokens": "Tokens that lookups found cached",
    "failed_lookups": "Lookups that failed or were not answered in time",
    "hand_overs": "Requests that waited for tokens that another engine was storing",
    "hand_over_timeouts": "Of these, those that did not find all of them in time",
    "hand_over_seconds": "Seconds that they waited",
    "errors": "Calls by vLLM that raised an exception in the connector, and ended as a miss",
    "stores": "Stores that succeeded, counted by every worker",
    "failed_stores": "Stores that failed, or were skipped while the server was away",
    "skipped_stores": "Stores from which the server took nothing, since it has all chunks or no space",
    "put_off_tokens": "Tokens whose store was put off, since stores in flight held too many blocks of vLLM's cache",
    "stored_tokens": "Tokens of successful stores",
    "store_seconds": "Seconds from submission to end of successful stores",
    "retrieves": "Retrieves that succeeded, counted by every worker",
    "failed_retrieves": "Retrieves that failed; vLLM computes their tokens",
    "retrieved_tokens": "Tokens of successful retrieves",
    "retrieve_seconds": "Seconds from submission to end of successful retrieves",
}

MISSES = (
    "skipped_by_vllm",
    "no_server",
    "too_short",
    "parameter",
    "not_identified",
    "not_found",
    "lookup_failed",
    "load_failed",
    "error",
)
"""Reasons of misses; docs/python.md has their causes. Each request counts at most once, by the first."""


@dataclass
class KvTierStats(KVConnectorStats):
    """Sums since the last step with any."""

    def reset(self) -> None:
        """Resets all counts to 0."""
        self.data = {}

    def add(self, **counts: float) -> None:
        """Adds to the counts."""
        for name, count in counts.items():
            if count:
                self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another's counts."""
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the values of the log line."""
        reduced = {name: round(count, 3) for name, count in self.data.items()}
        for kind in ("store", "retrieve", "hand_over"):
            count, seconds = self.data.get(f"{kind}s", 0), reduced.pop(f"{kind}_seconds", 0)
            if count:
                reduced[f"{kind}_mean_ms"] = round(1000 * seconds / count, 1)
        return reduced

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KvTierPromMetrics(KVConnectorPromMetrics):
    """Prometheus counters: ``vllm:kvtier_<name>``, and ``vllm:kvtier_misses`` with a reason."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._by_engine: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvtier_{name}", documentation=f"KvTierConnector: {text}.", labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._by_engine[engine][name] = counter.labels(*values)
        misses = self._counter_cls(
            name="vllm:kvtier_misses",
            documentation="KvTierConnector: Requests that could use nothing of the cache, by the first reason.",
            labelnames=[*labelnames, "reason"],
        )
        for engine, values in per_engine_labelvalues.items():
            for reason in MISSES:
                self._by_engine[engine][f"misses_{reason}"] = misses.labels(*values, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of one step."""
        for name, count in transfer_stats_data.items():
            counter = self._by_engine[engine_idx].get(name)
            if counter is not None:
                counter.inc(count)
