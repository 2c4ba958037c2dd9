//! Eviction: what the index evicts is deleted in the backend.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvtier_core::cache::ResidentObject;
use kvtier_core::eviction::EvictionKind;
use kvtier_core::object_key::ObjectKey;
use kvtier_core::quota::{Grant, QuotaMode};
use kvtier_core::{ChunkHash, Namespace};

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

impl Tier {
    /// Runs one eviction pass: deletes what is pending, then evicts from the watermark down, and what exceeds a capacity that
    /// was lowered, unless the first recovery is still running. Ends at the first failed delete.
    pub async fn evict(&self) {
        if self.delete_all_pending().await.is_err() {
            return;
        }
        self.trim_index(MAX_INDEXED);
        let usage = self.index.usage();
        if self.is_first_recovery() || self.config.capacity_bytes.is_none() {
            return;
        }
        let (used, capacity) = (usage.used_bytes as f64, usage.capacity_bytes as f64);
        let eviction = self.eviction();
        let eviction = eviction.filter(|it| used >= capacity * it.trigger_watermark);
        let mut ahead = eviction.map_or(0, |eviction| (used * eviction.eviction_ratio) as u64);
        while let Some(bytes) = self.evict_slice(ahead).await {
            ahead = ahead.saturating_sub(bytes);
        }
        while self.evict_surplus().await {}
    }

    /// Evicts a slice of what exceeds a capacity that was lowered; returns whether it did. What does is read for each slice, since
    /// several stores and a pass evict it together.
    pub(super) async fn evict_surplus(&self) -> bool {
        let usage = self.index.usage();
        let surplus = usage.used_bytes.saturating_sub(usage.capacity_bytes);
        self.evict_slice(surplus).await.is_some()
    }

    /// Evicts of `wanted` bytes as much as one delete may have, and returns the bytes; `None` if there was nothing to evict, or
    /// the delete failed.
    async fn evict_slice(&self, wanted: u64) -> Option<u64> {
        if wanted == 0 {
            return None;
        }
        let evicted = self.index.evict(self.now(), wanted, SLICE);
        let is_deleted = evicted.objects > 0 && self.delete_all_pending().await.is_ok();
        is_deleted.then_some(evicted.bytes)
    }

    /// Removes the least recently used objects beyond `most` from the index of a backend that has no capacity here and that
    /// others change too, and leaves them in it: a lookup finds them there, and what it has evicted would stay in the index until a
    /// load. Not if tenants have limits, whose bytes the index counts.
    fn trim_index(&self, most: u64) {
        if !self.is_open() {
            return;
        }
        loop {
            let beyond = self.index.stats().objects.saturating_sub(most);
            let beyond = usize::try_from(beyond).map_or(SLICE, |beyond| beyond.min(SLICE));
            if beyond == 0 || self.index.evict(self.now(), u64::MAX, beyond).objects == 0 {
                return;
            }
            drop(self.index.take_evicted());
        }
    }

    /// Whether others change the backend too, and nothing that the index counts bounds it.
    pub(super) fn is_open(&self) -> bool {
        let has_limits =
            self.index.quotas().default_limit.is_some() || self.has_grants.load(Ordering::Relaxed);
        let is_shared = self.adapter.capabilities().shared;
        is_shared && self.config.capacity_bytes.is_none() && !has_limits
    }

    /// Evicts objects of twice `bytes`, or of a small part of all if that is more, and deletes them. Returns whether any was
    /// deleted. For a backend that has no space for `bytes`.
    pub(super) async fn evict_some(&self, bytes: u64) -> bool {
        let pause = Duration::from_millis(self.space_pause_until.load(Ordering::Relaxed));
        let can_delete = self.adapter.capabilities().delete && self.may_evict();
        if self.is_first_recovery() || !can_delete || self.now() < pause {
            return false;
        }
        let used = self.index.usage().used_bytes;
        let wanted = bytes.saturating_mul(2).max(used / PART).min(MOST);
        let evict = async {
            // While these fail, nothing more leaves the index.
            self.delete_all_pending().await?;
            let evicted = self.index.evict(self.now(), wanted, SLICE);
            self.delete_all_pending().await?;
            Ok(evicted.objects > 0)
        };
        evict.await.unwrap_or_else(|_: L2Error| {
            self.pause_evictions(SPACE_PAUSE);
            false
        })
    }

