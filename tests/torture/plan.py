"""What happens in a round, from its seed alone: the server's flags, tiers, engines, and faults with their times."""

import random
from dataclasses import dataclass, field

# Seconds: short enough that what a killed engine held is released within a round's end. The reap timeout cannot be shorter.
WRITE_TTL, READ_TTL, SESSION_TTL, REAP = 5, 5, 10, 30

TIERS = {(): 8, ("fs",): 4, ("fs", "redis"): 3, ("redis",): 2, ("small_fs",): 2, ("s3",): 1}
# Clients and the ways of their transfers; `engine_driven` is by the pool if the server has one.
MODES = [
    ("lmcache", "lmcache_driven"),
    ("lmcache", "engine_driven"),
    ("lmcache", "cuda"),
    ("kvtier", "lmcache_driven"),
    ("kvtier", "engine_driven"),
    ("kvtier", "pickle"),
]
# Faults and how often they are drawn.
SERVER = {"kill": 4, "term": 2, "stop": 3, "hangup": 1}
CLIENTS = {"engine_kill": 3, "engine_stop": 2, "cut": 3, "delay": 2, "freeze": 2}
DATA = {"clear": 1, "delete": 1}
OF_TIER = {
    "fs": {"flip": 2, "truncate": 1, "remove": 1, "base_away": 2},
    "small_fs": {"disk_full": 4, "flip": 1},
    "redis": {"redis_kill": 2, "redis_stop": 1, "redis_pause": 1},
    "s3": {"s3_kill": 2, "s3_stop": 1},
}


@dataclass
class EngineSpec:
    """An engine process. `number` is unique in its round, also among those that replace killed ones."""

    number: int
    client: str
    mode: str
    model: int
    is_proxied: bool
    seed: str


@dataclass
class Fault:
    """`at` is in seconds from the start of the engines, `length` of what lasts, `pick` chooses among what is there."""

    at: float
    kind: str
    length: float
    pick: float


@dataclass
class Plan:
    """A round. If it `is_roomy`, L1 holds all prompts of all tenants, so nothing may be missing that no fault has removed."""

    seed: int
    seconds: float
    mode: str
    tiers: tuple
    is_roomy: bool
    restore: bool
    flags: tuple
    engines: list = field(default_factory=list)
    faults: list = field(default_factory=list)

    @property
    def l1_mib(self):
        """Size of L1."""
        return 128 if self.is_roomy else 12

    @property
    def keeps_stored(self):
        """Whether what L1 has stays there until a fault removes it. With the prefetch policy `default`, loads do not."""
        return self.is_roomy and "default" not in self.flags

    def __str__(self):
        engines = ", ".join(f"{e.client} {e.mode}{' behind the proxy' if e.is_proxied else ''}" for e in self.engines)
        about = f"{self.mode}, tiers {'+'.join(self.tiers) or 'none'}, L1 {self.l1_mib} MiB, restore {'on' if self.restore else 'off'}"
        return f"{about}; {engines}; faults {' '.join(f'{f.at:.1f}:{f.kind}' for f in self.faults)}"


def draw(source, weights):
    """One of the keys, by its weight."""
    return source.choices(list(weights), list(weights.values()))[0]


def make(seed, seconds):
    """The plan of a round."""
    source = random.Random(seed)
    tiers = draw(source, TIERS)
    plan = Plan(
        seed,
        seconds,
        mode=draw(source, {"both": 4, "all": 2, "engine_pickle": 1}),
        tiers=tiers,
        is_roomy=source.random() < 0.5,
        restore=source.random() < 0.7,
        flags=draw(
            source,
            {
                ("--eviction-policy", "LRU"): 2,
                ("--eviction-policy", "ARC"): 1,
                ("--eviction-policy", "IsolatedLRU", "--quota-mode", "soft"): 1,
                ("--eviction-policy", "IsolatedLRU", "--quota-mode", "strict"): 1,
            },
        ),
    )
    if tiers:
        plan.flags += ("--l2-prefetch-policy", draw(source, {"retain": 2, "default": 1}))
    modes = [mode for mode in MODES if plan.mode == "all" or mode[1] != "cuda"]
    if plan.mode == "engine_pickle":
        modes = [("lmcache", "engine_driven"), ("kvtier", "pickle")]
    source.shuffle(modes)
    for number in range(6):
        client, mode = modes[number % len(modes)]
        model = source.randrange(2) + {"lmcache_driven": 2, "cuda": 4}.get(mode, 0)
        plan.engines.append(EngineSpec(number, client, mode, model, source.random() < 0.4, f"{seed}/{number}"))
    faults = SERVER | CLIENTS | DATA
    if plan.restore:
        faults = faults | {"damage_ledger": 1}
    if not plan.is_roomy:
        faults = faults | {"quota": 2}
    for tier in tiers:
        faults = faults | OF_TIER[tier]
    at = 2.0
    while at < seconds - 1:
        plan.faults.append(Fault(at, draw(source, faults), source.uniform(0.1, 3.0), source.random()))
        at += source.uniform(0.3, 2.5)
    return plan
