"""libzmq, as the newest patch release of pyzmq 25, 26 and 27 has it, at both ends: DEALERs at our server, ROUTERs for our client.

Each pyzmq runs in a process of its own (`kvrig.pyzmq_peer`), where only its wheel is in the path.
"""

import pickle
import random
import re
import socket
import subprocess
import time
from contextlib import ExitStack
from itertools import count, cycle
from pathlib import Path

import msgspec
import pytest
import torch
from kvrig.engine import tokens
from kvrig.fragments import TO_CLIENT, TO_SERVER, FragmentingProxy
from kvrig.pyzmq_peer import DEADLINE, Peer, answers, number, requests
from kvrig.server import our_command
from kvrig.waiting import wait_until
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload

pytestmark = pytest.mark.ours("it is libzmq itself; these tests are of our own ZMTP")

RELEASES = ["25.1.2", "26.4.0", "27.3.0"]
IN_FLIGHT = 1000
CHUNK = 16
LOOKUP, QUERY, REGISTER, PREPARE_STORE, COMMIT_STORE, PREPARE_RETRIEVE = 8, 9, 14, 16, 17, 18
FALSE = b"\xc2"
GREETING = (b"\xff" + bytes(7) + b"\x01\x7f\x03\x01NULL").ljust(64, b"\0")
PING, PONG = b"\x04PING", b"\x04PONG"
LAST_PING = 7  # bytes of a PING without a context behind its frame's head

encode = msgspec.msgpack.encode
per_release = pytest.mark.parametrize("release", RELEASES)


@pytest.fixture
def peers(tmp_path):
    """Starts the process of a release: peers(release)."""
    started = []

    def start(release):
        started.append(Peer(release, tmp_path / f"pyzmq-{len(started)}.log"))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


@pytest.fixture
def proxies():
    """Starts a proxy: proxies(port, ...)."""
    started = []

    def start(port, **options):
        started.append(FragmentingProxy(port, **options))
        return started[-1]

    yield start
    for proxy in started:
        proxy.close()


@pytest.fixture
def server(serve):
    """A server with little memory."""
    return start(serve)


def start(serve, *flags):
    """Starts a server with little memory and these flags."""
    return serve("engine_pickle", chunk=CHUNK, l1_gb=0.125, flags=["--no-l1-prefault", *flags])


def connections(server):
    """Number of connections that the server has."""
    return server.get("/status")[1]["request_port"]["connections"]


def request(operation, *payloads, uid=60_000):
    """A request as LMCache encodes it."""
    return [number(uid), encode(operation), *(encode(payload) for payload in payloads)]


def key(prompt, worker=0, name="large"):
    """The key of a whole prompt; `worker=None` is the scheduler's."""
    return IPCCacheServerKey(
        model_name="m", world_size=1, worker_id=worker, token_ids=tuple(prompt), start=0, end=len(prompt),
        request_id=name, num_kv_readers=1,
    )  # fmt: skip


def one_byte():
    """Size of each write."""
    return 1


def sizes(seed):
    """Random sizes of writes, small ones as often as large ones."""
    generator = random.Random(seed)
    return lambda: int(2 ** generator.uniform(0, 12))


# proves: docs/clients.md#after-a-reconnect
@per_release
def test_requests_in_flight_answered_in_order(server, peers, release):
    """1000 requests wait at a server that stands still; then each is answered, in the order in which they were sent."""
    peer = peers(release)
    peer.call("open", "a", server.url)
    peer.ask("a", 0, 2, CHUNK)
    with server.frozen():
        peer.call("send", "a", requests(2, IN_FLIGHT))
    peer.expect("a", 2, IN_FLIGHT, CHUNK)


@per_release
def test_random_fragments_both_directions_answered(server, peers, proxies, release):
    """Frames are cut anywhere, large ones too."""
    peer, proxy = peers(release), proxies(server.port, size=sizes(release))
    peer.call("open", "a", proxy.url)
    peer.ask("a", 0, IN_FLIGHT, CHUNK)
    lookup = request(LOOKUP, key(tokens(20_000), worker=None), 1)
    assert peer.call("exchange", "a", lookup) == lookup[:2]
    [link] = proxy.links
    assert link.ended is None
    assert all(link.writes[way] > len(link.bytes[way]) / 4096 for way in link.writes), "not cut"


