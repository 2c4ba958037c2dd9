"""A store or a retrieve on its way, and what is counted of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Group:
    """Layers that share block ids, as the engine numbers them."""

    layer_names: Sequence[str]
    block_tokens: int
    sliding_window: int = -1
    """In tokens; -1 for full attention."""


@dataclass
class Counters:
    """What an adapter did since its start, or since they were taken."""

    stores: int = 0
    failed_stores: int = 0
    skipped_stores: int = 0
    """Stores of which the server took nothing: it has all of it, or no room."""

    retrieves: int = 0
    failed_retrieves: int = 0
    stored_tokens: int = 0
    retrieved_tokens: int = 0
    store_seconds: float = 0.0
    retrieve_seconds: float = 0.0


@dataclass
class Transfer:
    """One store or retrieve on its way, of one request or of several that finish together."""

    is_store: bool
    request_ids: tuple[str, ...]
    tag: Any
    engine_event: Any
    """The engine's event: it must live until the server has opened it, which its answer tells."""

    began: float = field(default_factory=time.monotonic)
    blocks: list[int] = field(default_factory=list)
    """Of a retrieve, those that it writes."""

    numbers: list[int] = field(default_factory=list)
    parts: int = 0
    """Operations that were not answered yet."""

    tokens: int = 0
    """Stored or retrieved."""

    chunks: list[int] = field(default_factory=list)
    """Of a store of one operation: which chunks of its range the server took."""

    errors: list[str] = field(default_factory=list)
    event: Any = None
    """The device event behind which the copy is complete."""

    released: bool = False
    """A store's blocks may be overwritten."""
