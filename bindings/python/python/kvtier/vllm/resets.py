"""Resets of vLLM's own prefix cache that the connector is not asked to join."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class PoolResets:
    """Notices resets of a block pool: each puts a new map of cached blocks in the place of the old one."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._map = self._current()
        if self._map is None:
            logger.warning(
                "this release of vLLM does not show resets of its prefix cache: reset it with its connector (reset_external)"
            )

    def _current(self) -> Any:
        return getattr(self._pool, "cached_block_hash_to_block", None)

    def take(self) -> bool:
        """Whether there was one since the last call."""
        seen, self._map = self._map, self._current()
        return seen is not self._map
