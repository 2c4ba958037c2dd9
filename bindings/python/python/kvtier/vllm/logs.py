"""Lines of this package in vLLM's log: vLLM configures its own loggers only."""

from __future__ import annotations

import logging


def use_vllm_log() -> None:
    """Write what this package logs as vLLM writes its own lines, unless the program has configured it otherwise."""
    ours, engine = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.handlers or ours.level or not engine.handlers:
        return
    for handler in engine.handlers:
        ours.addHandler(handler)
    ours.setLevel(engine.getEffectiveLevel())
    ours.propagate = engine.propagate
