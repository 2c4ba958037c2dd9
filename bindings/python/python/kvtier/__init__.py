"""Client of the kvtier KV-cache server.

* :class:`SchedulerAdapter` and :class:`WorkerAdapter`: the two sides of an inference engine.
* ``kvtier.vllm.KvTierConnector``: both, as a connector of vLLM.
* :class:`Client`: the request protocol, with futures.
* ``python -m kvtier.doctor URL``: checks an installation.

Importing this package needs neither torch nor vLLM.
"""

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
