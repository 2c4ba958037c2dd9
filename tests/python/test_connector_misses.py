"""vLLM's connector: why requests could not use the cache, in vLLM's metrics and log."""

import functools
import re
from pathlib import Path

import pytest
import torch
from conftest import CHUNK
from kvrig.waiting import wait_until
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from rig import tokens
from vllm_rig import request  # skips without vLLM

from kvtier.vllm import KvTierConnector
from kvtier.vllm.metrics import MISSES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def misses(engine):
    """Reason -> the number since the last call."""
    stats = engine.scheduler.get_kv_connector_stats()
    counts = stats.data if stats else {}
    return {name.removeprefix("misses_"): count for name, count in counts.items() if name.startswith("misses_")}


def ask(engine, prompt, **more):
    """A request that vLLM asks for at two steps, computes, preempts and asks for again: it counts once. Returns its misses."""
    req = request("asked", prompt, **more)
    blocks = range(31, 31 + -(-len(prompt) // 4))
    for _ in range(2):
        assert engine.match(req) == (0, False)
    assert misses(engine) == {}, "it is not scheduled yet"
    engine.allocate(req, blocks, 0)
    engine.step(preempted=["asked"])
    assert engine.match(req) == (0, False)
    engine.allocate(req, blocks, 0)
    engine.finish(req)
    return misses(engine)


def test_each_miss_has_its_reason(place, engines):
    """A request counts once, when vLLM has scheduled it; those with hits do not."""
    engine = engines(place.server())
    prompt = engine.stored(2 * CHUNK + 1, "there", salt="s")
    assert misses(engine) == {"not_found": 1}
    assert ask(engine, tokens(CHUNK, "new")) == {"not_found": 1}
    assert ask(engine, prompt[: CHUNK - 1], salt="s") == {"too_short": 1}
    assert ask(engine, prompt, salt="s", prompt_embeds=torch.zeros(1)) == {"not_identified": 1}
    assert ask(engine, prompt, salt="s", skip_reading_prefix_cache=True) == {"skipped_by_vllm": 1}
    assert ask(engine, prompt, salt="s", kv_transfer_params={"kvtier.load": False}) == {"parameter": 1}
    # No key can have this salt.
    assert ask(engine, prompt, salt="a@b") == {"lookup_failed": 1}
    assert ask(engine, prompt, salt="s", mm_features=7) == {"error": 1}
    part = request("part", prompt, salt="s", kv_transfer_params={"kvtier.max_load_tokens": CHUNK})
    assert engine.match(part) == (CHUNK, True)
    engine.load(part, range(11, 20), 0, CHUNK)
    engine.finish(part)
    own = request("own", prompt, salt="s")
    assert engine.match(own, 2 * CHUNK) == (0, False)
    engine.allocate(own, range(1, 10), 0)
    engine.finish(own)
    assert misses(engine) == {}, "hits"
    fails = request("fails", prompt, salt="s")
    assert engine.match(fails) == (2 * CHUNK, True)
    engine.scheduler._scheduling.adapter.client.clear(True).result()
    assert engine.load(fails, range(11, 20), 0, 2 * CHUNK) != set()
    assert engine.match(fails) == (0, False)
    engine.allocate(fails, range(11, 20), 0)
    engine.finish(fails)
    assert misses(engine) == {"load_failed": 1}


def test_first_of_several_reasons_counts(place, engines):
    """In the order of the page."""
    engine = engines(place.server())
    reasons = {
        "skipped_by_vllm": {"skip_reading_prefix_cache": True},
        "parameter": {"kv_transfer_params": {"kvtier.load": False}},
        "not_identified": {"prompt_embeds": torch.zeros(1)},
    }
    assert [reason for reason in MISSES if reason in reasons] == list(reasons)
    while reasons:
        every = {key: value for more in reasons.values() for key, value in more.items()}
        first = next(iter(reasons))
        assert ask(engine, tokens(CHUNK, "new"), **every) == {first: 1}
        short = first if first == "skipped_by_vllm" else "too_short"
        assert ask(engine, tokens(CHUNK - 1, "new"), **every) == {short: 1}
        del reasons[first]


def test_misses_without_server(place, engines):
    """Before the first one, whose chunk is not known yet, and after it has ended."""
    server = place.server(start=False)
    engine = engines(server, **{"kvtier.start": "without"})
    assert ask(engine, tokens(CHUNK - 1, "short")) == {"no_server": 1}
    server.start()
    healthy = lambda: engine.scheduler._scheduling.adapter.is_healthy  # noqa: E731
    wait_until(healthy, 60, "healthy")
    assert ask(engine, tokens(CHUNK - 1, "short")) == {"too_short": 1}
    server.stop()
    wait_until(lambda: not healthy(), 60, "a lost server")
    assert ask(engine, tokens(CHUNK, "long")) == {"no_server": 1}
    server.start()


def test_frozen_server_fails_lookups(place, engines, caplog):
    """Its answer does not come in time, and the log has the setting."""
    server = place.server()
    server.expect_trouble("instance|worker|register")
    engine = engines(server, **{"kvtier.lookup_timeout": 0.2})
    with server.frozen():
        req = request("a", tokens(CHUNK, "late"))
        assert engine.match(req) == (0, False)
        engine.scheduler._scheduling.allocated(req, ([],), 0)
        assert misses(engine) == {"lookup_failed": 1}
    assert "within 200ms; lookup_timeout (kvtier.lookup_timeout of the connector) is 0.2 s; computing it" in caplog.text


def test_producers_have_no_misses(place, engines):
    """They do not look up."""
    engine = engines(place.server(), role="kv_producer")
    assert ask(engine, tokens(CHUNK, "new")) == {}


def test_misses_are_in_metrics_log_and_page():
    """One counter with the reason as its label; every reason is there from the start."""
    registry = CollectorRegistry()
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    engines = {0: ["m", "0"], 1: ["m", "1"]}

    class Config:
        kv_transfer_config = None

    metrics = KvTierConnector.build_prom_metrics(Config, kinds, ["model_name", "engine"], engines)
    stats = KvTierConnector.build_kv_connector_stats({"lookups": 3, "misses_not_found": 2})
    metrics.observe(stats.data, 1)
    found = {
        (sample.labels["engine"], sample.labels["reason"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "vllm:kvtier_misses_total"
    }
    expected = {(engine, reason): 0 for engine in ("0", "1") for reason in MISSES}
    assert found == expected | {("1", "not_found"): 2}
    assert registry.get_sample_value("vllm:kvtier_lookups_total", {"model_name": "m", "engine": "1"}) == 3
    assert stats.reduce() == {"lookups": 3, "misses_not_found": 2}
    section = PAGE.read_text().split("\n## Log, metrics and events")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == ["reason", *MISSES]
