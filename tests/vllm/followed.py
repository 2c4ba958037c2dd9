"""KV events that vLLM publishes for LMCache's connector: a subscriber ends with what the server holds."""

import itertools

import msgspec
from cases import CHUNK, ModeCases, random_tokens
from engine import Vllm
from evidence import Events
from kvrig.waiting import wait_until

# L1 holds a third of the chunks of all prompts.
PROMPTS, CHUNKS, L1_CHUNKS = 20, 3, 20


class Subscriber:
    """What a router takes the engine to have in host memory, by vLLM's own decoder."""

    def __init__(self, events):
        from vllm.distributed.kv_events import KVEventBatch

        self.events, self.decoder = events, msgspec.msgpack.Decoder(type=KVEventBatch)
        # A hash -> the parent's hash, and the tokens.
        self.chunks, self.removed, self.read = {}, 0, 0

    def update(self):
        """Takes what has arrived; an assertion if a chunk is announced twice, or removed without that."""
        self.events.take()
        for payload in self.events.payloads[self.read :]:
            for event in self.decoder.decode(payload).events:
                kind = type(event).__name__
                assert kind != "AllBlocksCleared", "nothing was reset"
                if event.medium != "CPU":
                    continue
                if kind == "BlockStored":
                    [block] = event.block_hashes
                    assert block not in self.chunks and event.block_size == len(event.token_ids) == CHUNK
                    self.chunks[block] = (event.parent_block_hash, tuple(event.token_ids))
                else:
                    for block in event.block_hashes:
                        del self.chunks[block]
                        self.removed += 1
        self.read = len(self.events.payloads)

    def prefix(self, prompt):
        """Tokens of the prompt that are announced."""
        known = {place: block for block, place in self.chunks.items()}
        parent, found = None, 0
        while parent := known.get((parent, tuple(prompt[found : found + CHUNK]))):
            found += CHUNK
        return found


class FollowedCases(ModeCases):
    """One engine at a server with a small L1, and a subscriber to its events."""

    # proves: docs/compare.md#kv-events
    # proves: docs/vllm.md#kv-events
    def run_followed(self):
        """Stores, evictions, a server that is killed and returns, and evictions again."""
        seed, events = self.options.seed, Events()
        prompts = [random_tokens(f"{seed}-followed-{number}", CHUNKS * CHUNK + 40) for number in range(2 * PROMPTS)]
        before, after = prompts[:PROMPTS], prompts[PROMPTS:]
        self.subscriber = Subscriber(events)
        self.vllm = Vllm(self.options, self.log_name(1), self.server, events=events)
        try:
            for prompt in before[:3]:
                self.vllm.ask(prompt, 1)
            wait_until(lambda: self.objects() == 3 * CHUNKS, 60, "the chunks of three prompts")
            self.follows("stores", before, 3 * CHUNKS)
            for prompt in before[3:]:
                self.vllm.ask(prompt, 1)
            self.follows("evictions", before, L1_CHUNKS)
            self.check("removed", self.subscriber.removed >= PROMPTS * CHUNKS - L1_CHUNKS, f"{self.subscriber.removed} chunks")
            noticed = self.degraded()
            self.server.kill()
            self.wait_until_degraded(noticed)
            self.server.start()
            wait_until(lambda: self.step() or not self.subscriber.chunks, 60, "the end of what the killed server had")
            self.check("server-killed", self.objects() == 0, "nothing is announced, nothing is resident")
            # Those that come before the worker has registered again are not stored.
            fresh = (random_tokens(f"{seed}-fresh-{number}", CHUNK + 40) for number in itertools.count())
            wait_until(lambda: self.vllm.ask(next(fresh), 1) and self.objects(), 60, "a store after the restart", interval=0.5)
            for prompt in after:
                self.vllm.ask(prompt, 1)
            self.follows("after-restart", prompts, L1_CHUNKS)
            numbers = events.sequence
            whole = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            self.check("none-lost", whole, f"{len(numbers)} batches")
        finally:
            self.vllm.stop()

    def step(self):
        """vLLM publishes in a step of the engine only. The prompt is shorter than a block."""
        self.vllm.ask([5] * 40, 1)
        self.subscriber.update()

    def follows(self, name, prompts, most):
        """The subscriber ends with what is resident, prompt for prompt, and that is something."""

        def seen():
            self.step()
            bodies = ({"model_name": self.options.model, "token_ids": prompt} for prompt in prompts)
            resident = [self.server.post("/prefix/match", body)[1]["hit_tokens_l1"] for body in bodies]
            return self.objects(), resident, len(self.subscriber.chunks), [self.subscriber.prefix(prompt) for prompt in prompts]

        # The server may still be evicting.
        wait_until(lambda: (now := seen())[:2] == now[2:], 60, "a subscriber that knows what is resident")
        chunks, hits, announced, known = seen()
        right = (chunks, hits) == (announced, known) and 0 < chunks <= most and any(hits)
        self.check(name, right, f"{announced} chunks announced, {chunks} resident; of {sum(hits)} tokens that hit {sum(known)} are known")
