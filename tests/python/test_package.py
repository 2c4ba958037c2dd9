"""The package as a whole: its imports, its stubs, CUDA descriptors."""

import ast
import gc
import glob
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import kvtier
import msgspec
import numpy as np
import pytest
import torch
import zmq
from conftest import CHUNK
from kvrig import layouts
from kvrig.waiting import wait_until
from kvtier import Client, KvTierError, LoadStoreOp, SchedulerAdapter, WorkerAdapter, tensors
from rig import BLOCK, tokens


# proves: docs/compare.md#kvtiers-connector-for-vllm
def test_import_needs_no_torch_vllm_lmcache():
    """The import loads no other package."""
    code = "import sys, kvtier, kvtier.doctor; print({'torch', 'vllm', 'lmcache', 'zmq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_two_processes_share_objects(place):
    """One process stores and ends; another retrieves the same bytes."""
    server = place.server()
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from rig import Engine, tokens\n"
        "engine = Engine(sys.argv[1], seed=77)\n"
        "assert engine.store('other', tokens(32, 'processes'), 0, 32, list(range(1, 9)))\n"
        "engine.close()\n"
    )
    subprocess.run([sys.executable, "-c", code, server.url, *_own_paths()], check=True, timeout=60)
    engine = place.engine(server, seed=77)
    expected, target = engine.read(list(range(1, 9))), list(range(21, 29))
    assert engine.lookup("mine", tokens(32, "processes")) == 32
    assert engine.retrieve("mine", tokens(32, "processes"), 0, 32, target) == set()
    assert engine.has(target, expected)


def _own_paths():
    here = Path(__file__).parent
    return [str(here), str(here.parent / "harness")]


def test_stubs_match_native_module():
    """_native.pyi has exactly the classes, methods, parameters and defaults of the module."""
    stub = ast.parse((Path(kvtier.__file__).parent / "_native.pyi").read_text())
    stubbed = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    native = kvtier._native
    assert set(stubbed) == {name for name, value in vars(native).items() if isinstance(value, type)}
    for name, node in stubbed.items():
        if name in ("KvTierError", "TimedOut", "Disconnected", "Refused"):
            continue
        real = getattr(native, name)
        members = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
        members |= {n.target.id: n for n in node.body if isinstance(n, ast.AnnAssign)}
        public = {each for each in vars(real) if not each.startswith("_")}
        assert public == {each for each in members if not each.startswith("_")}, name
        for member, function in members.items():
            if not isinstance(function, ast.FunctionDef) or any(ast.unparse(d) == "property" for d in function.decorator_list):
                continue
            if member == "__new__":
                is_same(function, inspect.signature(real), name)
            elif not member.startswith("_"):
                is_same(function, inspect.signature(getattr(real, member)), f"{name}.{member}")


def is_same(function, real, name):
    """Whether a stub has the parameters of the real function, in order, with their kinds and defaults."""
    arguments = [each for each in function.args.args if each.arg not in ("self", "cls")]
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + function.args.defaults
    stubbed = list(zip(arguments, defaults, strict=True))
    stubbed += list(zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True))
    found = [each for each in real.parameters.values() if each.name != "self"]
    assert [argument.arg for argument, _ in stubbed] == [each.name for each in found], name
    for (argument, default), each in zip(stubbed, found, strict=True):
        assert (argument in function.args.kwonlyargs) == (each.kind is each.KEYWORD_ONLY), (name, each)
        assert (default is None) == (each.default is each.empty), (name, each)
        # For a default that is no literal, PyO3 only shows that there is one.
        if default is not None and each.default is not ...:
            assert ast.literal_eval(default) == each.default, (name, each)


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_refused_registration_raises(place, mode):
    """The error has the server's text, in either mode."""
    server = place.server("lmcache_driven" if mode == "engine_driven" else "engine_shm")
    server.expect_trouble("registration refused")
    engine = place.engine(server, mode=mode, register=False)
    with pytest.raises(KvTierError, match="--supported-transfer-mode"):
        engine.worker.register_kv_caches({"layer.0": engine.tensors[0]}, kv_layout="HND")


class StandIn:
    """A server that records the first frames of each request and gives the answers that a CUDA worker needs."""

    def __init__(self):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.url = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def serve(self, operation):
        """Answers until a request of this number was answered; returns its payloads."""
        answers = {21: CHUNK, 22: True, 6: [b"", True], 32: []}
        while True:
            assert self.socket.poll(10_000)
            client, uid, number, *payloads = self.socket.recv_multipart()
            requested = msgspec.msgpack.decode(number)
            reply = [client, uid, number]
            if requested in answers:
                reply.append(msgspec.msgpack.encode(answers[requested]))
            self.socket.send_multipart(reply)
            if requested == operation:
                return payloads


