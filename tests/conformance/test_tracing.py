"""Traces of requests, at a collector that is a real gRPC server. LMCache's own server has to pass the tests of its spans too."""

import re
import shutil
import subprocess

import grpc
import pytest
from kvrig import tiers
from kvrig.collector import Collector, Silent
from kvrig.engine import tokens
from kvrig.waiting import wait_until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from prometheus_client.openmetrics.parser import text_string_to_metric_families

CHUNK = 16

# Attributes of LMCache 0.5.6's spans, as its server was seen to send them.
ROOT = {
    "session_id", "hit_tokens", "requested_tokens", "hit_rate", "l1_hit_tokens", "l2_hit_tokens", "l1_hit_rate",
    "l2_hit_rate", "l1_hit_keys", "l2_hit_keys", "early_exit_reason",
}  # fmt: skip
LOOKUP = {
    "session_id", "found_count", "requested_tokens", "hit_tokens", "l1_hit_tokens", "l2_hit_tokens", "l1_hit_keys",
    "l2_hit_keys", "early_exit_reason", "model_name", "cache_salt",
}  # fmt: skip
STORE = {"session_id", "device", "model_name", "transfer_key", "stored_count", "engine_id", "total_bytes", "num_tokens"}
RETRIEVE = (STORE - {"stored_count"}) | {"retrieved_count", "cache_salt"}


@pytest.fixture
def collectors():
    """Make collectors: collectors(...) -> Collector. They end after the servers, if a test asks for them first."""
    made = []

    def make(**options):
        made.append(Collector(**options))
        return made[-1]

    yield make
    for collector in made:
        collector.stop()


@pytest.fixture
def collector(collectors):
    """A collector that listens."""
    return collectors().start()


def store(engine, prompt, salt=""):
    """A request that misses, stores its prompt and ends."""
    request, hit = engine.lookup(prompt, salt=salt)
    assert hit == 0
    blocks = engine.blocks_for(len(prompt))
    assert engine.worker.store(request, prompt, 0, len(prompt), blocks, salt)
    engine.end(request)
    return request


def retrieve(engine, prompt, salt=""):
    """A request that hits all of its prompt, loads it and ends."""
    request, hit = engine.lookup(prompt, salt=salt)
    assert hit == len(prompt)
    engine.worker.retrieve(request, prompt, 0, hit, engine.blocks_for(hit), salt)
    engine.end(request)
    return request


