"""The checker finds what it is there for: scripted answers with one thing wrong each, and what only looks wrong."""

import checker
import paint
import pytest
from checker import Window


def event(number, op, begin, end, result, engine=1, client="kvtier", **about):
    """A request's two events."""
    about = {"tenant": 1, "model": 0, "prompt": 5, "first": 0, "last": 2, "client": client} | about
    answer = {key: about.pop(key) for key in ("chunks", "stray", "error") if key in about}
    found = [{"engine": engine, "t": begin, "begin": number, "op": op, **about}]
    if end is not None:
        found.append({"engine": engine, "t": end, "end": number, "result": result, **answer})
    return found


def asked(*events):
    """The requests of these."""
    return checker.requests([each for pair in events for each in pair])


STORED = event(1, "store", 1.0, 2.0, True)
VERSION = 1 << 32 | 1


def owner(chunk, **other):
    """The stored prompt's chunk."""
    return list(paint.identity(**{"tenant": 1, "model": 0, "prompt": 5, "chunk": chunk} | other))


def load(*chunks, begin=3.0, end=3.5, **more):
    """A retrieve with these chunks, from the first on."""
    return event(9, "retrieve", begin, end, True, engine=2, chunks=[0, *chunks], last=len(chunks), **more)


def kinds(violations):
    """Of violations."""
    return [violation.kind for violation in violations]


def test_right_bytes_are_no_violation():
    assert kinds(checker.check_bytes(asked(STORED, load([owner(0), VERSION], [owner(1), VERSION])))) == []


@pytest.mark.parametrize(
    ("kind", "chunk"),
    [
        ("another tenant's bytes", [owner(0, tenant=2), VERSION]),
        ("another chunk's bytes", [owner(0, prompt=9), VERSION]),
        ("another chunk's bytes", [owner(0, model=1), VERSION]),
        ("torn", "not of one store: None"),
        ("unknown store", [owner(0), VERSION + 1]),
    ],
)
def test_wrong_bytes_are_named(kind, chunk):
    assert kinds(checker.check_bytes(asked(STORED, load(chunk)))) == [kind]


def test_bytes_of_a_later_store_are_named():
    assert kinds(checker.check_bytes(asked(event(1, "store", 5.0, 6.0, True), load([owner(0), VERSION])))) == ["unknown store"]


def test_bytes_of_a_refused_store_are_named():
    refused = event(1, "store", 1.0, 2.0, False, client="lmcache")
    assert kinds(checker.check_bytes(asked(refused, load([owner(0), VERSION])))) == ["refused store"]


def test_stray_writes_are_named():
    assert kinds(checker.check_bytes(asked(STORED, load([owner(0), VERSION], stray=True)))) == ["stray write"]


def test_late_answers_are_named_unless_the_server_was_away():
    late = asked(event(1, "lookup", 0.0, checker.BOUND + 1, 0))
    assert kinds(checker.check_answers(late, [])) == ["late answer"]
    assert kinds(checker.check_answers(late, [Window("stop", 0.0, 2.0)])) == []
    assert kinds(checker.check_answers(late, [Window("cut", 0.0, 2.0, engines=(7,))])) == ["late answer"]


def test_missing_answers_are_named_unless_the_engine_was_killed():
    missing = asked(event(1, "lookup", 0.0, None, None), event(2, "lookup", 1.0, 2.0, 0))
    assert kinds(checker.check_answers(missing, [], killed={1})) == ["no answer"]
    assert kinds(checker.check_answers(asked(event(1, "lookup", 0.0, None, None)), [], killed={1})) == []
    never = asked(event(1, "store", 0.0, 90.0, "never", error="store: not within 90 s"))
    assert kinds(checker.check_answers(never, [Window("kill", 0.0, 1.0)])) == ["no answer"]


def test_refusals_are_named_unless_a_fault_is_near():
    refused = asked(event(1, "retrieve", 100.0, 100.1, False))
    assert kinds(checker.check_answers(refused, [Window("kill", 1.0, 2.0)])) == ["refused"]
    assert kinds(checker.check_answers(refused, [Window("kill", 98.0, 99.0)])) == []


def test_hits_beyond_the_prompt_are_named():
    assert kinds(checker.check_answers(asked(event(1, "lookup", 0.0, 0.1, 48)), [])) == ["wrong hit"]


def test_stores_are_guaranteed_until_something_removes_them():
    wanted = set(asked(STORED)[0].identities())
    assert checker.guaranteed(asked(STORED), [Window("stop", 3.0, 4.0)]) == wanted
    assert checker.guaranteed(asked(STORED), [Window("clear", 3.0, 4.0, removes=True)]) == set()
    of_lmcache = asked(STORED)
    of_lmcache[0].about["client"] = "lmcache"
    assert checker.guaranteed(of_lmcache, []) == wanted
    assert checker.guaranteed(of_lmcache, [Window("stop", 0.0, 0.1)]) == set()
    abandoned = event(2, "store", 1.5, None, None, engine=3, last=1)
    assert checker.guaranteed(asked(STORED, abandoned), []) == set(asked(STORED)[0].identities()[1:])


def test_lost_stores_are_named():
    audit = {"op": "audit", "tenant": 1, "model": 0, "prompt": 5, "least": 2}
    assert kinds(checker.check_audits([audit | {"hit": 1}])) == ["lost store"]
    assert kinds(checker.check_audits([audit | {"hit": 2}])) == []
    assert kinds(checker.check_kept({("a@1", 8), ("b@2", 8)}, {("a@1", 8)}, (), "fs-0")) == ["lost object"]
    assert kinds(checker.check_kept({("a@1", 8), ("b@2", 8)}, {("a@1", 8), ("c@3", 8)}, ("b",), "fs-0")) == []


IDLE = dict.fromkeys(
    ["leased", "being written", "staging bytes", "pending transfers", "withheld transfers", "sessions", "instances", "accounting errors",
     "panics", "connections"], 0,
)  # fmt: skip


@pytest.mark.parametrize("name", IDLE)
def test_leaks_are_named(name):
    assert kinds(checker.check_idle(IDLE | {name: 1})) == ["leak"]


def test_bytes_that_do_not_add_up_are_named():
    assert kinds(checker.check_idle(IDLE | {"bytes of l1": {"status": 8, "listing": 8}})) == []
    assert kinds(checker.check_idle(IDLE | {"bytes of l1": {"status": 8, "listing": 7}})) == ["accounting"]


def test_levels_above_their_bounds_are_named():
    assert kinds(checker.check_levels([{"threads": 5}, {"threads": 9}], {"threads": 8})) == ["bound"]


def test_painted_chunks_name_their_owner_and_any_other_byte_is_torn():
    owners = [paint.identity(1, 0, 5, chunk) for chunk in range(2)]
    layers = [paint.rows(owners, VERSION, layer) for layer in range(paint.LAYERS)]
    assert paint.read_chunks(layers) == [(owner_, VERSION) for owner_ in owners]
    layers[1][5, 4000] ^= 1
    found = paint.read_chunks(layers)
    assert found[0] == (owners[0], VERSION) and isinstance(found[1], str)
    layers[1] = paint.rows(owners, VERSION + 1, 1)
    assert all(isinstance(chunk, str) for chunk in paint.read_chunks(layers))
