"""An engine without a model: KV tensors of random bytes behind the adapters under test."""

import random
from contextlib import contextmanager

import torch
from kvrig import layouts
from kvrig.waiting import wait_until
from kvtier import LoadStoreOp, SchedulerAdapter, WorkerAdapter

torch.set_num_threads(1)

BLOCK = layouts.BLOCK_TOKENS
# Seconds for what takes milliseconds on an idle machine.
TIMEOUT = 60.0


def tokens(count, seed=None):
    """Returns a random prompt."""
    source = random.Random(seed)
    return [source.randrange(1 << 17) for _ in range(count)]


class Engine:
    """A scheduler and its one worker, in this process."""

    def __init__(self, url, mode="engine_driven", layout="fused_hnd", layers=3, seed=1, timeout=TIMEOUT, heartbeat=10.0,
                 model="test/model", register=True, store_timeout=None, **options):  # fmt: skip
        """``mode``: engine_driven, lmcache_driven, or pickle; ``timeout``: of everything except the set-up."""
        patience = max(timeout, TIMEOUT)
        self.layout = layouts.layout(layout) if isinstance(layout, str) else layout
        self.scheduler = SchedulerAdapter(
            url, model, block_tokens=BLOCK, timeout=patience, lookup_timeout=patience, heartbeat=heartbeat,
            **{k: v for k, v in options.items() if k in ("world_size", "num_kv_readers", "wait_for_server", "chunk_tokens")},
        )  # fmt: skip
        self.worker = WorkerAdapter(
            url, model, block_tokens=BLOCK, timeout=patience, heartbeat=heartbeat,
            mode="engine_driven" if mode == "pickle" else mode, force_pickle=mode == "pickle",
            store_timeout=store_timeout or patience, **options,
        )  # fmt: skip
        self.tensors = layouts.allocate(self.layout, layers, torch.Generator().manual_seed(seed))
        if register:
            named = {f"layer.{i}": tensor for i, tensor in enumerate(self.tensors)}
            self.worker.register_kv_caches(named, kv_layout=self.layout.hints["kv_layout"])
        self.set_timeout(timeout)

    def set_timeout(self, timeout):
        """Bounds the requests from now on."""
        self.scheduler.client.timeout = self.worker.client.timeout = timeout

    @contextmanager
    def timeout(self, seconds):
        """Bounds requests that are submitted meanwhile."""
        before = self.worker.client.timeout
        self.set_timeout(seconds)
        try:
            yield
        finally:
            self.set_timeout(before)

    def read(self, blocks):
        """Returns the bytes of these blocks in every layer."""
        return [layouts.read_blocks(tensor, self.layout.block_axis, blocks) for tensor in self.tensors]

    def fill(self, blocks, value=0):
        """Overwrites these blocks in every layer."""
        for tensor in self.tensors:
            layouts.fill_blocks(tensor, self.layout.block_axis, blocks, value)

    def has(self, blocks, expected):
        """Whether these blocks hold these bytes."""
        return all(torch.equal(a, b) for a, b in zip(self.read(blocks), expected, strict=True))

    def op(self, prompt, start, end, blocks, **options):
        """Returns an operation on a list of tokens or, if it contains bytes, of block hashes."""
        if prompt and isinstance(prompt[0], bytes):
            return LoadStoreOp(blocks, block_hashes=prompt, start=start, end=end, **options)
        return LoadStoreOp(blocks, token_ids=prompt, start=start, end=end, **options)

    def store(self, request, prompt, start, end, blocks, salt=""):
        """Stores and waits. Whether it succeeded."""
        before = self.worker.counters.stores
        self.worker.submit_store_request(request, self.op(prompt, start, end, blocks), cache_salt=salt)
        self.finish_stores()
        return self.worker.counters.stores == before + 1

    def finish_stores(self, patience=TIMEOUT + 5):
        """Waits until no store is in flight."""
        wait_until(lambda: self.worker.get_finished(()) and not self.worker._storing, patience, "stores")

    def lookup(self, request, prompt, salt="", patience=TIMEOUT + 5):
        """Returns the tokens found."""
        hashes = bool(prompt) and isinstance(prompt[0], bytes)
        self.scheduler.maybe_submit_lookup_request(
            request, **({"block_hashes": prompt} if hashes else {"token_ids": prompt}), cache_salt=salt
        )
        found = []

        def known():
            result = self.scheduler.check_lookup_result(request)
            found[:] = [] if result is None else [result]
            return found

        wait_until(known, patience, f"lookup of {request}", interval=0.001)
        self.scheduler.cleanup_lookup_result(request)
        return found[0]

    def retrieve(self, request, prompt, start, end, blocks, salt="", skip=0, patience=2 * TIMEOUT + 5):
        """Retrieves and waits; returns the failed blocks."""
        op = self.op(prompt, start, end, blocks, skip_first_n_tokens=skip)
        self.worker.submit_retrieve_request(request, op, cache_salt=salt)
        return self.finish_retrieve(request, patience)

    def finish_retrieve(self, request, patience=2 * TIMEOUT + 5):
        """Waits for a retrieve; returns the failed blocks."""
        ended = set()

        def done():
            ended.update(self.worker.get_finished(())[1])
            return request in ended

        wait_until(done, patience, f"retrieve of {request}", interval=0.001)
        return self.worker.get_block_ids_with_load_errors()

    def healthy(self, patience=60):
        """Waits until both sides are healthy."""
        wait_until(lambda: self.scheduler.is_healthy and self.worker.is_healthy, patience, "healthy again")

    def close(self):
        """Unregisters and disconnects."""
        self.worker.shutdown()
        self.scheduler.shutdown()
