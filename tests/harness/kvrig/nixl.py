"""NIXL from the wheel that tests/setup.sh unpacked: for LMCache's server, and its library for ours."""

import os
from pathlib import Path

from .packages import unpacked


def wheel():
    """The folder of the wheel."""
    return unpacked("nixl-cu12")


def library():
    """The C interface of NIXL; its backends are found from there."""
    return wheel() / ".nixl_cu12.mesonpy.libs" / "libnixl_capi.so"


# NIXL's own package of this name loads the wheel for the CUDA release of torch, which need not be this wheel's.
PACKAGE = """\
import importlib, sys
for name in ("_bindings", "_utils", "logging", "_api"):
    sys.modules[f"nixl.{name}"] = importlib.import_module(f"nixl_cu12.{name}")
"""


def environment(folder):
    """What a Python process needs to import `nixl`; `folder` is written to."""
    package = Path(folder) / "nixl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(wheel())])}
