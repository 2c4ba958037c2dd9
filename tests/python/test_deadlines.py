"""A worker that copies by itself stops at its transfers' deadlines: also between two chunks, and behind the last one."""

import pytest
from conftest import CHUNK
from kvrig.proxy import Proxy
from kvrig.server import free_port
from kvrig.waiting import wait_until
from kvtier import Prompt
from rig import Engine, tokens

# So many layers of so small pieces take tens of milliseconds to copy, and a server microseconds to prepare.
LAYERS, CHUNKS = 400, 15
PER_CHUNK = 4
BLOCKS = list(range(1, 1 + CHUNKS * PER_CHUNK))

PAST = "the transfer is past its deadline"


class Bed:
    """An engine with much to copy, and a proxy before its server."""

    def __init__(self, place):
        self.server = place.server()
        self.server.expect_trouble("instance|worker|register|deadline|prepared")
        self.proxy = Proxy(self.server.url, free_port())
        self.engine = Engine(self.proxy.url, heartbeat=600, layers=LAYERS)
        self.engine.healthy()
        self.native, self.number = self.engine.worker._worker, 0

    def submit(self, request, prompt, is_store, timeout):
        """Begin a transfer of the whole prompt that may take so long."""
        self.number += 1
        self.native.submit(
            self.number, Prompt(prompt), 0, len(prompt), request, "", [BLOCKS], is_store=is_store, timeout=timeout
        )

    def end(self, patience=30):
        """Its error, or none."""
        ended = []
        wait_until(lambda: ended.extend(self.native.take_finished(0.1)) or ended, patience, "its end")
        [(number, _, error, _)] = ended
        assert number == self.number
        return error

    def lent(self):
        """Transfers of which the server has not heard the end, and those that it has given up."""
        status = self.server.get("/status")[1]
        return status["pending_transfers"], status["withheld_transfers"]

    def close(self):
        """End all but the server, which is the fixture's."""
        self.engine.close()
        self.proxy.close()


@pytest.fixture
def bed(place):
    """See the class."""
    made = Bed(place)
    yield made
    made.close()


def looked_up(bed, prompt, fresh):
    """A request that may retrieve the prompt."""
    request = fresh()
    assert bed.engine.lookup(request, prompt) == len(prompt)
    return request


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "retrieve"])
def test_no_chunk_is_copied_behind_the_deadline(bed, fresh, is_store):
    """The server may have lent the memory to others by then. It hears of the end, and lends it anew."""
    prepare = "prepare_store" if is_store else "prepare_retrieve"
    cached = tokens(CHUNKS * CHUNK, "cached")
    if not is_store:
        bed.submit(fresh(), cached, True, 30.0)
        assert bed.end() is None
    # Long enough for the server to answer, and too short to copy all: found by trying, as machines differ.
    timeout, errors = 0.01, []
    for attempt in range(40):
        prompt = tokens(CHUNKS * CHUNK, f"late {attempt}") if is_store else cached
        request = fresh() if is_store else looked_up(bed, prompt, fresh)
        before = bed.proxy.seen.count((prepare, True))
        bed.submit(request, prompt, is_store, timeout)
        errors.append(bed.end())
        # One that was late before it began has asked for nothing.
        if errors[-1] == PAST and bed.proxy.seen.count((prepare, True)) > before:
            break
        timeout *= 0.7 if errors[-1] is None else 1.3
    else:
        pytest.fail(f"none ended between two chunks: {errors}")
    wait_until(lambda: bed.lent() == (0, 0), 30, "nothing to be lent")
    if is_store:
        bed.engine.healthy()
        assert bed.engine.lookup(fresh(), prompt) == 0


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "retrieve"])
def test_the_wait_for_a_commit_has_an_end(bed, fresh, is_store):
    """That of the transfer, and a second for a store, however long the client's other requests may take."""
    prompt, request = tokens(CHUNK * CHUNKS, "committed"), fresh()
    if not is_store:
        bed.submit(fresh(), prompt, True, 30.0)
        assert bed.end() is None
        request = looked_up(bed, prompt, fresh)
    bed.engine.worker.client.timeout = 60.0
    commit = "commit_store" if is_store else "commit_retrieve"
    bed.proxy.at(commit)
    bed.submit(request, prompt, is_store, 2.0)
    assert bed.end(20) == f"{commit}: no reply within the deadline"
    assert (commit, False) in bed.proxy.seen
    if is_store:
        # The server hears that it was given up. Of a retrieve, it takes back what it has lent to the worker's number.
        wait_until(lambda: bed.lent() == (0, 0), 30, "nothing to be lent")
    bed.engine.worker.client.timeout = 10.0
