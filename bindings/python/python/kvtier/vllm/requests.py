"""State of requests in the scheduler's process, and their prompts as keys."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Any

from .._native import Prompt
from ..scheduler import SchedulerAdapter
from .contents import Contents
from .parameters import Parameters

# Seconds between two lookups of a request that waits.
_LOOKUP_INTERVAL = 0.005


class Wait:
    """A request's wait for what another engine is storing. It is looked up every 5 ms, later after each fourth of the time it has
    waited: 20 times in a second."""

    def __init__(self, now: float) -> None:
        self.began, self.next_lookup, self.has_ended = now, now + _LOOKUP_INTERVAL, False
        # Whether a lookup that was replaced has found something.
        self.has_found = False

    def is_lookup_due(self, now: float) -> bool:
        """Whether the request is to be looked up again now."""
        if now < self.next_lookup:
            return False
        self.next_lookup = now + max(_LOOKUP_INTERVAL, (now - self.began) / 4)
        return True


@dataclass
class Tracked:
    """State of a running request."""

    is_stale: bool = field(default=False, kw_only=True)
    """Whether it ran when keys were renewed: its KV follows an older prefix, and is not stored."""

    request: Any
    salt: str
    parameters: Parameters
    block_ids: list[list[int]] = field(default_factory=list)
    """Blocks per group, from the prompt's start."""

    cached_tokens: int = 0
    """Tokens that the lookup found, from the prompt's start."""

    local_tokens: int = 0
    """Tokens of vLLM's own prefix at that time."""

    own_tokens: int | None = None
    """Tokens that vLLM's own prefix and this connector's load have, from the last question on until the request runs."""

    received: bool = False
    """Whether another connector's asynchronous load has ended since then."""

    stored_tokens: int = 0
    """Tokens that are cached, or whose store is in flight."""

    server_hashes: list[bytes] = field(default_factory=list)
    """The server's hashes of the prompt's first chunks, as far as KV events needed them."""

    put_off_tokens: int = 0
    """Tokens up to which stores were counted as put off."""

    wants_load: bool = False
    """Whether its load goes into the next step's metadata."""

    loading: bool = False
    """Whether a load was sent to the workers and has not ended."""

    load_failed: bool = False
    """Whether a worker reported that this load failed; on others it may still run."""

    bypass: str = ""
    """Why the request is computed without another lookup: a miss of :data:`kvtier.vllm.metrics.MISSES`. Empty if it is not."""

    miss: str = ""
    """Why the last answer to vLLM was that nothing is cached: one of the same. Empty if something was."""

    has_missed: bool = False
    """Whether a miss of it was counted."""

    stores: int = 0
    """Number of stores sent to the workers."""

    wait: Wait | None = None
    """Its wait for what another engine is storing, if there was one: a preempted request does not wait again."""

    matched: bool = False
    """Whether a lookup's result waits for vLLM's decision."""


class Keys:
    """Builder of the prompts that identify requests: they, or the salt, have everything that KV depends on."""

    def __init__(self, adapter: SchedulerAdapter, key_mode: str, hash_block_tokens: int, contents: Contents) -> None:
        self._contents = contents
        self._adapter, self._by_hashes = adapter, key_mode == "block_hashes"
        self._hash_block_tokens = hash_block_tokens
        self._made: dict[str, tuple[int, Prompt]] = {}
        # A random part of all keys since the last reset, and that of each request's keys.
        self._generation = b""
        self._generations: dict[str, bytes] = {}

    @property
    def _hashes_per_chunk(self) -> int:
        # The chunk size may be known later than the first request.
        return self._adapter.chunk_tokens // self._hash_block_tokens

    def note(self, request: Any) -> None:
        """Notes what a request makes vLLM read. All requests are noted, also those that use no cache."""
        if request.lora_request is not None:
            self._contents.note(request.lora_request)

    def can_identify(self, request: Any) -> bool:
        """Whether keys have all that the request's KV depends on. Only vLLM's hashes identify embeddings."""
        return (self._by_hashes or request.prompt_embeds is None) and self._contents.are_known(request)

    def prompt(self, request: Any, tokens: int) -> Prompt:
        """Returns the first ``tokens`` tokens, a multiple of the chunk, as a prompt."""
        made = self._made.get(request.request_id)
        if made is None or made[0] < tokens:
            made = (tokens, self._extend(*made, request, tokens) if made else self._make(request, tokens))
            self._made[request.request_id] = made
        known, prompt = made
        return prompt if known == tokens else prompt.prefix(tokens)

    def renew(self) -> None:
        """Changes the keys of later requests to ones that no engine has used."""
        self._generation = os.urandom(16)

    def begin(self, request_id: str) -> None:
        """Starts a request without KV, with the current keys. Running requests keep their keys when keys are renewed."""
        self._made.pop(request_id, None)
        self._generations[request_id] = self._generation

    def forget(self, request_id: str) -> None:
        """Removes an ended request."""
        self._made.pop(request_id, None)
        self._generations.pop(request_id, None)

    def _extend(self, known: int, prompt: Prompt, request: Any, tokens: int) -> Prompt:
        """Returns the prompt of ``known`` tokens extended to ``tokens``; only the new tokens are encoded."""
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
            # The whole prompt first, so that replaced tokens do not depend on the cut.
            prompt = with_pictures(Prompt(list(request.all_token_ids)), request, chunk).prefix(tokens)
        generation = self._generations.get(request.request_id, self._generation)
        adapter = b""
        if request.lora_request is not None:
            # Unknown content gets a unique key.
            adapter = self._contents.adapter(request.lora_request) or os.urandom(16)
        for identity in (adapter, generation):
            if identity and tokens:
                # Every hash covers the first chunk.
                prompt = prompt.with_identity(0, chunk, identity)
        return prompt


def with_pictures(prompt: Prompt, request: Any, chunk: int) -> Prompt:
    """Returns the prompt with the identities of pictures and sounds in place of their placeholders."""
    for feature in request.mm_features or ():
        place = feature.mm_position
        identity = repr(("mm", feature.identifier, place.offset, place.length)).encode()
        for first, last in _whole_chunks(place.offset, min(place.offset + place.length, len(prompt)), chunk):
            # An incomplete chunk at the end is in no key.
            if last <= len(prompt):
                prompt = prompt.with_identity(first, last - first, identity)
    return prompt


def _whole_chunks(start: int, end: int, chunk: int) -> list[tuple[int, int]]:
    """Returns the chunks that ``[start, end)`` overlaps: those at its ends, which have other tokens too, and all between as one.

    Words of 32 bits replace the tokens. A whole chunk of words is needed to carry the identity, even for a single token.
    """
    first, last = start // chunk * chunk, -(-end // chunk) * chunk
    bounds = sorted({first, min(first + chunk, last), max(first, last - chunk), last})
    return list(itertools.pairwise(bounds))
