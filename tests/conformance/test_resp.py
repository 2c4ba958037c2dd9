"""One Redis, LMCache's server and ours: each finds what the other stored, tenants stay apart, and no fault is a wrong hit."""

import signal
import subprocess

import pytest
from kvrig import tiers
from kvrig.redis import Cluster, Redis, valkey_server
from kvrig.server import Server, our_command, peer_command
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("it is the other side of these tests")

MODES = ["lmcache_driven", "engine_driven"]
# What LMCache stores does not say its layout, and the pages of CPU workers depend on it.
TRUST = {"trust_missing_layout": True}


@pytest.fixture
def redis(tmp_path):
    """An empty Redis."""
    server = Redis(tmp_path / "redis")
    yield server
    server.stop()


def resp(redis, kind="resp", **keys):
    """Flags for it as a tier."""
    return tiers.adapter(kind, host="127.0.0.1", port=redis.port, **keys)


def wait_keys(redis, count):
    """Wait until that many objects are there."""
    wait_until(lambda: len(redis.keys()) >= count, 60, f"{count} keys", interval=0.02)
    assert len(redis.keys()) == count


@pytest.fixture
def lmcache(redis, tmp_path):
    """A real LMCache server with it as a tier."""
    server = Server(peer_command(), tmp_path / "lmcache.log", "both", flags=resp(redis, num_workers=2), peer=True)
    server.start(120)
    yield server
    server.stop()


@pytest.mark.parametrize("mode", MODES)
def test_objects_are_exchanged_with_lmcache(redis, lmcache, serve, engines, mode):
    """In both directions, for two ranks and two tenants."""
    server = serve("both", flags=resp(redis, "redis", **TRUST))
    theirs, ours = engines(lmcache, mode, ranks=2), engines(server, mode, ranks=2)
    tiers.store(theirs, 1)
    tiers.store(theirs, 2, salt="alice")
    wait_keys(redis, 16)
    assert tiers.recall(ours, 1) == tiers.recall(ours, 2, salt="alice") == 64
    assert tiers.recall(ours, 2) == tiers.recall(ours, 1, salt="alice") == 0
    assert tiers.tier(server)["unverified_loads"] == 16

    tiers.store(ours, 3)
    tiers.store(ours, 4, salt="bob")
    wait_keys(redis, 32)
    assert tiers.recall(theirs, 3) == tiers.recall(theirs, 4, salt="bob") == 64
    assert tiers.recall(theirs, 4) == tiers.recall(theirs, 4, salt="alice") == 0
    tiers.settled(server)
    tiers.forget(ours)
    assert tiers.recall(ours, 3) == tiers.recall(ours, 4, salt="bob") == 64
    assert tiers.tier(server)["unverified_loads"] == 16


def test_objects_of_lmcache_are_not_loaded_for_cpu_pages_unless_trusted(redis, lmcache, serve, engines):
    """They say neither block size nor processor."""
    tiers.store(engines(lmcache), 1)
    wait_keys(redis, 4)
    server = serve("both", flags=resp(redis))
    assert tiers.recall(engines(server), 1) == 0
    assert tiers.tier(server)["missing_layout_lookups"] == 4


@pytest.mark.beside_the_gate
def test_suite_passes(redis):
    """`kvtier tier-test`."""
    assert tiers.failed_cases(resp(redis)) == []
    assert redis.ask("DBSIZE") == 0


@pytest.mark.parametrize("program", ["redis-server", "valkey-server"])
def test_another_server_hits_what_this_one_stored(tmp_path, serve, engines, program):
    """A fleet: a server that never saw the prompt, also after a restart of the first."""
    redis = Redis(tmp_path / "redis", valkey_server() if program == "valkey-server" else program)
    try:
        check_other_server(redis, serve, engines)
    finally:
        redis.stop()


def check_other_server(redis, serve, engines):
    """Hits of a server that never saw the prompt; none of what was evicted."""
    first = serve(flags=resp(redis))
    tiers.store(engines(first), 1)
    tiers.store(engines(first), 2, salt="alice")
    wait_keys(redis, 8)
    second = serve(flags=resp(redis))
    reader = engines(second)
    assert tiers.recall(reader, 1) == tiers.recall(reader, 2, salt="alice") == 64
    assert tiers.recall(reader, 2) == tiers.recall(reader, 1, salt="bob") == 0
    assert tiers.tier(second)["unverified_loads"] == 0
    recovery = tiers.adopted(second)
    assert (recovery["objects"], recovery["foreign"]) == (8, 0)
    # What is evicted there is a miss.
    redis.ask("FLUSHALL")
    tiers.forget(reader)
    assert tiers.recall(reader, 1) == 0


