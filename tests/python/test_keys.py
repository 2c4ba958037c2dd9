"""A growing prompt gives the same keys as a whole one, and only its new tokens are encoded."""

from types import SimpleNamespace

import pytest
from conftest import CHUNK
from kvtier import Prompt
from kvtier.vllm.requests import Keys
from rig import tokens

HASHES = 2


class Counted(list):
    """A list that counts the elements read from it."""

    taken = 0

    def __iter__(self):
        """Reads all elements."""
        self.taken += len(self)
        return super().__iter__()

    def __getitem__(self, index):
        """Reads some elements."""
        part = super().__getitem__(index)
        self.taken += len(part) if isinstance(index, slice) else 1
        return part


class Known:
    """Contents that are all known, with adapters identified by name."""

    def are_known(self, request):
        """Whether contents are known."""
        return True

    def adapter(self, lora):
        """Returns the adapter's identity."""
        return lora.lora_name.encode() or None


def make(mode="token_ids"):
    """Returns the keys of an engine with two hashes per chunk."""
    return Keys(SimpleNamespace(chunk_tokens=CHUNK), mode, CHUNK // HASHES, Known())


def request(length, features=(), lora=None):
    """Returns a request with this number of chunks."""
    ids = Counted(tokens(length * CHUNK, "grows"))
    hashes = Counted(number.to_bytes(32) for number in range(length * HASHES))
    return SimpleNamespace(
        request_id="r", all_token_ids=ids, block_hashes=hashes, mm_features=features, lora_request=lora, prompt_embeds=None
    )


@pytest.mark.parametrize("mode", ["token_ids", "block_hashes"])
def test_growing_prompt_encodes_each_token_once(mode):
    """Even if chunks are requested one by one."""
    keys, whole, length = make(mode), make(mode), 64
    req = request(length)
    for chunks in range(1, length + 1):
        # Hashes that vLLM has computed by then.
        grown = request(chunks)
        grown.all_token_ids.taken = grown.block_hashes.taken = 0
        prompt = keys.prompt(grown, chunks * CHUNK)
        assert max(grown.all_token_ids.taken, grown.block_hashes.taken) <= 2 * CHUNK
    assert prompt == whole.prompt(req, length * CHUNK)
    assert prompt != whole.prompt(req, (length - 1) * CHUNK)


def test_growing_prompt_keeps_non_token_content():
    """Pictures and adapters."""
    cat = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=CHUNK + 3, length=2 * CHUNK))
    lora = SimpleNamespace(lora_name="x")
    keys = make()
    for chunks in range(1, 8):
        prompt = keys.prompt(request(8, [cat], lora), chunks * CHUNK)
        assert prompt == make().prompt(request(8, [cat], lora), chunks * CHUNK)


def test_extended_prompt_equals_whole_prompt():
    """Both have equal hashes too."""
    whole = tokens(100, "whole")
    extended = Prompt(whole[:40]).extended(Prompt(whole[40:]))
    assert extended == Prompt(whole) and hash(extended) == hash(Prompt(whole)) and len(extended) == 100


@pytest.mark.parametrize("mode", ["token_ids", "block_hashes"])
def test_adapters_are_in_keys(mode):
    """By their identity, or for unknown content by a unique one."""

    def key(name=None):
        lora = None if name is None else SimpleNamespace(lora_name=name)
        return make(mode).prompt(request(2, lora=lora), 2 * CHUNK)

    keys = [key(), key("x"), key("y"), key(""), key("")]
    assert len(set(keys)) == len(keys)
    assert key("x") == keys[1] and key() == keys[0]
