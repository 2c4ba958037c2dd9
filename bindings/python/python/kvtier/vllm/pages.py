"""Format of pages: whether the server can convert them, and otherwise what their byte order depends on."""

from __future__ import annotations

import os
import platform
from typing import Any

from ..plain import cache_dtype, fields
from .kinds import has_latent_windows, is_compressed, of_served, served_numbers

# Formats without state per page: one number per token, head and position, with at most one scale per tensor.
_NUMBERS = {"auto", "bfloat16", "half", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "NONE", "FP8_PER_TENSOR"}

# vLLM's attention backends whose pages on NVIDIA GPUs are ordered by token and head, as the registered shape says.
_TOKEN_MAJOR = (
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "FLEX_ATTENTION",
    "FLASHMLA",
    "CUTLASS_MLA",
    "FLASHINFER_MLA",
    "FLASH_ATTN_MLA",
    "TRITON_MLA",
)

# What the bytes of a recurrent state depend on, beside the release: its parts, their types and its kind. Kernels for one kind (those
# between which VLLM_GDN_DECODE_KERNEL chooses) write the same layout.
_STATE = ("shapes", "dtypes", "mamba_type", "tp_replicated")
_STATE_CACHE = ("replayssm_buffer_len", "use_replayssm", "use_kda_recoverssm")

_ATTENTION = ("backend", "backend_per_kind", "minimax_m3_msa_decode_backend", "indexer_kv_dtype", "hisparse_config")


def page_format(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Returns what the byte order of a page depends on; empty for pages that the server can convert.

    Attention kernels for CPUs pack a page by columns, for the processor's instructions. AMD's may shuffle it. Caches with
    scales or codes may have them per page. Such pages fit only pages of the same block size, kernel and release of vLLM.
    The result is the same in all processes of an engine.
    """
    from vllm.platforms import current_platform

    order = byte_order(vllm_config, kv_cache_config)
    groups, attention = _groups(kv_cache_config), order["attention"]
    # Windows of latents, and latents of several tokens, have pages of their own kernels' making.
    is_own = has_latent_windows(groups) or is_compressed(kv_cache_config)
    is_numbers = _NUMBERS.issuperset(order["formats"]) and "states" not in order and not is_own
    is_known = attention.keys() <= {"backend"} and attention.get("backend", _TOKEN_MAJOR[0]) in _TOKEN_MAJOR
    return {} if current_platform.is_cuda() and is_numbers and is_known else order


def _groups(kv_cache_config: Any) -> list[Any]:
    cached = of_served(kv_cache_config.kv_cache_groups, served_numbers(kv_cache_config))
    return [group.kv_cache_spec for group in cached]


def byte_order(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Returns what the byte order of any page depends on."""
    from vllm import __version__
    from vllm.platforms import current_platform

    cache = getattr(vllm_config, "cache_config", None)
    attention = fields(getattr(vllm_config, "attention_config", None), _ATTENTION)
    if backend := os.environ.get("VLLM_ATTENTION_BACKEND"):
        # Releases without the option.
        attention.setdefault("backend", backend)
    groups = _groups(kv_cache_config)
    formats = sorted({each for spec in groups for each in _formats(spec)} | {cache_dtype(cache)})
    states = [fields(spec, _STATE) for spec in map(_first, groups) if hasattr(spec, "mamba_cache_mode")]
    return {
        "release": __version__,
        "device": current_platform.device_type,
        "machine": platform.machine(),
        "instructions": _instructions() if current_platform.is_cpu() else _capability(current_platform),
        "block_tokens": [spec.block_size for spec in groups],
        "formats": formats,
        "attention": attention,
        **({"states": states, "state cache": fields(cache, _STATE_CACHE) | fields(vllm_config, ("mamba_config",))} if states else {}),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("VLLM_ROCM_", "VLLM_SSM_"))},
    }


def _first(spec: Any) -> Any:
    """Returns the kind of a group's first layer: vLLM's scheduler knows only that one if layers of a group differ."""
    several = getattr(spec, "kv_cache_specs", None)
    return next(iter(several.values())) if several else spec


def _formats(spec: Any) -> list[str]:
    """Returns a group's formats."""
    first = _first(spec)
    named = (getattr(getattr(first, "kv_quant_mode", None), "name", None), getattr(first, "cache_dtype_str", None))
    return [name for name in named if name]


def _instructions() -> list[str]:
    """Returns the processor's instruction sets that vLLM's kernels choose between."""
    import torch

    probes = {"amx": "_is_amx_tile_supported", "avx512": "_is_avx512_supported", "avx2": "_is_avx2_supported"}
    return [name for name, probe in probes.items() if getattr(torch.cpu, probe, lambda: False)()]


def _capability(current_platform: Any) -> list[str]:
    found = current_platform.get_device_capability()
    return [] if found is None else [str(found)]
