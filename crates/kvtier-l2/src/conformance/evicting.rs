//! A tier of a backend that evicts by itself.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kvtier_core::quota::QuotaMode;

use super::{Memory, content, kinds, object};
use crate::adapter::{Adapter, Stored};
use crate::error::ErrorKind;
use crate::object::{LoadItem, ObjectSpec, StoreItem};
use crate::tier::{Tier, TierConfig};

/// Checks that objects which `evict` removes from the backend between a lookup and a load are misses, that the index has them
/// no more, and that they are stored again.
///
/// # Panics
/// If they are not.
pub async fn evicted_by_the_backend_leaves_the_index(
    adapter: Arc<dyn Adapter>,
    memory: &Memory,
    evict: impl FnOnce(&[ObjectSpec]),
) {
    let config = TierConfig {
        name: "tier-0".into(),
        capacity_bytes: None,
        eviction: None,
        quota_mode: QuotaMode::Soft,
        quota_default: None,
        reserve_bytes: 0,
    };
    let tier = Tier::new(adapter, config);
    tier.recover(&AtomicBool::new(false)).await;
    let objects = [object(1, 3000), object(2, 5000)];
    let store = || {
        let item = |object: &ObjectSpec| StoreItem {
            object: object.clone(),
            from: memory.filled(&content(object)),
        };
        tier.store(objects.iter().map(item).collect())
    };
    let loads = || {
        let item = |object: &ObjectSpec| LoadItem {
            object: object.clone(),
            to: memory.buffer(object.len),
        };
        tier.load(objects.iter().map(item).collect())
    };
    assert_eq!(kinds(store().await), [None; 2]);
    let found = tier.lookup(objects.to_vec()).await;
    let leases = found.expect("an answer");
    assert!(leases.iter().all(Option::is_some));
    assert_eq!(tier.stats().objects, 2);
    evict(&objects);
    let loaded = kinds(loads().await);
    assert_eq!(loaded, [Some(ErrorKind::NotFound); 2]);
    drop(leases);
    assert_eq!(tier.stats().objects, 0);
    let found = tier.lookup(objects.to_vec()).await;
    let leases = found.expect("an answer");
    assert!(leases.iter().all(Option::is_none));
    let stored = store().await;
    let is_written = |stored: &Result<_, _>| matches!(stored, Ok(Stored::Written(_)));
    assert!(stored.iter().all(is_written), "{stored:?}");
    assert_eq!(kinds(loads().await), [None; 2]);
}
