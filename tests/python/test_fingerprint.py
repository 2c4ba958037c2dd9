"""The model's name in keys: it differs between engines with different KV, and is equal in an engine's processes."""

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rig import tokens

pytest.importorskip("vllm")

from conftest import CHUNK  # noqa: E402
from kvtier import files, plain  # noqa: E402
from kvtier.vllm import fingerprint, pages  # noqa: E402
from kvtier.vllm.options import Identity, Options  # noqa: E402
from vllm_rig import Vllm, request, vllm_config  # noqa: E402


def described(model=None, cache=None, load=None, draft=None, pictures=None, parallel=None, more=None, **options):
    """Returns a configuration with these fields."""
    made = vllm_config(SimpleNamespace(url="x"), **options)
    vars(made.model_config).update(model or {})
    vars(made.parallel_config).update(parallel or {})
    if pictures:
        made.model_config.multimodal_config = SimpleNamespace(**pictures)
    made.cache_config = SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[])
    vars(made.cache_config).update(cache or {})
    made.load_config = SimpleNamespace(**(load or {"load_format": "auto"}))
    made.speculative_config = draft and SimpleNamespace(draft_model_config=SimpleNamespace(**draft))
    vars(made).update(more or {})
    return made


def name(*args, **fields):
    """Returns the name in keys."""
    return Identity.of(described(*args, **fields)).model_name