@per_release
def test_single_bytes_both_directions_answered(server, peers, proxies, release):
    """Each byte is written and read alone, from the first of the greeting on."""
    peer, proxy = peers(release), proxies(server.port, size=one_byte, is_paced=True)
    peer.call("open", "a", proxy.url)
    peer.ask("a", 0, 20, CHUNK)
    lookup = request(LOOKUP, key(tokens(100), worker=None), 1)
    assert peer.call("exchange", "a", lookup) == lookup[:2]
    [link] = proxy.links
    assert link.ended is None
    assert all(link.writes[way] == len(link.bytes[way]) > 150 for way in link.writes)


@per_release
@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
def test_reset_at_each_byte_client_reconnects(server, peers, proxies, direction, release):
    """Resets within greeting, READY, first request and its reply end one connection each; another one is served meanwhile,
    and the client's next request is answered."""
    peer, proxy = peers(release), proxies(server.port)
    peer.call("open", "other", server.url)
    uids = count(step=2)
    peer.call("open", "whole", proxy.url)
    peer.ask("whole", next(uids), 1, CHUNK)
    session = len(proxy.links[0].bytes[direction])
    handshake = proxy.links[0].bytes[direction].index(b"READY")
    peer.call("close", "whole")
    proxy.reset_each(direction, range(session + 1))
    peer.call("open", "a", proxy.url, reconnect_ivl=1)
    for reached in range(session + 1):
        if reached > handshake:
            peer.call("send", "a", requests(next(uids), 1))
        wait_until(lambda: proxy.resets > reached, DEADLINE, f"the reset after {reached} bytes", interval=0.001)
        peer.ask("other", next(uids), 1, CHUNK)
    assert "DISCONNECTED" not in peer.call("events", "other")
    last = next(uids)
    peer.call("send", "a", requests(last, 1))
    while (reply := peer.call("receive", "a", 1)) != answers(last, 1, CHUNK):
        # A reply may have arrived whole before its connection ended.
        assert int.from_bytes(reply[0][0][1:], "big") < last, reply
    assert {len(link.bytes[direction]) for link in proxy.links if link.ended == "proxy"} == set(range(session + 1))
    peer.call("close", "a", "other")
    wait_until(lambda: connections(server) == 0, DEADLINE, "no connection is left")


@per_release
def test_equal_identities_answered_by_connection(server, peers, release):
    """Each of six connections, three with one identity, receives its own replies and no other's."""
    peer = peers(release)
    for name in "abc":
        peer.call("open", name, server.url, identity=b"same")
    for name in "def":
        peer.call("open", name, server.url)
    for name in "abcdef":
        peer.ask(name, 0, 2, CHUNK)
    assert connections(server) == 6
    with server.frozen():
        for part in range(5):
            for at, name in enumerate("abcdef"):
                peer.call("send", name, requests(1000 * at + 100 * part, 100))
    for at, name in enumerate("abcdef"):
        peer.expect(name, 1000 * at, 500, CHUNK)


@per_release
def test_reconnect_same_identity_answered(server, peers, proxies, release):
    """A client comes back with its identity while the server still has the connection before it."""
    peer, proxy = peers(release), proxies(server.port, keeps_servers=True)
    for turn in range(3):
        peer.call("open", "a", proxy.url, identity=b"same")
        peer.ask("a", 10 * turn, 10, CHUNK)
        assert connections(server) == turn + 1
        peer.call("close", "a")
        wait_until(lambda: proxy.links[-1].ended == "client", DEADLINE, "the client to end")


@per_release
def test_client_before_server_is_answered(server, peers, release):
    """The client connects and asks where nothing listens yet."""
    server.kill()
    peer = peers(release)
    peer.call("open", "a", server.url)
    peer.call("send", "a", requests(0, 10))
    peer.call("wait_event", "a", "CONNECT_RETRIED")
    server.start()
    peer.expect("a", 0, 10, CHUNK)


def test_stopped_clients_receive_all_replies(server, peers):
    """1000 replies wait for each client that stands still for two seconds; another one is answered meanwhile."""
    *stopped, other = (peers(release) for release in [*RELEASES, RELEASES[-1]])
    for peer in (*stopped, other):
        peer.call("open", "a", server.url)
        peer.ask("a", 0, 2, CHUNK)
    with server.frozen():
        for peer in stopped:
            peer.call("send", "a", requests(2, IN_FLIGHT))
    with ExitStack() as all_stopped:
        for peer in stopped:
            all_stopped.enter_context(peer.stopped())
        # Numbers have 16 bits, which a quick server uses up.
        uids, until = cycle(range(2, 60_002, 10)), time.monotonic() + 2
        while time.monotonic() < until:
            other.ask("a", next(uids), 10, CHUNK)
    for peer in stopped:
        peer.expect("a", 2, IN_FLIGHT, CHUNK)
        peer.ask("a", 2000, 10, CHUNK)
        assert "DISCONNECTED" not in peer.call("events", "a")


