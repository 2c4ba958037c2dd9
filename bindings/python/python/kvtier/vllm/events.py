"""vLLM's events of stored chunks."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash


def stored_chunks(request: Any, start: int, end: int, chunk: int, hash_block: int) -> list[BlockStored]:
    """Returns one event per chunk of ``[start, end)``, with vLLM's own hashes, each of ``hash_block`` tokens; no event if the
    request has no hashes."""
    if len(request.block_hashes) < end // hash_block:
        return []
    lora = request.lora_request
    events, per_chunk = [], chunk // hash_block
    for position in range(start, end, chunk):
        first = position // hash_block
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[first : first + per_chunk]]
        events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
                token_ids=list(request.all_token_ids[position : position + chunk]),
                block_size=hash_block,
                lora_id=lora.adapter_id if lora else None,
                medium="CPU",
                lora_name=lora.lora_name if lora else None,
            )
        )
    return events