# proves: docs/identity.md#every-option-of-vllm-032
# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_name_has_all_kv_dependencies(tmp_path):
    """Each of these changes computes other KV from the same tokens, in tensors of the same shape."""
    short, long = ({"rope_parameters": {"rope_type": "default", "rope_theta": theta}} for theta in (1e4, 1e6))
    names = [
        name(),
        name({"hf_overrides": short}),
        name({"hf_overrides": long}),
        name({"hf_overrides": test_name_has_all_kv_dependencies}),
        name({"revision": "main"}),
        name({"revision": "v2"}),
        name({"hf_config": SimpleNamespace(_commit_hash="abc")}),
        name({"quantization": "fp8"}),
        name({"quantization_config": {"linear": "fp8"}}),
        name({"dtype": "torch.float16"}),
        name({"disable_sliding_window": True}),
        name(cache={"cache_dtype": "fp8_e4m3"}),
        name(cache={"cache_dtype": "fp8_e5m2"}),
        name(cache={"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}),
        name(pictures={"mm_processor_kwargs": {"min_pixels": 4}}),
        name(load={"load_format": "dummy"}),
        name(load={"load_format": "dummy"}, more={"parallel_config": SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)}),
        name(draft={"model": "draft/one"}),
        name(draft={"model": "draft/two"}),
        name({"model_impl": "transformers"}),
        name({"config_format": "mistral"}),
        name({"convert": "embed"}),
        name(cache={"kv_sharing_fast_prefill": True}),
        name(pictures={"mm_encoder_fp8_scale_path": "/scales"}),
        name(pictures={"media_io_kwargs": {"video": {"num_frames": 4}}}),
        name(pictures={"mm_encoder_attn_dtype": "fp8"}),
        name(load={"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "s3://a"}}),
        name(more={"attention_config": SimpleNamespace(indexer_kv_dtype="fp4")}),
        name(more={"attention_config": SimpleNamespace(use_non_causal=True)}),
        name(more={"additional_config": {"plugin": 1}}),
        name(more={"engram_config": SimpleNamespace(rows=1)}),
        name(more={"diffusion_config": SimpleNamespace(steps=1)}),
    ]
    assert len(set(names)) == len(names)
    assert all(each.startswith("test/vllm#") and len(each) == len("test/vllm#") + 16 for each in names)
    # A directory's description of the model counts, not its own name.
    path = tmp_path / "config.json"
    by_content = []
    for content in ({"rope_theta": 1}, {"rope_theta": 2}, {"rope_theta": 2, "transformers_version": "5", "_name_or_path": "p"}):
        path.write_text(json.dumps(content))
        by_content.append(name({"model": str(tmp_path)}))
    assert by_content[0] != by_content[1] == by_content[2]


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_changed_model_files_change_the_name(tmp_path):
    """By its code, its quantization, and its picture processing."""
    model, names = {"model": str(tmp_path)}, []
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for file in ("preprocessor_config.json", "processor_config.json", "hf_quant_config.json", "modeling_custom.py"):
        for content in ('{"a": 1}', '{"a": 2}'):
            (tmp_path / file).write_text(content)
            names.append(name(model))
    assert len(set(names)) == len(names)


# proves: docs/identity.md#modelconfig
def test_name_is_equal_in_all_processes():
    """Otherwise the scheduler would look up keys that no worker stores."""
    worker = described({"hf_config": SimpleNamespace(rope_parameters={"rope_type": "deepseek_yarn"})})
    worker.cache_config.num_gpu_blocks = 17
    worker.parallel_config.rank = 1
    assert Identity.of(worker, rank=1).model_name == name()
    # A fetched model is identified by its origin.
    assert name({"model": "/a/cache", "model_weights": "s3://b/m"}) == name({"model": "/other", "model_weights": "s3://b/m"})
    # The longest request matters only for the kinds of positions that depend on it.
    assert name({"max_model_len": 10}) == name({"max_model_len": 20})
    rope = SimpleNamespace(rope_parameters={"rope_type": "longrope"})
    assert name({"max_model_len": 10, "hf_text_config": rope}) != name({"max_model_len": 20, "hf_text_config": rope})
    # In another process, hashes of texts and addresses differ.
    program = (
        "import runpy, sys; from types import SimpleNamespace as N\n"
        "m = runpy.run_path(sys.argv[1])\n"
        "class Odd: __slots__ = ()\n"
        "f = m['fields'](N(hf_overrides={'a': {*'xyz'}, 'b': Odd(), 'c': N(d=Odd), 'e': lambda: 1}), ('hf_overrides',))\n"
        "print(m['digest'](f))"
    )
    command = [sys.executable, "-c", program, plain.__file__]
    found = {subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(3)}
    assert len(found) == 1


def test_model_name_option_replaces_digest():
    """For new weights at an old path, or to share with other engines. The digest of the pages stays."""
    given = Identity.of(described({"revision": "v2"}), 1, 0, "mine")
    assert given.model_name == "mine"
    assert Identity.of(described(stages=2), 1, 0, "mine").model_name == "mine#pp2"
    paged = [Identity.of(described(), 1, 0, "mine", {"block_tokens": [size]}).model_name for size in (16, 32, 32)]
    assert paged[0] != paged[1] == paged[2] and all(len(each) == len("mine#") + 16 for each in paged)
    with pytest.raises(ValueError, match="kvtier.model_name: 'a@b'; allowed is a printable text without @"):
        Options.read({"kvtier.model_name": "a@b"})


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_name_has_pipeline_partition(monkeypatch):
    """Stages with the same number of layers may have other ones."""
    even = name(stages=2)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    assert name(stages=2) == even + ":3,1" and "3,1" not in name()


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_other_hub_changes_the_name(monkeypatch):
    """Only the option says which hub resolves a name."""
    plain_name = name()
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    assert name() != plain_name


# proves: docs/identity.md#cacheconfig
def test_calculated_kv_scales_are_refused():
    """No page has them."""
    with pytest.raises(ValueError, match="calculate_kv_scales: True; KvTierConnector serves only False"):
        name(cache={"calculate_kv_scales": True})


NODES = [{}, {"nnodes": 2}, {"distributed_executor_backend": "ray"}]


# proves: docs/identity.md#the-digest-of-kvtierconnector
@pytest.mark.parametrize("parallel", NODES)
@pytest.mark.parametrize("changed", [(0, 1), (1 << 19, 1 << 14), ((1 << 20) - 1, 1)])
def test_replaced_weights_change_the_name(tmp_path, parallel, changed):
    """With files of the same size and times at the same path, for any number of hosts."""
    weights, model = tmp_path / "model.safetensors", {"model": str(tmp_path)}
    names, (start, count) = [], changed
    for content in (bytes(1 << 20), bytes(start) + b"x" * count + bytes((1 << 20) - start - count), bytes(7)):
        weights.write_bytes(content)
        os.utime(weights, ns=(1, 1))
        names += [name(model, parallel=parallel)] * 2
    names.append(name(model, load={"load_format": "dummy"}))
    assert names[0] == names[1] and len(set(names)) == 4
    # Other files in the directory are not the model's.
    (tmp_path / "README.md").write_text("x")
    assert name(model, parallel=parallel) == names[4]


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_copied_weights_keep_the_name(tmp_path):
    """Copies on other hosts have other times."""
    found = []
    for host in ("one", "two"):
        directory = tmp_path / host
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"weights")
        os.utime(directory / "model.safetensors", ns=(len(found), len(found)))
        found += [name({"model": str(directory)}, parallel=parallel).rpartition("#")[2] for parallel in NODES]
    assert len(set(found)) == 1


def test_samples_of_large_weights_are_bounded(tmp_path, monkeypatch):
    """For any size and number of files."""
    read = []

    class Counted(io.FileIO):
        def read(self, count):
            read.append(count)
            return super().read(count)

    monkeypatch.setattr(files, "open", lambda path, *mode, **options: Counted(path), raising=False)
    for number in range(100):
        with open(tmp_path / f"model-{number:05}.safetensors", "wb") as file:
            file.truncate(1 << 40)
    name({"model": str(tmp_path)})
    assert sum(read) < 100 * (256 << 10) and len(read) < 2000


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_unreadable_weights_are_logged():
    """The digest has only their name."""
    unknown = [
        described({"model": "/cache/config", "model_weights": "s3://bucket/model"}, load={"load_format": "runai_streamer"}),
        described(load={"load_format": "tensorizer"}),
    ]
    for made, reason in zip(unknown, ("weights at s3://bucket/model", "--load-format tensorizer"), strict=True):
        assert reason in fingerprint.unknown_weights(made)
    hub = described({"hf_config": SimpleNamespace(_commit_hash="abc")})
    for made in (hub, described({"model": __file__.replace(".py", "")}, load={"load_format": "dummy"})):
        assert fingerprint.unknown_weights(made) is None


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_hub_snapshot_is_identified_by_commit(tmp_path):
    """Independent of the place and time of the download."""
    found = []
    for host, commit in (("one", "a"), ("two", "a"), ("one", "b")):
        snapshot = tmp_path / host / "snapshots" / (commit * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_text(host)
        found.append(name({"model": str(snapshot)}).rpartition("#")[2])
    assert found[0] == found[1] != found[2]


class Platform(SimpleNamespace):
    """A fake of vLLM's platform."""

    def is_cuda(self):
        """Whether it is NVIDIA's."""
        return self.device_type == "cuda" and not self.amd

    def is_cpu(self):
        """Whether it is a CPU."""
        return self.device_type == "cpu"

    def get_device_capability(self):
        """Returns the capability of NVIDIA's and AMD's devices."""
        return self.capability


def pages_of(
    monkeypatch, device="cpu", amd=False, capability=(9, 0), blocks=(16,), cache="auto", spec=None, more=None, config=None, **attention
):
    """Returns the digest of pages in the name."""
    platform = Platform(device_type=device, amd=amd, capability=capability)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    made = described(
        cache={"cache_dtype": cache, **(more or {})}, more={"attention_config": SimpleNamespace(**attention), **(config or {})}
    )
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size, **(spec or {}))) for size in blocks]
    return pages.page_format(made, SimpleNamespace(kv_cache_groups=groups))


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_cpu_pages_depend_on_block_kernel_release(monkeypatch):
    """Attention kernels pack CPU pages."""
    found = [pages_of(monkeypatch), pages_of(monkeypatch, blocks=(32,)), pages_of(monkeypatch, blocks=(16, 32))]
    found.append(pages_of(monkeypatch, backend="CPU_ATTN"))
    for ask in ("_is_amx_tile_supported", "_is_avx512_supported"):
        with monkeypatch.context() as other:
            supported = getattr(pages_torch().cpu, ask)()
            other.setattr(f"torch.cpu.{ask}", lambda supported=supported: not supported)
            found.append(pages_of(other))
    with monkeypatch.context() as other:
        other.setattr("vllm.__version__", "0.99")
        found.append(pages_of(other))
    with monkeypatch.context() as other:
        other.setattr("platform.machine", lambda: "aarch64")
        found.append(pages_of(other))
    assert len({json.dumps(each, sort_keys=True) for each in found}) == len(found)
    assert all(found), "there is always something to say"


