"""Servers and engines for the tests of kvtier.sglang."""

import os

import pytest
from kvrig.log_reports import pytest_runtest_makereport as pytest_runtest_makereport
from kvrig.server import Server, our_command


@pytest.fixture
def serve(tmp_path):
    """Factory of servers, which end with the test."""
    servers = []

    def start(begins=True, **options):
        servers.append(Server(our_command(), tmp_path / f"server-{len(servers)}.log", "both", **options))
        if begins:
            servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        if server.process is None:
            continue
        files = server.shm_files()
        assert server.stop()[0] == 0, server.tail()
        assert not [path for path in files if os.path.exists(path)]
        assert not server.unexpected_trouble()


@pytest.fixture
def model(tmp_path):
    """Factory of models: folders with weights."""

    def make(name, weights=b"weights"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        return folder

    return make


@pytest.fixture
def engines():
    """Factory of engines, which end with the test: with the linker, or with a layout of HiCache."""
    from rig import HiCache, Linked, arguments

    made = []

    def make(server, folder, kind="mha", layout=None, options=None, **extra):
        args, extra = arguments(folder, **options or {}), {"url": server.url, "lookup_timeout": 30.0, **extra}
        made.append(Linked(args, kind, **extra) if layout is None else HiCache(args, layout, kind, **extra))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
