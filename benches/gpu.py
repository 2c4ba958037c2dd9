#!/usr/bin/env python3
"""Checks that only a GPU can show, with a torch engine and the server as two processes; then speed.

    benches/gpu.py [--out DIR] [--only NAME ...] [--l1-gb GIB] [--server-flag FLAG ...] [--fake-driver LIBRARY]

Each check runs in a process of its own, an engine with the kvtier package, against one server, and prints PASS, FAIL or
SKIP with the reason. The exit status is 0 when nothing failed. Everything is written to --out
(benches/runs/<date>/gpu). With --fake-driver the engines take their memory from the fake driver, by ctypes;
what needs PyTorch or a GPU is skipped.

Needed: numpy, PyTorch (not with --fake-driver), the kvtier package, the server ($KVTIER_BIN or target/release/kvtier) and,
for speed, the example `gpu` ($KVTIER_GPU_EXAMPLE or target/dist/examples/gpu). For a machine without a network and
without Rust, made before and carried along (some 30 MiB), in the repository's root:

    deploy/release/build --out .gpu && cargo build --profile dist -p kvtier-device --example gpu
    cp target/dist/examples/gpu .gpu/speed && strip .gpu/speed

(.gpu is to be ignored by git: a line in .git/info/exclude) and there, in the repository's root with .gpu (takes some 5 minutes):

    python3 -m pip install -q --no-index --no-deps --target /tmp/site .gpu/kvtier-*.whl
    PYTHONPATH=/tmp/site KVTIER_BIN=/tmp/site/bin/kvtier KVTIER_GPU_EXAMPLE=.gpu/speed PYTHONUNBUFFERED=1 \\
        python3 benches/gpu.py --out "$OUT"
"""

import argparse
import datetime
import gc
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "harness"), str(ROOT / "benches")]

CHUNK = 64
EVENT_TIMEOUT = 3
# Tokens of a prompt, and of its front that a retrieve skips.
PROMPT, SKIP = 3 * CHUNK, 32
# A check that takes longer hangs.
PATIENCE = 90


# -- the engine's side -------------------------------------------------------------------------


