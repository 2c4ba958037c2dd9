"""A second tier that several servers share, or one server that reads another: an engine at one of them hits what an engine at the other
has stored."""

import os
import shutil
import sys
from pathlib import Path

from cases import CHUNK, WHOLE, ModeCases
from children import Child
from engine import Vllm
from kvrig import tiers
from kvrig.redis import Redis
from kvrig.s3 import Seaweed
from kvrig.server import REPOSITORY, free_port, listening
from kvrig.waiting import wait_until


class RemoteTier:
    """An empty tier for one run: the flags of the first and the second server, and its end."""

    def __init__(self, kind, directory):
        if kind == "peers":
            self.backend, port = None, free_port()
            self.first = ["--peer-port", str(port)]
            # However busy the machine is.
            self.second = tiers.adapter("peers", peers=[f"127.0.0.1:{port}"], first_byte_ms=5000, lookup_timeout_ms=5000)
            return
        shutil.rmtree(directory, ignore_errors=True)
        self.backend = {"resp": Redis, "s3": Seaweed}[kind](Path(directory))
        keys = self.backend.keys() if kind == "s3" else {"host": "127.0.0.1", "port": self.backend.port}
        self.first = self.second = tiers.adapter(kind, **keys)

    def stop(self):
        """Ends it, with all that it holds."""
        if self.backend:
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


class PeerCases(ModeCases):
    """The second server reads the L1 of the first. Both engines run at the same time, at last behind the example router."""

    # proves: docs/compare.md#other-servers
    # proves: docs/hosts.md#route-to-where-the-prefix-is
    def run_peers(self, second):
        """The second engine hits what only the first one computed, and without the peer it does not."""
        first, prompts, children = self.server, self.prompts, []
        # The peer is frozen, and ends first or last.
        second.expect_trouble(r"second tier|peer")
        try:
            children.append(one := Vllm(self.options, self.log_name(1), first))
            for name, salt in (("main", None), ("main", "alice"), ("other_start", None), ("exact", None)):
                one.forget()
                answer = self.stored(lambda name=name, salt=salt: one.measured(prompts.named()[name], salt), WHOLE // CHUNK)
                self.expect(f"{name}-{salt}-misses", answer, name, 0, local=0)
            wait_until(lambda: tiers.tier(second)["connected_peers"] == 1, 60, "a connection to the peer")
            self.server = second
            children.append(two := Vllm(self.options, self.log_name(2), second))
            self.expect("second-server-hits", two.measured(prompts.main), "main", WHOLE, local=0)
            two.forget()
            self.expect("salt-bob-misses", two.measured(prompts.main, "bob"), "main", 0, local=0)
            two.forget()
            self.expect("salt-alice-hits", two.measured(prompts.main, "alice"), "main", WHOLE, local=0)
            self.from_the_tier("second-server", 2 * WHOLE)
            # Without an answer of the servers the first request would be that of the engine that is named first.
            router, url = self.router([(two, second), (one, first)])
            children.append(router)
            one.forget()
            before = two.counters()
            self.expect("router-finds-the-first", one.measured(prompts.other_start, base=url), "other_start", WHOLE, local=0)
            self.check("router-passes-the-second", two.counters() == before, f"{two.counters()} as before")
            children.remove(one)
            one.stop()
            # The first server has the prompt still, but its engine has ended.
            self.expect("router-second-hits", two.measured(prompts.other_start, base=url), "other_start", WHOLE, local=0)
            self.from_the_tier("router-second", 3 * WHOLE)
            sent = first.get("/status")[1]["peer_port"]["sent_objects"]
            self.check("sent-by-the-first", sent == 3 * WHOLE // CHUNK, f"{sent} objects")
            with first.frozen():
                self.expect("misses-without-the-peer", two.measured(prompts.exact), "exact", 0, local=0)
        finally:
            for child in children:
                child.stop()

    def router(self, hosts):
        """The example router before these engines and servers, and its URL."""
        port, script = free_port(), REPOSITORY / "examples" / "router" / "router.py"
        program = [sys.executable, str(script), "--port", str(port), "--model", self.options.model, "--budget-ms", "30000"]
        program += [part for engine, server in hosts for part in ("--engine", f"{engine.base}={server.http}")]
        child = Child("router", program, os.path.join(self.options.logs, f"{self.log_name('router')}.log"))
        wait_until(lambda: listening(port), 60, "the router")
        return child, f"http://127.0.0.1:{port}"
