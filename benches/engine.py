#!/usr/bin/env python3
"""What a cache is worth to a real vLLM: conversations with several turns, with each way to keep KV in turn.

    benches/engine.py [--setup NAME ...] [--rounds 3] [--device cpu|gpu] [--model llama|windows] [--trace FILE] [--out DIR] [--package DIR]

Every turn sends the whole conversation so far: a system prompt that all users share, the user's earlier turns with the answers,
and new words. Users take turns, so the KV of a user's earlier turns has left vLLM's own small cache when the next one comes. Tokens
are random, the same in every setup, new in every round. The weights are random too, and answers are greedy: bytes and answers are
compared by tests/vllm, not here.

--trace has turns of a recorded length and recorded shared prefixes instead: JSON lines as published with the Mooncake paper (FAST'25;
repository kvcache-ai/Mooncake, conversation trace), one request each. The conversations that are first at enough turns are taken.
`scale` tokens stand for a block of 512.

    none            vLLM alone with its own prefix cache
    offloading      vLLM's own OffloadingConnector (needs a GPU)
    lmcache         LMCache's server and connector
    kvtier-lmcache  kvtier's server, LMCache's connector
    kvtier          kvtier's server and connector

All engines run from the beginning to the end; one at a time has requests, as many as run at once (`concurrency`), then the next
has the same ones, in an order that changes: what slows the machine meets all setups. Between two such waves is a pause, since an
engine's processes spin for a second after its last step, and would slow the other's. Reported for each setup, as median of the
rounds and for each round:

    ttft_first, ttft_later    milliseconds to the first token of a user's first turn and of later ones, p50 and p99
    gap                       milliseconds between tokens of an answer, p50 and p99, beside prompts of others and stores
    tokens_per_s              prompt tokens per second
    hit_tokens, computed      share of prompt tokens that came from the cache, and that the engine computed
    server_cpu, engine_cpu    CPU seconds per million prompt tokens, of all processes of the server and of the engine
    first_ratio, later_ratio  median of time to the first token over that of the same request with LMCache, if that runs
    first_p50_ratio, ...      percentiles of all rounds over those with LMCache

--model windows is of Gemma 3's kind: five layers of six attend to the last 128 tokens only. It runs in `lmcache_driven`, without
kvtier-lmcache (kvtier's server refuses LMCache's clients for such models), with an L1 that is small against the conversations, so
what is stored of a window decides how many of them it holds. Users come in another order in each turn.

--device gpu takes a model of the shape of Llama 3 8B in bfloat16 with random weights (16 GB per setup), cpu one that fits two
cores. Needed: vLLM, for lmcache LMCache with its CUDA extension, the kvtier package (--package, or importable), the server
(KVTIER_BIN or target/release/kvtier). Everything listens on loopback and ends with this program.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import random
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "harness"), str(ROOT / "tests" / "vllm")]

import children  # noqa: E402
import idle_connections  # noqa: E402
from engine import CONNECTOR, Vllm  # noqa: E402
from kvrig.server import Server, our_command  # noqa: E402
from kvrig.waiting import TimedOut  # noqa: E402

# Of a model and its load. `blocks` of vLLM's cache hold fewer tokens than the users' conversations. `chunk_tokens`: of kvtier's
# connector, 0: the server's.
DEVICES = {
    "cpu": SimpleNamespace(
        dtype="float32", block_size=128, blocks=40, mode="engine_driven", chunk_tokens=0, l1_gb=1.0, length=4096, start_timeout=240,
        users=6, turns=3, concurrency=2, system=512, first=900, later=400, answer=16, shuffled=False, scale=128,
        flags=[],
        shape={"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
               "num_key_value_heads": 4, "head_dim": 64},
    ),
    "gpu": SimpleNamespace(
        dtype="bfloat16", block_size=16, blocks=2560, mode="lmcache_driven", chunk_tokens=0, l1_gb=20.0, length=32768, start_timeout=240,
        users=8, turns=4, concurrency=2, system=1024, first=12000, later=300, answer=32, shuffled=False, scale=512,
        # Given, since an engine would count what others allocate while it measures. It starts where the share is free.
        flags=["--kv-cache-memory-bytes", str(5 << 30), "--gpu-memory-utilization", "0.15"],
        shape={"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
               "num_key_value_heads": 8, "head_dim": 128},
    ),
}  # fmt: skip
# What differs on the CPU with windows: each of the six layers is a group of its own, so a block has one layer's 128 tokens.
WINDOWS = {
    "block_size": 128, "blocks": 160, "mode": "lmcache_driven", "l1_gb": 0.15, "shuffled": True,
    "users": 8, "turns": 4, "concurrency": 1, "system": 256, "first": 1200, "later": 200, "answer": 8,
    "shape": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048,
              "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "query_pre_attn_scalar": 64,
              "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 128,
              "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
}  # fmt: skip
CHUNK = 256
# Tokens of a block of a trace.
TRACE_BLOCK = 512
VOCABULARY = 8192
# Seconds for which vLLM's processes may look for the next step's message before they sleep: one, and some more.
SPIN = 1.2
SETUPS = ("none", "offloading", "lmcache", "kvtier-lmcache", "kvtier")


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--setup", action="append", choices=SETUPS, help="may be repeated; default: all that the device can run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=list(DEVICES), default="cpu")
    parser.add_argument("--model", choices=["llama", "windows"], default="llama", help="windows: on the CPU")
    parser.add_argument("--trace", metavar="FILE", help="recorded conversations instead of made-up ones")
    parser.add_argument("--package", action="append", default=[], metavar="DIR", help="in front of the engines' packages")
    parser.add_argument("--tokenizer", metavar="DIR", help="model with a tokenizer [default: that of tests/setup.sh]")
    parser.add_argument("--out", metavar="DIR", help="where results go [default: benches/runs/<date>/engine-<device>, or -windows]")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the load or the model, as in DEVICES")
    arguments = parser.parse_args()
    load = DEVICES[arguments.device]
    has_windows = arguments.model == "windows"
    if has_windows and arguments.device == "gpu":
        parser.error("--model: 'windows' runs with --device cpu only")
    vars(load).update(WINDOWS if has_windows else {})
    for setting in arguments.set:
        name, _, value = setting.partition("=")
        allowed = sorted(name for name, now in vars(load).items() if type(now) in (int, float, str))
        if name not in allowed:
            parser.error(f"--set: '{name}' is not one of {', '.join(allowed)}")
        setattr(load, name, type(getattr(load, name))(value))
    home = os.environ.get("KVTIER_E2E_HOME") or os.path.expanduser("~/.cache/kvtier-e2e")
    skipped = {"offloading"} if arguments.device == "cpu" else set()
    skipped |= {"kvtier-lmcache"} if has_windows else set()
    setups = arguments.setup or [s for s in SETUPS if s not in skipped]
    kind = "windows" if has_windows else arguments.device
    out = Path(arguments.out or ROOT / "benches" / "runs" / datetime.date.today().isoformat() / f"engine-{kind}")
    out.mkdir(parents=True, exist_ok=True)
    # A signal that ends this program ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    model = make_model(out / "model", Path(arguments.tokenizer or Path(home) / "model"), load)
    recorded = recorded_conversations(arguments.trace, load, parser) if arguments.trace else None
    with ExitStack() as stack:
        running = start(stack, setups, model, load, out, arguments.package)
        if not running:
            sys.exit("no setup has started")
        rounds = []
        for _, server, engine in running:
            # The first request of an engine takes seconds more.
            Conversations("", server, engine, load, None, "warm-up").wave(0, range(load.concurrency))
        for number in range(arguments.rounds):
            rounds.append(measure(running, load, recorded, number))
            report(rounds, load, arguments, out)


def make_model(directory, tokenizer, load):
    """A directory with a tokenizer, and the configuration of a model, whose weights vLLM makes up."""
    directory.mkdir(exist_ok=True)
    for file in tokenizer.glob("*token*"):
        (directory / file.name).write_bytes(file.read_bytes())
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_act": "silu",
        "max_position_embeddings": load.length, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": load.dtype, **load.shape,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return directory


# -- what is compared --------------------------------------------------------------------------


def start(stack, setups, model, load, out, packages):
    """Starts servers, then all engines at once; returns (setup, server, engine) of each."""
    servers = {}
    for name in setups:
        try:
            servers[name] = start_server(stack, name, load, out)
        except (RuntimeError, TimedOut) as error:
            print(f"{name} is left out: {error}", flush=True)
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    options = SimpleNamespace(
        model=str(model), block_size=load.block_size, dtype=load.dtype, kv_blocks=load.blocks, tensor_parallel=1,
        pipeline_parallel=1, connector="lmcache", mla=False, wheel=packages, logs=str(logs), fork_server=None,
        start_timeout=load.start_timeout,
    )  # fmt: skip
    # They override those of tests/vllm.
    flags = ["--load-format", "dummy", "--max-model-len", str(load.length), "--max-num-seqs", str(4 * load.concurrency), *load.flags]

    def engine(name):
        config = transfer_config(name, servers[name], load)
        return Vllm(options, name, flags=flags + (["--kv-transfer-config", json.dumps(config)] if config else []))

    running = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, started in [(name, pool.submit(engine, name)) for name in servers]:
            try:
                running.append((name, servers[name], started.result()))
            except (RuntimeError, TimedOut) as error:
                print(f"{name} is left out: {error}", flush=True)
                continue
            stack.callback(running[-1][2].stop)
    return running


def start_server(stack, name, load, out):
    """The server of a setup, or None."""
    if name in ("none", "offloading"):
        return None
    peer = name == "lmcache"
    command = [sys.executable, "-m", "lmcache.cli.main", "server"] if peer else our_command()
    mode = "engine_shm" if load.mode == "engine_driven" else load.mode
    server = Server(command, out / f"server-{name}.log", mode, chunk=CHUNK, l1_gb=load.l1_gb, peer=peer)
    stack.callback(server.kill)
    server.start()
    return server


def transfer_config(name, server, load):
    """vLLM's --kv-transfer-config, or None."""
    if name == "none":
        return None
    if name == "offloading":
        extra = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": int(load.l1_gb * (1 << 30))}}
    elif name == "kvtier":
        extra = {
            "kv_connector": "KvTierConnector", "kv_connector_module_path": "kvtier.vllm",
            "kv_connector_extra_config": {
                "kvtier.url": server.url, "kvtier.transfer_mode": load.mode, "kvtier.chunk_tokens": load.chunk_tokens,
            },
        }  # fmt: skip
    else:
        extra = {
            "kv_connector": "LMCacheMPConnector", "kv_connector_module_path": CONNECTOR,
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port, "lmcache.mp.mp_transfer_mode": load.mode,
            },
        }  # fmt: skip
    return {"kv_role": "kv_both", **extra}