@per_release
def test_client_heartbeats_are_answered(server, peers, proxies, release):
    """A client that asks for PONGs stays connected while it is idle."""
    peer, proxy = peers(release), proxies(server.port)
    peer.call("open", "a", proxy.url, heartbeat_ivl=50, heartbeat_timeout=20_000, heartbeat_ttl=20_000)
    peer.ask("a", 0, 2, CHUNK)
    [link] = proxy.links
    wait_until(lambda: link.bytes[TO_CLIENT].count(PONG) >= 12, DEADLINE, "12 PONGs")
    assert "DISCONNECTED" not in peer.call("events", "a")
    peer.ask("a", 2, 10, CHUNK)
    assert link.ended is None


@per_release
def test_heartbeat_unanswered_client_reconnects(server, peers, release):
    """The client ends the connection to a server that stands still, and is answered once that goes on."""
    peer = peers(release)
    peer.call("open", "a", server.url, heartbeat_ivl=50, heartbeat_timeout=2000)
    peer.ask("a", 0, 2, CHUNK)
    with server.frozen():
        peer.call("wait_event", "a", "DISCONNECTED")
    peer.call("wait_event", "a", "HANDSHAKE_SUCCEEDED")
    peer.ask("a", 2, 10, CHUNK)
    wait_until(lambda: connections(server) == 1, DEADLINE, "the earlier connections to end")


@per_release
def test_silence_beyond_ttl_ends_connection(server, peers, proxies, release):
    """The server ends the connection of a stopped client by the TTL of its PINGs; the client connects again later."""
    peer, proxy = peers(release), proxies(server.port)
    peer.call("open", "a", proxy.url, heartbeat_ivl=50, heartbeat_ttl=2000)
    peer.ask("a", 0, 2, CHUNK)
    [link] = proxy.links
    wait_until(lambda: PONG in link.bytes[TO_CLIENT], DEADLINE, "a PONG")
    # The TTL holds while a PING is the last that came, and not some PONG of the client's.
    has_ttl = lambda: PING in link.bytes[TO_SERVER][-LAST_PING:]  # noqa: E731
    while not link.ended:
        with peer.stopped():
            wait_until(lambda: link.ended or not has_ttl(), DEADLINE, "the end of the connection")
    assert link.ended == "server"
    peer.call("wait_event", "a", "DISCONNECTED")
    peer.ask("a", 2, 10, CHUNK)


@per_release
def test_large_frames_arrive_both_ways(server, peers, release):
    """A lookup of 100,000 tokens, and a pickled chunk of 16 MiB to the server and back."""
    peer = peers(release)
    peer.call("open", "a", server.url)
    peer.ask("a", 0, 2, CHUNK)

    def call(operation, *payloads):
        reply = peer.call("exchange", "a", request(operation, *payloads))
        return msgspec.msgpack.decode(reply[2]) if len(reply) > 2 else None

    lookup = key(tokens(100_000), worker=None, name="long")
    assert len(encode(lookup)) > 200_000
    assert call(LOOKUP, lookup, 1) is None
    assert wait_until(lambda: [call(QUERY, "long")] != [None], DEADLINE, "the lookup's result")

    layers, hidden, prompt = 32, 8192, tokens(CHUNK)
    call(REGISTER, RegisterEngineDrivenContextPayload(7, "m", 1, CHUNK, layers, hidden, "bfloat16", False, CHUNK))
    assert call(PREPARE_STORE, key(prompt), 7) == {"context": {}}
    chunk = torch.randint(0, 256, (2, layers, CHUNK, 2 * hidden), dtype=torch.uint8).view(torch.bfloat16)
    assert chunk.nbytes == 16 << 20
    assert call(COMMIT_STORE, key(prompt), 7, pickle.dumps([chunk])) is True
    assert call(LOOKUP, key(prompt, worker=None), 1) is None
    found = []
    wait_until(lambda: found.append(call(QUERY, "large")) or found[-1] is not None, DEADLINE, "the lookup's result")
    assert found[-1] == 1
    retrieved = call(PREPARE_RETRIEVE, key(prompt), 7)
    assert retrieved["success"] is True
    [loaded] = pickle.loads(retrieved["data"])
    assert torch.equal(loaded.view(torch.uint8), chunk.view(torch.uint8))
    assert "DISCONNECTED" not in peer.call("events", "a")


