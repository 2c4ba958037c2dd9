"""vLLM's connector with hostile requests and failures: each call ends as a miss, and the engine continues."""

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import CHUNK
from kvrig.waiting import wait_until
from rig import tokens

pytest.importorskip("vllm")

from kvtier.vllm import KvTierConnector, scheduling  # noqa: E402
from kvtier.vllm.guard import Errors, falls_back  # noqa: E402
from vllm_rig import Vllm, cache_config, request, vllm_config  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole  # noqa: E402


@pytest.fixture
def engine(place):
    """Returns an engine of one worker."""
    server = place.server()
    server.expect_trouble("store|retrieve|lookup|worker|register")
    made = Vllm(server)
    yield made
    made.close()


class Raising:
    """An adapter whose every call raises."""

    chunk_tokens, is_healthy, on_cuda = CHUNK, True, False

    def __getattr__(self, name):
        def raises(*arguments, **named):
            raise RuntimeError(f"{name} is broken")

        return raises


HOSTILE = {
    "surrogate salt": lambda: request("a", tokens(2 * CHUNK), salt="\ud800"),
    "surrogate id": lambda: request("\udfff", tokens(2 * CHUNK)),
    "salt of no key": lambda: request("a", tokens(2 * CHUNK), salt="a@b"),
    "salt of another type": lambda: request("a", tokens(2 * CHUNK), salt=7),
    "negative tokens": lambda: request("a", [-1] * 2 * CHUNK),
    "huge tokens": lambda: request("a", [2**70] * 2 * CHUNK),
    "tokens of another type": lambda: request("a", ["x"] * 2 * CHUNK),
    "fewer tokens than said": lambda: request("a", tokens(CHUNK), num_tokens=4 * CHUNK, num_prompt_tokens=4 * CHUNK),
    "a picture of another type": lambda: request("a", tokens(2 * CHUNK), mm_features=[object()]),
    "an adapter of another type": lambda: request("a", tokens(2 * CHUNK), lora_request=object()),
    "a count of another type": lambda: request("a", tokens(2 * CHUNK), num_tokens="many"),
}


# proves: docs/python.md#errors
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_requests_are_computed(engine, kind):
    """The next request is served."""
    hostile = HOSTILE[kind]()
    assert engine.match(hostile) == (0, False)
    engine.allocate(hostile, range(1, 9), 0)
    step = engine.step(new=[(hostile, range(1, 9), 0, 2 * CHUNK)])
    assert step.metadata.loads == []
    engine.finish(hostile)
    # No state of it is left, and other requests are served.
    assert engine.scheduler._scheduling.tracked == {}
    good = request("good", tokens(CHUNK + 1, kind))
    engine.prefill(good, range(11, 16))
    assert engine.match(request("again", tokens(CHUNK + 1, kind))) == (CHUNK, True)


def test_failing_scheduler_adapter_computes_all(engine):
    """Every method that vLLM calls returns, and the errors are counted."""
    engine.prefill(request("before", tokens(CHUNK + 1, "x")), range(1, 6))
    scheduler = engine.scheduler
    real, scheduler._scheduling.adapter = scheduler._scheduling.adapter, Raising()
    req = request("a", tokens(CHUNK + 1, "x"))
    assert scheduler.get_num_new_matched_tokens(req, 0) == (0, False)
    engine.allocate(req, range(11, 16), 0)
    assert scheduler.update_connector_output(None) is None
    step = engine.step(new=[(req, range(11, 16), 0, CHUNK + 1)])
    assert step.metadata.loads == [] and not step.failed
    assert engine.finish(req) in (True, False)
    assert list(scheduler.take_events()) == []
    assert scheduler.reset_cache() is True
    assert scheduler.build_connector_meta(None).loads == []
    scheduler._scheduling.adapter = real
    assert scheduler.get_kv_connector_stats().data["errors"] >= 3
    # The reset has happened nevertheless.
    assert engine.match(request("after", tokens(CHUNK + 1, "x"))) == (0, False)


def test_load_that_cannot_start_fails(engine, monkeypatch):
    """vLLM waits for its end, which every worker reports."""
    prompt = tokens(CHUNK + 1, "lost")
    engine.prefill(request("a", prompt), range(1, 6))

    def raises(*arguments):
        raise RuntimeError("as a bug has it")

    # When blocks are allocated, and when the step is built.
    for number, name in enumerate(["cleanup_lookup_result", "blocks_of_range"]):
        req = request(f"b{number}", prompt)
        assert engine.match(req) == (CHUNK, True)
        with monkeypatch.context() as patch:
            owner = engine.scheduler._scheduling.adapter if number == 0 else scheduling
            patch.setattr(owner, name, raises)
            engine.allocate(req, range(11, 16), CHUNK)
            step = engine.step()
        assert step.ended == {req.request_id} and step.failed == set(range(11, 16))
        assert engine.finish(req) is False


