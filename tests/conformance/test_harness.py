"""The tests' own tools notice what they exist to notice."""

import torch
from kvrig import bench, layouts, tiers
from kvrig.server import TROUBLE
from kvrig.waiting import TimedOut, wait_until

GOOD = """\
=== Request seq=7 ===
  [seq 7/cold] LOOKUP: 0/4 chunks hit (0.8 ms)
  [seq 7/cold] CHECKSUM: a074c50957115e3a (4 chunks)
  [seq 7/cold] STORE: stored (1024 tokens, 2.9 ms, 1 writers)
  [seq 7/warm] LOOKUP: 4/4 chunks hit (0.9 ms)
  [seq 7/warm] RETRIEVE: retrieved (1024 tokens, 0.9 ms, 2 workers)
  [seq 7/warm] CHECKSUM: a074c50957115e3a (4 chunks)
  [seq 7] CHECKSUM MATCH OK
"""


def problems(output, count=1):
    """What the bench report says about an output."""
    report = bench.Report(output, 0)
    for line in output.splitlines():
        bench.read_line(line, report.sequences)
    return report.problems(count, chunks=4, writers=1, readers=2)


def test_bench_report():
    """A good run has no problems; each way of going wrong is one."""
    assert problems(GOOD) == []
    assert problems(GOOD, count=2)
    for right, wrong in (
        ("MATCH OK", "MISMATCH!"),
        ("retrieved (", "retrieve_failed ("),
        ("retrieved (", "timeout ("),
        ("2 workers", "1 workers"),
        ("stored (", "store_failed ("),
        ("LOOKUP: 4/4", "LOOKUP: 3/4"),
        ("LOOKUP: 0/4", "LOOKUP: 4/4"),
        ("LOOKUP: 4/4 chunks hit (0.9 ms)", "LOOKUP timeout"),
        ("  [seq 7] CHECKSUM MATCH OK\n", ""),
    ):
        assert GOOD.replace(right, wrong) != GOOD
        assert problems(GOOD.replace(right, wrong)), f"{right} -> {wrong}"


def test_block_bytes():
    """One changed byte in any layer and block shows, in every layout."""
    generator = torch.Generator().manual_seed(1)
    for name in ("kv_first_nhd", "kv_first_hnd", "blocks_first_nhd", "fused_hnd", "fused_nhd", "mla"):
        layout = layouts.layout(name)
        for tensor in layouts.allocate(layout, 2, generator):
            before = layouts.read_blocks(tensor, layout.block_axis, [5, 3])
            layouts.fill_blocks(tensor, layout.block_axis, [4], 1)
            assert torch.equal(layouts.read_blocks(tensor, layout.block_axis, [5, 3]), before)
            block = tensor.view(torch.uint8).select(layout.block_axis, 3)
            block[(-1,) * block.dim()] ^= 1
            after = layouts.read_blocks(tensor, layout.block_axis, [5, 3])
            assert torch.equal(after[0], before[0])
            assert (after[1] != before[1]).sum() == 1
            layouts.fill_blocks(tensor, layout.block_axis, [5], 9)
            assert (layouts.read_blocks(tensor, layout.block_axis, [5]) == 9).all()


def test_painted_blocks(serve, engines):
    """One changed byte in any layer shows, as do blocks of another name or in another order."""
    worker = engines(serve(), register=False).worker
    blocks = [7, 3, 11]
    tiers.paint(worker, blocks, "a")
    assert tiers.is_painted(worker, blocks, "a") and tiers.is_painted(worker, blocks[:2], "a")
    assert not tiers.is_painted(worker, blocks, "b")
    assert not tiers.is_painted(worker, [3, 7, 11], "a")
    for tensor, group in worker.layers:
        last = tensor.view(torch.uint8).select(group.layout.block_axis, 11)
        last[(-1,) * last.dim()] ^= 1
        assert tiers.is_painted(worker, blocks[:2], "a") and not tiers.is_painted(worker, blocks, "a")
        last[(-1,) * last.dim()] ^= 1
    assert tiers.is_painted(worker, blocks, "a")


def test_temporary_names():
    """Files that are being written are distinguished from objects."""
    for name in (".kvtier-tmp-0a", ".kvtier-tmp-0a-1f", "m@0x1@0@ab.tmp"):
        assert tiers.TEMPORARY.fullmatch(name)
    assert not tiers.TEMPORARY.fullmatch("m@0x1@0@ab.data")


def test_log_lines():
    """Warnings, errors and panics are trouble; a word that contains one is not."""
    assert TROUBLE.search("2026-01-01T00:00:00Z  WARN kvtier: x")
    assert TROUBLE.search("ERROR x")
    assert TROUBLE.search("thread 'a' panicked at src/x.rs")
    assert not TROUBLE.search("INFO errors=0 warned=1 ERRORS")


def test_waiting_ends():
    """A condition that never holds fails by name."""
    try:
        wait_until(lambda: False, 0.05, "the thing")
    except TimedOut as late:
        assert "the thing" in str(late)
    else:
        raise AssertionError("did not time out")
