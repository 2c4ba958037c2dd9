"""A device without a file system as a second tier: a file stands for it, and a loop device where the system has one."""

import subprocess

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


# proves: docs/compare.md#other-tiers
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


@pytest.fixture(name="block_device")
def _block_device(tmp_path):
    """A block device of 64 MiB, on a file."""
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    command = ["losetup", "--find", "--show", str(image)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        pytest.skip(f"no loop device: {error}")
    if done.returncode:
        pytest.skip(f"no loop device, which needs root and the kernel's module: {done.stderr.strip()}")
    device = done.stdout.strip()
    yield device
    subprocess.run(["losetup", "--detach", device], check=True, timeout=60)


def test_block_device_survives_the_server_and_is_refused_with_a_file_system(serve, engines, block_device, tmp_path):
    """A real one: its size, O_DIRECT, and exclusive use. A mounted one is refused even if forced."""
    server = serve(flags=raw(block_device))
    before = engines(server)
    tiers.store(before, 1)
    stored(server, 4)
    with pytest.raises(RuntimeError, match=r"busy|in use"):
        serve(flags=raw(block_device))
    server.stop()
    server.expect_trouble(r"instance")
    server.start()
    after = engines(server)
    before.close()
    assert tiers.recall(after, 1) == 64
    server.stop()
    subprocess.run(["mkfs.ext4", "-q", "-F", block_device], check=True, timeout=60)
    with pytest.raises(RuntimeError, match=r"an ext2, ext3 or ext4 file system"):
        serve(flags=raw(block_device))
    place = tmp_path / "mounted"
    place.mkdir()
    if subprocess.run(["mount", block_device, str(place)], capture_output=True, timeout=60).returncode:
        pytest.skip("the last part: this user may not mount")
    try:
        with pytest.raises(RuntimeError, match=r"busy|in use"):
            serve(flags=raw(block_device, force=True))
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=60)
