"""One engine of an earlier LMCache release against the server, in every mode: a process a release.

    PYTHONPATH=WHEEL:tests/harness python -m kvrig.release FOLDER

WHEEL is the unpacked wheel of the release; the servers' logs go to FOLDER. Ends with an error at the first thing that
is not as it should be. Every byte is compared.
"""

import sys
import time
from pathlib import Path

import lmcache
import torch

from . import layouts
from .engine import Engine, Group, tokens
from .gpu import GpuEngine
from .server import Server, client_mode, our_command
from .waiting import wait_until

MODES = ["lmcache_driven", "engine_shm", "engine_pickle", "cuda"]
HEARTBEAT = 0.4
CHUNK = 16


def same(ours, theirs):
    """Whether two lists of block bytes are equal."""
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def store(engine, chunks):
    """Store a new prompt; it and its bytes."""
    prompt = tokens(chunks * CHUNK)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, len(prompt))
    return prompt, engine.worker.read(engine.blocks_for(len(prompt)))


def load(engine, prompt, stored, skip=0):
    """Find a prompt and retrieve it elsewhere; its bytes must be there, but for those skipped."""
    target = engine.blocks_for(len(prompt), 30)
    engine.worker.fill(target, 0xEE)
    request, hit = engine.lookup(prompt)
    assert hit == len(prompt), f"{hit} of {len(prompt)} tokens"
    assert engine.worker.retrieve(request, prompt, 0, hit, target, skip=skip).ok
    engine.end(request)
    loaded, skipped = engine.worker.read(target), skip // layouts.BLOCK_TOKENS
    assert same([rows[skipped:] for rows in loaded], [rows[skipped:] for rows in stored])
    assert all((rows[:skipped] == 0xEE).all() for rows in loaded)


def refused(engine, prompt):
    """A retrieve that must be refused: its lookup has been freed. The engine learns that its blocks are not loaded, the
    server writes none of them, and the client is healthy again by itself."""
    target = engine.blocks_for(len(prompt), 30)
    engine.worker.fill(target, 0xEE)
    request, hit = engine.lookup(prompt)
    engine.scheduler.free_lookup_locks(prompt, 0, hit, request)
    lost = engine.worker.retrieve(request, prompt, 0, hit, target)
    assert lost.error_blocks == set(target), f"not noticed: {lost}"
    engine.end(request)
    assert all((rows == 0xEE).all() for rows in engine.worker.read(target))
    wait_until(lambda: engine.worker.adapter.is_healthy, 10 * HEARTBEAT + 3, "healthy again")


def restart(engine, server, chunk=CHUNK):
    """The server is killed and comes back before the client notices; the worker registers again by itself, or tries to
    where its chunks do not fit."""
    adapter = engine.worker.adapter
    before = adapter.transfer_ctx
    server.kill()
    server.chunk = chunk
    server.start()
    if adapter.is_healthy:
        # Sent to a server that does not know the worker: nothing may break, whatever is answered.
        engine.worker.submit_store("lost", tokens(CHUNK), 0, CHUNK, engine.blocks_for(CHUNK))

    def registered():
        adapter.get_finished(set())
        may_be_refused = chunk != CHUNK and engine.mode == "engine_driven"
        return adapter.transfer_ctx is not before and (adapter.is_healthy or may_be_refused)

    wait_until(registered, 12 * HEARTBEAT + 4, "registered again")
    engine.worker.stores.pop("lost", None)
    # A prompt of another length shows the new server in what the client counts.
    engine.hits(tokens(4 * CHUNK - 1))


def conversation(folder, mode):
    """Everything, in one mode."""
    server = Server(our_command(), folder / f"{mode}.log", mode, chunk=CHUNK)
    server.start()
    made = GpuEngine if mode == "cuda" else Engine
    # On CPU earlier releases take every tensor as heads-first.
    layout = layouts.layout("kv_first_nhd" if mode == "cuda" else "kv_first_hnd")
    engine = made(server, client_mode(mode), [Group(layout)], heartbeat=HEARTBEAT, mq_timeout=10)
    try:
        prompt, stored = store(engine, 2)
        load(engine, prompt, stored)
        load(engine, prompt, stored, skip=8)
        # What is there already is answered too, without a copy.
        engine.store_prompt(prompt)
        refused(engine, prompt)
        load(engine, prompt, stored)
        restart(engine, server)
        assert engine.hits(prompt) == 0, "L1 does not survive a kill"
        load(engine, *store(engine, 2))
        # A chunk size that the client does not know: its hits never exceed what it asked for, and it reads nothing else.
        restart(engine, server, CHUNK // 2)
        other = Engine(server, client_mode(mode), [Group(layout)], seed=1) if mode == "lmcache_driven" else engine
        for length in (2, 3, 1, 5):
            prompt = tokens(length * CHUNK)
            other.worker.store(other.new_request(), prompt, 0, len(prompt), other.blocks_for(len(prompt)))
            assert engine.hits(prompt) <= len(prompt)
        if other is not engine:
            other.close()
    finally:
        engine.close()
        status, _ = server.stop() if server.running() else ("dead", 0)
    assert status == 0, f"server: {status}\n{server.tail()}"
    assert not any("panicked" in line or "cuda fake driver:" in line for line in server.lines()), server.tail()


def main():
    """All modes."""
    folder = Path(sys.argv[1])
    print("LMCache", lmcache.__file__)
    for mode in MODES:
        began = time.monotonic()
        conversation(folder, mode)
        print(f"{mode}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
