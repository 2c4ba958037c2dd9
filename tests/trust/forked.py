"""vLLM engines in forked processes: vLLM is imported once, an engine is up in a few seconds.

Each engine runs in one process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) that serves calls from a pipe, one at a time, and
makes its steps only inside them. What the engine prints is in its log.
"""

import contextlib
import ctypes
import glob
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import Pipe

from kvrig.waiting import TimedOut, wait_until

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false",
    # Settings of earlier runs are no part of a test.
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}  # fmt: skip

# One call: a few prompts of a model with four layers.
CALL_TIMEOUT = 120
TOKENS = 8  # of each answer
LOGPROBS = 4  # of each token, where ties are asked for
PR_SET_PDEATHSIG = 1


def prepare(package):
    """Import vLLM and both connectors, before the first fork. `package`: directory of the Python package kvtier."""
    os.environ |= ENVIRONMENT
    sys.path.insert(0, str(package))
    import kvtier.vllm
    import lmcache.integration.vllm.lmcache_mp_connector  # noqa: F401
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # vLLM searches all modules for its kernels and fails at this one, whose `lib` claims to have every attribute.
    sys.modules.pop("llvmlite.binding.ffi", None)
    return kvtier.vllm.__file__, vllm.__version__


@dataclass
class Answer:
    """One completion."""

    ids: list
    external: int
    """Prompt tokens that the connector loaded; exact for prompts that are asked one by one."""
    ties: list = field(default_factory=list, repr=False)
    """For each token, those that are nearly as probable, where they were asked for."""
    handed_over: dict | None = None
    """Its `kv_transfer_params`."""

    def begins(self, other):
        """Whether this is the beginning of another answer, or leaves it at one of its ties: prompts that are computed in other batches
        are rounded otherwise."""
        pairs = enumerate(zip(self.ids, other.ids, strict=False))
        at = next((at for at, (one, another) in pairs if one != another), None)
        if at is None:
            return len(self.ids) <= len(other.ids)
        return bool(other.ties) and self.ids[at] in other.ties[at]


class Died(RuntimeError):
    """The engine's process has ended, or its core raised."""


def prompt_of(name, count):
    """Token ids that depend on the name only."""
    source = random.Random(name)
    return [source.randrange(300, 4000) for _ in range(count)]


class Engine:
    """One engine; its methods run in its process."""

    def __init__(self, name, logs, model, connection=None, **options):
        """`connection`: vLLM's `kv_transfer_config`; `options` are the LLM class's."""
        self.name, self.log, self.is_leaving = name, logs / f"{name}.log", False
        self.pipe, theirs = Pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _serve(self.log, theirs, self.pipe, model, connection, options)
        theirs.close()
        try:
            self._answer("start", CALL_TIMEOUT)
        except BaseException:
            self.stop()
            raise

    def call(self, method, *args, timeout=CALL_TIMEOUT, **options):
        """The result of a method of `Inside`."""
        self.submit(method, *args, **options)
        return self._answer(method, timeout)

    def submit(self, method, *args, **options):
        """Begin a call; `collect` has its result."""
        self.pipe.send((method, args, options))

    def collect(self, timeout):
        """The result of the call that was begun; `TimedOut` when there is none yet."""
        return self._answer("call", timeout)

    def ask(self, prompt, **options):
        """One completion."""
        [answer] = self.call("ask", [prompt], **options)
        return answer

    def alone(self, prompt, **options):
        """What this engine says without a hit: under a salt of its own."""
        return self.ask(prompt, salt=f"alone-{os.urandom(8).hex()}", **options)

    def alive(self):
        """Whether the process lives."""
        return self.pid is not None and os.waitpid(self.pid, os.WNOHANG) == (0, 0)

    def tail(self, count=30):
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def leave(self):
        """Begin to shut down in order; `stop` waits for the end."""
        if self.pid is None or self.is_leaving:
            return
        self.is_leaving = True
        with contextlib.suppress(OSError):
            self.submit("shutdown")

    def stop(self):
        """Shut down in order, then by force; segments that vLLM left are removed."""
        if self.pid is None:
            return
        self.leave()
        try:
            wait_until(self._reaped, 60, f"end of engine {self.name}")
        except TimedOut:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        for path in glob.glob(f"/dev/shm/lmcache_kv_{self.pid}_*"):
            os.unlink(path)
        self.pid = None
        self.pipe.close()

    def _reaped(self):
        try:
            return os.waitpid(self.pid, os.WNOHANG) != (0, 0)
        except ChildProcessError:
            return True

    def _answer(self, method, timeout):
        if not self.pipe.poll(timeout):
            raise TimedOut(f"engine {self.name}: {method} has no answer after {timeout} s")
        try:
            ok, result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise Died(f"engine {self.name} ended in {method}:\n{self.tail()}") from None
        if not ok:
            raise Died(f"engine {self.name}: {method} raised {result}")
        return result


