"""Loads every pickle of a vector file with PyTorch and compares the tensors with the row.

Run by hand:  cargo test -p kvtier-proto --test it print_vectors -- --ignored --nocapture | grep '^{' \
              | python check_written.py > written.json
A row that PyTorch does not load as described ends the run.
"""

import json
import pickle
import sys

import torch

vectors = json.load(sys.stdin)
for row in vectors["rows"]:
    loaded = pickle.loads(bytes.fromhex(row["pickle"]))
    assert type(loaded) is list and len(loaded) == len(row["tensors"]), row["name"]
    for tensor, expected in zip(loaded, row["tensors"]):
        assert str(tensor.dtype) == "torch." + expected["dtype"], row["name"]
        assert list(tensor.shape) == expected["shape"], row["name"]
        assert tensor.is_contiguous(), row["name"]
        flat = torch.empty(0, dtype=torch.uint8)
        flat = flat.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),))
        assert tensor.storage_offset() == 0, row["name"]
        assert bytes(flat.tolist()).hex() == expected["elements"], row["name"]

note = f"written by this crate, loaded and compared with PyTorch {torch.__version__}, Python {sys.version.split()[0]}"
print(json.dumps({"note": note, "rows": vectors["rows"]}, indent=1))
