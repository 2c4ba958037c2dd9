"""Paged KV caches as engines lay them out, small enough for tests."""

import hashlib
from dataclasses import dataclass

import torch

BLOCK_TOKENS = 4
NUM_BLOCKS = 64


@dataclass(frozen=True)
class Layout:
    """How one layer's tensor is shaped, and where its block axis is."""

    name: str
    shape: tuple
    block_axis: int
    hints: dict
    dtype: torch.dtype = torch.bfloat16
    one_buffer: bool = False  # all layers are views of one allocation, as vLLM does it
    mla: bool = False


def _blocks(heads, size):
    return {"NB": NUM_BLOCKS, "BS": BLOCK_TOKENS, "NH": heads, "HS": size}


def layout(name, heads=2, size=8, dtype=torch.bfloat16):
    """One of the layouts by name, with `heads` heads of `size` elements."""
    d = _blocks(heads, size)
    nb, bs, nh, hs = d["NB"], d["BS"], d["NH"], d["HS"]
    made = {
        # K and V planes outermost, tokens before heads: the classic one.
        "kv_first_nhd": ((2, nb, bs, nh, hs), 1, {"kv_layout": "NHD"}, False, False),
        # the same with heads before tokens inside a block
        "kv_first_hnd": ((2, nb, nh, bs, hs), 1, {"kv_layout": "HND"}, False, False),
        # blocks outermost, K and V inside
        "blocks_first_nhd": ((nb, 2, bs, nh, hs), 0, {"kv_layout": "NHD"}, False, False),
        # K and V of one head side by side in the last dimension; what vLLM on CPU registers
        "fused_hnd": ((nb, nh, bs, 2 * hs), 0, {"kv_layout": "HND"}, True, False),
        "fused_nhd": ((nb, bs, nh, 2 * hs), 0, {"kv_layout": "NHD"}, True, False),
        # one latent vector a token
        "mla": ((nb, bs, nh * hs), 0, {"kv_layout": "NHD"}, False, True),
    }
    shape, axis, hints, one_buffer, mla = made[name]
    return Layout(name, shape, axis, hints, dtype, one_buffer, mla)


def allocate(layout, layers, generator):
    """`layers` tensors of random bytes in this layout."""

    def random_bytes(shape):
        itemsize = torch.empty((), dtype=layout.dtype).element_size()
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * itemsize), dtype=torch.uint8, generator=generator)
        return raw.view(layout.dtype)

    if layout.one_buffer:
        whole = random_bytes((layers, *layout.shape))
        return [whole[i] for i in range(layers)]
    return [random_bytes(layout.shape) for _ in range(layers)]


def read_blocks(tensor, block_axis, blocks):
    """The bytes of these blocks, one tensor row a block, in the order asked."""
    picked = tensor.index_select(block_axis, torch.tensor(blocks))
    return picked.movedim(block_axis, 0).contiguous().view(torch.uint8).clone()


def fill_blocks(tensor, block_axis, blocks, value=0):
    """Overwrite these blocks with one value."""
    tensor.view(torch.uint8).index_fill_(block_axis, torch.tensor(blocks), value)


def write_blocks(tensor, block_axis, blocks, rows):
    """Overwrite these blocks with rows of bytes as `read_blocks` returns them."""
    places = tensor.view(torch.uint8).movedim(block_axis, 0)
    places[torch.tensor(blocks)] = rows.view(len(blocks), *places.shape[1:])


def block_bytes(tensor, block_axis):
    """Bytes of one block of a layer."""
    return tensor.numel() // tensor.shape[block_axis] * tensor.element_size()


def noise(name, rows, row_bytes):
    """Rows of bytes that depend on the name only; more rows begin like fewer."""
    raw = hashlib.shake_128(name.encode()).digest(rows * row_bytes)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(rows, row_bytes)
