//! Transfers that come too late for whoever asked.

use std::time::SystemTime;

use kvtier_proto::deadline;
use kvtier_proto::key::CacheKey;

/// Refuses what is past the deadline that the worker gave, if it gave one: it has given up by then, and the pages may
/// be somebody else's.
pub(super) fn check<T>(key: &CacheKey<'_, T>) -> Result<(), String> {
    match deadline::decode(key.request_configs) {
        Some(deadline) if deadline < SystemTime::now() => {
            Err("it is past the deadline that the worker gave".to_owned())
        }
        _ => Ok(()),
    }
}
