"""A server without a second tier is killed, and the next one goes on with its L1: an engine hits what it had stored before."""

from pathlib import Path

from cases import CHUNK, WHOLE, ModeCases, random_tokens
from kvrig import tiers
from kvrig.server import await_pings
from kvrig.waiting import wait_until

# Each has a rest of most of a chunk. Two of different lengths show the next server the chunk size of LMCache's client.
PROOFS = (2 * CHUNK - 12, 4 * CHUNK - 24)


class RestoredCases(ModeCases):
    """One engine, which is not restarted, and two processes of one server. `state` is the folder of its instance."""

    def __init__(self, *args, state):
        super().__init__(*args)
        self.state = Path(state)

    # proves: docs/compare.md#restart
    # proves: docs/operate.md#l1-after-a-restart
    def run_restored(self):
        """Store, overwrite what the engine has, kill the server, start it; then all that was stored hits."""
        prompts, ours = self.prompts, self.options.connector == "kvtier"
        proofs = [random_tokens(f"{self.options.seed}-proof-{tokens}", tokens) for tokens in PROOFS]
        try:
            vllm = self.first_engine()
            answer = self.stored(lambda: vllm.measured(prompts.main), WHOLE // CHUNK)
            self.expect("miss", answer, "main", 0, local=0)
            vllm.forget()
            self.stored(lambda: vllm.ask(prompts.main, salt="alice"), WHOLE // CHUNK)
            for proof in proofs:
                self.stored(lambda proof=proof: vllm.ask(proof), len(proof) // CHUNK)
            self.stored(self.overwrite, sum(len(filler) // CHUNK for filler in prompts.fillers))
            if not ours:
                await_pings(self.state)
            before = self.objects()
            self.server.kill()
            seconds = self.server.start()
            self.restored(before, seconds)
            self.served_again(proofs)
            self.expect("hits-after-kill", vllm.measured(prompts.main), "main", WHOLE, local=0)
            vllm.forget()
            self.expect("salt-alice-hits-after-kill", vllm.measured(prompts.main, "alice"), "main", WHOLE, local=0)
            # Stores behind these answers would come before this one.
            answer = self.stored(lambda: vllm.measured(prompts.exact), WHOLE // CHUNK)
            self.expect("new-prompt-misses", answer, "exact", 0, local=0)
            now = self.objects()
            self.check("nothing-stored-again", now == before + WHOLE // CHUNK, f"{now} objects, {before} before the kill")
            self.overwrite()
            self.expect("hits-again", vllm.measured(prompts.main), "main", WHOLE, local=0)
        finally:
            if self.vllm:
                self.vllm.stop()

    def restored(self, before, seconds):
        """The start has found each object. A worker of kvtier's client is restored, too; one of LMCache's if the start was fast."""
        status = self.server.get("/status")[1]
        l1, state = status["storage_manager"]["l1_manager"], status["state"]
        objects, left = l1["restored_objects"], l1["left_out_objects"]
        workers = state["restored_workers"]
        right = objects == before == self.objects() and not left and not status["storage_manager"]["l2_adapters"]
        detail = f"{objects} of {before} objects in {seconds:.2f} s, left out {left}; workers: {workers}, left out {state['left_out_workers']}"
        self.check("restored", right and (workers == 1 or self.options.connector == "lmcache"), detail)

    def served_again(self, proofs):
        """Wait until the engine's lookups are answered: kvtier's client is connected again. LMCache's
        has registered again, as it does after its first ping, and its chunk size is known."""
        vllm = self.vllm
        operations = ("register_kv_cache", "register_kv_cache_engine_driven_context")

        def registered():
            return sum(tiers.metric(self.server, "kvtier_requests_total", operation=name) for name in operations)

        def hit():
            vllm.forget()
            return all([vllm.measured(proof).external for proof in proofs])

        if self.options.connector == "lmcache":
            wait_until(registered, 60, "registration again")
        wait_until(hit, 60, "hits of other prompts", interval=0.5)
        vllm.forget()
