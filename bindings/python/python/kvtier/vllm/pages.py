"""Whether a page's bytes are in an order that the server knows, and what decides it otherwise."""

from __future__ import annotations

import os
import platform
from typing import Any

from .plain import cache_dtype, fields

# Elements of pages that say all there is: one number per token, head and position, scaled for a whole tensor if at all.
_NUMBERS = {"auto", "bfloat16", "half", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "NONE", "FP8_PER_TENSOR"}

# vLLM's attention backends that keep such numbers on NVIDIA GPUs by token and head, as the registered shape says.
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

_ATTENTION = ("backend", "backend_per_kind", "minimax_m3_msa_decode_backend", "indexer_kv_dtype", "hisparse_config")


def page_format(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """What the order of bytes in a page depends on; nothing for pages that the server can convert.

    Attention kernels for CPUs pack a page for the processor's instructions, by columns; AMD's may shuffle it; caches with
    scales or codes of their own may have them by page. Such pages fit only those of the same block size, kernel and
    release of vLLM. The same in all processes of an engine.
    """
    from vllm import __version__
    from vllm.platforms import current_platform

    cache = getattr(vllm_config, "cache_config", None)
    attention = fields(getattr(vllm_config, "attention_config", None), _ATTENTION)
    if backend := os.environ.get("VLLM_ATTENTION_BACKEND"):
        # Releases before there was an option.
        attention.setdefault("backend", backend)
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    formats = sorted({each for spec in groups for each in _formats(spec)} | {cache_dtype(cache)})
    is_numbers = _NUMBERS.issuperset(formats)
    is_known = attention.keys() <= {"backend"} and attention.get("backend", _TOKEN_MAJOR[0]) in _TOKEN_MAJOR
    if current_platform.is_cuda() and is_numbers and is_known:
        return {}
    return {
        "release": __version__,
        "device": current_platform.device_type,
        "machine": platform.machine(),
        "instructions": _instructions() if current_platform.is_cpu() else _capability(current_platform),
        "block_tokens": [spec.block_size for spec in groups],
        "formats": formats,
        "attention": attention,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("VLLM_ROCM_")},
    }


def _formats(spec: Any) -> list[str]:
    """A group's, by its first layer: vLLM's scheduler knows no other of unlike layers in one group."""
    several = getattr(spec, "kv_cache_specs", None)
    first = next(iter(several.values())) if several else spec
    named = (getattr(getattr(first, "kv_quant_mode", None), "name", None), getattr(first, "cache_dtype_str", None))
    return [name for name in named if name]


def _instructions() -> list[str]:
    """Those of the processor's that vLLM's kernels choose between."""
    import torch

    asked = {"amx": "_is_amx_tile_supported", "avx512": "_is_avx512_supported", "avx2": "_is_avx2_supported"}
    return [name for name, ask in asked.items() if getattr(torch.cpu, ask, lambda: False)()]


def _capability(current_platform: Any) -> list[str]:
    found = current_platform.get_device_capability()
    return [] if found is None else [str(found)]
