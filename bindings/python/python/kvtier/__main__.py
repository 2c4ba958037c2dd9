"""``python -m kvtier``: the command ``kvtier``, which the wheel installs as a binary.

The binary replaces the interpreter, so signals, exit status and process id are its own.
"""

import os
import sys
from pathlib import Path


def binaries(package: Path) -> list[Path]:
    """Paths at which an installer puts the binary of a package in this folder."""
    site = package.parent
    # The folder of `pip install --target`, or PREFIX/lib/python3.x/site-packages. Above another folder, bin/ is not the package's.
    prefixes = [site]
    if site.match("lib*/python3*/*-packages"):
        prefixes.append(site.parents[2])
    return [prefix / "bin" / "kvtier" for prefix in prefixes]


def command() -> str:
    """Returns the path of the binary.

    Raises SystemExit, with the paths, if there is none.
    """
    paths = binaries(Path(__file__).absolute().parent)
    for path in paths:
        if os.access(path, os.X_OK):
            return str(path)
    places = " or ".join(map(str, paths))
    raise SystemExit(f"kvtier: no command at {places}; this package was built without it; install the wheel that deploy/release/build makes")


def main() -> None:
    """Replaces this process by the binary."""
    path = command()
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    main()
