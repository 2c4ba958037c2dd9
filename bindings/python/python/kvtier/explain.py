"""Explains why a prompt misses: ``python -m kvtier.explain --tokenizer FILE --prompt FILE --model NAME [...]``.

Reads a prompt's text with a tokenizer file of Hugging Face and passes its token ids to ``kvtier explain``, which takes all other
arguments. A chat has the text that its template makes of it, which the engine knows: its ``/tokenize`` gives those ids.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from .__main__ import command


def token_ids(tokenizer: Path, text: str, special: bool) -> list[int]:
    """Returns the token ids of a text, by a ``tokenizer.json`` or a model's folder that has one.

    Raises SystemExit, which names the argument, if the file cannot be read.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise SystemExit(f"kvtier.explain: {error}; install the package tokenizers, or run this where vLLM is") from None
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        # From text, so that a path that is not there is an OSError.
        found = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"kvtier.explain: --tokenizer {path}: {error.strerror}; a model's folder has it") from None
    except Exception as error:  # noqa: BLE001  the class that tokenizers raises
        raise SystemExit(f"kvtier.explain: --tokenizer {path} is no tokenizer of Hugging Face: {error}") from None
    return found.encode(text, add_special_tokens=special).ids


def read(path: str) -> str:
    """Returns the text of a file, or of standard input.

    Raises SystemExit, which names the argument, if it cannot be read.
    """
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"kvtier.explain: --prompt {path}: {error}") from None


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier.explain",
        description=(__doc__ or "").split("\n\n")[1].replace("``", "`"),
        epilog="Other arguments, such as --model NAME, --cache-salt SALT and the server's URL, are those of `kvtier explain`.",
        allow_abbrev=False,
    )
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="PATH", help="tokenizer.json, or a model's folder")
    parser.add_argument("--prompt", required=True, metavar="FILE", help="the prompt's text; - for standard input")
    parser.add_argument(
        "--no-special-tokens", action="store_true", help="do not put the tokenizer's own tokens around it, such as the one of the start"
    )
    chosen, rest = parser.parse_known_args(arguments)
    ids = token_ids(chosen.tokenizer, read(chosen.prompt), not chosen.no_special_tokens)
    done = subprocess.run([command(), "explain", "--tokens", "-", *rest], input=json.dumps(ids), text=True, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
