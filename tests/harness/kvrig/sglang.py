"""A simulated SGLang around LMCache's own connector for SGLang's unified radix tree.

    Sglang(url, folder, kinds, gpu)       an engine with these kinds of cache
    round_trip(engine)                    what must hold for each
    python -m kvrig.sglang FOLDER URL...  all kinds on the fake driver's GPU, for a process of `torch_cuda`

SGLang itself needs a GPU, or a build of its kernels, to be imported. LMCache's connector needs four names of it, which
are given here, and reads pools by the attributes below, which are SGLang 0.5.23's. Nothing of the connector is replaced.
"""

import enum
import random
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch

from .engine import tokens
from .torch_cuda import OnGpu
from .waiting import wait_until


class AttentionArch(enum.Enum):
    """As `sglang.srt.configs.model_config` has it."""

    MLA = enum.auto()
    MHA = enum.auto()


class ComponentType(enum.IntEnum):
    """As `sglang.srt.mem_cache.unified_cache.components` has it."""

    FULL = 0
    SWA = 1
    MAMBA = 2
    C128 = 3


_CONFIG = {"AttentionArch": AttentionArch, "is_deepseek_v4": lambda _: False}
_NAMES = {
    "configs": {},
    "configs.model_config": _CONFIG,
    "mem_cache": {},
    "mem_cache.unified_cache": {},
    "mem_cache.unified_cache.components": {"ComponentType": ComponentType},
    "mem_cache.deepseek_v4_memory_pool": {"DeepSeekV4TokenToKVPool": type("DeepSeekV4TokenToKVPool", (), {})},
}
for _module, _content in [("sglang", {}), ("sglang.srt", {}), *((f"sglang.srt.{name}", names) for name, names in _NAMES.items())]:
    sys.modules[_module] = types.ModuleType(_module)
    vars(sys.modules[_module]).update(_content)

from lmcache.integration.sglang.unified_lmcache_mp_connector import UnifiedLMCacheMPConnector  # noqa: E402

# Sets of kinds: full attention, by itself or beside what else a model may have.
KINDS = [("mha",), ("mla",), ("mha", "swa"), ("mha", "mamba"), ("mha", "swa", "mamba")]

PAGE, PAGES = 4, 64
# Of the windowed layers, in tokens.
WINDOW = 32
# Tokens between two recurrent states, and the number of slots for states.
GRID, STATES = 16, 8
TIMEOUT, HEARTBEAT = 30, 8


def _random(*shape, dtype=torch.bfloat16):
    """Random bytes as a tensor."""
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


# Mirrors in host memory: keys and values are [slots, heads, size], latents [slots, 1, size], states [states, ...].
# Page and state 0 are where SGLang pads to.
POOLS = {
    "mha": lambda: [_random(PAGES * PAGE, 2, 8) for _ in range(6)],
    "mla": lambda: [_random(PAGES * PAGE, 1, 24) for _ in range(3)],
    "swa": lambda: [_random(PAGES * PAGE, 1, 16) for _ in range(4)],
    "mamba": lambda: [_random(STATES, 4, 6), _random(STATES, 4, 6), _random(STATES, 2, 4, 4, dtype=torch.float32)],
}


def _pool(kind, tensors):
    """A pool as the connector reads it."""
    if kind == "mamba":
        return SimpleNamespace(_iter_transfer_state_entries=lambda: [("state", t, 0, i) for i, t in enumerate(tensors)])
    if kind == "mla":
        return SimpleNamespace(kv_buffer=tensors)
    half = len(tensors) // 2
    return SimpleNamespace(k_buffer=tensors[:half], v_buffer=tensors[half:])


