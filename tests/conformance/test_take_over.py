"""A server takes over from another one; the unmodified client notices nothing."""

import threading

import pytest
import torch
from kvrig.engine import tokens

MODES = ["lmcache_driven", "engine_shm", "engine_pickle"]
PROMPT = 32


@pytest.fixture
def lasting(serve, tmp_path):
    """Starts a server that another one can take over from."""

    def start(mode):
        return serve(mode, flags=["--l1-restore", "on", "--state-dir", str(tmp_path), "--instance-id", "conformance"])

    return start


def round_trip(engine, between=lambda: None):
    """Stores a prompt, looks it up, and after `between` loads it into other blocks: the bytes are right. Returns the prompt."""
    prompt = tokens(PROMPT)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, PROMPT)
    stored = engine.worker.read(engine.blocks_for(PROMPT))
    request, hit = engine.lookup(prompt)
    assert hit == PROMPT
    between()
    target = engine.blocks_for(PROMPT, 30)
    engine.worker.fill(target)
    assert engine.worker.retrieve(request, prompt, 0, hit, target).ok
    loaded = engine.worker.read(target)
    engine.end(request)
    assert all(torch.equal(a, b) for a, b in zip(loaded, stored, strict=True))
    return prompt


@pytest.mark.ours("LMCache's server cannot hand over")
@pytest.mark.parametrize("mode", MODES)
def test_client_notices_no_take_over(lasting, engines, mode):
    """Lookups before and retrieves after, stores and hits, and no other registration."""
    server = lasting(mode)
    engine = engines(server, heartbeat=2.0, mq_timeout=60)
    registered = engine.worker.adapter.transfer_ctx
    for _ in range(4):
        prompt = round_trip(engine, between=server.take_over)
        assert engine.hits(prompt) == PROMPT
        assert engine.worker.adapter.is_healthy
    assert engine.worker.adapter.transfer_ctx is registered


@pytest.mark.ours("LMCache's server cannot hand over")
@pytest.mark.parametrize("mode", MODES)
def test_every_answer_is_right_while_servers_take_over(lasting, engines, mode):
    """An engine works on a thread of its own, all the time."""
    server = lasting(mode)
    engine = engines(server, heartbeat=2.0, mq_timeout=60)
    stop, rounds, failed = threading.Event(), [], []

    def work():
        try:
            while not stop.is_set():
                rounds.append(round_trip(engine))
        except BaseException as problem:  # noqa: BLE001
            failed.append(problem)

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(10):
        server.take_over()
    stop.set()
    worker.join()
    assert not failed and rounds, failed
