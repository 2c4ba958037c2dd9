"""What tenants may have: LMCache's HTTP answers, limits under load, and what a restart keeps."""

import json
import threading

import pytest
from kvrig import tiers
from kvrig.server import REPOSITORY
from kvrig.waiting import wait_until

EXCHANGES = REPOSITORY / "crates" / "kvtier-server" / "tests" / "vectors" / "quota_exchanges.json"

GIB = 1 << 30

ISOLATED = {"eviction": {"eviction_policy": "IsolatedLRU"}}

ours = pytest.mark.ours("its quotas are lost with the process, and hold in tiers only")


def usage(server, salt, tier="fs-0"):
    """Bytes of a tenant in a tier."""
    status, report = server.get(f"/quota/{salt}")
    assert status == 200, report
    return report["tiers"][tier]["usage_bytes"]


def limit(server, salt, size, **more):
    """Set the limit of a tenant, bytes."""
    status, report = server.request("PUT", f"/quota/{salt}", {"limit_gb": size / GIB, **more})
    assert (status, report.get("status")) == (200, "ok"), report


def covers(expected, report):
    """Whether an answer has all that another one has."""
    if isinstance(expected, dict):
        return isinstance(report, dict) and all(key in report and covers(value, report[key]) for key, value in expected.items())
    return expected == report


def test_answers_are_the_peers(serve, tmp_path, peer):
    """Every captured request to a server without tenants' data has the captured answer, but for salts no key can have."""
    flags = [] if peer else ["--quota-file", str(tmp_path / "quotas")]
    server = serve(flags=flags, fresh=True)
    server.expect_trouble("quotas have no effect")
    replayed = refused = 0
    for exchange in json.loads(EXCHANGES.read_text())["exchanges"]:
        asked, expected = exchange["request"], exchange["response"]
        if exchange["server"] != "A" or expected["status"] == 307:
            continue
        body = asked["body"]
        raw = None if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
        status, report = send(server, asked["method"], asked["path"], raw)
        if not peer and ("a%40b" in asked["path"] or len(asked["path"]) > 150):
            assert status == 400 and report["error"].startswith("cache_salt: "), (asked, report)
            refused += 1
            continue
        body = expected["body"]
        if "users" in body and not peer:
            body["users"] = {salt: row for salt, row in body["users"].items() if salt != "a@b" and len(salt) < 150}
        # The captured server had data of the tenant without a salt.
        body = json.loads(json.dumps(body).replace("0.015625", "0.0"))
        assert status == expected["status"], (asked, report)
        # The texts of refusals are kvtier's own.
        assert covers(body, report) or (not peer and status == 400 and report["error"]), (asked, report, body)
        replayed += 1
    assert (replayed, refused) == ((31, 0) if peer else (27, 4)), (replayed, refused)


def send(server, method, path, raw):
    """Status and JSON of a request whose body may be anything."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request(method, path, raw, {"Content-Type": "application/json"})
    response = connection.getresponse()
    report = json.loads(response.read())
    connection.close()
    return response.status, report


@ours
def test_a_limit_lowered_under_load(serve, engines, tmp_path):
    """While two tenants store, one's limit is lowered: it ends below, the other loses nothing, every byte is right."""
    flags = ["--eviction-policy", "IsolatedLRU", "--quota-file", str(tmp_path / "quotas")]
    server = serve(flags=flags + tiers.fs(tmp_path / "tier", **ISOLATED))
    steady, greedy = engines(server), engines(server)
    tiers.store(steady, 1, salt="steady")
    stored, failures = threading.Event(), []

    def load():
        try:
            for seed in range(100, 140):
                tiers.store(greedy, seed, salt="greedy")
                stored.set()
        except Exception as error:  # reported by the test
            failures.append(error)
            stored.set()

    thread = threading.Thread(target=load)
    thread.start()
    assert stored.wait(60)
    tiers.settled(server)
    kept = usage(server, "steady")
    chunk = kept // 4
    limit(server, "greedy", 20 * chunk)
    thread.join()
    assert not failures, failures
    tiers.settled(server)
    for tier in ("l1", "fs-0"):
        wait_until(lambda: usage(server, "greedy", tier) < 0.8 * 20 * chunk, 60, f"eviction from {tier}")
    report = server.get("/quota/greedy")[1]
    assert all(report["tiers"][tier]["evicted_objects"] > 0 for tier in ("l1", "fs-0")), report
    assert usage(server, "steady") == kept
    tiers.forget(steady)
    assert tiers.recall(steady, 1, salt="steady") == 64
    tiers.recall(greedy, 139, salt="greedy")


