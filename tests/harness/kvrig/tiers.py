"""Second tiers: flags of a server, its metrics, the files of a tier, and KV whose bytes name their prompt.

Everything painted follows from a seed, so what is loaded can be compared after any number of restarts.
"""

import json
import re
import subprocess
from pathlib import Path

from . import layouts
from .engine import tokens
from .server import our_command
from .waiting import wait_until

# A server keeps a lock file of this name while it runs; what it writes is that name, "-" and a number.
TEMPORARY = re.compile(r"\.kvtier-tmp-[0-9a-f]+(-[0-9a-f]+)?|.*\.tmp")


def adapter(kind, **keys):
    """Flags for one tier."""
    return ["--l2-adapter", json.dumps({"type": kind, **keys}, default=str)]


def failed_cases(flags):
    """The cases that fail of the suite which all adapters pass, run with these flags. It leaves nothing, unless a case fails."""
    command = [our_command()[0], "tier-test", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    failed = [line.split()[1].rstrip(":") for line in lines if line.startswith("FAILED ")]
    assert done.returncode == (1 if failed else 0), done.stdout + done.stderr
    assert sum(line.startswith("ok ") for line in lines) >= 20, done.stdout
    assert failed or "could not be deleted" not in done.stdout, done.stdout
    # Shown if the caller did not expect these.
    print("\n".join(line for line in lines if not line.startswith("ok ")))
    return failed


def fs(path, kind="fs", **keys):
    """Flags for a directory as a tier; no matter how full the disk is that the tests run on."""
    return adapter(kind, base_path=path, **keys) + ["--l2-min-free-gb", "0"]


def tier(server, number=0):
    """What `/status` says about one tier."""
    return server.get("/status")[1]["storage_manager"]["l2_adapters"][number]


def is_settled(server):
    """Whether nothing waits to be stored in a tier; the store controller's figures then."""
    controller = server.get("/status")[1]["storage_manager"]["store_controller"]
    return controller if controller["pending_keys_count"] + controller["in_flight_task_count"] == 0 else None


def settled(server, timeout=60):
    """Wait for that."""
    return wait_until(lambda: is_settled(server), timeout, "end of the stores", interval=0.02)


def adopted(server, timeout=60):
    """Wait until the server knows what was there before it; the figures."""

    def done():
        recovery = tier(server)["recovery"]
        return recovery if recovery["state"] != "running" else None

    recovery = wait_until(done, timeout, "end of the scan", interval=0.02)
    assert recovery["state"] == "done", recovery
    return recovery


def files(directory):
    """The objects' files below a directory."""
    return sorted(path for path in Path(directory).rglob("*.data") if ".quarantine" not in path.parts)


def temporary(directory):
    """Files below a directory that are being written, or were."""
    return sorted(path for path in Path(directory).rglob("*") if TEMPORARY.fullmatch(path.name))


def being_written(directory):
    """Those of them that hold an object, not a server's lock."""
    return [path for path in temporary(directory) if not re.fullmatch(r"\.kvtier-tmp-[0-9a-f]+", path.name)]


def wait_files(directory, count, timeout=60):
    """Wait until `count` objects are in a directory; returns their files."""

    def there():
        found = files(directory)
        return found if len(found) >= count else None

    return wait_until(there, timeout, f"{count} files in {directory}", interval=0.02)


def paint(worker, blocks, name):
    """Write the bytes that `name` stands for into these blocks of every layer."""
    worker.pull()
    for layer, (tensor, group) in enumerate(worker.layers):
        of_group = blocks[group.engine_group] if isinstance(blocks[0], list) else blocks
        row = layouts.block_bytes(tensor, group.layout.block_axis)
        rows = layouts.noise(f"{name}/{worker.rank}/{layer}", len(of_group), row)
        layouts.write_blocks(tensor, group.layout.block_axis, of_group, rows)
    worker.push()


def is_painted(worker, blocks, name):
    """Whether these blocks hold the first bytes that `name` stands for, in every layer."""
    worker.pull()
    for layer, (tensor, group) in enumerate(worker.layers):
        axis = group.layout.block_axis
        rows = layouts.noise(f"{name}/{worker.rank}/{layer}", len(blocks), layouts.block_bytes(tensor, axis))
        if not (layouts.read_blocks(tensor, axis, blocks).view(len(blocks), -1) == rows).all():
            return False
    return True


def store(engine, seed, count=64, salt="", first=1):
    """Store the prompt with this seed, `count` tokens of it, from painted blocks; the prompt."""
    prompt = tokens(count, seed)
    for worker in engine.workers:
        paint(worker, engine.blocks_for(count, first), f"{seed}/{salt}")
    engine.store_prompt(prompt, first=first, salt=salt)
    return prompt


def recall(engine, seed, count=64, salt="", first=1):
    """Look the same prompt up and load what is there; the hit in tokens. Other bytes than its own fail the test."""
    prompt = tokens(count, seed)
    request, hit = engine.lookup(prompt, salt=salt)
    if hit:
        blocks = engine.blocks_for(hit, first)
        for worker in engine.workers:
            worker.fill(blocks, 0xEE)
            outcome = worker.retrieve(request, prompt, 0, hit, blocks, salt)
            assert outcome.ok, f"prompt {seed}: {hit} tokens were promised and not given"
            assert is_painted(worker, blocks, f"{seed}/{salt}"), f"prompt {seed}, {hit} tokens: wrong bytes"
    engine.end(request)
    return hit


def forget(engine):
    """Empty L1: the next lookup finds only what a tier has."""
    settled(engine.server)
    assert engine.scheduler.reset_cache() is True


def warnings(server):
    """What the server's log has warned of, a text for each line, without the error."""
    return [what for what, _ in warned(server)]


def causes(server):
    """The same with the error, but for the node that has it and what is counted behind it."""
    return [(what, re.sub(r"^[\d.]+:\d+: | \w+=\d+(?= |$)", "", error)) for what, error in warned(server)]


def warned(server):
    """What the server's log has warned of, and the error."""
    lines = [line.partition(" WARN ")[2].partition(" error=") for line in server.lines() if " WARN " in line]
    return [(what, error) for what, _, error in lines]


def metric(server, name, **labels):
    """Sum of a metric over all series with these labels; 0 when it was never counted."""
    status, text = server.get("/metrics")
    assert status == 200, text
    total = 0.0
    for found, value in re.findall(rf"^{name}(?:{{(.*)}})? ([0-9.e+-]+)$", text, re.MULTILINE):
        if all(f'{label}="{wanted}"' in found for label, wanted in labels.items()):
            total += float(value)
    return total


def store_in_order(engine, seed, directory, count=64, salt=""):
    """`store`, a chunk at a time; the file of each chunk (of the only rank and group)."""
    prompt, known, found = tokens(count, seed), set(files(directory)), []
    paint(engine.worker, engine.blocks_for(count), f"{seed}/{salt}")
    for end in range(engine.chunk, count + 1, engine.chunk):
        engine.store_prompt(prompt[:end], salt=salt)
        [new] = set(wait_files(directory, len(known) + 1)) - known
        known.add(new)
        found.append(new)
    settled(engine.server)
    return found


def begin_stores(writers, seed, count=64):
    """Stores of the same prompt by several engines, all in flight: pairs of engine and request."""
    prompt, requests = tokens(count, seed), []
    # Which one begins takes turns.
    for writer in writers if seed % 2 else reversed(writers):
        paint(writer.worker, writer.blocks_for(count), f"{seed}/")
        requests.append((writer, request := writer.new_request()))
        writer.worker.submit_store(request, prompt, 0, count, writer.blocks_for(count))
    return requests


def flip(path, place):
    """Change one bit of a file, `place` bytes from its start or its end."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
