"""Engines of one LMCache release against the server, in every mode of its workers: a process per release.

    PYTHONPATH=WHEEL:tests/harness python -m kvrig.release FOLDER cpu|gpu

WHEEL is the unpacked wheel of the release; the servers' logs go to FOLDER. `gpu` needs a process that `torch_cuda` has made.
Ends with an error at the first thing that is not as it should be. Every byte is compared.
"""

import sys
import time
from functools import partial
from pathlib import Path

import lmcache
import torch

from . import layouts, older, probes
from .engine import Engine, Group, tokens
from .server import Server, client_mode, our_command
from .waiting import wait_until

# Warnings of the server that the conversation leads to.
EXPECTED = [
    r"client seems to use the chunk size of an earlier server",
    r"registration refused .* the chunk size of this server",
    *([r"reconnected; releases up to 0.4.4 do not register again"] if older.RELEASE < (0, 4, 6) else []),
    r"commit_store: some chunks were missing or had another shape",
]
HEARTBEAT = 0.4
CHUNK = 16
# Where prompts are loaded to; they are stored from block 1 on.
TARGET = 30


def same(ours, theirs):
    """Whether two lists of block bytes are equal."""
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def randomize(worker, blocks, group=None):
    """Overwrite blocks with random bytes, which are returned. Up to 0.5.4 registration of CPU tensors loses what they had."""
    rows = [torch.randint(0, 256, layer.shape, dtype=torch.uint8) for layer in worker.read(blocks, group)]
    worker.write(blocks, rows, group)
    return rows


def store(engine, chunks, salt=""):
    """Store a new prompt; it and its bytes."""
    prompt = tokens(chunks * CHUNK)
    stored = randomize(engine.worker, engine.blocks_for(len(prompt)))
    engine.store_prompt(prompt, salt=salt)
    engine.wait_hit(prompt, len(prompt), salt=salt)
    return prompt, stored


def load(engine, prompt, stored, skip=0, salt=""):
    """Find a prompt and retrieve it elsewhere on every rank; its bytes must be there, but for those skipped."""
    target = engine.blocks_for(len(prompt), TARGET)
    request, hit = engine.lookup(prompt, salt=salt)
    assert hit == len(prompt), f"{hit} of {len(prompt)} tokens"
    for worker in engine.workers:
        worker.fill(target, 0xEE)
        assert worker.retrieve(request, prompt, 0, hit, target, salt, skip).ok
        loaded, skipped = worker.read(target), skip // layouts.BLOCK_TOKENS
        assert same([rows[skipped:] for rows in loaded], [rows[skipped:] for rows in stored])
        assert all((rows[:skipped] == 0xEE).all() for rows in loaded)
    engine.end(request)


def check_refused(engine, prompt):
    """A retrieve that must be refused: its lookup has been freed. The engine learns that its blocks are not loaded, the
    server writes none of them, and the client is healthy again by itself."""
    target = engine.blocks_for(len(prompt), TARGET)
    engine.worker.fill(target, 0xEE)
    hit = len(prompt)

    def found():
        request, hits = engine.lookup(prompt)
        if hits == hit:
            return request
        engine.end(request)

    # A client that has missed a heartbeat finds nothing until the next one.
    request = wait_until(found, 60, "the whole prompt")
    engine.scheduler.free_lookup_locks(older.packed(prompt), 0, hit, request)
    # The worker has a connection of its own: what it sends may overtake the scheduler's, which is answered in order.
    assert engine.hits(tokens(CHUNK)) == 0
    lost = engine.worker.retrieve(request, prompt, 0, hit, target)
    assert lost.error_blocks == set(target), f"not noticed: {lost}"
    engine.end(request)
    assert all((rows == 0xEE).all() for rows in engine.worker.read(target))
    wait_until(lambda: engine.worker.adapter.is_healthy, 60, "healthy again")


def check_salts(engine):
    """A prompt stored with a salt is found with this salt only."""
    prompt, stored = store(engine, 2, salt="one")
    assert engine.hits(prompt) == engine.hits(prompt, "another") == 0
    load(engine, prompt, stored, salt="one")


def check_mla(connect):
    """Two ranks of an MLA model share an object, which is the one of the first rank."""
    engine = connect(groups=[Group(layouts.layout("mla"))], ranks=2, mla=True, model="test/mla")
    ids = {worker.adapter.instance_id for worker in engine.workers}
    assert len(ids) == 2
    randomize(engine.workers[1], engine.blocks_for(2 * CHUNK))
    load(engine, *store(engine, 2))
    engine.close()


