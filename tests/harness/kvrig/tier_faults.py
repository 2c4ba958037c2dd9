"""Faults of a backend that a server has as a tier: what they cost, and that nothing else changes."""

from collections.abc import Callable, Set
from dataclasses import dataclass

from . import tiers
from .waiting import TimedOut, wait_until

# Reasons for calls without an answer.
UNANSWERED = frozenset({"busy", "deadline", "unavailable"})
STORED, STORE_FAILURES = "kvtier_l2_stored_objects_total", "kvtier_l2_store_failures_total"
LOOKUPS = "lmcache_mp_l2_prefetch_lookup_requests_total"


@dataclass(frozen=True)
class Fault:
    """A state of a backend, which `begin` and `end` bring about, and what it costs the tier meanwhile."""

    begin: Callable
    end: Callable
    # The reasons that are counted for objects that are not stored; empty if they are stored.
    refusals: Set = frozenset()
    # Whether objects are loaded; None if that is a matter of time, as health may be.
    loads: bool | None = False
    is_healthy: bool | None = False
    is_full: bool = False
    # Part of the error in `/status`.
    error: str = ""
    # Whether the backend has its objects afterwards.
    keeps: bool = True


def check(server, engine, backend, fault):
    """Whole hits of L1 are as before; objects are loaded and stored or are misses, never wrong; nothing waits without an end; the
    log has each trouble once, `/healthcheck`, `/status` and the metrics have it too; and the tier is used again by itself."""
    tiers.store(engine, 1)
    tiers.settled(server)
    tiers.forget(engine)
    tiers.store(engine, 2)
    tiers.settled(server)
    asked = tiers.metric(server, LOOKUPS)
    fault.begin(backend)
    assert tiers.recall(engine, 2) == 64
    assert tiers.metric(server, LOOKUPS) == asked
    assert tiers.recall(engine, 1) in {True: (64,), False: (0,), None: range(0, 65, 16)}[fault.loads]
    stored = tiers.metric(server, STORED)
    tiers.store(engine, 3)
    tiers.settled(server)
    if fault.refusals:
        refused = {reason: tiers.metric(server, STORE_FAILURES, reason=reason) for reason in fault.refusals}
        assert sum(refused.values()) == tiers.metric(server, STORE_FAILURES) == 4, refused
    else:
        assert tiers.metric(server, STORED) == stored + 4
    assert tiers.recall(engine, 3) == 64
    seeds, counts = iter(range(10, 1000)), []

    def is_shown():
        # Some states show by calls that fail.
        if fault.refusals:
            tiers.store(engine, next(seeds))
        tier, (status, health) = tiers.tier(server), server.get("/healthcheck")
        assert (status, health["status"]) == (200, "healthy")
        seen = {tier["is_healthy"], not health.get("failed_tiers"), tiers.metric(server, "kvtier_l2_healthy") == 1}
        is_healthy = fault.is_healthy is None or seen == {fault.is_healthy}
        return is_healthy and tier["is_full"] == fault.is_full and fault.error in (tier.get("error") or "")

    wait_until(is_shown, 60, "the state of the tier", interval=0.2)
    told = tiers.warnings(server)
    assert len(set(told)) == len(told), told
    assert told or not fault.refusals
    fault.end(backend)

    def stores_again():
        before = tiers.metric(server, STORED)
        tiers.store(engine, seed := next(seeds))
        tiers.settled(server)
        counts.append(tiers.metric(server, STORED) - before)
        return counts[-1] == 4 and seed

    try:
        seed = wait_until(stores_again, 60, "a store in the tier", interval=0.2)
    except TimedOut as error:
        raise AssertionError(f"objects of each store: {counts}; the tier: {tiers.tier(server)}") from error
    wait_until(lambda: tiers.tier(server)["is_healthy"], 60, "the tier to be healthy")
    tiers.forget(engine)
    # A busy machine may need longer than the deadline of a lookup.
    for prompt in (seed, 1) if fault.keeps else (seed,):
        wait_until(lambda prompt=prompt: tiers.recall(engine, prompt) == 64, 60, "a hit", interval=0.2)
