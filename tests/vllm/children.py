"""Child processes with all their descendants, stopped by process id."""

import glob
import os
import signal
import subprocess
import time


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
    """Whether a process has ended and only waits to be reaped (or is gone)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


class Child:
    """A process in a session of its own, with its output in a file."""

    def __init__(self, name, argv, log, env=None):
        self.name, self.log = name, log
        self.output = open(log, "wb")
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT,
            env=dict(os.environ, **(env or {})), start_new_session=True, cwd="/tmp",
        )  # fmt: skip
        self.pid = self.process.pid

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
        self.output.close()
        return sum(remove_segments(pid) for pid in members)


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
