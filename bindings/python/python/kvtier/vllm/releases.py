"""Releases of vLLM: up to which one the connector is tested."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)

NEWEST_TESTED = (0, 32)
"""The release that the tests run; they fail when it is another one."""


def note_untested(version: str) -> None:
    """Logs that this vLLM is newer than the tested ones. What it lacks is found by feature tests, what it adds is not known."""
    release = re.match(r"(\d+)\.(\d+)", version)
    if release and tuple(map(int, release.groups())) > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        logger.warning("untested release: this vLLM is %s, and the connector is tested up to %s", version, newest)
