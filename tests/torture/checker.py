"""What may be answered, from the events of the engines and the faults of a round: pure functions, so scripted answers test them.

An event begins or ends a request of an engine (`actor.Actor.note`). A window is the time of a fault, after which clients need some
time to recover.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from paint import CHUNK_BYTES, identity

# Seconds for an answer while no fault is there, on a machine that does other things too; and from the end of a fault on. Clients
# of LMCache notice a fault with a heartbeat, and register again with the next but one.
BOUND, RECOVERY = 15.0, 20.0
# The same if the server was there; leases of lookups have expired after it.
BRIEF = 8.0


class Violation(NamedTuple):
    """Its kind, which is what a summary counts, and a sentence."""

    kind: str
    text: str


@dataclass
class Window:
    """A fault. Without `engines` it concerns all of them; `recovery` is the time after it in which it may be noticed."""

    kind: str
    begin: float
    end: float
    engines: tuple = ()
    removes: bool = False  # objects may be missing from L1 then
    recovery: float = RECOVERY


@dataclass
class Request:
    """An engine's request, and its answer if there is one."""

    engine: int
    op: str
    begin: float
    about: dict
    end: float | None = None
    result: object = None
    answer: dict = field(default_factory=dict)

    @property
    def version(self):
        """What a store has painted."""
        return self.engine << 32 | self.about["begin"]

    def identities(self):
        """Of the chunks of a transfer."""
        about = self.about
        return [identity(about["tenant"], about["model"], about["prompt"], chunk) for chunk in range(about.get("first", 0), about["last"])]


def read(paths):
    """Requests and audits of engines' files; a line that a kill has cut off is left out."""
    events = []
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return events


def requests(events):
    """Begins and ends, joined."""
    found = {}
    for event in events:
        if "begin" in event:
            found[event["engine"], event["begin"]] = Request(event["engine"], event["op"], event["t"], event)
        elif "end" in event:
            request = found[event["engine"], event["end"]]
            request.end, request.result, request.answer = event["t"], event["result"], event
    return list(found.values())


def disturbances(request, windows, now=float("inf")):
    """Faults whose consequences a request may have met."""
    end = request.end or now
    return [w for w in windows if w.begin <= end and request.begin <= w.end + w.recovery and (not w.engines or request.engine in w.engines)]


def check_bytes(asked):
    """Each chunk that was loaded is the right one's, whole, of one store that had begun and was not refused."""
    stores = {request.version: request for request in asked if request.op == "store"}
    for request in asked:
        where = f"engine {request.engine}, retrieve {request.about.get('begin')}"
        if request.op != "retrieve" or request.result not in (True, False):
            continue
        if request.answer.get("stray"):
            yield Violation("stray write", f"{where}: blocks that were not to be loaded have changed")
        if request.result is False:
            continue
        whole, *chunks = request.answer["chunks"]
        for wanted, found in zip(request.identities()[whole:], chunks, strict=True):
            if isinstance(found, str):
                yield Violation("torn", f"{where}: {wanted}: {found}")
                continue
            owner, version = tuple(found[0]), found[1]
            store = stores.get(version)
            if owner != tuple(wanted):
                kind = "another tenant's bytes" if owner[0] != wanted.tenant else "another chunk's bytes"
                yield Violation(kind, f"{where}: {wanted} has the bytes of {owner}")
            elif store is None or store.begin > request.end or wanted not in store.identities():
                yield Violation("unknown store", f"{where}: {wanted} has version {version:#x}, which no store before has written")
            elif store.result is False and store.about.get("client") == "lmcache":
                yield Violation("refused store", f"{where}: {wanted} is of a store that was answered with no ({version:#x})")


