"""Mooncake Store for tests, on loopback, which ends with the test: unpacked by tests/setup.sh."""

import subprocess
import sys
import urllib.request

from . import logs
from .packages import unpacked
from .server import free_port
from .waiting import wait_started


def package():
    """The folder to import Mooncake from."""
    return unpacked("mooncake-transfer-engine-non-cuda")


class Mooncake:
    """A master and its metadata server. The memory is that of the tiers that are set up with it."""

    # Objects that were looked up may be removed so soon; reads that take longer may see the next object in their place.
    LEASE_MS = 400

    def __init__(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        self.log, self.process = directory / "master.log", None
        self.port, self.metadata, self.metrics = free_port(), free_port(), free_port()
        self.start()

    def start(self):
        """Starts it, empty, and waits until it answers."""
        program = package() / "mooncake" / "mooncake_master"
        program.chmod(0o755)
        flags = {
            "rpc_port": self.port,
            "rpc_address": "127.0.0.1",
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": "127.0.0.1",
            "http_metadata_server_port": self.metadata,
            "metrics_port": self.metrics,
            "default_kv_lease_ttl": self.LEASE_MS,
        }
        logs.opened(self.log)
        with open(self.log, "ab") as log:
            command = [program, *(f"--{name}={value}" for name, value in flags.items())]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_started(self, self.is_up, "an answer to a request")

    def is_up(self):
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def stop(self):
        """Kills it."""
        self.process.kill()
        self.process.wait()
        logs.closed(self.log)

    def command(self, memory="64MiB"):
        """The command of a tier that gives this much memory to it."""
        flags = {
            "local-hostname": f"127.0.0.1:{free_port()}",
            "metadata-server": f"http://127.0.0.1:{self.metadata}/metadata",
            "master-server-addr": f"127.0.0.1:{self.port}",
            "global-segment-size": memory,
        }
        return [sys.executable, "-m", "kvtier.tier.mooncake", *(f"--{name}={value}" for name, value in flags.items())]