class Engine:
    """An engine's pages and adapters."""

    def __init__(self, pages, url, memory, instance=None):
        from kvtier import SchedulerAdapter, WorkerAdapter

        self.pages, self.memory, self.model = pages, memory, f"gpu/{random.getrandbits(60):x}"
        options = {"block_tokens": 16, "timeout": 60.0, "heartbeat": 0.5}
        self.scheduler = SchedulerAdapter(url, self.model, **options)
        self.worker = WorkerAdapter(url, self.model, mode="lmcache_driven", instance_id=instance, store_timeout=60.0, **options)
        try:
            self.worker.register_kv_caches(pages.tensors, kv_layout=pages.hint)
        except BaseException:
            self.close()
            raise

    def submit_store(self, name, prompt, blocks, event=None):
        """Begins a store."""
        from kvtier import LoadStoreOp

        op = LoadStoreOp(blocks, token_ids=prompt, start=0, end=len(prompt))
        self.worker.submit_store_request(name, op, event or self.memory.event())

    def stored(self, patience=40.0):
        """Waits for all stores. Whether none failed."""
        until = time.monotonic() + patience
        while self.worker._storing:
            self.worker.get_finished(())
            assert time.monotonic() < until, "a store does not end"
            time.sleep(0.001)
        counters = self.worker.take_counters()
        return counters.failed_stores == 0 and counters.stores > 0

    def store(self, prompt, blocks, event=None):
        """Stores. Whether it succeeded."""
        self.submit_store(f"store-{random.getrandbits(60)}", prompt, blocks, event)
        return self.stored()

    def lookup(self, prompt, patience=40.0):
        """Looks up; returns the name of the request and the tokens found."""
        name, until = f"retrieve-{random.getrandbits(60)}", time.monotonic() + patience
        self.scheduler.maybe_submit_lookup_request(name, token_ids=prompt)
        while (found := self.scheduler.check_lookup_result(name)) is None:
            assert time.monotonic() < until, "a lookup does not end"
            time.sleep(0.001)
        return name, found

    def finds(self, prompt):
        """Whether all tokens are found."""
        name, found = self.lookup(prompt)
        self.scheduler.cleanup_lookup_result(name)
        return found == len(prompt)

    def retrieve(self, prompt, blocks, skip=0, event=None, patience=40.0):
        """Looks up and retrieves. Whether all chunks were loaded."""
        from kvtier import LoadStoreOp

        (name, found), until = self.lookup(prompt, patience), time.monotonic() + patience
        assert found == len(prompt), f"{found} tokens found of {len(prompt)}"
        op = LoadStoreOp(blocks, token_ids=prompt, start=0, end=found, skip_first_n_tokens=skip)
        self.worker.submit_retrieve_request(name, op, event or self.memory.event())
        while name not in self.worker.get_finished(())[1]:
            assert time.monotonic() < until, "a retrieve does not end"
            time.sleep(0.001)
        self.scheduler.cleanup_lookup_result(name)
        return not self.worker.get_block_ids_with_load_errors()

    def round_trip(self, ids="random", skip=SKIP):
        """Stores blocks, overwrites everything, retrieves into others; every byte of the pages must be right."""
        stored, written = choose(ids)
        source, other, prompt = self.pages.noise(1), self.pages.noise(2), tokens()
        self.pages.write(source)
        assert self.store(prompt, stored), "the store failed"
        assert same(self.pages.read(), source), "a store changed pages"
        self.pages.write(other)
        assert self.retrieve(prompt, written, skip), "the retrieve failed"
        left_out = skip // 16
        expected = self.pages.moved(source, stored[left_out:], other, written[left_out:])
        assert same(self.pages.read(), expected), "wrong bytes in the pages"

    def close(self):
        """Unregisters."""
        self.worker.shutdown()
        self.scheduler.shutdown()


def tokens():
    """Returns a new prompt."""
    return [random.randrange(1 << 17) for _ in range(PROMPT)]


def choose(ids):
    """Returns blocks to store, and others to retrieve into. Block 0 is the null block."""
    from gpu_pages import BLOCKS

    count, blocks = PROMPT // 16, list(range(1, BLOCKS))
    if ids == "random":
        random.shuffle(blocks)
    return blocks[:count], blocks[count : 2 * count]


def same(one, other):
    """Whether all bytes are equal."""
    return all((a == b).all() for a, b in zip(one, other, strict=True))


class Place:
    """Context of a check: memory, and the server."""

    def __init__(self, arguments):
        import gpu_pages

        self.module = gpu_pages
        self.memory = (gpu_pages.Driver if arguments.fake_driver else gpu_pages.Torch)(arguments.fake_driver)
        self.url, self.http, self.fake_driver = arguments.url, arguments.http, arguments.fake_driver

    def pages(self, *arguments):
        """Returns pages in a layout."""
        return self.module.Pages(self.memory, *arguments)

    def engine(self, pages=None, instance=None):
        """Returns a registered engine."""
        return Engine(pages or self.pages(), self.url, self.memory, instance)

    def only_torch(self, why):
        """Skips the check without PyTorch."""
        if self.memory.name != "torch":
            raise self.module.NotHere(why)

    def status(self, name):
        """Returns the value of a name in /status, at any depth."""
        with urllib.request.urlopen(self.http + "/status", timeout=10) as answer:
            return find(json.load(answer), name)

    def open_allocations(self):
        """Returns the number of allocations that the server has open."""
        return sum((gpu["state"] or {}).get("open_allocations", 0) for gpu in self.status("gpus"))

    def soon(self, ask, what, patience=20.0):
        """Waits until the condition holds."""
        until = time.monotonic() + patience
        while not ask():
            assert time.monotonic() < until, what
            time.sleep(0.01)


