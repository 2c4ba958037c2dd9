"""A server that restarts while an engine serves many requests: none fails, and all answers are as before."""

import concurrent.futures
import time

from cases import CHUNK, ModeCases, random_tokens
from kvrig.waiting import wait_until

REQUESTS = 20
# Two whole chunks and a rest.
TOKENS = 2 * CHUNK + 88
ROUNDS = 4
# Answers before the server is stopped: then the others are waiting, computed, loaded or stored.
ANSWERED = 3
# Batches of another size add floats in another order, so two tokens that are as likely may change places. In float32 that moves
# log-probabilities by less than this.
NEAR_TIE = 1e-3


class RestartCases(ModeCases):
    """One engine with `REQUESTS` requests at once; in the middle of them the server gets SIGTERM, and the next one starts."""

    def run_restarts(self):
        """First all prompts are computed and stored, then all of them hit."""
        vllm = self.first_engine()
        try:
            prompts = [random_tokens(f"{self.options.seed}-restart-{number}", TOKENS) for number in range(REQUESTS)]
            # Stored under another salt, so they say what the engine computes.
            alone = [vllm.ask(prompt, salt="alone").ids for prompt in prompts]
            tokens, gap = vllm.likeliest(prompts[0], salt="alone")
            self.check("restart-likeliest", alone[0][0] in tokens, f"{tokens}, the first by {gap:.4f}")
            before = self.objects()
            self.round("miss", prompts, alone, 0)
            # What was stored while the server was away is missing, and is stored when it is computed again.
            vllm.forget()
            for prompt in prompts:
                vllm.ask(prompt)
            wait_until(lambda: self.objects() >= before + 2 * REQUESTS, 60, "all chunks stored")
            for number in range(ROUNDS):
                self.overwrite()
                self.round(f"hit-{number}", prompts, alone, 2 * CHUNK * REQUESTS)
            self.overwrite()
            vllm.forget()
            before = vllm.counters()[0]
            for prompt in prompts:
                vllm.ask(prompt)
            hit = vllm.counters()[0] - before
            self.check("restart-afterwards", hit == 2 * CHUNK * REQUESTS, f"external {hit}")
        finally:
            vllm.stop()

    def round(self, name, prompts, alone, external):
        """All prompts at once, and a restart in the middle."""
        vllm = self.vllm
        vllm.forget()
        before = vllm.counters()[0]
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(vllm.ask, prompt) for prompt in prompts]
            wait_until(lambda: sum(answer.done() for answer in answers) >= ANSWERED, 300, "the first answers")
            began = time.monotonic()
            status, _ = self.server.stop()
            self.server.start()
            took = time.monotonic() - began
            was_during = not all(answer.done() for answer in answers)
            failed = [repr(answer.exception()) for answer in answers if answer.exception()]
            said = [None if answer.exception() else answer.result().ids for answer in answers]
        hit = vllm.counters()[0] - before
        triples = zip(prompts, said, alone, strict=True)
        others = [(prompt, ids, own) for prompt, ids, own in triples if ids is not None and ids != own]
        alike = len(prompts) - len(failed) - len(others)
        right = not failed and status == 0 and hit <= external and all(self.is_near_tie(*other) for other in others)
        detail = (
            f"restart of {took:.2f} s, {'during the requests' if was_during else 'behind them'}; {len(failed)} failed {failed[:2]}, "
            f"{external - hit} of {external} tokens recomputed, same tokens {alike} of {len(prompts)}"
        )
        self.check(f"restart-{name}", right, detail)

    def is_near_tie(self, prompt, ids, own):
        """Whether the first token that differs is one of two that are as likely, by the engine's own arithmetic."""
        at = next(at for at, (said, alone) in enumerate(zip(ids, own, strict=True)) if said != alone)
        tokens, gap = self.vllm.likeliest(prompt + own[:at], salt="alone")
        return tokens == {ids[at], own[at]} and gap < NEAR_TIE
