#!/usr/bin/env python3
"""Tiny models with random weights, one for each way in which KV may differ. Nothing is downloaded.

  models.py --out DIR     all of them, from fixed seeds: DIR/llama, llama-other-weights, windows, sinks,
                          windows-only, block-sizes, chunked, states, convolutions, pictures, adapter-a, adapter-b

Weights of queries and keys are large on purpose: with the usual scale a random model hardly attends to its context, and
an answer could not show wrong KV.
"""

import argparse
import json
import os
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

VOCABULARY = 4096
PICTURE_TOKEN = "<picture>"
PICTURE_SIDE, PATCH = 224, 14
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 4, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "initializer_range": 0.05, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
ADAPTED = ("q_proj", "k_proj", "v_proj")
RANK = 8


def llama():
    """Full attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT))


def windows():
    """Four layers of six attend to the last 128 tokens only."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    own = {"num_hidden_layers": 6, "sliding_window": 128, "layer_types": kinds, "query_pre_attn_scalar": 64}
    return Gemma3ForCausalLM(Gemma3TextConfig(**TEXT | own))


def sinks():
    """Experts, sinks of attention, and every second layer attends to the last 128 tokens only."""
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = ["sliding_attention", "full_attention"] * 2
    own = {"sliding_window": 128, "layer_types": kinds, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
    model = GptOssForCausalLM(GptOssConfig(**TEXT | own))
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.data.normal_(0.0, 0.5)
    return model


def windows_only():
    """All layers attend to the last 384 tokens only."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**TEXT | {"sliding_window": 384}))


def block_sizes():
    """Two layers of three attend to the last 128 tokens only, and have half the heads of keys and values that the third has: vLLM gives
    them blocks of twice the tokens, so that all blocks have the same bytes."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    full = {"head_dim": TEXT["head_dim"], "num_key_value_heads": 2 * TEXT["num_key_value_heads"]}
    own = {
        "num_hidden_layers": 6, "sliding_window": 128, "layer_types": kinds, "hidden_size_per_layer_input": 0,
        "per_layer_config": {number: full for number, kind in enumerate(kinds) if kind == "full_attention"},
    }  # fmt: skip
    return Gemma4ForCausalLM(Gemma4TextConfig(**TEXT | own))


def chunked():
    """Three layers of four attend only to the tokens of their chunk of 384 tokens, with experts."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    own = {
        "attention_chunk_size": 384, "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 512, "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    }  # fmt: skip
    return Llama4ForCausalLM(Llama4TextConfig(**TEXT | own))


def states():
    """Three layers of four keep a recurrent state (gated delta rule) instead of keys and values, with experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    own = {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "decoder_sparse_step": 1,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25,
    }  # fmt: skip
    return Qwen3NextForCausalLM(Qwen3NextConfig(**TEXT | own))


def convolutions():
    """Every second layer keeps the last tokens of a short convolution."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    own = {
        "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "conv_dim": 256, "conv_use_xavier_init": True,
        "block_dim": 256, "block_ff_dim": 512, "block_multiple_of": 64, "block_auto_adjust_ff_dim": False,
    }  # fmt: skip
    return Lfm2ForCausalLM(Lfm2Config(**TEXT | own))


def pictures(token):
    """A language model that sees; `token` stands for each patch of a picture."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    eye = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        image_size=PICTURE_SIDE, patch_size=PATCH,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=eye, text_config=LlamaConfig(**TEXT), image_token_index=token, vision_feature_layer=-1,
        vision_feature_select_strategy="default", image_seq_length=(PICTURE_SIDE // PATCH) ** 2,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config)
    # The picture must weigh as much as the words beside it.
    for name, weight in model.named_parameters():
        if "multi_modal_projector" in name:
            weight.data.normal_(0.0, 0.3)
    return model


def tokenizer():
    """Words of one byte; the rest of the vocabulary are numbers that tests use as ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<{number}>" for number in range(len(names), VOCABULARY - 1)] + [PICTURE_TOKEN]
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(PICTURE_TOKEN, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def write(model, directory, seed):
    """One model as vLLM reads it."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(2.0)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(directory, safe_serialization=True)
    tokenizer().save_pretrained(directory)
    print(json.dumps({"model": directory.name, "seed": seed, "parameters": sum(p.numel() for p in model.parameters())}))


def write_processor(directory):
    """What cuts pictures into patches; and the names of weights that vLLM knows, which transformers has since changed."""
    from safetensors.torch import load_file, save_file
    from transformers import CLIPImageProcessor, LlavaProcessor

    side = {"height": PICTURE_SIDE, "width": PICTURE_SIDE}
    LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": PICTURE_SIDE}, crop_size=side),
        tokenizer=tokenizer(), patch_size=PATCH, vision_feature_select_strategy="default", image_token=PICTURE_TOKEN,
        num_additional_image_tokens=1,
    ).save_pretrained(directory)  # fmt: skip
    path = directory / "model.safetensors"
    named = {key.replace("vision_tower.", "vision_tower.vision_model."): value for key, value in load_file(path).items()}
    save_file(named, path, metadata={"format": "pt"})


def write_adapter(directory, seed):
    """A LoRA adapter of `llama`, large enough to change what the model says."""
    import torch
    from safetensors.torch import save_file

    source, hidden = torch.Generator().manual_seed(seed), TEXT["hidden_size"]
    width = {"q_proj": hidden, "k_proj": 128, "v_proj": 128}
    weights = {}
    for layer in range(TEXT["num_hidden_layers"]):
        for name in ADAPTED:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=source) * 0.2
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width[name], RANK, generator=source) * 0.2
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(ADAPTED), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def main():
    """Write all."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    import torch

    kinds = {
        "llama": (llama, 1), "llama-other-weights": (llama, 2), "windows": (windows, 3), "sinks": (sinks, 5),
        "windows-only": (windows_only, 6),
        "block-sizes": (block_sizes, 12),
        "chunked": (chunked, 8),
        "states": (states, 9),
        "convolutions": (convolutions, 10),
        "pictures": (lambda: pictures(VOCABULARY - 1), 4),
    }  # fmt: skip
    for name, (make, seed) in kinds.items():
        torch.manual_seed(seed)
        write(make(), out / name, seed)
    write_processor(out / "pictures")
    for seed, name in enumerate(("adapter-a", "adapter-b"), 10):
        write_adapter(out / name, seed)


if __name__ == "__main__":
    main()
