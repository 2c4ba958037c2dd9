//! Eviction: what the index evicts is deleted in the backend.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Tier;
use super::deletes::delete_pending;
use super::listing::MAX_INDEXED;
use crate::error::L2Error;

/// Objects evicted per hold of the index's lock, and deleted per call.
const SLICE: usize = 1024;

/// Part of the used bytes that is evicted if a backend has no space.
const PART: u64 = 64;

/// Pause of evictions for a backend that has no more space after one: some count what was deleted minutes later, and others take
/// the space. Without it a tier would evict all that it has in vain.
const SPACE_PAUSE: Duration = Duration::from_secs(60);

/// Longest pause: while evictions do not help, each pause is twice the one before.
const LONGEST_PAUSE: Duration = Duration::from_secs(24 * 60 * 60);

/// Most bytes of one eviction.
const MOST: u64 = 4 << 30;

/// Pause of evictions for a backend that has no space though something was evicted for it. Times are those of the tier.
#[derive(Debug, Default)]
pub(super) struct SpacePause {
    /// End, in milliseconds.
    until: AtomicU64,
    /// Length of the last pause, in milliseconds; 0 once there was space.
    last: AtomicU64,
}

impl SpacePause {
    fn is_running(&self, now: Duration) -> bool {
        now < Duration::from_millis(self.until.load(Ordering::Relaxed))
    }

    fn start(&self, now: Duration, pause: Duration) {
        self.until.store(millis(now + pause), Ordering::Relaxed);
    }

    /// Starts a pause that is longer than the last one.
    fn start_longer(&self, now: Duration) {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        let pause = (2 * last).clamp(SPACE_PAUSE, LONGEST_PAUSE);
        self.last.store(millis(pause), Ordering::Relaxed);
        self.start(now, pause);
    }

    /// The backend has space again: the pause ends, but for a short one.
    pub(super) fn shorten(&self, now: Duration) {
        self.last.store(0, Ordering::Relaxed);
        self.until
            .fetch_min(millis(now + SPACE_PAUSE), Ordering::Relaxed);
    }
}

/// See [`Tier::evict`].
pub(super) async fn evict(tier: &Tier) {
    if delete_all_pending(tier).await.is_err() {
        return;
    }
    trim_index(tier, MAX_INDEXED);
    let usage = tier.index.usage();
    if tier.recovery.is_first() || tier.config.capacity_bytes.is_none() {
        return;
    }
    let (used, capacity) = (usage.used_bytes as f64, usage.capacity_bytes as f64);
    let eviction = tier.eviction();
    let eviction = eviction.filter(|it| used >= capacity * it.trigger_watermark);
    let mut ahead = eviction.map_or(0, |eviction| (used * eviction.eviction_ratio) as u64);
    while let Some(bytes) = evict_slice(tier, ahead).await {
        ahead = ahead.saturating_sub(bytes);
    }
    while evict_surplus(tier).await {}
}

/// Evicts a slice of what exceeds a capacity that was lowered; returns whether it did. What does is read for each slice, since
/// several stores and a pass evict it together.
pub(super) async fn evict_surplus(tier: &Tier) -> bool {
    let usage = tier.index.usage();
    let surplus = usage.used_bytes.saturating_sub(usage.capacity_bytes);
    evict_slice(tier, surplus).await.is_some()
}

/// Evicts of `wanted` bytes as much as one delete may have, and returns the bytes; `None` if there was nothing to evict, or
/// the delete failed.
async fn evict_slice(tier: &Tier, wanted: u64) -> Option<u64> {
    if wanted == 0 {
        return None;
    }
    let evicted = tier.index.evict(tier.now(), wanted, SLICE);
    let is_deleted = evicted.objects > 0 && delete_all_pending(tier).await.is_ok();
    is_deleted.then_some(evicted.bytes)
}

/// Removes the least recently used objects beyond `most` from the index of a backend that has no capacity here and that
/// others change too, and leaves them in it: a lookup finds them there, and what it has evicted would stay in the index until a
/// load. Not if tenants have limits, whose bytes the index counts.
fn trim_index(tier: &Tier, most: u64) {
    if !tier.is_open() {
        return;
    }
    loop {
        let beyond = tier.index.stats().objects.saturating_sub(most);
        let beyond = usize::try_from(beyond).map_or(SLICE, |beyond| beyond.min(SLICE));
        if beyond == 0 || tier.index.evict(tier.now(), u64::MAX, beyond).objects == 0 {
            return;
        }
        drop(tier.index.take_evicted());
    }
}

/// Evicts objects of twice `bytes`, or of a small part of all if that is more, and deletes them. Returns whether any was
/// deleted. For a backend that has no space for `bytes`.
pub(super) async fn evict_some(tier: &Tier, bytes: u64) -> bool {
    let can_delete = tier.adapter.capabilities().delete && tier.may_evict();
    if tier.recovery.is_first() || !can_delete || tier.space_pause.is_running(tier.now()) {
        return false;
    }
    let used = tier.index.usage().used_bytes;
    let wanted = bytes.saturating_mul(2).max(used / PART).min(MOST);
    let evict = async {
        // While these fail, nothing more leaves the index.
        delete_all_pending(tier).await?;
        let evicted = tier.index.evict(tier.now(), wanted, SLICE);
        delete_all_pending(tier).await?;
        Ok(evicted.objects > 0)
    };
    evict.await.unwrap_or_else(|_: L2Error| {
        tier.space_pause.start(tier.now(), SPACE_PAUSE);
        false
    })
}

