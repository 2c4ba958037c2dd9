"""Values of vLLM's configuration as JSON has them, the same in every process."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import types
from collections.abc import Mapping
from typing import Any


def digest(parts: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that stand for the parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def fields(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Those that say something. One that a release of vLLM does not have is as one that was left out."""
    values = {name: plain(getattr(config, name, None)) for name in names}
    return {name: value for name, value in values.items() if value not in (None, {}, [], "", False, "auto")}


def cache_dtype(cache: Any) -> str:
    """Returns the KV cache's configured type. A worker's attention layers replace it by their own name of it."""
    name = str(plain(getattr(cache, "cache_dtype", None)) or "auto").removesuffix("_ds_mla")
    return "fp8" if name == "fp8_e4m3" else name


def plain(value: Any) -> Any:
    """As JSON has it. Nothing that is another in each process, such as an address, is in it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        # Names of attention backends; values are paths of classes there.
        return plain(value.value) if isinstance(value.value, (int, float)) else value.name
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(each), sort_keys=True) for each in value)
    if isinstance(value, functools.partial):
        return [plain(value.func), plain(value.args), plain(value.keywords)]
    if isinstance(value, types.FunctionType):
        # Many functions are called <lambda>: what they do tells them apart.
        bound = [cell.cell_contents for cell in value.__closure__ or ()]
        return [f"{value.__module__}.{value.__qualname__}", _code(value.__code__), plain(value.__defaults__), plain(bound)]
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return [type(value).__qualname__, plain(vars(value))]
    # torch.dtype, bytes: their text is what they are. Of anything else the type is.
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _code(code: types.CodeType) -> list[Any]:
    """What a function does: its instructions, names and constants."""
    constants = [_code(each) if isinstance(each, types.CodeType) else plain(each) for each in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]
