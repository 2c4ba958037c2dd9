"""Tenants beside each other, over the real protocol: which one loses what, and what quotas change about it."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from kvrig import tiers
from kvrig.engine import Group, tokens
from kvrig.layouts import layout
from kvrig.server import our_command
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("its quotas exist in L2 only, and IsolatedLRU ends the thread that frees space in L1")

# 96 KiB per chunk; 20 MiB hold 213 of them.
BIG = layout("kv_first_nhd", heads=8, size=64)
CHUNK_BYTES = 96 * 1024
L1_GB = 20 / 1024
MIB = 1024 * 1024

STEADY = [tokens(48, seed) for seed in range(9_000, 9_010)]


def set_quota(server, salt, **body):
    """Grant something over HTTP."""
    status, answer = server.request("PUT", f"/quota/{salt}", body)
    assert status == 200, answer


def in_l1(server, salt):
    """What the quota API says a tenant has in L1."""
    return server.get(f"/quota/{salt}")[1]["tiers"]["l1"]


def steady_hits(engine, rounds, scanned):
    """Part of a tenant's tokens that hit, if its prompts come back and another tenant stores `scanned` new prompts
    between two rounds."""
    found = wanted = 0
    for turn in range(rounds):
        for prompt in STEADY:
            hit = engine.hits(prompt, "steady")
            if turn > 0:
                found, wanted = found + hit, wanted + len(prompt)
            if hit < len(prompt):
                engine.store_prompt(prompt, salt="steady")
        for _ in range(scanned):
            engine.store_prompt(tokens(48), salt="scanner")
    return found / wanted


@pytest.mark.parametrize("mode", ["engine_shm", "lmcache_driven"])
def test_a_scanning_tenant_is_on_its_own(serve, engines, mode):
    """The steady tenant finds what it finds alone, as soon as the scanner has a quota; with neither quotas nor an order
    of its own it finds nothing."""

    def run(scanned, eviction, flags=(), limit_mib=None):
        server = serve(mode, l1_gb=L1_GB, eviction=eviction, flags=flags)
        if limit_mib:
            server.expect_trouble("--quota-file")
            set_quota(server, "scanner", limit_gb=limit_mib / 1024)
        engine = engines(server, groups=[Group(BIG)])
        share = steady_hits(engine, 4, scanned)
        engine.close()
        return share

    isolated = ["--quota-mode", "soft"]
    strict = ["--quota-mode", "strict"]
    alone = run(0, "LRU")
    assert alone == 1.0
    assert run(80, "LRU") == 0.0
    assert abs(run(80, "IsolatedLRU", isolated, limit_mib=10) - alone) <= 0.01
    assert abs(run(80, "IsolatedLRU", strict, limit_mib=10) - alone) <= 0.01


# proves: docs/compare.md#tenants
def test_a_reserved_share_needs_no_quota_for_others(serve, engines):
    """What is reserved for a tenant stays, even if no other tenant has a limit."""
    server = serve("engine_shm", l1_gb=L1_GB, eviction="IsolatedLRU")
    server.expect_trouble("--quota-file")
    set_quota(server, "steady", limit_gb="unlimited", reserved_gb=4 / 1024)
    engine = engines(server, groups=[Group(BIG)])
    assert steady_hits(engine, 4, 80) == 1.0


# proves: docs/compare.md#tenants
def test_a_strict_quota_is_never_exceeded(serve, engines):
    """After every store, that of another tenant included, a tenant has no byte more than its quota; its newest prompts
    are found, and bytes are its own."""
    limit = 10 * CHUNK_BYTES + CHUNK_BYTES // 2
    server = serve("engine_shm", l1_gb=L1_GB, eviction="IsolatedLRU", flags=["--quota-mode", "strict"])
    server.expect_trouble("--quota-file")
    set_quota(server, "tight", limit_gb=limit / 2**30)
    engine = engines(server, groups=[Group(BIG)])
    for seed in range(30):
        tiers.store(engine, seed, count=48, salt="tight")
        assert in_l1(server, "tight")["usage_bytes"] <= limit
        tiers.store(engine, seed, count=48, salt="free")
        assert tiers.recall(engine, seed, count=48, salt="tight") == 48
    assert in_l1(server, "free")["usage_bytes"] == 90 * CHUNK_BYTES
    assert in_l1(server, "tight")["refused_over_quota"] == 0
    # A prompt larger than the quota: its head is kept, the rest is refused and counted.
    tiers.store(engine, 99, count=16 * 14, salt="tight")
    assert tiers.recall(engine, 99, count=16 * 14, salt="tight") == 160
    assert in_l1(server, "tight")["usage_bytes"] <= limit
    assert in_l1(server, "tight")["refused_over_quota"] == 4


@pytest.mark.parametrize("quota_mode", ["soft", "strict"])
def test_a_quota_lowered_under_load_costs_only_its_tenant(serve, engines, quota_mode):
    """While stores go on, a tenant comes down to its new quota; the others keep all they have."""
    server = serve("engine_shm", l1_gb=L1_GB, eviction="IsolatedLRU", flags=["--quota-mode", quota_mode])
    server.expect_trouble("--quota-file")
    engine = engines(server, groups=[Group(BIG)])
    for seed in range(20):
        tiers.store(engine, seed, count=48, salt="other")
        tiers.store(engine, seed, count=48, salt="lowered")
    limit = 2 * MIB
    set_quota(server, "lowered", limit_gb=limit / 2**30)
    after = iter(range(1000, 2000))

    def is_down():
        tiers.store(engine, next(after), count=48, salt="lowered")
        return in_l1(server, "lowered")["usage_bytes"] <= limit

    wait_until(is_down, 60, "the tenant's way down to its quota")
    if quota_mode == "soft":
        wait_until(lambda: in_l1(server, "lowered")["usage_bytes"] < limit * 0.8, 60, "the end below the watermark")
    assert in_l1(server, "other")["usage_bytes"] == 60 * CHUNK_BYTES
    assert all(tiers.recall(engine, seed, count=48, salt="other") == 48 for seed in range(20))


def test_unlisted_tenants_are_cleaned_where_only_a_list_is_allowed(serve, engines):
    """With LMCache's meaning of no quota, a tenant without one loses all within about a second; others keep theirs."""
    flags = ["--quota-mode", "soft", "--quota-default", "0"]
    server = serve("engine_shm", l1_gb=L1_GB, eviction="IsolatedLRU", flags=flags)
    server.expect_trouble("--quota-file")
    set_quota(server, "listed", limit_gb=1)
    engine = engines(server, groups=[Group(BIG)])
    for salt in ["listed", "unlisted", ""]:
        tiers.store(engine, 1, count=48, salt=salt)
    wait_until(lambda: in_l1(server, "unlisted")["usage_bytes"] == 0, 60, "the end of the unlisted tenant's chunks")
    wait_until(lambda: in_l1(server, "_default")["usage_bytes"] == 0, 60, "the end of the chunks of no tenant")
    assert tiers.recall(engine, 1, count=48, salt="listed") == 48
    assert tiers.recall(engine, 1, count=48, salt="unlisted") == 0


