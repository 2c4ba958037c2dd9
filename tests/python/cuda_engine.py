"""An engine with kvtier's adapters and PyTorch's KV tensors on a GPU: `python -m cuda_engine URL...`.

For `kvrig.torch_cuda.check`.
"""

import sys

import torch
from kvrig.torch_cuda import LAYOUTS, OnGpu, script
from kvrig.waiting import wait_until
from rig import TIMEOUT, Engine, tokens


def recorded():
    """Records an event after the stream's queued work, as kvtier's connector does."""
    event = torch.cuda.Event(interprocess=True)
    event.record()
    return event


def run(url, layout):
    """Stores, looks up, retrieves into other blocks; then stores after the GPU's queued work."""
    engine = Engine(url, mode="auto", layout=layout, model=f"models/{layout}", register=False)
    gpu = OnGpu(engine.tensors)
    named = {f"layer.{i}": tensor for i, tensor in enumerate(gpu.tensors)}
    engine.worker.register_kv_caches(named, kv_layout=engine.layout.hints["kv_layout"])
    assert engine.worker.on_cuda
    assert engine.worker.transport == "server"

    prompt, blocks, target = tokens(48, "cuda"), list(range(1, 13)), list(range(40, 52))
    expected, rest = engine.read(blocks), engine.read(range(52, 64))
    engine.worker.submit_store_request("one", engine.op(prompt, 0, 48, blocks), recorded())
    engine.finish_stores()
    assert engine.worker.counters.stores == 1
    assert engine.lookup("two", prompt) == 48
    op = engine.op(prompt, 0, 48, target, skip_first_n_tokens=9)
    kept = engine.read(target[:2])
    engine.worker.submit_retrieve_request("two", op, recorded())
    assert engine.finish_retrieve("two") == set()
    gpu.pull()
    assert engine.has(target[2:], [layer[2:] for layer in expected])
    assert engine.has(target[:2], kept)
    assert engine.has(range(52, 64), rest)

    script("hold kernel")
    gpu.overwrite()
    late = tokens(48, "late")
    engine.worker.submit_store_request("three", engine.op(late, 0, 48, blocks), recorded())
    assert engine.lookup("four", prompt) == 48
    engine.worker.get_finished(())
    assert engine.worker.counters.stores == 1, "stored before the GPU had got there"
    script("release")
    wait_until(lambda: engine.worker.get_finished(()) and engine.worker.counters.stores == 2, TIMEOUT, "the store")
    assert engine.lookup("five", late) == 48
    engine.worker.submit_retrieve_request("five", engine.op(late, 0, 48, target), recorded())
    assert engine.finish_retrieve("five") == set()
    gpu.pull()
    assert all((layer == 0).all() for layer in engine.read(target))
    engine.close()


if __name__ == "__main__":
    for url in sys.argv[1:]:
        for layout in LAYOUTS:
            run(url, layout)
    print("done")
