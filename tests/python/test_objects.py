"""Objects by their keys: what Python gets, and what it is refused."""

import pytest
from kvtier import Client, Prompt


def test_keys_are_checked_and_are_no_tokens():
    with pytest.raises(ValueError, match=r"keys\[1\]: 31 bytes; each key has 32"):
        Prompt.from_keys([bytes(32), bytes(31)], 16)
    with pytest.raises(ValueError, match="chunk_tokens: 0"):
        Prompt.from_keys([bytes(32)], 0)
    with pytest.raises(ValueError, match="chunk_tokens: 16; block_tokens is needed too"):
        Client("tcp://localhost:1", chunk_tokens=16)
    client = Client("tcp://localhost:1")
    with pytest.raises(ValueError, match="prompt: it has tokens; Prompt.from_keys is needed"):
        client.find(Prompt([1] * 16), "r", "m")
    client.close()
    objects = Prompt.from_keys([bytes(32), bytes([1]) * 32], 16)
    assert len(objects) == 32
    assert objects == Prompt.from_keys([bytes(32), bytes([1]) * 32], 16)
    assert objects != Prompt.from_keys([bytes([1]) * 32, bytes(32)], 16)
    for call in (lambda: objects.prefix(16), lambda: objects.extended(objects), lambda: objects.chunk_hashes(16)):
        with pytest.raises(ValueError, match="keys of objects, no tokens"):
            call()
