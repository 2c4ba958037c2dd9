"""vLLM's connector: options, identities, keys of pictures, and models that are refused."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from conftest import CHUNK
from rig import BLOCK, tokens
from vllm_rig import (  # skips without vLLM
    FullAttentionSpec,
    CrossAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cache_config,
    vllm_config,
)

from kvtier import Prompt
from kvtier.transfer import Group
from kvtier.vllm import KvTierConnector, kinds
from kvtier.vllm.options import Identity, Options
from kvtier.vllm.registered import Registered
from kvtier.vllm.requests import with_pictures
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import SinkFullAttentionManager
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole


# proves: docs/compare.md#hits
def test_keys_differ_by_non_token_content():
    """Pictures and sounds are part of the key; equal ones give equal keys."""
    prompt = Prompt(tokens(64, "mm"))

    def key(pictures=(), of=prompt):
        features = [
            SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=20)) for name, offset in pictures
        ]
        return with_pictures(of, SimpleNamespace(mm_features=features), CHUNK)

    keys = [key(), key([("cat", 20)]), key([("dog", 20)]), key([("cat", 21)]), key([("cat", 20), ("dog", 50)])]
    assert len(set(keys)) == len(keys) and all(len(each) == 64 for each in keys)
    assert key([("cat", 20)]) == keys[1]
    # Chunks before the picture are shared, and those of equal pictures, whatever tokens follow in the last chunk.
    assert key([("cat", 20)]).prefix(CHUNK) == prompt.prefix(CHUNK)
    pictured = key([("cat", 4)], of=Prompt(tokens(24, "mm") + tokens(40, "other")))
    assert pictured.prefix(CHUNK) == key([("cat", 4)]).prefix(CHUNK)
    assert pictured.prefix(2 * CHUNK) != key([("cat", 4)]).prefix(2 * CHUNK)


def test_single_placeholder_distinguishes_pictures():
    """An id in a token's place has only 32 bits, so a chunk with a single placeholder needs more of them."""
    replaced = []

    class Recorded:
        def __len__(self):
            return 4 * CHUNK

        def with_identity(self, start, length, identity):
            replaced.append((start, start + length))
            return self

    def ranges(offset, length):
        replaced.clear()
        feature = SimpleNamespace(identifier="x", mm_position=SimpleNamespace(offset=offset, length=length))
        with_pictures(Recorded(), SimpleNamespace(mm_features=[feature]), CHUNK)
        return list(replaced)

    assert ranges(5, 1) == [(0, CHUNK)]
    assert ranges(CHUNK - 1, 2) == [(0, CHUNK), (CHUNK, 2 * CHUNK)]
    assert ranges(CHUNK - 1, 2 * CHUNK + 2) == [(0, CHUNK), (CHUNK, 3 * CHUNK), (3 * CHUNK, 4 * CHUNK)]
    assert ranges(CHUNK, 2 * CHUNK) == [(CHUNK, 2 * CHUNK), (2 * CHUNK, 3 * CHUNK)]
    assert ranges(3 * CHUNK, 100) == [(3 * CHUNK, 4 * CHUNK)]


def test_options():
    """Options have defaults and types, and errors say what is allowed."""
    assert Options.read({"kvtier.timeout": "3", "kvtier.save_decode": "true"}).timeout == 3.0
    assert Options.read({}).wait_for_server is None and Options.read({"kvtier.start": "without"}).wait_for_server is None
    for seconds in (30, "30", "wait 30"):
        assert Options.read({"kvtier.start": seconds}).wait_for_server == 30
    assert Options.read({"kvtier.chunk_tokens": 512}).chunk_tokens == 512
    assert Options.read({}).reset_server is False and Options.read({}).lookup_timeout == 1.0
    for wrong, error in [
        ({"kvtier.tiemout": 1}, "kvtier.tiemout: no such option; did you mean kvtier.timeout"),
        ({"url": "x"}, "^url: no such option; did you mean kvtier.url"),
        ({"kvtier_url": "x"}, "^kvtier_url: no such option; did you mean kvtier.url"),
        ({"lmcache.mp.host": "x"}, "^lmcache.mp.host: .*one of LMCache's connector; .*kvtier.url"),
        ({"zzz": 1}, "^zzz: no such option; allowed are kvtier.url"),
        ({"kvtier.timeout": "soon"}, "a number is needed"),
        ({"kvtier.timeout": 0}, "a positive number"),
        ({"kvtier.timeout": "inf"}, "kvtier.timeout: inf; a positive number"),
        ({"kvtier.heartbeat": 1e300}, "kvtier.heartbeat: 1e.300; a positive number"),
        ({"kvtier.lookup_timeout": "nan"}, "kvtier.lookup_timeout: nan; a positive number"),
        ({"kvtier.start": "later"}, "kvtier.start: 'later'; allowed are without, and seconds"),
        ({"kvtier.start": -1}, "kvtier.start: -1.0; a positive number"),
        ({"kvtier.chunk_tokens": "big"}, "a whole number is needed"),
        ({"kvtier.chunk_tokens": -1}, "allowed are whole numbers from 0 to 65536"),
        ({"kvtier.model_name": "a@b"}, "kvtier.model_name: 'a@b'; allowed is a printable text without @"),
        ({"kvtier.preemption_patience": -1}, "preemption_patience: -1.0; a positive number"),
        ({"kvtier.save_decode": 2}, "allowed are true and false"),
        ({"kvtier.hand_over": 1}, "kvtier.hand_over: 1; allowed are true and false"),
        ({"kvtier.hand_over_timeout": -1}, "kvtier.hand_over_timeout: -1.0; a positive number of seconds is needed: from 0"),
        ({"kvtier.transfer_mode": "x"}, "allowed are auto, engine_driven, lmcache_driven"),
        ({"kvtier.key_mode": "x"}, "allowed are tokens, block_hashes"),
        ({"kvtier.url": 5}, "a text is needed"),
        ({"kvtier.url": "http://localhost:8080"}, "^kvtier.url: 'http://localhost:8080'; allowed are tcp://HOST:PORT and ipc://PATH"),
    ]:
        with pytest.raises(ValueError, match=error):
            Options.read(wrong)


