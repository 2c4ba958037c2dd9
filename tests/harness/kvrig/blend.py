"""The requests of an engine that blends, by LMCache's request client. No public engine sends them."""

from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap

from .waiting import wait_until

FLAGS = ["--engine-type", "blend"]


def ask(engine, operation, *payloads):
    """The answer to one request: of the scheduler if it looks up, otherwise of the worker."""
    looks_up = operation == "cb_unified_lookup"
    (client,) = engine.scheduler.req_clients.values() if looks_up else [engine.worker.adapter.req_client]
    return getattr(client, operation)(*payloads).result(timeout=engine.deadline)


def register_rope(engine, tables, head_size, group_to_table=(0,), quant="", instance=None):
    """Register cosines and sines, `[position, head_size]` each. The engine keeps them: they end with the memory."""
    engine.rope = tables
    wrapped = [migrate_to_shm_and_wrap(table) for table in tables]
    groups, window = list(group_to_table), [[0, head_size]] if group_to_table else []
    instance = instance or engine.worker.adapter.instance_id
    return ask(engine, "cb_register_rope", instance, wrapped, head_size, True, groups, window, [head_size], quant)


def lookup(engine, prompt, request, salt=""):
    """Prefix and segments of a prompt, polled until everything is loaded."""
    key = engine.scheduler._create_key(prompt, 0, len(prompt), request, salt)
    what = f"blend lookup of {request}"
    return wait_until(lambda: ask(engine, "cb_unified_lookup", key, engine.ranks), engine.deadline, what)


def end(engine, prompt, request, found, salt=""):
    """End a request that does not retrieve what it has found."""
    if found.prefix_coverage_tokens:
        engine.abandon(request, prompt, salt)
    else:
        engine.end(request)


def segments(engine, prompt, salt=""):
    """What a lookup finds beyond the prefix, as (position where it was stored, position in the prompt); nothing stays leased."""
    request = engine.new_request()
    found = lookup(engine, prompt, request, salt)
    end(engine, prompt, request, found, salt)
    return positions(found.non_prefix_segments)


def positions(matches):
    """Where each match was stored, and where it is in the prompt."""
    return [(match.old_st, match.cur_st) for match in matches]


def retrieve(engine, prompt, request, matches, blocks, salt="", instance=None, worker=None):
    """Whether the server has written all matches into the blocks of the prompt, for the first worker or this one."""
    adapter = (worker or engine.worker).adapter
    key = adapter._create_key(prompt, 0, len(prompt), request, salt)
    payloads = matches, [blocks], instance or adapter.instance_id, b"stub_ipc_handle"
    return adapter.req_client.cb_retrieve_pre_computed(key, *payloads).result(timeout=engine.deadline)[1]
