"""Client of the kvtier KV-cache server.

* :class:`SchedulerAdapter` and :class:`WorkerAdapter`: the two sides of an inference engine.
* ``kvtier.vllm.KvTierConnector``: both, as a connector of vLLM.
* :class:`Client`: the request protocol, with futures.
* ``python -m kvtier.doctor URL``: checks an installation.
* :mod:`kvtier.tier`: second tiers in a process of their own, which need only the standard library.

Importing this package needs neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._native import (
        Client,
        Disconnected,
        Future,
        KvTierError,
        Prompt,
        Refused,
        TimedOut,
        __version__,
    )
    from .operation import LoadStoreOp
    from .scheduler import SchedulerAdapter
    from .worker import WorkerAdapter

__all__ = [
    "Client",
    "Disconnected",
    "Future",
    "KvTierError",
    "LoadStoreOp",
    "Prompt",
    "Refused",
    "SchedulerAdapter",
    "TimedOut",
    "WorkerAdapter",
    "__version__",
]

_MODULES = {"LoadStoreOp": ".operation", "SchedulerAdapter": ".scheduler", "WorkerAdapter": ".worker"}


def __getattr__(name: str) -> Any:
    # At its first use: `kvtier.tier` runs where the native module does not.
    if name == "_native":
        return importlib.import_module("._native", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES.get(name, "._native"), __name__)
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
