"""Kinds of cache: vLLM's groups of layers, and which of their blocks a hit needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched import output

from ..operation import NO_BLOCK
from ..transfer import Group

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

T = TypeVar("T")

# vLLM's kinds of cache: blocks hold the KV of their tokens, or the state after the last of them.
_MLA = "MLAAttentionSpec"
_WINDOW = "SlidingWindowSpec"
_WINDOW_MLA = "SlidingWindowMLASpec"
_CHUNKED = "ChunkedLocalAttentionSpec"
_STATE = "MambaSpec"
_SERVED = ("FullAttentionSpec", _MLA, _WINDOW, _WINDOW_MLA, _CHUNKED, _STATE)

# Sinks in the pool's first blocks, before those of a request's table.
_SINK = "SinkFullAttentionSpec"

# A request's ring of the keys that its compressed caches have not compressed yet: empty at the end of a block of theirs.
_RING = "CircularBufferSpec"

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


def served_numbers(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Returns vLLM's numbers of the groups of layers that are cached: all but scratch memory of requests."""
    groups = kv_cache_config.kv_cache_groups
    return tuple(number for number, group in enumerate(groups) if not _is_scratch(group))


def scratch_layers(kv_cache_config: KVCacheConfig) -> set[str]:
    """Returns the layers whose memory is not cached."""
    return {name for group in kv_cache_config.kv_cache_groups if _is_scratch(group) for name in group.layer_names}


def of_served(by_group: Iterable[T], numbers: Sequence[int]) -> list[T]:
    """Returns the entries of the groups with these numbers, of one entry per group of vLLM's."""
    entries = list(by_group)
    return [entries[number] for number in numbers]


def _is_scratch(group: Any) -> bool:
    """Whether a group has scratch memory of requests, which vLLM leaves out of its prefix cache."""
    spec = group.kv_cache_spec
    return not getattr(spec, "prefix_cacheable", True) and {type(each).__name__ for each in specs_of(spec)} == {_RING}


def specs_of(spec: Any) -> list[Any]:
    """Returns the kinds of cache of a group's layers: one each if they differ, else one for all."""
    several = getattr(spec, "kv_cache_specs", None)
    return list(several.values()) if several else [spec]


def is_latent(spec: Any) -> bool:
    """Whether a kind of cache has latents, which are not divided by heads."""
    return type(spec).__name__ in (_MLA, _WINDOW_MLA)


def is_state(spec: Any) -> bool:
    """Whether a kind of cache has recurrent states."""
    return type(spec).__name__ == _STATE


def served_groups(kv_cache_config: KVCacheConfig) -> list[Group]:
    """Returns vLLM's groups of layers that are cached; ValueError for kinds of cache that cannot be served."""
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if _is_scratch(group):
            continue
        spec, layer = group.kv_cache_spec, group.layer_names[0]
        specs = specs_of(spec)
        kinds = {type(each).__name__ for each in specs}
        _check_participates(kv_cache_config, number)
        if not kinds.isdisjoint((_WINDOW, _WINDOW_MLA, _CHUNKED)) and not _serves_windows():
            raise ValueError(
                f"KvTierConnector serves sliding windows and chunked local attention from vLLM 0.30 on, and {layer} has "
                f"{', '.join(sorted(kinds))}. If the model also has layers with full attention, --disable-hybrid-kv-cache-manager makes "
                "vLLM keep all blocks, and it is served; the windows then save no memory. Otherwise run it without a KV connector: LMCache's (LMCacheMPConnector) "
                "stores blocks that vLLM has given to other requests, and its hits can be wrong"
            )
        if _SINK in kinds:
            raise ValueError(
                f"KvTierConnector: {layer} has {_SINK}: vLLM reserves no blocks for its sinks (seen in 0.32), and "
                "other requests' KV would take their place"
            )
        if not kinds.issubset(_SERVED):
            raise ValueError(f"KvTierConnector serves {', '.join(_SERVED)}; {layer} has {', '.join(sorted(kinds))}")
        if _STATE in kinds:
            _check_states(specs, layer)
            groups.append(Group(list(group.layer_names), spec.block_size, spec.block_size, recurrent_state=True))
            continue
        for each in specs:
            _check_causal(each, layer)
        _check_compressed(kv_cache_config, specs, layer)
        # A full-attention spec may also have a window, but keeps all blocks.
        windows = {(_window(each), each.attention_chunk_size if type(each).__name__ == _CHUNKED else 0) for each in specs}
        if len(windows) > 1:
            raise ValueError(f"KvTierConnector serves groups with one window; the group of {layer} has {sorted(windows)}")
        groups.append(Group(list(group.layer_names), spec.block_size, *windows.pop()))
    if not groups:
        raise ValueError("KvTierConnector: the model has no group of layers that can be cached")
    if len(kv_cache_config.kv_cache_groups) > 1 and not reports_failed_requests():
        raise ValueError(
            "KvTierConnector serves models with several groups of layers from vLLM 0.30 on: this release has no way to report "
            "which request's load failed"
        )
    return groups


