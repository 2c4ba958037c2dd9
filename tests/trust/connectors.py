#!/usr/bin/env python3
"""What each connector serves of each kind of model, and what of it is wrong: a table. It records, and fails nothing.

  connectors.py --package DIR              all kinds, with kvtier's connector, and with LMCache's at both servers
  connectors.py --package DIR KIND ...     these
  connectors.py --connector lmcache --mode lmcache_driven ...
  connectors.py --out FILE                 the table goes there too

Six prompts of 1900 tokens are stored, prefilled in steps of 512 tokens: three one by one and three at the same time, with states,
convolutions and latents all one by one. Then four prefixes of each are asked, and a next turn, one by one. `lora`: six prompts are stored with one adapter,
then asked with it, without one, and with another adapter, twice. Each answer is compared with that of an engine without a connector; tokens that are
nearly as probable are not wrong. `convolutions` and `mla`: hits as long as those of another engine with kvtier's connector are compared with its
answers, since vLLM says something else behind a prefix than without one.

    asked         requests behind the stores
    hits          those with loaded tokens
    wrong         hits with a wrong answer
    tokens        loaded, of all hits
    note          why an engine ended or had no hits; with kvtier's connector, how many loaded blocks were not as stored, byte by byte

`auto` is what LMCache's connector chooses: engine_driven on CPUs. Its server has `--separate-object-groups` where the column says `groups`.
"""

import argparse
import functools
import multiprocessing
import os
import platform
import re
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / each) for each in ("harness", "vllm", "vllm/witness")]

import forked
from evidence import pages_as_stored
from forked import Died, prompt_of
from kvrig.report import Report
from kvrig.server import ANSI
from kvrig.waiting import TimedOut
from rig import CHUNK, MLA, Case
from scenarios import ROUNDING
from windowed import STATEFUL

PROMPT, PROMPTS = 1900, 6
TROUBLE = re.compile(r"without a cache|\bERROR\b|Error:|Something went wrong")


@dataclass
class Kind:
    """A model and the options of its engines."""

    model: str
    options: dict = field(default_factory=dict)
    tie: float = ROUNDING
    groups: bool = True
    adapters: tuple = ()
    is_sensitive: bool = False
    """Whether the KV of prompts that are computed together is rounded otherwise than alone, by more than a tie of the answer shows."""
    is_split: bool = False
    """Whether the engine says something else behind a prefix: compared are hits as long as those of kvtier's connector, with its answers."""


# bfloat16 rounds more; behind a prefix latent attention is another sum, more than rounded otherwise.
KINDS = {
    "full": Kind("llama", groups=False),
    "windows": Kind("windows"),
    "sinks": Kind("sinks"),
    "windows-only": Kind("windows-only", groups=False),
    "block-sizes": Kind("block-sizes"),
    "chunked": Kind("chunked"),
    "states": Kind("states", STATEFUL | {"num_gpu_blocks_override": 200}, tie=0.5, is_sensitive=True),
    "convolutions": Kind("convolutions", STATEFUL | {"num_gpu_blocks_override": 200}, tie=0.5, is_sensitive=True, is_split=True),
    "lora": Kind("llama", {"enable_lora": True, "max_lora_rank": 8}, groups=False, adapters=("adapter-a", None, "adapter-b")),
    "mla": Kind(MLA, {"block_size": 16, "num_gpu_blocks_override": 400}, groups=False, is_sensitive=True, is_split=True),
}
# (connector, server, mode, its flags)
SETUPS = [
    ("kvtier", "kvtier", "lmcache_driven", ()),
    ("lmcache", "lmcache", "auto", ()),
    ("lmcache", "lmcache", "lmcache_driven", ()),
    ("lmcache", "lmcache", "lmcache_driven", ("--separate-object-groups",)),
    ("lmcache", "kvtier", "auto", ()),
    ("lmcache", "kvtier", "lmcache_driven", ()),
]
HEADS = ("model", "connector", "server", "mode", "asked", "hits", "wrong", "tokens", "note")


