#!/usr/bin/env python3
"""Draws results of benches/engine.py.

    benches/engine_plot.py DIR [DIR ...] --out docs/images/engine.svg

One panel per DIR with an engine.json: a dot is a later turn's time to the first token, on a logarithmic axis, a bar the median of all
rounds. Colours stand for the setups.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from xml.sax.saxutils import escape

COLOURS = {
    "none": "#7a7a7a", "offloading": "#b8860b", "lmcache": "#c2542d", "kvtier-lmcache": "#2b7bba", "kvtier": "#1f8a4c",
}  # fmt: skip
LABELS = {
    "none": "vLLM alone", "offloading": "OffloadingConnector", "lmcache": "LMCache", "kvtier-lmcache": "kvtier, LMCache's connector",
    "kvtier": "kvtier",
}  # fmt: skip
WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 820, 200, 30, 30, 44, 44


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--out", required=True, type=Path)
    chosen = parser.parse_args()
    panels, height = [], 0
    for directory in chosen.results:
        lines, below = panel(json.loads((directory / "engine.json").read_text()), height)
        panels += lines
        height = below
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">'
    background = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    chosen.out.write_text("\n".join([head, background, *panels, "</svg>"]) + "\n")


def panel(facts, top):
    """The lines of one result, and where the next begins."""
    rounds, load = facts["rounds"], facts["load"]
    times = {name: [ttft for each in rounds for turn, *_, ttft in each[name]["ttft"] if turn] for name in rounds[0]}
    every = [ttft for each in times.values() for ttft in each]
    low, high = math.log10(min(every) * 0.9), math.log10(max(every) * 1.1)

    def place(ttft):
        return round(LEFT + (math.log10(ttft) - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    title = f"{facts['model']} model, {load['users']} users, {load['turns']} turns, L1 {load['l1_gb']} GB, {len(rounds)} rounds: time to the first token of later turns"
    lines = [text(LEFT - 190, top + 22, title, "start", "bold")]
    bottom = top + TOP + ROW * len(times)
    for mark in (sign * 10**power for power in range(1, 5) for sign in (1, 2, 5)):
        if low <= math.log10(mark) <= high:
            lines.append(f'<line x1="{place(mark)}" x2="{place(mark)}" y1="{top + TOP - 8}" y2="{bottom}" stroke="#dddddd"/>')
            lines.append(text(place(mark), bottom + 16, f"{mark} ms", "middle"))
    for number, (name, found) in enumerate(times.items()):
        middle = top + TOP + ROW * number + ROW / 2
        lines.append(text(LEFT - 12, middle + 4, LABELS[name], "end"))
        lines += [f'<circle cx="{place(ttft)}" cy="{middle}" r="4" fill="{COLOURS[name]}" fill-opacity="0.35"/>' for ttft in found]
        median = place(statistics.median(found))
        lines.append(f'<rect x="{median - 2}" y="{middle - 11}" width="4" height="22" fill="{COLOURS[name]}"/>')
    return lines, bottom + BOTTOM


def text(x, y, words, anchor, weight="normal"):
    """A line of text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="#222222">{escape(words)}</text>'


if __name__ == "__main__":
    main()