# proves: docs/python.md#errors
def test_failing_worker_adapter_ends_its_loads(engine):
    """Once no copy touches their blocks any more they have failed; requests that wait for stores continue."""
    prompt, worker = tokens(CHUNK + 1, "raise"), engine.workers[0]
    engine.prefill(request("a", prompt), range(1, 6))
    stores = request("s", tokens(CHUNK + 1, "stores"))
    engine.match(stores)
    engine.allocate(stores, range(31, 36), 0)
    engine.step(new=[(stores, range(31, 36), 0, CHUNK + 1)])
    req = request("b", prompt)
    assert engine.match(req) == (CHUNK, True)
    engine.allocate(req, range(11, 16), CHUNK)
    adapter, stopped = worker._adapter, []

    class Broken(Raising):
        def submit_retrieve_request(self, *arguments):
            return adapter.submit_retrieve_request(*arguments)

        def disable(self):
            stopped.append(adapter.disable())

    worker._adapter = Broken()
    held, _ = engine.scheduler.request_finished_all_groups(stores, ([],))
    assert held
    step = engine.step(finished=["s"])
    assert step.ended == {"b"} and step.failed == {11, 12, 13, 14}
    assert step.sent == [{"s"}] and len(stopped) == 1
    assert not adapter.is_healthy
    # This is final: the server has no worker of this model any more.
    assert engine.match(request("c", prompt)) == (0, False)
    assert worker.handle_preemptions(SimpleNamespace(preempted={"x"})) is None
    worker._adapter = adapter


def raises(*arguments, **named):
    """Raises, as a bug does."""
    raise RuntimeError("as a bug has it")


def test_disabled_worker_reports_all_stores(engine, monkeypatch):
    """Stores of the adapter, of the step, and of later steps: no request is held, and no store stays in flight."""
    worker, scheduling = engine.workers[0], engine.scheduler._scheduling
    adapter = worker._adapter
    # Stores do not end: the adapter does not collect their results.
    monkeypatch.setattr(adapter, "_poll", lambda: None)

    def starts(name, blocks):
        req = request(name, tokens(CHUNK + 1, name))
        assert engine.match(req) == (0, False)
        engine.allocate(req, blocks, 0)
        return req, (req, blocks, 0, CHUNK + 1)

    handed, first = starts("handed", range(1, 6))
    running, second = starts("running", range(11, 16))
    engine.step(new=[first, second])
    engine.scheduler.request_finished_all_groups(handed, ([],))
    assert engine.step(finished=["handed"]).sent == [set()], "its store goes on"
    monkeypatch.setattr(adapter, "get_finished", raises)
    late, third = starts("late", range(21, 26))
    assert engine.step(new=[third]).sent == [{"handed"}]
    assert scheduling.in_flight_stores == {}
    for req in (running, late):
        engine.scheduler.request_finished_all_groups(req, ([],))
    assert engine.step(finished=["running", "late"]).sent == [{"running", "late"}]
    # The scheduler does not know: its own server answers.
    after, fourth = starts("after", range(31, 36))
    assert len(engine.step(new=[fourth]).metadata.stores) == 1
    assert scheduling.in_flight_stores == {}


@pytest.mark.parametrize("broken", ["submit_store_request", "take_ended_stores", "_event"])
def test_store_that_cannot_start_has_ended(engine, monkeypatch, broken):
    """The scheduler keeps no state of it."""
    worker = engine.workers[0]
    monkeypatch.setattr(worker if broken == "_event" else worker._adapter, broken, raises)
    req = request("a", tokens(CHUNK + 1, broken))
    assert engine.match(req) == (0, False)
    engine.allocate(req, range(1, 6), 0)
    assert len(engine.step(new=[(req, range(1, 6), 0, CHUNK + 1)]).metadata.stores) == 1
    engine.step()
    assert engine.scheduler._scheduling.in_flight_stores == {}
    engine.finish(req)