# -- the load ----------------------------------------------------------------------------------


def tokens(seed, count):
    """Returns random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(300, VOCABULARY - 100) for _ in range(count)]


def recorded_conversations(path, load, parser):
    """Turns of `users` recorded conversations, each the ids of its prompt's blocks and its length in scaled tokens.

    A request goes on with the conversation whose blocks, the incomplete last one left out, begin its own; the first block is all users'.
    """
    open_ones, found = {}, []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            blocks, length = tuple(request["hash_ids"]), request["input_length"] * load.scale // TRACE_BLOCK
            # One that grows longer than the model allows ends.
            talk = next((open_ones.pop(blocks[:end]) for end in range(len(blocks), 1, -1) if blocks[:end] in open_ones), [])
            if length + load.answer > load.length:
                continue
            talk.append((blocks, length))
            if len(talk) == load.turns:
                found.append(talk)
                if len(found) == load.users:
                    return found
            elif len(blocks) > 2:
                open_ones[blocks[:-1]] = talk
    parser.error(f"--trace: {len(found)} conversations of {load.turns} turns, {load.users} are needed; see --set users, turns, scale")


def measure(running, load, recorded, number):
    """One round: all conversations with each setup. Returns the figures by setup."""
    talks = [Conversations(*each, load, recorded, number) for each in running]
    index = number
    for turn in range(load.turns):
        users = list(range(load.users))
        if load.shuffled:
            random.Random(f"{number} {turn}").shuffle(users)
        for first in range(0, load.users, load.concurrency):
            shift = index % len(talks)
            for each in talks[shift:] + talks[:shift]:
                each.wave(turn, users[first : first + load.concurrency])
            index += 1
    figures = {each.name: each.figures() for each in talks}
    for name, figure in figures.items():
        shown = ", ".join(f"{key} {value}" for key, value in figure.items() if not isinstance(value, list))
        print(f"round {number} {name}: {shown}", flush=True)
    return figures


class Conversations:
    """The conversations of a round with one setup."""

    def __init__(self, name, server, engine, load, recorded, seed):
        self.name, self.server, self.engine, self.load, self.recorded, self.seed = name, server, engine, load, recorded, seed
        self.prompts = {user: tokens(f"{seed} system", load.system) for user in range(load.users)}
        self.answers, self.spent = [], [0.0] * len(self.meters())

    def wave(self, turn, users):
        """The turn of some users, at the same time."""
        # The engine that had the last wave is idle then.
        time.sleep(SPIN)
        before = self.meters()
        with concurrent.futures.ThreadPoolExecutor(len(users)) as pool:
            self.answers += pool.map(lambda user: self.ask(turn, user), users)
        self.spent = [spent + now - then for spent, now, then in zip(self.spent, self.meters(), before, strict=True)]

    def ask(self, turn, user):
        """One request; returns (turn, user, tokens of the prompt, answer)."""
        load, prompt = self.load, self.prompts[user]
        if self.recorded:
            blocks, length = self.recorded[user][turn]
            prompt[:] = [token for block in blocks for token in tokens(f"{self.seed} block {block}", load.scale)][:length]
        else:
            prompt += tokens(f"{self.seed} {user} {turn}", load.later if turn else load.first)
        length, answer = len(prompt), self.engine.ask(list(prompt), count=load.answer)
        if answer.ttft is None:
            raise RuntimeError(f"an answer without a token; see {self.engine.child.log}")
        # What goes on is the same in every setup.
        prompt += tokens(f"{self.seed} {user} {turn} answer", load.answer)
        return turn, user, length, answer

    def meters(self):
        """What is counted from wave to wave."""
        external, _, computed = self.engine.counters()
        return [time.monotonic(), external, computed, *cpu_seconds(self.server, self.engine)]

    def figures(self):
        """The round's."""
        wall, external, computed, server_cpu, engine_cpu = self.spent
        prompts = sum(length for _, _, length, _ in self.answers)
        first, later = ([a.ttft for turn, _, _, a in self.answers if bool(turn) is of] for of in (False, True))
        gaps = [b - a for *_, answer in self.answers for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
        return {
            "ttft_first_p50": milliseconds(first, 0.5), "ttft_first_p99": milliseconds(first, 0.99),
            "ttft_later_p50": milliseconds(later, 0.5), "ttft_later_p99": milliseconds(later, 0.99),
            "gap_p50": milliseconds(gaps, 0.5), "gap_p99": milliseconds(gaps, 0.99),
            "tokens_per_s": round(prompts / wall), "hit_tokens": round(external / prompts, 3), "computed": round(computed / prompts, 3),
            "server_cpu": round(1e6 * server_cpu / prompts, 2), "engine_cpu": round(1e6 * engine_cpu / prompts, 2),
            "ttft": [[turn, user, length, round(1000 * answer.ttft, 2)] for turn, user, length, answer in self.answers],
        }  # fmt: skip


def milliseconds(values, share):
    """A percentile."""
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def cpu_seconds(server, engine):
    """CPU seconds of all processes of the server and of the engine so far."""
    return [
        sum(process_seconds(pid) for pid in children.session_members(session)) if session else 0.0
        for session in (server and server.process.pid, engine.child.pid)
    ]


def process_seconds(pid):
    """CPU seconds of a process so far; 0 if it has ended."""
    try:
        return idle_connections.cpu_seconds(pid)
    except OSError:
        return 0.0


# -- the report --------------------------------------------------------------------------------


def ratios(rounds, setup, later):
    """Times to the first token of a setup over those with LMCache: median of the same requests', p50's, p99's; 0 without LMCache."""

    def times(name):
        return [ttft for figures in rounds for turn, _, _, ttft in figures.get(name, {"ttft": []})["ttft"] if bool(turn) is later]

    ours, peers = times(setup), times("lmcache")
    if not ours or not peers:
        return [0, 0, 0]
    same = statistics.median([one / peer for one, peer in zip(ours, peers, strict=True)])
    return [round(same, 3), *(round(milliseconds(ours, share) / milliseconds(peers, share), 3) for share in (0.5, 0.99))]


def report(rounds, load, arguments, out):
    """Prints a table of medians, and writes everything."""
    setups = list(rounds[0])
    names = [name for name, value in rounds[0][setups[0]].items() if not isinstance(value, list)]
    medians = {s: {n: round(statistics.median(r[s][n] for r in rounds), 3) for n in names} for s in setups}
    for setup in setups:
        for name, later in (("first", False), ("later", True)):
            found = zip(("ratio", "p50_ratio", "p99_ratio"), ratios(rounds, setup, later), strict=True)
            medians[setup] |= {f"{name}_{kind}": value for kind, value in found}
    names = list(medians[setups[0]])
    width = max(map(len, names))
    lines = [" " * width + "".join(f"{setup:>16}" for setup in setups)]
    for name in names:
        lines.append(f"{name:<{width}}" + "".join(f"{medians[setup][name]:>16}" for setup in setups))
    text = "\n".join(lines)
    print(text)
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(), "cpus": os.cpu_count(), "device": arguments.device,
        "model": arguments.model, "load": vars(load), "chunk": CHUNK, "medians": medians, "rounds": rounds,
    }  # fmt: skip
    (out / "engine.json").write_text(json.dumps(facts) + "\n")
    (out / "engine.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
