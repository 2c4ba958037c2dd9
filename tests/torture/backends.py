"""The second tiers of a round: flags of the server, what they hold, and how they break."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from kvrig import tiers
from kvrig.redis import Redis
from kvrig.s3 import Rclone

KEEP_MOUNTED = 'mount -t tmpfs -o size=24m tmpfs "$0" && echo mounted && read -r _'


class Directory:
    """A directory. Some of its files may be damaged, from which on their objects may be missing."""

    def __init__(self, path):
        self.path, self.damaged = path, set()
        path.mkdir(parents=True, exist_ok=True)
        self.flags = tiers.fs(path)

    def choose(self, pick):
        """A file of an object, which may be missing from now on; None without any."""
        found = tiers.files(self.path)
        if not found:
            return None
        path = found[int(pick * len(found))]
        self.damaged |= set(re.findall(r"[0-9a-f]{64}", path.name))
        return path

    def flip(self, pick):
        """Changes a bit."""
        if path := self.choose(pick):
            # Into another file, which takes its place: a changed one may be mapped.
            tiers.flip(path, int(pick * 1e6) % path.stat().st_size)
        return bool(path)

    def truncate(self, pick):
        """Shortens a file."""
        if path := self.choose(pick):
            os.truncate(path, int(pick * 1e6) % path.stat().st_size)
        return bool(path)

    def remove(self, pick):
        """Removes a file."""
        if path := self.choose(pick):
            path.unlink(missing_ok=True)
        return bool(path)

    def base_away(self, length):
        """The directory is missing for a while."""
        away = self.path.with_name(self.path.name + "-away")
        self.path.rename(away)
        time.sleep(length)
        # Whatever was made in its place meanwhile goes.
        if self.path.exists():
            subprocess.run(["rm", "-rf", str(self.path)], check=True)
        away.rename(self.path)
        return True

    def close(self):
        """Nothing runs."""


class SmallDirectory(Directory):
    """On a file system that objects of a round nearly fill."""

    def __init__(self, path):
        path.mkdir(parents=True)
        self.keeper = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", KEEP_MOUNTED, str(path)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.keeper.stdout.readline() == "mounted\n", "cannot mount a small file system"
        super().__init__(Path(f"/proc/{self.keeper.pid}/root", path.relative_to("/")))

    def disk_full(self, length):
        """Something else takes all space for a while."""
        filler = self.path.parent / self.path.name / "filler"
        with open(filler, "wb", buffering=0) as out, contextlib.suppress(OSError):
            while True:
                out.write(bytes(1 << 16))
        time.sleep(length)
        filler.unlink()
        return True

    def close(self):
        self.keeper.communicate()


def stopped(process, length):
    """Stops a process for a while."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(length)
    process.send_signal(signal.SIGCONT)
    return True


def away(server, length):
    """Ends a server for a while."""
    server.stop()
    time.sleep(length)
    server.start()
    return True


class OfRedis:
    """A Redis of the machine."""

    def __init__(self, path):
        self.server = Redis(path)
        self.flags = tiers.adapter("resp", host="127.0.0.1", port=self.server.port)

    def redis_kill(self, length):
        """Is away for a while, and comes back empty."""
        return away(self.server, length)

    def redis_stop(self, length):
        """Hangs."""
        return stopped(self.server.process, length)

    def redis_pause(self, length):
        """Accepts requests and answers none."""
        self.server.ask("CLIENT", "PAUSE", int(length * 1000))
        time.sleep(length)
        return True

    def close(self):
        self.server.stop()


class OfS3:
    """An S3 server whose objects are files."""

    def __init__(self, path):
        # Only the server writes there, and without a cache it hangs in deep directories.
        self.server = Rclone(path, dir_cache="1h")
        self.flags = tiers.adapter("s3", **self.server.keys())

    def s3_kill(self, length):
        """Is away for a while; its objects stay."""
        return away(self.server, length)

    def s3_stop(self, length):
        """Hangs."""
        return stopped(self.server.process, length)

    def close(self):
        self.server.stop()


KINDS = {"fs": Directory, "small_fs": SmallDirectory, "redis": OfRedis, "s3": OfS3}
