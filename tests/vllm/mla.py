"""Latent attention (MLA): one tensor in each layer, no heads in it, blocks of 16 tokens."""

from cases import CHUNK, ModeCases, random_tokens
from engine import Vllm

# Whole chunks in front, tokens behind them: one (as in decoding), some that share a block, many.
SHAPES = [(1, 1), (2, 1), (2, 2), (2, 40), (2, 188), (3, 9)]
LONGEST = 1024
BLOCKS = 80


class MlaCases(ModeCases):
    """Hits against vLLM's own prefix cache.

    What vLLM computes behind a prefix that it has, it computes otherwise than in a whole prompt, and another sum in
    another order can choose another token; so with vLLM's own prefix of the same length everything must be the same.
    """

    def run_mla(self):
        """One engine."""
        flags = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(LONGEST)]
        try:
            self.vllm = Vllm(self.options, self.log_name(1), self.server, flags)
            for chunks, more in SHAPES:
                self.own_and_loaded(chunks, more)
            self.connector_metrics()
        finally:
            if self.vllm:
                self.vllm.stop()

    # proves: docs/compare.md#lmcache_driven-in-cpu-memory
    def own_and_loaded(self, chunks, more):
        """The same prompt behind vLLM's own prefix, and behind one that was loaded."""
        vllm, shared, name = self.vllm, chunks * CHUNK, f"{chunks}-chunks-and-{more}"
        prompt = random_tokens(name, shared + more)
        sibling = prompt[:shared] + random_tokens(f"{name}-sibling", more)
        whole = self.stored(lambda: vllm.ask(prompt, salt="whole"), chunks)
        self.stored(lambda: vllm.measured(sibling), chunks)
        own = vllm.measured(prompt)
        vllm.forget()
        for number in range(2):
            vllm.ask(random_tokens(f"{name}-filler-{number}", LONGEST - 64), 1, salt="filler")
        vllm.forget()
        loaded = vllm.measured(prompt)
        same = own.ids == loaded.ids and (own.local, loaded.local, loaded.external) == (shared, 0, shared)
        self.check(name, same, f"own {own}; loaded {loaded}; the whole prompt says the same: {whole.ids == own.ids}")
