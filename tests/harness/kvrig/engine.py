"""A simulated inference engine around LMCache's own scheduler and worker adapters.

Nothing of the client is replaced (but one lock, see below): the adapters, their transfer contexts, heartbeats and
wire code are LMCache's. Only the model is missing: paged KV tensors hold random bytes. What earlier releases do
differently is in `older`.
"""

import random
import threading
from dataclasses import dataclass, field

import torch
import zmq

from . import layouts, older  # isort: skip  (before LMCache's modules)
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
)

from .waiting import wait_until

# The tensors are small: more threads would wait for each other, and for the server, longer than they work.
torch.set_num_threads(1)

# The client registers tensors under this lock, and takes it again when tensors of an earlier engine are collected as
# garbage: in one process with many engines that is the same thread, now and then, which would wait for itself.
if older.shm:
    older.shm._CPU_SHM_LOCK = threading.RLock()


@dataclass(frozen=True)
class Group:
    """Layers that share one paged block space."""

    layout: layouts.Layout
    layers: int = 3
    engine_group: int = 0
    window: int = -1  # sliding window in tokens, -1 = full attention


@dataclass
class Retrieved:
    """Outcome of a retrieve, as the engine sees it."""

    ok: bool
    error_blocks: set = field(default_factory=set)


def tokens(count, seed=None):
    """A random prompt; ids cover the whole 32-bit range some models and multimodal hashes use."""
    source = random.Random(seed) if seed is not None else random
    return [source.choice((source.randrange(128), source.randrange(70_000), source.randrange(1 << 32))) for _ in range(count)]


class Worker:
    """One engine rank: its KV tensors and LMCache's worker adapter."""

    adapter_class = LMCacheMPWorkerAdapter

    def __init__(self, engine, rank, generator):
        self.engine, self.rank, self.closed = engine, rank, False
        self.adapter = self.adapter_class(**engine.adapter_arguments(LMCacheMPWorkerAdapter, rank))
        if older.TRAITS.process_ids:
            # Elsewhere each rank is a process of its own. A process id has 22 bits.
            self.adapter.instance_id += (16 * engine.process + rank) << 22
        self.stores = {}  # request id -> future, also after the adapter has forgotten it
        self.held_events = {}  # request id -> event; it must exist until the server has answered
        self.layers = []  # (tensor, group) of every layer, in registration order
        for group in engine.groups:
            self.layers += [(t, group) for t in layouts.allocate(group.layout, group.layers, generator)]

    def register(self, infos=None):
        """Register all layers; `infos` replaces the honest group description."""
        named = {f"layer.{i}": tensor for i, tensor in enumerate(self.tensors())}
        infos = self.engine.group_infos() if infos is None else infos
        older.register(self.adapter, named, infos, self.engine.groups[0].layout.hints)

    def tensors(self):
        """The tensors that are registered."""
        return [tensor for tensor, _ in self.layers]

    def recorded_event(self):
        """The event that a transfer waits for, as the connector of the release makes it."""
        if hasattr(self.adapter, "create_recorded_event"):
            return self.adapter.create_recorded_event()
        return older.recorded_event()

    def pull(self):
        """Bring what the tensors stand for into them: here they are the memory itself."""

    def push(self):
        """Bring the tensors to what they stand for."""

    def read(self, blocks, group=None):
        """Bytes of these blocks in every layer (of one engine group)."""
        return [
            layouts.read_blocks(t, g.layout.block_axis, blocks)
            for t, g in self.layers
            if group is None or g.engine_group == group
        ]

    def write(self, blocks, rows, group=None):
        """Overwrite these blocks with bytes as `read` returns them."""
        layers = [(t, g) for t, g in self.layers if group is None or g.engine_group == group]
        for (t, g), layer in zip(layers, rows, strict=True):
            layouts.write_blocks(t, g.layout.block_axis, blocks, layer)

    def fill(self, blocks, value=0, group=None):
        """Overwrite these blocks in every layer (of one engine group)."""
        for t, g in self.layers:
            if group is None or g.engine_group == group:
                layouts.fill_blocks(t, g.layout.block_axis, blocks, value)

    def store(self, request, prompt, start, end, blocks, salt=""):
        """Store [start, end) from `blocks`; the verdict the adapter gets from the server."""
        self.submit_store(request, prompt, start, end, blocks, salt)
        return self.finish_store(request)

    def submit_store(self, request, prompt, start, end, blocks, salt=""):
        """Send a store without waiting for its end."""
        op = LoadStoreOp(
            **older.prompt_of(prompt), block_ids=older.block_ids(_per_group(blocks)), start=start, end=end
        )
        if older.stores(self.adapter):
            event = self.held_events[request] = self.recorded_event()
            self.adapter.submit_store_request(request, op, event, **older.salted(salt))
        self.stores[request] = self.adapter.store_futures.get(request)

    def finish_store(self, request):
        """Wait for a submitted store the way vLLM does, by polling; True, False, or None when none was sent."""
        future = self.stores.pop(request)
        if future is None:
            return None
        wait_until(future.query, self.engine.deadline, f"store of {request}")
        verdict = future.result(timeout=0)
        self.adapter.get_finished(set())
        self.held_events.pop(request, None)
        return verdict

    def retrieve(self, request, prompt, start, end, blocks, salt="", skip=0):
        """Retrieve [start, end) into `blocks`."""
        op = LoadStoreOp(
            **older.prompt_of(prompt),
            block_ids=older.block_ids(_per_group(blocks)),
            start=start,
            end=end,
            skip_first_n_tokens=skip,
        )
        event = self.recorded_event()
        self.adapter.submit_retrieve_request(request, op, event, **older.salted(salt))
        finished = set()

        def done():
            finished.update(self.adapter.get_finished(set())[1] or ())
            return request in finished

        wait_until(done, self.engine.deadline, f"retrieve of {request}")
        errors = self.adapter.get_block_ids_with_load_errors()
        return Retrieved(not errors, errors)

    def close(self):
        """Unregister and disconnect; a second call does nothing (the adapter's own would hang)."""
        if not self.closed:
            self.closed = True
            older.shut_down(self.adapter)


