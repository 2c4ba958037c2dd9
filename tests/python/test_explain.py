"""`python -m kvtier.explain`: a prompt's text by way of a tokenizer file."""

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import CHUNK
from rig import BLOCK
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

MODEL = Path(os.environ.get("KVTIER_E2E_HOME") or Path.home() / ".cache" / "kvtier-e2e") / "model"
TEXT = "Why did this prompt miss, although it was stored an hour ago? " * 8


def explain(*arguments, text=None):
    """Runs it."""
    return subprocess.run(
        [sys.executable, "-m", "kvtier.explain", *map(str, arguments)], input=text, capture_output=True, text=True, timeout=60, check=False
    )


def test_text_is_found_as_its_tokens(place, tmp_path):
    """What was stored under the tokens of a text is resident when the text is explained; from a file and from standard
    input, with and without the tokenizer's own tokens."""
    server = place.server()
    engine = place.engine(server)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    assert ids != tokenizer.encode(TEXT, add_special_tokens=False).ids
    whole = len(ids) // CHUNK * CHUNK
    assert whole > CHUNK
    assert engine.store("r", ids, 0, whole, list(range(whole // BLOCK)))
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT)
    common = ["--tokenizer", tmp_path, "--model", "test/model", "--json", f"127.0.0.1:{server.http_port}"]
    for arguments, text in ((["--prompt", prompt], None), (["--prompt", "-"], TEXT)):
        done = explain(*arguments, *common, text=text)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["tokens"], answer["hit_tokens"]) == (len(ids), whole), answer
    done = explain("--prompt", prompt, "--no-special-tokens", *common)
    assert json.loads(done.stdout)["hit_tokens"] == 0


def test_wrong_arguments_are_named(tmp_path):
    """A file that is not there, and one that is no tokenizer, are named with the argument; the command's own errors pass."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT)
    wrong = tmp_path / "tokenizer.json"
    wrong.write_text("{}")
    for arguments, complaint in (
        (["--tokenizer", tmp_path / "none", "--prompt", prompt], "--tokenizer"),
        (["--tokenizer", wrong, "--prompt", prompt], "is no tokenizer of Hugging Face"),
        (["--tokenizer", MODEL, "--prompt", tmp_path / "none"], "--prompt"),
        (["--tokenizer", MODEL, "--prompt", prompt], "--model"),
    ):
        done = explain(*arguments)
        assert done.returncode != 0
        assert complaint in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