def find(status, name):
    """Returns the value of a name at any depth."""
    if isinstance(status, dict):
        for key, value in status.items():
            if key == name:
                return value
            if (found := find(value, name)) is not None:
                return found
    return None


# -- the checks --------------------------------------------------------------------------------


def layout(name):
    """A store and a retrieve in a layout are right byte by byte, padding too."""

    def check(place):
        for dtype in place.module.SIZES:
            pages = place.pages(name, dtype)
            engine = place.engine(pages)
            for ids in ("random", "consecutive"):
                engine.round_trip(ids)
            engine.close()
            pages.free()

    return check


def ordering(place):
    """A store with an event reads nothing before the work in front of the event is done."""
    engine, (stored, written), prompt = place.engine(), choose("random"), tokens()
    noise = engine.pages.noise(3)
    engine.pages.write(engine.pages.noise(4))
    event = place.memory.behind_a_long_kernel(engine.pages.storages[0], noise[0], 1.0)
    engine.submit_store("behind", prompt, stored, event)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        engine.worker.get_finished(())
        assert engine.worker._storing or event.query(), "the store ended before the work in front of it"
    assert not event.query(), "the kernel was too short to show anything"
    place.memory.go_on()
    assert engine.stored(), "the store failed"
    other = engine.pages.noise(5)
    engine.pages.write(other)
    assert engine.retrieve(prompt, written), "the retrieve failed"
    assert same(engine.pages.read(), engine.pages.moved(noise, stored, other, written)), "what was stored is older"
    engine.close()


def stuck_event(place):
    """An event that does not complete in time fails its store and blocks no other transfer."""
    stuck, other = place.engine(), place.engine()
    event = place.memory.behind_a_long_kernel(stuck.pages.storages[0], stuck.pages.noise(6)[0], 3.0 * EVENT_TIMEOUT)
    began = time.monotonic()
    stuck.submit_store("stuck", tokens(), choose("random")[0], event)
    if place.fake_driver:
        # Its default streams and copies would wait, too: another process is asked.
        assert not stuck.stored(), "a store of pages that were never ready succeeded"
    else:
        blocks, prompt = choose("random")[0], tokens()
        # Recorded without waiting for the whole GPU.
        free = place.memory.event(place.memory.torch.cuda.Stream())
        assert other.store(prompt, blocks, free), "another engine's store failed"
        assert time.monotonic() - began < EVENT_TIMEOUT, "another engine's store waited for the stuck one"
        assert not stuck.stored(), "a store of pages that were never ready succeeded"
    assert time.monotonic() - began > 0.9 * EVENT_TIMEOUT, "the store did not wait for its event"
    place.memory.go_on()
    other.round_trip()
    for engine in (stuck, other):
        engine.close()


def handles(place):
    """Every form of a handle opens the same memory."""
    import kvtier.tensors

    describe = kvtier.tensors.cuda_storage

    def form(change):
        def described(tensor, storage):
            result = describe(tensor, storage)
            share = list(result["share"])
            share[1] = change(share[1])
            return result | {"share": tuple(share)}

        return described

    for change in (lambda h: b"\x02" + h[-65:], lambda h: b"\x03" + h[-65:], lambda h: h[-64:]):
        kvtier.tensors.cuda_storage = form(change)
        engine = place.engine()
        engine.round_trip()
        engine.close()


