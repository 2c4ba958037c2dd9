"""kvtier's connector, which also writes down what the pages hold: when they are stored, and behind each load.

A line for each block: `S` or `L`, the piece, the group and the prefix that it is of, a digest of its bytes in all layers of the
group. What is loaded must be what was stored, byte for byte, which tokens alone can only make likely.
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
        blocks = self._kv_cache_config.num_blocks
        self._pages = [
            [(kv_caches[name], kv_caches[name].shape.index(blocks)) for name in group.layer_names if name in kv_caches]
            for group in self._groups
        ]
        directory = os.environ["WITNESS_DIRECTORY"]
        self._piece = f"{self._worker.world_size}-{self._worker.worker_id}"
        self._file = open(os.path.join(directory, f"{os.getpid()}.log"), "a", buffering=1)  # noqa: SIM115
        self._loading, self._loaded = {}, []

    def _note(self, kind, move, skip=0):
        """A line for each block of the move, behind its first `skip` tokens."""
        for number, (ids, group) in enumerate(zip(move.block_ids, self._groups, strict=True)):
            for position, block in enumerate(ids):
                start = position * group.block_tokens
                # A hit needs the end of a window only, whatever else its chunks have.
                needed = kind == "S" or group.sliding_window < 0 or move.start + start >= move.end - group.sliding_window
                if start < skip or block < 0 or not needed:
                    continue
                end = move.start + start + group.block_tokens
                prefix = hashlib.sha1(pickle.dumps(move.prompt.prefix(end))).hexdigest()
                content = hashlib.sha1()
                for tensor, axis in self._pages[number]:
                    page = tensor.select(axis, block).contiguous()
                    content.update(page.view(-1).view(torch.uint8).cpu().numpy())
                self._file.write(f"{kind} {self._piece}/{number}/{prefix} {content.hexdigest()}\n")

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
        """Which loads have ended, and did not fail: no step has used their blocks yet."""
        sent, loaded = super().get_finished(finished_req_ids)
        for move in [self._loading.pop(each) for each in loaded or ()]:
            if move.request_id not in self._failed:
                self._note("L", move, move.skip)
        return sent, loaded
