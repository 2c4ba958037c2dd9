"""Kinds of cache: vLLM's groups of layers, and which of their blocks a hit needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched import output

from ..operation import NO_BLOCK
from ..transfer import Group

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# vLLM's kinds of cache: blocks hold the KV of their tokens, or the state after the last of them.
_MLA = "MLAAttentionSpec"
_WINDOW = "SlidingWindowSpec"
_CHUNKED = "ChunkedLocalAttentionSpec"
_STATE = "MambaSpec"
_SERVED = ("FullAttentionSpec", _MLA, _WINDOW, _CHUNKED, _STATE)

# vLLM's block for places whose block a request does not have.
_NULL_BLOCK = 0


def reports_failed_requests() -> bool:
    """Whether this vLLM takes reports of failed loads by request; before 0.30 only by block."""
    return hasattr(KVConnectorBase_V1, "get_transfer_results")


def _serves_windows() -> bool:
    """Whether this vLLM has what windows need: the current blocks of a request, and failed loads by request."""
    fields = {field.name for field in dataclasses.fields(output.SchedulerOutput)}
    return "kv_connector_block_state" in fields and reports_failed_requests()


def _serves_states() -> bool:
    """Whether this vLLM has what recurrent states need in addition: it names the blocks with the state at a block's end."""
    state = getattr(output, "KVConnectorBlockState", None)
    fields = {field.name for field in dataclasses.fields(state)} if state is not None else set()
    return _serves_windows() and "boundary_state_offloads" in fields


def served_groups(kv_cache_config: KVCacheConfig) -> tuple[list[Group], bool]:
    """Returns vLLM's groups of layers, and whether all are MLA's; ValueError for kinds of cache that cannot be served."""
    groups, all_kinds = [], set()
    for group in kv_cache_config.kv_cache_groups:
        spec, layer = group.kv_cache_spec, group.layer_names[0]
        several = getattr(spec, "kv_cache_specs", None)
        specs = list(several.values()) if several else [spec]
        kinds = {type(each).__name__ for each in specs}
        all_kinds |= kinds
        if not kinds.isdisjoint((_WINDOW, _CHUNKED)) and not _serves_windows():
            raise ValueError(
                f"KvTierConnector serves sliding windows and chunked local attention from vLLM 0.30 on, and {layer} has "
                f"{', '.join(sorted(kinds))}. If the model also has layers with full attention, --disable-hybrid-kv-cache-manager makes "
                "vLLM keep all blocks, and it is served; the windows then save no memory. Otherwise run it without a KV connector: LMCache's (LMCacheMPConnector) "
                "stores blocks that vLLM has given to other requests, and its hits can be wrong"
            )
        if not kinds.issubset(_SERVED):
            raise ValueError(f"KvTierConnector serves {', '.join(_SERVED)}; {layer} has {', '.join(sorted(kinds))}")
        if _STATE in kinds:
            _check_states(specs, layer)
            groups.append(Group(list(group.layer_names), spec.block_size, spec.block_size, recurrent_state=True))
            continue
        for field, allowed in (("non_causal", False), ("tokens_per_state", 1)):
            # KV that depends on later tokens, or blocks without the KV of their own tokens.
            found = {getattr(each, field, allowed) for each in specs}
            if found != {allowed}:
                raise ValueError(f"KvTierConnector serves caches whose {field} is {allowed}; {layer} has {found}")
        # A full-attention spec may also have a window, but keeps all blocks.
        windows = {(_window(each), each.attention_chunk_size if type(each).__name__ == _CHUNKED else 0) for each in specs}
        if len(windows) > 1:
            raise ValueError(f"KvTierConnector serves groups with one window; the group of {layer} has {sorted(windows)}")
        groups.append(Group(list(group.layer_names), spec.block_size, *windows.pop()))
    if len(groups) > 1 and not reports_failed_requests():
        raise ValueError(
            "KvTierConnector serves models with several groups of layers from vLLM 0.30 on: this release has no way to report "
            "which request's load failed"
        )
    return groups, all_kinds == {_MLA}


def _check_states(specs: Sequence[Any], layer: str) -> None:
    """Checks that the states of a group of layers can be cached."""
    if not _serves_states():
        raise ValueError(
            f"KvTierConnector serves recurrent states from vLLM 0.30 on, and {layer} has one; run the model without a KV connector"
        )
    modes = {spec.mamba_cache_mode for spec in specs}
    if modes != {"align"}:
        raise ValueError(
            f"KvTierConnector serves recurrent states whose mamba_cache_mode is align, and {layer} has {', '.join(sorted(modes))}: "
            "other modes keep no state at the end of a block. --enable-prefix-caching makes vLLM choose align"
        )


