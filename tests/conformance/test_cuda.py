"""Workers on a GPU, over the fake CUDA driver: the server and the engine load it, each in its own process.

What store and retrieve do in every mode is tested beside the other modes, in test_store_retrieve.py, test_groups.py and
test_restart.py. Here is what only GPUs have. When a test ends, neither side may have used the driver wrongly.
"""

import contextlib
import subprocess

import pytest
import torch
from kvrig import tiers
from kvrig.engine import Group, tokens
from kvrig.layouts import layout
from kvrig.server import our_command
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("it needs a GPU, and not only its driver")

UUID = "5ca1ab1e-0000-4000-8000-000000000000"


def same(ours, theirs):
    """Whether two lists of block bytes are equal."""
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def store(engine, prompt, salt=""):
    """Store a prompt from the first blocks; their bytes."""
    engine.store_prompt(prompt, salt=salt)
    return engine.worker.read(engine.blocks_for(len(prompt)))


def load(engine, prompt, first=30, salt=""):
    """Find a prompt and retrieve it into other blocks; the bytes there."""
    target = engine.blocks_for(len(prompt), first)
    engine.worker.fill(target)
    request, hit = engine.lookup(prompt, salt=salt)
    assert hit == len(prompt)
    assert engine.worker.retrieve(request, prompt, 0, hit, target, salt).ok
    engine.end(request)
    return engine.worker.read(target)


def gpu_state(server):
    """What `/status` says of the one GPU."""
    (gpu,) = server.get("/status")[1]["devices"]["cuda"]["gpus"]
    return gpu


def wait_in_flight(server, count):
    """Wait until `count` stores are in flight on the GPU's thread."""
    in_flight = lambda: gpu_state(server)["state"]["transfers_under_way"]["store"] == count  # noqa: E731
    wait_until(in_flight, 60, f"{count} stores in flight")


HANDLES = {
    "torch 2.13": {"handle_version": 3},
    "torch 2.12": {"handle_version": 2},
    "64 bytes": {"handle_version": None},
    "one allocation": {"per_allocation": 99},
    "isolated": {"isolated": True},
}


# proves: docs/compare.md#lmcache_driven-on-cuda
@pytest.mark.parametrize("form", HANDLES)
def test_every_form_of_handles(serve, engines, form):
    """How PyTorch writes handles, several storages in one allocation, and `isolated_ipc`: memory is opened once per
    allocation, and closed when the worker unregisters; its PyTorch is notified."""
    server = serve("cuda")
    engine = engines(server, gpu=HANDLES[form])
    prompt = tokens(64)
    stored = store(engine, prompt)
    assert same(load(engine, prompt), stored)
    # Three storages by twos, or all in one; and the buffer of the isolated events.
    bases = {storage.base for storage in engine.worker.storages.values()}
    isolated = form == "isolated"
    assert gpu_state(server)["state"]["open_allocations"] == len(bases) + isolated
    assert len(bases) == (1 if form == "one allocation" else 2)
    counters = engine.worker.counters
    assert counters.values() == [1, 1, 1]
    engine.worker.adapter.transfer_ctx.unregister().result(10)
    # Descriptors of isolated IPC do not name the counter.
    assert counters.values() == ([1, 1, 1] if isolated else [0, 0, 0])
    assert gpu_state(server)["state"]["open_allocations"] == 0


@pytest.mark.parametrize("isolated", [False, True], ids=["event", "timeline"])
def test_the_engine_is_waited_for(serve, engines, isolated):
    """A store whose event is behind work that has not begun: it stores what that work wrote, and is not answered before."""
    server = serve("cuda")
    engine = engines(server, gpu={"isolated": isolated})
    worker, prompt = engine.worker, tokens(64)
    worker.gpu.script("hold kernel")
    for storage in worker.storages.values():
        worker.gpu.fill(storage.at, 0xAB, storage.mirror.nbytes())
    worker.submit_store("late", prompt, 0, 64, engine.blocks_for(64))
    wait_in_flight(server, 1)
    assert not worker.stores["late"].query()
    worker.gpu.script("release")
    assert worker.finish_store("late") is True
    assert all((layer == 0xAB).all() for layer in load(engine, prompt))


