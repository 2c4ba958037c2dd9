"""The worker's side: KV pages to the cache and back."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ._native import Worker
from .connecting import (
    DEFAULT_HEARTBEAT,
    DEFAULT_PATIENCE,
    DEFAULT_STORE_TIMEOUT,
    DEFAULT_TIMEOUT,
    check_count,
    check_model_name,
    check_seconds,
    connect,
)
from .limited import RateLimited
from .operation import LoadStoreOp, one_prompt
from .registration import Registration
from .transfer import Counters, Group, Transfer

logger = logging.getLogger(__name__)

TRANSFER_MODES = ("auto", "engine_driven", "lmcache_driven")

# What a worker sends as its device event when the work is done already.
_NO_EVENT = b"stub_ipc_handle"

# How long wait_for_stores sleeps before it looks again whether pages are still read, in seconds.
_GLANCE = 0.005

# For how many calls of get_finished an id that was reported is remembered: with asynchronous scheduling the engine
# repeats ids for a few steps.
_REMEMBERED_CALLS = 128


class WorkerAdapter:
    """Stores and retrieves one worker's KV pages, behind the engine's back.

    Used by one thread. Submitting and :meth:`get_finished` never wait. These do, at most so long:

    * the constructor: ``wait_for_server``;
    * :meth:`register_kv_caches`: twice ``timeout``, in the mode ``auto`` for each of the two modes that it tries; a second
      for a server that does not answer, and not at all where nothing listens;
    * :meth:`wait_for_stores`: see there;
    * :meth:`shutdown`: ``timeout`` for what is under way, as long again for each registration that the server has to be
      told the end of, and where the server copies a second for one that does not answer.

    Nothing raises because of the server:
    stores that fail are counted, retrieves that fail name their blocks, which the engine must compute.
    """

    def __init__(
        self,
        server_url: str,
        model_name: str,
        *,
        block_tokens: int,
        world_size: int = 1,
        worker_id: int = 0,
        num_kv_readers: int = 1,
        is_writer: bool = True,
        mode: str = "auto",
        timeout: float = DEFAULT_TIMEOUT,
        store_timeout: float = DEFAULT_STORE_TIMEOUT,
        heartbeat: float = DEFAULT_HEARTBEAT,
        instance_id: int | None = None,
        force_pickle: bool = False,
        wait_for_server: float | None = DEFAULT_TIMEOUT,
        chunk_tokens: int | None = None,
    ) -> None:
        """Connect.

        Args:
            server_url: ``tcp://host:port``, ``ipc://path``, or ``host:port``.
            model_name: part of every key; without ``@``.
            block_tokens: tokens in one block of the engine; divides the server's chunk.
            world_size: how many pieces the KV of a token is split into.
            worker_id: which of them this worker has.
            num_kv_readers: workers that have the same piece: 1, or for MLA the tensor-parallel size.
            is_writer: whether this worker is the one of them that stores.
            mode: ``engine_driven`` (this process copies; CPU tensors with one group of full-attention layers),
                ``lmcache_driven`` (the server copies; CPU tensors move to shared memory), or ``auto``: the first where
                it is possible and the server allows it, else the second.
            timeout: seconds each store or retrieve may take.
            store_timeout: seconds a store may take that the server copies, if that is less: nobody else can end it, so
                whoever wants its blocks waits for it.
            heartbeat: seconds between two heartbeats.
            instance_id: this worker's number; no other worker of the server may have it. Default: a random one.
            force_pickle: send chunks in messages even where the server has a shared pool.
            wait_for_server: seconds to wait for a server; None: it may come later, and the worker registers then.
            chunk_tokens: the server's chunk size, a multiple of ``block_tokens``. None: that of the first server. A server
                with another chunk size is not used.

        Raises:
            ConnectionError: no server answered within ``wait_for_server``.
            ValueError: the chunk is no multiple of the block, or an argument is not allowed.
        """
        if mode not in TRANSFER_MODES:
            raise ValueError(f"mode: {mode!r}; allowed are {', '.join(TRANSFER_MODES)}")
        check_model_name(model_name)
        check_count("world_size", world_size, 1)
        check_count("worker_id", worker_id, 0, world_size - 1)
        check_count("num_kv_readers", num_kv_readers, 1)
        check_seconds("store_timeout", store_timeout)
        self.client = connect(
            server_url,
            timeout=timeout,
            heartbeat=heartbeat,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
            wait_for_server=wait_for_server,
        )
        self.model_name, self.block_tokens = model_name, block_tokens
        self.world_size, self.worker_id, self.num_kv_readers = world_size, worker_id, num_kv_readers
        self.is_writer, self._mode, self.force_pickle = is_writer, mode, force_pickle
        # Process ids repeat across containers.
        self.instance_id = random.SystemRandom().getrandbits(62) if instance_id is None else instance_id
        self._store_timeout = store_timeout
        self._registration = Registration(self.client, block_tokens, self._described, waits=wait_for_server is not None)
        self._warnings = RateLimited(logger)
        self.counters = Counters()
        self.on_cuda = False
        self._owner = os.getpid()
        self._next = 0
        # Number of an operation -> its transfer, and its tokens.
        self._parts: dict[int, tuple[Transfer, int]] = {}
        # Stores in the order in which they were submitted, but for those at the front that have ended.
        self._stores: deque[Transfer] = deque()
        self._block_tokens_of_groups = [block_tokens]
        self._behind_events: list[Transfer] = []
        # Request id -> stores under way.
        self._storing: dict[str, int] = {}
        self._finished_retrieves: set[str] = set()
        # Finished by the engine: with stores under way, and without.
        self._ended_by_engine: set[str] = set()
        self._ended: set[str] = set()
        self._reported: OrderedDict[str, int] = OrderedDict()
        self._calls = 0
        self._error_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._ended_stores: list[tuple[Any, list[int]]] = []

    # -- set-up ------------------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """Whether the server answers heartbeats and knows this worker."""
        if self._worker is None:
            return not self._registration.is_described and self.client.is_healthy
        return self.client.is_healthy and self._worker.is_registered

    @property
    def mode(self) -> str:
        """The transfer mode; that of the registration once there is one."""
        return self._registration.mode or self._mode

    @property
    def _worker(self) -> Worker | None:
        return self._registration.worker

    def _described(self) -> dict[str, Any]:
        """What a registration says of this worker, beside its tensors."""
        return {
            "instance": self.instance_id,
            "model_name": self.model_name,
            "world_size": self.world_size,
            "worker_id": self.worker_id,
            "num_kv_readers": self.num_kv_readers,
            "force_pickle": self.force_pickle,
        }

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens in a chunk; None until the first server has answered."""
        return self.client.chunk_tokens

    @property
    def transport(self) -> str | None:
        """How bytes travel: ``pool``, ``pickle`` or ``server``; None before the registration and while it is lost."""
        return None if self._worker is None else self._worker.transport

    def on_health(self, callback: Callable[[str], None]) -> None:
        """Have ``callback`` called with ``healthy``, ``degraded`` or ``recovering``, on another thread."""
        self.client.on_health(callback)

    def num_blocks_per_chunk(self) -> int:
        """Blocks of the engine in one chunk; 0 until the chunk size is known."""
        return (self.chunk_tokens or 0) // self.block_tokens

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, Any],
        groups: Sequence[Group] | None = None,
        kv_layout: str | None = None,
    ) -> None:
        """Register the KV tensors with the server; with one that comes later, or again, that happens by itself.

        Args:
            kv_caches: layer name -> tensor, ``[2, blocks, block_tokens, heads, head_size]`` or another layout that
                vLLM uses. They must stay where they are until :meth:`shutdown`. Where the server copies, CPU tensors
                are moved to shared memory, in place.
            groups: layers that share block ids; None means one group of all layers.
            kv_layout: the order of the dimensions inside a block: ``NHD``, ``HND``, ``BLHNC`` or ``BLNHC``.

        Raises:
            KvTierError: the server refused, or did not answer within the timeout; never with ``wait_for_server=None``.
            ValueError: the tensors have a layout, or groups, that cannot be served.
        """
        if self._registration.is_described:
            raise RuntimeError("register_kv_caches was called before")
        if not kv_caches:
            raise ValueError("kv_caches: there is no layer")
        if groups is None:
            groups = [Group(list(kv_caches), self.block_tokens)]
        place = {name: index for index, name in enumerate(kv_caches)}
        described = [
            {
                "group_id": number,
                "layers": [place[name] for name in group.layer_names if name in place],
                "tokens_per_block": group.block_tokens,
                "sliding_window": group.sliding_window,
            }
            for number, group in enumerate(groups)
        ]
        self.on_cuda = any(tensor.is_cuda for tensor in kv_caches.values())
        self._block_tokens_of_groups = [group.block_tokens for group in groups]
        tensors = list(kv_caches.values())
        if self._mode == "auto":
            simple = len(described) == 1 and groups[0].sliding_window < 0 and not self.on_cuda
            modes = ["engine_driven", "lmcache_driven"] if simple else ["lmcache_driven"]
        else:
            modes = [self._mode]
        self._registration.start(modes, tensors, described, kv_layout)

    # -- submitting --------------------------------------------------------------------------

    def submit_store_request(
        self, request_id: str, op: LoadStoreOp, event: Any = None, cache_salt: str = "", *, tag: Any = None
    ) -> None:
        """Store a range of a request's prompt. Its blocks must not change until the store is finished.

        Args:
            event: the device event behind which the blocks are complete (``ipc_handle()``); None for now.
            tag: told by :meth:`take_ended_stores` when the store has ended.
        """
        self._store([request_id], [op], event, [cache_salt], tag)

    def submit_retrieve_request(
        self, request_id: str, op: LoadStoreOp, event: Any = None, cache_salt: str = ""
    ) -> None:
        """Retrieve a range of a request's prompt that was looked up. Nobody may use its blocks until it is finished."""
        self.batched_submit_retrieve_requests([request_id], [op], event, [cache_salt])

    def batched_submit_store_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Any = None,
        cache_salts: Sequence[str] | None = None,
    ) -> None:
        """Stores of several requests, which finish together."""
        self._store(request_ids, ops, event, cache_salts, None)

    def _store(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Any,
        cache_salts: Sequence[str] | None,
        tag: Any,
    ) -> None:
        self._begin(request_ids)
        if not self.is_writer:
            return
        if not self._ready():
            # Nothing will be under way, so nothing is waited for.
            self.counters.failed_stores += len(request_ids)
            if tag is not None:
                self._ended_stores.append((tag, []))
            return
        transfer = self._submit(Transfer(True, tuple(request_ids), tag, event), ops, cache_salts)
        self._stores.append(transfer)
        for request_id in request_ids:
            self._storing[request_id] = self._storing.get(request_id, 0) + 1

    def batched_submit_retrieve_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Any = None,
        cache_salts: Sequence[str] | None = None,
    ) -> None:
        """Retrieves of several requests, which finish together; they have failed when one has."""
        self._begin(request_ids)
        transfer = Transfer(False, tuple(request_ids), None, event)
        if self._ready():
            self._submit(transfer, ops, cache_salts)
            return
        transfer.blocks = [block for op in ops for block in self._written(op)]
        transfer.errors.append("the server is not healthy")
        self._complete(transfer)

    def _begin(self, request_ids: Sequence[str]) -> None:
        """These ids are in use (again)."""
        for request_id in request_ids:
            self._reported.pop(request_id, None)

    def _written(self, op: LoadStoreOp) -> list[int]:
        """The blocks that a retrieve writes."""
        sizes = itertools.chain(self._block_tokens_of_groups, itertools.repeat(self.block_tokens))
        groups = zip(op.blocks_of_groups(), sizes, strict=False)
        return [block for ids, size in groups for block in ids[op.skip_first_n_tokens // size :]]

    def _ready(self) -> bool:
        if not self._registration.is_described:
            raise RuntimeError("register_kv_caches was not called")
        return self.is_healthy

    def _submit(
        self, transfer: Transfer, ops: Sequence[LoadStoreOp], cache_salts: Sequence[str] | None
    ) -> Transfer:
        assert self._worker is not None
        request_ids, event = transfer.request_ids, transfer.engine_event
        salts = list(cache_salts) if cache_salts is not None else [""] * len(ops)
        if not len(request_ids) == len(ops) == len(salts) or not ops:
            raise ValueError(
                f"{len(request_ids)} request ids, {len(ops)} ops and {len(salts)} salts; as many of each are needed"
            )
        prompts = [
            one_prompt(op.token_ids, op.block_hashes, op.prompt, self.num_blocks_per_chunk(), self.chunk_tokens or 0)
            for op in ops
        ]
        handle = _NO_EVENT if event is None else bytes(event.ipc_handle())
        timeout = self.client.timeout
        if transfer.is_store and self.mode == "lmcache_driven":
            timeout = min(timeout, self._store_timeout)
        transfer.parts = len(ops)
        for request_id, op, salt, prompt in zip(request_ids, ops, salts, prompts, strict=True):
            end = op.end or (len(prompt) if op.block_hashes is not None else 0)
            if not transfer.is_store:
                transfer.blocks += self._written(op)
            number, self._next = self._next, self._next + 1
            transfer.numbers.append(number)
            self._parts[number] = (transfer, max(0, end - op.start))
            self._worker.submit(
                number,
                prompt,
                op.start,
                end,
                request_id,
                salt,
                op.blocks_of_groups(),
                is_store=transfer.is_store,
                skip=op.skip_first_n_tokens,
                event=handle,
                timeout=timeout,
            )
        return transfer

    # -- finishing ---------------------------------------------------------------------------

    def get_finished(self, finished_req_ids_from_engine: Iterable[str]) -> tuple[set[str], set[str]]:
        """Requests whose transfers have ended since the last call. Never waits.

        Args:
            finished_req_ids_from_engine: requests that the engine has finished; ids may come again.

        Returns:
            Requests whose stores have ended, of those that the engine has finished by now (one that stores nothing at
            all counts as ended); and requests whose retrieve has ended, successfully or not. Each id is given once.
        """
        self._poll()
        self._calls += 1
        while self._reported and next(iter(self._reported.values())) + _REMEMBERED_CALLS < self._calls:
            self._reported.popitem(last=False)
        ended, self._ended = self._ended, set()
        for request_id in finished_req_ids_from_engine:
            if request_id in self._reported:
                continue
            if request_id in self._storing:
                self._ended_by_engine.add(request_id)
            else:
                ended.add(request_id)
        for request_id in ended:
            self._reported[request_id] = self._calls
        retrieved, self._finished_retrieves = self._finished_retrieves, set()
        return ended, retrieved

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed retrieves that :meth:`get_finished` has told since the last call: their contents are undefined."""
        blocks, self._error_blocks = self._error_blocks, set()
        return blocks

    def get_failed_request_ids(self) -> set[str]:
        """Requests of failed retrieves that :meth:`get_finished` has told since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_ended_stores(self) -> list[tuple[Any, list[int]]]:
        """Stores with a tag that have ended since the last call: (tag, which chunks of their range they brought).

        Chunks that the server had already, or has no room for, are not among them where the server says so, which it
        does for those that go through its pool. A store that failed has brought none.
        """
        ended, self._ended_stores = self._ended_stores, []
        return ended

    def take_counters(self) -> Counters:
        """What was done since the last call."""
        counters, self.counters = self.counters, Counters()
        return counters

    def wait_for_stores(self, request_ids: Iterable[str], patience: float = DEFAULT_PATIENCE) -> None:
        """Wait until no store can store what these requests' blocks hold from now on: the engine overwrites them.

        Stores are waited for up to ``patience`` seconds, and not at all while the server is not healthy. Then those
        that this process has not begun to copy are given up, and the copy that it is at is waited for. Where the server
        copies, each store is waited for until the server's answer, or a second behind its deadline, which is ``store_timeout``
        (or ``timeout``, if that is less) behind its submission: what the server has not read by then it does not keep, and the
        store has failed. Stores that only the device has to end are waited for by what the engine gives the device next,
        not here.
        """
        wanted, until = set(request_ids), time.monotonic() + patience
        while True:
            self._poll()
            stores = [each for each in self._stores if not each.released and not wanted.isdisjoint(each.request_ids)]
            for transfer in stores:
                if transfer.parts == 0:
                    transfer.event.wait()
                    self._release(transfer)
            if time.monotonic() >= until or not self.is_healthy:
                self._give_up(stores)
            if all(transfer.released for transfer in stores):
                return
            assert self._worker is not None
            self._take(self._worker.take_finished(_GLANCE))

    def _give_up(self, stores: list[Transfer]) -> None:
        """Let go of those whose blocks nobody is reading, and have nobody begin to."""
        if self._worker is not None and stores:
            read = set(self._worker.release_pages([number for each in stores for number in each.numbers]))
            for transfer in stores:
                if read.isdisjoint(transfer.numbers):
                    self._release(transfer)

    def _poll(self) -> None:
        if self._worker is not None:
            self._take(self._worker.take_finished())
        while self._stores and self._stores[0].released:
            self._stores.popleft()

    def _take(self, finished: list[tuple[int, bytes, str | None, list[int] | None]]) -> None:
        for number, event, error, chunks in finished:
            transfer, tokens = self._parts.pop(number)
            transfer.parts -= 1
            if error is not None:
                transfer.errors.append(error)
            else:
                chunk_tokens = self.chunk_tokens or 1
                transfer.chunks = list(range(tokens // chunk_tokens)) if chunks is None else chunks
                transfer.tokens += len(transfer.chunks) * chunk_tokens
                if self.on_cuda and event and event != _NO_EVENT:
                    transfer.event = event
            if transfer.parts == 0:
                transfer.engine_event = None
                self._settle(transfer)
        if self._behind_events:
            waiting, self._behind_events = self._behind_events, []
            for transfer in waiting:
                self._settle(transfer)

    def _settle(self, transfer: Transfer) -> None:
        """Complete it, unless the device still has to reach its event."""
        try:
            if isinstance(transfer.event, bytes):
                import torch

                transfer.event = torch.cuda.Event.from_ipc_handle(torch.cuda.current_device(), transfer.event)
            is_behind = transfer.event is not None and not transfer.event.query()
        except Exception as error:  # The other transfers' results must not be lost with it.
            transfer.errors.append(f"its device event: {error}")
            is_behind = False
        if is_behind:
            self._behind_events.append(transfer)
        else:
            self._complete(transfer)

    def _release(self, transfer: Transfer) -> None:
        """A store needs its blocks no more."""
        if transfer.released:
            return
        transfer.released = True
        for request_id in transfer.request_ids:
            left = self._storing.pop(request_id) - 1
            if left:
                self._storing[request_id] = left
            elif request_id in self._ended_by_engine:
                self._ended_by_engine.remove(request_id)
                self._ended.add(request_id)

    def _complete(self, transfer: Transfer) -> None:
        counters, count = self.counters, len(transfer.request_ids)
        seconds = time.monotonic() - transfer.began
        names = ", ".join(map(repr, transfer.request_ids))
        if transfer.is_store:
            self._release(transfer)
            if transfer.errors:
                transfer.chunks = []
                counters.failed_stores += count
                self._warnings.warning("store", "store of %s failed: %s; it is not cached", names, transfer.errors[0])
            elif not transfer.tokens:
                counters.skipped_stores += count
            else:
                counters.stores += count
                counters.stored_tokens += transfer.tokens
                counters.store_seconds += seconds
            if transfer.tag is not None:
                self._ended_stores.append((transfer.tag, transfer.chunks))
            return
        self._finished_retrieves.update(transfer.request_ids)
        if transfer.errors:
            counters.failed_retrieves += count
            self._error_blocks.update(transfer.blocks)
            self._failed_requests.update(transfer.request_ids)
            self._warnings.warning("retrieve", "retrieve of %s failed: %s; it is computed instead", names, transfer.errors[0])
        else:
            counters.retrieves += count
            counters.retrieved_tokens += transfer.tokens
            counters.retrieve_seconds += seconds

    def disable(self) -> None:
        """Let transfers end and unregister, for good: every later store and retrieve fails. Waits as :meth:`shutdown`."""
        self._registration.stop()

    def shutdown(self) -> None:
        """Let transfers end, unregister and disconnect. A second call does nothing."""
        if os.getpid() != self._owner:
            return
        self._registration.stop()
        self._registration.release()
        self.client.close()
