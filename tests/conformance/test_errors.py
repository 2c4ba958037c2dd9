"""Invalid requests are answered at once, with a text where the client can show it, and affect no other client."""

import time

import msgspec
import pytest
import torch
import zmq
from kvrig.engine import Group, tokens
from kvrig.layouts import NUM_BLOCKS, Layout, layout
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from lmcache.v1.platform.devices.cpu.shm import CpuShmTensorWrapper

SOON = 60.0  # seconds; a client without an answer waits 300


@pytest.fixture
def connect(serve):
    """LMCache's request client without an adapter around it; says hello as every worker does."""
    context, clients = zmq.Context(), []
    context.setsockopt(zmq.LINGER, 0)

    def make(server):
        clients.append(RequestClientFactory.create(server.url, context=context))
        # Tells the server which generation of clients this is, hence which answers it understands.
        assert clients[-1].get_chunk_size().result(SOON) == server.chunk
        assert isinstance(clients[-1].get_experimental().result(SOON), list)
        return clients[-1]

    yield make
    for client in clients:
        client.close()
    context.term()


def key(request="r", worker=0, prompt=None, end=32):
    """A worker's key for the first `end` tokens."""
    return IPCCacheServerKey(
        model_name="m", world_size=1, worker_id=worker, token_ids=tuple(prompt or range(64)), start=0, end=end,
        request_id=request, num_kv_readers=1,
    )  # fmt: skip


def test_unknown_instance_lmcache_driven(serve, connect):
    """Store and retrieve say false; the client frees its blocks and computes."""
    server = serve("lmcache_driven")
    server.expect_trouble(r"instance")
    client = connect(server)
    assert client.store(key(), 4711, [list(range(8))], b"").result(SOON) == (b"", False)
    assert client.retrieve(key(), 4711, [list(range(8))], b"", 0).result(SOON) == (b"", False)
    assert client.unregister_kv_cache(4711).result(SOON) is None
    assert client.noop().result(SOON) == "OK"


@pytest.mark.ours("it answers nothing: the client waits 300 s")
@pytest.mark.parametrize("mode", ["engine_shm", "engine_pickle"])
def test_unknown_instance_engine_driven(serve, connect, mode):
    """Prepare and commit are answered, with failure where the answer has a place for it."""
    server = serve(mode)
    server.expect_trouble(r"instance")
    client = connect(server)
    prepared = client.prepare_store(key(), 4711).result(SOON)
    assert not prepared.context.get("slots")
    assert client.commit_store(key(), 4711, b"").result(SOON) is False
    retrieved = client.prepare_retrieve(key(), 4711).result(SOON)
    assert retrieved.success is False
    assert isinstance(client.commit_retrieve(key(), 4711).result(SOON), bool)
    assert client.unregister_kv_cache_engine_driven_context(4711).result(SOON) is None
    assert client.noop().result(SOON) == "OK"


@pytest.mark.ours("it answers true and so hides that it does not know the worker")
def test_first_ping_of_an_unknown_instance_is_false(serve, connect):
    """Once false, so that the client registers again; then true; the scheduler's ping is always true."""
    client = connect(serve())
    assert client.ping(None).result(SOON) is True
    assert client.ping(4711).result(SOON) is False
    assert client.ping(4711).result(SOON) is True
    assert client.ping(4712).result(SOON) is False
    assert client.ping(None).result(SOON) is True


def refused(attempt, *words):
    """`attempt()` must fail soon, with our text in the exception, which names what is wrong."""
    began = time.monotonic()
    with pytest.raises(ValueError, match="error: ") as caught:
        attempt()
    assert time.monotonic() - began < SOON
    text = str(caught.value)
    assert "\n" not in text
    assert any(word in text.lower() for word in words), text
    return text


