"""Messages between the scheduler's connector and the workers' in each step."""

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
    """A store's number, in the workers' reports of its end."""

    session: str | None = None
    """The agent's session that a store belongs to."""

    keep_seconds: int | None = None
    """How long what a store writes is to be kept; None as the server's policy does."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Message from the scheduler to every worker."""

    loads: list[Move] = field(default_factory=list)
    stores: list[Move] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    """Requests whose blocks are about to be reused although stores may read them."""

    asked: set[int] = field(default_factory=set)
    """Numbers of stores that should have ended: every worker that stores says which of them it does not have."""

    failed: dict[str, list[list[int]]] = field(default_factory=dict)
    """Requests whose load could not start, with their blocks: every worker reports it as failed."""

    held: set[str] = field(default_factory=set)
    """Finished requests whose blocks wait for the workers' report that no store reads them."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Message from the workers to the scheduler."""

    ended: Counter[int] = field(default_factory=Counter)
    """Number of a store -> count of workers where it has ended, successfully or not."""

    stored: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of a store, and a chunk's position in it -> count of workers that have stored their piece of it."""

    unknown: Counter[int] = field(default_factory=Counter)
    """Number of a store that was asked for -> count of workers that have no such store in flight."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Returns the sum of the reports of several workers."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.ended + other.ended, self.stored + other.stored, self.unknown + other.unknown)
