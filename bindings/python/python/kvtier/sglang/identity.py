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

# Options of SGLang that change the KV of a model, its precision, or its byte order.
_OPTIONS = (
    "revision",
    "model_impl",
    "model_config_parser",
    "json_model_override_args",
    "load_format",
    "model_loader_extra_config",
    "custom_weight_loader",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "qsa_indexer_dtype",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "rl_quant_profile",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "dsa_prefill_backend",
    "dsa_decode_backend",
    "linear_attn_backend",
    "mamba_backend",
    "mamba_ssm_dtype",
    "enable_mamba_cache_stochastic_rounding",
    "enable_linear_replayssm",
    "mm_process_config",
    "image_processor_backend",
    "disable_fast_image_processor",
    "enable_page_major_kv_layout",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
)
_VARIABLES = ("SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT", "SGLANG_USE_MODELSCOPE")


def model_name(args: Any) -> str:
    """Returns the model's path in SGLang's arguments, and a digest of what its KV depends on, equal in all processes of all engines."""
    import sglang
    import torch

    parts = {
        "options": fields(args, _OPTIONS),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        # Pages are stored in the byte order of the engine's own.
        "release": sglang.__version__,
        "gpu": torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
    }
    if scales := getattr(args, "quantization_param_path", None):
        parts["scales"] = state_of(scales, with_times=False)
    names = [(args.model_path, "revision"), (getattr(args, "speculative_draft_model_path", None), "speculative_draft_model_revision")]
    folders = [_folder(name, getattr(args, revision, None)) for name, revision in names if name]
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


def _folder(name: str, revision: str | None) -> str:
    """Returns the folder of a model; for a model of a hub, that of its snapshot if it is there."""
    if not os.path.exists(name):
        # Any error: the hub's library is absent, or has no such name.
        with contextlib.suppress(Exception):
            from huggingface_hub import snapshot_download

            return str(snapshot_download(name, revision=revision, local_files_only=True))
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
