//! Crashes at each step, and records that are not what was written.

use kvtier_memory::FileError;
use rustix::io::Errno;

use super::*;
use crate::io::{FileOperation as _, FileStep};

/// The device as it is now, as another device.
fn copy(device: &Device) -> Device {
    let copy = Device::new(|options| {
        *options = RawOptions {
            device_path: options.device_path.clone(),
            ..device.options.clone()
        }
    });
    std::fs::copy(device.path(), copy.path()).unwrap();
    copy
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn replacement_is_old_or_new_at_each_step() {
    let (device, memory) = (
        Device::new(|options| options.capacity_bytes = 1 << 20),
        Memory::new(1 << 22),
    );
    let (old, new) = (object(1, 9000), object(1, 20_000));
    assert_eq!(old.key, new.key);
    let adapter = device.open();
    store(&adapter, &memory, &old).await.unwrap();
    let before = copy(&device);
    store(&adapter, &memory, &new).await.unwrap();
    adapter.close().await;
    let (record, at) = device.place(&new.key);
    let bytes = content(&new);

    // The bytes without a record, and a part of them.
    for len in [5000, bytes.len()] {
        let crashed = copy(&before);
        crashed.file().write_all_at(&bytes[..len], at).unwrap();
        let adapter = crashed.open();
        assert_eq!(load(&adapter, &memory, &old).await, Ok(()));
        assert_eq!(
            load(&adapter, &memory, &new).await,
            Err(ErrorKind::NotFound)
        );
        adapter.close().await;
    }
    let superblock = device.superblock();
    let block = device.block(superblock.geometry.record_at(record.number));
    // Both records: the later one counts, the other is erased. Without its bytes, as after a loss of power, it is damaged.
    for has_bytes in [true, false] {
        let crashed = copy(&before);
        let file = crashed.file();
        file.write_all_at(&block, superblock.geometry.record_at(record.number))
            .unwrap();
        if has_bytes {
            file.write_all_at(&bytes, at).unwrap();
        }
        assert_eq!(crashed.records().len(), 2);
        let adapter = crashed.open();
        let recovered = adapter.recover(&|_| true).await.unwrap();
        assert_eq!((recovered.objects, recovered.removed), (1, 1));
        assert_eq!(
            load(&adapter, &memory, &old).await,
            Err(ErrorKind::NotFound)
        );
        if has_bytes {
            assert_eq!(load(&adapter, &memory, &new).await, Ok(()))
        } else {
            assert_eq!(load(&adapter, &memory, &new).await, Err(ErrorKind::Corrupt));
            assert!(!is_there(&adapter, &new).await);
            // It is written again, although the record has its checksum.
            assert!(matches!(
                store(&adapter, &memory, &new).await,
                Ok(Stored::Written(_))
            ));
            assert_eq!(load(&adapter, &memory, &new).await, Ok(()));
        }
        adapter.close().await;
        assert_eq!(crashed.records().len(), 1);
    }
}

#[tokio::test]
async fn records_of_the_same_space_are_never_both_used() {
    let (device, memory) = (
        Device::new(|options| options.capacity_bytes = 1 << 20),
        Memory::new(1 << 22),
    );
    let (first, second) = (object(1, 30_000), object(2, 40_000));
    let adapter = device.open();
    store(&adapter, &memory, &first).await.unwrap();
    let (stale, _) = device.place(&first.key);
    let block = device.block(device.superblock().geometry.record_at(stale.number));
    adapter.delete(vec![first.key.clone()]).await[0]
        .as_ref()
        .unwrap();
    // One that a loss of power brought back, in another place of the table.
    store(&adapter, &memory, &second).await.unwrap();
    adapter.close().await;
    let mut other = stale.clone();
    other.number = 9;
    let superblock = device.superblock();
    let moved = other.encode(&superblock.id).unwrap();
    for (number, block) in [(8, &block), (9, &moved)] {
        device
            .file()
            .write_all_at(block, superblock.geometry.record_at(number))
            .unwrap();
    }
    // Of these, the first has another place's number.
    assert_eq!(device.records().len(), 2);
    let adapter = device.open();
    assert_eq!(load(&adapter, &memory, &second).await, Ok(()));
    assert_eq!(
        load(&adapter, &memory, &first).await,
        Err(ErrorKind::NotFound)
    );
    assert_eq!(adapter.recover(&|_| true).await.unwrap().objects, 1);
    adapter.close().await;
    assert_eq!(device.records().len(), 1);
}

#[tokio::test]
async fn no_damaged_record_is_used() {
    let (device, memory) = (
        Device::new(|options| options.capacity_bytes = 1 << 20),
        Memory::new(1 << 22),
    );
    let one = object(1, 10_000);
    let adapter = device.open();
    store(&adapter, &memory, &one).await.unwrap();
    adapter.close().await;
    let (record, _) = device.place(&one.key);
    let superblock = device.superblock();
    let at = superblock.geometry.record_at(record.number);
    let block = device.block(at);
    for byte in (0..200).chain([4000, 4063, 4064, 4095]) {
        let mut damaged = block.clone();
        damaged[byte] ^= 1;
        assert_eq!(
            RawRecord::decode(&damaged, record.number, &superblock),
            None,
            "{byte}"
        );
    }
    // Not that of another device or format either.
    let other = Superblock {
        id: [9; 32],
        ..superblock
    };
    assert_eq!(RawRecord::decode(&block, record.number, &other), None);
    assert_eq!(
        RawRecord::decode(&block, record.number + 1, &superblock),
        None
    );
    // Whole records with impossible places.
    let end = superblock.geometry.data_bytes;
    for change in [
        |record: &mut RawRecord, end: u64| record.offset = end - 4096,
        |record: &mut RawRecord, _| record.offset = 1,
        |record: &mut RawRecord, _| record.len = u64::MAX,
        |record: &mut RawRecord, _| record.offset = u64::MAX - 4095,
    ] {
        let mut impossible = record.clone();
        change(&mut impossible, end);
        let block = impossible.encode(&superblock.id).unwrap();
        assert_eq!(
            RawRecord::decode(&block, record.number, &superblock),
            None,
            "{impossible:?}"
        );
    }
    assert_eq!(
        RawRecord::decode(&block, record.number, &superblock),
        Some(record.clone())
    );
    device.file().write_all_at(&[0xff; 4096], at).unwrap();
    let adapter = device.open();
    assert!(!is_there(&adapter, &one).await);
    store(&adapter, &memory, &one).await.unwrap();
    assert_eq!(load(&adapter, &memory, &one).await, Ok(()));
    adapter.close().await;
}

/// A record that was erased and not synced may be there again after a loss of power. Its number is below those of all later
/// stores only if the next run has not begun to count before what it found.
// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn erasures_are_synced_before_numbers_are_given_again() {
    let memory = Memory::new(1 << 20);
    let syncs = |adapter: &RawBlockAdapter| adapter.objects.device.syncs.load(Ordering::Relaxed);
    for fsync in [false, true] {
        let device = Device::new(|options| options.fsync = fsync);
        let adapter = device.open();
        adapter.recover(&|_| true).await.unwrap();
        assert_eq!(syncs(&adapter), 1);
        let one = object(1, 9000);
        store(&adapter, &memory, &one).await.unwrap();
        assert_eq!(syncs(&adapter), 1 + u64::from(fsync));
        let deleted = adapter.delete(vec![one.key.clone()]).await;
        assert_eq!(deleted, [Ok(true)]);
        assert_eq!(syncs(&adapter), 1 + 2 * u64::from(fsync));
        // Nothing was erased.
        assert_eq!(adapter.delete(vec![one.key]).await, [Ok(false)]);
        assert_eq!(syncs(&adapter), 1 + 2 * u64::from(fsync));
        adapter.close().await;
    }
}

