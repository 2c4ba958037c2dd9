"""What a request asks of the cache, in ``kv_transfer_params`` of its sampling parameters."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..limited import RateLimited
from .options import PREFIX

# The limit of a request that sets none.
_ALL = sys.maxsize

# Answer to a prefill request, and parameter of the request that decodes it.
STORED_TOKENS = PREFIX + "stored_tokens"


@dataclass(frozen=True)
class Limits:
    """Numbers of tokens, from a request's start."""

    store: int = _ALL
    """Tokens that may be stored."""

    load: int = _ALL
    """Tokens that may be loaded."""

    awaited: int = 0
    """Tokens that another engine has stored or is storing, which a lookup waits for."""

    @classmethod
    def of(cls, request: Any, warnings: RateLimited) -> Limits:
        """Reads a request's parameters; of several limits the least counts. Clients choose them, so none is refused.

        A value that is not allowed counts as 0: its client wanted less than everything. Unknown keys are ignored, so that clients
        may send those of a later release; keys of other connectors are not looked at.
        """
        limits: dict[str, int] = {}
        given = getattr(request, "kv_transfer_params", None)
        for key, value in given.items() if isinstance(given, Mapping) else ():
            parameter = PARAMETERS.get(key)
            if parameter is not None and value is not None:
                limit = parameter.read(value)
                if limit is None:
                    effect = f"allowed are {parameter.allowed}; the request {_NOTHING[parameter.use]}"
                    _warn(warnings, "value", request, key, value, effect)
                limits[parameter.use] = min(limits.get(parameter.use, _ALL), limit or 0)
            elif parameter is None and isinstance(key, str) and key.startswith(PREFIX):
                effect = f"there is no such parameter, and it is ignored; allowed are {', '.join(PARAMETERS)}"
                _warn(warnings, "key", request, key, value, effect)
        return cls(**limits)


def is_prefill(request: Any) -> bool:
    """Whether another engine is to decode what the request computes: NIXL's key, which proxies of disaggregated prefill send."""
    given = getattr(request, "kv_transfer_params", None)
    return isinstance(given, Mapping) and bool(given.get("do_remote_decode"))


class Parameter(NamedTuple):
    """Parameter of a request, which sets one limit."""

    use: str
    """The field of :class:`Limits`."""

    allowed: str
    """Values that are allowed, as a text."""

    read: Callable[[Any], int | None]
    """Returns the limit that a value means; None if it is not allowed."""


def _permission(value: Any) -> int | None:
    """Returns the limit of a request that may (true), or may not."""
    return (0, _ALL)[value] if isinstance(value, bool) else None


def _prohibition(value: Any) -> int | None:
    """Returns the limit of a request that may not (true), or may."""
    return _permission(not value) if isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    """Returns a number of tokens."""
    return value if type(value) is int and value >= 0 else None


_SWITCH, _COUNT = "true and false", "whole numbers from 0 on"

PARAMETERS = {
    "kvtier.store": Parameter("store", _SWITCH, _permission),
    "kvtier.load": Parameter("load", _SWITCH, _permission),
    "kvtier.max_store_tokens": Parameter("store", _COUNT, _count),
    "kvtier.max_load_tokens": Parameter("load", _COUNT, _count),
    STORED_TOKENS: Parameter("awaited", _COUNT, _count),
    "lmcache.skip_save": Parameter("store", _SWITCH, _prohibition),
    "lmcache.max_offload_tokens": Parameter("store", _COUNT, _count),
}
"""Key -> parameter. Names of LMCache's connectors are those that mean the same there."""


# What 0 means.
_NOTHING = {"store": "may store nothing", "load": "may load nothing", "awaited": "waits for nothing"}


# Clients choose the length of what they send.
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def _warn(warnings: RateLimited, kind: str, request: Any, key: str, value: Any, effect: str) -> None:
    """Logs a parameter that is not used as it was sent."""
    sent = f"{_short.repr(key)} is {_short.repr(value)}"
    warnings.warning(f"parameter's {kind}", "request %s: %s in kv_transfer_params; %s", _short.repr(request.request_id), sent, effect)
