"""Prompts, and KV that names its owner: each block names its tenant, its chunk, and the store that has written it.

A chunk's identity is (tenant, model, stem, chunk). Prompts of a family share their first chunks: their stem is the family, that of
the others the prompt. Tenants and models have the same prompts, so a leak between them would be a hit.
"""

import random
import struct
import zlib
from typing import NamedTuple

import numpy
import torch
from kvrig import layouts

CHUNK_TOKENS = 16
BLOCKS = CHUNK_TOKENS // layouts.BLOCK_TOKENS
LAYERS = 3
# 96 KiB per chunk.
LAYOUT = layouts.layout("kv_first_nhd", heads=8, size=64)
ROW_BYTES = 8192
CHUNK_BYTES = ROW_BYTES * LAYERS * BLOCKS

TENANTS = ("", "alice", "bob")
# Engines whose pages the server copies have other objects than those that copy by themselves: models of their own.
MODELS = ("torture/a/chunks", "torture/b/chunks", "torture/a/pages", "torture/b/pages", "torture/a/gpu", "torture/b/gpu")
PROMPTS, CHUNKS, FAMILY, SHARED = 12, 7, 4, 2

HEADER = struct.Struct("<4sBBHBBBxQ")
NOISE = numpy.frombuffer(random.Random(0).randbytes(1 << 20), dtype=numpy.uint8)


class Identity(NamedTuple):
    """Of a chunk; numbers of the tenant and the model."""

    tenant: int
    model: int
    stem: int
    chunk: int


def identity(tenant, model, prompt, chunk):
    """The identity of a chunk of a prompt."""
    return Identity(tenant, model, prompt // FAMILY if chunk < SHARED else 1000 + prompt, chunk)


def tokens(prompt, chunks=CHUNKS):
    """The token ids of a prompt's first chunks."""
    found = []
    for chunk in range(chunks):
        source = random.Random(f"{identity(0, 0, prompt, chunk)}")
        found += [source.randrange(1 << 17) for _ in range(CHUNK_TOKENS)]
    return found


def row(owner, version, layer, block):
    """The bytes of one block of a layer."""
    head = HEADER.pack(b"KVTR", owner.tenant, owner.model, owner.stem, owner.chunk, layer, block, version)
    sum_ = zlib.crc32(head)
    begin = sum_ % (len(NOISE) - ROW_BYTES)
    found = NOISE[begin : begin + ROW_BYTES].copy()
    found[: len(head) + 4] = numpy.frombuffer(head + struct.pack("<I", sum_), dtype=numpy.uint8)
    return found


def rows(owners, version, layer):
    """The bytes of these chunks in a layer, a row per block."""
    found = numpy.stack([row(owner, version, layer, block) for owner in owners for block in range(BLOCKS)])
    return torch.from_numpy(found)


def read_row(content, layer, block):
    """(identity, version) of a block, or None if it is not, byte for byte, what one store has painted there."""
    head = content[: HEADER.size].tobytes()
    magic, tenant, model, stem, chunk, at_layer, at_block, version = HEADER.unpack(head)
    owner = Identity(tenant, model, stem, chunk)
    if magic != b"KVTR" or (at_layer, at_block) != (layer, block) or not numpy.array_equal(row(owner, version, layer, block), content):
        return None
    return owner, version


def read_chunks(per_layer):
    """Per chunk (identity, version), or the text of what is wrong with it; from the rows of every layer."""
    layers = [numpy.ascontiguousarray(each.numpy()).reshape(-1, ROW_BYTES) for each in per_layer]
    found = []
    for first in range(0, len(layers[0]), BLOCKS):
        said = {read_row(rows_[first + block], layer, block) for layer, rows_ in enumerate(layers) for block in range(BLOCKS)}
        found.append(said.pop() if len(said) == 1 and None not in said else f"not of one store: {sorted(map(str, said))[:4]}")
    return found