def test_load_of_unreadable_step_fails(engine, monkeypatch):
    """Its blocks are reported: without them vLLM considers the load successful."""
    prompt = tokens(CHUNK + 1, "unread")
    engine.prefill(request("a", prompt), range(1, 6))
    req, build = request("b", prompt), engine.scheduler.build_connector_meta
    assert engine.match(req) == (CHUNK, True)
    engine.allocate(req, range(11, 16), CHUNK)
    with monkeypatch.context() as patch:
        unreadable = {"preempted_req_ids": 7}
        patch.setattr(engine.scheduler, "build_connector_meta", lambda step: build(SimpleNamespace(**{**vars(step), **unreadable})))
        steps = [engine.step()]
    steps.append(engine.step())
    assert [step.ended for step in steps] == [{"b"}, None] and steps[0].failed == set(range(11, 16))
    assert engine.scheduler._scheduling.tracked["b"].bypass, "it is computed"
    assert engine.finish(req) is False


def test_every_vllm_method_is_guarded():
    """All methods of the base class that the connector overrides, except those of the start."""
    free = {"__init__", "register_kv_caches", "build_kv_connector_stats", "build_prom_metrics"}
    # These do nothing.
    free |= {"wait_for_layer_load", "save_kv_layer", "requires_kv_delivery"}
    own = {name for name, value in vars(KvTierConnector).items() if inspect.isfunction(value)}
    called = {name for name in own if hasattr(KVConnectorBase_V1, name) or name == "request_finished_all_groups"} - free
    assert len(called) > 12
    assert {name for name in called if not hasattr(getattr(KvTierConnector, name), "__wrapped__")} == set()


def test_signals_and_panics(caplog):
    """Ctrl-C ends the engine; a panic of native code, which is no Exception, does not."""

    class Panic(BaseException):
        pass

    class Owner:
        errors = Errors(scheduling.logger)

        @falls_back(lambda: 7, by="also")
        def call(self, error):
            raise error

        def also(self, error):
            raise error

    assert Owner().call(Panic("bug")) == 7 and Owner.errors.take() == 2
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            Owner().call(error())
    caplog.clear()
    for _ in range(100):
        Owner().call(ValueError("often"))
    assert len(caplog.records) == 2, "one line for each place"


def test_older_vllm(place, monkeypatch):
    """Configurations that need missing features are refused at the start; missing fields are not read."""
    server = place.server()
    several = cache_config(["layer.0"])
    several.kv_cache_groups.append(cache_config(["layer.1"]).kv_cache_groups[0])
    monkeypatch.delattr(KVConnectorBase_V1, "get_transfer_results")
    with pytest.raises(ValueError, match="several groups of layers from vLLM 0.30 on"):
        KvTierConnector(vllm_config(server), KVConnectorRole.SCHEDULER, several)
    scheduler = KvTierConnector(vllm_config(server), KVConnectorRole.SCHEDULER, cache_config(["layer.0"]))
    output = SimpleNamespace(invalid_block_ids={1}, finished_recving=None, kv_connector_worker_meta=None)
    scheduler.update_connector_output(output)
    assert scheduler.errors.take() == 0
    scheduler.shutdown()


def test_sleep_mode_is_not_supported():
    """For every way in which vLLM reads it."""
    assert not KvTierConnector.supports_sleep_mode
    assert KvTierConnector.supports_sleep_mode() is False


def test_connector_starts_without_server(place):
    """Once there is a server, it finds hits, with requests computed before."""
    server = place.server(start=False)
    engine = Vllm(server, **{"kvtier.start": "without"})
    prompt = tokens(CHUNK + 1, "first")
    engine.prefill(request("a", prompt), range(1, 6))
    server.start()
    wait_until(lambda: engine.scheduler._scheduling.adapter.is_healthy and engine.workers[0]._adapter.is_healthy, 60, "healthy")
    engine.prefill(request("b", prompt), range(1, 6))
    assert engine.match(request("c", prompt)) == (CHUNK, True)
    engine.close()


def test_log_lines_have_vllm_format():
    """vLLM configures only its own logger; lines of this package look the same."""
    code = (
        "import logging, kvtier.vllm.logs\n"
        "import vllm.logger\n"
        "from vllm.config.logging import LoggingConfig\n"
        "vllm.logger.configure_logging(LoggingConfig())\n"
        "kvtier.vllm.logs.use_vllm_log()\n"
        "logging.getLogger('kvtier.worker').info('registered it')\n"
        "logging.getLogger('kvtier.worker').debug('not this')\n"
    )
    import os

    environment = {**os.environ, "VLLM_CONFIGURE_LOGGING": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "registered it" in line or "not this" in line]
    assert len(lines) == 1 and " INFO " in f" {lines[0]}", done.stdout + done.stderr
