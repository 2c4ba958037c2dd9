"""How long a request's KV is kept: pinned for some seconds, or evicted first; by the adapters and by vLLM's connector."""

import pytest
from conftest import CHUNK
from rig import BLOCK, tokens

PER_CHUNK = CHUNK // BLOCK
# GiB of a server in which few prompts fit.
SMALL = {"l1_gb": 1 / 256}


def l1(server):
    """The state of L1."""
    return server.get("/status")[1]["storage_manager"]["l1_manager"]


def flood(engine, server, fresh):
    """Stores other prompts until more was stored than fits."""
    status = l1(server)
    size = status["memory_used_bytes"] // status["total_object_count"]
    for number in range(status["memory_total_bytes"] // size // 8 + 1):
        assert engine.store(fresh(), tokens(8 * CHUNK, f"flood-{number}"), 0, 8 * CHUNK, range(8 * PER_CHUNK))


def store(engine, fresh, prompt, keep_seconds):
    """Stores a prompt of whole chunks."""
    op = engine.op(prompt, 0, len(prompt), range(len(prompt) // BLOCK), keep_seconds=keep_seconds)
    engine.worker.submit_store_request(fresh(), op)
    engine.finish_stores()


def found(engine, fresh, prompt):
    """Returns the tokens that are cached, and ends the session."""
    request = fresh()
    tokens_found = engine.lookup(request, prompt)
    engine.scheduler.end_session(request)
    return tokens_found


# proves: docs/compare.md#retention
# proves: docs/vllm.md#how-long-kv-is-kept
def test_pinned_prompt_survives_a_flood(place, mode, fresh):
    """One that is not pinned does not."""
    server = place.server(**SMALL)
    engine = place.engine(server, mode=mode)
    prompts = {seconds: tokens(2 * CHUNK, f"kept-{seconds}") for seconds in (None, 600)}
    for seconds, prompt in prompts.items():
        store(engine, fresh, prompt, seconds)
    assert l1(server)["pinned_object_count"] == 2
    flood(engine, server, fresh)
    assert {seconds: found(engine, fresh, prompt) for seconds, prompt in prompts.items()} == {None: 0, 600: 2 * CHUNK}


# proves: docs/compare.md#retention
# proves: docs/vllm.md#how-long-kv-is-kept
def test_prompt_of_no_seconds_is_evicted_first(place, mode, fresh):
    """Although it was stored last."""
    server = place.server(**SMALL, flags=["--eviction-trigger-watermark", "1", "--eviction-ratio", "0"])
    engine = place.engine(server, mode=mode)
    prompts = {seconds: tokens(8 * CHUNK, f"first-{seconds}") for seconds in (None, 0)}
    for seconds, prompt in prompts.items():
        store(engine, fresh, prompt, seconds)
    status = l1(server)
    fits = status["memory_total_bytes"] // (status["memory_used_bytes"] // 16)
    for number in range(fits // 8 - 1):
        assert engine.store(fresh(), tokens(8 * CHUNK, f"others-{number}"), 0, 8 * CHUNK, range(8 * PER_CHUNK))
    assert {seconds: found(engine, fresh, prompt) for seconds, prompt in prompts.items()} == {None: 8 * CHUNK, 0: 0}


def test_lookup_pins_what_it_finds(place, fresh):
    """A hit renews a pin."""
    server = place.server(**SMALL)
    engine = place.engine(server)
    prompt, request = tokens(2 * CHUNK, "hit"), fresh()
    store(engine, fresh, prompt, None)
    engine.scheduler.maybe_submit_lookup_request(request, token_ids=prompt, keep_seconds=600)
    assert engine.lookup(request, prompt) == 2 * CHUNK
    engine.scheduler.end_session(request)
    assert l1(server)["pinned_object_count"] == 2
    flood(engine, server, fresh)
    assert found(engine, fresh, prompt) == 2 * CHUNK


@pytest.mark.parametrize("value", [-1, 2**32, "60", 1.5])
def test_time_that_no_key_can_carry_fails_its_store_only(place, mode, fresh, value):
    """One that is too long is ignored by the server."""
    server = place.server(**SMALL)
    engine = place.engine(server, mode=mode)
    prompt = tokens(CHUNK, "hostile")
    store(engine, fresh, prompt, value)
    assert found(engine, fresh, prompt) == 0 and engine.worker.take_counters().failed_stores == 1
    store(engine, fresh, prompt, 2**32 - 1)
    assert found(engine, fresh, prompt) == CHUNK and l1(server)["pinned_object_count"] == 0


# proves: docs/compare.md#retention
# proves: docs/vllm.md#how-long-kv-is-kept
@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_request_of_vllm_is_pinned_within_the_share(place, engines, fresh, mode):
    """Its parameter reaches the server with its stores and with its lookups; what is beyond the share is kept as others are."""
    from vllm_rig import request

    server = place.server(**SMALL, flags=["--max-pinned-share", "0.05"])
    engine = engines(server, **{"kvtier.transfer_mode": mode})
    pinned = {"kv_transfer_params": {"kvtier.keep_seconds": 600}}
    prompt, short = tokens(8 * CHUNK + 1, "pinned"), tokens(CHUNK + 1, "short")
    engine.prefill(request("short", short), range(1, 2 + PER_CHUNK))
    engine.wait_for_stores()
    assert l1(server)["pinned_object_count"] == 0
    assert engine.match(request("hit", short, **pinned)) == (CHUNK, True)
    assert l1(server)["pinned_object_count"] == 1
    for number in range(8):
        engine.prefill(request(f"{number}", prompt, salt=f"{number}", **pinned), range(1, 2 + 8 * PER_CHUNK))
        engine.wait_for_stores()
    status = l1(server)
    limit = status["memory_total_bytes"] // 20
    size = status["pinned_object_bytes"] // status["pinned_object_count"]
    assert limit - size < status["pinned_object_bytes"] <= limit
    assert status["pinned_object_count"] + status["pins_refused_count"] == 8 * 8 + 1
    assert engine.scheduler._scheduling.errors.take() == 0