# proves: docs/gpu.md#when-something-goes-wrong
def test_an_event_that_never_completes(serve, engines):
    """Its transfer fails when the time is over, those of others go on meanwhile, and afterwards its own."""
    server = serve("cuda", flags=["--gpu-event-timeout-seconds", "10"])
    server.expect_trouble("event")
    stuck, other = engines(server), engines(server, seed=1)
    stuck.worker.gpu.script("hold kernel")
    stuck.worker.gpu.fill(next(iter(stuck.worker.storages.values())).at, 1, 16)
    stuck.worker.submit_store("stuck", tokens(32), 0, 32, stuck.blocks_for(32))
    wait_in_flight(server, 1)
    prompt = tokens(32)
    stored = store(other, prompt)
    assert same(load(other, prompt), stored)
    assert not stuck.worker.stores["stuck"].query(), "the other engine did not go on meanwhile"
    assert stuck.worker.finish_store("stuck") is False
    assert tiers.metric(server, "kvtier_gpu_event_timeouts_total", gpu="0") == 1
    assert gpu_state(server)["state"]["event_timeouts"] == 1
    stuck.worker.gpu.script("release")
    prompt = tokens(32)
    assert same(store(stuck, prompt), load(stuck, prompt))


def test_an_engine_that_dies_in_a_store(serve, engines):
    """If it is killed while the server waits for it, that store ends and its memory is released, long before it counts
    as silent. A second engine is not affected, and the server stops."""
    server = serve("cuda", flags=["--gpu-event-timeout-seconds", "60"])
    server.expect_trouble("a worker's process has ended|the pages are being closed")
    dying, other = engines(server), engines(server, seed=1)
    before = tokens(32)
    stored = store(dying, before)
    dying.worker.gpu.script("hold kernel")
    dying.worker.gpu.fill(next(iter(dying.worker.storages.values())).at, 1, 16)
    dying.worker.submit_store("last", tokens(32), 0, 32, dying.blocks_for(32))
    wait_in_flight(server, 1)
    dying.worker.crash()
    assert same(load(other, before), stored), "what it had stored is there for others"
    wait_in_flight(server, 0)
    open_allocations = lambda: gpu_state(server)["state"]["open_allocations"]  # noqa: E731
    wait_until(lambda: open_allocations() == 2, 60, "the dead engine's memory is closed")
    assert server.get("/status")[1]["devices"]["instances_of_known_processes"] == [other.worker.adapter.instance_id]
    prompt = tokens(32)
    assert same(store(other, prompt), load(other, prompt))
    # A worker that comes in its place.
    again = engines(server, seed=2)
    assert same(load(again, before), stored)


def begin_waiting_store(server, engine):
    """Begin a store that waits for its engine, which does not get on."""
    engine.worker.gpu.script("hold kernel")
    engine.worker.gpu.fill(next(iter(engine.worker.storages.values())).at, 1, 16)
    engine.worker.submit_store("waits", tokens(32), 0, 32, engine.blocks_for(32))
    wait_in_flight(server, 1)


def wait_until_pinned(server):
    """Which begins with the first worker, and goes on behind its registration."""
    pinning = lambda: server.get("/status")[1]["devices"]["cuda"]["pinning"]  # noqa: E731
    wait_until(lambda: pinning()["pinned_bytes"] == pinning()["total_bytes"], 60, "L1 to be pinned")


def assert_refused(engine):
    """That store was answered with "no"; the engine gets on again."""
    wait_until(engine.worker.stores["waits"].query, 60, "the answer")
    assert engine.worker.finish_store("waits") is False
    engine.worker.gpu.script("release")


def test_a_stop_ends_what_is_with_the_gpu_and_answers_the_rest(serve, engines):
    """A store that waits for its engine is answered with "no" at once, not by a connection that ends."""
    server = serve("cuda", flags=["--gpu-event-timeout-seconds", "60"])
    server.expect_trouble("being closed")
    engine = engines(server)
    begin_waiting_store(server, engine)
    status, seconds = server.stop()
    assert (status, seconds < 20) == (0, True), server.tail()
    assert_refused(engine)


# The first memory that is released is that of the GPU's trial.
# proves: docs/gpu.md#when-something-goes-wrong
# proves: docs/operate.md#restart-and-upgrade
@pytest.mark.parametrize("held", ["cuIpcOpenMemHandle_v2", "cuMemHostUnregister@2+"])
def test_a_stop_with_a_driver_that_does_not_answer_ends_in_time(serve, engines, held):
    """The thread that called it is abandoned, and the process ends by itself and without its pool, with exit code 1; or
    0 if the call only frees memory."""
    server = serve("cuda", env={"KVTIER_CUDA_FAKE": f"hold {held}"}, flags=["--stop-timeout-seconds", "2"])
    server.expect_trouble("stop-timeout-seconds|register|unpinning|pinned memory")
    with contextlib.suppress(ConnectionError):
        engines(server, mq_timeout=5)
    if held != "cuIpcOpenMemHandle_v2":
        assert gpu_state(server)["in_use"]
        wait_until_pinned(server)
    expected = 0 if held.startswith("cuMemHostUnregister") else 1
    status, seconds = server.stop()
    assert (status, 1.9 < seconds < 18) == (expected, True), server.tail()


