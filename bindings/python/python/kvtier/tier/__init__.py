"""Second tiers in a process of their own, written in Python.

Subclass :class:`Tier`, then call :func:`serve`::

    from kvtier.tier import Tier, serve

    serve("/run/kvtier/mine.sock", MyTier())

kvtier uses it with ``--l2-adapter '{"type":"process","socket_path":"/run/kvtier/mine.sock"}'``, and ``kvtier tier-test``
checks it. The protocol is in ``docs/tier-protocol.md``. :mod:`kvtier.tier.directory` is a complete example.

Nothing here needs more than the standard library.
"""

from .base import (
    Capabilities,
    Found,
    Hello,
    Key,
    Listed,
    LoadObject,
    StoreObject,
    Tier,
    TierError,
)
from .server import main, serve

__all__ = [
    "Capabilities",
    "Found",
    "Hello",
    "Key",
    "Listed",
    "LoadObject",
    "StoreObject",
    "Tier",
    "TierError",
    "main",
    "serve",
]
