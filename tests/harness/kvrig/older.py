"""How the clients of LMCache's releases differ: a table by release, and what the simulated engines need of it.

Import this before `lmcache`: see `provide_c_ops`. Differences that the adapters' own signatures show are not in the table;
`accepted` reads them there.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path



def numbers(release):
    """The numbers of a release; a candidate has those of the release that it is for."""
    return tuple(map(int, re.match(r"(\d+)\.(\d+)\.(\d+)", release).groups()))


RELEASE = numbers(importlib.metadata.version("lmcache"))


@dataclass(frozen=True)
class Traits:
    """What a release does."""

    # Transfer modes of its workers, as `server.MODES` names them.
    modes: tuple
    # Their names in the client's configuration, where it has one.
    transfer_modes: dict
    # Lookups return a job id, by which their state is queried.
    job_ids: bool
    # Keys have a salt.
    salts: bool
    # A worker registers again after the server was away.
    registers_again: bool
    # Block ids are a list per layer group, and not one list.
    groups: bool
    # The worker's instance id is that of its process.
    process_ids: bool
    # Which MLA ranks store: "all", or one, which is the choice of the "connector" or of the "adapter".
    mla_writers: str
    # Token ids are packed before they are passed.
    packed: bool
    # The chunk size is negotiated: a client of another one than the server's stays away from it.
    negotiates: bool


# Each row changes what the rows above it have.
TABLE = {
    (0, 4, 2): {"modes": ("cuda",), "transfer_modes": {}, "job_ids": True, "salts": False, "registers_again": False,
                "groups": False, "process_ids": True, "mla_writers": "all", "packed": False, "negotiates": False},
    (0, 4, 4): {"job_ids": False, "salts": True},
    (0, 4, 5): {"registers_again": True},
    (0, 4, 6): {"modes": ("cuda", "engine_pickle")},
    (0, 4, 7): {"modes": ("cuda", "engine_pickle", "engine_shm", "lmcache_driven"), "groups": True, "mla_writers": "connector",
                "transfer_modes": {"lmcache_driven": "handle", "engine_driven": "data"}},
    (0, 5, 0): {"process_ids": False, "transfer_modes": {}},
    (0, 5, 2): {"mla_writers": "adapter"},
    (0, 5, 7): {"packed": True, "negotiates": True},
}  # fmt: skip


def traits_of(release):
    """The table's traits of a release."""
    traits = {}
    for first, changes in TABLE.items():
        if first <= release:
            traits |= changes
    return Traits(**traits)


TRAITS = traits_of(RELEASE)


def provide_c_ops():
    """Puts the Python form of LMCache's compiled operations where 0.4.2 to 0.4.4 import the compiled one.

    These releases import it if torch has a GPU, and it needs NVIDIA's libraries. The first to bring a Python form is 0.4.4,
    which is unpacked beside the others.
    """
    if RELEASE < (0, 4, 5):
        package = Path(importlib.util.find_spec("lmcache").origin).parent
        source = package.parents[1] / "0.4.4" / "lmcache" / "non_cuda_equivalents.py"
        spec = importlib.util.spec_from_file_location("lmcache.c_ops", source)
        module = importlib.util.module_from_spec(spec)
        sys.modules["lmcache.c_ops"] = module
        spec.loader.exec_module(module)


provide_c_ops()

import torch  # noqa: E402
from lmcache.integration.vllm import utils, vllm_multi_process_adapter  # noqa: E402


