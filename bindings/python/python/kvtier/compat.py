"""The adapters under the names and signatures of LMCache's multi-process adapter in vLLM, early 2026.

For code written for ``LMCacheMPSchedulerAdapter``, ``LMCacheMPWorkerAdapter`` and ``LoadStoreOp``. The ZMQ ``context``
arguments are accepted and not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .operation import LoadStoreOp
from .scheduler import SchedulerAdapter
from .worker import WorkerAdapter

__all__ = ["LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter", "LoadStoreOp"]


class LMCacheMPSchedulerAdapter:
    """:class:`kvtier.SchedulerAdapter` with the other constructor."""

    def __init__(
        self,
        server_url: str,
        context: Any,
        model_name: str,
        world_size: int,
        kv_rank: int,
        vllm_block_size: int,
    ) -> None:
        """``kv_rank`` is not needed: a scheduler's keys mean all ranks."""
        self._ours = SchedulerAdapter(
            server_url, model_name, block_tokens=vllm_block_size, world_size=world_size
        )
        self.model_name, self.world_size, self.worker_id = model_name, world_size, kv_rank
        self.chunk_size = self._ours.chunk_tokens
        self.blocks_in_chunk = self._ours.num_blocks_per_chunk()

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: Sequence[bytes] | None = None,
        token_ids: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> None:
        """As :meth:`kvtier.SchedulerAdapter.maybe_submit_lookup_request`."""
        self._ours.maybe_submit_lookup_request(request_id, token_ids, block_hashes, cache_salt)

    def check_lookup_result(self, request_id: str) -> int | None:
        """As :meth:`kvtier.SchedulerAdapter.check_lookup_result`."""
        return self._ours.check_lookup_result(request_id)

    def num_blocks_per_chunk(self) -> int:
        """Blocks in a chunk."""
        return self.blocks_in_chunk

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget the lookup."""
        self._ours.cleanup_lookup_result(request_id)

    def free_lookup_locks(
        self,
        token_ids: Sequence[int],
        start: int,
        end: int,
        request_id: str,
        cache_salt: str = "",
    ) -> None:
        """End leases on ``[start, end)``."""
        self._ours.free_lookup_locks(
            request_id, token_ids, start=start, end=end, cache_salt=cache_salt
        )

    def end_session(self, request_id: str) -> None:
        """The request has ended."""
        self._ours.end_session(request_id)

    def shutdown(self) -> None:
        """Disconnect."""
        self._ours.shutdown()


class LMCacheMPWorkerAdapter:
    """:class:`kvtier.WorkerAdapter` with the other constructor."""

    def __init__(
        self,
        server_url: str,
        context: Any,
        model_name: str,
        world_size: int,
        kv_rank: int,
        vllm_block_size: int,
    ) -> None:
        self._ours = WorkerAdapter(
            server_url,
            model_name,
            block_tokens=vllm_block_size,
            world_size=world_size,
            worker_id=kv_rank,
        )
        self.model_name, self.world_size, self.worker_id = model_name, world_size, kv_rank
        self.instance_id = self._ours.instance_id
        self.blocks_in_chunk = self._ours.num_blocks_per_chunk()
        self.kv_caches: Mapping[str, Any] = {}

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Tell the server about the KV tensors."""
        self._ours.register_kv_caches(kv_caches)
        self.kv_caches = kv_caches

    def submit_store_request(
        self, request_id: str, op: LoadStoreOp, event: Any, cache_salt: str = ""
    ) -> None:
        """Store a range."""
        self._ours.submit_store_request(request_id, op, event, cache_salt)

    def submit_retrieve_request(
        self, request_id: str, op: LoadStoreOp, event: Any, cache_salt: str = ""
    ) -> None:
        """Retrieve a range."""
        self._ours.submit_retrieve_request(request_id, op, event, cache_salt)

    def batched_submit_store_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Any,
        cache_salts: Sequence[str] | None = None,
    ) -> None:
        """Stores that finish together."""
        self._ours.batched_submit_store_requests(request_ids, ops, event, cache_salts)

    def batched_submit_retrieve_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Any,
        cache_salts: Sequence[str] | None = None,
    ) -> None:
        """Retrieves that finish together."""
        self._ours.batched_submit_retrieve_requests(request_ids, ops, event, cache_salts)

    def get_finished(
        self, finished_req_ids_from_engine: Iterable[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """(requests whose stores have ended, requests whose retrieve has ended)."""
        return self._ours.get_finished(finished_req_ids_from_engine)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed retrieves."""
        return self._ours.get_block_ids_with_load_errors()

    def num_blocks_per_chunk(self) -> int:
        """Blocks in a chunk."""
        return self.blocks_in_chunk

    def shutdown(self) -> None:
        """Unregister and disconnect."""
        self._ours.shutdown()
