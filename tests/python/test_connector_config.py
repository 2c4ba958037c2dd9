"""vLLM's connector: options, identities, keys of pictures, and models that are refused."""

from types import SimpleNamespace

import pytest
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
from kvtier.vllm import KvTierConnector, kinds
from kvtier.vllm.options import Identity, Options
from kvtier.vllm.requests import with_pictures
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole


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
        ({"kvtier.transfer_mode": "x"}, "allowed are auto, engine_driven, lmcache_driven"),
        ({"kvtier.key_mode": "x"}, "allowed are tokens, block_hashes"),
        ({"kvtier.url": 5}, "a text is needed"),
    ]:
        with pytest.raises(ValueError, match=error):
            Options.read(wrong)


def test_identities():
    """Each rank has its piece."""
    server = SimpleNamespace(url="x")

    def of(rank, layers_are_mla=True, **shape):
        made = Identity.of(vllm_config(server, **shape), layers_are_mla, rank)
        return made.world_size, made.worker_id, made.num_kv_readers, made.is_writer

    assert of(1, tensor=2) == (2, 1, 1, True)
    assert [of(rank, tensor=2, mla=True) for rank in (0, 1)] == [(1, 0, 2, True), (1, 0, 2, False)]
    assert of(3, tensor=2, stages=2, mla=True) == (2, 1, 2, False)
    # MLA with layers whose heads are divided among the ranks, such as a draft model's: each rank has its own piece.
    assert of(1, layers_are_mla=False, tensor=2, mla=True) == (2, 1, 1, True)
    staged = Identity.of(vllm_config(server, stages=2), False)
    assert staged.model_name != Identity.of(vllm_config(server, tensor=2), False).model_name, "another cut of the same model"
    for size in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        context = vllm_config(server)
        setattr(context.parallel_config, size, 2)
        with pytest.raises(ValueError, match=size):
            Identity.of(context, False)


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
    for more, error in (({"non_causal": True}, "non_causal is False"), ({"tokens_per_state": 4}, "tokens_per_state is 1")):
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