def check_groups(connect):
    """Two layer groups with block ids of their own."""
    groups = [Group(layouts.layout(KV), 2, 0), Group(layouts.layout(KV, heads=4), 3, 1)]
    engine = connect(groups=groups, model="test/groups")
    worker, prompt, request = engine.worker, tokens(2 * CHUNK), engine.new_request()
    source, target = ([engine.blocks_for(len(prompt), first) for first in firsts] for firsts in ((1, 20), (40, TARGET)))
    stored = [randomize(worker, source[group], group) for group in (0, 1)]
    assert worker.store(request, prompt, 0, len(prompt), source) is True
    engine.end(request)
    engine.wait_hit(prompt, len(prompt))
    for group in (0, 1):
        worker.fill(target[group], 0xEE, group)
    request, hit = engine.lookup(prompt)
    assert hit == len(prompt)
    assert worker.retrieve(request, prompt, 0, hit, target).ok
    engine.end(request)
    assert all(same(worker.read(target[group], group), stored[group]) for group in (0, 1))
    engine.close()


def check_equal_ids(connect):
    """Two live workers with one instance id, as containers have them: each has its own pages, and ends alone."""
    first, second = connect(seed=1, process=0), connect(seed=2, process=0)
    assert first.worker.adapter.instance_id == second.worker.adapter.instance_id
    ours, theirs = store(first, 2), store(second, 2)
    for engine, other, prompt in ((first, second, theirs), (second, first, ours)):
        before = other.worker.read(range(layouts.NUM_BLOCKS))
        load(engine, *prompt)
        load(engine, *store(engine, 1))
        assert same(other.worker.read(range(layouts.NUM_BLOCKS)), before), "written to the pages of the other worker"
    first.close()
    load(second, *ours)
    load(second, *store(second, 2))
    third = connect(seed=3, process=0)
    load(third, *theirs)
    second.close()
    load(third, *store(third, 2))
    third.close()


def count_registrations(adapter):
    """A list that grows with each registration that the adapter begins by itself."""
    if not older.TRAITS.registers_again:
        return []
    began, send = [], adapter._send_register_kv_caches_request

    def counted(*args, **options):
        began.append(time.monotonic())
        return send(*args, **options)

    adapter._send_register_kv_caches_request = counted
    return began


def replace(engine, server, chunk=CHUNK):
    """The server is killed and comes back, maybe before the client notices. What is sent to it then has no effect."""
    server.kill()
    server.chunk = chunk
    server.start()
    if engine.worker.adapter.is_healthy:
        # Sent to a server that does not know the worker: nothing may break, whatever is answered.
        engine.worker.submit_store("lost", tokens(CHUNK), 0, CHUNK, engine.blocks_for(CHUNK))


def restart(engine, began, server, chunk=CHUNK):
    """After a restart of the server the worker registers again by itself, or tries to where its chunks do not fit. `began` is
    from `count_registrations`."""
    adapter = engine.worker.adapter
    before = len(began)
    replace(engine, server, chunk)

    def registered():
        adapter.get_finished(set())
        may_be_refused = chunk != CHUNK and engine.mode == "engine_driven"
        return len(began) > before and (adapter.is_healthy or may_be_refused)

    wait_until(registered, 60, "registered again")
    engine.worker.stores.pop("lost", None)
    # Schedulers up to 0.4.7 ping too, and notice.
    wait_until(lambda: engine.scheduler.is_healthy, 60, "the scheduler healthy")
    # A prompt of another length shows the new server in what the client counts.
    engine.hits(tokens(4 * CHUNK - 1))


