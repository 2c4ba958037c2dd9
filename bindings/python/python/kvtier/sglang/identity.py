"""Identity of pages: what their bytes depend on beside the tokens, salt and adapter that SGLang's hashes have."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from typing import Any

from ..files import described, state_of, weights_of
from ..plain import digest, fields

logger = logging.getLogger(__name__)

# Options of SGLang that change the KV of a model, its precision, or its byte order; tests/sglang has all others.
_OPTIONS = (
    *("revision", "weight_version", "model_impl", "model_config_parser", "json_model_override_args", "is_embedding", "trust_remote_code"),
    *("load_format", "model_loader_extra_config", "custom_weight_loader", "ple_offload_dir", "forward_hooks", "debug_tensor_dump_input_file"),
    *("device", "dtype", "enable_tf32_matmul", "enable_deterministic_inference", "rl_on_policy_target", "enable_quant_communications"),
    *("quantization", "modelopt_quant", "quantize_and_serve", "fp8_gemm_runner_backend", "fp4_gemm_runner_backend"),
    *("kv_cache_dtype", "prefill_kv_cache_dequant_dtype", "enable_page_major_kv_layout", "enable_unified_memory", "c128_page_size"),
    *("dcp_size", "enable_prefill_cp", "cp_strategy", "enable_dsa_cache_layer_split", "enable_kv_cache_sharding"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "triton_attention_reduce_in_fp32"),
    *("dsa_prefill_backend", "dsa_decode_backend", "dsa_topk_backend", "speculative_dsa_topk_backend"),
    *("enable_dsa_fused_indexer", "qsa_indexer_dtype"),
    *("dsv4_attn_backend", "dsv4_prefill_backend", "enable_deepseek_v4_fp4_indexer"),
    *("enable_hisparse", "hisparse_config", "enable_encoder_swa_bounded_replay", "enable_decoder_swa_bounded_replay"),
    *("linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend", "linear_attn_verify_backend"),
    *("enable_linear_replayssm", "enable_linear_replayssm_spec", "linear_replayssm_cache_len", "enable_scattered_sconv"),
    *("mamba_backend", "mamba_ssm_dtype", "enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds"),
    *("enable_int8_mamba_checkpoint", "enable_amd_monokernel", "enable_nvidia_megakernel"),
    *("moe_runner_backend", "moe_a2a_backend", "deepep_dispatcher_output_dtype", "flashinfer_a2a_dispatch_type", "elastic_ep_backend"),
    *("enable_w4a4_mxfp4_megamoe", "flashinfer_mxfp4_moe_precision", "enable_waterfill", "enable_megamoe_for_layernorm_sp"),
    *("disable_shared_experts_fusion", "enforce_shared_experts_fusion"),
    *("kt_method", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token", "dllm_algorithm", "experts_shared_outer_loras"),
    *("mm_process_config", "image_processor_backend", "disable_fast_image_processor", "trust_mm_content_hashes"),
    "enable_precise_embedding_interpolation",
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_load_format"),
    *("speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype", "speculative_draft_attention_backend"),
    *("speculative_draft_window_size", "speculative_draft_sink_size", "enable_multi_layer_eagle", "speculative_moe_runner_backend"),
    *("speculative_moe_a2a_backend", "speculative_enable_w4a4_mxfp4_megamoe"),
)
# Options that are paths of files: their state counts, their names do not.
_PATHS = (
    *("quantization_param_path", "modelopt_checkpoint_restore_path", "rl_quant_profile", "kt_weight_path", "dllm_algorithm_config"),
    *("decrypted_config_file", "decrypted_draft_config_file", "uno_lora_path"),
)
# Load formats whose weights are not the files at the model's path, and options with values that say so.
_OTHER_FORMATS = ("private", "remote", "remote_instance")
_OTHER_SOURCES = ("modelexpress_config", "checkpoint_engine_wait_weights_before_ready")
_VARIABLES = ("SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT", "SGLANG_USE_MODELSCOPE")


def model_name(args: Any) -> str:
    """Returns the model's path in SGLang's arguments, and a digest of what its KV depends on, equal in all processes of all engines.

    Raises:
        ValueError: the weights are from elsewhere.
    """
    import sglang
    import torch

    _check_source(args)
    parts = {
        "options": fields(args, _OPTIONS),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        # Pages are stored in the byte order of the engine's own.
        "release": sglang.__version__,
        "gpu": torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
    }
    named = {name: getattr(args, name, None) for name in _PATHS}
    parts["files"] = {name: state_of(path, with_times=False) or path for name, path in named.items() if path}
    # SGLang derives the ids of these adapters from their names and paths.
    given = getattr(args, "lora_paths", None) or ()
    paths = [_adapter_path(each) for each in (given.values() if isinstance(given, dict) else given)]
    parts["adapters"] = [state_of(_folder(path, None, args), with_times=False) for path in paths]
    names = [(args.model_path, "revision"), (getattr(args, "speculative_draft_model_path", None), "speculative_draft_model_revision")]
    folders = [_folder(name, getattr(args, revision, None), args) for name, revision in names if name]
    parts["described"] = [described(folder) for folder in folders]
    if any(name in json.dumps(parts["described"]) for name in ("longrope", "dynamic", "llama4")):
        # Position factors depend on the longest allowed request, and in Llama 4 a scale of queries.
        parts["context_length"] = getattr(args, "context_length", None)
    if getattr(args, "load_format", None) == "dummy":
        # Each rank makes up the weights of its own part.
        parts["random weights"] = getattr(args, "tp_size", None)
    else:
        parts["weights"] = [weights_of(folder) for folder in folders]
        if None in parts["weights"]:
            logger.warning("no file of the weights at %s can be read here: other weights of the same name are not noticed", folders)
    return f"{args.model_path.replace('@', '_')}#{digest(parts)}"


def shared_nonce(group: Any) -> bytes:
    """Returns random bytes, the same for all ranks of a group. Each of them must call this."""
    import torch

    made = [os.urandom(16)]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(made, torch.distributed.get_global_rank(group, 0), group)
    return made[0]


def _check_source(args: Any) -> None:
    found = {name: getattr(args, name, None) for name in ("load_format", "speculative_draft_load_format")}
    found = {name: value for name, value in found.items() if value in _OTHER_FORMATS}
    found |= {name: getattr(args, name, None) for name in _OTHER_SOURCES}
    if (mode := getattr(args, "weight_cache_mode", "off")) != "off":
        found["weight_cache_mode"] = mode
    for name, value in found.items():
        if value:
            raise ValueError(f"{name}: {value}; the weights are not the files at {args.model_path}: set the option model_name, one per weights")


def _adapter_path(given: Any) -> str:
    """Returns the path in a LoRARef, its fields, ``PATH`` or ``NAME=PATH``."""
    path = given["lora_path"] if isinstance(given, dict) else getattr(given, "lora_path", None)
    return path or given.partition("=")[2] or given


def _folder(name: str, revision: str | None, args: Any) -> str:
    """Returns the folder of a model; for a model of a hub, that of its snapshot if it is there."""
    if not os.path.exists(name):
        # Any error: the hub's library is absent, or has no such name.
        with contextlib.suppress(Exception):
            from huggingface_hub import snapshot_download

            return str(snapshot_download(name, revision=revision, cache_dir=getattr(args, "download_dir", None), local_files_only=True))
    return name


@dataclass(frozen=True)
class Ranks:
    """Place of this process among those that divide the model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def piece(self, is_replicated: bool) -> tuple[int, int]:
        """Returns the number of pieces of a page, and which one this process has. All tensor-parallel ranks have a replicated piece."""
        rank, size = (0, 1) if is_replicated else (self.tp_rank, self.tp_size)
        return size * self.cp_size * self.pp_size, (self.pp_rank * self.cp_size + self.cp_rank) * size + rank
