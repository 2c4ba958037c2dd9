"""Values of an engine's configuration as JSON, the same in every process."""

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
    """Returns 16 hexadecimal digits that identify the parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def fields(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields with a value. A field that a release of the engine lacks counts as unset."""
    values = {name: plain(getattr(config, name, None)) for name in names}
    return {name: value for name, value in values.items() if value not in (None, {}, [], "", False, "auto")}


def cache_dtype(cache: Any) -> str:
    """Returns the KV cache's configured type. A worker's attention layers replace it by their own name for it."""
    name = str(plain(getattr(cache, "cache_dtype", None)) or "auto").removesuffix("_ds_mla")
    return "fp8" if name == "fp8_e4m3" else name


def plain(value: Any) -> Any:
    """Returns a value as JSON, without anything that differs per process, such as an address."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        # The names of attention backends; their values are paths of classes.
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
        # Many functions are called <lambda>: their code distinguishes them.
        bound = [cell.cell_contents for cell in value.__closure__ or ()]
        return [f"{value.__module__}.{value.__qualname__}", _code(value.__code__), plain(value.__defaults__), plain(bound)]
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return [type(value).__qualname__, plain(vars(value))]
    # The text of a torch.dtype or of bytes identifies it. Of anything else only the type does.
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _code(code: types.CodeType) -> list[Any]:
    """Returns a function's instructions, names and constants."""
    constants = [_code(each) if isinstance(each, types.CodeType) else plain(each) for each in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]
