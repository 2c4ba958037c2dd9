"""Groups of layers as a worker registers them: by the blocks of its attention kernels, and with layers of one shape only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..operation import NO_BLOCK
from ..transfer import Group


@dataclass
class _Part:
    """Layers of one shape in a group."""

    group: int
    """Position of the group among those that are cached."""

    kernel_blocks: int
    """Blocks of the attention kernels in one of vLLM's."""

    registered: Group


class Registered:
    """Tensors and groups of a registration.

    vLLM divides its blocks into smaller ones if its attention kernels have only these: block ``b`` is then the tensor's
    blocks from ``b * n`` on. And layers that share block ids may have pages of different shapes, which the server wants in groups of
    their own.
    """

    def __init__(self, kv_caches: Mapping[str, Any], groups: Sequence[Group], num_blocks: int | None) -> None:
        """``num_blocks``: vLLM's number of blocks; None if it is unknown, and blocks are not divided.

        Raises:
            ValueError: kernels do not divide vLLM's blocks evenly.
        """
        self.tensors, self._parts = dict(kv_caches), []
        place = {name: at for at, name in enumerate(self.tensors)}
        for number, group in enumerate(groups):
            shapes: dict[Any, list[str]] = {}
            for name in group.layer_names:
                if name in place:
                    tensor = self.tensors[name]
                    shapes.setdefault((tuple(tensor.shape), tensor.dtype), []).append(name)
            for (shape, _), names in shapes.items():
                count = _kernel_blocks(names[0], shape, num_blocks)
                if group.block_tokens % count or group.recurrent_state and count > 1:
                    raise ValueError(
                        f"KvTierConnector: {names[0]} has {shape[0]} blocks of {group.block_tokens} tokens, {count} times vLLM's number"
                    )
                self._parts.append(_Part(number, count, replace(group, layer_names=names, block_tokens=group.block_tokens // count)))
        # The server wants groups in the order of their first layers.
        self._parts.sort(key=lambda part: min(place[name] for name in part.registered.layer_names))

    @property
    def groups(self) -> list[Group]:
        """The groups of the registration."""
        return [part.registered for part in self._parts]

    def blocks(self, by_group: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the blocks of the registered groups, from vLLM's by cached group."""
        found = []
        for part in self._parts:
            ids, count = by_group[part.group], part.kernel_blocks
            found.append(
                list(ids)
                if count == 1
                else [NO_BLOCK if block == NO_BLOCK else block * count + at for block in ids for at in range(count)]
            )
        return found


def _kernel_blocks(name: str, shape: Sequence[int], num_blocks: int | None) -> int:
    """Returns the number of a tensor's blocks in one of vLLM's. Blocks are its first dimension; of five, if the first is K and V, the
    second.

    Raises:
        ValueError: they are no multiple of vLLM's.
    """
    if not num_blocks:
        return 1
    count, rest = divmod(shape[1 if len(shape) == 5 and shape[0] == 2 else 0], num_blocks)
    if rest or not count:
        raise ValueError(f"KvTierConnector: {name} has the shape {list(shape)}, in which blocks are no multiple of vLLM's {num_blocks}")
    return count