class CudaTensor:
    """The used part of a CUDA tensor."""

    dtype, is_cuda, device = torch.bfloat16, True, SimpleNamespace(type="cuda")
    shape = (2, 8, 2, BLOCK, 8)

    def __init__(self, layer):
        self.layer = layer

    def stride(self):
        """Returns contiguous strides."""
        return (512, 64, 32, 8, 1)

    def storage_offset(self):
        """Returns the offset; layers follow each other."""
        return 1024 * self.layer

    def untyped_storage(self):
        """Returns the one storage of all layers."""
        return SimpleNamespace(
            data_ptr=lambda: 0x7000_0000,
            nbytes=lambda: 4096,
            _share_cuda_=lambda: (0, b"\x01c" + bytes(64), 4096, 512, b"/torch_1", 3, bytes(64), True),
        )


def test_cuda_descriptors_match_lmcache(monkeypatch):
    """LMCache's own reader understands kvtier's descriptor, and finds all fields."""
    from lmcache.v1.multiprocess.custom_types import get_customized_decoder
    from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1234"))
    stand_in, seen = StandIn(), []
    thread = threading.Thread(target=lambda: seen.append(stand_in.serve(1)))
    thread.start()
    worker = WorkerAdapter(stand_in.url, "m", block_tokens=BLOCK, heartbeat=600)
    worker.register_kv_caches({f"layer.{i}": CudaTensor(i) for i in range(2)}, kv_layout="HND")
    thread.join()
    assert worker.mode == "lmcache_driven" and worker.on_cuda
    wrappers = get_customized_decoder(list[DeviceIPCWrapper]).decode(seen[0][1])
    assert [wrapper.storage_offset for wrapper in wrappers] == [0, 1024]
    for wrapper in wrappers:
        assert tuple(wrapper.handle) == CudaTensor(0).untyped_storage()._share_cuda_()
        assert (tuple(wrapper.shape), tuple(wrapper.stride)) == (CudaTensor.shape, CudaTensor(0).stride())
        assert wrapper.device_uuid == "GPU-1234" and wrapper.dtype == torch.bfloat16
    # The event is sent unchanged.
    thread = threading.Thread(target=lambda: seen.append(stand_in.serve(6)))
    thread.start()
    event = SimpleNamespace(ipc_handle=lambda: bytes(range(64)))
    worker.submit_store_request("r", LoadStoreOp([1, 2, 3, 4], tokens(CHUNK), None, 0, CHUNK), event)
    thread.join()
    assert msgspec.msgpack.decode(seen[1][3]) == bytes(range(64))
    thread = threading.Thread(target=stand_in.serve, args=(2,))
    thread.start()
    worker.shutdown()
    thread.join()
    stand_in.context.destroy(linger=0)


def test_client_requests(place):
    """The request protocol without adapters."""
    server = place.server()
    client = Client(server.url.removeprefix("tcp://"), timeout=60)
    assert client.wait_healthy(60) and client.health == "healthy" and client.connections == 1
    assert client.noop().result() == "OK"
    future = client.get_chunk_size()
    wait_until(future.done, 60, "an answer")
    assert future.result(0) == future.result() == CHUNK
    assert client.ping().result() is True
    own = ["kvtier.held_blocks.1", "kvtier.chunk_tokens.1", "kvtier.objects.1"]
    assert client.get_experimental().result() == ["kv_event_stream", *own]
    client.report_block_allocation(1, "m", [("r", [1, 2], [3, 4])]).result()
    cancelled = client.noop()
    cancelled.cancel()
    assert cancelled.done()
    client.close()
    for failed in (cancelled, client.noop()):
        try:
            failed.result()
        except KvTierError:
            continue
        raise AssertionError("no error")


def test_segments_allocate_memory_at_once():
    """A full /dev/shm is an error when the segment is created, not a fault when it is used."""
    segment = tensors.Segment(1 << 20)
    path = f"/dev/shm{segment.name}"
    assert os.stat(path).st_blocks * 512 >= 1 << 20 and os.stat(path).st_mode & 0o777 == 0o600
    segment.unlink()
    segment.unlink()
    assert not os.path.exists(path)


# proves: docs/troubleshoot.md#an-engine-dies
def test_segment_removed_at_its_creation_is_created_again(monkeypatch):
    """Another process takes it for an orphan's before the system counts it as open."""
    create, removed = os.open, []

    def open_late(path, flags, *mode):
        file = create(path, flags, *mode)
        if flags & os.O_CREAT and not removed:
            removed.append(path)
            os.unlink(path)
        return file

    monkeypatch.setattr(os, "open", open_late)
    segment = tensors.Segment(1 << 20)
    assert removed and os.path.exists(f"/dev/shm{segment.name}")
    segment.unlink()


