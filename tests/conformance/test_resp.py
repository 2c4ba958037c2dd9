"""One Redis, LMCache's server and ours: each finds what the other stored, tenants stay apart, and no fault is a wrong hit."""

import itertools
import subprocess
import threading
import uuid

import pytest
from kvrig import tier_faults, tiers
from kvrig.packages import unpacked
from kvrig.redis import Cluster, Cutter, Redis, valkey_server
from kvrig.server import Server, our_command, peer_command
from kvrig.tier_faults import UNANSWERED, Fault
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("it is the other side of these tests")

MODES = ["lmcache_driven", "engine_driven"]
# What LMCache stores does not say its layout, and the pages of CPU workers depend on it.
TRUST = {"trust_missing_layout": True}


@pytest.fixture
def redis(request, tmp_path):
    """An empty Redis, or an empty Valkey."""
    program = valkey_server() if getattr(request, "param", "") == "valkey-server" else "redis-server"
    server = Redis(tmp_path / "redis", program, ["--enable-debug-command", "yes"])
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
    server = lmcache_server(tmp_path, resp(redis, num_workers=2))
    yield server
    server.stop()


def lmcache_server(tmp_path, flags):
    """A real LMCache server, with the client of Valkey."""
    env = {"PYTHONPATH": str(unpacked("valkey-glide-sync"))}
    server = Server(peer_command(), tmp_path / "lmcache.log", "both", flags=flags, peer=True, env=env)
    server.start(120)
    return server


# proves: docs/compare.md#redis-valkey
@pytest.mark.parametrize("mode", MODES)
def test_objects_are_exchanged_with_lmcache(redis, lmcache, serve, engines, mode):
    """In both directions, for two ranks and two tenants."""
    server = serve("both", flags=resp(redis, "redis", **TRUST))
    check_exchange(redis, lmcache, server, engines, mode)


def check_exchange(backend, lmcache, server, engines, mode):
    """Each finds what the other stored, and keeps tenants apart."""
    theirs, ours = engines(lmcache, mode, ranks=2), engines(server, mode, ranks=2)
    tiers.store(theirs, 1)
    tiers.store(theirs, 2, salt="alice")
    wait_keys(backend, 16)
    assert tiers.recall(ours, 1) == tiers.recall(ours, 2, salt="alice") == 64
    assert tiers.recall(ours, 2) == tiers.recall(ours, 1, salt="alice") == 0
    assert tiers.tier(server)["unverified_loads"] == 16

    tiers.store(ours, 3)
    tiers.store(ours, 4, salt="bob")
    wait_keys(backend, 32)
    assert tiers.recall(theirs, 3) == tiers.recall(theirs, 4, salt="bob") == 64
    assert tiers.recall(theirs, 4) == tiers.recall(theirs, 4, salt="alice") == 0
    tiers.settled(server)
    tiers.forget(ours)
    assert tiers.recall(ours, 3) == tiers.recall(ours, 4, salt="bob") == 64
    assert tiers.tier(server)["unverified_loads"] == 16


@pytest.fixture(params=["server", "cluster"])
def valkey(request, tmp_path):
    """An empty Valkey, or a cluster of them, and the keys of LMCache's type `valkey` for it."""
    kind = Cluster if request.param == "cluster" else Redis
    backend = kind(tmp_path / "valkey", valkey_server())
    nodes = backend.nodes if kind is Cluster else [backend]
    places = {"startup_nodes": f"127.0.0.1:{nodes[-1].port}", "cluster_mode": kind is Cluster}
    yield backend, {**places, "key_prefix": "fleet", "ttl_seconds": 3600, "num_workers": 2}
    backend.stop()


# proves: docs/compare.md#redis-valkey
def test_objects_are_exchanged_with_lmcache_by_valkey(valkey, tmp_path, serve, engines):
    """As by `resp`, with a prefix and a time to live."""
    backend, keys = valkey
    lmcache = lmcache_server(tmp_path, tiers.adapter("valkey", **keys))
    try:
        check_exchange(backend, lmcache, serve("both", flags=tiers.adapter("valkey", **keys, **TRUST)), engines, "lmcache_driven")
        assert all(key.startswith("fleet@") for key in backend.keys())
    finally:
        lmcache.stop()