class TestRegistrationErrors:
    """A registration that cannot work raises in the engine with the reason, instead of timing out."""

    pytestmark = [pytest.mark.ours("it answers nothing: the client waits 300 s")]

    @pytest.fixture
    def server(self, serve):
        """A server that may complain in its log."""
        server = serve("both")
        server.expect_trouble(r"regist")
        return server

    @pytest.mark.parametrize(
        "layers, words",
        [
            ((0, 1, 99), ("layer",)),  # a layer that was not sent
            ((0, 1, 1), ("layer",)),  # a layer twice
        ],
    )
    def test_groups_that_do_not_fit(self, server, engines, layers, words):
        """The group description contradicts the tensors."""
        engine = engines(server, mode="lmcache_driven", register=False)
        info = EngineGroupInfo(engine_group_id=0, layer_indices=layers, tokens_per_block=4)
        refused(lambda: engine.worker.register([info]), *words)
        engine.worker.register()  # the honest description works afterwards, same instance
        engine.store_prompt(tokens(32))

    def test_one_group_of_two_geometries(self, server, engines):
        """Layers of different head counts cannot be one group."""
        two = [Group(layout("kv_first_nhd", heads=2)), Group(layout("kv_first_nhd", heads=4))]
        engine = engines(server, mode="lmcache_driven", groups=two, register=False)
        info = EngineGroupInfo(engine_group_id=0, layer_indices=tuple(range(6)), tokens_per_block=4)
        refused(lambda: engine.worker.register([info]), "group", "layer", "geometr")

    def test_chunk_is_not_whole_blocks(self, server, engines):
        """Blocks of 5 tokens do not divide a chunk of 16."""
        odd = Layout("odd", (2, NUM_BLOCKS, 5, 2, 8), 1, {"kv_layout": "NHD"})
        engine = engines(server, mode="lmcache_driven", groups=[Group(odd)], register=False)
        info = EngineGroupInfo(engine_group_id=0, layer_indices=(0, 1, 2), tokens_per_block=0)
        refused(lambda: engine.worker.register([info]), "chunk")

    @pytest.mark.parametrize(
        "name, words",
        [
            ("/lmcache_kv_0_nothing_here", ("segment", "shm", "shared", "lmcache_kv_0")),
            ("/../etc/passwd", ("shm_name", "name", "segment")),
            ("no_slash/x", ("shm_name", "name", "segment")),
        ],
    )
    def test_segment_that_is_not_there(self, server, connect, name, words):
        """A shared-memory name that does not exist, or is no name at all."""
        tensor = torch.zeros((2, 8, 4, 2, 8), dtype=torch.bfloat16)
        wrapper = CpuShmTensorWrapper(tensor, name)
        client = connect(server)
        refused(
            lambda: client.register_kv_cache(
                1, [wrapper], "m", 1, EngineType.VLLM, {"kv_layout": "NHD"}, []
            ).result(SOON),
            *words,
        )
        assert client.noop().result(SOON) == "OK"

    @pytest.mark.parametrize(
        "change, words",
        [
            ({"dtype_str": "nonsense"}, ("dtype",)),
            ({"num_physical_slots": 0}, ("slots",)),
            ({"num_layers": 0}, ("layers",)),
            ({"hidden_dim_size": 1 << 60}, ("hidden", "size", "large", "bytes")),
        ],
    )
    def test_engine_driven_geometry(self, server, connect, change, words):
        """Nonsense in the engine-driven registration."""
        good = dict(
            instance_id=7, model_name="m", world_size=1, block_size=4, num_layers=2, hidden_dim_size=16,
            dtype_str="bfloat16", use_mla=False, num_physical_slots=16,
        )  # fmt: skip
        client = connect(server)

        def register(**fields):
            payload = RegisterEngineDrivenContextPayload(**{**good, **fields})
            return client.register_kv_cache_engine_driven_context(payload).result(SOON)

        refused(lambda: register(**change), *words)
        assert register().pool_size > 0

    def test_mode_the_server_does_not_offer(self, serve, engines):
        """An engine-driven worker at a server of lmcache_driven only, and the other way round."""
        for offered, wanted in (("lmcache_driven", "engine_driven"), ("engine_shm", "lmcache_driven")):
            server = serve(offered)
            server.expect_trouble(r"regist|mode")
            engine = engines(server, mode=wanted, register=False)
            refused(engine.worker.register, "transfer", "mode", "supported")


def test_registering_twice_changes_nothing(serve, engines):
    """The client repeats a registration whose answer it may have missed."""
    engine = engines(serve())
    prompt = tokens(32)
    engine.store_prompt(prompt)
    engine.worker.register()
    engine.wait_hit(prompt, 32)