# proves: docs/identity.md#parallelconfig
def test_identities():
    """Each rank has its piece; ranks with the same KV have one, which the first of them stores."""
    server = SimpleNamespace(url="x")

    def of(rank, replicas=1, **shape):
        made = Identity.of(vllm_config(server, **shape), replicas, rank)
        return made.world_size, made.worker_id, made.num_kv_readers, made.is_writer

    assert of(1, tensor=2) == (2, 1, 1, True)
    assert [of(rank, 2, tensor=2) for rank in (0, 1)] == [(1, 0, 2, True), (1, 0, 2, False)]
    assert of(3, 2, tensor=2, stages=2) == (2, 1, 2, False)
    assert [of(rank, 2, tensor=4, stages=2) for rank in (0, 3, 4, 7)] == [
        (4, 0, 2, True), (4, 1, 2, False), (4, 2, 2, True), (4, 3, 2, False)
    ]  # fmt: skip
    staged = Identity.of(vllm_config(server, stages=2))
    assert staged.model_name != Identity.of(vllm_config(server, tensor=2)).model_name, "another cut of the same model"
    for size in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        context = vllm_config(server)
        setattr(context.parallel_config, size, 2)
        with pytest.raises(ValueError, match=size):
            Identity.of(context)


# proves: docs/compare.md#kvtiers-connector-for-vllm
def test_unsupported_models_are_refused(place, monkeypatch):
    """The start fails with the cause."""
    server = place.server()
    for role in KVConnectorRole:
        with pytest.raises(ValueError, match="layer.0 has CrossAttentionSpec"):
            KvTierConnector(vllm_config(server), role, cache_config(["layer.0"], CrossAttentionSpec))
        with pytest.raises(ValueError, match="mamba_cache_mode is align, and layer.0 has none.*--enable-prefix-caching"):
            KvTierConnector(vllm_config(server), role, cache_config(["layer.0"], MambaSpec))
    window = SlidingWindowSpec(block_size=BLOCK, sliding_window=2 * CHUNK)
    mixed = {"layer.0": FullAttentionSpec(block_size=BLOCK), "layer.1": window}
    hybrid = cache_config(["layer.0"])
    spec = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=mixed)
    hybrid.kv_cache_groups.append(SimpleNamespace(layer_names=["layer.1"], kv_cache_spec=spec))
    for role in KVConnectorRole:
        with pytest.raises(ValueError, match="groups with one window; the group of layer.1"):
            KvTierConnector(vllm_config(server), role, hybrid)
    # Releases that do not report failed loads by request.
    hybrid.kv_cache_groups[1].kv_cache_spec = window
    monkeypatch.setattr(kinds, "reports_failed_requests", lambda: False)
    for role in KVConnectorRole:
        with pytest.raises(ValueError, match="from vLLM 0.30 on, and layer.1 has SlidingWindowSpec.*--disable-hybrid-kv-cache-manager"):
            KvTierConnector(vllm_config(server), role, hybrid)
        with pytest.raises(ValueError, match="recurrent states from vLLM 0.30 on, and layer.0 has one"):
            KvTierConnector(vllm_config(server), role, cache_config(["layer.0"], MambaSpec))
    monkeypatch.undo()
    for more, error in (({"non_causal": True}, "non_causal is False"), ({"tokens_per_state": 2}, "tokens_per_state is 1")):
        altered = cache_config(["layer.0"])
        vars(altered.kv_cache_groups[0].kv_cache_spec).update(more)
        with pytest.raises(ValueError, match=error):
            KvTierConnector(vllm_config(server), KVConnectorRole.WORKER, altered)
    layout = cache_config(["layer.0"])
    layout.kv_cache_layout = "LHBNC"
    worker = KvTierConnector(vllm_config(server), KVConnectorRole.WORKER, layout)
    with pytest.raises(ValueError, match="KV layouts"):
        worker.register_kv_caches({})
    worker.shutdown()


