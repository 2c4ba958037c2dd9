"""Waiting without sleeping past the event: poll a condition until a deadline."""

import time


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
