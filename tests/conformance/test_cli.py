"""LMCache's own command line works against our admin port."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvrig.engine import tokens


def lmcache(*arguments):
    """Run `lmcache ARGUMENTS`; (exit status, stdout, stderr)."""
    command = [str(Path(sys.prefix) / "bin" / "lmcache"), *arguments]
    env = dict(os.environ, LMCACHE_LOG_LEVEL="WARNING")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_ping(serve):
    """`lmcache ping kvcache`"""
    status, out, err = lmcache("ping", "kvcache", "--url", serve().http, "--format", "json")
    assert status == 0, err
    assert json.loads(out)["metrics"]["status"] == "OK"


def test_describe(serve, engines, peer):
    """`lmcache describe kvcache` shows capacity, content and the registered model."""
    server = serve(fresh=True)
    engine = engines(server, ranks=2)
    prompt = tokens(48)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 48)
    status, out, err = lmcache("describe", "kvcache", "--url", server.http, "--format", "json")
    assert status == 0, err
    shown = json.loads(out)["metrics"]
    assert shown["health"] == "OK"
    assert shown["chunk_size"] == server.chunk
    assert shown["l1_capacity_gb"] == pytest.approx(server.l1_gb, abs=0.01)
    assert shown["cached_objects"] == 6
    assert peer or shown["eviction_policy"] == "LRU"
    [model] = shown["models"]
    assert model["model"] == engine.model
    assert model["world_size"] == 2
    assert model["num_layers"] == 3
    assert sorted(model["gpu_ids"].split(", ")) == sorted(str(w.adapter.instance_id) for w in engine.workers)
    assert model["cache_size_per_token"] == 3 * 2 * 2 * 8 * 2
    [group] = shown["kernel_groups"]
    assert (group["tokens_per_block"], group["num_layers"], group["is_mla"]) == (4, 3, False)
    assert group["dtype"].endswith("bfloat16")


def test_kvcache_clear(serve, engines):
    """`lmcache kvcache clear` empties L1."""
    server = serve(fresh=True)
    engine = engines(server)
    prompt = tokens(48)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 48)
    status, out, err = lmcache("kvcache", "clear", "--url", server.http)
    assert status == 0, err
    assert "OK" in out
    assert engine.hits(prompt) == 0


def test_ping_without_a_server_fails():
    """The tool says so, which shows that the tests above prove something."""
    from kvrig.server import free_port

    status, _, _ = lmcache("ping", "kvcache", "--url", f"http://127.0.0.1:{free_port()}")
    assert status == 1