def test_objects_of_lmcache_are_not_loaded_for_cpu_pages_unless_trusted(redis, lmcache, serve, engines):
    """They say neither block size nor processor."""
    tiers.store(engines(lmcache), 1)
    wait_keys(redis, 4)
    server = serve("both", flags=resp(redis))
    assert tiers.recall(engines(server), 1) == 0
    assert tiers.tier(server)["missing_layout_lookups"] == 4


def test_suite_passes(redis):
    """`kvtier tier-test`."""
    assert tiers.failed_cases(resp(redis)) == []
    assert redis.ask("DBSIZE") == 0


# proves: docs/compare.md#redis-valkey
@pytest.mark.parametrize("redis", ["redis-server", "valkey-server"], indirect=True)
def test_another_server_hits_what_this_one_stored(redis, serve, engines):
    """A fleet: a server that never saw the prompt hits it, but nothing that was evicted."""
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


# proves: docs/troubleshoot.md#second-tiers
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


def require_password(redis):
    """From here on, of connections that are there, too."""
    redis.set("requirepass", "other")
    with redis.connect() as connection:
        connection.sendall(b"AUTH other\r\nCLIENT KILL TYPE normal\r\n")
        assert connection.recv(100).startswith(b"+OK")


def forget_password(redis):
    """Ends that."""
    with redis.connect() as connection:
        connection.sendall(b'AUTH other\r\nCONFIG SET requirepass ""\r\n')
        assert connection.recv(100).startswith(b"+OK")


FAULTS = {
    "killed": Fault(Redis.stop, Redis.start, UNANSWERED, keeps=False),
    "frozen": Fault(Redis.freeze, Redis.thaw, UNANSWERED),
    "sleeping": Fault(Redis.sleep, Redis.wake, UNANSWERED),
    "paused": Fault(lambda redis: redis.pause("ALL"), Redis.resume, UNANSWERED),
    # Loads prolong the life of companions, which is a write.
    "writes-paused": Fault(lambda redis: redis.pause("WRITE"), Redis.resume, UNANSWERED, loads=None, is_healthy=None),
    "full": Fault(lambda redis: redis.set("maxmemory", "1mb"), lambda redis: redis.set("maxmemory", 0), {"full"}, loads=True, is_healthy=True, is_full=True, keeps=False),
    "replica": Fault(lambda redis: redis.ask("REPLICAOF", "127.0.0.1", 1), lambda redis: redis.ask("REPLICAOF", "NO", "ONE"), UNANSWERED, loads=None),
    "password": Fault(require_password, forget_password, {"refused"}, error="NOAUTH"),
}


# proves: docs/troubleshoot.md#second-tiers
@pytest.mark.parametrize("name", FAULTS)
def test_fault_costs_nothing_but_the_tier(redis, serve, engines, name):
    """See `tier_faults.check`."""
    server = serve(flags=resp(redis, request_timeout=2, lookup_timeout_ms=300))
    server.expect_trouble(r"resp|127\.0\.0\.1")
    tier_faults.check(server, engines(server), redis, FAULTS[name])


