"""Log lines that may repeat with every request."""

from __future__ import annotations

import logging
import time

LOG_INTERVAL_SECONDS = 10.0


class RateLimited:
    """Warnings of a logger: the first of each kind, then one per interval with the number of suppressed ones."""

    def __init__(self, logger: logging.Logger, interval: float = LOG_INTERVAL_SECONDS) -> None:
        self._logger, self._interval = logger, interval
        # Kind -> time of its last line, and the number of lines suppressed since.
        self._kinds: dict[str, tuple[float, int]] = {}

    def warning(self, kind: str, message: str, *args: object) -> None:
        """Logs a warning of this kind unless one was logged within the interval."""
        now = time.monotonic()
        last, left_out = self._kinds.get(kind, (-self._interval, 0))
        if now - last < self._interval:
            self._kinds[kind] = (last, left_out + 1)
            return
        self._kinds[kind] = (now, 0)
        if left_out:
            message, args = message + " (%d more since the last such line)", (*args, left_out)
        self._logger.warning(message, *args)
