"""Replaced pictures, adapters and weights: no hit across the change, and no caching if it cannot be detected."""

import hashlib
import logging
import os
import shutil
from types import SimpleNamespace

import pytest
from kvrig.waiting import wait_until
from rig import tokens

pytest.importorskip("vllm")

from conftest import CHUNK  # noqa: E402
from kvtier import files  # noqa: E402
from kvtier.vllm.contents import Contents  # noqa: E402
from kvtier.vllm.resets import PoolResets  # noqa: E402
from vllm_rig import Vllm, request, vllm_config  # noqa: E402

HASH = hashlib.sha256(b"a picture").hexdigest()


def contents(cache_gb=4.0, prefix_caching=True, lora=None, has_encoders=False, **pictures):
    """Returns the contents of an engine with these options."""
    config = vllm_config(SimpleNamespace(url="x"))
    config.ec_transfer_config = SimpleNamespace() if has_encoders else None
    config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=cache_gb, **pictures)
    config.cache_config = SimpleNamespace(enable_prefix_caching=prefix_caching)
    config.lora_config = lora and SimpleNamespace(**lora)
    return Contents(config)


def pictured(*names, salt=None, **more):
    """Returns a request with these pictures."""
    features = [SimpleNamespace(identifier=name, **more) for name in names]
    return SimpleNamespace(cache_salt=salt, mm_features=features, lora_request=None)


# proves: docs/identity.md#the-digest-of-kvtierconnector
@pytest.mark.parametrize("options", [{}, {"cache_gb": 0}, {"prefix_caching": False}], ids=["both", "prefix", "processor"])
def test_hashed_pictures_are_cached(options):
    """Either of vLLM's two caches makes it hash them; for towers with adapters the adapter's name comes first."""
    known = contents(**options)
    assert known.are_known(pictured(HASH, HASH[::-1]))
    assert known.are_known(pictured(hashlib.sha512(b"x").hexdigest()))
    assert known.are_known(pictured("adapter:" + HASH, mm_hash=HASH))
    assert known.are_known(pictured())


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_counted_pictures_are_not_cached(caplog):
    """Without both caches no identifier is a hash, even if it looks like one: vLLM hashes options with the number."""
    caplog.set_level(logging.WARNING)
    unknown = contents(cache_gb=0, prefix_caching=False)
    for name in ("renderer0-mm-1-image-0", HASH, "mine"):
        for salt in (None, "alice"):
            assert not unknown.are_known(pictured(name, salt=salt))
    assert unknown.are_known(pictured()), "text is"
    (record,) = caplog.records
    assert "requests with pictures are not cached" in record.message
    # From a renderer with another configuration.
    assert not contents().are_known(pictured("renderer0-mm-1-image-0", salt="alice"))
    assert not contents().are_known(pictured("renderer-1-mm-12-video-3", salt="alice"))


# proves: docs/identity.md#the-digest-of-kvtierconnector
# proves: docs/identity.md#vllmconfig
def test_embeddings_that_may_be_missing_are_not_cached(caplog):
    """The hash covers only the rest: sizes, which pictures share."""
    caplog.set_level(logging.WARNING)
    assert contents(enable_mm_embeds=True).are_known(pictured(HASH))
    assert contents(has_encoders=True).are_known(pictured(HASH))
    unknown = contents(enable_mm_embeds=True, has_encoders=True)
    assert not unknown.are_known(pictured(HASH)) and unknown.are_known(pictured())
    assert "--enable-mm-embeds" in caplog.text


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_client_chosen_picture_uuid_is_scoped_to_salt(caplog):
    """Requests without a salt are one tenant."""
    caplog.set_level(logging.WARNING)
    known = contents()
    assert known.are_known(pictured("cat", salt="alice"))
    for name in ("cat", "", HASH[:-1], HASH.upper(), HASH + "\n"):
        assert not known.are_known(pictured(HASH, name))
    assert len(caplog.records) == 1 and "cache_salt" in caplog.text


def adapter(path, name="a", **more):
    """Returns a request's adapter."""
    return SimpleNamespace(lora_name=name, lora_path=str(path), **more)


@pytest.fixture
def lora(tmp_path):
    """Creates an adapter's directory."""
    directory = tmp_path / "lora"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


def started_after(made, directory):
    """Sets the engine's start after the adapter's creation, since file clocks are coarse."""
    made._started = files.newest_change(str(directory)) + 1
    return made