def pages_torch():
    """Imports PyTorch as late as the package does."""
    import torch

    return torch


# proves: docs/identity.md#the-digest-of-kvtierconnector
@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("backend", [None, "FLASH_ATTN", "FLASHINFER"])
def test_typed_pages_on_nvidia_gpus_have_no_digest(monkeypatch, cache, backend):
    """They are ordered by token and head, as registered: engines of other block sizes share them."""
    attention = {"backend": backend} if backend else {}
    assert pages_of(monkeypatch, "cuda", cache=cache, **attention) == {}


# proves: docs/identity.md#attentionconfig
# proves: docs/identity.md#the-digest-of-kvtierconnector
@pytest.mark.parametrize(
    "fields",
    [
        {"cache": "nvfp4"},
        {"cache": "fp8", "spec": {"cache_dtype_str": "fp8_ds_mla"}},
        {"spec": {"kv_quant_mode": SimpleNamespace(name="NVFP4")}},
        {"spec": {"kv_cache_specs": {"layer": SimpleNamespace(cache_dtype_str="nvfp4_ds_mla")}}},
        {"cache": "int8_per_token_head"},
        {"cache": "turboquant_4bit_nc"},
        {"backend": "CUSTOM"},
        {"backend_per_kind": {"mla": "FLASHMLA"}},
        {"indexer_kv_dtype": "fp4"},
        {"amd": True},
        {"device": "xpu"},
    ],
    ids=lambda fields: "=".join(map(str, next(iter(fields.items())))),
)
def test_other_gpu_pages_depend_on_their_blocks(monkeypatch, fields):
    """With scales per page, codes, shuffled values or unknown kernels only equal pages are shared."""
    fields = {"device": "cuda", **fields}
    found = [pages_of(monkeypatch, **fields), pages_of(monkeypatch, **{**fields, "blocks": (32,)})]
    if fields["device"] == "cuda":
        found.append(pages_of(monkeypatch, **{**fields, "capability": (10, 0)}))
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    found.append(pages_of(monkeypatch, **fields))
    assert all(found) and len({json.dumps(each, sort_keys=True) for each in found}) == len(found)


