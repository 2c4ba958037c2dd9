"""Servers and engines for the tests of the Python package."""

import gc
import itertools
import os

import pytest
from kvrig.log_reports import pytest_runtest_makereport as pytest_runtest_makereport
from kvrig.proxy import Proxy
from kvrig.server import Server, free_port, our_command
from rig import Engine

CHUNK = 16

# Log lines of the package go to pytest, not to vLLM's handlers.
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")


def pytest_collection_finish():
    """What is imported stays: no collection of garbage looks through torch and vLLM again."""
    gc.freeze()


class Place:
    """Factory of one test's servers and engines, which end with it."""

    def __init__(self, directory):
        self.directory, self.servers, self.engines, self.proxies = directory, [], [], []
        self.mode = "both"

    def server(self, mode=None, start=True, **options):
        """Returns a server, running unless ``start`` is false."""
        mode = mode or self.mode
        log = self.directory / f"server-{len(self.servers)}.log"
        server = Server(our_command(), log, mode, chunk=CHUNK, **options)
        self.servers.append(server)
        if start:
            server.start()
        return server

    def older(self, server):
        """Returns a proxy of a server that reads no chunk size but its own, as kvtier's first ones and LMCache's."""
        self.proxies.append(Proxy(server.url, free_port(), hidden=["kvtier.chunk_tokens.1"]))
        return self.proxies[-1]

    def engine(self, server, **options):
        """Returns an engine that is connected and registered."""
        engine = Engine(server.url, **options)
        self.engines.append(engine)
        return engine

    def close(self):
        """Ends all; servers must have logged no trouble and left no segment."""
        for engine in self.engines:
            engine.close()
        for proxy in self.proxies:
            proxy.close()
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
    yield place
    place.close()


@pytest.fixture
def engines(place):
    """Factory of engines behind vLLM's connector, which end with the test."""
    from vllm_rig import Vllm

    made = []

    def make(server, **options):
        made.append(Vllm(server, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(params=["engine_driven", "pickle", "lmcache_driven"])
def mode(request, place):
    """The transport of bytes, which the servers support."""
    # Without a pool: a server with one grants slots to readers until it has received pickles from them.
    place.mode = "engine_pickle" if request.param == "pickle" else "both"
    return request.param


_numbers = itertools.count()


@pytest.fixture
def fresh():
    """Generator of request ids that no other test uses."""
    return lambda: f"request-{next(_numbers)}"