    /// Pauses [`evict_some`](Self::evict_some), which did not help. Returns whether it does: a backend with space of its own
    /// may have it in small pieces.
    pub(super) fn pause_eviction_for_space(&self) -> bool {
        let is_paused = !self.adapter.capabilities().owns_space;
        if is_paused {
            let last = Duration::from_millis(self.space_pause.load(Ordering::Relaxed));
            let pause = (2 * last).clamp(SPACE_PAUSE, LONGEST_PAUSE);
            self.space_pause.store(millis(pause), Ordering::Relaxed);
            self.pause_evictions(pause);
        }
        is_paused
    }

    fn pause_evictions(&self, pause: Duration) {
        let until = millis(self.now() + pause);
        self.space_pause_until.store(until, Ordering::Relaxed);
    }

    /// The backend has space again: the pause ends, but for a short one.
    pub(super) fn shorten_pause(&self) {
        self.space_pause.store(0, Ordering::Relaxed);
        let latest = millis(self.now() + SPACE_PAUSE);
        self.space_pause_until.fetch_min(latest, Ordering::Relaxed);
    }

    /// Sets the grant of a tenant, or removes it: [`Cache::set_grant`].
    ///
    /// [`Cache::set_grant`]: kvtier_core::cache::Cache::set_grant
    pub fn set_grant(&self, salt: &str, grant: Option<Grant>) {
        if grant.is_some() {
            self.has_grants.store(true, Ordering::Relaxed);
        }
        self.index.set_grant(salt, grant);
    }

    /// Sets the limit of tenants without a grant. A tier that is only loaded from has none.
    pub fn set_default_limit(&self, limit: Option<u64>) {
        if !self.is_read_only() {
            self.index
                .configure_quotas(|quotas| quotas.default_limit = limit);
        }
    }

    /// Runs one pass that deletes objects of tenants over quota, unless the first recovery is still running. Ends at the
    /// first failed delete.
    pub async fn evict_over_quota(&self) {
        if self.is_first_recovery() {
            return;
        }
        loop {
            let evicted = self.index.evict_over_quota(self.now(), SLICE);
            if evicted.objects == 0 || self.delete_all_pending().await.is_err() {
                return;
            }
        }
    }

    /// Whether objects are evicted for others at all.
    pub(super) fn may_evict(&self) -> bool {
        let policy = self.config.eviction.map(|eviction| eviction.policy);
        policy != Some(EvictionKind::Noop)
    }

    /// Makes these objects the youngest of the eviction order, the last chunk the oldest of them.
    pub fn renew(&self, namespaces: &[Arc<Namespace>], hashes: &[ChunkHash]) {
        if self.may_evict() {
            self.index.renew(self.now(), namespaces, hashes);
        }
    }

    /// Adds what the index evicted to the pending deletes.
    pub(super) fn add_evicted(&self) {
        self.states.add_pending(|| self.take_evicted());
    }

    fn take_evicted(&self) -> Vec<(ObjectKey, u64)> {
        let evicted = self.index.take_evicted().into_iter();
        let key = |object: ResidentObject| {
            let key = ObjectKey::of(&object.namespace, object.chunk_hash);
            (key, object.bytes)
        };
        evicted.map(key).collect()
    }

    /// Whether the objects exceed the capacity, pending deletes included.
    pub(super) fn is_over_capacity(&self) -> bool {
        let used = || self.index.usage().used_bytes;
        let used = self
            .states
            .reserved_bytes(None, used, || self.take_evicted());
        self.capacity_bytes()
            .is_some_and(|capacity| used > capacity)
    }

