"""Worker adapter: stores and retrieves of KV pages."""

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
    DEFAULT_PREEMPTION_PATIENCE,
    DEFAULT_STORE_TIMEOUT,
    DEFAULT_TIMEOUT,
    check_count,
    check_model_name,
    check_seconds,
    connect,
)
from .limited import RateLimited
from .operation import NO_BLOCK, LoadStoreOp, to_prompt
from .registration import Registration
from .transfer import Counters, Group, Transfer

logger = logging.getLogger(__name__)

TRANSFER_MODES = ("auto", "engine_driven", "lmcache_driven")

# Sent as the device event if the work is already done.
NO_EVENT = b"stub_ipc_handle"

# Seconds that wait_for_stores sleeps between two checks whether pages are still read.
_POLL_INTERVAL = 0.005

# Calls of get_finished for which a reported id is remembered: with asynchronous scheduling the engine repeats ids for a
# few steps.
_REMEMBERED_CALLS = 128


class WorkerAdapter:
    """Stores and retrieves of one worker's KV pages, in the background of the engine.

    Used by one thread. Submitting and :meth:`get_finished` never wait. These methods wait, at most this long:

    * the constructor: ``wait_for_server``;
    * :meth:`register_kv_caches`: twice ``timeout``, in the mode ``auto`` for each of the two modes that it tries; a second
      for a server that does not answer, and not at all if nothing listens;
    * :meth:`wait_for_stores`: see there;
    * :meth:`shutdown`: ``timeout`` for transfers in flight, the same again for each registration to be ended, and if the
      server copies, a second for a server that does not answer.

    No method raises because of the server: failed stores are counted, and failed retrieves report their blocks, which the
    engine must compute.
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
        """Connects to the server.

        Args:
            server_url: ``tcp://host:port``, ``ipc://path``, or ``host:port``.
            model_name: part of every key; without ``@``.
            block_tokens: tokens in one block of the engine; divides the chunk.
            world_size: number of pieces that the KV of a token is split into.
            worker_id: index of this worker's piece.
            num_kv_readers: number of workers with the same piece: the ranks with the same KV, for MLA the tensor-parallel size.
            is_writer: whether this worker is the one of them that stores it.
            mode: ``engine_driven`` (this process copies; CPU tensors with one group of full-attention layers),
                ``lmcache_driven`` (the server copies; CPU tensors move to shared memory), or ``auto``: the first if it is
                possible and the server allows it, otherwise the second.
            timeout: seconds each store or retrieve may take.
            store_timeout: seconds a store by the server may take, if that is less: only the server can end it, so a
                preemption that needs its blocks waits for it.
            heartbeat: seconds between two heartbeats.
            instance_id: this worker's id, unique among the server's workers. Default: a random one.
            force_pickle: send chunks in messages even if the server has a shared pool.
            wait_for_server: seconds to wait for a server. None: the server may start later, and the worker registers then.
            chunk_tokens: tokens in a chunk, a multiple of ``block_tokens``. None: the first server's default if it is one, else
                the smallest multiple of at least 256 tokens. A server that cannot serve it is not used.

        Raises:
            ConnectionError: no server answered within ``wait_for_server``.
            ValueError: the server cannot serve the chunk size, or an argument is not allowed.
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
        self._registration = Registration(self.client, block_tokens, self._identity, requires_server=wait_for_server is not None)
        self._warnings = RateLimited(logger)
        self.counters = Counters()
        self.on_cuda = False
        self._owner = os.getpid()
        self._next = 0
        # Operation number -> its transfer, and its tokens.
        self._parts: dict[int, tuple[Transfer, int]] = {}
        # Stores in order of submission; ended ones are removed from the front.
        self._stores: deque[Transfer] = deque()
        self._block_tokens_of_groups = [block_tokens]
        self._awaiting_events: list[Transfer] = []
        # Request id -> number of stores in flight.
        self._storing: dict[str, int] = {}
        self._finished_retrieves: set[str] = set()
        # Requests that the engine finished: with stores in flight, and without.
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

    def _identity(self) -> dict[str, Any]:
        """Returns the fields of a registration other than the tensors."""
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
        """How bytes are moved: ``pool``, ``pickle`` or ``server``; None while not registered."""
        return None if self._worker is None else self._worker.transport

    def on_health(self, callback: Callable[[str], None]) -> None:
        """Calls ``callback`` with ``healthy``, ``degraded`` or ``recovering`` on each change, on another thread."""
        self.client.on_health(callback)

    def num_blocks_per_chunk(self) -> int:
        """Blocks of the engine in one chunk; 0 until the chunk size is known."""
        return (self.chunk_tokens or 0) // self.block_tokens

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, Any],
        groups: Sequence[Group] | None = None,
        kv_layout: str | None = None,
        *,
        holds_blocks: bool = False,
    ) -> None:
        """Registers the KV tensors with the server. A later or restarted server gets the registration by itself.

        Args:
            kv_caches: layer name -> tensor, ``[2, blocks, block_tokens, heads, head_size]`` or another layout that
                vLLM uses. They must keep their memory until :meth:`shutdown`. If the server copies, CPU tensors are
                moved to shared memory, in place.
            groups: layers that share block ids; None for one group of all layers.
            kv_layout: the order of the dimensions inside a block: ``NHD``, ``HND``, ``BLHNC`` or ``BLNHC``.
            holds_blocks: whether the engine reuses no block while a transfer of it is in flight, also those that have left a
                window. Without it the server serves no groups with windows or recurrent states. Lists of blocks then have -1
                for blocks of such groups that the engine does not have, or that a hit at the end of their chunk does not need.

        Raises:
            KvTierError: the server refused, or did not answer within the timeout; never with ``wait_for_server=None``.
            ValueError: the tensors or groups have a layout that cannot be served.
        """
        if self._registration.is_described:
            raise RuntimeError("register_kv_caches was already called")
        if not kv_caches:
            raise ValueError("kv_caches: no layer; at least one is needed")
        if groups is None:
            groups = [Group(list(kv_caches), self.block_tokens)]
        place = {name: index for index, name in enumerate(kv_caches)}
        described = [
            group.described(number, [place[name] for name in group.layer_names if name in place])
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
        self._registration.start(modes, tensors, described, kv_layout, holds_blocks)

    # -- submitting --------------------------------------------------------------------------

    def submit_store_request(
        self, request_id: str, op: LoadStoreOp, event: Any = None, cache_salt: str = "", *, tag: Any = None
    ) -> None:
        """Stores a range of a request's prompt. Its blocks must not change until the store has finished.

        Args:
            event: the device event after which the blocks are complete (``ipc_handle()``); None if they are complete.
            tag: returned by :meth:`take_ended_stores` when the store has ended.
        """
        self._store([request_id], [op], event, [cache_salt], tag)

    def submit_retrieve_request(
        self, request_id: str, op: LoadStoreOp, event: Any = None, cache_salt: str = ""
    ) -> None:
        """Retrieves a range of a request's prompt that was looked up. Its blocks must not be used until it has finished."""
        self.batched_submit_retrieve_requests([request_id], [op], event, [cache_salt])

    def batched_submit_store_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Any = None,
        cache_salts: Sequence[str] | None = None,
    ) -> None:
        """Stores ranges of several requests, which finish together."""
        self._store(request_ids, ops, event, cache_salts, None)

    def _store(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Any,
        cache_salts: Sequence[str] | None,
        tag: Any,
    ) -> None:
        self._mark_used(request_ids)
        if not self.is_writer:
            return
        if not self._is_ready():
            # No store is in flight then, so no request waits for one.
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
        """Retrieves ranges of several requests, which finish together; if one fails, all have failed."""
        self._mark_used(request_ids)
        transfer = Transfer(False, tuple(request_ids), None, event)
        if self._is_ready():
            self._submit(transfer, ops, cache_salts)
            return
        transfer.blocks = [block for op in ops for block in self._written(op)]
        transfer.errors.append("the server is not healthy")
        self._complete(transfer)

    def _mark_used(self, request_ids: Sequence[str]) -> None:
        """Marks these ids as in use (again)."""
        for request_id in request_ids:
            self._reported.pop(request_id, None)

    def _written(self, op: LoadStoreOp) -> list[int]:
        """Returns the blocks that a retrieve writes."""
        sizes = itertools.chain(self._block_tokens_of_groups, itertools.repeat(self.block_tokens))
        groups = zip(op.blocks_of_groups(), sizes, strict=False)
        return [block for ids, size in groups for block in ids[op.skip_first_n_tokens // size :] if block != NO_BLOCK]

    def _is_ready(self) -> bool:
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
                f"{len(request_ids)} request ids, {len(ops)} ops and {len(salts)} salts; the same number of each is needed"
            )
        prompts = [
            to_prompt(op.token_ids, op.block_hashes, op.prompt, self.num_blocks_per_chunk(), self.chunk_tokens or 0)
            for op in ops
        ]
        handle = NO_EVENT if event is None else bytes(event.ipc_handle())
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
                keep_seconds=op.keep_seconds if transfer.is_store else None,
                session=op.session if transfer.is_store else None,
            )
        return transfer

    # -- finishing ---------------------------------------------------------------------------

    def get_finished(self, finished_req_ids_from_engine: Iterable[str]) -> tuple[set[str], set[str]]:
        """Returns requests whose transfers have ended since the last call. Never waits.

        Args:
            finished_req_ids_from_engine: requests that the engine has finished; ids may be repeated.

        Returns:
            Requests that the engine has finished and whose stores have ended (a request without stores counts as ended);
            and requests whose retrieve has ended, successfully or not. Each id is returned once.
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
        """Returns blocks of failed retrieves that :meth:`get_finished` has returned since the last call; their contents are undefined."""
        blocks, self._error_blocks = self._error_blocks, set()
        return blocks

    def get_failed_request_ids(self) -> set[str]:
        """Returns requests of failed retrieves that :meth:`get_finished` has returned since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_ended_stores(self) -> list[tuple[Any, list[int]]]:
        """Returns stores with a tag that have ended since the last call: (tag, stored chunks of their range).

        Chunks that the server already had, or has no space for, are left out if the server reports them, as it does for
        stores through its pool. A failed store has no chunks.
        """
        ended, self._ended_stores = self._ended_stores, []
        return ended

    def take_counters(self) -> Counters:
        """Returns the counters since the last call."""
        counters, self.counters = self.counters, Counters()
        return counters

    def wait_for_stores(self, request_ids: Iterable[str], patience: float = DEFAULT_PREEMPTION_PATIENCE) -> None:
        """Waits until no store can keep later contents of these requests' blocks: the engine overwrites them.

        * Waits up to ``patience`` seconds for the stores, and not at all while the server is not healthy.
        * If this process copies, stores whose copy has not begun are then abandoned, and the running copy is waited for.
        * If the server copies, each store is waited for until the server's answer, or until a second after its deadline,
          which is ``store_timeout`` (or ``timeout``, if that is less) after its submission. The server does not keep what
          it has not read by then, and the store has failed.
        * A store that only waits for the device is not waited for here: the engine's next work on the device waits for it.
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
                self._abandon(stores)
            if all(transfer.released for transfer in stores):
                return
            assert self._worker is not None
            self._apply(self._worker.take_finished(_POLL_INTERVAL))

    def _abandon(self, stores: list[Transfer]) -> None:
        """Releases the stores whose blocks are not being read; none of them begins to read."""
        if self._worker is not None and stores:
            read = set(self._worker.release_pages([number for each in stores for number in each.numbers]))
            for transfer in stores:
                if read.isdisjoint(transfer.numbers):
                    self._release(transfer)

    def _poll(self) -> None:
        if self._worker is not None:
            self._apply(self._worker.take_finished())
        while self._stores and self._stores[0].released:
            self._stores.popleft()

    def _apply(self, finished: list[tuple[int, bytes, str | None, list[int] | None]]) -> None:
        for number, event, error, chunks in finished:
            transfer, tokens = self._parts.pop(number)
            transfer.parts -= 1
            if error is not None:
                transfer.errors.append(error)
            else:
                chunk_tokens = self.chunk_tokens or 1
                transfer.chunks = list(range(tokens // chunk_tokens)) if chunks is None else chunks
                transfer.tokens += len(transfer.chunks) * chunk_tokens
                if self.on_cuda and event and event != NO_EVENT:
                    transfer.event = event
            if transfer.parts == 0:
                transfer.engine_event = None
                self._complete_when_ready(transfer)
        if self._awaiting_events:
            waiting, self._awaiting_events = self._awaiting_events, []
            for transfer in waiting:
                self._complete_when_ready(transfer)

    def _complete_when_ready(self, transfer: Transfer) -> None:
        """Completes the transfer, unless the device has not reached its event yet."""
        try:
            if isinstance(transfer.event, bytes):
                import torch

                transfer.event = torch.cuda.Event.from_ipc_handle(torch.cuda.current_device(), transfer.event)
            is_pending = transfer.event is not None and not transfer.event.query()
        except Exception as error:  # The results of the other transfers must not be lost.
            transfer.errors.append(f"its device event failed: {error}")
            is_pending = False
        if is_pending:
            self._awaiting_events.append(transfer)
        else:
            self._complete(transfer)

    def _release(self, transfer: Transfer) -> None:
        """Releases the blocks of a store."""
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
                self._warnings.warning("store", "store of %s failed: %s; not cached", names, transfer.errors[0])
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
            self._warnings.warning("retrieve", "retrieve of %s failed: %s; computing it", names, transfer.errors[0])
        else:
            counters.retrieves += count
            counters.retrieved_tokens += transfer.tokens
            counters.retrieve_seconds += seconds

    def disable(self) -> None:
        """Waits for transfers to end and unregisters, for good: every later store and retrieve fails. Waits like :meth:`shutdown`."""
        self._registration.stop()

    def shutdown(self) -> None:
        """Waits for transfers to end, unregisters and disconnects. A second call does nothing."""
        if os.getpid() != self._owner:
            return
        self._registration.stop()
        self._registration.release()
        self.client.close()
