"""Waiting without sleeping past the event: poll a condition until a deadline."""

import time
from pathlib import Path

from . import logs


class TimedOut(AssertionError):
    """A condition did not become true in time."""


def wait_until(condition, timeout, what, interval=0.01):
    """Return the first true value of `condition()`; raise `TimedOut` naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise TimedOut(f"{what}: not within {timeout} s (last value {value!r})")
        time.sleep(interval)


def wait_started(server, condition, what):
    """Wait for a step of the start of a server's `process`. A failure stops it, and has the end of its `log`."""
    process = server.process
    try:
        wait_until(lambda: process.poll() is not None or condition(), 120, what, interval=0.02)
        assert process.poll() is None, f"it ended with status {process.returncode}"
    except AssertionError as error:
        server.stop()
        raise AssertionError(f"{Path(process.args[0]).name}: {error}; {logs.tail(server.log)}") from None