def change(directory, how):
    """Repeats the action until the file clock has advanced."""
    before = files.newest_change(str(directory))
    while files.newest_change(str(directory)) <= before:
        how()


def known(made, lora):
    """The adapter's identity; waits until it is known."""
    found = []
    wait_until(lambda: found.append(made.adapter(lora)) or found[-1] is not None, 60, "the adapter's digest")
    return found[-1]


# proves: docs/identity.md#loraconfig
# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_adapters_are_identified_by_content(lora):
    """And by the options for their use: not by their name, path or times, which differ between hosts."""
    one = started_after(contents(), lora)
    identity = one.adapter(adapter(lora))
    assert identity == one.adapter(adapter(lora)) and one.are_known(
        SimpleNamespace(cache_salt=None, mm_features=[], lora_request=adapter(lora))
    )
    copy = lora.parent / "copy"
    shutil.copytree(lora, copy)
    os.utime(copy / "adapter_model.safetensors", ns=(1, 1))
    later = started_after(contents(), copy)
    assert later.adapter(adapter(copy)) == later.adapter(adapter(copy, "b")) == identity
    others = [later.adapter(adapter(copy, is_3d_lora_weight=True))]
    for options in ({"lora_dtype": "float16"}, {"target_modules": ["q_proj"]}, {"enable_tower_connector_lora": True}):
        others.append(started_after(contents(lora=options), copy).adapter(adapter(copy)))
    for name, content in (("adapter_model.safetensors", b"WEIGHTS"), ("adapter_model.safetensors", b"weights2"), ("adapter_config.json", b"{ }")):
        change(copy, lambda name=name, content=content: (copy / name).write_bytes(content))
        others.append(started_after(contents(), copy).adapter(adapter(copy)))
    (copy / "adapter_config.json").rename(copy / "other.json")
    others.append(started_after(contents(), copy).adapter(adapter(copy)))
    assert None not in others and len({identity, *others}) == 1 + len(others)


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_each_byte_of_large_adapters_counts(lora, monkeypatch):
    """They are read on a thread, and their requests are not cached until that has ended; beyond a size samples and times suffice."""
    weights, copy = lora / "adapter_model.safetensors", lora.parent / "copy"
    weights.write_bytes(bytes(6 << 20))
    made = started_after(contents(), lora)
    with made._digests._one_at_a_time:
        assert [made.adapter(adapter(lora)) for _ in range(3)] == [None] * 3
    identity = known(made, adapter(lora))
    shutil.copytree(lora, copy)
    assert known(started_after(contents(), copy), adapter(copy)) == identity
    with (copy / "adapter_model.safetensors").open("r+b") as file:
        file.seek((3 << 20) + 12345)
        file.write(b"x")
    assert known(started_after(contents(), copy), adapter(copy)) != identity
    monkeypatch.setattr(files, "_MAX_READ", 1 << 20)
    assert started_after(contents(), copy).adapter(adapter(copy)) != started_after(contents(), lora).adapter(adapter(lora))
    assert made.adapter(adapter(lora)) is not None


def test_adapters_that_cannot_be_read_are_not_cached(lora, monkeypatch, caplog):
    """Nor those that change while they are read."""
    caplog.set_level(logging.WARNING)
    weights = lora / "adapter_model.safetensors"

    def fails(paths):
        raise OSError("broken disk")

    monkeypatch.setattr(files, "_digest", fails)
    made = started_after(contents(), lora)
    assert made.adapter(adapter(lora)) is None and made.adapter(adapter(lora)) is None
    assert "broken disk" in caplog.text
    monkeypatch.setattr(files, "_digest", lambda paths: change(lora, lambda: weights.write_bytes(b"WEIGHTS")) or "digest")
    assert started_after(contents(), lora).adapter(adapter(lora, "b")) is None
    assert "changed while it was read" in caplog.text


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_adapters_of_one_number_are_not_cached(lora, caplog):
    """vLLM keeps the first that it has read under a number, whatever path a later request has."""
    caplog.set_level(logging.WARNING)
    other = lora.parent / "other"
    shutil.copytree(lora, other)
    made = started_after(contents(), other)
    assert made.adapter(adapter(lora, lora_int_id=1)) is not None
    assert made.adapter(adapter(other, "b", lora_int_id=2)) is not None
    assert made.adapter(adapter(other, "b", lora_int_id=1)) is None
    assert made.adapter(adapter(lora, lora_int_id=1)) is None
    assert made.adapter(adapter(other, "b", lora_int_id=2)) is not None
    assert "number 1 is that of another path too" in caplog.text


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_hosts_share_adapters_of_equal_content(place, engines, lora):
    """Two engines with folders of their own, and none with other weights or without the adapter."""
    server, prompt = place.server(), tokens(CHUNK + 1, "adapters")
    first, second = engines(server), engines(server, seed=7)
    copy, other = lora.parent / "copy", lora.parent / "other"
    for folder in (copy, other):
        shutil.copytree(lora, folder)
    (other / "adapter_model.safetensors").write_bytes(b"WEIGHTS")
    for engine in (first, second):
        for folder in (lora, copy, other):
            started_after(engine.scheduler._scheduling.keys._contents, folder)
    first.prefill(request("a", prompt, lora_request=adapter(lora, lora_int_id=1, adapter_id=1)), range(1, 6))
    first.wait_for_stores()
    found = {
        name: second.match(request(name, prompt, lora_request=used))[0]
        for name, used in {
            "copy": adapter(copy, "b", lora_int_id=3), "other": adapter(other, lora_int_id=4), "base": None
        }.items()
    }  # fmt: skip
    assert found == {"copy": CHUNK, "other": 0, "base": 0}