def _check_participates(kv_cache_config: KVCacheConfig, number: int) -> None:
    """Checks that a group is in vLLM's prefix cache and has vLLM's usual blocks."""
    group = kv_cache_config.kv_cache_groups[number]
    spec, layer = group.kv_cache_spec, group.layer_names[0]
    kind = ", ".join(sorted({type(each).__name__ for each in specs_of(spec)}))
    if getattr(spec, "prefix_replay_tokens", 0):
        # Behind a hit its KV is computed from a part of the tokens before, and is not what an engine without the hit computes.
        raise ValueError(
            f"KvTierConnector serves caches without bounded replay, and {layer} ({kind}) has it: KV behind a hit is not exact then; "
            "--no-swa-bounded-replay keeps the windows in the prefix cache"
        )
    if getattr(group, "host_resident", False):
        raise ValueError(f"KvTierConnector serves caches in the device's memory; the blocks of {layer} are in the host's (HiSparse)")
    if not getattr(spec, "prefix_cacheable", True) or not getattr(group, "enable_kv_transfer", True):
        raise ValueError(f"KvTierConnector serves groups that vLLM's prefix cache has; {layer} has {kind}, which it leaves out")


def _check_causal(spec: Any, layer: str) -> None:
    """Checks that blocks have the KV of their own tokens, which depends on no later ones."""
    if getattr(spec, "non_causal", False):
        raise ValueError(f"KvTierConnector serves caches whose non_causal is False; {layer} has True")
    tokens = getattr(spec, "tokens_per_state", 1)
    if tokens == 1:
        return
    # A latent of several tokens is written with the last of them, so whole blocks of whole latents are final.
    if type(spec).__name__ != _MLA or not isinstance(tokens, int) or tokens < 1 or spec.block_size % tokens:
        raise ValueError(
            f"KvTierConnector serves caches whose tokens_per_state is 1, or of {_MLA} a divisor of the block size; {layer} "
            f"({type(spec).__name__}) has {tokens}"
        )


def _check_compressed(kv_cache_config: KVCacheConfig, specs: Sequence[Any], layer: str) -> None:
    """Checks that the scheduler's process, which knows only the first layer of a group, can know that some are compressed."""
    kinds = {type(each).__name__ for group in kv_cache_config.kv_cache_groups for each in specs_of(group.kv_cache_spec)}
    if len({_is_compressed(each) for each in specs}) > 1 and kinds.isdisjoint((_RING, _WINDOW_MLA)):
        raise ValueError(
            f"KvTierConnector serves groups with compressed and other latents only beside a {_RING} or {_WINDOW_MLA}; the group of {layer} has both"
        )


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
    elif type(spec).__name__ in (_WINDOW, _WINDOW_MLA):
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


def is_compressed(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some cached layers keep one latent of several tokens. A hit inside of one would compute it again from a part of them.

    vLLM's scheduler knows only the first layer of a group, but each such model has a ring of tokens that are not compressed yet, or a
    window of them.
    """
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group.kv_cache_spec)]
    return any(_is_compressed(spec) or type(spec).__name__ == _RING for spec in specs)


def _is_compressed(spec: Any) -> bool:
    return bool(getattr(spec, "tokens_per_state", 1) not in (1, -1))


def has_latent_windows(specs: Iterable[Any]) -> bool:
    """Whether some layers have windows of latents."""
    return any(type(each).__name__ == _WINDOW_MLA for spec in specs for each in specs_of(spec))


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