class Engine:
    """A scheduler and its workers, as one vLLM process group would be."""

    def __init__(self, server, mode, groups=None, model="test/model", ranks=1, mla=False, heartbeat=5.0,
                 mq_timeout=10.0, seed=0, register=True, process=0, kv_events=False):  # fmt: skip
        """`mode`: lmcache_driven or engine_driven. `groups`: the layers; default one classic group. `process`: a number of
        the engine, by which it has other process ids than another, where workers are known by these. `kv_events`: whether
        workers tell a router what the server holds."""
        self.server, self.url, self.mode, self.model = server, server.url, mode, model
        self.chunk = server.chunk
        self.groups = list(groups or [Group(layouts.layout("mla" if mla else "kv_first_nhd"))])
        self.ranks, self.mla, self.process = ranks, mla, process
        self.deadline, self.kv_events = mq_timeout + 5, kv_events
        self.extra_config = {
            "lmcache.mp.mp_transfer_mode": mode,
            "lmcache.mp.mq_timeout": mq_timeout,
            "lmcache.mp.heartbeat_interval": heartbeat,
        }
        self.context = zmq.Context()
        self.context.setsockopt(zmq.LINGER, 0)
        self._requests = 0
        generator = torch.Generator().manual_seed(seed)
        self.workers = []
        self.scheduler = LMCacheMPSchedulerAdapter(**self.adapter_arguments(LMCacheMPSchedulerAdapter, 0))
        try:
            for rank in range(ranks):
                self.workers.append(self.make_worker(rank, generator))
                if register:
                    self.workers[-1].register()
        except BaseException:
            self.close()
            raise

    def make_worker(self, rank, generator):
        """The worker of a rank, not yet registered."""
        return Worker(self, rank, generator)

    def adapter_arguments(self, adapter_class, rank):
        """What LMCache's connector passes to an adapter."""
        place = older.parallel(self.ranks, rank, self.mla)
        arguments = older.adapter_arguments(
            adapter_class, self.url, self.context, self.model, layouts.BLOCK_TOKENS, place, self.extra_config
        )
        if self.kv_events and adapter_class is LMCacheMPWorkerAdapter:
            arguments["enable_kv_events"] = True
        return arguments

    def group_infos(self):
        """The description of the layer groups sent at registration."""
        if not older.TRAITS.groups:
            return []
        infos, first = [], 0
        for group in self.groups:
            infos.append(
                older.EngineGroupInfo(
                    engine_group_id=group.engine_group,
                    layer_indices=tuple(range(first, first + group.layers)),
                    tokens_per_block=layouts.BLOCK_TOKENS,
                    sw_size_tokens=group.window,
                )
            )
            first += group.layers
        return infos

    @property
    def worker(self):
        """The first worker."""
        return self.workers[0]

    def new_request(self):
        """A fresh request id."""
        self._requests += 1
        return f"{id(self):x}-{self._requests}"

    def blocks_for(self, count, first=1):
        """Ids of the blocks that hold `count` tokens, from block `first` on."""
        blocks = -(-count // layouts.BLOCK_TOKENS)
        assert first + blocks <= layouts.NUM_BLOCKS, "the test needs a larger paged cache"
        return list(range(first, first + blocks))

    def lookup(self, prompt, request=None, salt=""):
        """(request id, hit tokens): submit a lookup and poll it as the scheduler does each step."""
        request = request or self.new_request()
        self.scheduler.maybe_submit_lookup_request(request, older.packed(prompt), **older.salted(salt))
        box = []

        def resolved():
            result = self.scheduler.check_lookup_result(request)
            if result is not None:
                box.append(result)
            return result is not None

        wait_until(resolved, self.deadline, f"lookup of {request}")
        self.scheduler.cleanup_lookup_result(request)
        return request, box[0]

    def end(self, request):
        """The request is finished."""
        self.scheduler.end_session(request)

    def abandon(self, request, prompt, salt=""):
        """Release what a lookup pinned and end the request, as for a hit that is not loaded."""
        whole = len(prompt) // self.chunk * self.chunk
        self.scheduler.free_lookup_locks(older.packed(prompt), 0, whole, request, **older.salted(salt))
        self.end(request)

    def hits(self, prompt, salt=""):
        """Hit tokens of a prompt, releasing what the lookup pinned."""
        request, hit = self.lookup(prompt, salt=salt)
        self.abandon(request, prompt, salt)
        return hit

    def store_prompt(self, prompt, first=1, salt="", start=0):
        """Store all full chunks of a prompt from `start` on, on every writing rank, as one request."""
        request = self.new_request()
        whole = len(prompt) // self.chunk * self.chunk
        blocks = self.blocks_for(whole, first)[start // layouts.BLOCK_TOKENS :]
        for worker in self.workers:
            verdict = worker.store(request, prompt, start, whole, blocks, salt)
            assert verdict is (True if older.has_verdict(worker.adapter) else None)
        self.end(request)

    def wait_hit(self, prompt, tokens, salt=""):
        """Wait until a stored prompt is found.

        Our server has committed a store when it answers. LMCache's own commits a little later,
        so a test that also runs against it must not look up at once.
        """
        wait_until(lambda: self.hits(prompt, salt) == tokens, self.deadline, f"hit of {tokens} tokens", interval=0.05)

    def close(self):
        """Unregister and disconnect everything; a second call does nothing."""
        if self.context.closed:
            return
        # A server of another process has only its address here.
        running = getattr(self.server, "running", lambda: True)
        if not running():
            # An adapter waits this long for the answer to its unregistration.
            for adapter in (self.scheduler, *(worker.adapter for worker in self.workers)):
                adapter._mq_timeout = 0.1
        for worker in self.workers:
            worker.close()
        older.shut_down(self.scheduler)
        older.end(self.context)


def _per_group(blocks):
    """Block ids as one list an engine group; a flat list means a single group."""
    return blocks if blocks and isinstance(blocks[0], list) else [blocks]
