"""A real vLLM on CPU behind its OpenAI API, alone or with LMCache's connector or our own."""

import json
import os
import re
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from children import Child, ForkServer
from kvrig.server import client_mode, free_port
from kvrig.waiting import wait_until

HERE = Path(__file__).parent

CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    # Engines are forked: no thread pool in the parent.
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_SERVER_DEV_MODE": "1",  # for POST /reset_prefix_cache
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip


@dataclass
class Answer:
    """One completion, and what vLLM's counters say about it."""

    ids: list
    ttft: float
    external: int = 0  # prompt tokens that came from the cache server
    local: int = 0  # ... from vLLM's own prefix cache
    computed: int = 0
    arrivals: list = field(default_factory=list)  # seconds from the request to each event with tokens

    def __str__(self):
        return f"external={self.external} local={self.local} computed={self.computed} ttft={self.ttft:.3f}s"


class Vllm:
    """One vLLM process group; ready to answer when constructed."""

    def __init__(self, options, name, server=None, flags=(), events=None):
        """`server`: the cache server to connect to, or None for vLLM alone; `events`: the subscriber to its KV events."""
        self.name, self.events = name, events
        tensor, stages = (1, 1) if server is None else (options.tensor_parallel, options.pipeline_parallel)
        workers = tensor * stages
        self.base = f"http://127.0.0.1:{(port := free_port())}"
        argv = [
            "--model", options.model, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
            "--enforce-eager", "--max-model-len", "4096", "--block-size", str(options.block_size),
            "--dtype", options.dtype, "--max-num-seqs", "8", "--enable-prompt-tokens-details",
            "--num-gpu-blocks-override", str(options.kv_blocks),
            "--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(stages), *flags,
        ]  # fmt: skip
        if server is not None:
            argv += ["--kv-transfer-config", json.dumps(transfer_config(options, server))]
        environment, patches = dict(ENVIRONMENT), []
        if workers > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_each(workers)
            patches.append("few_cores")
        if stages > 1:
            patches.append("stages")
        if options.mla:
            patches.append("own_prefixes")
        modules = module_path(options)
        if patches:
            environment["RIG_PATCHES"] = ",".join(patches)
            modules.insert(0, str(HERE / "patches"))
        if events:
            argv += events.flags()
        if options.connector == "kvtier" and server is not None:
            environment["WITNESS_DIRECTORY"] = str(server.witness)
        modules += options.wheel
        if modules:
            environment["PYTHONPATH"] = os.pathsep.join(modules)
        log = os.path.join(options.logs, f"{name}.log")
        if options.fork_server and not patches:
            self.child = options.fork_server.child(name, argv, log, environment)
        else:
            # `vllm serve` asks for a distribution called "vllm"; the CPU build has another name.
            program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
            self.child = Child(name, program + argv, log, environment)
        try:
            wait_until(self.ready, options.start_timeout, f"vLLM {name}", interval=0.2)
        except BaseException:
            print(self.child.tail(), flush=True)
            self.child.stop()
            raise
        print(f"# vllm[{name}] up after {time.monotonic() - self.child.began:.1f} s", flush=True)
        self.ask([5] * 40, count=4)  # warm up; shorter than a chunk, so nothing is cached
        if events:
            # A whole block of vLLM's, and less than a chunk.
            events.connected(lambda number: self.ask([6 + number] * 160, count=1))

    def ready(self):
        """Whether the API answers."""
        if not self.child.alive():
            raise RuntimeError(f"vLLM {self.name} ended, see {self.child.log}")
        try:
            return self.call("GET", "/health", timeout=2) is not None
        except OSError:
            return False

    def call(self, method, path, body=None, timeout=180):
        """Body of the answer to one HTTP request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.base + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.read()

    def ask(self, prompt, count=16, salt=None, cancelled_after=None, base=None, **more):
        """Greedy completion of a list of token ids; or its first `cancelled_after` tokens, after which the request is cancelled. `base`
        is the URL of a router before the engine; `more` goes into the request's body."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True, **more,
        }  # fmt: skip
        if salt is not None:
            body["cache_salt"] = salt
        request = urllib.request.Request(
            (base or self.base) + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began, arrivals, ids = time.monotonic(), [], []
        with urllib.request.urlopen(request, timeout=180) as response:
            for line in response:
                if cancelled_after is not None and len(ids) >= cancelled_after:
                    break
                if not line.startswith(b"data: ") or b"[DONE]" in line:
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"])
                for choice in event.get("choices", []):
                    if choice.get("token_ids"):
                        arrivals.append(time.monotonic() - began)
                        ids += choice["token_ids"]
        return Answer(ids, arrivals[0] if arrivals else None, arrivals=arrivals)

    def likeliest(self, prompt, salt):
        """The two likeliest next tokens, and the difference of their log-probabilities."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "logprobs": 2,
            "return_tokens_as_token_ids": True, "cache_salt": salt,
        }  # fmt: skip
        answer = json.loads(self.call("POST", "/v1/completions", body))
        found = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        (first, high), (second, low) = sorted(found.items(), key=lambda item: -item[1])[:2]
        return {int(name.removeprefix("token_id:")) for name in (first, second)}, high - low

    def counters(self):
        """(external hits, local hits, computed) prompt tokens since start."""
        text = self.call("GET", "/metrics").decode()
        return (
            total(text, "vllm:external_prefix_cache_hits_total"),
            total(text, "vllm:prefix_cache_hits_total"),
            total(text, "vllm:prompt_tokens_by_source_total", 'source="local_compute"'),
        )

    def metric(self, name):
        """One of vLLM's numbers."""
        return total(self.call("GET", "/metrics").decode(), name)

    def measured(self, prompt, salt=None, **more):
        """`ask`, with the counters' differences."""
        before = self.counters()
        answer = self.ask(prompt, salt=salt, **more)
        answer.external, answer.local, answer.computed = (
            new - old for new, old in zip(self.counters(), before, strict=True)
        )
        return answer

    def forget(self):
        """Empty vLLM's own prefix cache (the connector clears unpinned L1 with it only when asked to)."""
        wait_until(
            lambda: b"false" not in self.call("POST", "/reset_prefix_cache", {}).lower(), 20, "reset_prefix_cache"
        )

    def stop(self):
        """End all its processes."""
        began, removed = time.monotonic(), self.child.stop()
        if self.events:
            self.events.close()
        left = f", {removed >> 20} MiB of /dev/shm left by it removed" if removed else ""
        print(f"# vllm[{self.name}] stopped in {time.monotonic() - began:.1f} s{left}", flush=True)


def module_path(options):
    """Directories in front of the installed modules."""
    if options.connector != "kvtier":
        return []
    # The package under test, a subclass of its connector, and a module that makes every import of LMCache fail.
    return [str(options.package), str(HERE / "witness"), str(HERE / "without_lmcache")]


def fork_server(options):
    """Start a fork server for engines with the chosen connector. Its imports go on in the background."""
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(module_path(options))}
    connector = "kvtier.vllm" if options.connector == "kvtier" else CONNECTOR
    return ForkServer(os.path.join(options.logs, f"fork-server-{options.connector}.log"), [connector], environment)