def vllm_groups(*specs):
    """A cache of vLLM's own kinds, a layer for each group."""
    groups = [interface.KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return interface.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=BLOCK, kv_cache_layout="LBNHC")


LATENT = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def refusal(cache):
    """Why a cache is not served."""
    with pytest.raises(ValueError) as error:
        kinds.served_groups(cache)
    return str(error.value)


def test_windows_of_latents_are_latents():
    """A page depends on the release."""
    latents = interface.MLAAttentionSpec(**LATENT)
    window = interface.SlidingWindowMLASpec(**LATENT, sliding_window=6)
    groups = kinds.served_groups(vllm_groups(latents, window))
    assert kinds.is_latent(window) and [(group.sliding_window, group.block_tokens) for group in groups] == [(-1, BLOCK), (8, BLOCK)]
    for cache, owns in ((vllm_groups(latents), False), (vllm_groups(latents, window), True)):
        assert kinds.has_latent_windows(group.kv_cache_spec for group in cache.kv_cache_groups) is owns
    compressed = interface.SlidingWindowMLASpec(**LATENT, sliding_window=6, tokens_per_state=2)
    assert "layer.0 (SlidingWindowMLASpec) has 2" in refusal(vllm_groups(compressed))


def test_scratch_memory_is_left_out():
    """Of the groups, and not of vLLM's numbers."""
    ring = interface.CircularBufferSpec(block_size=6, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    compressed = interface.MLAAttentionSpec(**LATENT, tokens_per_state=2)
    cache = vllm_groups(ring, compressed, ring, interface.MLAAttentionSpec(**LATENT))
    groups = kinds.served_groups(cache)
    assert [group.layer_names for group in groups] == [["layer.1"], ["layer.3"]]
    assert kinds.served_numbers(cache) == (1, 3) and kinds.scratch_layers(cache) == {"layer.0", "layer.2"}
    assert kinds.of_served("abcd", (1, 3)) == ["b", "d"]
    # A hit ends between two latents, also where the scheduler does not see that layers of a group are compressed.
    assert kinds.is_compressed(cache) and kinds.is_compressed(vllm_groups(ring, interface.MLAAttentionSpec(**LATENT)))
    assert not kinds.is_compressed(vllm_groups(interface.MLAAttentionSpec(**LATENT)))
    assert kinds.chunk_unit(cache, groups) == BLOCK
    assert "no group of layers that can be cached" in refusal(vllm_groups(ring))


def test_caches_that_cannot_be_right_are_refused():
    """By the layer, the kind and the reason."""
    latents = interface.MLAAttentionSpec(**LATENT)
    replayed = interface.SlidingWindowMLASpec(**LATENT, sliding_window=6, bounded_replay=True)
    assert "layer.1 (SlidingWindowMLASpec) has it: KV behind a hit is not exact" in refusal(vllm_groups(latents, replayed))
    resident = interface.HiSparseResidentSpec(block_size=BLOCK, page_size=64)
    assert "layer.1 has HiSparseResidentSpec, which it leaves out" in refusal(vllm_groups(latents, resident))
    in_host = vllm_groups(latents)
    in_host.kv_cache_groups[0].host_resident = True
    assert "the blocks of layer.0 are in the host's" in refusal(in_host)
    sinks = interface.SinkFullAttentionSpec(**LATENT, sink_len=BLOCK)
    assert "layer.0 has SinkFullAttentionSpec: vLLM reserves no blocks" in refusal(vllm_groups(sinks))
    for tokens in (3, Fraction(1, 2)):
        wrong = interface.MLAAttentionSpec(**LATENT, tokens_per_state=tokens)
        assert f"layer.0 (MLAAttentionSpec) has {tokens}" in refusal(vllm_groups(wrong))
    both = {"layer.0": latents, "other": interface.MLAAttentionSpec(**LATENT, tokens_per_state=2)}
    mixed = vllm_groups(interface.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=both))
    assert "only beside a CircularBufferSpec or SlidingWindowMLASpec; the group of layer.0 has both" in refusal(mixed)


def test_vllm_reserves_no_blocks_for_sinks():
    """Sinks are in the pool's first blocks. Once a manager keeps requests out of these, such models can be served."""
    sinks = interface.SinkFullAttentionSpec(**LATENT, sink_len=BLOCK)
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=BLOCK)
    SinkFullAttentionManager(sinks, block_pool=pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=BLOCK)
    assert [block.block_id for block in pool.get_new_blocks(1)] == [1]


