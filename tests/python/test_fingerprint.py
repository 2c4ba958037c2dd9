"""The model's name in keys: engines whose KV differs have different ones, processes of one engine the same."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rig import tokens

pytest.importorskip("vllm")

from conftest import CHUNK  # noqa: E402
from kvtier.vllm import fingerprint  # noqa: E402
from kvtier.vllm.options import Identity, Options  # noqa: E402
from test_connector import Vllm, request, vllm_config  # noqa: E402


def described(model=None, cache=None, load=None, draft=None, pictures=None, **options):
    """A configuration with these fields."""
    made = vllm_config(SimpleNamespace(url="x"), **options)
    vars(made.model_config).update(model or {})
    if pictures:
        made.model_config.multimodal_config = SimpleNamespace(**pictures)
    made.cache_config = SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[])
    vars(made.cache_config).update(cache or {})
    made.load_config = SimpleNamespace(**(load or {"load_format": "auto"}))
    made.speculative_config = draft and SimpleNamespace(draft_model_config=SimpleNamespace(**draft))
    return made


def name(*args, **fields):
    """What keys say."""
    return Identity.of(described(*args, **fields), False).model_name


def test_what_kv_depends_on_is_in_the_name(tmp_path):
    """Each of these computes other KV from the same tokens, in tensors of the same shape."""
    short, long = ({"rope_parameters": {"rope_type": "default", "rope_theta": theta}} for theta in (1e4, 1e6))
    names = [
        name(),
        name({"hf_overrides": short}),
        name({"hf_overrides": long}),
        name({"hf_overrides": test_what_kv_depends_on_is_in_the_name}),
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
        name(draft={"model": "draft/one"}),
        name(draft={"model": "draft/two"}),
    ]
    assert len(set(names)) == len(names)
    assert all(each.startswith("test/vllm#") and len(each) == len("test/vllm#") + 16 for each in names)
    # A directory is told by what it says of the model, and not by what it says of itself.
    path = tmp_path / "config.json"
    by_content = []
    for content in ({"rope_theta": 1}, {"rope_theta": 2}, {"rope_theta": 2, "transformers_version": "5", "_name_or_path": "p"}):
        path.write_text(json.dumps(content))
        by_content.append(name({"model": str(tmp_path)}))
    assert by_content[0] != by_content[1] == by_content[2]


def test_what_differs_between_processes_is_not_in_the_name():
    """Else the scheduler would look up what no worker stores."""
    worker = described({"hf_config": SimpleNamespace(rope_parameters={"rope_type": "deepseek_yarn"})})
    worker.cache_config.num_gpu_blocks = 17
    worker.parallel_config.rank = 1
    assert Identity.of(worker, False, 1).model_name == name()
    # A model that was fetched is told by where it is from.
    assert name({"model": "/a/cache", "model_weights": "s3://b/m"}) == name({"model": "/other", "model_weights": "s3://b/m"})
    # The longest request is of no matter, but for the kind of positions that it chooses between.
    assert name({"max_model_len": 10}) == name({"max_model_len": 20})
    rope = SimpleNamespace(rope_parameters={"rope_type": "longrope"})
    assert name({"max_model_len": 10, "hf_text_config": rope}) != name({"max_model_len": 20, "hf_text_config": rope})
    # In another process hashes of texts are others, and so are addresses.
    program = (
        "import runpy, sys; from types import SimpleNamespace as N\n"
        "f = runpy.run_path(sys.argv[1])['fingerprint']\n"
        "class Odd: __slots__ = ()\n"
        "print(f(N(model_config=N(model='m', hf_overrides={'a': {*'xyz'}, 'b': Odd(), 'c': N(d=Odd), 'e': lambda: 1}))))"
    )
    command = [sys.executable, "-c", program, fingerprint.__file__]
    found = {subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(3)}
    assert len(found) == 1


def test_the_name_can_be_given():
    """By operators who know better: for new weights at an old path, or to share with others."""
    given = Identity.of(described({"revision": "v2"}), False, 0, "mine")
    assert given.model_name == "mine"
    assert Identity.of(described(stages=2), False, 0, "mine").model_name == "mine#pp2"
    with pytest.raises(ValueError, match="kvtier.model_name: 'a@b'; allowed is a text without @"):
        Options.read({"kvtier.model_name": "a@b"})


def test_engines_whose_kv_differs_share_nothing(place, monkeypatch):
    """The name is that of the scheduler's keys and of the workers'; with one name they share."""
    server, prompt = place.server(), tokens(CHUNK + 1, "rope")
    engines = []

    def engine(theta, **options):
        monkeypatch.setattr("test_connector.vllm_config", lambda *a, **o: told(vllm_config(*a, **o), theta))
        engines.append(Vllm(server, **options))
        return engines[-1]

    def told(config, theta):
        config.model_config.hf_overrides = {"rope_parameters": {"rope_theta": theta}}
        return config

    engine(1).prefill(request("a", prompt), range(1, 6))
    assert engine(2).match(request("b", prompt)) == (0, False)
    assert engine(1).match(request("c", prompt)) == (CHUNK, True)
    engine(1, **{"kvtier.model_name": "m"}).prefill(request("d", prompt), range(1, 6))
    assert engine(2, **{"kvtier.model_name": "m"}).match(request("e", prompt)) == (CHUNK, True)
    for each in engines:
        each.close()
