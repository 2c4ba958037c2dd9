"""Logs of the servers that run beside a test, which its report shows if it fails."""

from pathlib import Path

SHOWN_LINES = 20

_open = {}


def opened(path):
    """A server that writes this log has started."""
    _open[Path(path)] = None


def closed(path):
    """That server was stopped."""
    _open.pop(Path(path), None)


def tail(path):
    """The last lines of a log, under its path: for messages."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError as error:
        lines = [str(error)]
    return "\n".join([f"the end of {path}:", *lines[-SHOWN_LINES:]])


def all_open():
    """The logs of servers that have not been stopped."""
    return list(_open)
