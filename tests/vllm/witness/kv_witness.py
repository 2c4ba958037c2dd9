"""kvtier's connector, which also writes down what the pages hold: when they are stored, and behind each load.

A line for each block: `S` or `L`, the piece and the prefix that it is of, a digest of its bytes in all layers. What is
loaded must be what was stored, byte for byte, which tokens alone can only make likely.
"""

import hashlib
import os
import pickle

import torch

from kvtier.vllm import KvTierConnector


class WitnessConnector(KvTierConnector):
    """Same behaviour; a file for each worker in the directory that $WITNESS_DIRECTORY names."""

    def register_kv_caches(self, kv_caches):
        """Remember the tensors; they may move to other memory behind this, in place."""
        super().register_kv_caches(kv_caches)
        (group,) = self._groups
        self._block_tokens, self._tensors = group.block_tokens, list(kv_caches.values())
        blocks = self._kv_cache_config.num_blocks
        self._axes = [tensor.shape.index(blocks) for tensor in self._tensors]
        directory = os.environ["WITNESS_DIRECTORY"]
        self._piece = f"{self._worker.world_size}-{self._worker.worker_id}"
        self._file = open(os.path.join(directory, f"{os.getpid()}.log"), "a", buffering=1)  # noqa: SIM115
        self._loading, self._loaded = {}, []

    def _note(self, kind, move, skip=0):
        """A line for each block of the move, behind its first `skip` tokens."""
        (ids,) = move.block_ids
        for position, block in enumerate(ids):
            start = position * self._block_tokens
            if start < skip:
                continue
            end = move.start + start + self._block_tokens
            prefix = hashlib.sha1(pickle.dumps(move.prompt.prefix(end))).hexdigest()
            content = hashlib.sha1()
            for tensor, axis in zip(self._tensors, self._axes, strict=True):
                page = tensor.select(axis, block).contiguous()
                content.update(page.view(-1).view(torch.uint8).numpy())
            self._file.write(f"{kind} {self._piece}/{prefix} {content.hexdigest()}\n")

    def start_load_kv(self, forward_context, **kwargs):
        """Remember what is loaded where."""
        self._loading.update((move.request_id, move) for move in self._step().loads)
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self):
        """What is to be stored; it does not change until it is."""
        for move in self._step().stores:
            self._note("S", move)
        super().wait_for_save()

    def get_finished(self, finished_req_ids):
        """Which loads have ended."""
        sent, loaded = super().get_finished(finished_req_ids)
        self._loaded = [self._loading.pop(each) for each in loaded or ()]
        return sent, loaded

    def get_block_ids_with_load_errors(self):
        """Of those loads, the ones that did not fail: no step has used their blocks yet."""
        failed = super().get_block_ids_with_load_errors()
        for move in self._loaded:
            if failed.isdisjoint(move.block_ids[0]):
                self._note("L", move, move.skip)
        self._loaded = []
        return failed