HOSTILE = [
    [b""],
    [b"\x00"],
    [b"\x00", b"\xc1"],
    [b"\x00", b"\x15", b"\x01"],  # a payload too many
    [b"\x00", b"\xcd\xff\xff"],  # unknown number
    [b"\x00", msgspec.msgpack.encode("no_such_operation")],
    [b"\x00", msgspec.msgpack.encode("x" * 100_000)],
    [b"\xff" * 300, b"\x16"],
    [b"\x00", b"", b"ack"],  # acknowledges a stream that does not exist
    [b"\x00", b"", b"cancel"],
    [b"\x00", b"\x08", b"\xdd\xff\xff\xff\xff", b"\x01"],  # an array of four thousand million elements
    [b"\x00", b"\x08", b"\x91" * 200_000 + b"\x00", b"\x01"],  # nested deeply
    [b"\x00", b"\x11", b"\x80", b"\x01", b"\x80\x04c__builtin__\neval\n."],
    [b"\x00", b"\x0d", b"\xdb\xff\xff\xff\xff" + b"x"],
    [b"\x00", b"\x15"] + [b""] * 1000,
]


# proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
@pytest.mark.ours("a message of one frame ends its I/O thread")
def test_hostile_messages_affect_no_other_client(serve, engines):
    """Frames no client would send, beside an engine that keeps working and memory that does not grow."""
    server = serve("both")
    server.expect_trouble(r".")
    engine = engines(server, mode="lmcache_driven")
    prompt = tokens(32)
    engine.store_prompt(prompt)
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 1000)
    before = resident_bytes(server)
    for message in HOSTILE:
        with context.socket(zmq.DEALER) as socket:
            socket.connect(server.url)
            socket.send_multipart(message)
            # The connection itself stays usable: a valid request behind the bad one is answered.
            socket.send_multipart([b"\x07", b"\x15"])
            assert answer_to(socket, b"\x07") == [b"\x07", b"\x15", msgspec.msgpack.encode(server.chunk)], message[:3]
    context.term()
    engine.wait_hit(prompt, 32)
    assert resident_bytes(server) - before < 64 << 20


# Number of payloads of every operation a vLLM connector may send.
PAYLOADS = {1: 7, 2: 1, 6: 4, 7: 5, 8: 2, 9: 1, 10: 2, 12: 2, 13: 1, 14: 1, 15: 1, 16: 2, 17: 3, 18: 2, 19: 2, 20: 1,
            22: 1, 23: 3}  # fmt: skip


# proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
# proves: docs/compare.md#hostile-peers
@pytest.mark.ours("what it cannot decode it does not answer")
@pytest.mark.parametrize("number", sorted(PAYLOADS))
def test_undecodable_payloads_are_answered(serve, number):
    """Whatever stands in the payloads, an answer comes: a failure in the operation's own form, or our text."""
    server = serve("both")
    server.expect_trouble(r".")
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    with context.socket(zmq.DEALER) as socket:
        socket.connect(server.url)
        for uid, payload in enumerate((b"\xc1", b"", b"\x91\xc0", b"\xa1x\x00")):
            socket.send_multipart([b"\x15", b"\x15"])
            assert answer_to(socket, b"\x15")[2:] == [msgspec.msgpack.encode(server.chunk)]
            socket.send_multipart([bytes([uid]), bytes([number])] + [payload] * PAYLOADS[number])
            reply = answer_to(socket, bytes([uid]))
            assert len(reply) in (2, 3), (payload, reply)
    context.term()


def answer_to(socket, uid):
    """The reply to one request, skipping others; fails after SOON seconds."""
    deadline = time.monotonic() + SOON
    while (left := deadline - time.monotonic()) > 0:
        if socket.poll(left * 1000):
            reply = socket.recv_multipart()
            if reply[0] == uid:
                return reply
    raise AssertionError(f"no reply to {uid!r} within {SOON} s")


def resident_bytes(server):
    """Anonymous memory of the server process (its shared and mapped pages are the cache itself)."""
    with open(f"/proc/{server.process.pid}/status") as status:
        for line in status:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")