def test_registered_groups_have_one_shape_each():
    """Layers that share block ids may have unlike pages; groups are in the order of their first layers."""
    page, other = torch.zeros(8, 1, BLOCK, 8), torch.zeros(16, 1, BLOCK // 2, 4)
    groups = [Group(["b", "d"], BLOCK), Group(["a", "c"], BLOCK, 2 * BLOCK)]
    found = Registered({"a": page, "b": page, "c": other, "d": other, "shared": page}, groups, 8)
    assert [(group.layer_names, group.block_tokens, group.sliding_window) for group in found.groups] == [
        (["a"], BLOCK, 2 * BLOCK), (["b"], BLOCK, -1), (["c"], BLOCK // 2, 2 * BLOCK), (["d"], BLOCK // 2, -1)
    ]  # fmt: skip
    assert found.blocks([[1, 2], [-1, 3]]) == [[-1, 3], [1, 2], [-1, -1, 6, 7], [2, 3, 4, 5]]
    # K and V planes before the blocks, and a number of blocks that is unknown.
    planes = torch.zeros(2, 16, BLOCK // 2, 1, 4)
    assert Registered({"a": planes}, [Group(["a"], BLOCK)], 8).blocks([[3]]) == [[6, 7]]
    assert Registered({"a": planes}, [Group(["a"], BLOCK)], None).blocks([[3]]) == [[3]]
    with pytest.raises(ValueError, match="a has 24 blocks of 4 tokens, 3 times"):
        Registered({"a": torch.zeros(24, 1, 1, 4)}, [Group(["a"], BLOCK)], 8)
    # Of five dimensions the first may be K and V, also where there are as few blocks.
    few = torch.zeros(2, 4, 1, 2, 4)
    assert Registered({"a": few}, [Group(["a"], BLOCK)], 2).blocks([[1]]) == [[2, 3]]
    for shape in ((12, 1, 1, 4), (4, 1, 1, 4), (2, 12, 1, 2, 4)):
        with pytest.raises(ValueError, match="blocks are no multiple of vLLM's 8"):
            Registered({"a": torch.zeros(shape)}, [Group(["a"], BLOCK)], 8)


# proves: docs/vllm.md#chunk-size
def test_chunk_size_follows_blocks_of_all_groups(place):
    """Alike in scheduler and worker. A server with chunks of only one size must have one that suits, unless one is set."""
    server = place.server()
    older, sizes = place.older(server), {}
    for size, expected in ((BLOCK, CHUNK), (3, 264), (48, 288), (300, 300)):
        config = cache_config(["layer.0"])
        config.kv_cache_groups.append(SimpleNamespace(layer_names=["layer.1"], kv_cache_spec=FullAttentionSpec(block_size=size)))
        for role in KVConnectorRole:
            if expected != CHUNK:
                with pytest.raises(ValueError, match="does not divide the server's chunk of 16 tokens"):
                    KvTierConnector(vllm_config(older), role, config)
            connector = KvTierConnector(vllm_config(server), role, config)
            client = (connector._adapter or connector._scheduling.adapter).client
            sizes.setdefault(size, set()).add((client.chunk_tokens, client.named_chunk_tokens))
            connector.shutdown()
        assert sizes[size] == {(expected, expected)}
        with pytest.raises(ValueError, match=f"chunk_tokens: {2 * size - 1}; allowed are multiples of the engine's block"):
            KvTierConnector(vllm_config(server, **{"kvtier.chunk_tokens": 2 * size - 1}), KVConnectorRole.WORKER, config)
    chosen = KvTierConnector(vllm_config(server, **{"kvtier.chunk_tokens": 12 * BLOCK}), KVConnectorRole.SCHEDULER, cache_config(["layer.0"]))
    assert chosen._scheduling.chunk == 12 * BLOCK
    chosen.shutdown()


def test_speculated_states_are_not_stored(place):
    """A state behind speculated tokens is complete only after sampling; answers without states are stored as the option says."""
    server, kept = place.server(), []
    for spec in (FullAttentionSpec, MambaSpec):
        for speculative in (None, SimpleNamespace(draft_model_config=None)):
            cache = cache_config(["layer.0"], spec)
            cache.hash_block_size = cache.kv_cache_groups[0].kv_cache_spec.block_size = CHUNK
            cache.kv_cache_groups[0].kv_cache_spec.mamba_cache_mode = "align"
            config = vllm_config(server, **{"kvtier.save_decode": True})
            config.speculative_config = speculative
            connector = KvTierConnector(config, KVConnectorRole.SCHEDULER, cache)
            kept.append(connector._scheduling.save_decode)
            connector.shutdown()
    assert kept == [True, True, True, False]
