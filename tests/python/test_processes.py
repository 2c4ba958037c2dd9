"""The process of the package: signals, forks, and all kinds of exit."""

import glob
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHUNK
from kvrig.server import free_port
from kvrig.waiting import wait_until
from kvtier import Client, KvTierError, Prompt
from kvtier.tensors import Segment
from rig import tokens

HERE = Path(__file__).parent
PATHS = [str(HERE), str(HERE.parent / "harness")]


def python(code, *arguments, **options):
    """Runs the code in a child with these arguments; returns the child and its output."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {PATHS!r}\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


INTERRUPTED = """
import os, signal, threading, kvtier, rig
def answer():
    import msgspec, zmq
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(sys.argv[1])
    while True:
        client, uid, number, *_ = socket.recv_multipart()
        answers = {21: 16, 22: True, 32: []}
        kind = msgspec.msgpack.decode(number)
        if kind in answers:
            socket.send_multipart([client, uid, number, msgspec.msgpack.encode(answers[kind])])
url, adapter = sys.argv[1], dict(model_name="m", block_tokens=4, timeout=600, wait_for_server=600)
def register():
    threading.Thread(target=answer, daemon=True).start()
    rig.Engine(url, timeout=600)
calls = {
    "wait_healthy": lambda: kvtier.Client(url).wait_healthy(600),
    "result": lambda: [client := kvtier.Client(url, timeout=600), client.noop().result()],
    "scheduler": lambda: kvtier.SchedulerAdapter(url, **adapter),
    "worker": lambda: kvtier.WorkerAdapter(url, **adapter),
    "register": register,
}
try:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    calls[sys.argv[2]]()
except KeyboardInterrupt:
    print("heard", flush=True)
    os._exit(0)
"""


# proves: docs/python.md#adapters
@pytest.mark.parametrize("call", ["wait_healthy", "result", "scheduler", "worker", "register"])
def test_ctrl_c_interrupts_a_wait(call):
    """During a call that waits for ten minutes."""
    done = python(INTERRUPTED, f"tcp://127.0.0.1:{free_port()}", call)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


def in_a_fork(check):
    """Whether the check holds in a forked child, which may hang."""
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException as error:
            print("in the child:", repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    ended = []
    try:
        wait_until(lambda: ended.extend(os.waitpid(child, os.WNOHANG)) or ended[-2:] != [0, 0] and ended, 60, "the child")
    except BaseException:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise
    return ended[-1] == 0


# proves: docs/python.md#adapters
@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_use_after_fork_fails_at_once(place, mode):
    """The child has the objects without their threads."""
    server = place.server()
    engine = place.engine(server, mode=mode)
    silent = Client(f"tcp://127.0.0.1:{free_port()}", timeout=600)
    pending, prompt = silent.noop(), Prompt(tokens(CHUNK))
    segments = set(glob.glob(f"/dev/shm/lmcache_kv_{os.getpid()}_*"))

    def check():
        client, worker = engine.worker.client, engine.worker
        assert engine.scheduler.is_healthy is worker.is_healthy is client.is_healthy is client.wait_healthy(600) is False
        calls = [
            pending.result, pending.done, pending.cancel, client.noop().result, lambda: client.clear().result(),
            lambda: client.lookup(prompt, CHUNK, "r", "m").result(),
            worker._worker.take_finished, lambda: worker._worker.release_pages([1]), lambda: worker.get_finished(set()),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(KvTierError, match="used after fork"):
                call()
        assert engine.lookup("in the child", tokens(CHUNK)) == 0
        worker.submit_store_request("in the child", engine.op(tokens(CHUNK), 0, CHUNK, [1, 2, 3, 4]))
        assert worker.counters.failed_stores == 1
        client.on_health(print)
        worker.shutdown()
        engine.scheduler.shutdown()

    assert in_a_fork(check)
    silent.close()
    # The parent's objects are unchanged.
    assert set(glob.glob(f"/dev/shm/lmcache_kv_{os.getpid()}_*")) == segments
    assert engine.store("parent", tokens(CHUNK, "parent"), 0, CHUNK, [1, 2, 3, 4])


ENDING = """
import os, signal
from rig import Engine
engine = Engine(sys.argv[1], mode="lmcache_driven")
print(os.getpid(), flush=True)
kind = sys.argv[2]
if kind == "dropped":
    del engine
    import gc, glob
    gc.collect()
    assert not glob.glob(f"/dev/shm/lmcache_kv_{os.getpid()}_*")
elif kind == "exception":
    raise RuntimeError("as a bug has it")
elif kind == "_exit":
    os._exit(0)
elif kind == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def segments_of(done):
    """Returns the segments that a child has left."""
    return glob.glob(f"/dev/shm/lmcache_kv_{int(done.stdout.split()[0])}_*")


# proves: docs/python.md#memory
@pytest.mark.parametrize("kind", ["dropped", "exit", "exception"])
def test_segments_are_removed_with_unclosed_adapter(place, kind):
    """The segments end with the adapter object."""
    done = python(ENDING, place.server().url, kind)
    assert segments_of(done) == [], done.stderr
    assert kind == "exception" or done.returncode == 0, done.stderr


# proves: docs/troubleshoot.md#an-engine-dies
@pytest.mark.parametrize("kind", ["_exit", "killed"])
def test_segments_of_killed_process_are_removed(place, kind):
    """The server removes them once it sees that the process has ended."""
    server = place.server()
    server.expect_trouble("process has ended")
    done = python(ENDING, server.url, kind)
    wait_until(lambda: segments_of(done) == [], 60, "no segments")


# proves: docs/troubleshoot.md#an-engine-dies
def test_orphaned_segments_are_removed_at_next_start(place):
    """Only segments that no process has open or mapped."""
    server = place.server()
    server.expect_trouble("instance|worker|register|process has ended")
    opened = Path(f"/dev/shm/lmcache_kv_{2**22 + 1}_0")
    living = Segment(4096)
    with opened.open("x"):
        code = ENDING.replace("kind = sys", "os.kill(int(sys.argv[3]), 9)\nkind = sys")
        done = python(code, server.url, "_exit", str(server.process.pid))
        assert segments_of(done) != []
        server.kill()
        Segment(4096).unlink()
        assert segments_of(done) == []
        assert opened.exists() and os.path.exists(f"/dev/shm{living.name}")
    living.unlink()
    # It replaces the pool that the killed server has left.
    server.start()


def test_worker_registers_again_with_same_segments(place, fresh):
    """Their names exist as long as the process needs them."""
    server = place.server()
    server.expect_trouble("instance|worker|register")
    engine = place.engine(server, mode="lmcache_driven", heartbeat=600)
    server.kill()
    server.start()
    engine.healthy()
    assert engine.store(fresh(), tokens(CHUNK, "again"), 0, CHUNK, [1, 2, 3, 4])
