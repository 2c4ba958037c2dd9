"""`kvtier top` on a terminal."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time

import pytest
from kvrig.engine import tokens
from kvrig.server import our_command

SIZE = struct.pack("HHHH", 30, 100, 0, 0)


class Terminal:
    """A program on a terminal of its own, of 30 lines and 100 columns."""

    def __init__(self, *arguments):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, SIZE)
        self.before, self.seen = termios.tcgetattr(self.ours), b""
        self.process = subprocess.Popen(
            [our_command()[0], *arguments], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def expect(self, text, patience=20):
        """Reads until the text was written."""
        until = time.monotonic() + patience
        while text not in self.seen:
            assert time.monotonic() < until, f"{text} is not in {self.seen[-2000:]}"
            if select.select([self.ours], [], [], 0.1)[0]:
                self.seen += os.read(self.ours, 65536)

    def press(self, key):
        """Presses a key."""
        self.seen = b""
        os.write(self.ours, key)

    def end(self):
        """Waits for its end; returns the exit status. The terminal must be as before."""
        try:
            status = self.process.wait(20)
            assert termios.tcgetattr(self.ours) == self.before, "the terminal was left in another mode"
            return status
        finally:
            os.close(self.ours)


# proves: docs/compare.md#command-line
@pytest.mark.parametrize("key", [b"q", b"\x1b", b"\x03"], ids=["q", "escape", "ctrl-c"])
def test_shows_the_load_until_a_key(serve, engines, key):
    """It draws what the server does, pauses, and leaves the terminal as it was."""
    server = serve()
    engine = engines(server)
    prompt = tokens(48)
    engine.store_prompt(prompt)
    with Terminal("top", "--interval", "200ms", server.http) as terminal:
        terminal.expect(b"hit rate")
        engine.wait_hit(prompt, 48)
        terminal.expect(b"lookup")
        terminal.press(b"p")
        terminal.expect(b"PAUSED")
        terminal.press(key)
        assert terminal.end() == 0


def test_once_prints_rates(serve, engines):
    """The hit rate, operations and tenants of an interval in which everything is found."""
    server = serve()
    engine = engines(server)
    prompt = tokens(48)
    engine.store_prompt(prompt)
    engine.wait_hit(prompt, 48)
    command = [our_command()[0], "top", "--once", "--interval", "1s", server.http]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        while top.poll() is None:
            engine.wait_hit(prompt, 48)
        text = top.stdout.read()
    assert top.returncode == 0
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["hit"][2:4] == ["100.0", "%"], text
    assert float(lines["lookup"][1].replace(",", "")) > 0, text
    assert lines["_default"][-2:] == ["100.0", "%"], text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["term", "hup"])
def test_signal_leaves_the_terminal_as_it_was(serve, number):
    """It ends as with a key."""
    with Terminal("top", "--interval", "200ms", serve().http) as terminal:
        terminal.expect(b"hit rate")
        terminal.process.send_signal(number)
        assert terminal.end() == 0


def test_server_that_ends_is_named(serve):
    """It goes on without an answer, and says so."""
    server = serve(fresh=True)
    with Terminal("top", "--interval", "200ms", server.http) as terminal:
        terminal.expect(b"hit rate")
        server.kill()
        try:
            terminal.expect(b"no answer")
            terminal.press(b"q")
            assert terminal.end() == 0
        finally:
            server.start()
