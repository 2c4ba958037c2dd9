"""Reads of one server's L1: by another server, by redis-cli, and by LMCache's server through its own type `resp`."""

import subprocess

import pytest
from kvrig import tiers
from kvrig.redis import Redis
from kvrig.server import Server, free_port, peer_command
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("it is the other side of these tests")

MODES = ["lmcache_driven", "engine_driven"]
PASSWORD = "of-peers"


@pytest.fixture
def port():
    """A free port for peers."""
    return free_port()


@pytest.fixture
def redis(tmp_path):
    """An empty Redis, which ends after the servers that use it."""
    server = Redis(tmp_path / "redis")
    yield server
    server.stop()


def owner(port):
    """Flags of a server that peers read from."""
    return ["--peer-port", str(port), "--peer-password", PASSWORD]


def reader(port, **keys):
    """Flags of one that reads there, however busy the machine is."""
    return tiers.adapter("peers", peers=[f"127.0.0.1:{port}"], password=PASSWORD, first_byte_ms=5000, lookup_timeout_ms=5000, **keys)


def connected(server):
    """Wait until it has found its peer."""
    wait_until(lambda: tiers.tier(server)["connected_peers"] == 1, 60, "a connection to the peer", interval=0.02)


def redis_cli(port, *arguments):
    """What Redis' own client prints, without the end of the line."""
    command = ["redis-cli", "-h", "127.0.0.1", "-p", str(port), "--raw", "--no-auth-warning", "-a", PASSWORD, *arguments]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix(b"\n")


# proves: docs/compare.md#other-servers
@pytest.mark.parametrize("mode", MODES)
def test_a_server_hits_what_only_its_peer_has(port, serve, engines, mode):
    """Bytes are compared by `recall`; tenants stay apart; without the peer it is a miss."""
    first = serve("both", flags=owner(port))
    theirs = engines(first, mode, ranks=2)
    tiers.store(theirs, 1)
    tiers.store(theirs, 2, salt="alice")
    second = serve("both", flags=reader(port))
    # The other one ends first.
    second.expect_trouble(r"second tier")
    connected(second)
    ours = engines(second, mode, ranks=2)
    assert tiers.recall(ours, 1) == tiers.recall(ours, 2, salt="alice") == 64
    assert tiers.recall(ours, 2) == tiers.recall(ours, 1, salt="bob") == 0
    assert first.get("/status")[1]["peer_port"]["sent_objects"] == 16
    tiers.forget(theirs)
    tiers.forget(ours)
    assert tiers.recall(ours, 1) == 0


# proves: docs/l2.md#the-port-for-peers
def test_redis_cli_reads_what_the_resp_tier_writes(port, redis, serve, engines):
    """Every key that the tier has in a real Redis, companions among them, has the same value here."""
    server = serve(flags=[*owner(port), *tiers.adapter("resp", host="127.0.0.1", port=redis.port)])
    engine = engines(server)
    tiers.store(engine, 1)
    tiers.store(engine, 2, salt="alice")
    tiers.settled(server)
    keys = [key.decode() for key in redis.ask("KEYS", "*")]
    assert len(keys) == 16 and sum(key.startswith("kvtier.sum@") for key in keys) == 8
    for key in keys:
        value = redis.ask("GET", key)
        assert redis_cli(port, "GET", key) == value
        assert redis_cli(port, "STRLEN", key) == b"%d" % len(value)
        assert redis_cli(port, "EXISTS", key, key + "x") == b"1"
    assert redis_cli(port, "PING") == b"PONG"
    for refused in [("SET", keys[0], "x"), ("UNLINK", keys[0]), ("FLUSHALL",), ("KEYS", "*")]:
        assert redis_cli(port, *refused).startswith(b"READONLY "), refused
    tiers.forget(engine)
    assert redis_cli(port, "EXISTS", *keys) == b"0"


# proves: docs/l2.md#the-port-for-peers
@pytest.mark.parametrize("mode", MODES)
def test_lmcache_reads_by_its_own_resp(port, serve, engines, tmp_path, mode):
    """A real LMCache server hits what is only in our L1, for two ranks and a tenant."""
    ours = engines(serve("both", flags=owner(port)), mode, ranks=2)
    tiers.store(ours, 1)
    tiers.store(ours, 2, salt="alice")
    flags = tiers.adapter("resp", host="127.0.0.1", port=port, num_workers=2, password=PASSWORD)
    lmcache = Server(peer_command(), tmp_path / "lmcache.log", "both", flags=flags, peer=True)
    lmcache.start(120)
    try:
        theirs = engines(lmcache, mode, ranks=2)
        assert tiers.recall(theirs, 1) == tiers.recall(theirs, 2, salt="alice") == 64
        assert tiers.recall(theirs, 2) == tiers.recall(theirs, 1, salt="bob") == 0
    finally:
        lmcache.stop()