def test_stop_answers_engines_not_waiting_for_the_driver(serve, engines):
    """A store that waits for its engine is answered although the registration of another worker never ends."""
    flags = ["--stop-timeout-seconds", "4", "--gpu-event-timeout-seconds", "60"]
    # The first engine's pages are in two allocations.
    server = serve("cuda", env={"KVTIER_CUDA_FAKE": "hold cuIpcOpenMemHandle_v2@3+"}, flags=flags)
    server.expect_trouble("stop-timeout-seconds|register|being closed")
    engine = engines(server)
    begin_waiting_store(server, engine)
    with contextlib.suppress(ConnectionError):
        engines(server, mq_timeout=2)
    assert server.stop()[0] == 1, server.tail()
    assert_refused(engine)


def test_tenants_on_a_gpu_are_apart(serve, engines):
    """The same tokens under two salts are two sets of bytes, and neither is found without its salt."""
    engine = engines(serve("cuda"))
    prompt = tokens(48)
    ours = store(engine, prompt, "ours")
    assert engine.hits(prompt) == 0
    assert engine.hits(prompt, "theirs") == 0
    engine.worker.fill(engine.blocks_for(48), 0x5A)
    theirs = store(engine, prompt, "theirs")
    assert same(load(engine, prompt, salt="ours"), ours)
    assert same(load(engine, prompt, salt="theirs"), theirs)


@pytest.mark.parametrize("name", ["fused_nhd", "fused_hnd"])
@pytest.mark.parametrize("executor", ["batch", "kernel", "staged", "plain"])
def test_every_executor(serve, engines, executor, name):
    """Whatever moves the bytes, contiguous pages and pages that are transposed; and it is said what did."""
    server = serve("cuda", flags=["--gpu-executor", executor])
    engine = engines(server, groups=[Group(layout(name))])
    prompt = tokens(64)
    rest = engine.worker.read(engine.blocks_for(40, 50))
    # Memory that is not pinned is copied by others.
    wait_until_pinned(server)
    stored = store(engine, prompt)
    assert same(load(engine, prompt), stored)
    assert same(engine.worker.read(engine.blocks_for(40, 50)), rest)
    moved = {(m["direction"], m["executor"]): m["bytes"] for m in gpu_state(server)["state"]["moved"]}
    whole = sum(layer.numel() for layer in stored)
    assert {k: v for k, v in moved.items() if v} == {("store", executor): whole, ("retrieve", executor): whole}


def test_answers_with_events(serve, engines):
    """`--gpu-reply event`, as LMCache's server does: the engine waits for the server's event, then has the bytes."""
    server = serve("cuda", flags=["--gpu-reply", "event"])
    engine = engines(server)
    prompt = tokens(64)
    stored = store(engine, prompt)
    engine.wait_hit(prompt, 64)
    assert same(load(engine, prompt), stored)
    assert engine.worker.events.imported == 2


def test_answers_without_events(serve, engines):
    """By default there is nothing left to wait for when a transfer is answered."""
    engine = engines(serve("cuda"))
    prompt = tokens(64)
    assert same(store(engine, prompt), load(engine, prompt))
    assert engine.worker.events.imported == 0


def test_two_engines_share_what_one_stored(serve, engines):
    """Two processes on one GPU: what one stores the other loads, and nothing of the first is touched."""
    server = serve("cuda")
    one, two = engines(server), engines(server, seed=1)
    prompt = tokens(64)
    stored = store(one, prompt)
    whole = one.worker.read(range(64))
    assert same(load(two, prompt), stored)
    assert same(one.worker.read(range(64)), whole)


