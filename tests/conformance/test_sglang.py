"""LMCache's connector for SGLang, as it comes, against a server: SGLang 0.5.23's pools, without SGLang."""

import pytest
from kvrig import sglang, torch_cuda
from kvrig.engine import tokens
from kvrig.server import INSTANCE, await_pings

WINDOWS = ["--windowed-clients", "allow"]


# proves: docs/compare.md#sglang
# proves: docs/sglang.md#what-works
@pytest.mark.ours("it needs a GPU, and not only its driver")
def test_kinds_of_cache_on_a_gpu(serve, tmp_path):
    """Full attention, latents, sliding windows and recurrent states of SGLang in PyTorch's CUDA tensors, on the fake
    driver: what is stored comes back byte by byte, whole and behind a prefix of the engine, for the same salt only."""
    server = serve("cuda", flags=WINDOWS)
    torch_cuda.check("kvrig.sglang", [str(tmp_path), server.url], tmp_path)
    status = server.get("/status")[1]
    (gpu,) = status["devices"]["cuda"]["gpus"]
    assert {moved["direction"] for moved in gpu["state"]["moved"] if moved["bytes"]} == {"store", "retrieve"}
    assert gpu["state"]["open_allocations"] == 0


# proves: docs/compare.md#sglang
# proves: docs/sglang.md#what-works
@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("mode", ["engine_shm", "engine_pickle"])
def test_tensors_of_the_engine_in_host_memory(serve, tmp_path, mode, kind):
    """The same where the engine copies by itself, which LMCache does for one group of layers."""
    server = serve(mode)
    engine = sglang.Sglang(server.url, tmp_path, (kind,), gpu=False)
    try:
        sglang.round_trip(engine)
    finally:
        engine.close()


# proves: docs/sglang.md#what-works
@pytest.mark.ours("it forgets its workers, and this connector does not register again")
def test_restarted_server_knows_the_engine(serve, tmp_path):
    """The connector pings but never registers again: a killed server serves it afterwards from what was kept."""
    state = tmp_path / "state"
    server = serve("engine_shm", flags=["--state-dir", str(state), "--instance-id", INSTANCE, "--l1-restore", "on"])
    engine = sglang.Sglang(server.url, tmp_path, ("mha",), gpu=False)
    try:
        sglang.round_trip(engine)
        await_pings(state / INSTANCE)
        server.kill()
        server.start()
        # Prompts of different lengths show a restarted server which chunk size the client has.
        for length in (63, 47):
            assert engine.hit(tokens(length)) == 0
        sglang.round_trip(engine)
    finally:
        engine.close()