    /// Whether a tenant exceeds a strict limit, pending deletes included.
    pub(super) fn is_over_limit(&self, salt: &str) -> bool {
        if self.config.quota_mode != QuotaMode::Strict {
            return false;
        }
        let mut limit = None;
        let index = || match self.index.salt_usage(salt) {
            Some(usage) => {
                limit = usage
                    .grant
                    .map_or(self.index.quotas().default_limit, |grant| grant.limit);
                usage.counted_bytes
            }
            None => 0,
        };
        let bytes = self
            .states
            .reserved_bytes(Some(salt), index, || self.take_evicted());
        limit.is_some_and(|limit| bytes > limit)
    }

    /// Returns and resets the evicted objects by cache salt. To be called regularly, as the map grows with the tenants.
    pub fn take_evicted_by_salt(&self) -> BTreeMap<Arc<str>, u64> {
        std::mem::take(&mut *self.evicted_by_salt.lock())
    }

    /// Logs how many corrupt objects were found since the last such line, if one is due.
    pub fn log_suppressed(&self) {
        if let Some(objects) = self.corrupt_log.take_suppressed(Instant::now()) {
            let tier = self.name();
            tracing::warn!(tier, objects, "more stored objects are not what was stored");
        }
    }

    /// Deletes until the objects fit into the capacity.
    pub(super) async fn free_capacity(&self) -> Result<(), L2Error> {
        while self.is_over_capacity() && self.delete_some(None).await? {}
        Ok(())
    }

    /// Deletes until a tenant is within a strict limit or nothing more can be deleted.
    pub(super) async fn free_quota(&self, salt: &str) -> Result<(), L2Error> {
        while self.is_over_limit(salt) && self.delete_some(Some(salt)).await? {}
        Ok(())
    }

    /// Deletes everything that is pending.
    pub(super) async fn delete_all_pending(&self) -> Result<(), L2Error> {
        self.add_evicted();
        while self.states.has_pending() && self.delete_some(None).await? {}
        Ok(())
    }

    /// Deletes a slice of what is pending, of all tenants or of one. Returns whether there was anything to delete.
    async fn delete_some(&self, salt: Option<&str>) -> Result<bool, L2Error> {
        if self.is_read_only() {
            return Ok(false);
        }
        let Some(deletes) = delete_pending(&self.states, &self.adapter, salt, SLICE).await else {
            return Ok(false);
        };
        self.counters.evicted_objects.add(deletes.objects);
        self.counters.evicted_bytes.add(deletes.bytes);
        let mut evicted = self.evicted_by_salt.lock();
        for (salt, objects) in deletes.by_salt {
            *evicted.entry(salt).or_default() += objects;
        }
        drop(evicted);
        for error in &deletes.failed {
            self.counters.store_failures.add(error.kind());
        }
        match deletes.failed.into_iter().last() {
            Some(error) => {
                if let Some(suppressed_lines) = self.delete_log.permit(Instant::now()) {
                    let tier = self.name();
                    tracing::warn!(tier, %error, suppressed_lines, "evicted objects could not be deleted");
                }
                Err(error)
            }
            None => Ok(true),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
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
            let until = Duration::from_millis(tier.space_pause_until.load(Ordering::Relaxed));
            until.saturating_sub(tier.now())
        };
        for _ in 0..3 {
            assert!(tier.pause_eviction_for_space());
        }
        assert!(left() > SPACE_PAUSE && left() <= 4 * SPACE_PAUSE);
        for _ in 0..20 {
            tier.pause_eviction_for_space();
        }
        assert!(left() > LONGEST_PAUSE / 2 && left() <= LONGEST_PAUSE);
        tier.shorten_pause();
        assert!(left() <= SPACE_PAUSE);
        tier.pause_eviction_for_space();
        assert!(left() <= SPACE_PAUSE);
    }

    #[tokio::test]
    async fn index_of_open_backend_is_bounded_and_its_objects_stay() {
        let open = tier(true, None).await;
        open.trim_index(5);
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
            tier.trim_index(5);
            assert_eq!(tier.stats().objects, 9);
        }
    }
}