def arguments():
    """The command line."""
    home = Path(os.environ.get("KVTIER_E2E_HOME") or os.path.expanduser("~/.cache/kvtier-e2e"))
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("names", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--connector", action="append", choices=["kvtier", "lmcache"])
    parser.add_argument("--mode", action="append", choices=["auto", "lmcache_driven"])
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count()), help="kinds at the same time")
    parser.add_argument("--package", required=True, type=Path, help="directory with the Python package kvtier")
    parser.add_argument("--models", type=Path, default=home / "models-trust", help="made by models.py; beside it model-mla")
    parser.add_argument("--logs", type=Path, default=home / "logs" / "connectors")
    parser.add_argument("--out", type=Path, help="file of the table")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(KINDS):
        parser.error(f"no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    chosen.names = chosen.names or list(KINDS)
    chosen.connector = chosen.connector or ["kvtier", "lmcache"]
    chosen.mode = chosen.mode or ["auto", "lmcache_driven"]
    chosen.logs = chosen.logs.resolve()
    return chosen


class Asker:
    """An engine of a kind, asked one request at a time from the server's cache alone."""

    def __init__(self, kind, models, engine):
        self.kind, self.models, self.engine = kind, models, engine

    def ask(self, prompt, adapter=None, **options):
        """One completion; vLLM's own prefix cache, if there is one, is empty before it."""
        if self.kind.options.get("enable_prefix_caching"):
            self.engine.call("reset")
        return self.engine.ask(prompt, lora=self.lora(adapter), **options)

    def together(self, prompts, adapter=None):
        """Completions at the same time."""
        return self.engine.call("ask", prompts, lora=self.lora(adapter))

    def lora(self, adapter):
        """vLLM's description of an adapter."""
        if adapter is None:
            return None
        return {"lora_name": adapter, "lora_int_id": 1 + self.kind.adapters.index(adapter), "lora_path": str(self.models / adapter)}


def requests(name, kind):
    """(prompts that are stored, and (prompt, adapter) of each request behind them)."""
    prompts = [prompt_of(f"{name}-{number}", PROMPT) for number in range(PROMPTS)]
    if kind.adapters:
        return prompts, [(prompt, adapter) for adapter in kind.adapters * 2 for prompt in prompts]
    asked = [prompt[: CHUNK * chunks + 60] for prompt in prompts for chunks in (1, 3, 5, 7)]
    asked += [prompt + prompt_of(f"turn-{name}-{number}", 100) for number, prompt in enumerate(prompts)]
    return prompts, [(prompt, None) for prompt in asked]


def engine_options(kind):
    """As those of tests/trust/windowed.py: steps of 512 tokens."""
    return {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 100} | kind.options


def right_answers(options, name, kind, prompts, asked):
    """What an engine without a connector says to each request, with its ties; nothing if it cannot run the model."""
    with Case(f"{name}-alone", options, Report(), "kvtier", "lmcache_driven").running() as case:
        server = case.server(l1_gb=1) if kind.is_split else None
        asker = Asker(kind, options.models, case.engine(kind.model, server, {"kvtier.follow_resets": False}, **engine_options(kind)))
        if kind.is_split:
            store(asker, prompts)
            return [asker.ask(*request, tie=kind.tie) for request in asked]
        # Salts as in all tests: vLLM's own prefix cache finds nothing of other requests.
        return [asker.ask(*request, tie=kind.tie, salt=f"alone-{number}") for number, request in enumerate(asked)]


def run(options, name):
    """The rows of a kind."""
    kind, rows = KINDS[name], []
    prompts, asked = requests(name, kind)
    expected = right_answers(options, name, kind, prompts, asked)
    if expected is None:
        return [[name, "none", "", "", 0, 0, 0, 0, "vLLM alone does not run it here"]]
    for setup in SETUPS:
        connector, _, mode, flags = setup
        if connector in options.connector and mode in options.mode and (kind.groups or not flags):
            rows.append(one_setup(options, name, kind, setup, prompts, asked, expected))
            print("\n".join(lines(rows[-1:])[1:]), flush=True)
    return rows


def one_setup(options, name, kind, setup, prompts, asked, expected):
    """The row of a kind with a connector at a server."""
    connector, at, mode, flags = setup
    shown = f"{mode}{', groups' if flags else ''}"
    case_name = f"{name}-at-{at}{'-groups' if flags else ''}"
    case = Case(case_name, options, Report(), connector, "both" if mode == "auto" else mode)
    counts, notes = {"asked": 0, "hits": 0, "wrong": 0, "tokens": 0}, []
    began = time.monotonic()
    with case.running():
        server = case.server(flags=flags, l1_gb=1, peer=at == "lmcache")
        if connector == "kvtier":
            case.witness()
        try:
            record(case, kind, server, mode, prompts, zip(asked, expected, strict=True), counts, notes)
        except (Died, TimedOut) as problem:
            notes.append(ended(problem, counts))
        if not counts["hits"] and not notes:
            logs = [*server.lines(), *ANSI.sub("", case.engines[-1].log.read_text(errors="replace")).splitlines()]
            notes += [line for line in logs if TROUBLE.search(line)][:1]
        if not server.running():
            notes.append("the server has ended")
    if connector == "kvtier" and counts["hits"]:
        blocks, wrong = pages_as_stored(case.witnessed)
        notes.append(f"{len(wrong)} of {blocks} blocks not as stored")
    print(f"# {case.name}: {time.monotonic() - began:.0f} s", flush=True)
    return [name, connector, at, shown, *counts.values(), "; ".join(" ".join(note.split())[:240] for note in notes)]


def record(case, kind, server, mode, prompts, pairs, counts, notes):
    """Store, ask, count."""
    extra = {"kvtier.follow_resets": False} if case.connector == "kvtier" else {"lmcache.mp.mp_transfer_mode": mode}
    asker = Asker(kind, case.models, case.engine(kind.model, server, extra, **engine_options(kind)))
    store(asker, prompts)
    missed, others = 0, 0
    for (prompt, adapter), right in pairs:
        counts["asked"] += 1
        answer = asker.ask(prompt, adapter)
        is_hit, is_wrong = answer.external > 0, not answer.begins(right)
        if kind.is_split and answer.external != right.external:
            others += 1
            is_wrong = False
        counts["hits"] += is_hit
        counts["tokens"] += answer.external
        counts["wrong"] += is_hit and is_wrong
        missed += is_wrong and not is_hit
    if missed:
        notes.append(f"{missed} wrong without a hit")
    if others:
        notes.append(f"{others} hits of another length, not compared")


def store(asker, prompts):
    """Ask the prompts that are stored, half of them at the same time."""
    kind = asker.kind
    first = kind.adapters[0] if kind.adapters else None
    half = PROMPTS if kind.is_sensitive else PROMPTS // 2
    for prompt in prompts[:half]:
        asker.ask(prompt, first)
    if prompts[half:]:
        asker.together(prompts[half:], first)


def ended(problem, counts):
    """Why an engine has ended: the message of its exception, or the last line of its log with one."""
    text = str(problem)
    found = [line for line in text.splitlines() if TROUBLE.search(line)]
    message = text.splitlines()[0] if len(text.splitlines()) == 1 else (found or text.splitlines())[-1]
    return f"engine ended {'at its start' if not counts['asked'] else 'after ' + str(counts['asked']) + ' requests'}: {message}"


def lines(rows):
    """The table as text."""
    texts = [HEADS, *([str(each) for each in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(HEADS) - 1)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in texts]


def main():
    """Run the kinds."""
    options, began = arguments(), time.monotonic()
    _, options.release = forked.prepare(options.package)
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        rows = [row for found in pool.imap(functools.partial(run, options), options.names) for row in found]
    heading = f"vLLM {options.release}, LMCache {version('lmcache')}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
    heading += f"{time.monotonic() - began:.0f} s: tests/trust/connectors.py {' '.join(sys.argv[1:])}"
    text = "\n".join([heading, "", *lines(rows), ""])
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
