"""Log lines of this package in vLLM's log: vLLM configures only its own loggers."""

from __future__ import annotations

import logging


def use_vllm_log() -> None:
    """Logs in the form of vLLM's own lines, unless the program has configured this package's logger."""
    ours, engine = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.handlers or ours.level or not engine.handlers:
        return
    for handler in engine.handlers:
        ours.addHandler(handler)
    ours.setLevel(engine.getEffectiveLevel())
    ours.propagate = engine.propagate