@per_release
def test_frame_above_limit_ends_its_sender(serve, peers, release):
    """A frame of --max-message-gb is taken, one byte more ends the connection; neighbours keep theirs, the sender returns."""
    limit = 1 << 20
    server = start(serve, "--max-message-gb", str(limit / (1 << 30)))
    server.expect_trouble(r"commit_store|larger than --max-message-gb")
    peer = peers(release)
    for name in ("sender", "neighbour"):
        peer.call("open", name, server.url)
        peer.ask(name, 0, 2, CHUNK)
    commit = request(COMMIT_STORE, key(tokens(CHUNK)), 7)
    assert peer.call("exchange", "sender", [*commit, (b"\0", limit)]) == [*commit[:2], FALSE]
    assert "DISCONNECTED" not in peer.call("events", "sender")
    peer.call("send", "sender", [[*commit, (b"\0", limit + 1)]])
    peer.call("wait_event", "sender", "DISCONNECTED")
    peer.ask("neighbour", 2, 10, CHUNK)
    assert "DISCONNECTED" not in peer.call("events", "neighbour")
    peer.call("wait_event", "sender", "HANDSHAKE_SUCCEEDED")
    peer.ask("sender", 2, 10, CHUNK)


@per_release
def test_lookup_above_limit_is_refused(server, peers, release):
    """A lookup of more than 64 MiB is answered with the operation's no; the connection stays."""
    server.expect_trouble(r"request_too_large")
    peer = peers(release)
    peer.call("open", "a", server.url)
    peer.ask("a", 0, 2, CHUNK)
    lookup = request(LOOKUP)
    assert peer.call("exchange", "a", [*lookup, (b"\0", 64 << 20), b"\1"]) == lookup
    # The log is written by a thread of its own, which the answer does not wait for.
    wait_until(lambda: any("request_too_large" in line for line in server.lines()), 60, "the line in the log")
    peer.ask("a", 2, 10, CHUNK)
    assert "DISCONNECTED" not in peer.call("events", "a")


OLDER = {
    "2.0": b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00",  # its revision is 1; DEALER, no identity
    "1.0": b"\x01\x00" + b"\x01\x15",  # an identity, and a frame
    "1.0 with a long identity": b"\xff" + (200).to_bytes(8, "big") + b"\0" + b"i" * 199,
}


@pytest.mark.parametrize("greeting", OLDER.values(), ids=OLDER)
def test_older_greeting_is_refused(server, peers, greeting):
    """The connection ends, after our greeting and without an answer; others are served."""
    peer = peers(RELEASES[-1])
    peer.call("open", "a", server.url)
    peer.ask("a", 0, 2, CHUNK)
    for parts in ([greeting], [greeting[at : at + 1] for at in range(len(greeting))]):
        with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as older:
            received = b""
            try:
                for part in parts:
                    older.sendall(part)
                while more := older.recv(4096):
                    received += more
            except ConnectionError:
                pass
        assert GREETING.startswith(received), received
        peer.ask("a", 2, 2, CHUNK)
    wait_until(lambda: connections(server) == 1, DEADLINE, "the refused connections to end")
    assert "DISCONNECTED" not in peer.call("events", "a")


CUTS = {
    "plain": None,
    "random": lambda: {"size": sizes(1)},
    "single bytes": lambda: {"size": one_byte, "is_paced": True},
}


@per_release
@pytest.mark.parametrize("cut", CUTS)
def test_our_client_pings_a_router(peers, proxies, cut, release):
    """`kvtier ping` at a ROUTER: five pings arrive in LMCache's form, and their answers."""
    peer = peers(release)
    port = peer.call("open", "router", "tcp://127.0.0.1", kind="ROUTER")
    if CUTS[cut]:
        port = proxies(port, **CUTS[cut]()).port
    client = subprocess.Popen([our_command()[0], "ping", f"127.0.0.1:{port}", "--timeout", "10"], stdout=-1, stderr=-1, text=True)
    try:
        assert peer.call("answer_pings", "router", 5) == [[bytes([uid]), b"\x16", b"\xc0"] for uid in range(5)]
        said, complaint = client.communicate(timeout=DEADLINE)
    finally:
        client.kill()
        client.wait()
    assert (client.returncode, complaint) == (0, "")
    assert f":{port} answers: round trip" in said


def test_releases_are_those_of_the_lock():
    """Every wheel of the lock file is tested. `Peer` checks that its process has imported it."""
    lock = (Path(__file__).parents[1] / "clients.lock").read_text()
    assert re.findall(r"^pyzmq==(\S+) --hash", lock, re.MULTILINE) == RELEASES