@ours
def test_a_restart_keeps_quotas_and_usage(serve, engines, tmp_path):
    """Killed with an allow-list: after the start the quotas are known, usage is what the directory holds, nothing went."""
    flags = ["--quota-default", "0", "--quota-file", str(tmp_path / "quotas")]
    server = serve(flags=flags + tiers.fs(tmp_path / "tier", **ISOLATED))
    server.expect_trouble("instance")
    before = engines(server)
    limit(server, "known", GIB, reserved_gb=0.125, tiers={"l1": {"reserved_gb": 0}})
    tiers.store(before, 1, salt="known")
    tiers.store(before, 2, salt="stranger")
    tiers.settled(server)
    wait_until(lambda: usage(server, "stranger") == 0, 60, "the stranger's objects to go")
    kept, row = usage(server, "known"), server.get("/quota")[1]["users"]["known"]
    assert kept > 0 and len(tiers.files(tmp_path / "tier")) == 4
    server.kill()
    server.start()
    tiers.adopted(server)
    assert server.get("/quota")[1]["users"] == {"known": row}
    assert usage(server, "known") == kept
    assert server.get("/quota/known")[1]["tiers"]["fs-0"]["reserved_bytes"] == GIB // 8
    after = engines(server)
    assert tiers.recall(after, 1, salt="known") == 64
    assert len(tiers.files(tmp_path / "tier")) == 4


@ours
def test_strict_limits_refuse(serve, engines, tmp_path):
    """A tenant that may have nothing stores nothing anywhere, its engine goes on, and the refusals are counted."""
    flags = ["--eviction-policy", "IsolatedLRU", "--quota-mode", "strict", "--quota-file", str(tmp_path / "quotas")]
    server = serve(flags=flags + tiers.fs(tmp_path / "tier", **ISOLATED))
    engine = engines(server)
    limit(server, "barred", 0)
    prompt = tiers.tokens(64, 1)
    engine.worker.store(engine.new_request(), prompt, 0, 64, engine.blocks_for(64), "barred")
    tiers.store(engine, 2, salt="other")
    tiers.settled(server)
    assert engine.hits(prompt, salt="barred") == 0
    assert tiers.recall(engine, 2, salt="other") == 64
    report = server.get("/quota/barred")[1]["tiers"]
    assert report["l1"]["usage_bytes"] == report["fs-0"]["usage_bytes"] == 0
    assert report["l1"]["refused_over_quota"] == 4
    assert tiers.metric(server, "kvtier_l1_over_quota_chunks_total", cache_salt="barred") == 4
    assert len(tiers.files(tmp_path / "tier")) == 4


@ours
def test_a_full_disk(small_disk, serve):
    """A quota that cannot be written is refused and not in force; the file is as it was, and good for a restart."""
    directory = small_disk("size=48k")
    server = serve(flags=["--eviction-policy", "IsolatedLRU", "--quota-file", str(directory / "quotas")])
    server.expect_trouble("the quotas could not be written")
    number, status = 0, 200
    while status == 200:
        number += 1
        assert number < 2000, "the disk is not full"
        status, report = server.request("PUT", f"/quota/tenant-{number}-{'x' * 100}", {"limit_gb": 1})
    assert status == 500 and "nothing was changed" in report["error"] and "No space" in report["error"], report
    # Nor is one lowered in memory alone.
    with pytest.raises(OSError), open(directory / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    before = server.get("/quota")[1]["users"]
    first = next(iter(before))
    assert len(before) == number - 1
    status, report = server.request("PUT", f"/quota/{first}", {"limit_gb": 0.123, "reserved_gb": 0.01})
    assert status == 500, report
    assert server.get("/quota")[1]["users"] == before
    assert sorted(path.name for path in directory.iterdir()) == ["filler", "quotas"]
    server.kill()
    server.start()
    assert server.get("/quota")[1]["users"] == before


@ours
def test_a_damaged_file_is_refused_at_the_start(serve, tmp_path):
    """Nothing is served with quotas that cannot be read; one line says which file, why, and what to do."""
    path = tmp_path / "quotas"
    path.write_text('{"version":3,"quotas":{"a":')
    with pytest.raises(RuntimeError, match="exited with 2") as refused:
        serve(flags=["--quota-file", str(path)])
    for part in ("--quota-file", str(path), "damaged", "or remove it"):
        assert part in str(refused.value)