class Sglang:
    """One rank: its pools, on a GPU or in host memory, and LMCache's connector."""

    def __init__(self, url, folder, kinds, gpu, model=None):
        self.kinds, self.port = kinds, int(url.rsplit(":", 1)[1])
        self.mirrors = {kind: POOLS[kind]() for kind in kinds}
        every = [tensor for mirrors in self.mirrors.values() for tensor in mirrors]
        self.gpu = OnGpu(every) if gpu else None
        tensors = iter(self.gpu.tensors if gpu else every)
        pools = {kind: _pool(kind, [next(tensors) for _ in self.mirrors[kind]]) for kind in kinds}
        pool = pools[kinds[0]]
        if "swa" in pools:
            pool = SimpleNamespace(full_kv_pool=pool, swa_kv_pool=pools["swa"])
        components = {"swa": ComponentType.SWA, "mamba": ComponentType.MAMBA}
        self.connector = UnifiedLMCacheMPConnector(
            config_file=self._config_file(url, folder),
            model_config=SimpleNamespace(
                model_path=model or f"models/{random.randrange(1 << 60):x}",
                attention_arch=AttentionArch.MLA if "mla" in kinds else AttentionArch.MHA,
                hf_config=None,
            ),
            tp_size=1,
            tp_rank=0,
            tp_group=None,
            page_size=PAGE,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
            req_to_token_pool=SimpleNamespace(mamba_pool=pools.get("mamba")),
            tree_components=(ComponentType.FULL, *(components[kind] for kind in kinds[1:])),
            mamba_component=SimpleNamespace(mamba_checkpoint_grid=GRID),
            sliding_window_size=WINDOW if "swa" in kinds else None,
        )
        self._requests = 0

    def _config_file(self, url, folder):
        host, port = url.removeprefix("tcp://").rsplit(":", 1)
        file = Path(folder, f"{port}-{random.randrange(1 << 60):x}.yaml")
        mode = "lmcache_driven" if self.gpu else "engine_driven"
        file.write_text(
            f"mp_host: {host}\nmp_port: {port}\nextra_config:\n"
            f'  "lmcache.mp.mp_transfer_mode": {mode}\n  "lmcache.mp.mq_timeout": {TIMEOUT}\n  "lmcache.mp.heartbeat_interval": {HEARTBEAT}\n'
        )
        return str(file)

    def read(self, kind, rows):
        """The bytes of these slots or states, tensor by tensor."""
        if self.gpu:
            self.gpu.pull()
        return [tensor[rows].view(torch.uint8) for tensor in self.mirrors[kind]]

    def fill(self, kind, rows):
        """Overwrite these slots or states with zeros."""
        if self.gpu:
            self.gpu.pull()
        for tensor in self.mirrors[kind]:
            tensor[rows] = 0
        if self.gpu:
            self.gpu.push()

    def new_request(self):
        """A request id."""
        self._requests += 1
        return f"sglang-{self._requests}"

    def store(self, prompt, groups, salt=""):
        """Store a prompt, as at the end of a request; whether it was stored."""
        request = self.new_request()
        operation = self.connector.submit_store(request, prompt, groups, device_indices_start=0, cache_salt=salt)
        wait_until(operation.query, TIMEOUT, "the answer to a store")
        stored = self.connector.complete_store(operation)
        self.connector.finish_request(request)
        return stored

    def lookup(self, prompt, salt="", local=0):
        """A lookup by an engine that has `local` tokens, when it has its answer."""
        operation = self.connector.submit_lookup(self.new_request(), prompt, local_hit_tokens=local, cache_salt=salt)
        wait_until(lambda: self.connector.poll_lookup(operation) is not None, TIMEOUT, "the answer to a lookup")
        return operation

    def hit(self, prompt, salt=""):
        """Tokens of a prompt that a request would find."""
        operation = self.lookup(prompt, salt)
        self.connector.finish_request(operation.request_id)
        return operation.total_hit_tokens

    def load(self, operation, groups):
        """Load what a lookup has found, except for what the engine has; whether it was loaded. The request ends."""
        chunk, local = self.connector.chunk_size, operation.local_hit_tokens
        self.connector.free_lookup_locks(operation.request_id, 0, local // chunk * chunk)
        load = self.connector.submit_load(operation, groups, local_hit_tokens=local)
        wait_until(load.query, TIMEOUT, "the answer to a load")
        loaded = self.connector.complete_load(load)
        self.connector.finish_request(operation.request_id)
        return loaded

    def groups(self, count, page, state, padded=0):
        """Where `count` tokens are, group by group: slots from a page on, of windowed layers without the first `padded`
        ones, and the state behind the last token."""
        slots = torch.arange(page * PAGE, page * PAGE + count)
        windowed = slots * (torch.arange(count) >= padded)
        states = torch.zeros(-(-count // GRID), dtype=torch.int64)
        states[-1] = state
        kinds = {"swa": windowed, "mamba": states}
        return [kinds.get(kind, slots) for kind in self.kinds]

    def close(self):
        """Unregister, and wait for the end of the connection.

        LMCache's client closes the socket that receives disconnections before the one that connects. A server that ends between
        the two blocks ZeroMQ's thread, and with it every later client of this process.
        """
        self.connector.close()
        wait_until(lambda: not self._is_connected(), 30, "the end of the connection")

    def _is_connected(self):
        peers = [connection.raddr for connection in psutil.Process().net_connections("tcp")]
        return any(peer and peer.port == self.port for peer in peers)


def _equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def round_trip(engine):
    """What was stored is found and loaded, whole and behind a prefix that the engine has, and nothing else changes."""
    prompt, count, full = tokens(64), 64, engine.kinds[0]
    # The windowed layers no longer have what is before their window.
    assert engine.store(prompt, engine.groups(count, 1, state=3, padded=count - WINDOW))
    stored = {kind: engine.read(kind, _rows(kind, 1, count, state=3)) for kind in engine.kinds}
    padding = engine.read(full, slice(PAGE))

    for local in (0, 20):
        fresh = count - local
        for kind in engine.kinds:
            engine.fill(kind, _rows(kind, 20, fresh, state=5))
        rest = engine.read(full, slice(20 * PAGE + fresh, None))
        lookup = engine.lookup(prompt, local=local)
        assert lookup.total_hit_tokens == count
        groups = engine.groups(fresh, 20, state=5, padded=max(fresh - WINDOW, 0))
        assert engine.load(lookup, groups)
        for kind in engine.kinds:
            kept = {"swa": WINDOW, "mamba": 1}.get(kind, fresh)
            loaded = engine.read(kind, _rows(kind, 20, fresh, state=5))
            assert _equal([t[-kept:] for t in loaded], [t[-kept:] for t in stored[kind]]), (kind, local)
        assert _equal(engine.read(full, slice(20 * PAGE + fresh, None)), rest)
        assert _equal(engine.read(full, slice(PAGE)), padding)

    # Neither another salt nor another extra key (a LoRA adapter, say) finds it.
    assert engine.hit(prompt) == count
    for salt, extra in (("tenant", None), (None, "adapter"), ("tenant", "adapter")):
        assert engine.hit(prompt, engine.connector.build_cache_salt(salt, extra)) == 0
    assert engine.hit([*prompt[:40], *tokens(24)]) == (0 if len(engine.kinds) > 1 else 32)


def _rows(kind, page, count, state):
    return [state] if kind == "mamba" else slice(page * PAGE, page * PAGE + count)


if __name__ == "__main__":
    for url in sys.argv[2:]:
        for kinds in KINDS:
            engine = Sglang(url, sys.argv[1], kinds, gpu=True)
            round_trip(engine)
            engine.close()
    print("done")
