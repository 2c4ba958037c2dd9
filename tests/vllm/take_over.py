"""Servers that take over from each other while an engine serves many requests: it must notice nothing."""

import concurrent.futures
import time

from cases import CHUNK, ModeCases, random_tokens
from kvrig.waiting import wait_until

REQUESTS = 20
# Two whole chunks and a rest.
TOKENS = 2 * CHUNK + 88
ROUNDS = 4
# Batches of another size add floats in another order, so two tokens that are as likely may change places. In float32 that moves
# log-probabilities by less than this.
NEAR_TIE = 1e-3


class TakeOverCases(ModeCases):
    """One engine with `REQUESTS` requests at once; servers take over from each other all the time."""

    def run_take_over(self):
        """First all prompts are computed and stored, then all of them hit."""
        vllm = self.first_engine()
        try:
            prompts = [random_tokens(f"{self.options.seed}-take-over-{number}", TOKENS) for number in range(REQUESTS)]
            # Stored under another salt, so they say what the engine computes.
            alone = [vllm.ask(prompt, salt="alone").ids for prompt in prompts]
            tokens, gap = vllm.likeliest(prompts[0], salt="alone")
            self.check("take-over-likeliest", alone[0][0] in tokens, f"{tokens}, the first by {gap:.4f}")
            before = self.objects()
            self.round("miss", prompts, alone, 0)
            wait_until(lambda: self.objects() >= before + 2 * REQUESTS, 60, "all chunks stored")
            for number in range(ROUNDS):
                self.overwrite()
                self.round(f"hit-{number}", prompts, alone, 2 * CHUNK * REQUESTS)
        finally:
            vllm.stop()

    def round(self, name, prompts, alone, external):
        """All prompts at once, and servers that take over until the last one is answered."""
        vllm, took = self.vllm, []
        vllm.forget()
        before = vllm.counters()[0]
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(vllm.ask, prompt) for prompt in prompts]
            while not all(answer.done() for answer in answers):
                took.append(self.server.take_over())
                time.sleep(0.2)
            failed = [repr(answer.exception()) for answer in answers if answer.exception()]
            said = [None if answer.exception() else answer.result().ids for answer in answers]
        hit = vllm.counters()[0] - before
        triples = zip(prompts, said, alone, strict=True)
        others = [(prompt, ids, own) for prompt, ids, own in triples if ids is not None and ids != own]
        alike = len(prompts) - len(failed) - len(others)
        right = not failed and hit == external and all(self.is_near_tie(*other) for other in others)
        detail = (
            f"{len(took)} take-overs, at most {max(took, default=0):.2f} s; {len(failed)} failed {failed[:2]}, external {hit} "
            f"expected {external}, same tokens {alike} of {len(prompts)}"
        )
        self.check(f"take-over-{name}", right and took, detail)

    def is_near_tie(self, prompt, ids, own):
        """Whether the first token that differs is one of two that are as likely, by the engine's own arithmetic."""
        at = next(at for at, (said, alone) in enumerate(zip(ids, own, strict=True)) if said != alone)
        tokens, gap = self.vllm.likeliest(prompt + own[:at], salt="alone")
        return tokens == {ids[at], own[at]} and gap < NEAR_TIE
