"""Digest of what KV depends on beside the model's name and the shape of its tensors."""

from __future__ import annotations

import json
import os
from typing import Any

from ..files import described, weights_of
from ..plain import cache_dtype, digest, fields, plain

# Fields of vLLM's configuration; docs/identity.md has all others, with the reasons.
_MODEL = (
    "revision",
    "code_revision",
    "quantization",
    "quantization_config",
    "hf_overrides",
    "model_class_overrides",
    "model_impl",
    "config_format",
    "convert",
    "dtype",
    "disable_sliding_window",
)
_CACHE = ("kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill")
_MULTIMODAL = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
_ATTENTION = ("indexer_kv_dtype", "use_non_causal")
_DRAFT = ("model", "revision", "quantization", "dtype")
_LOAD = ("model_loader_extra_config",)
# Load formats whose weights are not the files at the model's path.
_OTHER_SOURCES = ("ipc_cache", "modelexpress", "tensorizer")
_WHOLE_CONFIGS = ("additional_config", "diffusion_config", "engram_config")


def fingerprint(vllm_config: Any) -> str:
    """Returns 16 hexadecimal digits, equal in all processes of all engines with this configuration.

    The source is vLLM's options and the model's files, not vLLM's ``hf_config``: models change that while they are loaded,
    so a worker's differs from the scheduler's.
    """
    model = vllm_config.model_config
    cache, load = getattr(vllm_config, "cache_config", None), getattr(vllm_config, "load_config", None)
    if getattr(cache, "calculate_kv_scales", False):
        raise ValueError(
            "calculate_kv_scales: True; KvTierConnector serves only False, since no page has the scales that each engine computes"
        )
    parts = {
        "model": fields(model, _MODEL),
        "commit": getattr(getattr(model, "hf_config", None), "_commit_hash", None),
        "described": [described(each) for each in (getattr(model, "hf_config_path", None), model.model) if each],
        "cache": fields(cache, _CACHE),
        "cache dtype": cache_dtype(cache),
        "multimodal": fields(getattr(model, "multimodal_config", None), _MULTIMODAL),
        "attention": fields(getattr(vllm_config, "attention_config", None), _ATTENTION),
        "load": fields(load, _LOAD),
        "whole": fields(vllm_config, _WHOLE_CONFIGS),
        # The hub that resolves a name.
        "hub": "modelscope" if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true") else "",
    }
    text = json.dumps([parts["described"], plain(_rope(model))])
    if any(name in text for name in ("longrope", "dynamic", "llama4")):
        # Position factors depend on the longest allowed request, and in Llama 4 a scale of queries.
        parts["max_model_len"] = model.max_model_len
    if "llama4" in text:
        parts["generation"] = [plain(getattr(model, name, None)) for name in ("generation_config", "override_generation_config")]
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        parts["draft"] = fields(draft, _DRAFT) | fields(speculative, ("method", "kv_cache_dtype"))
        parts["draft weights"] = weights_of(draft.model)
    load_format = _load_format(vllm_config)
    if load_format == "dummy":
        # Each rank makes up its own part's.
        ranks = getattr(getattr(vllm_config, "parallel_config", None), "tensor_parallel_size", 1)
        parts["random weights"] = [getattr(model, "seed", None), ranks]
    else:
        parts["weights"] = weights_of(weights_path(model))
        if load_format in _OTHER_SOURCES:
            parts["weights from"] = load_format
    return digest(parts)


def unknown_weights(vllm_config: Any) -> str | None:
    """Returns why replaced weights of the same name would not be noticed; None if they are."""
    model, load_format = vllm_config.model_config, _load_format(vllm_config)
    path = weights_path(model)
    if load_format in _OTHER_SOURCES:
        return f"--load-format {load_format} reads other files than those at {path}"
    is_known = load_format == "dummy" or getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    return None if is_known or weights_of(path) else f"no file of the weights at {path} can be read here, and no commit is known"


def weights_path(model: Any) -> str:
    """Returns the path of the weights: vLLM may have fetched the other files to a directory of this host."""
    path: str = getattr(model, "model_weights", None) or model.model
    return path


def _load_format(vllm_config: Any) -> Any:
    return plain(getattr(getattr(vllm_config, "load_config", None), "load_format", None))


def _rope(model: Any) -> list[Any]:
    text = getattr(model, "hf_text_config", None)
    return [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
