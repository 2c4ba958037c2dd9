"""The caller's trace reaches the server's spans, by the adapters and by vLLM's connector."""

import pytest
from conftest import CHUNK
from kvrig.collector import Collector
from kvrig.waiting import wait_until
from rig import tokens

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector():
    """A collector that listens; it ends after the servers."""
    collector = Collector().start()
    yield collector
    collector.stop()


def roots(collector):
    """Names of the requests whose root has come."""
    return {span.attributes["session_id"]: span for span in collector.spans() if span.name == "request"}


# proves: docs/metrics.md#the-engines-trace
def test_spans_are_in_the_caller_s_trace(collector, place):
    """A sampled parent has the request below it; one that is not sampled leaves it out; an invalid one is ignored."""
    engine = place.engine(place.server(flags=collector.flags))
    scheduler, prompt = engine.scheduler, tokens(CHUNK)
    parents = {
        "sampled": f"00-{TRACE}-{SPAN}-01",
        "not sampled": f"00-{TRACE}-{SPAN}-00",
        "invalid": "00-" + 5000 * "x",
        "none": None,
    }
    for name, parent in parents.items():
        scheduler.maybe_submit_lookup_request(name, token_ids=prompt, traceparent=parent)
        wait_until(lambda name=name: scheduler.check_lookup_result(name) is not None, 60, "a lookup")
        scheduler.end_session(name)
    wait_until(lambda: "none" in roots(collector), 30, "roots")
    found = roots(collector)
    assert set(found) == {"sampled", "invalid", "none"}
    assert (found["sampled"].trace, found["sampled"].parent) == (TRACE, SPAN)
    # Sampled, and below a span of another process.
    assert found["sampled"].flags == 0x301
    for name in ("invalid", "none"):
        assert found[name].parent == "" and found[name].trace != TRACE and found[name].flags == 0x101
    lookups = [span for span in collector.spans("sampled") if span.name == "mp.lookup_prefetch"]
    assert [(span.trace, span.parent) for span in lookups] == [(TRACE, found["sampled"].id)]


def test_connector_passes_vllm_s_trace_headers(collector, place, engines):
    """vLLM keeps the headers of a request that it traces."""
    vllm_rig = pytest.importorskip("vllm_rig")
    engine = engines(place.server(flags=collector.flags))
    prompt = engine.stored(CHUNK + 1, "traced")
    req = vllm_rig.request("b", prompt, trace_headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert engine.match(req) == (CHUNK, True)
    engine.load(req, range(11, 16), 0, CHUNK)
    engine.finish(req)
    wait_until(lambda: any(span.trace == TRACE for span in roots(collector).values()), 30, "the root")
    traced = [span for span in collector.spans() if span.trace == TRACE]
    assert {span.name for span in traced} == {"request", "mp.lookup_prefetch", "mp.retrieve"}
    # The store before is a request without a parent.
    assert all(span.trace != TRACE for span in collector.spans() if span.name == "mp.store")
