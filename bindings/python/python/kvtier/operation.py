"""Arguments of a store or a retrieve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._native import Prompt


# Stands for a block that the engine does not have: one that has left its window, or that no hit needs. Only for windows whose
# blocks are held.
NO_BLOCK = -1


@dataclass
class LoadStoreOp:
    """A range of a prompt, and the engine's blocks for it.

    Exactly one of ``token_ids``, ``block_hashes`` and ``prompt`` has the prompt. Positions are in tokens from the prompt's
    start and lie on chunk boundaries. With ``block_hashes`` they may stay 0: the range is then all whole chunks that the
    hashes cover.
    """

    block_ids: Sequence[int] | Sequence[Sequence[int]]
    """Blocks of the range, in order: one list, or one list per group of layers."""

    token_ids: Sequence[int] | None = None
    """The whole prompt, at least up to ``end``."""

    block_hashes: Sequence[bytes] | None = None
    """The engine's hashes of the prompt's blocks from its start, each covering all tokens before it."""

    start: int = 0
    end: int = 0

    prompt: Prompt | None = None
    """The encoded prompt."""

    skip_first_n_tokens: int = 0
    """Tokens at the front of the range whose blocks a retrieve must not write; whole blocks are skipped."""

    keep_seconds: int | None = None
    """How long the server is to keep what a store writes in its memory: for N seconds from the store's end on no other object evicts
    it (1 to 86400; a server allows it for a share of its memory), or it is evicted first (0). None: as the server's policy does."""

    session: str | None = None
    """The agent's session that a store belongs to: a name of at most 256 bytes."""

    def __len__(self) -> int:
        """Number of blocks."""
        return sum(len(blocks) for blocks in self.blocks_of_groups())

    def blocks_of_groups(self) -> list[list[int]]:
        """Returns ``block_ids`` as one list per group."""
        ids = list(self.block_ids)
        if ids and not isinstance(ids[0], int):
            return [list(group) for group in ids]  # type: ignore[call-overload]
        return [ids]  # type: ignore[list-item]


def to_prompt(
    token_ids: Sequence[int] | None,
    block_hashes: Sequence[bytes] | None,
    prompt: Prompt | None,
    blocks_per_chunk: int,
    chunk_tokens: int,
) -> Prompt:
    """Returns the prompt, from its one form; ValueError unless there is exactly one."""
    check_one_form(token_ids, block_hashes, prompt)
    if prompt is not None:
        return prompt
    if block_hashes is not None:
        return Prompt.from_block_hashes(list(block_hashes), blocks_per_chunk, chunk_tokens)
    assert token_ids is not None
    return Prompt(token_ids if isinstance(token_ids, list) else list(token_ids))


def check_one_form(
    token_ids: Sequence[int] | None, block_hashes: Sequence[bytes] | None, prompt: Prompt | None
) -> None:
    """Raises ValueError unless the prompt has exactly one form."""
    forms = (("token_ids", token_ids), ("block_hashes", block_hashes), ("prompt", prompt))
    given = [name for name, value in forms if value is not None]
    if len(given) != 1:
        raise ValueError(f"exactly one of token_ids, block_hashes and prompt is needed, got {given or 'none'}")
