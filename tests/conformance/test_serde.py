"""Serdes in LMCache's form: fp8 and aesgcm. Each server reads what the other stored through one."""

from types import SimpleNamespace

import pytest
import torch
from kvrig import layouts, tiers
from kvrig.engine import Group
from kvrig.layouts import layout
from kvrig.server import Server, peer_command
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("it is the other side of these tests")

FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory):
    """A real LMCache server with a tier for each serde; each tier's keys by name."""
    base = tmp_path_factory.mktemp("lmcache")
    key = base / "master.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o400)
    serdes = {name: {"type": "fp8", "fp8_dtype": name} for name in FORMATS}
    serdes["aesgcm"] = {"type": "aesgcm", "master_key_path": str(key)}
    kinds = {name: {"path": base / name, "serde": serde} for name, serde in serdes.items()}
    flags = [flag for keys in kinds.values() for flag in tiers.adapter("fs", base_path=keys["path"], serde=keys["serde"])]
    server = Server(peer_command(), base / "lmcache.log", "both", flags=flags, peer=True)
    server.start(120)
    yield SimpleNamespace(server=server, kinds=kinds)
    server.stop()


def of(engine, path):
    """The files of an engine's model."""
    return [file for file in tiers.files(path) if engine.model.rsplit("/")[-1] in file.name]


def fill(engine, dtype, seed):
    """Values as KV has them, a few of them too large for e4m3."""
    generator = torch.Generator().manual_seed(seed)
    for tensor, _ in engine.worker.layers:
        values = torch.randn(tensor.shape, generator=generator) * 3
        tensor.copy_((values + (values > 12) * 1000).to(dtype))


def stored_and_loaded(writer, reader, dtype, path, seed, salt=""):
    """Blocks as they were stored, and as the other server loads them, as values."""
    prompt = tiers.tokens(64, seed)
    fill(writer, dtype, seed)
    writer.store_prompt(prompt, first=1, salt=salt)
    wait_until(lambda: len(of(writer, path)) >= 4, 60, f"4 files in {path}", interval=0.02)
    request, hit = reader.lookup(prompt, salt=salt)
    assert hit == 64
    blocks = reader.blocks_for(64, 20)
    assert reader.worker.retrieve(request, prompt, 0, 64, blocks, salt).ok
    reader.end(request)

    def values(engine, of_blocks):
        both = ((tensor, group.layout.block_axis) for tensor, group in engine.worker.layers)
        rows = [layouts.read_blocks(tensor, axis, of_blocks).flatten() for tensor, axis in both]
        return torch.cat(rows).view(dtype)

    return values(writer, writer.blocks_for(64, 1)), values(reader, blocks)


def pair(lmcache, serve, engines, writes, name, dtype):
    """The engine that stores and the one that loads."""
    keys = lmcache.kinds[name]
    ours = serve("both", flags=tiers.fs(keys["path"], serde=keys["serde"], trust_missing_layout=True))
    servers = [lmcache.server, ours] if writes == "lmcache" else [ours, lmcache.server]
    groups = [Group(layout("kv_first_nhd", heads=2, size=64, dtype=dtype))]
    return [engines(server, "lmcache_driven", groups=groups) for server in servers], ours


# proves: docs/compare.md#encryption-compression-fp8-rounding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("writes", ["lmcache", "ours"])
def test_fp8_is_exchanged(lmcache, serve, engines, writes, name, dtype):
    """Each value is the one that torch rounds it to, for either direction; files have half of the bytes."""
    (writer, reader), ours = pair(lmcache, serve, engines, writes, name, dtype)
    before, after = stored_and_loaded(writer, reader, dtype, lmcache.kinds[name]["path"], 1)
    rounded = before.to(FORMATS[name]).to(dtype)
    assert not torch.equal(before, after)
    assert torch.equal(rounded.view(torch.uint8), after.view(torch.uint8))
    serde = tiers.tier(ours)["serde"][0]
    assert serde["type"] == "fp8" and serde["fp8_dtype"] == name
    if writes == "lmcache":
        assert serde["loaded_objects"] == 4
        sizes = {file.stat().st_size for file in of(writer, lmcache.kinds[name]["path"])}
        assert sizes == {before.nbytes // 4 // 2}
    else:
        assert serde["ratio"] == 0.5


# proves: docs/compare.md#encryption-compression-fp8-rounding
@pytest.mark.parametrize("writes", ["lmcache", "ours"])
def test_aesgcm_is_exchanged(lmcache, serve, engines, writes):
    """A tenant's objects, with the tenant's key; another one finds nothing."""
    (writer, reader), _ = pair(lmcache, serve, engines, writes, "aesgcm", torch.bfloat16)
    path = lmcache.kinds["aesgcm"]["path"]
    before, after = stored_and_loaded(writer, reader, torch.bfloat16, path, 2, salt="alice")
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    assert all(before.view(torch.uint8)[:64].numpy().tobytes() not in file.read_bytes() for file in of(writer, path))
    assert tiers.recall(reader, 2) == 0


def test_values_that_fp8_does_not_know_stay_out_of_the_tier(serve, engines, tmp_path):
    """uint8 pages are served by L1, refused by the tier once in the log, and never rounded."""
    server = serve(flags=tiers.fs(tmp_path / "tier", serde={"type": "fp8"}))
    server.expect_trouble("fp8")
    engine = engines(server, groups=[Group(layout("kv_first_nhd", size=64, dtype=torch.uint8))])
    tiers.store(engine, 1)
    tiers.settled(server)
    assert tiers.files(tmp_path / "tier") == []
    assert tiers.tier(server)["serde"][0]["store_failures"] == 4
    assert tiers.recall(engine, 1) == 64
    tiers.forget(engine)
    assert tiers.recall(engine, 1) == 0