def _window(spec: Any) -> int:
    """Returns the tokens before any one that its layers can need, in whole blocks; -1 for all of them."""
    if type(spec).__name__ == _CHUNKED:
        tokens = spec.attention_chunk_size
    elif type(spec).__name__ == _WINDOW:
        tokens = max(1, spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0))
    else:
        return -1
    return int(-(-tokens // spec.block_size) * spec.block_size)


def hash_block_tokens(kv_cache_config: KVCacheConfig, groups: Sequence[Group]) -> int:
    """Returns the tokens that one of vLLM's block hashes covers."""
    return getattr(kv_cache_config, "hash_block_size", None) or groups[0].block_tokens


def chunk_unit(kv_cache_config: KVCacheConfig, groups: Sequence[Group]) -> int:
    """Returns the least chunk, in tokens: whole blocks of every group, and of vLLM's hashes. All processes of an engine have the
    same."""
    return math.lcm(hash_block_tokens(kv_cache_config, groups), *(group.block_tokens for group in groups))


def chunk_tokens(option: int, kv_cache_config: KVCacheConfig, groups: Sequence[Group]) -> int | None:
    """Returns the chunk to ask the server for; None for its default. A model with recurrent states has the least one, since a
    hit ends where a state is, and vLLM keeps the last one of a prompt."""
    if option or not has_states(groups):
        return option or None
    return chunk_unit(kv_cache_config, groups)


def has_states(groups: Sequence[Group]) -> bool:
    """Whether some layers have recurrent states."""
    return any(group.recurrent_state for group in groups)


def has_windows(groups: Sequence[Group]) -> bool:
    """Whether some layers do not need all tokens."""
    return any(group.sliding_window >= 0 for group in groups)


def _needed_per_chunk(group: Group, chunk: int) -> int:
    """Returns the tokens at the end of a chunk that a hit at its end, or at a later one's, can need."""
    return chunk if group.sliding_window < 0 else min(group.sliding_window, chunk)


def blocks_per_chunk(groups: Sequence[Group], chunk: int) -> int:
    """Returns the number of blocks that a store of one chunk reads; of states, which few chunks have, none."""
    return sum(_needed_per_chunk(group, chunk) // group.block_tokens for group in groups if not group.recurrent_state)


def blocks_of_range(
    block_ids: Sequence[Sequence[int]], groups: Sequence[Group], chunk: int, start: int, end: int
) -> list[list[int]]:
    """Returns each group's blocks for ``[start, end)``, which lies on chunk boundaries.

    ``NO_BLOCK`` stands for blocks of a window that no hit needs, or that have left it.

    Raises:
        RuntimeError: the request has fewer blocks.
    """
    chosen = []
    for ids, group in zip(block_ids, groups, strict=True):
        size = group.block_tokens
        blocks = list(ids[start // size : end // size])
        if len(blocks) != (end - start) // size:
            raise RuntimeError(
                f"tokens {start} to {end} need blocks {start // size} to {end // size}; the request has {len(ids)}"
            )
        if group.sliding_window >= 0:
            unneeded, per_chunk = (chunk - _needed_per_chunk(group, chunk)) // size, chunk // size
            blocks = [
                NO_BLOCK if block == _NULL_BLOCK or place % per_chunk < unneeded else block for place, block in enumerate(blocks)
            ]
        chosen.append(blocks)
    return chosen


def with_offered_states(
    table: Sequence[Sequence[int]], groups: Sequence[Group], offered: Iterable[tuple[int, int, int]]
) -> list[list[int]]:
    """Returns a request's blocks with those states only that vLLM has ``offered`` in this step: (group, block, tokens before it).

    Other blocks of a state's group are in use for tokens behind their place, or for speculation.
    """
    blocks = [[_NULL_BLOCK] * len(ids) if group.recurrent_state else list(ids) for ids, group in zip(table, groups, strict=True)]
    for number, block, tokens in offered:
        place, rest = divmod(tokens, groups[number].block_tokens)
        if groups[number].recurrent_state and not rest and 0 < place <= len(blocks[number]):
            blocks[number][place - 1] = block
    return blocks


def check_windows(blocks: Sequence[Sequence[int]], groups: Sequence[Group], start: int, local: int, end: int) -> None:
    """Checks that ``blocks``, those of ``[start, end)``, have what each window needs at ``end`` after the ``local`` tokens.

    Raises:
        RuntimeError: a block is missing, so the window could not be loaded.
    """
    for ids, group in zip(blocks, groups, strict=True):
        needed = end // group.attention_chunk * group.attention_chunk if group.attention_chunk else end - group.sliding_window
        first = max(start, local, needed)
        if group.sliding_window >= 0 and NO_BLOCK in ids[(first - start) // group.block_tokens :]:
            raise RuntimeError(f"a window of {group.sliding_window} tokens before token {end} lacks blocks")
