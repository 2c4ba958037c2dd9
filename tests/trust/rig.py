"""What a scenario has: servers and engines that are stopped with it, and named checks."""

import contextlib
import os
import shutil
import signal

import forked
from evidence import pages_as_stored
from kvrig import tiers
from kvrig.server import Server, client_mode, our_command, peer_command
from kvrig.waiting import wait_until

CHUNK = 256
# The model with latent attention, of tests/vllm, beside those of models.py.
MLA = "../model-mla"
LMCACHE = "lmcache.integration.vllm.lmcache_mp_connector"


class Case:
    """One scenario with one connector in one transfer mode."""

    def __init__(self, name, options, report, connector, mode):
        self.name = f"{name}/{connector}/{mode}"
        self.report, self.connector, self.mode = report, connector, mode
        self.models = options.models
        self.logs = options.logs / self.name.replace("/", "-")
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        self.engines, self.servers = [], []
        # Whether the engine says the same in other batches, but for what a tie shows.
        self.is_comparable = True
        # (major, minor) of vLLM's release.
        self.release = tuple(int(part) for part in options.release.split(".")[:2])
        self.connector_module, self.connector_class = "kvtier.vllm", "KvTierConnector"

    def check(self, name, ok, detail):
        """Note one result."""
        self.report.check(f"{self.name}/{name}", ok, detail)

    def note(self, name, detail):
        """A result that is documented, not required."""
        print(f"NOTE {self.name}/{name}: {detail}", flush=True)

    def skip(self, name, why):
        """A check that cannot be made here."""
        print(f"SKIP {self.name}/{name}: {why}", flush=True)

    def server(self, flags=(), start=True, l1_gb=0.25, peer=False):
        """A server of this mode; `peer`: LMCache's."""
        log = self.logs / f"server-{len(self.servers)}.log"
        command = peer_command() if peer else our_command()
        made = Server(command, log, self.mode, chunk=CHUNK, l1_gb=l1_gb, flags=flags, peer=peer)
        self.servers.append(made)
        if start:
            made.start()
        return made

    def tier(self):
        """Flags for a second tier in a directory of its own."""
        self.directory = self.logs / "tier"
        return tiers.fs(self.directory)

    def engine(self, model, server, extra=None, **options):
        """An engine with this case's connector, or with none if there is no server; `extra` is added to the connector's own configuration."""
        name = f"engine-{len(self.engines)}"
        connection = self.connection(server, extra or {}) if server is not None else None
        made = forked.Engine(name, self.logs, self.models / model, connection, **options)
        self.engines.append(made)
        return made

    def connection(self, server, extra):
        """vLLM's `kv_transfer_config`."""
        if self.connector == "kvtier":
            # As long as LMCache's client waits: what a stalled machine computes without the cache, says nothing about bytes.
            own = {
                "kvtier.url": server.url, "kvtier.transfer_mode": client_mode(self.mode), "kvtier.lookup_timeout": 10,
            }  # fmt: skip
            return {
                "kv_connector": self.connector_class, "kv_role": "kv_both", "kv_connector_module_path": self.connector_module,
                "kv_connector_extra_config": own | extra,
            }  # fmt: skip
        own = {
            "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port, "lmcache.mp.mq_timeout": 10,
            "lmcache.mp.heartbeat_interval": 2, "lmcache.mp.mp_transfer_mode": client_mode(self.mode),
        }  # fmt: skip
        return {
            "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_module_path": LMCACHE,
            "kv_connector_extra_config": own | extra,
        }  # fmt: skip

    def witness(self):
        """From here on engines write down what their pages hold; `pages_as_stored` compares."""
        self.connector_module, self.connector_class = "kv_witness", "WitnessConnector"
        self.witnessed = self.logs / "witness"
        self.witnessed.mkdir()
        os.environ["WITNESS_DIRECTORY"] = str(self.witnessed)

    def pages_as_stored(self):
        """What was loaded is, byte for byte, what was stored."""
        blocks, wrong = pages_as_stored(self.witnessed)
        self.check("bytes", blocks and not wrong, f"{len(wrong)} of {blocks} loaded blocks are not as stored: {wrong[:3]}")

    def stored(self, server, count):
        """Wait until that many chunks are in L1; engines store after their answers."""
        manager = ("storage_manager", "l1_manager")
        wait_until(
            lambda: server.get("/status")[1][manager[0]][manager[1]]["total_object_count"] >= count,
            60, f"{count} chunks in L1", interval=0.05,
        )  # fmt: skip

    def compare(self, name, engine, prompts, hit=None, **options):
        """No answer may differ from what the engine computes alone; `hit`: tokens that each must load, if that is given."""
        answers = [(engine.ask(prompt, **options), self.alone(engine, prompt, options)) for prompt in prompts]
        wrong = sum(answer.ids != alone.ids for answer, alone in answers)
        hits = [answer.external for answer, _ in answers]
        enough = hit is None or all(each == hit for each in hits)
        wanted = "" if hit is None else f", expected {hit} each"
        self.check(name, not wrong and enough, f"{wrong} of {len(prompts)} answers wrong; tokens loaded {hits}{wanted}")
        return wrong

    @staticmethod
    def alone(engine, prompt, options):
        """The same request without a hit. A picture's uuid is the client's word, so it is left out."""
        return engine.alone(prompt, **{key: value for key, value in options.items() if key not in ("salt", "uuids")})

    def answers_alone(self, model, prompts, count, tie, **options):
        """What an engine without a connector and with blocks for all these prompts at once says to each, with its ties."""
        engine = self.engine(model, None, **options | {"num_gpu_blocks_override": 400, "max_num_seqs": len(prompts)})
        answers = engine.call("ask", prompts, count=count, tie=tie)
        engine.stop()
        return answers

    def crowded(self, name, engine, server, asked, later):
        """Prompts with their answers in few blocks, so that requests are preempted, beside a server that hangs from the first store on;
        then the same again with `later` tokens each, of what was stored meanwhile."""
        prompts, alone = zip(*asked, strict=True)
        found = engine.call("ask_broken", prompts, server.process.pid, signal.SIGSTOP, count=len(alone[0].ids))
        self.agree(f"{name}-answers", found["answers"], alone, len(alone[0].ids))
        self.check(f"{name}-crowded", found["preempted"] > 0, f"{found['preempted']} preemptions")
        self.check(f"{name}-no-wait", found["waited"] == 0, f"{found['waited']} waits for stores")
        in_flight = f"{found['in_flight']} stores in flight at the last answer"
        well = 0 < found["held"] <= found["limit"] and found["in_flight"] > 0
        self.check(f"{name}-held", well, f"at most {found['held']} of {found['limit']} blocks held, {in_flight}")
        self.check(f"{name}-no-leak", found["free"] == found["free_before"], f"{found['free']} of {found['free_before']} blocks free")
        self.recovered(engine, resets=True)
        again = engine.call("ask", prompts, count=later)
        self.agree(f"{name}-later", again, alone, later)
        self.check(f"{name}-stored", again[0].external > 0, f"{again[0].external} tokens of what was stored meanwhile")

    def killed(self, name, engine, server, asked, count, returns):
        """Prompts with their answers beside a server that is killed at the first store, and, if it `returns`, started at once."""
        prompts, alone = zip(*asked, strict=True)
        engine.submit("ask_broken", prompts, server.process.pid, signal.SIGKILL, count=count)
        wait_until(lambda: not server.running(), forked.CALL_TIMEOUT, "the server's end", interval=0.01)
        server.kill()
        if returns:
            server.start()
        found = engine.collect(forked.CALL_TIMEOUT)
        self.agree(f"{name}-answers", found["answers"], alone, count)
        self.check(f"{name}-no-leak", found["free"] == found["free_before"], f"{found['free']} of {found['free_before']} blocks free")

    def agree(self, name, answers, alone, count):
        """Answers of `count` tokens are the beginnings of those that were computed without a hit, if they are comparable."""
        pairs = zip(answers, alone, strict=True)
        wrong = sum(len(answer.ids) != count or self.is_comparable and not answer.begins(other) for answer, other in pairs)
        self.check(name, not wrong, f"{wrong} of {len(answers)} answers {'wrong' if self.is_comparable else 'of another length'}")

    def recovered(self, engine, timeout=60, resets=False):
        """Wait until the engine stores and loads again; each try is a prompt of its own. `resets`: the engine has a prefix cache."""
        tries = iter(range(1000))

        def again():
            # Of different lengths, which show a restarted server the chunk size of LMCache's client.
            number = next(tries)
            prompt = forked.prompt_of(f"probe-{number}", CHUNK * (3 + number % 2) - 8)
            engine.ask(prompt)
            return (not resets or engine.call("reset")) and engine.ask(prompt).external

        wait_until(again, timeout, "a hit", interval=0.2)
        if resets:
            self.check("reset", engine.call("reset"), "vLLM's own prefix cache")

    @contextlib.contextmanager
    def running(self):
        """The case's body: an exception is a failed check, and everything is stopped after it."""
        try:
            yield self
        except Exception as problem:
            self.check("runs-to-the-end", False, " ".join(str(problem).split())[:600])
        finally:
            for engine in self.engines:
                engine.leave()
            for engine in self.engines:
                engine.stop()
            for server in self.servers:
                if server.process is None:
                    continue
                if not server.running():
                    self.check("server-alive", False, server.tail(5))
                    server.kill()
                else:
                    server.stop()
                panics = [line for line in server.lines() if "panicked at" in line]
                if panics:
                    self.check("server-without-panic", False, panics[:2])