# proves: docs/compare.md#hits
def test_engines_whose_kv_differs_share_nothing(place, monkeypatch):
    """Scheduler and workers use the same name in keys; with one name engines share."""
    server, prompt = place.server(), tokens(CHUNK + 1, "rope")
    engines = []

    def engine(theta, **options):
        monkeypatch.setattr("vllm_rig.vllm_config", lambda *a, **o: with_theta(vllm_config(*a, **o), theta))
        engines.append(Vllm(server, **options))
        return engines[-1]

    def with_theta(config, theta):
        config.model_config.hf_overrides = {"rope_parameters": {"rope_theta": theta}}
        return config

    engine(1).prefill(request("a", prompt), range(1, 6))
    assert engine(2).match(request("b", prompt)) == (0, False)
    assert engine(1).match(request("c", prompt)) == (CHUNK, True)
    engine(1, **{"kvtier.model_name": "m"}).prefill(request("d", prompt), range(1, 6))
    assert engine(2, **{"kvtier.model_name": "m"}).match(request("e", prompt)) == (CHUNK, True)
    for each in engines:
        each.close()


def test_worker_and_scheduler_agree_on_cache_dtype():
    """Attention layers of sparse MLA replace the dtype in their process."""
    assert len({name(cache={"cache_dtype": dtype}) for dtype in ("fp8", "fp8_e4m3", "fp8_ds_mla")}) == 1
    assert name(cache={"cache_dtype": "nvfp4"}) == name(cache={"cache_dtype": "nvfp4_ds_mla"}) != name()


# proves: docs/identity.md#cacheconfig
# proves: docs/identity.md#vllmconfig
def test_recurrent_states_have_a_digest(monkeypatch):
    """Also on NVIDIA's GPUs: only a release's own kernels read the states that they wrote."""
    state = {"mamba_cache_mode": "align", "shapes": ((3, 512), (4, 64, 64)), "dtypes": ("bfloat16", "float32"), "mamba_type": "gdn"}
    found = [pages_of(monkeypatch, "cuda", spec=state)]
    for field, value in (("shapes", ((512, 3), (4, 64, 64))), ("dtypes", ("bfloat16", "bfloat16")), ("mamba_type", "mamba2")):
        found.append(pages_of(monkeypatch, "cuda", spec=state | {field: value}))
    for cache in ("replayssm_buffer_len", "use_replayssm", "use_kda_recoverssm"):
        found.append(pages_of(monkeypatch, "cuda", spec=state, more={cache: 4}))
    found.append(pages_of(monkeypatch, "cuda", spec=state, config={"mamba_config": {"backend": "flashinfer"}}))
    with monkeypatch.context() as other:
        other.setattr("vllm.__version__", "0.99")
        found.append(pages_of(other, "cuda", spec=state))
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    found.append(pages_of(monkeypatch, "cuda", spec=state))
    assert all(found) and len({json.dumps(each, sort_keys=True) for each in found}) == len(found)
