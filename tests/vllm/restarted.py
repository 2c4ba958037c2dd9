"""A server with a second tier and a state directory is stopped, a request is computed meanwhile, and it is started again."""

import time

from cases import CHUNK, PROMPT, WHOLE, ModeCases, random_tokens
from kvrig import tiers

# All prompts have one length, as those of a benchmark.
PROMPTS = 4


class RestartedCases(ModeCases):
    """One engine, which is not restarted."""

    def run_restarted(self):
        """The prompt that repeats hits as soon as the client asks again, and so do prompts of one length."""
        vllm, prompts, server = self.first_engine(), self.prompts, self.server
        try:
            answer = self.stored(lambda: vllm.measured(prompts.main), WHOLE // CHUNK)
            self.expect("miss", answer, "main", 0, local=0)
            tiers.settled(server)
            server.stop()
            vllm.forget()
            self.expect("server-down-still-answers", vllm.measured(prompts.main), "main", 0)
            server.start()
            self.hits_again()
            self.one_length()
        finally:
            vllm.stop()

    def lookups(self):
        """Lookups that reached the server since its start."""
        return tiers.metric(self.server, "kvtier_requests_total", operation="lookup")

    def hits_again(self):
        """Repeats the prompt until it hits. Of the requests whose lookups reached the server, one may miss."""
        began, asked, missed = time.monotonic(), self.lookups(), 0
        while time.monotonic() - began < 60:
            self.vllm.forget()
            answer = self.vllm.measured(self.prompts.main)
            before, asked = asked, self.lookups()
            if answer.external:
                break
            missed += asked - before
            time.sleep(0.5)
        detail = f"{missed:.0f} lookups missed, {time.monotonic() - began:.1f} s after the start"
        self.check("few-misses-after-restart", missed <= 1, detail)
        self.expect("hits-after-restart", answer, "main", WHOLE, local=0)

    def one_length(self):
        """New prompts hit from the second request on."""
        prompts = [random_tokens(f"{self.options.seed}-length-{number}", PROMPT) for number in range(PROMPTS)]
        rounds = []
        for chunks in (PROMPTS * WHOLE // CHUNK, 0):
            self.vllm.forget()
            ask = lambda: [self.vllm.measured(prompt, count=1).external for prompt in prompts]  # noqa: E731
            rounds.append(self.stored(ask, chunks))
        right = rounds == [[0] * PROMPTS, [WHOLE] * PROMPTS]
        self.check("one-length", right, f"{PROMPTS} prompts of {PROMPT} tokens: {rounds}")
