#!/usr/bin/env python3
"""A real vLLM on CPU with LMCache's MP connector against our server, in every transfer mode.

  run.py                       all modes: lmcache_driven in full, the others without two long checks; the first two with
                               a directory as a second tier
  run.py --mode engine_shm     one mode (may be repeated)
  run.py --peer                LMCache's own server instead of ours
  run.py --connector kvtier --package DIR
                               our connector from the package in DIR, with nothing of LMCache in the engine
  run.py ... --brief [MODE]    one engine, and of the checks those in which the modes differ; in lmcache_driven another
                               engine with few blocks, whose requests are preempted and cancelled; in all modes if none is named
  run.py ... --tensor-parallel 2
                               an engine of two workers: stores, hits, a server that dies while they load; the same
                               with --pipeline-parallel 2
  run.py ... --mla             a model with multi-head latent attention: hits behind which the model says the same as
                               behind vLLM's own prefix cache
  run.py ... --remote resp     two servers that share a tier of this type: an engine at the second hits what one at the first
                               has stored; with `peers` the second reads from the first, also behind the example router
  run.py ... --restart-under-load  a server that restarts while an engine serves 20 requests at once
  run.py ... --restored        a server without a second tier that is killed: hits after its start, from the L1 that it had
  run.py ... --long-prompts    prompts that are longer than L1, in a tier and without one, asked again and again
  run.py ... --followed        a subscriber to vLLM's KV events with LMCache's connector ends with what a server with a small L1 holds
  run.py ... --restarted       a server with a state directory that is stopped while a request is computed: hits after its start
  run.py ... --wheel DIR       engines of an earlier vLLM or LMCache; with --silent-scheduler for LMCache 0.5.0 to 0.5.5
  run.py ... --fresh           every engine is a new process, as an operator starts it, instead of a fork of one that has
                               imported vLLM; always so with several workers and with --mla

Every prompt is a list of random token ids, decoding is greedy. Hits are taken after vLLM's own prefix cache is
emptied AND its KV blocks are overwritten, then in a new vLLM process; output must equal that of vLLM alone. With our
connector each loaded block must hold, byte for byte, what was stored under its prefix, and KV events are listened to.
Exit status: 0 when every check passed.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "harness"))

from cases import CHUNK, ModeCases, Prompts, baseline, run_name
from engine import fork_server
from evidence import pages_as_stored
from followed import L1_CHUNKS, FollowedCases
from kvrig import tiers
from kvrig.proxy import Proxy
from kvrig.report import Report
from kvrig.server import Server, free_port, our_command, peer_command
from long_prompts import TOKEN_BYTES, LongPromptCases, lengths
from mla import MlaCases
from remote import PeerCases, RemoteCases, RemoteTier
from restarted import RestartedCases
from restored import RestoredCases
from restarts import RestartCases

INSTANCE = "kept"
MODES = ["lmcache_driven", "engine_shm", "engine_pickle"]
# In these the server has a second tier; in the others a restart forgets everything, unless L1 is restored.
WITH_TIER = ["lmcache_driven", "engine_shm"]


def options():
    """The command line."""
    home = os.environ.get("KVTIER_E2E_HOME") or os.path.expanduser("~/.cache/kvtier-e2e")
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--full", action="store_true", help="all checks in every mode")
    parser.add_argument("--quick", action="store_true", help="no mode in full")
    parser.add_argument("--brief", nargs="*", choices=MODES, default=(), help="one engine, with hits and a server that dies")
    parser.add_argument("--fresh", action="store_true", help="start each engine as a new process, not by fork")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="workers of a stage")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="stages of an engine")
    parser.add_argument("--mla", action="store_true", help="a model with latent attention, made by make_model.py --mla")
    parser.add_argument("--peer", action="store_true", help="test LMCache's own server")
    parser.add_argument("--connector", choices=["lmcache", "kvtier"], default="lmcache", help="vLLM's connector")
    parser.add_argument("--package", help="directory with the Python package kvtier, for its connector")
    parser.add_argument("--remote", choices=["resp", "s3", "peers"], help="type of the tier that two servers share")
    parser.add_argument("--restart-under-load", action="store_true", help="the server restarts under load")
    parser.add_argument("--restored", action="store_true", help="a server that is killed leaves its L1 to the next")
    parser.add_argument("--long-prompts", type=int, nargs="?", const=10, metavar="N", help="prompts longer than an L1 of N chunks")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="requests of a long prompt")
    parser.add_argument("--followed", action="store_true", help="a subscriber to KV events, and a server with a small L1")
    parser.add_argument("--restarted", action="store_true", help="a server that was stopped for the time of a request")
    parser.add_argument("--wheel", action="append", default=[], metavar="DIR",
                        help="an unpacked earlier vLLM or LMCache, in front of the engine's packages; may be repeated")  # fmt: skip
    parser.add_argument("--transfer-mode", help="what the engine's LMCache calls the mode, if not as 0.5.6 does")
    parser.add_argument("--silent-scheduler", action="store_true",
                        help="the scheduler of this LMCache never pings, so once a server was away it asks no more")  # fmt: skip
    parser.add_argument("--model", help="made by make_model.py; default: setup.sh's")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block-size", type=int, default=128, help="16 with --mla, where vLLM's kernel has no other")
    parser.add_argument("--kv-blocks", type=int, default=48, help="paged blocks of vLLM, which `Prompts.fillers` overwrite")
    parser.add_argument("--server-flag", action="append", default=[], metavar="FLAG", help="of the server; may be repeated")
    parser.add_argument("--engine-config", type=json.loads, default={}, metavar="JSON", help="more of kv_connector_extra_config")
    parser.add_argument("--l1-gb", type=float, default=1.0)
    parser.add_argument("--mq-timeout", type=float, default=15)
    # It is also how long LMCache's client waits for a ping; one missed ends its engine if a load runs.
    parser.add_argument("--heartbeat", type=float, default=4)
    parser.add_argument("--start-timeout", type=float, default=240)
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--reuse-baseline", action="store_true", help="keep what vLLM alone answered last time")
    parser.add_argument("--logs", default=os.path.join(home, "logs"))
    chosen = parser.parse_args()
    workers = chosen.tensor_parallel * chosen.pipeline_parallel
    if chosen.connector == "lmcache" and (chosen.brief or chosen.mla or workers > 1):
        parser.error("--brief, --mla, --tensor-parallel and --pipeline-parallel need --connector kvtier")
    if chosen.brief == []:
        chosen.brief = MODES
    if chosen.mla:
        chosen.block_size = 16
    if chosen.restart_under_load:
        chosen.kv_blocks = max(chosen.kv_blocks, 160)
    if chosen.followed:
        chosen.l1_gb = L1_CHUNKS * CHUNK * TOKEN_BYTES / (1 << 30)
    if chosen.long_prompts:
        chosen.kv_blocks = lengths(chosen.long_prompts)[0] // chosen.block_size + 8
    chosen.model = chosen.model or os.path.join(home, "model-mla" if chosen.mla else "model")
    return chosen


def main():
    """Run the modes one after the other, on one baseline."""
    chosen = options()
    os.makedirs(chosen.logs, exist_ok=True)
    if chosen.wheel:
        chosen.model = model_for_earlier(Path(chosen.model), Path(chosen.logs) / "model")
    report, prompts, began = Report(), Prompts(chosen.seed), time.monotonic()
    command = peer_command() if chosen.peer else our_command()
    settings = dict(vars(chosen))
    patched = chosen.mla or chosen.tensor_parallel * chosen.pipeline_parallel > 1 or chosen.wheel
    chosen.fork_server = None if chosen.fresh or patched else fork_server(chosen)
    # With latent attention the same engine's own prefix cache is what is compared with.
    known = None if chosen.mla else baseline(chosen, prompts, report)
    for mode in chosen.mode or MODES:
        started = time.monotonic()
        ours = chosen.connector == "kvtier"
        log = Path(chosen.logs) / f"server-{run_name(chosen, mode)}.log"
        log.unlink(missing_ok=True)
        keeps_l1 = chosen.restart_under_load or chosen.restored or chosen.restarted
        has_directory = mode in WITH_TIER and not ours and not chosen.remote and not chosen.followed and (not keeps_l1 or chosen.restarted)
        directory = Path(chosen.logs) / f"tier-{mode}" if has_directory else None
        flags = chosen.server_flag
        remote = chosen.remote and RemoteTier(chosen.remote, Path(chosen.logs) / f"{chosen.remote}-{mode}")
        if remote:
            flags = flags + remote.first
        state = Path(chosen.logs) / f"state-{run_name(chosen, mode)}"
        if keeps_l1:
            flags = flags + kept_flags(state)
        if directory:
            shutil.rmtree(directory, ignore_errors=True)
            flags = flags + (tiers.adapter("fs", base_path=directory) if chosen.peer else tiers.fs(directory))
        kind = ProxiedServer if ours else Server
        server = kind(command, log, mode, chunk=256, l1_gb=chosen.l1_gb, flags=flags, peer=chosen.peer)
        if ours:
            server.witness = Path(chosen.logs) / f"witness-{run_name(chosen, mode)}"
            shutil.rmtree(server.witness, ignore_errors=True)
            server.witness.mkdir()
        # After the kill the new process meets an instance it does not know, and files that were damaged meanwhile.
        server.expect_trouble(r"instance")
        server.expect_trouble(r"not what was stored")
        try:
            print(f"# server[{mode}] up after {server.start():.2f} s", flush=True)
            cases = ModeCases(chosen, prompts, known, server, report, directory)
            if remote:
                more = chosen.server_flag + remote.second
                second = Server(command, log.with_suffix(".second.log"), mode, chunk=256, l1_gb=chosen.l1_gb, flags=more)
                if ours:
                    second.witness = server.witness
                second.start()
                try:
                    if chosen.remote == "peers":
                        PeerCases(chosen, prompts, known, server, report).run_peers(second)
                    else:
                        RemoteCases(chosen, prompts, known, server, report).run_remote(second)
                finally:
                    finish(second, report, f"{run_name(chosen, mode)}-second")
            elif chosen.restart_under_load:
                RestartCases(chosen, prompts, known, server, report).run_restarts()
            elif chosen.restored:
                RestoredCases(chosen, prompts, known, server, report, state=state / INSTANCE).run_restored()
            elif chosen.long_prompts:
                LongPromptCases(chosen, prompts, known, server, report).run_long_prompts()
            elif chosen.followed:
                FollowedCases(chosen, prompts, known, server, report).run_followed()
            elif chosen.restarted:
                RestartedCases(chosen, prompts, known, server, report).run_restarted()
            elif chosen.mla:
                MlaCases(chosen, prompts, known, server, report).run_mla()
            elif chosen.tensor_parallel * chosen.pipeline_parallel > 1:
                cases.run_with_workers()
            elif mode in chosen.brief:
                cases.run_brief()
            else:
                cases.run(quick=chosen.quick or (mode != "lmcache_driven" and not chosen.full))
        except Exception as problem:
            report.check(f"{run_name(chosen, mode)}/runs-to-the-end", False, repr(problem))
            print(server.tail(), flush=True)
        finally:
            finish(server, report, run_name(chosen, mode))
            if remote:
                remote.stop()
        if ours:
            blocks, wrong = pages_as_stored(server.witness)
            detail = f"{blocks} blocks were loaded, {len(wrong)} wrong {wrong[:3]}"
            report.check(f"{run_name(chosen, mode)}/bytes", blocks and not wrong, detail)
        print(f"# {run_name(chosen, mode)}: {time.monotonic() - started:.0f} s", flush=True)
    if chosen.fork_server:
        chosen.fork_server.close()
    seconds = time.monotonic() - began
    kind = run_name(chosen, "brief" if chosen.brief else "all")
    with open(os.path.join(chosen.logs, f"summary-{kind}.json"), "w") as file:
        json.dump({"seconds": seconds, "options": settings, "checks": report.rows}, file, indent=1)
    failed = report.failed()
    print(f"vLLM: {len(report.rows) - failed} passed, {failed} failed ({seconds:.0f} s)")
    return 1 if failed else 0


def model_for_earlier(model, folder):
    """The same model with a tokenizer that is named as transformers 4 knows it, too."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.unlink()
    config.write_text(json.dumps(settings))
    return str(folder)