def _serve(log, pipe, other, model, connection, options):
    """The child's life."""
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        other.close()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(output, stream)
        inside = Inside(model, connection, options)
        pipe.send((True, None))
        while True:
            method, args, named = pipe.recv()
            if method == "shutdown":
                inside.shutdown()
                break
            try:
                pipe.send((True, getattr(inside, method)(*args, **named)))
            except Exception as problem:
                traceback.print_exc()
                pipe.send((False, repr(problem)))
        status = 0
    except EOFError:
        pass
    except BaseException as problem:
        traceback.print_exc()
        pipe.send((False, repr(problem)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Inside:
    """The engine's side of the calls."""

    def __init__(self, model, connection, options):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if connection is not None:
            options["kv_transfer_config"] = KVTransferConfig(**connection)
        defaults = {
            "max_model_len": 2048, "block_size": 128, "num_gpu_blocks_override": 64, "enforce_eager": True,
            "dtype": "float32", "max_num_seqs": 8, "disable_log_stats": False, "enable_prefix_caching": False,
        }  # fmt: skip
        self.llm = LLM(model=str(model), **defaults | options)
        self.engine, self.number = self.llm.llm_engine, 0

    def ask(self, prompts, salt=None, lora=None, pictures=None, uuids=None, count=TOKENS, settles=True, tie=None, handed_over=None):
        """Greedy completions of prompts that arrive together: lists of ids, or texts with pictures. With a `tie`, the largest difference
        between logarithms of probabilities that may be a question of rounding, answers have their ties. `handed_over`: the
        `kv_transfer_params` of each."""
        before, answers = self.external(), {}
        for prompt in prompts:
            self.number += 1
            self._add(str(self.number), prompt, salt, lora, pictures, uuids, count, LOGPROBS if tie else None, handed_over)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    answers[int(output.request_id.split("-")[0])] = output
        if settles:
            self.settle()
        external = self.external() - before
        ended = [(answers[number].outputs[0], answers[number].kv_transfer_params) for number in sorted(answers)]
        return [Answer(list(output.token_ids), external, _ties(output, tie) if tie else [], handed) for output, handed in ended]

    def ask_broken(self, prompts, server, number, count=TOKENS):
        """`ask` beside a server (its process id) that gets a signal at the first store; what the stores held. One that is only
        stopped continues after the last answer."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = self.engine.engine_core.engine_core.scheduler.connector
        pool = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        holds, worker = connector._scheduling.holds, get_kv_transfer_group()
        found = {"held": 0, "limit": holds.limit, "free_before": pool.get_num_free_blocks()}
        preempted, waits, signals, take = self.metric("vllm:num_preemptions"), [], [number], holds.take
        save, wait = worker.wait_for_save, worker._adapter.wait_for_stores

        def breaks():
            if signals and worker._step().stores:
                os.kill(server, signals.pop())
            save()

        def takes(number, request_id, blocks):
            # States, which vLLM offers once, may be held beyond the limit.
            counted = sum(len(ids) for ids, group in zip(blocks, connector._groups, strict=True) if not group.recurrent_state)
            found["held"] = max(found["held"], len(holds._counts) + counted)
            take(number, request_id, blocks)

        holds.take, worker.wait_for_save = takes, breaks
        worker._adapter.wait_for_stores = lambda names, patience: waits.append(names) or wait(names, patience)
        try:
            found["answers"] = self.ask(prompts, count=count, settles=False)
        finally:
            holds.take, worker.wait_for_save, worker._adapter.wait_for_stores = take, save, wait
            if number == signal.SIGSTOP:
                os.kill(server, signal.SIGCONT)
        found["in_flight"] = len(holds)
        self.settle()
        preempted = int(self.metric("vllm:num_preemptions") - preempted)
        return found | {"waited": len(waits), "preempted": preempted, "free": pool.get_num_free_blocks()}

    def time_steps(self, prompts, count):
        """Steps that answer prompts which arrive together: seconds, scheduled tokens, and whether it began with stores in flight."""
        scheduler, steps = self.engine.engine_core.engine_core.scheduler, []
        holds = scheduler.connector._scheduling.holds if scheduler.connector else ()
        sizes, schedule = [], scheduler.schedule

        def schedules(*args, **options):
            made = schedule(*args, **options)
            sizes.append(made.total_num_scheduled_tokens)
            return made

        scheduler.schedule = schedules
        try:
            for prompt in prompts:
                self.number += 1
                self._add(str(self.number), prompt, None, None, None, None, count, None)
            while self.engine.has_unfinished_requests():
                sizes.clear()
                in_flight, began = len(holds) > 0, time.perf_counter()
                self.engine.step()
                steps.append((time.perf_counter() - began, sum(sizes), in_flight))
        finally:
            scheduler.schedule = schedule
        self.settle()
        # Without a token only lookups or stores were waited for.
        return [step for step in steps if step[1]]

    def _add(self, request_id, prompt, salt, lora, pictures, uuids, count, logprobs, handed_over=None):
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        text = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if salt is not None:
            text["cache_salt"] = salt
        if pictures is not None:
            text["multi_modal_data"] = {"image": [picture(name) for name in pictures]}
        if uuids is not None:
            text["multi_modal_uuids"] = {"image": list(uuids)}
        extra = {"kv_transfer_params": handed_over} if handed_over is not None else None
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=logprobs, extra_args=extra)
        request = LoRARequest(**lora) if lora else None
        self.engine.add_request(request_id, text, params, lora_request=request)

    def settle(self):
        """Step until nothing of finished requests is held."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        wait_until(lambda: not scheduler.has_requests() or self.engine.step() and False, 60, "end of stores", 0.005)

    def external(self):
        """Prompt tokens that the connector loaded since the start."""
        found = (each for each in self.llm.get_metrics() if each.name == "vllm:external_prefix_cache_hits")
        return int(sum(each.value for each in found))

    def block_sizes(self):
        """Tokens in a block of each group of layers."""
        groups = self.engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        return [group.kv_cache_spec.block_size for group in groups]

    def metric(self, name):
        """One of vLLM's numbers."""
        return sum(each.value for each in self.llm.get_metrics() if each.name == name)

    def reset(self, connector=False):
        """vLLM's reset of its prefix cache, with or without the connector."""
        return self.llm.reset_prefix_cache(reset_connector=connector)

    def load_weights(self, directory):
        """Other weights in place, as reinforcement learning does."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})

    def pause(self):
        """Stop scheduling and empty the caches, as before an update of weights, then go on."""
        core = self.engine.engine_core.engine_core
        core.pause_scheduler(clear_cache=True)
        core.resume_scheduler()

    def shutdown(self):
        """Leave the server in order."""
        self.engine.engine_core.shutdown()


def _ties(output, tie):
    """For each token of a completion, those whose probability is nearly its own, which is the highest."""
    best = ((tops, tops[token].logprob) for token, tops in zip(output.token_ids, output.logprobs, strict=True))
    return [{each for each, found in tops.items() if found.logprob > highest - tie} for tops, highest in best]


def picture(name):
    """A picture of noise that depends on the name only."""
    from PIL import Image

    return Image.frombytes("RGB", (224, 224), random.Random(name).randbytes(224 * 224 * 3))