#[tokio::test]
async fn damaged_object_gives_its_space_back() {
    let (device, memory) = (Device::new(|_| {}), Memory::new(1 << 20));
    let adapter = device.open();
    adapter.recover(&|_| true).await.unwrap();
    let free = || {
        let usage = adapter.objects.index.usage();
        (usage.free_bytes, usage.free_records, usage.objects)
    };
    let before = free();
    let one = object(1, 9000);
    store(&adapter, &memory, &one).await.unwrap();
    let (_, at) = device.place(&one.key);
    device.file().write_all_at(b"other", at + 5000).unwrap();
    assert_eq!(load(&adapter, &memory, &one).await, Err(ErrorKind::Corrupt));
    assert_eq!(free(), before);
    assert_eq!(device.records(), []);
    adapter.close().await;
}

#[tokio::test]
async fn table_that_could_not_be_read_is_read_again() {
    let (device, memory) = (Device::new(|_| {}), Memory::new(1 << 20));
    let one = object(1, 9000);
    let adapter = device.open();
    store(&adapter, &memory, &one).await.unwrap();
    adapter.close().await;
    let adapter = device.open();
    adapter.recover(&|_| true).await.unwrap();
    // As if the device had not answered.
    let index = &adapter.objects.index;
    index.remove(&one.key).unwrap();
    let failed = L2Error::new(ErrorKind::Unavailable, "no answer");
    let failed = ScanState::Failed(failed, std::time::Instant::now());
    adapter.scanner.state.send_replace(failed);
    assert_eq!(adapter.status()["is_healthy"], false);
    assert_eq!(
        store(&adapter, &memory, &one).await.unwrap_err().kind(),
        ErrorKind::Unavailable
    );
    adapter.check().await;
    assert_eq!(load(&adapter, &memory, &one).await, Ok(()));
    assert_eq!(adapter.status()["is_healthy"], true);
    adapter.close().await;
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn file_that_is_cut_costs_what_was_cut() {
    let (device, memory) = (Device::new(|_| {}), Memory::new(1 << 20));
    let (one, other) = (object(1, 100_000), object(2, 100_000));
    for is_open in [true, false] {
        let adapter = device.open();
        for object in [&one, &other] {
            store(&adapter, &memory, object).await.unwrap();
        }
        let (first, second) = (device.place(&one.key).1, device.place(&other.key).1);
        let (kept, lost) = if first < second {
            (&one, &other)
        } else {
            (&other, &one)
        };
        let cut = |bytes| device.file().set_len(first.max(second) + bytes).unwrap();
        let adapter = if is_open {
            cut(50_000);
            adapter
        } else {
            adapter.close().await;
            cut(50_000);
            device.open()
        };
        assert_eq!(load(&adapter, &memory, kept).await, Ok(()));
        assert_eq!(load(&adapter, &memory, lost).await, Err(ErrorKind::Corrupt));
        assert!(!is_there(&adapter, lost).await);
        store(&adapter, &memory, lost).await.unwrap();
        assert_eq!(load(&adapter, &memory, lost).await, Ok(()));
        adapter.close().await;
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn failure_of_the_medium_costs_one_object() {
    let (device, memory) = (Device::new(|_| {}), Memory::new(1 << 20));
    let adapter = device.open();
    for (number, (errno, expected)) in [
        (Errno::IO, ErrorKind::Unreadable),
        // Past the page cache.
        (Errno::NODATA, ErrorKind::Unreadable),
        (Errno::NOMEM, ErrorKind::Unavailable),
    ]
    .into_iter()
    .enumerate()
    {
        let one = object(number as u64, 9000);
        store(&adapter, &memory, &one).await.unwrap();
        let item = LoadItem {
            object: one.clone(),
            to: memory.buffer(one.len),
        };
        let mut load = RawRead::new(&adapter.objects, item);
        let mut tail = Tail::default();
        let FileStep::Moving(moving) = load.begin(0, &mut tail).unwrap() else {
            panic!("nothing to read");
        };
        let failed = FileError::System {
            done: 0,
            source: errno.into(),
        };
        let loaded = load.end(moving.file, &mut tail, Err(failed));
        assert_eq!(loaded.unwrap_err().kind(), expected, "{errno}");
        let is_kept = expected == ErrorKind::Unavailable;
        assert_eq!(is_there(&adapter, &one).await, is_kept, "{errno}");
    }
    adapter.close().await;
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn path_that_leads_elsewhere_is_unhealthy_until_it_is_back() {
    let device = Device::new(|options| options.capacity_bytes = 1 << 20);
    let adapter = device.open();
    let aside = device.path().with_extension("aside");
    std::fs::rename(device.path(), &aside).unwrap();
    for is_replaced in [false, true] {
        if is_replaced {
            std::fs::copy(&aside, device.path()).unwrap();
        }
        adapter.check().await;
        assert_eq!(adapter.status()["is_healthy"], false);
    }
    std::fs::rename(&aside, device.path()).unwrap();
    adapter.check().await;
    assert_eq!(adapter.status()["is_healthy"], true);
    adapter.close().await;
}

#[tokio::test]
async fn replaced_device_is_unhealthy() {
    let device = Device::new(|options| options.capacity_bytes = 1 << 20);
    let adapter = device.open();
    adapter.check().await;
    assert_eq!(adapter.status()["is_healthy"], true);
    device.file().write_all_at(&[0; 4096], 0).unwrap();
    adapter.check().await;
    assert_eq!(adapter.status()["is_healthy"], false);
    adapter.close().await;
}

proptest::proptest! {
    #[test]
    fn hostile_blocks_are_no_records(mut bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..5000), number in 0..9_u64) {
        let superblock = Superblock { id: [3; 32], geometry: format::Geometry { records: 9, data_bytes: 1 << 20 } };
        proptest::prop_assert_eq!(RawRecord::decode(&bytes, number, &superblock), None);
        Superblock::decode(&bytes);
        format::foreign(&bytes);
        // With its hash right.
        bytes.resize(BLOCK as usize, 0);
        let body = bytes.len() - 32;
        let hash = blake3::keyed_hash(&superblock.id, &bytes[..body]);
        bytes[body..].copy_from_slice(hash.as_bytes());
        proptest::prop_assert_eq!(RawRecord::decode(&bytes, number, &superblock), None);
    }
}
