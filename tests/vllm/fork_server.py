"""Fork server: a process that has imported vLLM, and forks one API server per engine.

vLLM on CPUs spawns its API server, engine core and worker, and each imports everything again: some 8 s of CPU time
per process. Here they are forked, the core and the worker too. Requests and replies are JSON, one object per line:

  {"start": {"argv": [...], "env": {...}, "log": PATH}}  -> {"pid": N}
  {"poll": N}                                            -> {"status": null while it runs}
"""

import importlib
import json
import os
import sys
import traceback

# What an engine imports, in any of its processes.
MODULES = [
    "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.core", "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama",
]  # fmt: skip


def serve(requests, replies, connectors):
    """Handle requests until the end of the input. `connectors`: further modules to import."""
    for name in [*MODULES, *connectors]:
        importlib.import_module(name)
    # vLLM inspects all modules for its kernels and fails at this one, whose `lib` claims to have every attribute.
    sys.modules.pop("llvmlite.binding.ffi", None)
    reply(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                run(**request["start"])
            reply(replies, {"pid": pid})
        else:
            reply(replies, {"status": poll(request["poll"])})


def reply(replies, value):
    """Write one line."""
    replies.write(json.dumps(value) + "\n")
    replies.flush()


def poll(pid):
    """The child's exit status, or None while it runs. Reaps it."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def run(argv, env, log):
    """The API server, in the child. Never returns."""
    status = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(file, stream)
        os.environ.update(env)
        from vllm import envs
        from vllm.entrypoints.launchers.api_server.entry import main

        # An attribute takes precedence over the environment, where vLLM's CPU platform writes "spawn".
        envs.VLLM_WORKER_MULTIPROC_METHOD = "fork"
        sys.argv = ["api_server", *argv]
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    # Replies have a descriptor of their own: whatever is imported may print.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, replies, sys.argv[1:])
