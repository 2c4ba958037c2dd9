"""A device without a file system as a second tier: a file stands for it."""

import pytest
from kvrig import tiers
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("LMCache's type of this name needs an extension that no package of it has")


RECORDS = 2048


def raw(path, **keys):
    """The flags of a tier of 8 MiB."""
    return tiers.adapter("raw_block", device_path=str(path), max_capacity_gb=RECORDS * 4096 / 2**30, slot_bytes=4096, **keys)


def stored(server, count):
    """Waits until the tier has this number of objects."""
    wait_until(lambda: tiers.tier(server)["objects"] == count, 60, f"{count} objects on the device")


@pytest.mark.parametrize("options", [{}, {"use_odirect": False, "io_engine": "posix", "fsync": True}], ids=["direct", "cached"])
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_device_survives_the_server(serve, engines, tmp_path, options, end):
    """Stopped or killed and started again: all hits of both tenants, counted, and none of the other's."""
    server = serve(flags=raw(tmp_path / "device", **options))
    server.expect_trouble(r"instance")
    before = engines(server)
    tiers.store(before, 1)
    tiers.store(before, 2, salt="alice")
    if end == "stopped":
        server.stop()  # what still waits is stored first
    else:
        stored(server, 8)
        server.kill()
    server.start()
    after = engines(server)
    before.close()
    assert tiers.recall(after, 1) == 64
    assert tiers.recall(after, 2, salt="alice") == 64
    assert tiers.recall(after, 2) == 0
    assert tiers.recall(after, 1, salt="alice") == 0
    recovery = tiers.adopted(server)
    assert (recovery["objects"], recovery["foreign"]) == (8, 0)
    assert tiers.tier(server)["damaged_objects"] == 0


def test_damaged_bytes_are_a_miss_and_are_stored_again(serve, engines, tmp_path):
    """Each byte behind the table changed: no hit, no wrong byte; the next store writes the objects again."""
    device = tmp_path / "device"
    server = serve(flags=raw(device))
    engine = engines(server)
    tiers.store(engine, 1)
    stored(server, 4)
    server.stop()
    server.expect_trouble(r"not what was stored|instance|corrupt")
    data_at = (8192 + RECORDS * 4096 + (1 << 20) - 1) >> 20 << 20
    with open(device, "r+b") as file:
        file.seek(data_at)
        found = file.read()
        assert any(found), "the objects are not where the test looks for them"
        file.seek(data_at)
        file.write(bytes(byte ^ 1 for byte in found))
    server.start()
    after = engines(server)
    engine.close()
    assert tiers.recall(after, 1) == 0
    tiers.store(after, 1)
    tiers.forget(after)
    assert tiers.recall(after, 1) == 64


def test_device_of_another_server_is_refused(serve, tmp_path):
    """The second one names the device and ends."""
    serve(flags=raw(tmp_path / "device"))
    with pytest.raises(RuntimeError, match=r"in use by another server"):
        serve(flags=raw(tmp_path / "device"))