# proves: docs/troubleshoot.md#second-tiers
def test_replies_that_are_cut_are_misses(redis, serve, engines):
    """Connections end in the middle of objects: hits of L1 are as before, nothing of a cut object is loaded, the log says it once, and
    the tier is used again by itself."""
    proxy = Cutter(redis)
    try:
        server = serve(flags=resp(proxy, request_timeout=2, lookup_timeout_ms=300))
        server.expect_trouble(r"resp|127\.0\.0\.1")
        engine = engines(server)
        tiers.store(engine, 1)
        tiers.forget(engine)
        tiers.store(engine, 2)
        tiers.settled(server)
        asked = tiers.metric(server, tier_faults.LOOKUPS)
        proxy.spoil()
        assert tiers.recall(engine, 2) == 64
        assert tiers.metric(server, tier_faults.LOOKUPS) == asked
        assert tiers.recall(engine, 1) == 0
        assert proxy.cuts > 0
        told = tiers.warnings(server)
        assert told and len(set(told)) == len(told), told
        proxy.mend()
        wait_until(lambda: tiers.recall(engine, 1) == 64, 60, "hits of the tier", interval=0.1)
        wait_until(lambda: tiers.tier(server)["is_healthy"], 60, "the tier to be healthy")
        assert tiers.metric(server, "kvtier_l2_healthy") == 1
        tiers.store(engine, 3)
        tiers.forget(engine)
        assert tiers.recall(engine, 3) == 64
    finally:
        proxy.stop()


