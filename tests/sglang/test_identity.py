"""The model's name in keys: it differs between engines with different KV, and knows every option of SGLang."""

import json
from pathlib import Path
from types import SimpleNamespace

import fakes
import pytest

fakes.load()

from kvtier.sglang import identity  # noqa: E402
from rig import arguments  # noqa: E402
from sglang.srt.server_args import ServerArgs, record_fields  # noqa: E402

HARMLESS = (Path(__file__).parent / "harmless_options.txt").read_text()
KNOWN = {*identity._OPTIONS, *identity._PATHS, *identity._OTHER_SOURCES}


# proves: docs/sglang.md#options
def test_every_option_is_known():
    """A new option fails here until it is in the digest, or known as harmless."""
    harmless = {name for line in HARMLESS.splitlines() if not line.startswith("#") for name in line.split()}
    assert {field.name for field in record_fields(ServerArgs)} == KNOWN | harmless
    assert not KNOWN & harmless


# proves: docs/sglang.md#options
@pytest.mark.parametrize("option", identity._OPTIONS)
def test_options_change_the_name(model, option):
    """Each computes other KV from the same tokens."""
    folder = model("a")
    given = folder if option.endswith("model_path") else "x"
    assert identity.model_name(arguments(folder, **{option: given})) != identity.model_name(arguments(folder))


# proves: docs/sglang.md#options
@pytest.mark.parametrize("option", [*identity._PATHS, "lora_paths"])
def test_files_of_options_change_the_name(model, tmp_path, option):
    """By their bytes, whatever their place."""
    folder, names = model("a"), []
    for place, content in (("1", "a"), ("2", "a"), ("3", "b")):
        (tmp_path / place).mkdir()
        file = tmp_path / place / "file.json"
        file.write_text(json.dumps(content))
        given = [f"x={file}", {"lora_path": str(file)}, SimpleNamespace(lora_path=str(file))] if option == "lora_paths" else str(file)
        names.append(identity.model_name(arguments(folder, **{option: given})))
    assert names[0] == names[1] != names[2]


# proves: docs/sglang.md#options
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("load_format", "remote"),
        ("load_format", "remote_instance"),
        ("speculative_draft_load_format", "remote"),
        ("weight_cache_mode", "client"),
        ("modelexpress_config", "{}"),
        ("checkpoint_engine_wait_weights_before_ready", True),
    ],
)
def test_weights_from_elsewhere_need_a_name(serve, model, engines, option, value):
    """The files at the model's path do not tell them apart."""
    folder = model("a")
    with pytest.raises(ValueError, match=f"{option}: {value}; .* set the option model_name"):
        identity.model_name(arguments(folder, **{option: value}))
    engines(serve(), folder, options={option: value}, model_name="mine")
