//! What a listing of tenants has of their quotas, apart from what it only tells, so that it can be set again.

use serde_json::{Map, Value};

/// Keys of a listed tenant that only tell.
const TOLD: [&str; 7] = [
    "cache_salt",
    "current_usage_gb",
    "exists",
    "hit_chunks",
    "hit_rate",
    "persisted",
    "requested_chunks",
];

/// Keys of one of its tiers that only tell.
const TOLD_OF_TIER: [&str; 10] = [
    "enforced",
    "evicted_bytes",
    "evicted_objects",
    "limit_bytes",
    "objects",
    "over_quota",
    "refused_no_room",
    "refused_over_quota",
    "reserved_bytes",
    "usage_bytes",
];

/// Leaves of the `users` of a listing what `PUT /quota` sets: no tenants without a quota, and no keys that only tell.
pub fn only_set(users: &mut Map<String, Value>) {
    users.retain(|_, user| user.get("exists") != Some(&Value::Bool(false)));
    for user in users.values_mut().filter_map(Value::as_object_mut) {
        user.retain(|key, _| !TOLD.contains(&key.as_str()));
        let tiers = user.get_mut("tiers").and_then(Value::as_object_mut);
        let Some(tiers) = tiers else { continue };
        tiers.retain(|_, tier| {
            let Some(tier) = tier.as_object_mut() else {
                return true;
            };
            let keys = tier.len();
            tier.retain(|key, _| !TOLD_OF_TIER.contains(&key.as_str()));
            // The tenant has nothing of its own there.
            !tier.is_empty() || keys == 0
        });
    }
}