def test_check_config_tries_out_the_tier(redis):
    """It stores, finds, loads and deletes an object, and leaves nothing."""
    command = [our_command()[0], "server", "--check-config", "--l1-size-gb", "0.05", "--port", "0", "--http-port", "0", *resp(redis)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "stored, found, loaded and deleted an object in " in done.stdout
    assert redis.ask("DBSIZE") == 0


@pytest.fixture(params=["password", "user"])
def locked(request, tmp_path):
    """A Redis with a password, and LMCache's variables for it."""
    rights = ["--user", "default", "off", "--user", "kv", "on", ">s3cret", "~*", "+@all"]
    flags, user = (["--requirepass", "s3cret"], "") if request.param == "password" else (rights, "kv")
    server = Redis(tmp_path / "redis", flags=flags, password=(user, "s3cret") if user else ("s3cret",))
    yield server, {"LMCACHE_RESP_USERNAME": user, "LMCACHE_RESP_PASSWORD": "s3cret"}
    server.stop()


def test_credentials_come_from_the_environment(locked, serve, engines):
    """Where the configuration has none; and wrong ones are refused, and shown nowhere."""
    redis, names = locked
    tiers.store(engines(serve(flags=resp(redis), env=names)), 1)
    wait_keys(redis, 4)
    # A value of the configuration comes first.
    server = serve(flags=resp(redis, username="kv", password="an0ther"), env=names)
    server.expect_trouble(r"resp|tier|127\.0\.0\.1")
    assert tiers.recall(engines(server), 1) == 0
    wait_until(lambda: not tiers.tier(server)["is_healthy"], 60, "the tier to be unhealthy")
    assert "WRONGPASS" in tiers.tier(server)["error"]
    assert "an0ther" not in str(server.get("/status")[1])
    assert "an0ther" not in server.log.read_text()


# proves: docs/troubleshoot.md#second-tiers
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


@pytest.fixture
def cluster(request, tmp_path):
    """An empty cluster of Redis, or of Valkey, and the flags for it as a tier; only one of its nodes is configured."""
    program = valkey_server() if getattr(request, "param", "") == "valkey-server" else "redis-server"
    cluster = Cluster(tmp_path / "cluster", program)
    node = f"127.0.0.1:{cluster.nodes[2].port}"
    yield cluster, tiers.adapter("valkey", startup_nodes=node, cluster_mode=True, request_timeout=2)
    cluster.stop()


@pytest.mark.parametrize("cluster", ["valkey-server"], indirect=True)
def test_cluster_serves_several_servers(cluster, serve, engines):
    """A cluster of Valkey."""
    backend, flags = cluster
    first, second = serve(flags=flags), serve(flags=flags)
    writer, reader = engines(first), engines(second)
    tiers.store(writer, 1)
    tiers.store(writer, 2, salt="alice")
    wait_keys(backend, 8)
    assert sum(bool(node.keys()) for node in backend.nodes) > 1
    assert tiers.recall(reader, 1) == tiers.recall(reader, 2, salt="alice") == 64
    assert tiers.recall(reader, 2) == tiers.recall(reader, 1, salt="bob") == 0
    # One that starts now finds all of them.
    assert tiers.adopted(serve(flags=flags))["objects"] == 8


# proves: docs/troubleshoot.md#second-tiers
def test_replica_takes_over_while_objects_are_stored_and_loaded(tmp_path, serve, engines):
    """Its primary is killed meanwhile: whole hits of L1 are as before, objects of that node are misses until then, and all that it
    has confirmed to its replica is found again."""
    cluster = Cluster(tmp_path / "cluster", has_replica=True)
    try:
        node = f"127.0.0.1:{cluster.nodes[2].port}"
        server = serve(flags=tiers.adapter("valkey", startup_nodes=node, cluster_mode=True, request_timeout=2, lookup_timeout_ms=300))
        server.expect_trouble(r"valkey|127\.0\.0\.1|no node|cluster")
        engine = engines(server)
        for prompt in range(8):
            tiers.store(engine, prompt)
        tiers.settled(server)
        dead, kept = cluster.nodes[0], cluster.nodes[0].keys()
        wait_until(lambda: cluster.replica.keys() == kept, 60, "a copy of all objects", interval=0.02)
        assert 0 < len(kept) < len(cluster.keys())
        seeds = itertools.count(8)

        def has_taken_over():
            tiers.store(engine, seed := next(seeds))
            assert tiers.recall(engine, seed) == 64
            tiers.forget(engine)
            return [tiers.recall(engine, prompt) for prompt in range(8)] == [64] * 8

        assert has_taken_over()
        # Stores are in flight when it ends.
        for _ in range(4):
            tiers.store(engine, next(seeds))
        dead.process.kill()
        assert not has_taken_over()
        wait_until(has_taken_over, 60, "hits of the replica", interval=0.05)
        wait_until(lambda: tiers.tier(server)["is_healthy"], 60, "the tier to be healthy")
        # It takes stores, too.
        new = cluster.replica.keys()
        tiers.store(engine, next(seeds))
        wait_until(lambda: (tiers.store(engine, next(seeds)), len(cluster.replica.keys()) > len(new))[1], 60, "objects at it")
        # A cause is logged once, whichever node has it: the node that has ended, and the cluster that has not agreed yet.
        told = tiers.causes(server)
        assert len(set(told)) == len(told), told
    finally:
        cluster.stop()


# proves: docs/troubleshoot.md#second-tiers
def test_nodes_that_disagree_cost_nothing_but_the_tier(cluster, serve, engines):
    """Two of them name each other for the slot of a model, so commands go in circles."""
    backend, flags = cluster
    server = serve(flags=flags)
    server.expect_trouble(r"valkey|127\.0\.0\.1|send a key to each other")
    model = f"{{{uuid.uuid4().hex}}}"
    fault = Fault(lambda nodes: nodes.disagree(model), lambda nodes: nodes.agree(model), UNANSWERED, keeps=False)
    tier_faults.check(server, engines(server, model=model), backend, fault)


# proves: docs/troubleshoot.md#second-tiers
def test_slots_move_under_load(cluster, serve, engines):
    """All that is stored is found meanwhile, at whichever node it is."""
    backend, flags = cluster
    engine = engines(serve(flags=flags))
    for prompt in range(8):
        tiers.store(engine, prompt)
    wait_keys(backend, 32)
    tiers.settled(engine.server)
    moves, is_done = [], threading.Event()

    def move_slots():
        there, back = backend.nodes[:2], backend.nodes[1::-1]
        keys = backend.nodes[0].keys()
        while not is_done.is_set():
            for way in (there, back):
                for key in keys:
                    backend.move(key, *way)
                    moves.append(key)

    mover = threading.Thread(target=move_slots)
    mover.start()
    try:
        new = itertools.count(8)
        while len(moves) < 40 and mover.is_alive():
            tiers.store(engine, next(new))
            tiers.forget(engine)
            for prompt in range(8):
                assert tiers.recall(engine, prompt) == 64
    finally:
        is_done.set()
        mover.join()
    assert len(moves) >= 40
