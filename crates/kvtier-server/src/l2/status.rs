//! What the tiers look like from outside.

use kvtier_l2::tier::{Recovery, Tier};
use serde_json::{Value, json};

use super::L2;
use crate::metrics::TierReadings;

impl L2 {
    /// Figures of each tier.
    pub fn readings(&self) -> Vec<TierReadings> {
        self.tiers.iter().map(|tier| readings(tier)).collect()
    }

    /// The tiers in the shape of LMCache 0.5.6's `/status`, with more keys.
    pub fn adapters_status(&self) -> Vec<Value> {
        self.tiers.iter().map(|tier| adapter_status(tier)).collect()
    }

    /// The eviction of the tiers that have any.
    pub fn eviction_status(&self) -> Vec<Value> {
        let tiers = self.tiers.iter().filter_map(|tier| {
            let eviction = tier.config().eviction?;
            Some(json!({
                "adapter": tier.name(),
                "eviction_policy": format!("{:?}", eviction.policy),
                "trigger_watermark": eviction.trigger_watermark,
                "eviction_ratio": eviction.eviction_ratio,
                "current_usage": tier.usage().usage_fraction(),
            }))
        });
        tiers.collect()
    }
}

fn readings(tier: &Tier) -> TierReadings {
    let (usage, counters) = (tier.usage(), tier.counters());
    TierReadings {
        name: tier.name().to_owned(),
        used_bytes: usage.total_bytes_used,
        objects: usage.objects,
        stored_objects: counters.stored_objects.get(),
        stored_bytes: counters.stored_bytes.get(),
        already_there: counters.already_there.get(),
        store_failures: counters.store_failures.get().into_iter().collect(),
        looked_up: counters.looked_up.get(),
        found: counters.found.get(),
        loaded_objects: counters.loaded_objects.get(),
        loaded_bytes: counters.loaded_bytes.get(),
        unverified: counters.unverified.get(),
        load_failures: counters.load_failures.get().into_iter().collect(),
        evicted_objects: counters.evicted_objects.get(),
        evicted_bytes: counters.evicted_bytes.get(),
    }
}

fn adapter_status(tier: &Tier) -> Value {
    let usage = tier.usage();
    let mut status = tier.adapter().status();
    let recovery = match tier.recovery() {
        Recovery::Running => json!({ "state": "running" }),
        Recovery::Done(found) => json!({
            "state": "done", "objects": found.objects, "bytes": found.bytes, "removed": found.removed,
            "foreign": found.foreign,
        }),
        Recovery::Failed(error) => json!({ "state": "failed", "error": error.to_string() }),
    };
    if let Value::Object(map) = &mut status {
        map.insert("name".into(), json!(tier.name()));
        map.insert("stored_object_count".into(), json!(usage.objects));
        map.insert("current_size_bytes".into(), json!(usage.total_bytes_used));
        map.insert(
            "max_capacity_bytes".into(),
            json!(usage.total_capacity_bytes),
        );
        map.insert("usage_fraction".into(), json!(usage.usage_fraction()));
        // A count only: there may be a hundred thousand tenants.
        map.insert(
            "cache_salt_count".into(),
            json!(usage.bytes_by_cache_salt.len()),
        );
        map.insert("is_full".into(), json!(tier.is_full()));
        map.insert("recovery".into(), recovery);
    }
    status
}