def refusals(place):
    """A handle that cannot be opened is refused with a reason, and leaves nothing open."""
    import kvtier.tensors
    from kvtier import KvTierError

    describe = kvtier.tensors.cuda_storage

    def with_share(at, change):
        def described(tensor, storage):
            result = describe(tensor, storage)
            share = list(result["share"])
            share[at] = change(share[at])
            return result | {"share": tuple(share)}

        return described

    strange = "00000000-1111-2222-3333-444444444444"
    cases = {
        "uuid": (lambda t, s: describe(t, s) | {"device_uuid": strange}, strange[:8]),
        "truncated": (with_share(1, lambda handle: handle[:40]), "handle"),
        "unknown form": (with_share(1, lambda handle: b"\x09x" + handle[-64:]), "handle"),
        "no such memory": (with_share(1, lambda handle: handle[:-64] + bytes(64)), ""),
        "too long": (with_share(2, lambda count: count << 20), ""),
    }
    for name, (described, text) in cases.items():
        kvtier.tensors.cuda_storage = described
        try:
            place.engine().close()
        except (KvTierError, ValueError) as error:
            assert text in str(error), f"{name}: {error} does not name {text}"
            print(f"  {name}: {error}")
        else:
            raise AssertionError(f"{name}: was accepted")
        kvtier.tensors.cuda_storage = describe
    assert place.open_allocations() == 0, "refused memory is open"
    place.engine().close()


def closing(place):
    """Layers of one allocation and two registrations of it are one opening, which ends with the last of them."""
    pages = place.pages()
    first, second = place.engine(pages), place.engine(pages)
    assert place.open_allocations() == 1, f"{place.open_allocations()} allocations are open of 1"
    first.round_trip()
    first.close()
    assert place.open_allocations() == 1, "the other registration's memory was closed"
    second.round_trip()
    second.close()
    place.soon(lambda: place.open_allocations() == 0, "the memory is still open")
    third = place.engine(pages)
    third.round_trip()
    third.close()
    pages.free()


def memory_returns(place):
    """Memory of an engine that unregistered goes back to the GPU."""
    place.only_torch("needs the memory of a GPU to be counted over all processes")
    place.engine().close()
    place.memory.collect()
    before, big = place.memory.used(), place.memory.allocate(1 << 30)
    tensors = {"big": big.tensor("bfloat16", (2048, 16, 1 << 14), (1 << 18, 1 << 14, 1), 0)}
    engine = place.engine(SimpleNamespace(tensors=tensors, hint="NHD"))
    assert place.memory.used() - before >= 1 << 30, "the memory does not show"
    engine.close()
    tensors.clear()
    big.free()
    del engine
    gc.collect()
    place.memory.collect()
    place.soon(lambda: place.memory.used() - before < 64 << 20, "the memory is not freed")


def ref_counter(place):
    """The server decrements the counters of opened memory; PyTorch keeps it until then, and frees it afterwards."""
    engine = place.engine()
    if place.memory.name != "torch":
        counters = [storage.counter for storage in engine.pages.storages]
        assert [counter() for counter in counters] == [1] * len(counters), "memory that is open was counted down"
        engine.close()
        place.soon(lambda: not any(counter() for counter in counters), "memory that is closed was not counted down")
        engine.pages.free()
        return
    torch = place.memory.torch
    engine.worker._registration._storages._kept.clear()
    before = torch.cuda.memory_allocated()
    engine.pages.free()
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before, "PyTorch freed memory that the server has open"
    engine.close()

    def freed():
        torch.cuda.ipc_collect()
        return torch.cuda.memory_allocated() < before

    place.soon(freed, "PyTorch keeps memory that no process has open")


# A large model: layers with pages of 8 KiB, and tokens of a prompt, whose KV has 128 MiB.
MODEL_LAYERS, MODEL_PAGE, MODEL_PROMPT = 64, (16, 2, 128), 4096
MODEL_BYTES = MODEL_LAYERS * MODEL_PROMPT // 16 * 2 * MODEL_PAGE[0] * MODEL_PAGE[1] * MODEL_PAGE[2]


def model_pages(torch):
    """Pages of a large model for two prompts and the null block."""
    blocks = 1 + 2 * MODEL_PROMPT // 16
    tensors = {
        f"layer.{n}": torch.zeros((blocks, *MODEL_PAGE), dtype=torch.bfloat16, device="cuda") for n in range(MODEL_LAYERS)
    }
    return SimpleNamespace(tensors=tensors, hint="NHD", blocks=blocks)