@pytest.mark.parametrize("quota_mode", ["soft", "strict"])
def test_ten_thousand_tenants_with_quotas(serve, quota_mode, tmp_path):
    """Stores of 10 000 tenants at 320 MiB/s: all are accepted, no tenant reads another's bytes, and in the end none
    has more than the quota."""
    limit = 256 * 1024
    flags = ["--quota-mode", quota_mode, "--quota-default", f"{limit // 1024}KiB"]
    server = serve("engine_shm", chunk=256, l1_gb=0.25, eviction="IsolatedLRU", flags=flags)
    server.expect_trouble("--quota-file")
    report = tmp_path / "report.json"
    rate = 320 * MIB // (128 * 1024)
    command = [
        our_command()[0], "bench", server.url, "--scenario", "tenants", "--tenants", "10000",
        "--small-chunk-bytes", "128KiB", "--rate", str(rate), "--requests", str(3 * rate), "--json", str(report),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stores, reads = json.loads(report.read_text())["rows"]
    assert (stores["count"], stores["facts"]["refused"]) == (3 * rate, 0)
    assert reads["count"] > 0 and reads["mismatched"] == 0
    some = [f"tenant-{number}" for number in range(0, 10_000, 50)]

    def within():
        usage = [in_l1(server, salt)["usage_bytes"] for salt in some]
        return usage if max(usage) <= limit else None

    assert any(wait_until(within, 60, "every tenant within the quota"))


def says(answer, shown):
    """Whether an answer says all that the page shows of it."""
    if isinstance(shown, dict):
        return isinstance(answer, dict) and all(key in answer and says(answer[key], shown[key]) for key in shown)
    return answer == shown


# proves: docs/tenants.md#setting-quotas
def test_the_page_s_lines_do_what_it_says(serve, tmp_path):
    """Each command of docs/tenants.md, in order, against one server: the answers are those of the page."""
    page = Path(__file__).parents[2] / "docs" / "tenants.md"
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    steps = re.findall(r"^\$ (.*)\n([^$].*)", "".join(blocks), re.MULTILINE)
    assert len(steps) == "".join(blocks).count("\n") / 2 > 5, "a line without an answer"
    server = serve("engine_shm", eviction="IsolatedLRU", l1_gb=0.25, flags=["--quota-file", str(tmp_path / "quotas.json")])
    binary = f"{our_command()[0]} "
    for command, shown in steps:
        # The server of the page is on the default port.
        line = command.replace("http://127.0.0.1:8080", server.http).replace("kvtier ", binary)
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=20, check=False)
        assert says(json.loads(done.stdout), json.loads(shown)), f"{command}\n{done.stdout}{done.stderr}"
