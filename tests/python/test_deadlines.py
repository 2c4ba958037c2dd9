"""A worker that copies by itself stops at its transfers' deadlines, also between two chunks and after the last one."""

import pytest
from conftest import CHUNK
from kvrig.proxy import Proxy
from kvrig.server import free_port
from kvrig.waiting import wait_until
from kvtier import Prompt
from rig import Engine, tokens

# This number of layers with small pieces takes tens of milliseconds to copy, and microseconds to prepare.
LAYERS, CHUNKS = 400, 15
PER_CHUNK = 4
BLOCKS = list(range(1, 1 + CHUNKS * PER_CHUNK))

PAST = "the transfer is past its deadline"


class Context:
    """An engine with large copies, and a proxy before its server."""

    def __init__(self, place):
        self.server = place.server()
        self.server.expect_trouble("instance|worker|register|deadline|prepared")
        self.proxy = Proxy(self.server.url, free_port())
        self.engine = Engine(self.proxy.url, heartbeat=600, layers=LAYERS)
        self.engine.healthy()
        self.native, self.number = self.engine.worker._worker, 0

    def submit(self, request, prompt, is_store, timeout):
        """Begins a transfer of the whole prompt with this timeout."""
        self.number += 1
        self.native.submit(
            self.number, Prompt(prompt), 0, len(prompt), request, "", [BLOCKS], is_store=is_store, timeout=timeout
        )

    def end(self, patience=60):
        """Returns its error, or None."""
        ended = []
        wait_until(lambda: ended.extend(self.native.take_finished(0.1)) or ended, patience, "its end")
        [(number, _, error, _)] = ended
        assert number == self.number
        return error

    def granted(self):
        """Returns the server's pending transfers, and its expired ones."""
        status = self.server.get("/status")[1]
        return status["pending_transfers"], status["withheld_transfers"]

    def close(self):
        """Ends all except the server, which the fixture ends."""
        self.engine.close()
        self.proxy.close()


@pytest.fixture
def context(place):
    """Factory of contexts."""
    made = Context(place)
    yield made
    made.close()


def looked_up(context, prompt, fresh):
    """Looks the prompt up; returns the request's id."""
    request = fresh()
    assert context.engine.lookup(request, prompt) == len(prompt)
    return request


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "retrieve"])
def test_no_chunk_is_copied_after_deadline(context, fresh, is_store):
    """The server may have reused the memory by then. It receives the end of the transfer, and grants the memory again."""
    prepare = "prepare_store" if is_store else "prepare_retrieve"
    cached = tokens(CHUNKS * CHUNK, "cached")
    if not is_store:
        context.submit(fresh(), cached, True, 30.0)
        assert context.end() is None
    # Long enough for the answer, too short to copy all. Found by trying, since machines differ.
    timeout, errors = 0.01, []
    for attempt in range(200):
        prompt = tokens(CHUNKS * CHUNK, f"late {attempt}") if is_store else cached
        request = fresh() if is_store else looked_up(context, prompt, fresh)
        before = context.proxy.seen.count((prepare, True))
        context.submit(request, prompt, is_store, timeout)
        errors.append(context.end())
        # A transfer that was late before it began has sent nothing.
        if errors[-1] == PAST and context.proxy.seen.count((prepare, True)) > before:
            break
        timeout *= 0.7 if errors[-1] is None else 1.3
    else:
        pytest.fail(f"none ended between two chunks: {errors}")
    wait_until(lambda: context.granted() == (0, 0), 60, "nothing to be granted")
    if is_store:
        context.engine.healthy()
        assert context.engine.lookup(fresh(), prompt) == 0


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "retrieve"])
def test_wait_for_commit_is_bounded(context, fresh, is_store):
    """By the transfer's timeout, plus a second for a store, independent of the client's other timeouts."""
    prompt, request = tokens(CHUNK * CHUNKS, "committed"), fresh()
    if not is_store:
        context.submit(fresh(), prompt, True, 30.0)
        assert context.end() is None
        request = looked_up(context, prompt, fresh)
    context.engine.worker.client.timeout = 600.0
    commit = "commit_store" if is_store else "commit_retrieve"
    context.proxy.at(commit)
    context.submit(request, prompt, is_store, 5.0)
    assert context.end(60) == f"{commit}: no reply within the deadline"
    assert (commit, False) in context.proxy.seen
    if is_store:
        # The server receives the abandoned store. Of a retrieve, it frees what it granted to the worker's old id.
        wait_until(lambda: context.granted() == (0, 0), 60, "nothing to be granted")
    context.engine.worker.client.timeout = 10.0
