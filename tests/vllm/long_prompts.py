"""Prompts that are longer than L1, asked again and again: each time the longest prefix that L1 can hold hits."""

from cases import CHUNK, ModeCases, random_tokens
from engine import Vllm
from kvrig import tiers

# Bytes per token of setup.sh's model in float32.
TOKEN_BYTES = 16 << 10


def lengths(l1_chunks):
    """Tokens of a prompt that a tier holds, more than twice of L1, and of one that is computed."""
    l1 = l1_chunks * CHUNK
    return 2 * l1 + 200, l1 * 7 // 5 + 40


class LongPromptCases(ModeCases):
    """Engines whose requests have one prompt; its repetition is another request."""

    def run_long_prompts(self):
        """A prompt that a tier has, then one that must be computed."""
        server, seed, l1_chunks = self.server, self.options.seed, self.options.long_prompts
        in_tier, computed = lengths(l1_chunks)
        whole = l1_chunks * CHUNK
        try:
            prompt = random_tokens(f"{seed}-in-tier", in_tier)
            self.engine(1)
            self.stored(lambda: self.vllm.ask(prompt, 1), in_tier // CHUNK)
            tiers.settled(server)
            self.vllm.stop()
            server.stop()
            # The tier keeps what the next L1 cannot hold.
            server.l1_gb = whole * TOKEN_BYTES / (1 << 30)
            server.start()
            tiers.adopted(server)
            self.engine(2)
            hits = self.repeated(prompt)
            right = hits == [whole] * self.options.repeats
            self.check("long-prompt-in-tier", right, f"{in_tier} tokens: {hits} expected={whole}")
            self.vllm.stop()
            server.stop()
            # Without a tier.
            server.flags = list(self.options.server_flag)
            server.start()
            self.engine(3)
            hits = self.repeated(random_tokens(f"{seed}-computed", computed))
            # Eviction to the watermark leaves at least 0.8 of 0.8 of what is not staged, and 7/32 may be.
            least = l1_chunks // 2 * CHUNK
            right = hits[0] == 0 and min(hits[1:]) >= least
            self.check("long-prompt", right, f"{computed} tokens: {hits} expected=0, then at least {least} of {whole}")
        finally:
            if self.vllm:
                self.vllm.stop()

    def engine(self, number):
        """An engine with space for a long prompt."""
        flags = ["--max-model-len", str(self.options.kv_blocks * self.options.block_size - 512)]
        self.vllm = Vllm(self.options, self.log_name(number), self.server, flags)

    def repeated(self, prompt):
        """Hits of a prompt that is asked again and again; each time the model says the same."""
        answers = []
        for _ in range(self.options.repeats):
            self.vllm.forget()
            answers.append(self.vllm.measured(prompt, count=4))
        alike = all(answer.ids == answers[0].ids for answer in answers)
        seconds = [round(answer.ttft, 1) for answer in answers]
        self.check(f"long-prompt-{len(prompt)}-same-tokens", alike, f"ttft {seconds} s")
        return [answer.external for answer in answers]
