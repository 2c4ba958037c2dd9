"""The release of vLLM that the connector is tested with, those that it serves by their sources, and newer ones."""

import inspect
import itertools
import logging
from pathlib import Path

import pytest
import signatures

pytest.importorskip("vllm")

import vllm  # noqa: E402
from kvtier.vllm.connector import KvTierConnector, _AlwaysFalse  # noqa: E402
from kvtier.vllm.releases import NEWEST_TESTED, note_untested  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402

RECORDED = signatures.recorded()
FORMS = sorted({(name, *form) for methods in RECORDED.values() for name, form in methods.items()})


# proves: docs/vllm.md#releases-of-vllm
def test_base_class_is_the_recorded_one():
    """A vLLM whose base class gained, lost or changed a method is noticed. One that is new may be one that the connector needs; one
    that was removed is called no more."""
    found = signatures.methods_of(Path(inspect.getsourcefile(KVConnectorBase_V1)).read_text())
    known = RECORDED[NEWEST_TESTED]
    assert {name: form for name, form in found.items() if known.get(name) != form} == {}
    assert sorted(known.keys() - found.keys()) == []
    assert signatures.release_of(vllm.__version__) == NEWEST_TESTED


def test_every_release_is_recorded():
    """From the first that the connector serves to the first that is untested."""
    assert list(RECORDED) == [(0, minor) for minor in range(19, NEWEST_TESTED[1] + 2)]
    assert all("get_num_new_matched_tokens" in methods for methods in RECORDED.values())


# proves: docs/compare.md#kvtiers-connector-for-vllm
# proves: docs/vllm.md#releases-of-vllm
@pytest.mark.parametrize("name, kind, parameters", [form for form in FORMS if form[0] in vars(KvTierConnector)])
def test_connector_takes_what_each_release_passes(name, kind, parameters):
    """By position and by name, and with nothing but what is required."""
    method = vars(KvTierConnector)[name]
    if isinstance(method, (property, _AlwaysFalse)):
        # The latter is the value and the result, whatever it is called with.
        assert "property" in kind or not isinstance(method, property)
        return
    assert ("classmethod" in kind) == isinstance(method, classmethod) and "property" not in kind
    # Releases whose constructor requires two arguments look at the number that a connector's requires.
    assert refused(getattr(method, "__func__", method), parameters, with_required=name != "__init__") == []


# proves: docs/vllm.md#releases-of-vllm
@pytest.mark.parametrize("release", RECORDED, ids=lambda release: ".".join(map(str, release)))
def test_no_abstract_method_is_left_out(release):
    """With one, vLLM could make no connector."""
    abstract = {name for name, (kind, _) in RECORDED[release].items() if kind.startswith("abstract ")}
    assert abstract and abstract <= vars(KvTierConnector).keys()


def test_method_without_a_parameter_is_noticed():
    """A parameter that a release passes and the method lacks, has under another name, or requires beside them."""
    assert refused(lambda self, request, blocks=None, **more: None, "request, blocks=, **kwargs") == []
    for method in (
        lambda self, request, **more: None,
        lambda self, request, block_ids=None, **more: None,
        lambda self, request, blocks=None, *, count, **more: None,
        lambda self, request, blocks=None: None,
        lambda self, request, blocks, **more: None,
    ):
        assert refused(method, "request, blocks=, **kwargs") != []


def refused(method, parameters, with_required=True):
    """How a caller may pass these parameters that the method does not take."""
    names = parameters.split(", ") if parameters else []
    positional = list(itertools.takewhile(lambda name: not name.startswith("*"), names))
    by_name = [name for name in names[len(positional) :] if not name.startswith("*")]
    more = {"added_later": 0} if any(name.startswith("**") for name in names) else {}
    needed = [name for name in positional if not name.endswith("=")]
    every = [name.removesuffix("=") for name in positional + by_name]
    calls = [
        (positional, {name.removesuffix("="): 0 for name in by_name} | more),
        ([], dict.fromkeys(every, 0) | more),
    ]
    if with_required:
        calls.append((needed, {name: 0 for name in by_name if not name.endswith("=")}))
    # Under another name it would end among the additional ones.
    problems = [f"no parameter {name}" for name in every if name not in inspect.signature(method).parameters]
    for values, named in calls:
        try:
            inspect.signature(method).bind("self", *values, **named)
        except TypeError as error:
            problems.append(f"{error}: {values} {list(named)}")
    return problems


@pytest.mark.parametrize("version", ["0.33.0", "0.100.1rc2.dev3+cpu", "1.0"])
def test_newer_release_is_said(caplog, version):
    """It is no failure: one line in the log."""
    with caplog.at_level(logging.WARNING, "kvtier"):
        note_untested(version)
    assert [record.message for record in caplog.records] == [
        f"untested release: this vLLM is {version}, and the connector is tested up to 0.32"
    ]


@pytest.mark.parametrize("version", [vllm.__version__, "0.19.0", "0.32.9", "dev"])
def test_tested_release_is_not_mentioned(caplog, version):
    """Nor one whose number is unknown."""
    note_untested(version)
    assert not caplog.records


def test_connector_says_it_once(place, engines, caplog, monkeypatch):
    """By the scheduler's side, not by each worker."""
    monkeypatch.setattr("kvtier.vllm.connector.__version__", "0.99.0")
    with caplog.at_level(logging.WARNING, "kvtier"):
        engines(place.server(), ranks=2)
    assert sum("untested release" in record.message for record in caplog.records) == 1