def whole_l1(place):
    """Fills L1 while it is being pinned, then retrieves everything: pinned or not, and across borders of pinned pieces."""
    place.only_torch("128 MiB a prompt, made and compared on a GPU")
    torch = place.memory.torch
    pages = model_pages(torch)
    engine = place.engine(pages)
    capacity, began = place.status("total_capacity_bytes"), time.monotonic()
    prompts = int(0.75 * capacity) // MODEL_BYTES
    ids = list(range(1, pages.blocks))
    random.shuffle(ids)
    stored, written = ids[: MODEL_PROMPT // 16], ids[MODEL_PROMPT // 16 :]

    def bytes_of(number, layer):
        """A prompt's KV in a layer, made again from a seed."""
        generator = torch.Generator(device="cuda").manual_seed(number * MODEL_LAYERS + layer)
        shape = (len(stored), *MODEL_PAGE)
        return torch.randint(-30000, 30000, shape, dtype=torch.int16, device="cuda", generator=generator).view(torch.bfloat16)

    def prompt(number):
        return [number, *range(1, MODEL_PROMPT)]

    def speed(seconds, count):
        return f"{count * MODEL_BYTES / seconds / 1e9:.1f} GB/s"

    moving, pinned_after = 0.0, None
    for number in range(prompts):
        for layer, tensor in enumerate(pages.tensors.values()):
            tensor[stored] = bytes_of(number, layer)
        event, start = place.memory.event(), time.monotonic()
        assert engine.store(prompt(number), stored, event), f"store {number} failed"
        moving += time.monotonic() - start
        pinning = place.status("pinning")
        if pinned_after is None and pinning["pinned_bytes"] == pinning["total_bytes"]:
            pinned_after = time.monotonic() - began
            print(f"  {capacity >> 30} GiB of L1 pinned {pinned_after:.1f} s after the registration; until then {speed(moving, number + 1)}")
    print(f"  {prompts} prompts of 128 MiB stored at {speed(moving, prompts)}")
    place.soon(lambda: place.status("pinning")["pinned_bytes"] == capacity, "L1 is not pinned", 120)
    if pinned_after is None:
        print(f"  {capacity >> 30} GiB of L1 pinned {time.monotonic() - began:.1f} s after the registration, after all stores")
    moving = 0.0
    for number in random.sample(range(prompts), prompts):
        start = time.monotonic()
        assert engine.retrieve(prompt(number), written), f"retrieve {number} failed"
        moving += time.monotonic() - start
        for layer, tensor in enumerate(pages.tensors.values()):
            same_bytes = torch.equal(tensor[written].view(torch.int16), bytes_of(number, layer).view(torch.int16))
            assert same_bytes, f"wrong bytes of prompt {number} in layer {layer}"
    print(f"  {prompts} prompts retrieved at {speed(moving, prompts)}, each byte as stored")
    engine.close()


def beside_a_model(place):
    """What transfers cost kernels of another process on the same GPU: prints medians alone and beside transfers."""
    place.only_torch("the fake driver has no kernels of a model")
    torch = place.memory.torch
    pages = model_pages(torch)
    engine = place.engine(pages)
    ids = random.sample(range(1, pages.blocks), MODEL_PROMPT // 16)
    prompt, numbers = [random.randrange(1 << 17) for _ in range(MODEL_PROMPT)], itertools.count()
    # Complete, and recorded without waiting for the model.
    free = place.memory.event(torch.cuda.Stream())

    def store():
        # All chunks behind another first token are others.
        prompt[0] = next(numbers)
        assert engine.store(prompt, ids, free), "a store failed"

    def retrieve():
        assert engine.retrieve(prompt, ids, event=free), "a retrieve failed"

    one, two = (torch.randn((8192, 8192), device="cuda").to(torch.bfloat16) for _ in range(2))
    big, other = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    small = torch.zeros(1024, device="cuda")
    kernels = {
        "matrix products": (lambda: torch.mm(one, two), 100),
        "copies of 1 GiB": (lambda: other.copy_(big), 100),
        "kernels of microseconds": (lambda: small.add_(1.0), 10000),
    }

    def microseconds(kernel, count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            kernel()
        end.record()
        while not end.query():
            time.sleep(0.001)
        return 1000 * begin.elapsed_time(end) / count

    def median(kernel, count):
        return sorted(microseconds(kernel, count) for _ in range(5))[2]

    for name, (kernel, count) in kernels.items():
        microseconds(kernel, count)
        alone = median(kernel, count)
        print(f"  {name}: {alone:.2f} us alone")
        for transfer in (store, retrieve):
            transfers, stop, failed = [], threading.Event(), []

            def go_on(transfer=transfer, transfers=transfers, stop=stop, failed=failed):
                try:
                    while not stop.is_set():
                        transfer()
                        transfers.append(time.monotonic())
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(target=go_on)
            thread.start()
            place.soon(lambda: transfers or failed, "no transfer ends beside a model")  # noqa: B023
            beside = median(kernel, count)
            stop.set()
            thread.join()
            assert not failed, failed[0]
            assert len(transfers) > 1, "no transfers beside a model"
            speed = MODEL_BYTES * (len(transfers) - 1) / (transfers[-1] - transfers[0]) / 1e9
            print(f"  {name}: {beside:.2f} us beside {transfer.__name__}s ({beside / alone:.3f} of alone), these at {speed:.1f} GB/s")
    engine.close()


def killed_engine(place):
    """An engine killed during a store affects only itself; its successor has its id."""
    bystander = place.engine()
    for event in ("stuck", "none"):
        # Its id is free after the reap timeout, or is taken over.
        number = random.getrandbits(60)
        victim = subprocess.Popen(
            [sys.executable, __file__, "--child", f"victim-{event}-{number}", "--url", place.url, "--http", place.http,
             *(["--fake-driver", place.fake_driver] if place.fake_driver else [])],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            heard = [line.strip() for line in iter(victim.stdout.readline, "submitted\n")]
            assert victim.poll() is None, f"the other engine ended: {heard}"
        finally:
            victim.kill()
            victim.wait()
            place.module.remove_counters(victim.pid)
        bystander.round_trip()
        successor = place.engine(instance=number)
        successor.round_trip()
        successor.close()
    bystander.close()
    place.soon(lambda: place.open_allocations() == 0, "the dead engine's memory is still open")


def victim(place, event, number):
    """Keeps stores in flight until it is killed."""
    engine = place.engine(instance=number)
    behind = None
    if event == "stuck":
        behind = place.memory.behind_a_long_kernel(engine.pages.storages[0], engine.pages.noise(7)[0], 60.0)
    for store in range(1 if behind else 50):
        engine.submit_store(f"last-{store}", tokens(), choose("random")[0], behind)
    time.sleep(0.2 if behind else 0)
    print("submitted", flush=True)
    time.sleep(PATIENCE)


def expandable(place):
    """Expandable segments of PyTorch are opened too."""
    place.only_torch("only PyTorch has such segments")
    share = place.memory.allocate(64 << 20).bytes.untyped_storage()._share_cuda_()
    assert share[1][1:2] == b"e", "this PyTorch did not make an expandable segment"
    for name in ("packed-nhd", "interleaved"):
        layout(name)(place)


def restart(place):
    """A server that was killed opens the memory of its workers again, and what they stored is right."""
    from kvrig.server import Server, our_command

    with tempfile.TemporaryDirectory() as directory:
        flags = ["--cuda-driver", place.fake_driver or "auto", "--state-dir", directory, "--l1-restore", "on"]
        server = Server(our_command(), Path(directory, "server.log"), "lmcache_driven", chunk=CHUNK, l1_gb=1, flags=flags)
        server.start()
        try:
            engine = Engine(place.pages(), server.url, place.memory)
            (stored, written), prompt = choose("random"), tokens()
            source, other = engine.pages.noise(8), engine.pages.noise(9)
            engine.pages.write(source)
            assert engine.store(prompt, stored), "the store failed"
            engine.pages.write(other)
            server.kill()
            print(f"  up again {server.start():.2f} s after kill -9")
            restored = find(server.get("/status")[1], "restored_workers")
            assert restored == 1, f"{restored} workers were restored"
            # Scheduler and worker use the cache again when they have noticed that the server is back.
            place.soon(lambda: engine.worker.is_healthy and engine.finds(prompt), "the prompt is not found")
            assert engine.retrieve(prompt, written), "the retrieve failed"
            assert same(engine.pages.read(), engine.pages.moved(source, stored, other, written)), "wrong bytes in the pages"
            engine.round_trip()
            engine.close()
        finally:
            server.kill()


CHECKS = {
    **{f"layout-{name}": layout(name) for name in (
        "packed-nhd", "packed-hnd", "kv-first-nhd", "kv-first-hnd", "blocks-first-nhd", "blocks-first-hnd", "mla",
        "cross-layer-nhd", "cross-layer-hnd", "padded", "interleaved")},
    "handles": handles, "refusals": refusals, "ordering": ordering, "stuck-event": stuck_event, "closing": closing,
    "memory-returns": memory_returns, "ref-counter": ref_counter, "killed-engine": killed_engine, "restart": restart,
    "expandable": expandable, "whole-l1": whole_l1, "beside-a-model": beside_a_model,
}  # fmt: skip


def child(arguments):
    """Runs one check in this process."""
    from gpu_pages import NotHere, remove_counters

    place = Place(arguments)
    if arguments.child.startswith("victim-"):
        _, event, number = arguments.child.split("-")
        return victim(place, event, int(number))
    try:
        CHECKS[arguments.child](place)
    except NotHere as why:
        print(f"SKIP {why}")
    else:
        print("PASS")
    sys.stdout.flush()
    remove_counters(os.getpid())
    # Remaining threads and pages must not keep the process alive.
    os._exit(0)


# -- all of them -------------------------------------------------------------------------------


def run_check(name, server, arguments):
    """Returns (PASS, FAIL or SKIP; reason; seconds; output)."""
    import gpu_pages

    command = [sys.executable, __file__, "--child", name, "--url", server.url, "--http", server.http]
    if arguments.fake_driver:
        command += ["--fake-driver", arguments.fake_driver]
    environment = dict(os.environ)
    if name == "expandable":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\nit hangs: more than {PATIENCE} s"
        gpu_pages.remove_counters(process.pid)
    seconds, lines = time.monotonic() - began, [line for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    if process.returncode == 0 and last == "PASS":
        return "PASS", "", seconds, output
    if process.returncode == 0 and last.startswith("SKIP "):
        return "SKIP", last[5:], seconds, output
    return "FAIL", last, seconds, output


def speed(arguments, out):
    """Measures with the example; returns (PASS, FAIL or SKIP; reason; output). Missed goals are reported and no failure."""
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    program = os.environ.get("KVTIER_GPU_EXAMPLE") or target / "dist" / "examples" / "gpu"
    if not os.access(program, os.X_OK):
        return "SKIP", f"no program at {program}: cargo build --profile dist -p kvtier-device --example gpu", ""
    command = [str(Path(program).resolve()), "--out", str(out / "speed.json")]
    if arguments.fake_driver:
        command += ["--driver", arguments.fake_driver, "--dry-run"]
    report = out / "speed.txt"
    with open(report, "w") as file:
        try:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=400).returncode
        except subprocess.TimeoutExpired:
            status = "a time of more than 400 s"
    text = report.read_text()
    if status:
        return "FAIL", f"it ended with {status}: {text.strip()[-300:]}", text
    return "PASS", "", text


def machine(arguments):
    """Returns a description of the machine."""
    facts = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(), "host": platform.platform(),
             "cpus": os.cpu_count(), "python": platform.python_version(), "fake_driver": bool(arguments.fake_driver)}  # fmt: skip
    if not arguments.fake_driver:
        import torch

        facts |= {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
        try:
            asked = ["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current",
                     "--format=csv,noheader"]  # fmt: skip
            facts["nvidia_smi"] = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            facts["nvidia_smi"] = str(error)
    return facts


def everything(arguments):
    """Runs all checks, then speed; returns the exit status."""
    from kvrig.server import Server, our_command

    # A signal that ends this program ends the server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    day = datetime.date.today().isoformat()
    out = Path(arguments.out or ROOT / "benches" / "runs" / day / "gpu")
    out.mkdir(parents=True, exist_ok=True)
    flags = ["--cuda-driver", arguments.fake_driver or "auto", "--gpu-event-timeout-seconds", str(EVENT_TIMEOUT),
             "--worker-reap-timeout-seconds", "30", *arguments.server_flag]  # fmt: skip
    server = Server(our_command(), out / "server.log", "lmcache_driven", chunk=CHUNK, l1_gb=arguments.l1_gb, flags=flags)
    results, log = [], []

    def tell(name, verdict, why="", seconds=0.0, output=""):
        print(f"{verdict} {name} ({seconds:.1f} s){': ' + why if why else ''}", flush=True)
        results.append({"check": name, "verdict": verdict, "why": why, "seconds": round(seconds, 1)})
        log.append(f"=== {name}: {verdict}\n{output}")
        for line in output.splitlines():
            if line.startswith("  "):
                print(line)

    server.start()
    try:
        for name in arguments.only or CHECKS:
            tell(name, *run_check(name, server, arguments))
            if server.process.poll() is not None:
                tell("server", "FAIL", f"it ended with {server.process.returncode}: server.log")
            if results[-1]["verdict"] == "FAIL":
                # Its remains must not fail other checks.
                server.kill()
                server.start()
        if server.process.poll() is None:
            (out / "status.json").write_text(json.dumps(server.get("/status")[1], indent=1) + "\n")
        healthy = server.process.poll() is None and server.get("/healthcheck")[0] == 200
        tell("server-is-healthy", "PASS" if healthy else "FAIL")
    finally:
        if server.running():
            status, seconds = server.stop()
            tell("server-stops", "PASS" if status == 0 else "FAIL", seconds=seconds)
    if not arguments.only:
        verdict, why, output = speed(arguments, out)
        tell("speed", verdict, why)
        print(output)
    counts = {verdict: sum(r["verdict"] == verdict for r in results) for verdict in ("PASS", "FAIL", "SKIP")}
    report = {"machine": machine(arguments), "server_flags": arguments.server_flag, "counts": counts, "checks": results}
    (out / "checks.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "checks.txt").write_text("\n".join(log))
    print(f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped; {out}")
    return 1 if counts["FAIL"] else 0


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--out", metavar="DIR", help="where results go [default: benches/runs/<date>/gpu]")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="NAME", help="only these checks, no speed")
    # Pinned in several pieces.
    parser.add_argument("--l1-gb", type=float, default=2, metavar="GIB", help="size of L1 [default: 2]")
    parser.add_argument("--server-flag", action="append", default=[], metavar="FLAG", help="of the server; may be repeated")
    parser.add_argument("--fake-driver", metavar="LIBRARY", help="the fake driver, instead of a GPU")
    for internal in ("--child", "--url", "--http"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    return everything(arguments)


if __name__ == "__main__":
    sys.exit(main())
