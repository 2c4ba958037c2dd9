"""Objects by their keys: what Python gets, and what it is refused."""

import pytest
from kvtier import Prompt


def test_keys_are_checked_and_are_no_tokens():
    with pytest.raises(ValueError, match=r"keys\[1\]: 31 bytes; each key has 32"):
        Prompt.from_keys([bytes(32), bytes(31)], 16)
    with pytest.raises(ValueError):
        Prompt.from_keys([bytes(32)], 0)
    objects = Prompt.from_keys([bytes(32), bytes([1]) * 32], 16)
    assert len(objects) == 32
    assert objects == Prompt.from_keys([bytes(32), bytes([1]) * 32], 16)
    assert objects != Prompt.from_keys([bytes([1]) * 32, bytes(32)], 16)
    for call in (lambda: objects.prefix(16), lambda: objects.extended(objects), lambda: objects.chunk_hashes(16)):
        with pytest.raises(ValueError, match="keys of objects, no tokens"):
            call()
