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

# Seconds in a day, the longest that a server keeps what a request asks it to keep.
_MAX_KEEP_SECONDS = 86_400

# Bytes of the longest name of a session.
_MAX_SESSION = 256

# Longest name of a host.
_MAX_HOST = 253


@dataclass(frozen=True)
class Parameters:
    """What a request may use of the cache, how long it waits for it, and how long its KV is to be kept there."""

    store: int = _ALL
    """Tokens that may be stored, from its start."""

    load: int = _ALL
    """Tokens that may be loaded, from its start."""

    awaited: int = 0
    """Tokens, from its start, that another engine has stored or is storing, which a lookup waits for."""

    keep_seconds: int | None = None
    """Seconds that what it stores or hits is pinned; 0: what it stores is evicted first; None: it is kept as any other."""

    session: str | None = None
    """The agent's session that it is a turn of; vLLM's own id of it by default."""

    session_action: str | None = None
    """What happens to what only that session needs when the request ends: ``release`` or ``demote``."""

    peer: str | None = None
    """Host that is likely to have its KV, one of those that the server reads from."""

    @classmethod
    def of(cls, request: Any, warnings: RateLimited) -> Parameters:
        """Reads a request's parameters; of several of one use the least counts. Clients choose them, so none is refused.

        A limit that is not allowed counts as 0: its client wanted less than everything. Other values that are not allowed, and unknown
        keys, are ignored, so that clients may send those of a later release; keys of other connectors are not looked at.
        """
        values: dict[str, Any] = {}
        given = getattr(request, "kv_transfer_params", None)
        for key, value in {**_hinted(request), **(given if isinstance(given, Mapping) else {})}.items():
            parameter = PARAMETERS.get(key)
            if parameter is not None and value is not None:
                read = parameter.read(value)
                if read is None:
                    read, effect = _OTHERWISE[parameter.use]
                    _warn(warnings, "value", request, key, value, f"allowed are {parameter.allowed}; the request {effect}")
                if read is not None:
                    values[parameter.use] = min(values.get(parameter.use, read), read)
            elif parameter is None and isinstance(key, str) and key.startswith(PREFIX):
                effect = f"there is no such parameter, and it is ignored; allowed are {', '.join(PARAMETERS)}"
                _warn(warnings, "key", request, key, value, effect)
        return cls(**values)


def _hinted(request: Any) -> dict[str, Any]:
    """Returns parameters that vLLM has elsewhere: its id of the session, and KV hints of the type ``kvtier`` (from vLLM 0.32 on)."""
    found = {"kvtier.session": getattr(request, "session_id", None)}
    hints = getattr(request, "kv_hints", None)
    for action in hints.actions if hints is not None else ():
        if action.action_type == "kvtier":
            found.update(action.payload)
    return found


def is_prefill(request: Any) -> bool:
    """Whether another engine is to decode what the request computes: NIXL's key, which proxies of disaggregated prefill send."""
    given = getattr(request, "kv_transfer_params", None)
    return isinstance(given, Mapping) and bool(given.get("do_remote_decode"))


class Parameter(NamedTuple):
    """Parameter of a request, which sets one field of :class:`Parameters`."""

    use: str
    """The field."""

    allowed: str
    """Values that are allowed, as a text."""

    read: Callable[[Any], Any]
    """Returns the field's value that a value means; None if it is not allowed."""


def _permission(value: Any) -> int | None:
    """Returns the limit of a request that may (true), or may not."""
    return (0, _ALL)[value] if isinstance(value, bool) else None


def _prohibition(value: Any) -> int | None:
    """Returns the limit of a request that may not (true), or may."""
    return _permission(not value) if isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    """Returns a number of tokens."""
    return value if type(value) is int and value >= 0 else None


def _seconds(value: Any) -> int | None:
    """Returns a number of seconds."""
    return value if type(value) is int and 0 <= value <= _MAX_KEEP_SECONDS else None


def _session(value: Any) -> str | None:
    """Returns the name of a session."""
    is_name = isinstance(value, str) and value.isprintable() and 0 < len(value.encode()) <= _MAX_SESSION
    return value if is_name else None


def _action(value: Any) -> str | None:
    """Returns what happens to a session."""
    return value if value in ("release", "demote") else None


def _host(value: Any) -> str | None:
    """Returns a host."""
    return value if isinstance(value, str) and 0 < len(value) <= _MAX_HOST else None


def _source(value: Any) -> str | None:
    """Returns the host of llm-d's source of KV."""
    return _host(value.get("remote_host")) if isinstance(value, Mapping) else None


_SWITCH, _COUNT = "true and false", "whole numbers from 0 on"

PARAMETERS = {
    "kvtier.store": Parameter("store", _SWITCH, _permission),
    "kvtier.load": Parameter("load", _SWITCH, _permission),
    "kvtier.max_store_tokens": Parameter("store", _COUNT, _count),
    "kvtier.max_load_tokens": Parameter("load", _COUNT, _count),
    STORED_TOKENS: Parameter("awaited", _COUNT, _count),
    "kvtier.keep_seconds": Parameter("keep_seconds", f"whole numbers from 0 to {_MAX_KEEP_SECONDS}", _seconds),
    "kvtier.session": Parameter("session", f"printable names of at most {_MAX_SESSION} bytes", _session),
    "kvtier.session_action": Parameter("session_action", "release and demote, prefetch by HTTP alone", _action),
    "kvtier.peer": Parameter("peer", f"host names and addresses of at most {_MAX_HOST} characters", _host),
    "remote_kv_source": Parameter("peer", "objects with such a remote_host", _source),
    "lmcache.skip_save": Parameter("store", _SWITCH, _prohibition),
    "lmcache.max_offload_tokens": Parameter("store", _COUNT, _count),
}
"""Key -> parameter. Names of LMCache's connectors are those that mean the same there; ``remote_kv_source`` is llm-d's."""


# The field's value where one is not allowed, None for its default, and what that means.
_OTHERWISE: dict[str, tuple[int | None, str]] = {
    "peer": (None, "names no peer"),
    "store": (0, "may store nothing"),
    "load": (0, "may load nothing"),
    "awaited": (0, "waits for nothing"),
    "keep_seconds": (None, "sets no time"),
    "session": (None, "is of no session"),
    "session_action": (None, "does nothing to its session"),
}


# Clients choose the length of what they send.
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def _warn(warnings: RateLimited, kind: str, request: Any, key: str, value: Any, effect: str) -> None:
    """Logs a parameter that is not used as it was sent."""
    sent = f"{_short.repr(key)} is {_short.repr(value)}"
    warnings.warning(f"parameter's {kind}", "request %s: %s in kv_transfer_params; %s", _short.repr(request.request_id), sent, effect)