def test_adapters_loaded_in_place_leave_their_number_unknown(lora):
    """vLLM then computes with what it loaded last, also for requests with the first path."""
    other = lora.parent / "other"
    shutil.copytree(lora, other)
    made = started_after(contents(), other)
    assert made.adapter(adapter(lora, lora_int_id=1)) is not None
    assert made.adapter(adapter(other, "b", lora_int_id=1, load_inplace=True)) is None
    assert made.adapter(adapter(lora, lora_int_id=1)) is None
    assert made.adapter(adapter(lora, lora_int_id=2)) is not None


def test_requests_without_cache_count_for_adapters(place, engines, lora):
    """A short one makes vLLM read the adapter too."""
    engine, other = engines(place.server()), lora.parent / "other"
    shutil.copytree(lora, other)
    started_after(engine.scheduler._scheduling.keys._contents, other)
    prompt = tokens(CHUNK + 1, "numbers")
    short = request("short", prompt[: CHUNK - 1], lora_request=adapter(lora, lora_int_id=1, adapter_id=1))
    assert engine.match(short) == (0, False)
    later = request("later", prompt, lora_request=adapter(other, "b", lora_int_id=1, adapter_id=1))
    assert engine.match(later) == (0, False)
    engine.allocate(later, range(1, 6), 0)
    assert engine.step(new=[(later, range(1, 6), 0, later.num_tokens)]).metadata.stores == []


@pytest.mark.parametrize("by", ["folders", "links"])
def test_adapters_that_others_replace_whole_are_not_cached(tmp_path, by):
    """All files are older than the engine, and so is the folder that they are in."""
    for name, weights in (("now", b"weights"), ("next", b"WEIGHTS")):
        (tmp_path / name / "lora").mkdir(parents=True)
        (tmp_path / name / "lora" / "adapter_model.safetensors").write_bytes(weights)
    path = tmp_path / "now" / "lora"
    if by == "links":
        (tmp_path / "current").symlink_to("now")
        path = tmp_path / "link"
        path.symlink_to("current/lora")
    made = started_after(contents(), max(path, tmp_path / "next" / "lora", key=lambda folder: files.newest_change(str(folder))))
    assert made.adapter(adapter(path, lora_int_id=1)) is not None
    if by == "folders":
        (tmp_path / "now").rename(tmp_path / "old")
        (tmp_path / "next").rename(tmp_path / "now")
    else:
        (tmp_path / "other").symlink_to("next")
        (tmp_path / "other").rename(tmp_path / "current")
    assert made.adapter(adapter(path, lora_int_id=1)) is None


# proves: docs/identity.md#the-digest-of-kvtierconnector
@pytest.mark.parametrize(
    "how",
    [
        lambda lora: (lora / "adapter_model.safetensors").write_bytes(b"WEIGHTS"),
        lambda lora: (lora / "new").write_bytes(b"") or (lora / "new").rename(lora / "adapter_model.safetensors"),
        lambda lora: (lora / "adapter_model.safetensors").touch(),
    ],
    ids=["written", "moved in place", "touched"],
)
def test_changed_adapters_are_not_cached(lora, how, caplog):
    """vLLM may have read either version: it does not report when it reads them."""
    caplog.set_level(logging.WARNING)
    made = started_after(contents(), lora)
    assert made.adapter(adapter(lora)) is not None
    change(lora, lambda: how(lora))
    for _ in range(2):
        assert made.adapter(adapter(lora)) is None
    (record,) = caplog.records
    assert "LoRA adapter a are not cached" in record.message and "has changed since this engine started" in record.message


