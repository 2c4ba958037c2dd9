"""A connector beside kvtier's in vLLM's MultiConnector: prompts of ended requests in this process's memory, by their tokens."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

# Connector's name -> prompt -> layer -> its pages. What it did, by name and kind.
STORED, DONE = {}, Counter()


@dataclass
class Moves(KVConnectorMetadata):
    """(request, prompt, first block, blocks)."""

    loads: list = field(default_factory=list)
    saves: list = field(default_factory=list)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """One group of layers. `name` and `is_async` are options: a load of several steps, or of one. `answer`: parameters in its answers."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.name, self.is_async, self.answer = options["name"], options["is_async"], options.get("answer")
        self.stored = STORED.setdefault(self.name, {})
        self.block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.moves, self.found, self.sent, self.received = Moves(), {}, set(), set()

    def register_kv_caches(self, kv_caches):
        self.tensors = kv_caches

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        known = [0]
        for prompt in self.stored:
            same = next((at for at, (a, b) in enumerate(zip(prompt, request.all_token_ids)) if a != b), min(len(prompt), request.num_tokens))
            known.append(min(same, request.num_tokens - 1) // self.block * self.block)
        self.found[request.request_id] = num_computed_tokens, max(known)
        more = max(known) - num_computed_tokens
        return (more, self.is_async) if more > 0 else (0, False)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            local, end = self.found[request.request_id]
            assert end == local + num_external_tokens
            [ids] = blocks.get_block_ids()
            prompt = next(each for each in self.stored if list(each[:end]) == list(request.all_token_ids[:end]))
            first = local // self.block
            self.moves.loads.append((request.request_id, prompt, first, ids[first : end // self.block]))

    def build_connector_meta(self, scheduler_output):
        moves, self.moves = self.moves, Moves()
        return moves

    def request_finished(self, request, block_ids):
        whole = min(request.num_prompt_tokens, request.num_computed_tokens) // self.block
        if not whole or request.num_output_tokens < 1:
            return False, None
        self.moves.saves.append((request.request_id, tuple(request.prompt_token_ids[: whole * self.block]), 0, block_ids[:whole]))
        return True, self.answer

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, *block_ids)

    def start_load_kv(self, forward_context, **kwargs):
        for request, prompt, first, ids in self._get_connector_metadata().loads:
            DONE[self.name, "loads"] += 1
            for layer, pages in self.stored[prompt].items():
                self.tensors[layer][ids] = pages[first : first + len(ids)]
            if self.is_async:
                self.received.add(request)
        for request, prompt, _, ids in self._get_connector_metadata().saves:
            DONE[self.name, "saves"] += 1
            self.stored[prompt] = {layer: tensor[ids].clone() for layer, tensor in self.tensors.items()}
            self.sent.add(request)

    def get_transfer_results(self, finished_req_ids):
        results = KVConnectorTransferResults(finished_sending=self.sent, finished_recving=self.received)
        self.sent, self.received = set(), set()
        return results

    def has_pending_push_work(self):
        return bool(self.moves.saves)

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass
