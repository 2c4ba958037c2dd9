"""Child processes with all their descendants, stopped by process id."""

import glob
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def session_members(session):
    """Ids of the processes of a session."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.getsid(int(name)) == session:
                    found.append(int(name))
            except OSError:
                pass
    return found


def is_zombie(pid):
    """Whether a process has ended and only waits to be reaped (or was reaped)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


class Child:
    """A process in a session of its own, with its output in a file."""

    def __init__(self, name, argv, log, env=None):
        self.name, self.log, self.began = name, log, time.monotonic()
        self.process = self.launch(argv, env or {})
        self.pid = self.process.pid

    def launch(self, argv, env):
        """Start the process; returns its `Popen` or what behaves like one."""
        with open(self.log, "wb") as output:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=dict(os.environ, **env), start_new_session=True, cwd="/tmp",
            )  # fmt: skip

    def alive(self):
        """Whether the first process still runs."""
        return self.process.poll() is None

    def tail(self, count=30):
        """The last lines of its output."""
        with open(self.log, errors="replace") as log:
            return "\n".join(log.read().splitlines()[-count:])

    def stop(self, grace=20.0):
        """SIGTERM to the first process, SIGKILL to what is left of its session; bytes of shared memory removed.

        vLLM does not unlink the segments that LMCache's client moved its KV cache to.
        """
        members = set(session_members(self.pid)) | {self.pid}
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            self.process.poll()
            left = [pid for pid in session_members(self.pid) if not is_zombie(pid)]
            members |= set(left)
            if not left and not self.alive():
                break
            time.sleep(0.05)
        for pid in session_members(self.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        self.process.wait()
        return sum(remove_segments(pid) for pid in members)


class ForkServer:
    """The process of `fork_server.py`, and the start of children in it."""

    def __init__(self, log, modules, env):
        """`modules` are imported before the first fork, besides vLLM's."""
        script = Path(__file__).with_name("fork_server.py")
        self.log = open(log, "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(script), *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            env=dict(os.environ, **env), start_new_session=True, cwd="/tmp", text=True,
        )  # fmt: skip
        self.lock, self.ready = threading.Lock(), False

    def request(self, request):
        """The reply to one request."""
        with self.lock:
            if not self.ready:
                self.ready = self.receive()["ready"]
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return self.receive()

    def receive(self):
        """The next reply."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server ended, see {self.log.name}")
        return json.loads(line)

    def child(self, name, argv, log, env):
        """A child that vLLM's API server runs in, with the arguments `argv`."""
        return ForkedChild(self, name, argv, log, env)

    def close(self):
        """End it; its children were stopped before."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


class ForkedChild(Child):
    """A child of a `ForkServer`."""

    def __init__(self, server, *args):
        self.server = server
        super().__init__(*args)

    def launch(self, argv, env):
        """Fork it."""
        return Forked(self.server, self.server.request({"start": {"argv": argv, "env": env, "log": self.log}})["pid"])


class Forked:
    """What `Child` needs of a `Popen`, for a process that the fork server reaps."""

    def __init__(self, server, pid):
        self.server, self.pid, self.status = server, pid, None

    def poll(self):
        """The exit status, or None while it runs."""
        if self.status is None:
            self.status = self.server.request({"poll": self.pid})["status"]
        return self.status

    def send_signal(self, number):
        """Signal it."""
        os.kill(self.pid, number)

    def wait(self):
        """Wait for its end."""
        while self.poll() is None:
            time.sleep(0.02)
        return self.status


def remove_segments(pid):
    """Unlink the KV segments a dead client left behind; their size."""
    size = 0
    for path in glob.glob(f"/dev/shm/lmcache_kv_{pid}_*"):
        try:
            size += os.path.getsize(path)
            os.unlink(path)
        except OSError:
            pass
    return size
