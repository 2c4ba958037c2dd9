"""Methods that vLLM calls: an exception in one would end the engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ..limited import RateLimited

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Errors:
    """Exceptions that ended in a fallback: counted, and logged at a limited rate."""

    def __init__(self, logger: logging.Logger) -> None:
        self._warnings = RateLimited(logger)
        self.count = 0

    def add(self, where: str, error: BaseException) -> None:
        """Counts an exception of the method ``where``."""
        self.count += 1
        name = type(error).__name__
        self._warnings.warning(
            f"{where}:{name}", "%s failed and was skipped (%s: %s); this is a bug, or an unusual request", where, name, error
        )

    def take(self) -> int:
        """Returns the count since the last call."""
        count, self.count = self.count, 0
        return count


def falls_back(result: Callable[[], Any] = lambda: None, *, by: str | None = None) -> Callable[[_Method], _Method]:
    """Decorates a method of an object with ``errors``: if it raises, it returns ``result()``.

    ``by`` names a method of the same object that is called with the same arguments before that. If it returns something,
    that is the result.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                _handle(self, method.__qualname__, error)
            if by is not None:
                try:
                    fallback = getattr(self, by)(*args, **kwargs)
                except BaseException as error:
                    _handle(self, f"{method.__qualname__}, {by}", error)
                else:
                    if fallback is not None:
                        return fallback
            return result()

        return guarded  # type: ignore[return-value]

    return decorate


def _handle(owner: Any, where: str, error: BaseException) -> None:
    # Signals end the engine. A panic of native code is also no Exception, but does not end it.
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error
    owner.errors.add(where, error)