/// Pauses [`evict_some`], which did not help. Returns whether it does: a backend with space of its own may have it in small
/// pieces.
pub(super) fn pause_for_space(tier: &Tier) -> bool {
    let is_paused = !tier.adapter.capabilities().owns_space;
    if is_paused {
        tier.space_pause.start_longer(tier.now());
    }
    is_paused
}

/// See [`Tier::evict_over_quota`].
pub(super) async fn evict_over_quota(tier: &Tier) {
    if tier.recovery.is_first() {
        return;
    }
    loop {
        let evicted = tier.index.evict_over_quota(tier.now(), SLICE);
        if evicted.objects == 0 || delete_all_pending(tier).await.is_err() {
            return;
        }
    }
}

/// Deletes until the objects fit into the capacity.
pub(super) async fn free_capacity(tier: &Tier) -> Result<(), L2Error> {
    while tier.is_over_capacity() && delete_some(tier, None).await? {}
    Ok(())
}

/// Deletes until a tenant is within a strict limit or nothing more can be deleted.
pub(super) async fn free_quota(tier: &Tier, salt: &str) -> Result<(), L2Error> {
    while tier.is_over_limit(salt) && delete_some(tier, Some(salt)).await? {}
    Ok(())
}

/// Deletes everything that is pending.
pub(super) async fn delete_all_pending(tier: &Tier) -> Result<(), L2Error> {
    tier.add_evicted();
    while tier.states.has_pending() && delete_some(tier, None).await? {}
    Ok(())
}

/// Deletes a slice of what is pending, of all tenants or of one. Returns whether there was anything to delete.
async fn delete_some(tier: &Tier, salt: Option<&str>) -> Result<bool, L2Error> {
    if tier.is_read_only() {
        return Ok(false);
    }
    let Some(deletes) = delete_pending(&tier.states, &tier.adapter, salt, SLICE).await else {
        return Ok(false);
    };
    tier.counters.evicted_objects.add(deletes.objects);
    tier.counters.evicted_bytes.add(deletes.bytes);
    let mut evicted = tier.evicted_by_salt.lock();
    for (salt, objects) in deletes.by_salt {
        *evicted.entry(salt).or_default() += objects;
    }
    drop(evicted);
    for error in &deletes.failed {
        tier.counters.store_failures.add(error.kind());
    }
    match deletes.failed.into_iter().last() {
        Some(error) => {
            if let Some(suppressed_lines) = tier.delete_log.permit(Instant::now()) {
                let tier = tier.name();
                tracing::warn!(tier, %error, suppressed_lines, "evicted objects could not be deleted");
            }
            Err(error)
        }
        None => Ok(true),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvtier_core::quota::{Grant, QuotaMode};

    use super::*;
    use crate::Capabilities;
    use crate::conformance::{Memory, content, object};
    use crate::object::StoreItem;
    use crate::testing::TestAdapter;
    use crate::tier::TierConfig;

    async fn tier(shared: bool, capacity_bytes: Option<u64>) -> Tier {
        let capabilities = Capabilities {
            shared,
            delete: true,
            ..Capabilities::default()
        };
        let config = TierConfig {
            name: "tier-0".into(),
            capacity_bytes,
            eviction: None,
            quota_mode: QuotaMode::Soft,
            quota_default: None,
            reserve_bytes: 0,
        };
        let tier = Tier::new(Arc::new(TestAdapter::new(capabilities, 0)), config);
        let memory = Memory::new(1 << 20);
        for number in 0..9 {
            let object = object(number, 100);
            let item = StoreItem {
                from: memory.filled(&content(&object)),
                object,
            };
            assert!(tier.store(vec![item]).await[0].is_ok());
        }
        tier
    }

    #[tokio::test]
    async fn pauses_grow_until_there_is_space() {
        let tier = tier(false, None).await;
        let left = || {
            let until = Duration::from_millis(tier.space_pause.until.load(Ordering::Relaxed));
            until.saturating_sub(tier.now())
        };
        for _ in 0..3 {
            assert!(pause_for_space(&tier));
        }
        assert!(left() > SPACE_PAUSE && left() <= 4 * SPACE_PAUSE);
        for _ in 0..20 {
            pause_for_space(&tier);
        }
        assert!(left() > LONGEST_PAUSE / 2 && left() <= LONGEST_PAUSE);
        tier.space_pause.shorten(tier.now());
        assert!(left() <= SPACE_PAUSE);
        pause_for_space(&tier);
        assert!(left() <= SPACE_PAUSE);
    }

    #[tokio::test]
    async fn index_of_open_backend_is_bounded_and_its_objects_stay() {
        let open = tier(true, None).await;
        trim_index(&open, 5);
        assert_eq!(open.stats().objects, 5);
        // What it has left out is found where it is, and nothing is deleted.
        open.evict().await;
        let all: Vec<_> = (0..9).map(|number| object(number, 100)).collect();
        let found = open.lookup(all).await.unwrap();
        assert!(found.iter().all(Option::is_some));
        assert_eq!(open.counters().evicted_objects.get(), 0);
        // What the index counts for others stays.
        let limited = tier(true, None).await;
        limited.set_grant(
            "other",
            Some(Grant {
                limit: Some(1 << 20),
                reserved: 0,
            }),
        );
        for tier in [
            limited,
            tier(true, Some(1 << 20)).await,
            tier(false, None).await,
        ] {
            trim_index(&tier, 5);
            assert_eq!(tier.stats().objects, 9);
        }
    }
}
