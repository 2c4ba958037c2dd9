"""Packages that tests/setup.sh unpacked, without installing them."""

import os
from pathlib import Path

HOME = Path(os.environ.get("KVTIER_E2E_HOME") or Path.home() / ".cache/kvtier-e2e")


def unpacked(package):
    """The folder of the only release of a package."""
    [folder] = HOME.glob(f"clients/{package}-*")
    return folder