def metric(server, name, **labels):
    """The value of a series, 0 if it is not there."""
    wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
    pattern = rf"^{name}\{{{re.escape(wanted)}\}} (\S+)" if wanted else rf"^{name} (\S+)"
    found = re.search(pattern, server.get("/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


def lost(server, reason):
    """Spans that were lost so far."""
    return metric(server, "kvtier_trace_lost_spans_total", reason=reason)


# proves: docs/compare.md#traces
# proves: docs/metrics.md#spans
@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_shm", "engine_pickle", "cuda"])
def test_spans_of_requests_are_lmcaches(collector, serve, engines, mode, peer):
    """Names, parents, kinds of values and attributes of a miss that stores and of a hit that loads."""
    if peer and mode != "lmcache_driven":
        pytest.skip("LMCache's server has spans of what it copies itself, on a real GPU or a CPU")
    server = serve(mode, fresh=True, flags=collector.flags)
    engine = engines(server)
    prompt = tokens(4 * CHUNK)
    cold = collector.wait(store(engine, prompt), ["request", "mp.lookup_prefetch", "mp.store"])
    engine.wait_hit(prompt, len(prompt))
    warm = collector.wait(retrieve(engine, prompt), ["request", "mp.lookup_prefetch", "mp.retrieve"])
    for spans in (cold, warm):
        root = spans["request"]
        assert root.parent == "" and set(root.attributes) == ROOT
        for span in spans.values():
            assert span.trace == root.trace and span.kind == 1
            assert root.start <= span.start <= span.end <= root.end
            assert span is root or span.parent == root.id
        assert len({span.id for span in spans.values()}) == 3
    assert cold["request"].trace != warm["request"].trace

    root, lookup = warm["request"].attributes, warm["mp.lookup_prefetch"].attributes
    assert (root["hit_tokens"], root["requested_tokens"], root["hit_rate"]) == (64, 64, 1.0)
    assert (root["l1_hit_keys"], root["l2_hit_tokens"], root["early_exit_reason"]) == (4, 0, "")
    assert cold["request"].attributes["hit_rate"] == 0.0
    # As LMCache's: numbers are text, except the root's.
    assert set(lookup) == LOOKUP and lookup["found_count"] == "4" and lookup["l1_hit_tokens"] == "64"
    assert lookup["model_name"] == engine.model and lookup["cache_salt"] == ""
    moved = cold["mp.store"].attributes
    assert set(moved) == STORE and moved["stored_count"] == "4" and moved["num_tokens"] == "64"
    loaded = warm["mp.retrieve"].attributes
    assert set(loaded) == RETRIEVE and loaded["retrieved_count"] == "4"
    assert int(loaded["total_bytes"]) == int(moved["total_bytes"]) > 0
    assert moved["device"] in ("cuda" if mode == "cuda" else "cpu", moved["device"] if peer else "")
    assert re.fullmatch(rf"{re.escape(moved['session_id'])}#\d+", moved["transfer_key"])


@pytest.mark.ours("LMCache's metrics have no exemplars")
def test_metrics_have_traces_that_the_collector_has(collector, serve, engines):
    """Each kind of span has its duration in a bucket whose exemplar is the span's trace."""
    server = serve("engine_shm", fresh=True, flags=collector.flags)
    engine = engines(server)
    spans = collector.wait(store(engine, tokens(CHUNK)), ["request", "mp.lookup_prefetch", "mp.store"])
    wait_until(lambda: metric(server, "kvtier_trace_span_seconds_count", span="request"), 30, "the root's duration")
    families = text_string_to_metric_families(server.get("/metrics")[1])
    samples = next(family for family in families if family.name == "kvtier_trace_span_seconds").samples
    found = {sample.labels["span"]: sample.exemplar for sample in samples if sample.exemplar}
    assert set(found) == set(spans)
    for name, exemplar in found.items():
        span = spans[name]
        assert exemplar.labels == {"trace_id": span.trace}
        assert exemplar.value == pytest.approx((span.end - span.start) / 1e9)


# proves: docs/compare.md#traces
# proves: docs/metrics.md#spans
@pytest.mark.ours("these spans are ours")
def test_calls_of_tiers_are_below_their_lookup(collector, serve, engines, tmp_path):
    """A lookup that loads from a tier has a span for asking and one for loading."""
    server = serve("engine_shm", flags=[*collector.flags, *tiers.fs(tmp_path / "tier", max_capacity_gb=1)])
    engine = engines(server)
    prompt = tokens(2 * CHUNK)
    store(engine, prompt)
    wait_until(lambda: metric(server, "lmcache_mp_l2_store_completed_requests_total", l2_name="fs-0") > 0, 30, "a store in the tier")
    assert server.post("/cache/clear", {"tier": "l1"})[0] == 200
    spans = collector.wait(
        retrieve(engine, prompt), ["request", "mp.lookup_prefetch", "mp.retrieve", "l2.lookup", "l2.load"]
    )
    lookup = spans["mp.lookup_prefetch"]
    for name in ("l2.lookup", "l2.load"):
        call = spans[name]
        assert call.parent == lookup.id and call.trace == lookup.trace
        assert lookup.start <= call.start and call.end <= lookup.end
        assert call.attributes["l2_name"] == "fs-0"
        assert (call.attributes["objects"], call.attributes["succeeded_objects"]) == (2, 2)
    assert int(spans["mp.retrieve"].attributes["total_bytes"]) == spans["l2.load"].attributes["total_bytes"]
    assert lookup.attributes["l2_hit_tokens"] == "32" and lookup.attributes["l1_hit_tokens"] == "0"
    assert spans["request"].attributes["l2_hit_rate"] == 1.0


# proves: docs/metrics.md#spans
@pytest.mark.ours("these spans are ours")
@pytest.mark.parametrize("frees", [False, True])
def test_aborted_lookup_at_a_tier_ends_its_request(collector, serve, engines, tmp_path, frees):
    """A request that ends while its lookup waits for a tier is over with that lookup, not with its age."""
    inner = {"type": "fs", "base_path": str(tmp_path / "tier"), "max_capacity_gb": 1}
    slow = {"kind": "delay", "operation": "load", "delay_ms": 2000}
    server = serve("engine_shm", flags=[*collector.flags, *tiers.adapter("fault_inject", inner=inner, faults=[slow])])
    server.expect_trouble("fault_inject")
    engine = engines(server)
    prompt, request = tokens(2 * CHUNK), engine.new_request()
    store(engine, prompt)
    wait_until(lambda: metric(server, "lmcache_mp_l2_store_completed_requests_total", l2_name="fault_inject-0") > 0, 30, "a store")
    assert server.post("/cache/clear", {"tier": "l1"})[0] == 200
    engine.scheduler.maybe_submit_lookup_request(request, prompt)
    if frees:
        engine.abandon(request, prompt)
    else:
        engine.end(request)
    wait_until(lambda: any(span.name == "request" for span in collector.spans(request)), 30, "the root")
    # Calls of the tier that had not begun by then are not made.
    spans = {span.name: span for span in collector.spans(request)}
    assert {span.trace for span in spans.values()} == {spans["request"].trace}
    assert spans["mp.lookup_prefetch"].end <= spans["request"].end


# proves: docs/metrics.md#traces
@pytest.mark.ours("LMCache's spans have no resource and no error")
def test_resource_headers_tenants_and_failures(collector, serve, engines, tmp_path):
    """What a process says of itself, a token of the collector, a tenant by its hash, and why a retrieve failed."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    env = {
        "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20MARK",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
    }
    server = serve("engine_shm", flags=[*collector.flags, "--instance-id", "one", "--hash-salts", str(secret)], env=env)
    engine = engines(server)
    prompt = tokens(2 * CHUNK)
    spans = collector.wait(store(engine, prompt, "acme"), ["request", "mp.lookup_prefetch", "mp.store"])
    salt = spans["mp.lookup_prefetch"].attributes["cache_salt"]
    assert salt and salt != "acme", "the tenant's salt is in a trace"
    # No lookup has found this for the worker.
    request = engine.new_request()
    engine.worker.retrieve(request, prompt, 0, len(prompt), engine.blocks_for(len(prompt)), "acme")
    wait_until(lambda: collector.spans(request), 30, "the span of a failure")
    assert [span.failure for span in collector.spans(request)] == ["not_held"]
    resource = collector.resources[0]
    assert resource["service.name"] == "kvtier" and resource["service.instance.id"] == "one"
    assert resource["service.version"] and resource["deployment.environment"] == "test"
    assert collector.scopes[0] == "kvtier" and collector.headers[0]["authorization"] == "Bearer MARK"
    assert "MARK" not in str(server.get("/config")[1]) + server.tail(10_000)


# proves: docs/metrics.md#when-the-collector-fails
@pytest.mark.ours("LMCache's exporter is OpenTelemetry's")
def test_collector_that_comes_late_gets_all(collectors, serve, engines):
    """Requests are served while there is no collector; it gets their spans when it is there, and again after a restart."""
    collector = collectors()
    server = serve("engine_shm", flags=collector.flags)
    server.expect_trouble("traces could not be sent")
    engine = engines(server)
    first = store(engine, tokens(CHUNK))
    wait_until(lambda: "traces could not be sent" in server.tail(100), 30, "a warning")
    collector.start()
    names = ["request", "mp.lookup_prefetch", "mp.store"]
    collector.wait(first, names, timeout=60)
    collector.stop()
    second = store(engine, tokens(CHUNK))
    collector.start()
    collector.wait(second, names, timeout=60)
    wait_until(lambda: metric(server, "kvtier_trace_exported_spans_total") == 6, 30, "the count of spans")
    assert len({span.id for span in collector.spans()}) == 6
    assert "kvtier_trace_lost_spans_total{" not in server.get("/metrics")[1]
    # A warning for each time it was away at most, not one for each attempt.
    assert server.tail(10_000).count("traces could not be sent") <= 2


# proves: docs/compare.md#traces
# proves: docs/metrics.md#when-the-collector-fails
@pytest.mark.ours("LMCache's exporter is OpenTelemetry's")
def test_silent_collector_disturbs_no_request(serve, engines):
    """Spans wait in bounded memory for a collector that accepts connections and never answers; what is lost is counted."""
    silent = Silent()
    server = serve("engine_shm", flags=silent.flags)
    server.expect_trouble("traces could not be sent|stopped before the collector")
    engine = engines(server)
    prompt = tokens(CHUNK)
    store(engine, prompt)

    def some_lost():
        # 500 requests have 1000 spans, and 4096 may wait.
        for _ in range(500):
            request = engine.new_request()
            engine.scheduler.maybe_submit_lookup_request(request, prompt)
            engine.end(request)
        assert engine.hits(prompt) == CHUNK
        return lost(server, "buffer_full")

    wait_until(some_lost, 300, "lost spans")
    assert metric(server, "kvtier_trace_exported_spans_total") == 0
    engine.close()
    assert server.stop()[0] == 0
    assert "stopped before the collector had all traces" in server.tail(100)
    silent.close()


# proves: docs/metrics.md#when-the-collector-fails
@pytest.mark.ours("LMCache's exporter is OpenTelemetry's")
def test_refusals_of_the_collector(collectors, serve, engines):
    """A call that is refused for good is not repeated; one that may be repeated is; a part that is refused is counted."""
    answers = ["unavailable", "unauthenticated", "part"]

    def answer(context):
        kind = answers.pop(0) if answers else None
        if kind == "unavailable":
            context.abort(grpc.StatusCode.UNAVAILABLE, "later")
        if kind == "unauthenticated":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        if kind == "part":
            return trace_service_pb2.ExportTraceServiceResponse(partial_success={"rejected_spans": 1, "error_message": "full"})
        return None

    collector = collectors(answer=answer).start()
    server = serve("engine_shm", flags=collector.flags)
    server.expect_trouble("traces could not be sent|collector rejected traces")
    engine = engines(server)
    prompt = tokens(CHUNK)
    store(engine, prompt)
    wait_until(lambda: len(answers) <= 1, 60, "the second answer")
    wait_until(lambda: lost(server, "rejected") > 0, 60, "rejected spans")
    engine.hits(prompt)
    wait_until(lambda: metric(server, "kvtier_trace_exported_spans_total") > 0, 60, "exported spans")
    assert not answers
    # One kind of line does not silence the other.
    log = server.tail(10_000)
    assert "traces could not be sent" in log and "collector rejected traces" in log


# proves: docs/metrics.md#traces
@pytest.mark.ours("LMCache's server has no TLS")
def test_collector_behind_tls(collectors, serve, engines, tmp_path):
    """`https://` trusts the authorities of the system; here SSL_CERT_FILE names the only one."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    collector = collectors(credentials=credentials).start()
    server = serve("engine_shm", flags=collector.flags, env={"SSL_CERT_FILE": str(certificate)})
    request = store(engines(server), tokens(CHUNK))
    collector.wait(request, ["request", "mp.lookup_prefetch", "mp.store"])


# proves: docs/metrics.md#when-the-collector-fails
@pytest.mark.ours("LMCache's stop is not bounded")
def test_stop_sends_what_waits(collector, serve, engines):
    """A stop finishes open sessions and sends their spans."""
    server = serve("engine_shm", flags=collector.flags)
    engine = engines(server)
    request, _ = engine.lookup(tokens(CHUNK))
    engine.close()
    assert server.stop()[0] == 0
    assert sorted(span.name for span in collector.spans(request)) == ["mp.lookup_prefetch", "request"]
