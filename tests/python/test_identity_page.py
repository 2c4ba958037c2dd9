"""docs/identity.md has every option of the installed vLLM, and the tests that it names exist."""

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


@pytest.mark.parametrize("name", CLASSES)
def test_page_has_every_option(name):
    """A new option fails here until the page has it."""
    fields = {field.name for field in dataclasses.fields(getattr(config, name))}
    assert fields - section(name) == set()


def test_tests_named_on_page_exist():
    """A name without a path is in one of the files of the page's head."""
    default = ["tests/python/test_fingerprint.py", "tests/python/test_contents.py"]
    default.append("crates/kvtier-engine/src/instances/fingerprint/tests.rs")
    texts = "\n".join((ROOT / path).read_text() for path in default)
    rust = re.findall(r"fn (\w+)\(", texts)
    for path, test in re.findall(r"`((?:tests|crates)/[\w/.-]+)(?:::(\w+))?`", PAGE):
        text = (ROOT / path).read_text()
        assert not test or re.search(rf"(?:fn|def) {test}\(", text), f"{path}::{test}"
    named = set(re.findall(r"`(test_\w+)`", PAGE)) | {name for name in re.findall(r"`(\w+)`", PAGE) if name in rust}
    assert len(named) > 20
    for test in named:
        assert re.search(rf"(?:fn|def) {test}\(", texts), test
    columns = [line.rsplit("|", 2)[1] for line in PAGE.splitlines() if line.startswith("|")]
    for name in {name for column in columns for name in re.findall(r"`([a-z]+(?:_[a-z0-9]+){4,})`", column)}:
        assert re.search(rf"(?:fn|def) {name}\(", texts) or name in section("ModelConfig") | {
            each for cls in CLASSES for each in section(cls)
        }, name
