"""The adapters of LMCache's releases 0.5.3 to 0.5.5, unmodified, in every mode: see `kvrig.release`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ours("each release is tested with its own server elsewhere")

RELEASES = ["0.5.3", "0.5.4", "0.5.5"]
HOME = Path(os.environ.get("KVTIER_E2E_HOME") or Path.home() / ".cache/kvtier-e2e")
HARNESS = Path(__file__).parents[1] / "harness"


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """A process a release, all at once: they wait for heartbeats most of the time."""
    running = {}
    for release in RELEASES:
        folder = tmp_path_factory.mktemp(release)
        env = dict(os.environ, PYTHONPATH=f"{HOME / 'clients' / release}:{HARNESS}", LMCACHE_LOG_LEVEL="WARNING")
        command = [sys.executable, "-m", "kvrig.release", str(folder)]
        out = open(folder / "output", "w")  # noqa: SIM115
        running[release] = (subprocess.Popen(command, stdout=out, stderr=out, env=env), folder)
    yield running
    for process, _ in running.values():
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.parametrize("release", RELEASES)
def test_release_works_in_every_mode(conversations, release):
    """Registered, stored, found and loaded with every byte compared; a refused retrieve is noticed; a restart of the
    server, also with another chunk size, is survived."""
    process, folder = conversations[release]
    process.wait(150)
    output = (folder / "output").read_text(errors="replace")
    assert process.returncode == 0, output[-6000:]
    assert f"/{release}/lmcache" in output, "another release was imported"
    print(output)