def test_values_under_other_keys_are_no_hits(redis, serve, engines):
    """Bytes of one tenant under the key of another, as a client that confuses replies would leave them."""
    server = serve(flags=resp(redis))
    server.expect_trouble(r"not what was stored|corrupt")
    engine = engines(server)
    tiers.store(engine, 1, salt="alice")
    tiers.store(engine, 1, salt="bob")
    wait_keys(redis, 8)
    tiers.settled(server)
    alices = [key for key in redis.keys() if key.endswith("@alice")]
    for key in alices:
        redis.ask("SET", key, redis.ask("GET", key.replace("@alice", "@bob")))
    tiers.forget(engine)
    assert tiers.recall(engine, 1, salt="alice") == 0
    assert tiers.recall(engine, 1, salt="bob") == 64


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_lookups_of_l1_do_not_wait_for_a_server_that_is_away(redis, serve, engines, fault):
    """Its objects are misses meanwhile; when it is back it is used again."""
    server = serve(flags=resp(redis, request_timeout=3, lookup_timeout_ms=300))
    server.expect_trouble(r"resp|127\.0\.0\.1")
    engine = engines(server)
    tiers.store(engine, 1)
    wait_keys(redis, 4)
    tiers.settled(server)
    if fault == "killed":
        redis.stop()
    else:
        redis.process.send_signal(signal.SIGSTOP)
    # Whole hits of L1 ask no tier.
    assert tiers.recall(engine, 1) == 64
    assert tiers.recall(engine, 2) == 0
    wait_until(lambda: not tiers.tier(server)["is_healthy"], 60, "the tier to be unhealthy")
    # What is stored meanwhile is counted as lost to the tier; the log has each kind of trouble once.
    tiers.store(engine, 3)
    wait_until(lambda: tiers.metric(server, "kvtier_l2_store_failures_total") == 4, 60, "the failures to be counted")
    assert tiers.recall(engine, 3) == 64
    told = tiers.warnings(server)
    assert told and len(set(told)) == len(told), told
    if fault == "killed":
        redis.start()
    else:
        redis.process.send_signal(signal.SIGCONT)
    wait_until(lambda: tiers.tier(server)["is_healthy"], 60, "the tier to be healthy")
    seeds = iter(range(10, 100))

    def stores_again():
        before = len(redis.keys())
        tiers.store(engine, next(seeds))
        tiers.settled(server)
        return len(redis.keys()) == before + 4

    wait_until(stores_again, 60, "a store in the tier", interval=0.2)


def test_check_config_tries_out_the_tier(redis):
    """It stores, finds, loads and deletes an object, and leaves nothing."""
    command = [our_command()[0], "server", "--check-config", "--l1-size-gb", "0.05", "--port", "0", "--http-port", "0", *resp(redis)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "stored, found, loaded and deleted an object in " in done.stdout
    assert redis.ask("DBSIZE") == 0


def test_server_starts_before_its_redis(redis, serve, engines):
    """It serves from L1, and uses the tier as soon as it is there."""
    redis.stop()
    server = serve(flags=resp(redis))
    server.expect_trouble(r"resp|127\.0\.0\.1")
    engine = engines(server)
    tiers.store(engine, 1)
    assert tiers.recall(engine, 1) == 64
    redis.start()
    wait_until(lambda: tiers.tier(server)["is_healthy"], 60, "the tier to be healthy")


def test_cluster_serves_several_servers(tmp_path, serve, engines):
    """A cluster of Valkey; only one of its nodes is configured."""
    cluster = Cluster(tmp_path / "cluster", valkey_server())
    try:
        node = f"127.0.0.1:{cluster.nodes[2].port}"
        flags = tiers.adapter("valkey", startup_nodes=node, cluster_mode=True)
        first, second = serve(flags=flags), serve(flags=flags)
        writer, reader = engines(first), engines(second)
        tiers.store(writer, 1)
        tiers.store(writer, 2, salt="alice")
        wait_keys(cluster, 8)
        assert sum(bool(node.keys()) for node in cluster.nodes) > 1
        assert tiers.recall(reader, 1) == tiers.recall(reader, 2, salt="alice") == 64
        assert tiers.recall(reader, 2) == tiers.recall(reader, 1, salt="bob") == 0
        # One that starts now finds all of them.
        assert tiers.adopted(serve(flags=flags))["objects"] == 8
    finally:
        cluster.stop()
