"""Tensor-parallel ranks with the same KV: each has latents whole, and neighbours have the same head if there are fewer heads than ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .kinds import is_latent, is_state, of_served, served_numbers, specs_of

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# vLLM's modules in which all attention layers have num_key_value_heads heads, and rank r has head r // (ranks / heads), as
# QKVParallelLinear divides them. In other models layers may differ in their number of heads, which the configuration does not always say.
_UNIFORM = (
    "gemma2", "gemma3", "glm4", "glm4_moe", "granite", "llama", "llama_eagle", "llama_eagle3", "mistral", "mixtral",
    "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip


def tp_replicas(vllm_config: Any, kv_cache_config: KVCacheConfig) -> int:
    """Returns how many neighbouring tensor-parallel ranks have the same bytes in every cached layer; 1 where that is not certain.

    It divides the tensor-parallel size, and is the same in all processes of an engine.
    """
    parallel = vllm_config.parallel_config
    tensor = parallel.tensor_parallel_size
    if parallel.pipeline_parallel_size == 1 and (known := getattr(kv_cache_config, "kv_tp_replicas", 1)) > 1:
        # vLLM knows, of all layers; of stages, the scheduler has only the first one's number.
        return int(known)
    models = [(vllm_config.model_config, tensor)]
    speculative = getattr(vllm_config, "speculative_config", None)
    if (draft := getattr(speculative, "draft_model_config", None)) is not None:
        own = getattr(speculative, "draft_parallel_config", None)
        models.append((draft, getattr(own, "tensor_parallel_size", 0)))
    latent = [bool(model.use_mla) for model, _ in models]
    groups = of_served(kv_cache_config.kv_cache_groups, served_numbers(kv_cache_config))
    if not all(_is_known(spec, latent) for group in groups for spec in specs_of(group.kv_cache_spec)):
        return 1
    return math.gcd(*(tensor if model.use_mla else _ranks_per_head(model, tensor, ranks) for model, ranks in models))


def _is_known(spec: Any, latent: list[bool]) -> bool:
    """Whether the models' configurations say which ranks have the same: of states, vLLM says it of each. ``latent``: the models whose
    attention has latents."""
    if is_state(spec):
        return getattr(spec, "tp_replicated", False)
    if is_latent(spec):
        return any(latent)
    # A rank with several heads shares none.
    return not all(latent) and getattr(spec, "num_kv_heads", None) == 1


def _ranks_per_head(model: Any, tensor: int, ranks: int) -> int:
    """Returns how many neighbouring ranks have the same head of a model, which ``ranks`` ranks compute."""
    module = getattr(model.registry.models.get(model.architecture), "module_name", "") if hasattr(model, "registry") else ""
    is_uniform = module in {f"vllm.model_executor.models.{name}" for name in _UNIFORM}
    heads = getattr(getattr(model, "hf_text_config", None), "num_key_value_heads", None)
    if not is_uniform or ranks != tensor or _is_quantized_here(model):
        return 1
    if not isinstance(heads, int) or heads < 1 or heads != model.get_total_num_kv_heads() or tensor % heads:
        return 1
    return tensor // heads


def _is_quantized_here(model: Any) -> bool:
    """Whether each rank quantizes its part of the weights itself, by scales that may depend on its queries' part too."""
    if getattr(model, "quantization_config", None):
        # vLLM's own, which it also applies to a quantized checkpoint.
        return True
    return bool(getattr(model, "quantization", None)) and not getattr(model.hf_config, "quantization_config", None)
