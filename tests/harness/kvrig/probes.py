"""Requests that the adapters of a release never or rarely send, through its own request client."""

from lmcache.v1.multiprocess import custom_types

from . import older
from .engine import tokens
from .waiting import wait_until

try:
    from lmcache.v1.multiprocess.mq import MessageQueueClient
    from lmcache.v1.multiprocess.protocol import RequestType, get_payload_classes, get_response_class
except ImportError:  # from 0.5.6 on
    from lmcache.v1.multiprocess.rpc import get_rpc_specs
    from lmcache.v1.multiprocess.transport.zmq_impl.mq import MessageQueueClient

    SPECS = {name.upper(): spec for name, spec in get_rpc_specs().items()}
    PAYLOADS = {name: len(spec.payload_types) for name, spec in SPECS.items()}

    def send(client, name, payloads):
        """Send a request; defaults are added."""
        return client.submit_request(name.lower(), list(SPECS[name].bind_payloads(payloads, {})))

else:
    PAYLOADS = {kind.name: len(get_payload_classes(kind)) for kind in RequestType}

    def send(client, name, payloads):
        """Send a request."""
        kind = RequestType[name]
        return client.submit_request(kind, list(payloads), get_response_class(kind))


TIMEOUT = 60


def ask(client, name, *payloads):
    """The answer to a request, whose payloads are cut to those that the release has, from the front."""
    own = payloads[max(0, len(payloads) - PAYLOADS[name]) :]
    return send(client, name, own).result(timeout=TIMEOUT)


def check(engine, store):
    """All of them. `store` stores a prompt of n chunks and returns it and its bytes."""
    client = MessageQueueClient(engine.url, engine.context)
    try:
        _check(engine, store, client)
    finally:
        client.close()


def _check(engine, store, client):
    assert ask(client, "GET_CHUNK_SIZE") == engine.chunk
    assert isinstance(ask(client, "NOOP"), str)
    assert ask(client, "PING", None) is True
    if PAYLOADS["PING"]:
        assert ask(client, "PING", 1) is False, "no worker has this id"
    (prompt, _), readers = store(3), 1

    def lookup():
        request = engine.new_request()
        key = engine.scheduler._create_key(older.packed(prompt), start=0, end=len(prompt), request_id=request).no_worker_id_version()
        job = ask(client, "LOOKUP", key, readers)
        assert isinstance(job, int) if older.TRAITS.job_ids else job is None
        return request, key, request if job is None else job

    def poll(name, job):
        """The answer, which is nil until the lookup is done."""
        box = []
        wait_until(lambda: box.append(ask(client, name, job)) or box[-1] is not None, TIMEOUT, name)
        return box[-1]

    def end(request, key):
        assert ask(client, "FREE_LOOKUP_LOCKS", key, readers) is None
        assert ask(client, "END_SESSION", request) is None

    request, key, job = lookup()
    if "QUERY_PREFETCH_LOOKUP_HITS" in PAYLOADS:
        # It does not consume: the same again, and then the status.
        assert [poll("QUERY_PREFETCH_LOOKUP_HITS", job) for _ in range(2)] == [3, 3]
    assert poll("QUERY_PREFETCH_STATUS", job) == 3
    end(request, key)
    if "WAIT_PREFETCH_STATUS" in PAYLOADS:
        request, key, job = lookup()
        assert ask(client, "WAIT_PREFETCH_STATUS", job, 5.0) == 3
        end(request, key)
    if older.TRAITS.job_ids:
        # A job that does not exist: "pending" would never end.
        assert ask(client, "QUERY_PREFETCH_STATUS", 1) == 0
    if "REPORT_BLOCK_ALLOCATION" in PAYLOADS:
        record = custom_types.BlockAllocationRecord(req_id="r", new_block_ids=[1, 2], new_token_ids=tokens(8))
        assert ask(client, "REPORT_BLOCK_ALLOCATION", 7, engine.model, [record]) is None
    assert engine.hits(prompt) == len(prompt)
    assert ask(client, "CLEAR") is None
    assert engine.hits(prompt) == 0