STAGES = """
import mmap, os, sys
from kvtier import tensors

def stop(*_):
    print("there", flush=True)
    sys.stdin.read()

module, call = {"created": (os, "posix_fallocate"), "allocated": (mmap, "mmap")}.get(sys.argv[1], (None, ""))
if module:
    setattr(module, call, stop)
segment = tensors.Segment(1 << 20)
stop()
"""


# proves: docs/troubleshoot.md#an-engine-dies
@pytest.mark.parametrize("stage", ["created", "allocated", "mapped"])
def test_server_removes_segments_of_killed_processes(place, stage):
    """Wherever a process is killed between creating a segment and registering it; not before."""
    place.server()
    process = subprocess.Popen([sys.executable, "-c", STAGES, stage], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "there\n"

        def segments():
            return glob.glob(f"/dev/shm/lmcache_kv_{process.pid}_*")

        # A round of the server leaves it.
        for _ in range(2):
            other = Path(f"/dev/shm/lmcache_kv_{os.getpid()}_0")
            other.touch(0o600)
            wait_until(lambda other=other: not other.exists(), 60, "a round")
        assert len(segments()) == 1
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not segments(), 60, "the removal")


@pytest.mark.parametrize("inference", [False, True])
def test_views_move_with_their_tensors(inference):
    """vLLM's layers with latent attention compute with views of the registered tensors."""
    with torch.inference_mode(inference):
        whole = torch.arange(4096, dtype=torch.int32)
        layers = [half.view(torch.float32).view(4, 1, 64, 8) for half in whole.view(2, 2048)]
        views = [layer.squeeze(1) for layer in layers]
    before = whole.clone()
    # Its object is freed, and its memory stays: the others are views of it.
    del whole
    storages = tensors.Storages(shared=True)
    offsets = [view["storage_offset"] for view in storages.views(layers)]
    assert offsets == [0, 2048] and len(storages.segments) == 1
    shared = torch.frombuffer(storages.segments[0].map, dtype=torch.int32)
    assert torch.equal(shared, before)
    shared[2048:] = 7
    with torch.inference_mode(inference):
        assert torch.equal(views[1].view(torch.int32), torch.full((4, 64, 8), 7, dtype=torch.int32))
        views[0].view(torch.int32).fill_(3)
    assert torch.equal(shared[:2048], torch.full((2048,), 3, dtype=torch.int32))
    storages.release()


def test_memory_with_unknown_users_is_refused():
    """An unknown user would continue with the old memory, and never see loaded KV."""
    layer = torch.zeros(4, 1, 64, 8)
    view, address = layer.squeeze(1), layer.data_ptr()
    gc.freeze()  # Hides them like objects unknown to Python.
    try:
        storages = tensors.Storages(shared=True)
        with pytest.raises(ValueError, match="^kv_caches: a layer's memory is also used by 2 others, .* use engine_driven$"):
            storages.views([layer])
    finally:
        gc.unfreeze()
    storages.release()
    assert layer.data_ptr() == view.data_ptr() == address


@pytest.mark.parametrize("exported", [lambda: torch.from_numpy(np.zeros(64, np.float32)), lambda: torch.zeros(64)])
def test_memory_exported_to_numpy_is_refused(exported):
    """Otherwise its array would refer to freed memory."""
    layer = exported()
    array, address = layer.numpy(), layer.data_ptr()
    storages = tensors.Storages(shared=True)
    with pytest.raises(ValueError, match="^kv_caches: a layer's memory is also used by another library, .* use engine_driven$"):
        storages.views([layer])
    storages.release()
    assert layer.data_ptr() == address == array.ctypes.data


def test_moved_memory_can_move_again():
    """For an engine that registers the tensors of an earlier one; lazy objects elsewhere are no users."""
    lazy = torch.nn.LazyLinear(4)
    layer = torch.arange(64)
    for _ in range(2):
        storages = tensors.Storages(shared=True)
        storages.views([layer])
        shared = torch.frombuffer(storages.segments[0].map, dtype=torch.int64)
        assert torch.equal(shared, torch.arange(64)) and shared.data_ptr() == layer.data_ptr()
        storages.release()
    assert lazy.has_uninitialized_params()


def test_scheduler_of_other_model_finds_nothing(place):
    """The model is part of the key."""
    server = place.server()
    engine = place.engine(server)
    prompt = tokens(CHUNK, "model")
    assert engine.store("a", prompt, 0, CHUNK, [1, 2, 3, 4])
    other = SchedulerAdapter(server.url, "other/model", block_tokens=BLOCK)
    other.maybe_submit_lookup_request("b", token_ids=prompt)
    wait_until(lambda: other.check_lookup_result("b") is not None, 60, "lookup")
    assert other.check_lookup_result("b") == 0
    other.shutdown()
