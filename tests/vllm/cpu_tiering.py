"""vLLM's tiering of offloaded KV for engines on CPUs: the same scheduler, host memory and tiers, with a worker that copies between CPU tensors.

vLLM's own worker needs a GPU. An engine takes this one by `"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering"`.
"""

import time

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    """Copies blocks between the KV cache and this rank's part of the rows, at once."""

    def __init__(self, kv_caches, blocks_per_chunk, region, canonical):
        self.region, self.blocks_per_chunk, self.refs, self.done = region, blocks_per_chunk, kv_caches.group_data_refs, []
        sizes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        if canonical:
            refs = [ref for group in self.refs for ref in group]
            sizes = [max(ref.mapping.canonical_page_size_bytes for ref in refs if ref.tensor_idx == at) for at in range(len(sizes))]
        view = region.create_next_canonical_view if canonical else region.create_next_worker_view
        self.pages = [tensor.tensor.numpy().view(np.uint8) for tensor in kv_caches.tensors]
        self.rows = [view(size * blocks_per_chunk).numpy().view(np.uint8) for size in sizes]
        self.sizes = sizes

    def _copy(self, job_id, blocks, chunk_ids, to_host):
        began, count, first_block, first_chunk = time.monotonic(), 0, 0, 0
        for refs, size, index in zip(self.refs, blocks.group_sizes, blocks.block_indices, strict=True):
            skip = index % self.blocks_per_chunk
            for at in range(size):
                chunk, part = divmod(skip + at, self.blocks_per_chunk)
                block, row = int(blocks.block_ids[first_block + at]), int(chunk_ids[first_chunk + chunk])
                for ref in refs:
                    page, host = self.pages[ref.tensor_idx][block], self.rows[ref.tensor_idx][row, part * self.sizes[ref.tensor_idx] :]
                    count += _copy_page(ref, page, host, int(row) * self.blocks_per_chunk + part, to_host)
            if size:
                first_block, first_chunk = first_block + size, first_chunk + -(-(skip + size) // self.blocks_per_chunk)
        self.done.append(TransferResult(job_id, True, count, time.monotonic() - began))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        """Copy blocks into rows."""
        return self._copy(job_id, src_spec, dst_spec.chunk_ids, to_host=True)

    def submit_load(self, job_id, src_spec, dst_spec, **_):
        """Copy rows into blocks."""
        return self._copy(job_id, dst_spec, src_spec.chunk_ids, to_host=False)

    def get_finished(self):
        """Jobs that have ended since the last call."""
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        """Nothing: a job ends with its submission."""

    def shutdown(self):
        """Unmap the rows."""
        self.pages = self.rows = ()
        self.region.cleanup()


def _copy_page(ref, page, host, number, to_host):
    """Copy one page, whole or by the parts that vLLM maps to a canonical one; returns its bytes."""
    if ref.mapping is None:
        _copy(page[: ref.page_size_bytes], host[: ref.page_size_bytes], to_host)
    elif not to_host or ref.mapping.is_writer(number):
        for run in ref.mapping.runs:
            parts = (run.num_fragments, run.fragment_size)
            local = np.lib.stride_tricks.as_strided(page[run.local_offset :], parts, (run.local_stride, 1))
            _copy(local, np.lib.stride_tricks.as_strided(host[run.canonical_offset :], parts, (run.canonical_stride, 1)), to_host)
    return ref.page_size_bytes


def _copy(page, host, to_host):
    if to_host:
        host[:] = page
    else:
        page[:] = host


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's, with that worker."""

    def get_worker(self, kv_caches):
        """The worker of this rank."""
        if not self._worker:
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = CpuWorker(kv_caches, self.blocks_per_chunk, region, self.config.canonical_layout)
        return self._worker
