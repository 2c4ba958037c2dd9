"""Options in the extra configuration of SGLang's storage backend or linker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..connecting import DEFAULT_LOOKUP_TIMEOUT, check_model_name, check_seconds

# Options of SGLang in the same object.
_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")


@dataclass(frozen=True)
class Options:
    """Options with their defaults."""

    url: str = "tcp://localhost:5555"
    """The server's address."""

    tenant: str = ""
    """The tenant of all requests of this engine: SGLang shows a storage the salts of requests only in hashes."""

    model_name: str = ""
    """The model's name in keys, in place of SGLang's name and the digest of :func:`kvtier.sglang.identity.model_name`."""

    timeout: float = 5.0
    """Seconds a store or a load may take."""

    lookup_timeout: float = DEFAULT_LOOKUP_TIMEOUT
    """Seconds a lookup may take."""

    @classmethod
    def read(cls, extra: Mapping[str, Any] | None, **defaults: Any) -> Options:
        """Reads the options from the extra configuration.

        Raises:
            ValueError: an option is unknown, or a value is not allowed; the message has what is.
        """
        given = {name: value for name, value in (extra or {}).items() if name not in _SGLANG}
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{name}: no such option; allowed are {', '.join(known)}")
            if name.endswith("timeout"):
                check_seconds(name, value)
            elif not isinstance(value, str):
                raise ValueError(f"{name}: {value!r}; a text is needed")
        options = replace(cls(**defaults), **given)
        if options.model_name:
            check_model_name(options.model_name)
        if len(options.tenant) > 128 or set(options.tenant) & set("@/\\\0"):
            raise ValueError(f"tenant: {options.tenant!r}; allowed are at most 128 characters, none of them @, /, \\ or NUL")
        return options
