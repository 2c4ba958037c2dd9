"""What KV depends on and neither the model's name nor the shape of its tensors says."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

# Fields of vLLM's configuration. One that a version of vLLM does not have is as one that was left out.
_MODEL = (
    "revision",
    "code_revision",
    "quantization",
    "quantization_config",
    "hf_overrides",
    "model_class_overrides",
    "dtype",
    "disable_sliding_window",
)
_CACHE = ("cache_dtype", "kv_cache_dtype_skip_layers")
_MULTIMODAL = ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method")
_DRAFT = ("model", "revision", "quantization", "dtype")

# The model's own description, where it is a directory, and what of it says nothing about the model.
_DESCRIPTIONS = ("config.json", "params.json")
_IDLE = ("_name_or_path", "transformers_version")


def fingerprint(vllm_config: Any) -> str:
    """16 hexadecimal digits, equal in all processes of all engines with this configuration.

    What vLLM was told and what the model's files say is taken, not vLLM's ``hf_config``: models change that while they
    are loaded, so a worker's is not the scheduler's.
    """
    model = vllm_config.model_config
    parts = {
        "model": _fields(model, _MODEL),
        "commit": getattr(getattr(model, "hf_config", None), "_commit_hash", None),
        "described": _described(getattr(model, "hf_config_path", None) or model.model),
        "cache": _fields(getattr(vllm_config, "cache_config", None), _CACHE),
        "multimodal": _fields(getattr(model, "multimodal_config", None), _MULTIMODAL),
    }
    if "longrope" in json.dumps([parts["described"], _plain(_rope(model))]):
        # Which of its factors are used depends on the longest request that is allowed.
        parts["max_model_len"] = model.max_model_len
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        parts["draft"] = _fields(draft, _DRAFT)
    if _plain(getattr(getattr(vllm_config, "load_config", None), "load_format", None)) == "dummy":
        parts["random weights"] = getattr(model, "seed", None)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _fields(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Those that say something."""
    values = {name: _plain(getattr(config, name, None)) for name in names}
    return {name: value for name, value in values.items() if value not in (None, {}, [], False)}


def _rope(model: Any) -> list[Any]:
    text = getattr(model, "hf_text_config", None)
    return [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]


def _described(directory: str) -> list[Any]:
    """What the description in the model's directory says; nothing for a model with a name, whose commit is known."""
    found = []
    for name in _DESCRIPTIONS:
        try:
            with open(os.path.join(directory, name), encoding="utf-8") as file:
                described = json.load(file)
        except (OSError, ValueError):
            continue
        if isinstance(described, dict):
            described = {key: value for key, value in described.items() if key not in _IDLE}
        found.append(described)
    return found


def _plain(value: Any) -> Any:
    """As JSON has it. Nothing that is another in each process, such as an address, is in it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(each), sort_keys=True) for each in value)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return [type(value).__qualname__, _plain(vars(value))]
    # torch.dtype, bytes: their text is what they are. Of anything else the type is.
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