def check_restarts(connect, engine, began, server, prompt):
    """Restarts, where workers register again."""
    restart(engine, began, server)
    assert engine.hits(prompt) == 0, "L1 does not survive a kill"
    load(engine, *store(engine, 2))
    # A chunk size that the client does not know: its hits never exceed what it asked for, and it reads nothing else.
    if older.TRAITS.negotiates:
        replace(engine, server, CHUNK // 2)
        wait_until(lambda: not engine.worker.adapter.is_healthy, 60, "the worker away")
        assert engine.hits(tokens(2 * CHUNK)) == 0
        engine.worker.stores.pop("lost", None)
        return
    restart(engine, began, server, CHUNK // 2)
    other = connect(seed=1) if server.mode == "lmcache_driven" else engine
    for length in (2, 3, 1, 5):
        prompt = tokens(length * CHUNK)
        other.worker.store(other.new_request(), prompt, 0, len(prompt), other.blocks_for(len(prompt)))
        assert engine.hits(prompt) <= len(prompt)
    if other is not engine:
        other.close()


def check_lost_registration(connect, engine, _, server, prompt):
    """A restart where workers never register again: all is a miss until the engine is started again, and nothing breaks."""
    replace(engine, server)
    worker, scheduler = engine.worker, engine.scheduler

    def answered():
        worker.adapter.get_finished(set())
        return not worker.adapter.store_futures

    def check_miss(prompt):
        def missed():
            # An unhealthy scheduler does not ask, and one that gets no answer is unhealthy afterwards.
            asked = scheduler.is_healthy
            assert engine.hits(prompt) == 0
            return asked and scheduler.is_healthy

        wait_until(answered, 60, "the store answered or dropped")
        wait_until(missed, 60, "a lookup answered")

    check_miss(prompt)
    for _ in range(2):
        lost = tokens(2 * CHUNK)
        worker.submit_store("lost", lost, 0, len(lost), engine.blocks_for(len(lost)))
        check_miss(lost)
    again = connect(seed=1)
    load(again, *store(again, 2))
    again.close()
    worker.stores.pop("lost", None)


def check_status(server):
    """Every worker's range of releases contains this one."""
    status = server.get("/status")[1]
    workers = [*status["cache_context_meta"].values(), *status["non_cuda_context_meta"].values()]
    assert workers
    for worker in workers:
        first, _, last = worker["client_releases"].partition(" to ")
        first, last = (older.numbers(release) for release in (first, last or first))
        assert first <= older.RELEASE <= last, worker


def run_steps(server, connect):
    """Everything, in one mode."""
    mode, traits = server.mode, older.TRAITS

    def step(name, check, *args):
        began = time.monotonic()
        check(*args)
        print(f"  {mode} {name}: {time.monotonic() - began:.1f} s", flush=True)

    engine = connect()
    began = count_registrations(engine.worker.adapter)
    prompt, stored = store(engine, 2)
    step("load", load, engine, prompt, stored)
    step("skip", load, engine, prompt, stored, 8)
    # What is there already is answered too, without a copy.
    step("store again", engine.store_prompt, prompt)
    step("refused", check_refused, engine, prompt)
    step("load after", load, engine, prompt, stored)
    if traits.salts:
        step("salts", check_salts, engine)
    step("mla", check_mla, connect)
    if traits.groups and client_mode(mode) == "lmcache_driven":
        step("groups", check_groups, connect)
    if traits.process_ids:
        step("equal ids", check_equal_ids, connect)
    step("probes", probes.check, engine, partial(store, engine))
    step("status", check_status, server)
    prompt, stored = store(engine, 2)
    restarts = check_restarts if traits.registers_again else check_lost_registration
    step("restart", restarts, connect, engine, began, server, prompt)


def conversation(folder, mode):
    """A server and its clients in one mode; both end cleanly."""
    # Only the client is to have the libraries of `torch_cuda`.
    alone = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": ""}
    server = Server(our_command(), folder / f"{mode}.log", mode, chunk=CHUNK, env=alone)
    server.start()
    opened = []

    def connect(**options):
        usual = {"groups": [Group(layouts.layout(KV))], "heartbeat": HEARTBEAT, "process": 1 + len(opened)}
        engine = ENGINE(server, client_mode(mode), **{**usual, **options})
        opened.append(engine)
        # Workers of 0.4.2 ping before they register.
        wait_until(lambda: all(worker.adapter.is_healthy for worker in engine.workers), 60, "healthy")
        return engine

    try:
        try:
            run_steps(server, connect)
        finally:
            for engine in reversed(opened):
                engine.close()
        ids = server.get("/status")[1]
        assert ids["registered_gpu_ids"] == ids["registered_non_cuda_instance_ids"] == []
        leftovers = server.shm_files()
    except BaseException:
        server.kill()
        raise
    status, _ = server.stop()
    assert status == 0, f"server: {status}\n{server.tail()}"
    assert not [path for path in leftovers if Path(path).exists()]
    for known in EXPECTED:
        server.expect_trouble(known)
    assert not server.unexpected_trouble(), "\n".join(server.unexpected_trouble())


def main():
    """All modes."""
    global ENGINE, KV
    folder, side = Path(sys.argv[1]), sys.argv[2]
    print("LMCache", lmcache.__file__)
    if side == "gpu":
        from .torch_gpu import TorchEngine

        ENGINE, KV, modes = TorchEngine, "kv_first_nhd", ["cuda"]
    else:
        # Up to 0.5.4 clients take every CPU tensor as heads-first.
        ENGINE, KV, modes = Engine, "kv_first_hnd", [mode for mode in older.TRAITS.modes if mode != "cuda"]
    for mode in modes:
        began = time.monotonic()
        conversation(folder, mode)
        print(f"{mode}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
