"""docs/identity.md has every option of the installed vLLM."""

import dataclasses
import pathlib
import re

import pytest

config = pytest.importorskip("vllm.config")

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/identity.md").read_text()
CLASSES = re.findall(r"^### (\w+Config)$", PAGE, re.MULTILINE)


def section(name):
    """Returns the names in a section."""
    text = PAGE.split(f"\n### {name}\n")[1].split("\n## ")[0].split("\n### ")[0]
    return set(re.findall(r"`(\w+)`", text))


def test_page_has_all_config_classes():
    """The classes whose options can change bytes."""
    assert {"ModelConfig", "CacheConfig", "ParallelConfig", "AttentionConfig", "LoRAConfig", "VllmConfig"} <= set(CLASSES)


# proves: docs/identity.md#every-option-of-vllm-032
@pytest.mark.parametrize("name", CLASSES)
def test_page_has_every_option(name):
    """A new option fails here until the page has it."""
    fields = {field.name for field in dataclasses.fields(getattr(config, name))}
    assert fields - section(name) == set()
