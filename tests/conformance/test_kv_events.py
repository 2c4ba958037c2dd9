"""LMCache's worker adapter learns from the server what it holds, as routers do by vLLM's events."""

import pytest
from kvrig.engine import Group, tokens
from kvrig.layouts import layout
from kvrig.waiting import wait_until
from lmcache.utils import CacheStoreEvent

# 96 KiB per chunk, as in test_pressure: some 200 of them fit.
BIG = layout("kv_first_nhd", heads=8, size=64)
L1_GB = 20 / 1024


class Router:
    """What a router knows of a server by the events that vLLM publishes for one worker."""

    def __init__(self, engine):
        self.engine, self.chunks = engine, {}

    def step(self):
        """Take what has arrived, as an engine's step does."""
        for event in self.engine.worker.adapter.get_kv_events():
            assert event.medium == "CPU"
            if isinstance(event, CacheStoreEvent):
                (block,) = event.block_hashes
                assert block not in self.chunks and event.block_size == self.engine.chunk
                self.chunks[block] = (event.parent_block_hash, tuple(event.token_ids))
            else:
                for block in event.block_hashes:
                    del self.chunks[block]

    def knows(self, objects):
        """Whether it knows exactly what the server holds, and what has come in the meantime."""
        self.step()
        return len(self.chunks) == objects

    def prefix(self, prompt):
        """Tokens of the prompt that it would send to this server."""
        size, parent, found = self.engine.chunk, None, 0
        known = {place: block for block, place in self.chunks.items()}
        while parent := known.get((parent, tuple(prompt[found : found + size]))):
            found += size
        return found


def objects(server):
    return server.get("/status")[1]["storage_manager"]["l1_manager"]["total_object_count"]


def settled(server, router):
    wait_until(lambda: router.knows(objects(server)), 30, f"{objects(server)} chunks at the router")


# proves: docs/compare.md#kv-events
# proves: docs/vllm.md#kv-events
@pytest.mark.ours("it announces no stores of workers that copy by themselves, and evicts by a timer")
@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_shm", "engine_pickle"])
def test_router_knows_what_is_resident(serve, engines, mode):
    """Stores, tenants, evictions, a clear and a restart: the router ends with what hits, and with nothing else."""
    server = serve(mode, l1_gb=L1_GB)
    server.expect_trouble(r"instance")
    engine = engines(server, groups=[Group(BIG)], kv_events=True, heartbeat=2.0)
    router = Router(engine)
    router.step()
    prompts = [tokens(48) for _ in range(3)]
    for prompt in prompts:
        engine.store_prompt(prompt)
    settled(server, router)
    assert [router.prefix(prompt) for prompt in prompts] == [48, 48, 48]
    engine.store_prompt(tokens(48), salt="tenant")
    assert router.knows(objects(server) - 3)

    # More than fits, and what the tenant has goes too.
    prompts = [tokens(48) for _ in range(90)]
    for prompt in prompts:
        engine.store_prompt(prompt)
    settled(server, router)
    assert 0 < len(router.chunks) < 270
    # The server may still be evicting.
    wait_until(
        lambda: router.step() or all(router.prefix(it) == engine.hits(it) for it in prompts[::9]),
        30, "a router that knows what hits",
    )  # fmt: skip

    # What the last lookup has found may be leased still.
    wait_until(lambda: server.post("/cache/clear") and objects(server) == 0, 30, "an empty server")
    settled(server, router)

    engine.store_prompt(prompts[0])
    settled(server, router)
    assert router.prefix(prompts[0]) == 48
    before = engine.worker.adapter.transfer_ctx
    server.kill()
    server.start()
    settled(server, router)
    wait_until(lambda: engine.worker.adapter.transfer_ctx is not before and engine.worker.adapter.is_healthy, 60, "registration again")
    engine.store_prompt(prompts[1])
    settled(server, router)
    assert (router.prefix(prompts[0]), router.prefix(prompts[1])) == (0, 48)
    assert server.get("/status")[1]["kv_events"]["subscribers"] == 1
