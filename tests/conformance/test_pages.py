"""Where each byte of each page goes, against LMCache's own copy for processors: random registrations, both ways."""

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from kvrig.server import REPOSITORY
from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection
from lmcache.v1.platform.torch_ops import multi_layer_block_kv_transfer

pytestmark = pytest.mark.ours("what is compared is not a server")

CASES = 400
# As many that all formats come often.
EVERY_FORMAT = {
    "NB_NL_TWO_BS_NH_HS", "NB_NL_TWO_NH_BS_HS", "NL_X_NB_BSV_BSS", "NL_X_NB_BS_HS", "NL_X_NB_BS_NH_CS",
    "NL_X_NB_BS_NH_HS", "NL_X_NB_NH_BS_CS", "NL_X_NB_TWO_BS_NH_HS", "NL_X_NB_TWO_NH_BS_HS", "NL_X_TWO_NB_BS_NH_HS",
    "NL_X_TWO_NB_NH_BS_HS", "NL_X_TWO_NB_NH_ONE_BS_HS", "TWO_X_NL_X_NB_BS_NH_HS",
}  # fmt: skip
SINGLE = {"NL_X_NB_BS_HS", "NL_X_NB_BSV_BSS", "NL_X_NB_BS_NH_CS", "NL_X_NB_NH_BS_CS", "NL_X_NB_BS_NH_HS"}


def random_pages(first, count):
    """Cases of `crates/kvtier-device/examples/random_pages.rs`: what is where, and its blobs."""
    target = Path(os.environ.get("CARGO_TARGET_DIR") or REPOSITORY / "target")
    program = target / "debug" / "examples" / "random_pages"
    if not program.exists():
        raise FileNotFoundError(f"{program}: run `cargo build -p kvtier-device --example random_pages`")
    with subprocess.Popen([program, str(first), str(count)], stdout=subprocess.PIPE) as process:
        for line in iter(process.stdout.readline, b""):
            case = json.loads(line)
            blobs = [process.stdout.read(length) for length in case["blobs"]]
            m, o = case["memories"], case["objects"]
            case["before"], case["stored"] = blobs[:m], blobs[m : m + o]
            case["others"], case["after"] = blobs[m + o : m + 2 * o], blobs[m + 2 * o :]
            yield case
    assert process.returncode == 0


def tensor(memories, spec):
    """The view of a memory that an engine registered."""
    dtype, memory = getattr(torch, spec["dtype"]), memories[spec["memory"]]
    whole = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(spec["shape"], spec["stride"], spec["storage_offset"])


def engine_form(group, tensors):
    """A group's tensors as LMCache's copy takes them, and its name for that."""
    form, (slots, heads, size) = group["format"], (group["slots"], group["heads"], group["head_size"])
    if form.startswith("NB_NL"):
        (pool,) = tensors
        # TensorRT-LLM registers heads, slots and elements as one.
        return form, pool if pool.ndim == 6 else pool.unflatten(-1, (heads, slots, size))
    if form == "TWO_X_NL_X_NB_BS_NH_HS":
        blocks = [each.unflatten(0, (-1, slots)) for each in tensors]
        half = len(blocks) // 2
        return form, [[blocks[first + layer] for layer in group["layers"]] for first in (0, half)]
    layers = [tensors[layer] for layer in group["layers"]]
    if form == "NL_X_NB_BSV_BSS":
        layers = [layer.as_strided((layer.shape[0], slots, 132), (layer.stride(0), 132, 1)) for layer in layers]
    if form == "NL_X_TWO_NB_NH_ONE_BS_HS":
        # LMCache has the name, and no copy of its own for it on processors: the one head group is left out.
        return "NL_X_TWO_NB_NH_BS_HS", [layer.squeeze(3) for layer in layers]
    return form, layers


def as_in_pages(part, slots):
    """Rows of values and scale -> pages of all values, then all scales."""
    rows = part.unflatten(1, (-1, slots))
    return torch.cat([rows[..., :128].flatten(2), rows[..., 128:].flatten(2)], 2).reshape(part.shape)


def as_in_objects(part, slots):
    """The way back."""
    pages = part.reshape(part.shape[0], -1, slots * 132)
    values, scales = pages[..., : slots * 128], pages[..., slots * 128 :]
    return torch.cat([values.unflatten(2, (slots, 128)), scales.unflatten(2, (slots, 4))], 3).reshape(part.shape)


def by_lmcache(case, memories, objects, skip_tokens, direction):
    """Let LMCache move the bytes of a case, in place."""
    memories = [torch.frombuffer(memory, dtype=torch.uint8) for memory in memories]
    tensors = [tensor(memories, spec) for spec in case["tensors"]]
    at = 0
    for group in case["groups"]:
        form, (slots, heads, size) = group["format"], (group["slots"], group["heads"], group["head_size"])
        dtype = tensors[group["layers"][0] if len(tensors) > 1 else 0].dtype
        rows, layers = case["chunk_tokens"] // group["tokens_per_block"] * slots, len(group["layers"])
        shape = (layers, rows, heads * size) if form in SINGLE else (2, layers, rows, heads * size)
        end = at + torch.Size(shape).numel() * dtype.itemsize
        parts = [torch.tensor(list(o[at:end]), dtype=torch.uint8).view(dtype).reshape(shape) for o in objects]
        if form == "NL_X_NB_BSV_BSS":
            # Its copy for processors moves these pages as they lie; that for GPUs keeps each token's row together.
            parts = [as_in_pages(part, slots) for part in parts]
        name, pages = engine_form(group, tensors)
        desc = PageBufferShapeDesc()
        desc.kv_size, desc.nl, desc.bs, desc.nh, desc.hs = 1 if form in SINGLE else 2, layers, slots, heads, size
        desc.nb, desc.element_size = max(group["blocks"]) + 1, dtype.itemsize
        multi_layer_block_kv_transfer(
            pages, parts, group["blocks"], "cpu", direction, desc, rows, getattr(EngineKVFormat, name),
            skip_tokens // group["tokens_per_block"],
        )  # fmt: skip
        if form == "NL_X_NB_BSV_BSS":
            parts = [as_in_objects(part, slots) for part in parts]
        for whole, part in zip(objects, parts, strict=True):
            whole[at:end] = part.contiguous().view(torch.uint8).numpy().tobytes()
        at = end
    assert {len(o) for o in objects} == {at}


def test_random_pages_go_where_lmcache_puts_them():
    """Objects of stores are equal byte for byte, and so is all of the engine's memory behind retrieves."""
    seen = dict.fromkeys(EVERY_FORMAT, 0)
    for case in random_pages(0, CASES):
        run = partial(by_lmcache, case)
        objects = [bytearray(len(blob)) for blob in case["stored"]]
        run([bytearray(m) for m in case["before"]], objects, 0, TransferDirection.D2H)
        named = {name: case[name] for name in ("seed", "groups", "tensors", "skip_tokens")}
        assert objects == case["stored"], f"store of {named}"
        memories = [bytearray(memory) for memory in case["before"]]
        run(memories, [bytearray(o) for o in case["others"]], case["skip_tokens"], TransferDirection.H2D)
        assert memories == case["after"], f"retrieve of {named}"
        for group in case["groups"]:
            seen[group["format"]] += 1
    assert min(seen.values()) >= 10, seen