class TestRefusals:
    """A registration that cannot be right is refused at once, with the reason, and the next one is served."""

    def check(self, serve, engines, change, *words):
        """Register with descriptors that `change` has changed; then without. The server."""
        server = serve("cuda")
        server.expect_trouble("registration refused")
        engine = engines(server, register=False)
        honest = engine.worker.wrap

        def wrap(tensor):
            wrapper = honest(tensor)
            change(wrapper)
            return wrapper

        engine.worker.wrap = wrap
        with pytest.raises(ValueError, match="error: "):
            engine.worker.register()
        said = lambda: [line for line in server.lines() if "registration refused" in line]  # noqa: E731
        (line,) = wait_until(said, 60, "a line about it in the log")
        for word in words:
            assert word in line, line
        assert gpu_state(server)["state"] is None or gpu_state(server)["state"]["open_allocations"] == 0
        engine.worker.wrap = honest
        engine.worker.register()
        prompt = tokens(32)
        assert same(store(engine, prompt), load(engine, prompt))
        return server

    def test_unknown_device(self, serve, engines):
        """A UUID of no GPU that the server sees: both are named."""

        def change(wrapper):
            wrapper.device_uuid = "01234567-89ab-cdef-0123-456789abcdef"

        self.check(serve, engines, change, "01234567-89ab", UUID)

    @pytest.mark.parametrize(
        "handle",
        [b"", bytes(63), b"\x03c" + bytes(63), b"\x03x" + bytes(64)],
        ids=["empty", "63 bytes", "truncated", "unknown kind"],
    )
    def test_handle_of_no_form(self, serve, engines, handle):
        """Truncated, or of an unknown kind."""

        def change(wrapper):
            wrapper.handle = (wrapper.handle[0], handle, *wrapper.handle[2:])

        self.check(serve, engines, change, "handle")

    def test_handle_that_no_driver_made(self, serve, engines):
        """64 bytes that no driver made. Only the driver can tell, so this is the one thing that the fake driver objects to: it
        shows that its objections are heard."""

        def change(wrapper):
            wrapper.handle = (wrapper.handle[0], b"\x03c" + bytes(64), *wrapper.handle[2:])

        server = self.check(serve, engines, change, "handle")
        assert any("cuda fake driver" in line for line in server.unexpected_trouble())
        server.expect_trouble("cuda fake driver: .*no such handle")

    def test_span_outside_the_allocation(self, serve, engines):
        """The client says that the storage is larger than what its handle maps."""

        def change(wrapper):
            wrapper.handle = (*wrapper.handle[:2], 1 << 40, *wrapper.handle[3:])
            wrapper.shape = (wrapper.shape[0], 1 << 20, *wrapper.shape[2:])

        self.check(serve, engines, change, "allocation")

    def test_hostile_ref_counter(self, serve, engines):
        """A name that leads elsewhere, and an index outside the file."""

        def change(wrapper):
            wrapper.handle = (*wrapper.handle[:4], b"/../../etc/passwd", *wrapper.handle[5:])

        self.check(serve, engines, change, "ref")


def test_status_and_metrics(serve, engines):
    """What is said of a GPU before, while and after it is used."""
    server = serve("cuda")
    gpu = gpu_state(server)
    assert (gpu["uuid"], gpu["name"], gpu["in_use"]) == (UUID, "kvtier fake GPU", False)
    engine = engines(server)
    prompt = tokens(64)
    stored = store(engine, prompt)
    load(engine, prompt)
    whole = sum(layer.numel() for layer in stored)
    state = gpu_state(server)["state"]
    assert (state["healthy"], state["open_allocations"]) == (True, 2)
    for direction in ("store", "retrieve"):
        assert sum(m["bytes"] for m in state["moved"] if m["direction"] == direction) == whole
        assert sum(state["runs"][direction]) > 0
        assert tiers.metric(server, "kvtier_gpu_transfers_under_way", gpu="0", direction=direction) == 0
    copied = tiers.metric(server, "kvtier_gpu_copied_bytes_total", gpu="0")
    assert copied == 2 * whole
    assert tiers.metric(server, "kvtier_gpu_healthy", gpu="0") == 1
    assert tiers.metric(server, "kvtier_gpu_open_allocations", gpu="0") == 2
    assert server.get("/healthcheck")[0] == 200
    pinned = lambda: tiers.metric(server, "kvtier_l1_pinned_bytes") == server.l1_gb * (1 << 30)  # noqa: E731
    wait_until(pinned, 60, "all of L1 is pinned")
    done = subprocess.run([our_command()[0], "status", server.http], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert "GPUs      1, CUDA 12.8, 64.00 MiB of 64.00 MiB of L1 pinned" in lines
    (line,) = [line for line in lines if line.startswith("  0: kvtier fake GPU, healthy, 2 allocations open, ")]
    assert line.count("(0 in flight)") == 2
    assert any(line.endswith("per token") and ", lmcache-driven on cuda, " in line for line in lines), done.stdout
