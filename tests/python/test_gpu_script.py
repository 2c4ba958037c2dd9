"""The script that checks a GPU, over the fake driver, so that it works when there is a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

from kvrig.server import REPOSITORY, fake_driver_library

# Checks that need PyTorch on a GPU; a Rust test dry-runs speed.
NEEDS_A_GPU = {"memory-returns", "expandable", "whole-l1", "beside-a-model", "speed"}


def counters():
    """Returns PyTorch's files with reference counters of its memory."""
    return set(Path("/dev/shm").glob("torch_*_gpu[0-9]*"))


def test_checks_without_gpu_pass(tmp_path):
    before = counters()
    script = REPOSITORY / "benches" / "gpu.py"
    command = [sys.executable, script, "--fake-driver", fake_driver_library(), "--out", tmp_path / "out"]
    environment = dict(os.environ, KVTIER_GPU_EXAMPLE="/none")
    checks = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = checks.communicate(timeout=400)
    finally:
        # The script stops its server.
        checks.terminate()
        checks.wait(30)
    assert checks.returncode == 0, output
    report = json.loads((tmp_path / "out" / "checks.json").read_text())
    verdicts = {each["check"]: each["verdict"] for each in report["checks"]}
    skipped = {name for name, verdict in verdicts.items() if verdict == "SKIP"}
    assert skipped == NEEDS_A_GPU
    assert {verdict for name, verdict in verdicts.items() if name not in skipped} == {"PASS"}
    assert {"layout-mla", "ordering", "stuck-event", "killed-engine", "server-stops"} <= verdicts.keys()
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    (gpu,) = status["devices"]["cuda"]["gpus"]
    assert {moved["direction"] for moved in gpu["state"]["moved"]} == {"store", "retrieve"}
    assert gpu["state"]["open_allocations"] == 0
    assert counters() <= before, "counters were left"
