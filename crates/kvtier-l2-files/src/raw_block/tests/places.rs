//! What a device may be, its lock, and its space.

use kvtier_core::quota::QuotaMode;

use super::*;
use kvtier_l2::tier::{Tier, TierConfig};

#[tokio::test]
async fn devices_with_other_data_are_refused_unless_forced() {
    for (at, bytes, what) in [
        (1080, &[0x53, 0xef][..], "ext4"),
        (0, b"XFSB", "XFS"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (0x200, b"EFI PART", "GPT"),
        (510, &[0x55, 0xaa], "MBR"),
        (0x1_0040, b"_BHRfS_M", "Btrfs"),
        (99_999, b"x", "other data"),
    ] {
        let mut device = Device::new(|_| {});
        std::fs::write(device.path(), vec![0; 200_000]).unwrap();
        device.file().write_all_at(bytes, at).unwrap();
        let told = device.refusal();
        assert!(told.contains(what) && told.contains("force"), "{told}");
        let mut found = vec![0; bytes.len()];
        device.file().read_exact_at(&mut found, at).unwrap();
        assert_eq!(found, bytes, "a refused device was written to");
        device.options.force = true;
        device.open().close().await;
        // Nothing of it is left that other programs recognise.
        device.file().read_exact_at(&mut found, at).unwrap();
        assert_ne!(found, bytes, "{what}");
        device.options.force = false;
        device.open().close().await;
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn device_belongs_to_one_server() {
    let device = Device::new(|_| {});
    let adapter = device.open();
    assert!(device.refusal().contains("in use by another server"));
    adapter.close().await;
    device.open().close().await;
}

#[tokio::test]
async fn other_geometry_or_version_is_refused_by_name() {
    let mut device = Device::new(|_| {});
    let memory = Memory::new(1 << 20);
    let adapter = device.open();
    store(&adapter, &memory, &object(1, 5000)).await.unwrap();
    adapter.close().await;
    device.options.capacity_bytes *= 2;
    let told = device.refusal();
    assert!(
        told.contains("max_capacity_gb") && told.contains("force"),
        "{told}"
    );
    device.options.capacity_bytes /= 2;
    // A damaged superblock has a copy.
    device.file().write_all_at(&[7; 100], 0).unwrap();
    let adapter = device.open();
    assert_eq!(load(&adapter, &memory, &object(1, 5000)).await, Ok(()));
    adapter.close().await;
    let mut block = device.block(0);
    block[16] = 9;
    for at in format::SUPERBLOCKS {
        device.file().write_all_at(&block, at).unwrap();
    }
    let told = device.refusal();
    assert!(told.contains("version 9"), "{told}");
}

#[tokio::test]
async fn too_small_device_is_told_what_fits() {
    let device = Device::new(|options| {
        options.capacity_bytes = 1 << 50;
        options.slot_bytes = 1 << 40;
    });
    let told = device.refusal();
    assert!(
        told.contains("preallocated") || told.contains("give at most"),
        "{told}"
    );
    assert!(device.options.largest_capacity(1 << 30) > 0.9);
}

#[tokio::test]
async fn full_device_has_space_again_after_deletes() {
    let device = Device::new(|options| {
        options.capacity_bytes = 1 << 20;
        options.slot_bytes = 64 << 10;
    });
    let (adapter, memory) = (device.open(), Memory::new(1 << 22));
    let objects: Vec<_> = (0..17).map(|number| object(number, 64 << 10)).collect();
    for object in &objects[..16] {
        store(&adapter, &memory, object).await.unwrap();
    }
    let error = store(&adapter, &memory, &objects[16]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(error.to_string().contains("slot_bytes"), "{error}");
    assert_eq!(
        adapter.delete(vec![objects[3].key.clone()]).await[0]
            .as_ref()
            .unwrap(),
        &true
    );
    store(&adapter, &memory, &objects[16]).await.unwrap();
    for (number, object) in objects.iter().enumerate() {
        let expected = if number == 3 {
            Err(ErrorKind::NotFound)
        } else {
            Ok(())
        };
        assert_eq!(load(&adapter, &memory, object).await, expected);
    }
    adapter.close().await;
}

/// A tier of the device; its index is complete.
async fn tier(device: &Device) -> Tier {
    let config = TierConfig {
        name: "raw_block-0".into(),
        capacity_bytes: Some(device.options.capacity_bytes),
        eviction: None,
        quota_mode: QuotaMode::default(),
        quota_default: None,
        reserve_bytes: 0,
    };
    let tier = Tier::new(Arc::new(device.open()), config);
    tier.recover(&AtomicBool::new(false)).await;
    tier
}

async fn store_in(tier: &Tier, memory: &Memory, object: &ObjectSpec) -> Result<Stored, L2Error> {
    let item = StoreItem {
        object: object.clone(),
        from: memory.filled(&content(object)),
    };
    tier.store(vec![item]).await.pop().unwrap()
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn tier_evicts_if_records_or_pieces_of_space_are_missing() {
    let memory = Memory::new(1 << 22);
    // Four records.
    let device = Device::new(|options| {
        options.capacity_bytes = 1 << 20;
        options.slot_bytes = 256 << 10;
    });
    let in_tier = tier(&device).await;
    for number in 0..20 {
        let stored = store_in(&in_tier, &memory, &object(number, 64 << 10)).await;
        assert!(matches!(stored, Ok(Stored::Written(_))), "{stored:?}");
    }
    let last = in_tier.lookup(vec![object(19, 64 << 10)]).await.unwrap();
    assert!(last[0].is_some());
    in_tier.adapter().close().await;
    // Every second object is evicted first, so that free space is in pieces of one.
    let device = Device::new(|options| options.capacity_bytes = 1 << 20);
    let in_tier = tier(&device).await;
    let small: Vec<_> = (0..17).map(|number| object(number, 60 << 10)).collect();
    for object in &small {
        store_in(&in_tier, &memory, object).await.unwrap();
    }
    let used = small.iter().step_by(2).cloned().collect();
    in_tier.lookup(used).await.unwrap();
    let large = object(100, 120 << 10);
    let stored = store_in(&in_tier, &memory, &large).await;
    assert!(matches!(stored, Ok(Stored::Written(_))), "{stored:?}");
    in_tier.adapter().close().await;
}

#[tokio::test]
async fn space_of_object_that_is_being_loaded_is_not_used() {
    let device = Device::new(|options| options.capacity_bytes = 1 << 20);
    let (adapter, memory) = (device.open(), Memory::new(1 << 22));
    let first = object(1, 512 << 10);
    store(&adapter, &memory, &first).await.unwrap();
    let loading = adapter.objects.find(&first).unwrap();
    adapter.delete(vec![first.key.clone()]).await[0]
        .as_ref()
        .unwrap();
    // It would fit only there.
    let second = object(2, 768 << 10);
    let error = store(&adapter, &memory, &second).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    drop(loading);
    store(&adapter, &memory, &second).await.unwrap();
    assert_eq!(load(&adapter, &memory, &second).await, Ok(()));
    assert_eq!(
        load(&adapter, &memory, &first).await,
        Err(ErrorKind::NotFound)
    );
    adapter.close().await;
}

#[tokio::test]
async fn keys_that_fit_no_record_are_refused() {
    let (device, memory) = (Device::new(|_| {}), Memory::new(1 << 20));
    let adapter = device.open();
    let hash = kvtier_core::ChunkHash([7; 32]);
    adapter.recover(&|_| true).await.unwrap();
    let free = adapter.objects.index.usage().free_bytes;
    for (len, is_taken) in [(3700, true), (4000, false)] {
        let mut object = object(1, 100);
        object.key = ObjectKey::new(hash, "m".repeat(len), 0, 0, "").unwrap();
        let stored = store(&adapter, &memory, &object).await;
        assert_eq!(stored.is_ok(), is_taken, "{stored:?}");
    }
    assert_eq!(adapter.objects.index.usage().free_bytes, free - BLOCK);
    adapter.close().await;
}