def first_of(*places):
    """The module or attribute (`module:attribute`) that exists; None if none does."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        return getattr(found, name) if name else found
    return None


# Shared memory of CPU tensors, from 0.4.7 on, and what describes a layer group.
shm = first_of("lmcache.v1.platform.devices.cpu.shm", "lmcache.v1.platform.cpu.shm")
EngineGroupInfo = first_of("lmcache.v1.multiprocess.group_view:EngineGroupInfo")


def accepted(function, values):
    """Those of `values` that `function` has parameters for."""
    return {name: values[name] for name in inspect.signature(function).parameters if name in values}


def adapter_arguments(adapter_class, url, context, model, block_tokens, parallel, extra_config):
    """The constructor arguments of an adapter class; `parallel` is what `strategy` takes."""
    prefix = "lmcache.mp."
    own = {name.removeprefix(prefix): value for name, value in extra_config.items()}
    mode = own["mp_transfer_mode"]
    values = {
        "server_url": url,
        "server_urls": [url],
        "context": context,
        "model_name": model,
        "vllm_block_size": block_tokens,
        "required_chunk_alignment": block_tokens,
        # The connector derives these.
        "world_size": parallel["kv_world_size"],
        "kv_rank": parallel["kv_worker_id"],
        "tp_size": parallel["tp_size"],
        "parallel_strategy": strategy(parallel),
        "mq_timeout": own["mq_timeout"],
        "heartbeat_interval": own["heartbeat_interval"],
        "extra_config": {**extra_config, prefix + "mp_transfer_mode": TRAITS.transfer_modes.get(mode, mode)},
    }
    return accepted(adapter_class, values)


def parallel(ranks, rank, mla):
    """All names that releases have for the place of a rank among tensor-parallel ranks."""
    return {
        "use_mla": mla,
        "mla_only": mla,
        # An object of an MLA model is the same on all ranks.
        "kv_world_size": 1 if mla else ranks,
        "kv_worker_id": 0 if mla else rank,
        "actual_world_size": ranks,
        "actual_worker_id": rank,
        "vllm_world_size": ranks,
        "vllm_worker_id": rank,
        "tp_size": ranks,
        "pp_size": 1,
        "n_servers": 1,
    }


def strategy(parallel):
    """The release's form of a rank's place; None up to 0.4.3, which has no such class."""
    form = getattr(vllm_multi_process_adapter, "ParallelStrategy", None)
    return form and form(**accepted(form, parallel))


def block_ids(groups):
    """The block ids of a transfer, from one list per group."""
    if TRAITS.groups:
        return groups
    (only,) = groups
    return only


def packed(prompt):
    """A prompt as adapters take it."""
    if TRAITS.packed:
        return importlib.import_module("lmcache.v1.multiprocess.token_codec").pack_token_ids(prompt)
    return prompt


def prompt_of(prompt):
    """The argument by which a transfer has its prompt."""
    return {"token_bytes" if TRAITS.packed else "token_ids": packed(prompt)}


def salted(salt):
    """The argument by which a salt is passed."""
    if TRAITS.salts:
        return {"cache_salt": salt}
    assert not salt, "this release has no salts"
    return {}


def stores(adapter):
    """Whether the connector of the release calls this worker's store."""
    return TRAITS.mla_writers != "connector" or adapter.is_kv_writer


def has_verdict(adapter):
    """Whether a store of this worker is sent, and so answered."""
    return TRAITS.mla_writers == "all" or adapter.is_kv_writer


def register(adapter, tensors, infos, hints):
    """Registers layers."""
    known = {"layout_hints": hints} if "layout_hints" in inspect.signature(adapter.register_kv_caches).parameters else {}
    if not known:  # up to 0.5.4, which asks vLLM for them, where it looks the function up
        for module in (utils, vllm_multi_process_adapter):
            module.vllm_layout_hints = lambda: dict(hints)
    adapter.register_kv_caches(tensors, *([infos] if TRAITS.groups else []), **known)


def recorded_event():
    """The event that a transfer waits for, as connectors up to 0.5.4 make it."""
    try:
        from lmcache import torch_dev
    except ImportError:  # 0.4.2
        torch_dev = torch.cuda
    event = torch_dev.Event(interprocess=True)
    event.record(None)
    return event


def shut_down(adapter):
    """Ends an adapter; those up to 0.4.7 leave their heartbeats running, and their scheduler's its connection open."""
    heartbeat = getattr(adapter, "_heartbeat", None)
    if RELEASE < (0, 5, 0) and heartbeat is not None:
        heartbeat.stop()
    if hasattr(adapter, "shutdown"):
        adapter.shutdown()
    else:
        adapter.mq_client.close()


def end(context):
    """Ends a ZMQ context; clients up to 0.4.5 leave sockets open, for which it would wait."""
    if RELEASE < (0, 4, 6):
        context.destroy(linger=0)
    else:
        context.term()