class ProxiedServer(Server):
    """A server behind a proxy, which dies and returns with it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.proxy = Proxy(self.url, free_port())
        self.engine_url = self.proxy.url

    def start(self, timeout=60):
        """Start both."""
        seconds = super().start(timeout)
        self.proxy.mend()
        return seconds

    def kill(self):
        """Kill it, and end its connections."""
        super().kill()
        self.proxy.cut()


def kept_flags(directory):
    """Flags of a server whose next process goes on with its L1 and its workers, in an empty state directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return ["--l1-restore", "on", "--state-dir", str(directory), "--instance-id", INSTANCE]


def finish(server, report, name):
    """The server must still run, stop when asked, leave no shared memory and no unexpected log lines."""
    if not server.running():
        server.kill()
        report.check(f"{name}/server-alive", False, "the server ended by itself: " + server.tail(5))
        return
    files = server.shm_files()
    status, seconds = server.stop()
    left = [path for path in files if os.path.exists(path)]
    if "--l1-restore" in server.flags:
        # For the next server of the instance, and there is none.
        for path in left:
            os.unlink(path)
        left = []
        if INSTANCE in server.flags:
            state = Path(server.flags[server.flags.index("--state-dir") + 1])
            for folder in Path("/dev/shm").glob(f"kvtier_*_{(state / INSTANCE / 'id').read_text()}"):
                shutil.rmtree(folder)
    ok = (status == 0 or server.peer) and not left
    report.check(f"{name}/server-stops", ok, f"exit status {status} after {seconds:.1f} s, left: {left}")
    trouble = server.unexpected_trouble()
    if not server.peer:
        report.check(f"{name}/server-log-clean", not trouble, trouble[:3])


if __name__ == "__main__":
    sys.exit(main())
