"""A second tier that several servers share: an engine at one of them hits what an engine at the other has stored."""

import shutil
from pathlib import Path

from cases import CHUNK, WHOLE, ModeCases
from engine import Vllm
from kvrig import tiers
from kvrig.redis import Redis
from kvrig.s3 import Seaweed


class RemoteTier:
    """An empty tier for one run: the flags of its servers, and its end."""

    def __init__(self, kind, directory):
        shutil.rmtree(directory, ignore_errors=True)
        self.backend = {"resp": Redis, "s3": Seaweed}[kind](Path(directory))
        keys = self.backend.keys() if kind == "s3" else {"host": "127.0.0.1", "port": self.backend.port}
        self.flags = tiers.adapter(kind, **keys)

    def stop(self):
        """Ends it, with all that it holds."""
        self.backend.stop()


class RemoteCases(ModeCases):
    """The first server is `self.server`; the second never sees a request before the engine moves to it."""

    def run_remote(self, second):
        """One engine at each server, one after the other."""
        prompts = self.prompts
        try:
            vllm = self.first_engine()
            answer = self.stored(lambda: vllm.measured(prompts.main), WHOLE // CHUNK)
            self.expect("miss", answer, "main", 0, local=0)
            vllm.forget()
            answer = self.stored(lambda: vllm.measured(prompts.main, "alice"), WHOLE // CHUNK)
            self.expect("salt-alice-misses", answer, "main", 0, local=0)
            tiers.settled(self.server)
            vllm.stop()
            self.vllm, self.server = None, second
            self.vllm = vllm = Vllm(self.options, self.log_name(2), second)
            self.expect("second-server-hits", vllm.measured(prompts.main), "main", WHOLE, local=0)
            self.from_the_tier("second-server", WHOLE)
            vllm.forget()
            self.expect("salt-bob-misses", vllm.measured(prompts.main, "bob"), "main", 0, local=0)
            vllm.forget()
            self.expect("salt-alice-hits", vllm.measured(prompts.main, "alice"), "main", WHOLE, local=0)
            self.from_the_tier("second-server-alice", 2 * WHOLE)
        finally:
            if self.vllm:
                self.vllm.stop()
