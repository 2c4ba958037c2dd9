"""What the scheduler's side knows of each request, and the prompt as a key."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._native import Prompt
from ..scheduler import SchedulerAdapter
from .contents import Contents


@dataclass
class Tracked:
    """A request under way."""

    is_stale: bool = field(default=False, kw_only=True)
    """It ran when keys were renewed: what it computes follows a prefix from before, and is not stored."""

    request: Any
    salt: str
    block_ids: list[list[int]] = field(default_factory=list)
    """Blocks of each group, from the prompt's start."""

    cached_tokens: int = 0
    """What the lookup found, in tokens from the prompt's start."""

    local_tokens: int = 0
    """What vLLM had itself at that time."""

    stored_tokens: int = 0
    """What is cached or on its way there."""

    wants_load: bool = False
    """The next step's metadata has its load."""

    loading: bool = False
    """A load was handed to the workers and has not ended."""

    load_failed: bool = False
    """A worker has told that this load failed; others may still be at it."""

    bypass: bool = False
    """A load has failed: it is computed without another try."""

    stores: int = 0
    """Stores handed to the workers."""

    matched: bool = False
    """A lookup's result is waiting for vLLM's decision."""


class Keys:
    """Makes prompts of requests: everything that KV depends on is in them, or in the salt."""

    def __init__(self, adapter: SchedulerAdapter, key_mode: str, hash_block_tokens: int, contents: Contents) -> None:
        self._contents = contents
        self._adapter, self._by_hashes = adapter, key_mode == "block_hashes"
        self._hash_block_tokens = hash_block_tokens
        self._made: dict[str, tuple[int, Prompt]] = {}
        # What is in all keys since the last reset, and what is in those of each request.
        self._generation = b""
        self._generations: dict[str, bytes] = {}

    @property
    def _hashes_per_chunk(self) -> int:
        # The chunk size may be known later than the first request.
        return self._adapter.chunk_tokens // self._hash_block_tokens

    def can(self, request: Any) -> bool:
        """Whether keys say all that the request's KV depends on. Embeddings are known by vLLM's hashes alone."""
        return (self._by_hashes or request.prompt_embeds is None) and self._contents.are_known(request)

    def prompt(self, request: Any, tokens: int) -> Prompt:
        """The first ``tokens`` tokens, a multiple of the chunk."""
        made = self._made.get(request.request_id)
        if made is None or made[0] < tokens:
            made = (tokens, self._extend(*made, request, tokens) if made else self._make(request, tokens))
            self._made[request.request_id] = made
        known, prompt = made
        return prompt if known == tokens else prompt.prefix(tokens)

    def renew(self) -> None:
        """Requests that begin from now on have keys that no other engine has, nor this one has had."""
        self._generation = os.urandom(16)

    def begin(self, request_id: str) -> None:
        """The request has no KV (any more). One that has goes on with its keys when others are renewed."""
        self._made.pop(request_id, None)
        self._generations[request_id] = self._generation

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._made.pop(request_id, None)
        self._generations.pop(request_id, None)

    def _extend(self, known: int, prompt: Prompt, request: Any, tokens: int) -> Prompt:
        """The prompt of ``known`` tokens and those behind it, which alone are encoded."""
        if self._by_hashes:
            chunk = self._adapter.chunk_tokens
            start, end = (count // chunk * self._hashes_per_chunk for count in (known, tokens))
            more = [bytes(each) for each in request.block_hashes[start:end]]
            return prompt.extended(Prompt.from_block_hashes(more, self._hashes_per_chunk, chunk))
        places = [feature.mm_position for feature in request.mm_features or ()]
        if known == 0 or any(place.offset + place.length > known for place in places):
            return self._make(request, tokens)
        return prompt.extended(Prompt(list(request.all_token_ids[known:tokens])))

    def _make(self, request: Any, tokens: int) -> Prompt:
        chunk = self._adapter.chunk_tokens
        if self._by_hashes:
            count = tokens // chunk * self._hashes_per_chunk
            prompt = Prompt.from_block_hashes(
                [bytes(each) for each in request.block_hashes[:count]], self._hashes_per_chunk, chunk
            )
        else:
            # Whole, so that what replaces tokens does not depend on where the prompt is cut.
            prompt = with_pictures(Prompt(list(request.all_token_ids)), request, chunk).prefix(tokens)
        generation = self._generations.get(request.request_id, self._generation)
        adapter = b""
        if request.lora_request is not None:
            # Of unknown content: a key that nothing else has.
            adapter = self._contents.adapter(request.lora_request) or os.urandom(16)
        for identity in (adapter, generation):
            if identity and tokens:
                # Every hash covers the first chunk.
                prompt = prompt.with_identity(0, chunk, identity)
        return prompt


def with_pictures(prompt: Prompt, request: Any, chunk: int) -> Prompt:
    """The prompt with the identities of pictures and sounds in place of their placeholders."""
    for feature in request.mm_features or ():
        place = feature.mm_position
        identity = repr(("mm", feature.identifier, place.offset, place.length)).encode()
        for first, last in _whole_chunks(place.offset, min(place.offset + place.length, len(prompt)), chunk):
            # The end of a prompt that is no whole chunk is in no key.
            if last <= len(prompt):
                prompt = prompt.with_identity(first, last - first, identity)
    return prompt


def _whole_chunks(start: int, end: int, chunk: int) -> list[tuple[int, int]]:
    """The chunks that ``[start, end)`` touches: those at its ends, which others share, and all between them as one.

    Words of 32 bits take the tokens' places, so a whole chunk of them must tell what only one of its tokens is about.
    """
    first, last = start // chunk * chunk, -(-end // chunk) * chunk
    bounds = sorted({first, min(first + chunk, last), max(first, last - chunk), last})
    return list(itertools.pairwise(bounds))


def blocks_of_range(
    block_ids: Sequence[Sequence[int]], block_tokens: Sequence[int], start: int, end: int
) -> list[list[int]]:
    """Each group's blocks for ``[start, end)``, which lies on block boundaries.

    Raises:
        RuntimeError: vLLM has not given the request that many blocks.
    """
    chosen = []
    for ids, size in zip(block_ids, block_tokens, strict=True):
        blocks = list(ids[start // size : end // size])
        if len(blocks) != (end - start) // size:
            raise RuntimeError(
                f"tokens {start} to {end} need blocks {start // size} to {end // size}; the request has {len(ids)}"
            )
        chosen.append(blocks)
    return chosen
