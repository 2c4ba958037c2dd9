"""Which tensor-parallel ranks have the same KV: by vLLM's own kinds of cache, and its models' sources."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rig import BLOCK
from vllm_rig import model_config, vllm_config  # skips without vLLM

from kvtier.vllm import replicas
from vllm.v1 import kv_cache_interface as interface

SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
HEADS = interface.FullAttentionSpec(**SHAPE)
WINDOW = interface.SlidingWindowSpec(**SHAPE, sliding_window=BLOCK)
LATENTS = interface.MLAAttentionSpec(**SHAPE)
LATENT_WINDOW = interface.SlidingWindowMLASpec(**SHAPE, sliding_window=BLOCK)
RING = interface.CircularBufferSpec(**SHAPE)


def state(**more):
    """A recurrent state."""
    return interface.MambaSpec(block_size=BLOCK, shapes=((8,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align", **more)


def found(*specs, tensor=8, stages=1, known=1, draft=None, draft_ranks=8, **model):
    """The number of ranks with the same KV in every layer; a group for each kind of cache."""
    config = vllm_config(SimpleNamespace(url="x"), tensor=tensor, stages=stages)
    config.model_config = model_config(**{"heads": 4, **model})
    if draft:
        config.speculative_config = SimpleNamespace(
            draft_model_config=draft, draft_parallel_config=SimpleNamespace(tensor_parallel_size=draft_ranks)
        )
    groups = [interface.KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    cache = interface.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, kv_tp_replicas=known)
    return replicas.tp_replicas(config, cache)


# proves: docs/compare.md#more-ranks-than-kv-heads
def test_ranks_share_heads():
    """If there are fewer heads than ranks, in windows too."""
    assert [found(HEADS, heads=heads) for heads in (1, 2, 4, 8, 16, 3)] == [8, 4, 2, 1, 1, 1]
    assert found(HEADS, WINDOW) == found(HEADS, WINDOW, stages=2) == 2
    assert found(HEADS, architecture="Qwen3MoeForCausalLM") == 2
    assert found(HEADS, tensor=1, heads=1) == 1


# proves: docs/compare.md#more-ranks-than-kv-heads
# proves: docs/identity.md#parallelconfig
def test_what_is_not_certain_counts_once_per_rank():
    """Layers may differ in a model that is not known, or of another library; a rank quantizes its own part of the weights."""
    for architecture in ("MiMoV2FlashForCausalLM", "Step3p5ForCausalLM", "TransformersForCausalLM", "NoSuchModel"):
        assert found(HEADS, architecture=architecture) == 1
    other = SimpleNamespace(models={"LlamaForCausalLM": SimpleNamespace(module_name="plugin.llama")})
    config = vllm_config(SimpleNamespace(url="x"), tensor=8, heads=4)
    config.model_config.registry = other
    assert replicas.tp_replicas(config, interface.KVCacheConfig(8, [], [interface.KVCacheGroupSpec(["layer"], HEADS)])) == 1
    assert found(HEADS, quantization="fp8") == 1
    assert found(HEADS, heads=[4, 8]) == 1
    # As many heads in this rank as only a layer with more heads has.
    assert found(HEADS, interface.FullAttentionSpec(**SHAPE | {"num_kv_heads": 2})) == 1


def test_quantized_checkpoints_have_the_same_heads_in_all_ranks():
    """Their scales are the checkpoint's."""
    checkpoint = {"quantization": "fp8", "hf_config": SimpleNamespace(quantization_config={"quant_method": "fp8"})}
    assert found(HEADS, **checkpoint) == 2
    # Each rank quantizes what the checkpoint has.
    assert found(HEADS, **checkpoint, quantization_config={"quant_method": "fp8_per_block"}) == 1


def test_all_ranks_have_latents():
    """Scratch memory does not count. Layers of another kind have their own pieces, if they are not known."""
    latent = {"mla": True, "architecture": "DeepseekV2ForCausalLM"}
    assert found(LATENTS, LATENT_WINDOW, RING, **latent) == found(LATENTS, stages=2, **latent) == 8
    assert found(LATENTS, HEADS, **latent) == 1
    # Without MLA in the model's configuration (VLLM_MLA_DISABLE) there are heads.
    assert found(LATENTS, architecture="DeepseekV2ForCausalLM") == 1


def test_states_are_shared_where_vllm_says_so():
    """Others are divided among the ranks."""
    latent = {"mla": True, "architecture": "DeepseekV2ForCausalLM"}
    assert found(HEADS, state()) == found(LATENTS, state(), **latent) == 1
    assert found(HEADS, state(tp_replicated=True)) == 2 and found(LATENTS, state(tp_replicated=True), **latent) == 8


def test_drafts_have_heads_of_their_own():
    """All layers need a common number. The scheduler, which knows only the first layer of a group, has the same as the workers."""
    latent = {"mla": True, "architecture": "DeepseekV2ForCausalLM"}
    assert [found(HEADS, draft=model_config(heads)) for heads in (1, 2, 4, 8)] == [2, 2, 2, 1]
    assert found(HEADS, draft=model_config(4, "Glm4MoeMTPModel")) == 1 and found(HEADS, draft=model_config(4), draft_ranks=1) == 1
    assert found(LATENTS, draft=model_config(4, "DeepSeekMTPModel", mla=True), draft_ranks=1, **latent) == 8
    several = interface.UniformTypeKVCacheSpecs(BLOCK, kv_cache_specs={"layer.0": LATENTS, "draft": HEADS})
    assert found(several, draft=model_config(2), **latent) == found(LATENTS, draft=model_config(2), **latent) == 4


def test_vllm_knows_more():
    """Of each layer; of stages, the scheduler's process knows only the first one's."""
    assert found(HEADS, architecture="NoSuchModel", known=4) == 4
    assert found(HEADS, architecture="NoSuchModel", known=4, stages=2) == 1


# proves: docs/compare.md#more-ranks-than-kv-heads
@pytest.mark.parametrize("name", replicas._UNIFORM)
def test_listed_models_have_one_number_of_heads(name):
    """Their sources read no other, and divide none themselves."""
    source = Path(importlib.util.find_spec(f"vllm.model_executor.models.{name}").origin).read_text()
    named = set(re.findall(r"\w*(?:kv_head|key_value_head|attention_group|query_group)\w*", source))
    assert named <= {"num_key_value_heads", "num_kv_heads", "total_num_kv_heads"}
    assert not named or "QKVParallelLinear(" in source or "(LlamaAttention)" in source
