"""What the scheduler's connector and the workers' tell each other in each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from .._native import Prompt


@dataclass
class Move:
    """A load or a store of one request."""

    request_id: str
    prompt: Prompt
    start: int
    end: int
    block_ids: list[list[int]]
    salt: str
    skip: int = 0
    number: int = -1
    """Of a store, by which workers tell of its end."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to every worker."""

    loads: list[Move] = field(default_factory=list)
    stores: list[Move] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    """Their blocks are about to be given to others."""

    failed: dict[str, list[list[int]]] = field(default_factory=dict)
    """Requests whose load could not be made, with their blocks: every worker reports it as failed."""

    held: set[str] = field(default_factory=set)
    """Finished requests whose blocks wait for the workers' word that no store reads them."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler."""

    ended: Counter[int] = field(default_factory=Counter)
    """Number of a store -> workers for whom it has ended, in whatever way."""

    stored: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of a store, and a chunk's position in it -> workers that have stored their piece of it."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Of several workers."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.ended + other.ended, self.stored + other.stored)