def test_adapters_behind_redirected_link_are_not_cached(lora):
    """The files of both targets are old."""
    link, other = lora.parent / "current", lora.parent / "other"
    other.mkdir()
    link.symlink_to(lora)

    def point_elsewhere():
        link.unlink()
        link.symlink_to(other)

    made = started_after(contents(), link)
    started_after(made, link)
    assert made.adapter(adapter(link)) is not None
    change(link, point_elsewhere)
    assert made.adapter(adapter(link)) is None


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_adapters_in_place_or_missing_are_not_cached(lora, caplog):
    """vLLM reads adapters loaded in place again at every step."""
    caplog.set_level(logging.WARNING)
    made = started_after(contents(), lora)
    assert made.adapter(adapter(lora, load_inplace=True)) is None
    (lora.parent / "empty").mkdir()
    assert started_after(contents(), lora.parent / "empty").adapter(adapter(lora.parent / "empty", "e")) is None
    assert made.adapter(adapter(lora / "missing", "b")) is None
    assert made.adapter(adapter("missing/adapter", "c")) is None
    assert not made.are_known(SimpleNamespace(cache_salt="s", mm_features=[], lora_request=adapter(lora, load_inplace=True)))
    assert len(caplog.records) == 4


def test_unknown_contents_are_not_stored_or_looked_up(place):
    """In all steps of an engine."""
    engine = Vllm(place.server())
    prompt = tokens(CHUNK + 1, "unknown")
    feature = SimpleNamespace(
        identifier="renderer0-mm-1-image-0", mm_position=SimpleNamespace(offset=1, length=4), modality="image"
    )
    req = request("a", prompt, mm_features=[feature])
    assert engine.match(req) == (0, False)
    engine.allocate(req, range(1, 6), 0)
    assert engine.step(new=[(req, range(1, 6), 0, req.num_tokens)]).metadata.stores == []
    assert engine.match(request("b", prompt, mm_features=[feature])) == (0, False)
    engine.close()


def vllm_pool(count=4):
    """Returns vLLM's own block pool."""
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_gpu_blocks=count, enable_caching=True, hash_block_size=16)


# proves: docs/identity.md#the-digest-of-kvtierconnector
def test_resets_of_vllm_pool_are_detected():
    """Each reset is reported once; a failed reset is not."""
    pool = vllm_pool()
    resets = PoolResets(pool)
    assert not resets.take()
    assert pool.reset_prefix_cache()
    assert resets.take() and not resets.take()
    held = pool.get_new_blocks(1)
    assert not pool.reset_prefix_cache() and not resets.take()
    pool.free_blocks(held)
    assert pool.reset_prefix_cache() and pool.reset_prefix_cache()
    assert resets.take() and not resets.take()


def test_pool_without_detectable_resets_is_logged(caplog):
    """As in a future release."""
    caplog.set_level(logging.WARNING)
    assert not PoolResets(SimpleNamespace()).take()
    assert "prefix cache cannot be detected" in caplog.text


# proves: docs/identity.md#the-digest-of-kvtierconnector
@pytest.mark.parametrize("follows", [True, False])
def test_reset_without_connector_renews_keys(place, follows):
    """As after an update of the weights, unless kvtier.follow_resets is false."""
    engine = Vllm(place.server(), **{"kvtier.follow_resets": follows, "kvtier.reset_server": False})
    pool, prompt = vllm_pool(32), tokens(CHUNK + 1, "plain reset")
    engine.scheduler.bind_gpu_block_pool(pool)
    blocks = pool.get_new_blocks(5)
    engine.prefill(request("a", prompt), [block.block_id for block in blocks])
    engine.wait_for_stores()
    assert engine.match(request("b", prompt)) == (CHUNK, True)
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert engine.match(request("c", prompt)) == ((0, False) if follows else (CHUNK, True))
    if follows:
        engine.prefill(request("d", prompt), [block.block_id for block in pool.get_new_blocks(5)])
        engine.wait_for_stores()
        assert engine.match(request("e", prompt)) == (CHUNK, True)
    engine.close()
