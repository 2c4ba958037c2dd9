"""Resets of vLLM's own prefix cache without its connector."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class PoolResets:
    """Detects resets of a block pool: each replaces the map of cached blocks."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._map = self._current()
        if self._map is None:
            logger.warning(
                "resets of this vLLM's prefix cache cannot be detected; reset it with its connector (reset_external)"
            )

    def _current(self) -> Any:
        return getattr(self._pool, "cached_block_hash_to_block", None)

    @property
    def are_known(self) -> bool:
        """Whether resets of this pool are detected."""
        return self._map is not None

    def take(self) -> bool:
        """Whether there was a reset since the last call."""
        seen, self._map = self._map, self._current()
        return seen is not self._map
