"""Readers of vLLM's KV events by the rules of two routers, llm-d's and Dynamo's: which blocks each takes an engine to have.

A reader takes encoded batches by their number. Batches that it missed are replayed, as vLLM's publisher does.
"""

from collections import Counter

import msgspec

MAIN_KINDS = ("full_attention", "mla_attention", "sink_full_attention")


def hash_number(value):
    """A block hash as a number: of bytes the last 8."""
    return value if isinstance(value, int) else int.from_bytes(value[-8:], "big")


class Reader:
    """What the rules of both have in common. `rejected`: events that a reader drops although it is meant to know them."""

    def __init__(self, replay):
        self.replay, self.next, self.rejected = replay, 0, []
        # Number of a group -> kind of its cache.
        self.kinds = {}
        self._clear()

    def receive(self, number, payload):
        """Takes a batch, and before it those that are missing."""
        for missed in range(self.next, number):
            self._apply(self.replay(missed))
        self._apply(payload)
        self.next = number + 1

    def _apply(self, payload):
        for event in msgspec.msgpack.decode(payload)[1]:
            {"BlockStored": self._store, "BlockRemoved": self._remove, "AllBlocksCleared": lambda _: self._clear()}[event["type"]](event)

    def _clear(self):
        # (tier, group, hash) -> number of stores that are not removed.
        self.counts = Counter()

    def _is_main(self, event):
        group = event.get("group_idx")
        if "kv_cache_spec_kind" in event:
            self.kinds[group] = event["kv_cache_spec_kind"]
        return group is None or self.kinds.get(group) in MAIN_KINDS

    def _release(self, tier, group, hashes):
        """The hashes whose last store is removed; of an unknown one, None."""
        for each in map(hash_number, hashes):
            count = self.counts[tier, group, each] - 1
            self.counts[tier, group, each] = count
            if count <= 0:
                del self.counts[tier, group, each]
                yield each if count == 0 else None


class LlmdReader(Reader):
    """llm-d: blocks are found by keys from tokens and pictures behind the key of the parent, which must be known."""

    def _clear(self):
        super()._clear()
        # A hash -> key of its block.
        self.keys = {}

    def _store(self, event):
        hashes, size, tokens = event["block_hashes"], event["block_size"], event["token_ids"]
        if not self._is_main(event):
            return
        parent = event["parent_block_hash"] and self.keys.get(hash_number(event["parent_block_hash"]))
        if len(tokens) != size * len(hashes) or (event["parent_block_hash"] and not parent):
            self.rejected.append(event)
            return
        for place, each in enumerate(map(hash_number, hashes)):
            extra = (event.get("extra_keys") or [None] * len(hashes))[place] or ()
            pictures = tuple(tuple(key) for key in extra if not isinstance(key, (str, bytes)))
            parent = self.keys[each] = hash((parent or event["lora_name"], tuple(tokens[place * size : place * size + size]), pictures))
            self.counts[(event["medium"] or "gpu").lower(), event.get("group_idx"), each] += 1

    def _remove(self, event):
        if self._is_main(event):
            released = self._release((event["medium"] or "gpu").lower(), event.get("group_idx"), event["block_hashes"])
            for each in released:
                if each is None:
                    self.rejected.append(event)
                elif all(known != each for _, _, known in self.counts):
                    del self.keys[each]

    def resident(self, tier):
        """Pairs of group and hash."""
        return {(group, each) for at, group, each in self.counts if at == tier}


class DynamoReader(Reader):
    """Dynamo: tiers have chains of edges each. A removal of an unknown hash ends its event; a salt is its namespace if it is tagged so."""

    TIERS = {None: "device", "GPU": "device", "CPU": "host", "CPU_PINNED": "host", "CPU_TIER1": "host", "STORAGE": "disk", "DISK": "disk"}
    TAG = "dynamo-cache-salt:"

    def _clear(self):
        super()._clear()
        # (tier, hash) -> its edge: the parent's hash, and the tokens with namespace and adapter. Hash -> namespace.
        self.edges, self.namespaces = {}, {}

    def _store(self, event):
        hashes, size, tokens = [hash_number(each) for each in event["block_hashes"]], event["block_size"], event["token_ids"]
        if not self._is_main(event) or size == 0:
            return
        parent = event["parent_block_hash"] and hash_number(event["parent_block_hash"])
        if len({parent, *hashes}) != len(hashes) + 1 or len(tokens) < size * len(hashes):
            self.rejected.append(event)
            return
        salts = [key for key in ((event.get("extra_keys") or [None])[0] or ()) if isinstance(key, str) and key.startswith(self.TAG)]
        namespace = salts[0] if salts else self.namespaces.get(parent)
        tier = self.TIERS[event["medium"]]
        for place, each in enumerate(hashes):
            edge = parent, hash((namespace, event["lora_name"], tuple(tokens[place * size : place * size + size])))
            if self.edges.setdefault((tier, each), edge) != edge:
                self.rejected.append(event)
                return
            self.namespaces[each], parent = namespace, each
            self.counts[tier, None, each] += 1

    def _remove(self, event):
        if not self._is_main(event):
            return
        tier = self.TIERS[event["medium"]]
        for each in self._release(tier, None, event["block_hashes"]):
            if each is None or self.edges.pop((tier, each), None) is None:
                self.rejected.append(event)
                return

    def resident(self, tier):
        """Hashes."""
        return {each for at, each in self.edges if at == tier}
