//! Making room: what leaves the index is deleted in the backend.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvtier_core::cache::ResidentObject;
use kvtier_core::eviction::EvictionKind;
use kvtier_core::object_key::ObjectKey;
use kvtier_core::quota::{Grant, QuotaMode};

use super::Tier;
use crate::error::L2Error;

/// Objects evicted under one hold of the index's lock, and deleted with one call.
const SLICE: usize = 1024;

impl Tier {
    /// One pass: deletes what is still to be deleted, and evicts down from the watermark once it is known what is the
    /// oldest. Ends where a delete fails.
    pub async fn evict(&self) {
        if self.delete_condemned().await.is_err() {
            return;
        }
        let Some(eviction) = self.config.eviction else {
            return;
        };
        let usage = self.index.usage();
        if self.is_looking()
            || self.config.capacity_bytes.is_none()
            || (usage.used_bytes as f64) < usage.capacity_bytes as f64 * eviction.trigger_watermark
        {
            return;
        }
        let mut wanted = (usage.used_bytes as f64 * eviction.eviction_ratio) as u64;
        while wanted > 0 {
            let evicted = self.index.evict(self.now(), wanted, SLICE);
            if evicted.objects == 0 || self.delete_condemned().await.is_err() {
                return;
            }
            wanted = wanted.saturating_sub(evicted.bytes);
        }
    }

    /// Sets what a tenant may have here, or with `None` takes that back: [`Cache::set_grant`].
    ///
    /// [`Cache::set_grant`]: kvtier_core::cache::Cache::set_grant
    pub fn set_grant(&self, salt: &str, grant: Option<Grant>) {
        self.index.set_grant(salt, grant);
    }

    /// One pass: deletes objects of tenants that have too much, once it is known which are the oldest. Ends where a
    /// delete fails.
    pub async fn evict_over_quota(&self) {
        if self.is_looking() {
            return;
        }
        loop {
            let evicted = self.index.evict_over_quota(self.now(), SLICE);
            if evicted.objects == 0 || self.delete_condemned().await.is_err() {
                return;
            }
        }
    }

    /// Whether objects leave for others at all.
    pub(super) fn may_evict(&self) -> bool {
        let policy = self.config.eviction.map(|eviction| eviction.policy);
        policy != Some(EvictionKind::Noop)
    }

    /// What the index evicted is to be deleted.
    pub(super) fn condemn_evicted(&self) {
        self.condemned.add(|| self.evicted());
    }

    fn evicted(&self) -> Vec<(ObjectKey, u64)> {
        let key = |object: ResidentObject| {
            let key = ObjectKey::of(&object.namespace, object.chunk_hash);
            self.unsure.settle(&key);
            (key, object.bytes)
        };
        let evicted = self.index.take_evicted().into_iter();
        evicted.map(key).collect()
    }

    /// Whether there is more than the capacity, with what is to be deleted.
    pub(super) fn is_over(&self) -> bool {
        let used = || self.index.usage().used_bytes;
        let used = self.condemned.sum(None, used, || self.evicted());
        self.config
            .capacity_bytes
            .is_some_and(|capacity| used > capacity)
    }

    /// Whether a tenant has more than a limit that holds strictly, with what is to be deleted.
    pub(super) fn is_over_limit(&self, salt: &str) -> bool {
        if self.config.quota_mode != QuotaMode::Strict {
            return false;
        }
        let mut limit = None;
        let index = || match self.index.salt_usage(salt) {
            Some(usage) => {
                limit = usage
                    .grant
                    .map_or(self.config.quota_default, |grant| grant.limit);
                usage.counted_bytes
            }
            None => 0,
        };
        let bytes = self.condemned.sum(Some(salt), index, || self.evicted());
        limit.is_some_and(|limit| bytes > limit)
    }

    /// Objects evicted since this was last asked, by cache salt: to be asked for now and then, as there may be many.
    pub fn take_evicted_by_salt(&self) -> BTreeMap<Arc<str>, u64> {
        std::mem::take(&mut *self.evicted_by_salt.lock())
    }

    /// Says how many objects were not what was stored since that was last said, if it is time to.
    pub fn tell_rest(&self) {
        if let Some(objects) = self.damaged.rest(self.now()) {
            let tier = self.name();
            tracing::warn!(tier, objects, "more stored objects are not what was stored");
        }
    }

    /// Deletes until there is no more than the capacity.
    pub(super) async fn make_room(&self) -> Result<(), L2Error> {
        while self.is_over() && self.delete_some(None).await? {}
        Ok(())
    }

    /// Deletes until a tenant has no more than a limit that holds strictly, as far as that goes.
    pub(super) async fn make_room_within(&self, salt: &str) -> Result<(), L2Error> {
        while self.is_over_limit(salt) && self.delete_some(Some(salt)).await? {}
        Ok(())
    }

    /// Deletes all that is to be deleted.
    pub(super) async fn delete_condemned(&self) -> Result<(), L2Error> {
        self.condemn_evicted();
        while self.condemned.is_waiting() && self.delete_some(None).await? {}
        Ok(())
    }

    /// Whether there was anything to delete, of all or of one tenant.
    async fn delete_some(&self, salt: Option<&str>) -> Result<bool, L2Error> {
        if self.is_read_only() {
            return Ok(false);
        }
        let Some(deletes) = self.condemned.delete(&self.adapter, salt, SLICE).await else {
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
                if let Some(left_out) = self.undeleted.due(self.now()) {
                    let tier = self.name();
                    tracing::warn!(tier, %error, left_out, "evicted objects could not be deleted");
                }
                Err(error)
            }
            None => Ok(true),
        }
    }
}
