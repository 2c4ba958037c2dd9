"""Servers and engines for the tests of the Python package."""

import itertools
import os

import pytest
from kvrig.server import Server, our_command
from rig import Engine

CHUNK = 16

# Lines of the package reach pytest, not vLLM's handlers.
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")


class Place:
    """Makes servers and engines of one test, and ends them with it."""

    def __init__(self, directory):
        self.directory, self.servers, self.engines = directory, [], []
        self.mode = "both"

    def server(self, mode=None, start=True, **options):
        """A server, running unless ``start`` is false."""
        mode = mode or self.mode
        log = self.directory / f"server-{len(self.servers)}.log"
        server = Server(our_command(), log, mode, chunk=CHUNK, **options)
        self.servers.append(server)
        if start:
            server.start()
        return server

    def engine(self, server, **options):
        """An engine that is connected and registered."""
        engine = Engine(server.url, **options)
        self.engines.append(engine)
        return engine

    def close(self):
        """End all; servers must not have complained, nor left anything."""
        for engine in self.engines:
            engine.close()
        for server in self.servers:
            if server.process is None:
                continue
            files = server.shm_files()
            status, _ = server.stop()
            assert status == 0, server.tail()
            assert not [path for path in files if os.path.exists(path)]
            assert not server.unexpected_trouble()


@pytest.fixture
def place(tmp_path):
    """The test's servers and engines."""
    place = Place(tmp_path)
    try:
        yield place
    except BaseException:
        for server in place.servers:
            print(server.tail())
        raise
    place.close()


@pytest.fixture(params=["engine_driven", "pickle", "lmcache_driven"])
def mode(request, place):
    """How bytes travel; servers serve it."""
    # Without a pool: a server that has one lends slots to readers until it has seen them send pickles.
    place.mode = "engine_pickle" if request.param == "pickle" else "both"
    return request.param


_numbers = itertools.count()


@pytest.fixture
def fresh():
    """A request id that no other test uses."""
    return lambda: f"request-{next(_numbers)}"
