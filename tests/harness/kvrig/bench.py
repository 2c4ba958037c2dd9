"""Run `lmcache bench server`, LMCache's self-checking client, and read its report.

The tool exits with 0 even when its checks fail, so its lines are what counts.
"""

import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .packages import HOME

LINE = re.compile(r"^\s*\[seq (\d+)(?:/(cold|warm))?\] (.*)$")
LOOKUP = re.compile(r"LOOKUP: (\d+)/(\d+) chunks hit")
OUTCOME = re.compile(r"(STORE|RETRIEVE): (\w+) \(\d+ tokens, [\d.]+ ms, (\d+) (?:writers|workers)\)")


@dataclass
class Report:
    """Per sequence number, what was observed in its cold and warm request."""

    output: str
    status: int
    sequences: dict = field(default_factory=dict)

    def problems(self, count, chunks, writers, readers):
        """Everything that is not as it must be, as sentences; empty when all of `count` sequences passed."""
        found = [] if self.status == 0 else [f"exit status {self.status}"]
        wanted = {
            "cold.lookup": f"0/{chunks}",
            "cold.store": f"stored by {writers}",
            "warm.lookup": f"{chunks}/{chunks}",
            "warm.retrieve": f"retrieved by {readers}",
            "checksum": "CHECKSUM MATCH OK",
        }
        if len(self.sequences) != count:
            found.append(f"{len(self.sequences)} of {count} sequences ran")
        for number, seen in sorted(self.sequences.items()):
            found += [
                f"sequence {number}: {check} is {seen.get(check, 'missing')!r}, not {must!r}"
                for check, must in wanted.items()
                if seen.get(check) != must
            ]
            if "cold.retrieve" in seen or "warm.store" in seen:
                found.append(f"sequence {number}: unexpected transfers {seen}")
        return found


@functools.cache
def forks(release):
    """The process that runs the tool of `release`, else the installed one; it ends with this one."""
    env = dict(os.environ, LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="WARNING")
    if release:
        env["PYTHONPATH"] = str(HOME / "clients" / release)
    return subprocess.Popen(
        # Without the script's folder, whose modules have names of others.
        [sys.executable, "-P", str(Path(__file__).parent / "bench_forks.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True, start_new_session=True,
    )  # fmt: skip


def run(server, transfer_mode, spec, start, count, tokens, flags=(), interval=0.0, timeout=90, release=None):
    """Run the tool on sequences [start, start+count) of `tokens` tokens each; that of `release`, else the installed one."""
    arguments = [
        "bench", "server", "--mode", "cpu",
        "--rpc-url", server.url, "--url", server.http, "--transfer-mode", transfer_mode,
        "--interval", str(interval), "--num-tokens", str(tokens - 1), "--kvcache-shape-spec", spec,
        "--start", str(start), "--end", str(start + count), *flags,
    ]  # fmt: skip
    tool = forks(release)
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        tool.stdin.write(json.dumps([arguments, output.name]) + "\n")
        tool.stdin.flush()
        if not select.select([tool.stdout], [], [], timeout)[0]:
            os.killpg(tool.pid, signal.SIGKILL)
            forks.cache_clear()
            raise subprocess.TimeoutExpired(arguments, timeout, output.read())
        report = Report(output.read(), int(tool.stdout.readline()))
    for line in report.output.splitlines():
        read_line(line, report.sequences)
    return report


def read_line(line, sequences):
    """Add what one line of the tool's output says to `sequences`."""
    matched = LINE.match(line)
    if not matched:
        return
    number, kind, text = int(matched[1]), matched[2], matched[3]
    seen = sequences.setdefault(number, {})
    if kind is None:
        if "CHECKSUM" in text:
            seen["checksum"] = text
    elif lookup := LOOKUP.search(text):
        seen[f"{kind}.lookup"] = f"{lookup[1]}/{lookup[2]}"
    elif outcome := OUTCOME.search(text):
        seen[f"{kind}.{outcome[1].lower()}"] = f"{outcome[2]} by {outcome[3]}"
    elif "timeout" in text:
        seen[f"{kind}.lookup"] = text