def check_answers(asked, windows, killed=(), is_roomy=False):
    """Each request is answered, in its time, and done if no fault is near: what a lookup has found is leased, and an L1 that
    `is_roomy` refuses no store. `killed` engines may have a last request that is not answered."""
    last = {}
    for request in asked:
        if request.engine not in last or request.begin > last[request.engine].begin:
            last[request.engine] = request
    for request in asked:
        what = f"engine {request.engine} ({request.about.get('client')}), {request.op} {request.about.get('begin')}"
        if request.end is None:
            if request.engine not in killed or request is not last[request.engine]:
                yield Violation("no answer", f"{what} was never answered")
            continue
        met = disturbances(request, windows)
        until = max([request.begin + BOUND, *(w.end + w.recovery for w in met)])
        seconds = f"{request.end - request.begin:.1f} s, after {[w.kind for w in met]}"
        if request.result == "never":
            yield Violation("no answer", f"{what}: {request.answer['error']}; {seconds}")
        elif request.end > until:
            yield Violation("late answer", f"{what} took {seconds}")
        elif request.result == "error" and not met:
            yield Violation("error", f"{what}: {request.answer['error']}")
        elif not met and (request.op == "retrieve" and not request.result or is_roomy and request.op == "store" and not request.result):
            yield Violation("refused", f"{what}: {request.result}, and no fault was near")
        elif request.op == "lookup" and isinstance(request.result, int) and not 0 <= request.result <= 16 * request.about["last"]:
            yield Violation("wrong hit", f"{what}: {request.result} tokens of {16 * request.about['last']}")


def guaranteed(asked, windows):
    """Identities that L1 must have, if it has space for all: stored after the last fault that removes any. Where a store of the same
    chunk has no answer, its memory may still be granted to its engine, and stores beside it were answered without being kept. LMCache's
    client calls a store done that a server has answered which does not know the worker, until it has registered again."""
    since = max([w.end for w in windows if w.removes], default=0.0)
    stores, doubtful = set(), set()
    for request in asked:
        if request.op != "store":
            continue
        if request.result is not True or request.end is None:
            doubtful.update(request.identities())
        elif request.begin > since and not (request.about.get("client") == "lmcache" and disturbances(request, windows)):
            stores.update(request.identities())
    return stores - doubtful


def wanted_prompts(kept, model, tenants, prompts, chunks):
    """(tenant, prompt, chunks from the start on that are guaranteed) of a model."""
    found = []
    for tenant in range(tenants):
        for prompt in range(prompts):
            least = next((c for c in range(chunks) if identity(tenant, model, prompt, c) not in kept), chunks)
            found.append((tenant, prompt, least))
    return found


def check_audits(events):
    """What was stored is there."""
    for event in events:
        if event.get("op") == "audit" and event["hit"] < event["least"]:
            about = {key: event[key] for key in ("tenant", "model", "prompt")}
            yield Violation("lost store", f"{about}: {event['hit']} of {event['least']} chunks that were stored are there")


def check_kept(before, after, excused, where):
    """What was listed before a crash is listed after it: keys as their texts, with sizes; `excused` are parts of keys."""
    missing = [(key, size) for key, size in before - after if not any(part in key for part in excused)]
    if missing:
        yield Violation("lost object", f"{where}: {len(missing)} of {len(before)} objects are missing after a restart: {sorted(missing)[:3]}")


def check_idle(state):
    """Nothing is held for engines that have gone; bytes add up. `state` is of `Round.idle_state`."""
    for name in ("leased", "being written", "staging bytes", "pending transfers", "withheld transfers", "sessions", "instances",
                 "accounting errors", "panics", "connections"):  # fmt: skip
        if state[name]:
            yield Violation("leak", f"{name}: {state[name]} after all engines have ended")
    for name in [key for key in state if key.startswith("bytes of ")]:
        if len(set(state[name].values())) > 1:
            yield Violation("accounting", f"{name}: {state[name]}")


def check_levels(levels, limits):
    """What was measured stays within its bounds."""
    for name, limit in limits.items():
        highest = max((level[name] for level in levels), default=0)
        if highest > limit:
            yield Violation("bound", f"{name}: {highest}, more than {limit}")


def count(asked):
    """Results by operation, the bytes that were compared, and the slowest answer by operation."""
    found, compared, slowest = defaultdict(Counter), 0, {}
    for request in asked:
        result = request.result if request.end is not None else "cut off"
        if request.op == "lookup" and isinstance(result, int):
            result = "miss" if result == 0 else "hit" if result == 16 * request.about["last"] else "partial"
        elif isinstance(result, bool) or result is None:
            result = {True: "done", False: "refused or failed", None: "abandoned"}[result]
        found[request.op][str(result)] += 1
        if request.end is not None:
            slowest[request.op] = max(slowest.get(request.op, 0), round(request.end - request.begin, 2))
        if request.op == "retrieve" and request.result is True:
            compared += CHUNK_BYTES * (len(request.answer["chunks"]) - 1)
    return {op: dict(results) for op, results in found.items()}, compared, slowest