def total(text, name, labels=""):
    """The sum of a metric over its labels."""
    pattern = rf"^{name}(?:\{{[^}}]*{labels}[^}}]*\}})? ([0-9.e+]+)$"
    return int(sum(float(value) for value in re.findall(pattern, text, re.MULTILINE)))


def cores_of_each(workers):
    """The cores that this process may use, dealt out, as vLLM wants them; shared where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cores[rank::workers] or cores)) for rank in range(workers))


def transfer_config(options, server):
    """vLLM's --kv-transfer-config for the chosen connector and this server."""
    if options.connector == "kvtier":
        return {
            "kv_connector": "WitnessConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kv_witness",
            "kv_connector_extra_config": {
                "kvtier.url": getattr(server, "engine_url", server.url),
                "kvtier.transfer_mode": client_mode(server.mode),
                "kvtier.timeout": options.mq_timeout,
                "kvtier.store_timeout": options.mq_timeout,
                "kvtier.heartbeat": options.heartbeat,
                # Resets are there to see hits of this cache.
                "kvtier.follow_resets": False,
                **options.engine_config,
            },
        }
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": CONNECTOR,
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": server.port,
            "lmcache.mp.mp_transfer_mode": options.transfer_mode or client_mode(server.mode),
            "lmcache.mp.mq_timeout": options.mq_timeout,
            "lmcache.mp.heartbeat_interval": options.heartbeat,
            **options.engine_config,
        },
    }
