"""Stores and retrieves in flight, and their counters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Group:
    """A group of layers that share the engine's block ids."""

    layer_names: Sequence[str]
    block_tokens: int
    sliding_window: int = -1
    """In tokens; -1 for full attention."""

    attention_chunk: int = 0
    """Tokens in a chunk of chunked local attention, where a token needs only those before it in its chunk; 0 for none. The window,
    which is all that the server knows, is then a whole chunk: a hit just behind a chunk's end also needs objects that no layer reads, and
    is a miss if vLLM had freed their blocks unstored."""

    recurrent_state: bool = False
    """Whether a block has the state after its last token instead of the KV of its tokens. The window is then one block."""

    def described(self, number: int, layers: Sequence[int]) -> dict[str, Any]:
        """Returns the group for the native worker, with the positions of its layers."""
        return {
            "group_id": number,
            "layers": list(layers),
            "tokens_per_block": self.block_tokens,
            "sliding_window": self.sliding_window,
            "recurrent_state": self.recurrent_state,
        }


@dataclass
class Counters:
    """Counters of an adapter since its start, or since they were last taken."""

    stores: int = 0
    failed_stores: int = 0
    skipped_stores: int = 0
    """Stores from which the server took nothing: it has all chunks, or no space."""

    retrieves: int = 0
    failed_retrieves: int = 0
    stored_tokens: int = 0
    retrieved_tokens: int = 0
    store_seconds: float = 0.0
    retrieve_seconds: float = 0.0


@dataclass
class Transfer:
    """A store or retrieve in flight, of one request or of several that finish together."""

    is_store: bool
    request_ids: tuple[str, ...]
    tag: Any
    engine_event: Any
    """The engine's event. It must live until the server's answer, which shows that the server has opened it."""

    began: float = field(default_factory=time.monotonic)
    blocks: list[int] = field(default_factory=list)
    """Blocks that a retrieve writes."""

    numbers: list[int] = field(default_factory=list)
    parts: int = 0
    """Operations without an answer."""

    tokens: int = 0
    """Tokens stored or retrieved."""

    chunks: list[int] = field(default_factory=list)
    """Chunks of its range that the server took, for a store of one operation."""

    errors: list[str] = field(default_factory=list)
    event: Any = None
    """The device event after which the copy is complete."""

    released: bool = False
    """Whether a store's blocks may be overwritten."""
