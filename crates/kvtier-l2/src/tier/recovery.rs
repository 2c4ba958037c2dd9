//! Recovery: adopting the objects of an earlier run, in the background.
//!
//! Requests are served meanwhile: keys that the index does not have yet are looked up in the backend. Only stores of a
//! tier with a capacity or strict limits wait, since its free space is unknown. If the recovery fails, they are refused,
//! and it is retried until it succeeds. Nothing is evicted before its first end, since the order of use is unknown.
//! A [`BackendListing`] bounds what is kept of the backend's objects, and how many are read.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::cache::{Cache, ReadLease};
use kvtier_core::{ChunkHash, Namespace};
use tokio::sync::watch;
use tokio::time::sleep;

use super::budget::ByteBudget;
use super::eviction::delete_all_pending;
use super::listing::{BackendListing, ListingBounds};
use super::{Adopted, Listed, Tier};
use crate::adapter::Recovered;
use crate::error::{ErrorKind, L2Error};

/// Objects taken into the index between two checks of the stop flag.
const SLICE: usize = 1024;

/// First and longest pause after a failure; the pause doubles with each one.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Interval of checking the stop flag while waiting.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Progress of the recovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recovery {
    /// Running for the first time, or about to.
    Running,
    /// All objects of the backend are in the index.
    Done(Recovered),
    /// Recovery failed; the error says when it is retried. Until it succeeds, a tier with a capacity or strict limits stores
    /// nothing; in others, the objects found so far are in the index.
    Failed(L2Error),
}

/// Early end of a recovery.
enum RecoveryEnd {
    Stopped,
    Failed(L2Error),
}

/// Progress of the recovery, which others wait for.
#[derive(Debug)]
pub(super) struct RecoveryProgress(watch::Sender<Recovery>);

impl RecoveryProgress {
    /// Returns the progress of a tier whose adapter lists its objects, or has none to recover.
    pub(super) fn new(lists: bool) -> Self {
        Self(watch::Sender::new(if lists {
            Recovery::Running
        } else {
            Recovery::Done(Recovered::default())
        }))
    }

    pub(super) fn get(&self) -> Recovery {
        self.0.borrow().clone()
    }

    /// Whether all objects of the backend are in the index.
    pub(super) fn is_done(&self) -> bool {
        matches!(*self.0.borrow(), Recovery::Done(_))
    }

    /// Whether the first recovery is running or about to.
    pub(super) fn is_first(&self) -> bool {
        *self.0.borrow() == Recovery::Running
    }

    /// Waits for the end of the first recovery.
    pub(super) async fn ended(&self) -> Result<(), L2Error> {
        let mut recovery = self.0.subscribe();
        let ended = recovery.wait_for(|recovery| *recovery != Recovery::Running);
        match &*ended.await.map_err(|_| unknown("the recovery ended"))? {
            Recovery::Failed(error) => Err(unknown(error)),
            _ => Ok(()),
        }
    }

    fn set(&self, recovery: Recovery) {
        self.0.send_replace(recovery);
    }

    fn stopped(&self) {
        let message = "the recovery of stored objects was stopped before its end";
        let stopped = L2Error::new(ErrorKind::Unavailable, message);
        self.set(Recovery::Failed(stopped));
    }
}

/// See [`Tier::recover`].
pub(super) async fn recover(tier: &Tier, stop: &AtomicBool) {
    if tier.recovery.is_done() {
        return;
    }
    let mut pause = PAUSE;
    let bounds = ListingBounds::of(tier.capacity_bytes(), tier.is_open());
    loop {
        let ended = tokio::select! {
            ended = recover_once(tier, stop, bounds) => ended,
            () = until_stopped(stop) => Err(RecoveryEnd::Stopped),
        };
        let error = match ended {
            Ok(recovered) => {
                tracing::info!(
                    tier = tier.name(),
                    objects = recovered.objects,
                    bytes = recovered.bytes,
                    removed = recovered.removed,
                    foreign = recovered.foreign,
                    "adopted what was stored before the start"
                );
                tier.recovery.set(Recovery::Done(recovered));
                return;
            }
            Err(RecoveryEnd::Failed(error)) => error,
            Err(RecoveryEnd::Stopped) => return tier.recovery.stopped(),
        };
        let line = format!("{error}; the next try is in {} s", pause.as_secs());
        tracing::warn!(tier = tier.name(), error = %line, "reading what was stored before the start failed");
        let failed = L2Error::new(error.kind(), line);
        tier.recovery.set(Recovery::Failed(failed));
        tokio::select! {
            () = sleep(pause) => {}
            () = until_stopped(stop) => return tier.recovery.stopped(),
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

async fn recover_once(
    tier: &Tier,
    stop: &AtomicBool,
    bounds: ListingBounds,
) -> Result<Recovered, RecoveryEnd> {
    let listing = Mutex::new(BackendListing::new(bounds));
    let found = |objects: Vec<Listed>| {
        let is_wanted = listing.lock().add(objects);
        is_wanted && !stop.load(Ordering::Relaxed)
    };
    let result = {
        let mut recover = tier.adapter.recover(&found);
        // After an uncaught panic there would be no retry.
        std::future::poll_fn(|context| {
            let poll = AssertUnwindSafe(|| recover.as_mut().poll(context));
            let panicked = || L2Error::new(ErrorKind::Unavailable, "the adapter panicked");
            catch_unwind(poll).unwrap_or_else(|_| Poll::Ready(Err(panicked())))
        })
        .await
    };
    let listing = listing.into_inner();
    if result.is_ok() {
        listing.log(tier.name());
    }
    // Victims are not chosen from an incomplete listing.
    if result.is_ok() || !tier.is_strict() {
        adopt_all(tier, listing.into_objects(), stop).await?;
    }
    result.map_err(RecoveryEnd::Failed)
}

/// Adopts in the order of last use. If not all fits, the index evicts by its own policy, but none of the objects that
/// it had before: those are younger than all of the listing.
async fn adopt_all(
    tier: &Tier,
    objects: Vec<Listed>,
    stop: &AtomicBool,
) -> Result<(), RecoveryEnd> {
    let known = hold_resident(tier).await;
    let (index, may_evict) = (tier.index.clone(), tier.may_evict());
    // Sorting millions of them would block lookups on this thread.
    let sorted = tokio::task::spawn_blocking(move || sorted(&index, objects, may_evict)).await;
    let objects = sorted.map_err(|error| {
        RecoveryEnd::Failed(L2Error::new(ErrorKind::Unavailable, error.to_string()))
    })?;
    for slice in objects.chunks(SLICE) {
        if stop.load(Ordering::Relaxed) {
            return Err(RecoveryEnd::Stopped);
        }
        for object in slice {
            let is_surplus = match tier.adopt(&object.key, object.bytes) {
                Adopted::OverQuota => true,
                Adopted::OverCapacity => may_evict,
                Adopted::Indexed | Adopted::Deleting => false,
            };
            if is_surplus {
                // A lookup may have adopted it meanwhile.
                let entry = || {
                    let is_new = is_new(&tier.index, object);
                    Vec::from_iter(is_new.then(|| (object.key.clone(), object.bytes)))
                };
                tier.states.add_pending(entry);
            }
        }
        tier.add_evicted();
        tokio::task::yield_now().await;
    }
    for held in known {
        drop(held);
        tokio::task::yield_now().await;
    }
    // A failed delete is retried by the next store or eviction pass.
    let _ = delete_all_pending(tier).await;
    Ok(())
}

/// Leases all objects of the index. Released one after the other, the leases make these the youngest.
async fn hold_resident(tier: &Tier) -> Vec<ReadLease<ByteBudget>> {
    let (mut held, mut from) = (Vec::new(), 0);
    loop {
        let page = tier.index.objects(from, SLICE);
        let mut by_namespace = BTreeMap::<_, Vec<_>>::new();
        // A lease releases its last object first.
        for object in page.entries.into_iter().rev() {
            let hashes = by_namespace.entry(object.namespace).or_default();
            hashes.push(object.chunk_hash);
        }
        for (namespace, hashes) in &by_namespace {
            hold(tier, namespace, hashes, &mut held);
        }
        match page.next {
            Some(next) => from = next,
            None => return held,
        }
        tokio::task::yield_now().await;
    }
}

/// Leases those that are still there.
fn hold(
    tier: &Tier,
    namespace: &Namespace,
    hashes: &[ChunkHash],
    held: &mut Vec<ReadLease<ByteBudget>>,
) {
    match tier.index.hold(tier.now(), namespace, hashes) {
        Some(lease) => held.push(lease),
        None if hashes.len() > 1 => {
            let (left, right) = hashes.split_at(hashes.len() / 2);
            hold(tier, namespace, left, held);
            hold(tier, namespace, right, held);
        }
        None => {}
    }
}

/// Returns the objects that the index does not have, in the order of last use, or reversed if nothing is evicted for
/// them.
fn sorted(index: &Cache<ByteBudget>, mut objects: Vec<Listed>, may_evict: bool) -> Vec<Listed> {
    objects.retain(|object| is_new(index, object));
    objects.sort_unstable_by_key(|object| object.used_at);
    if !may_evict {
        objects.reverse();
    }
    objects
}

fn is_new(index: &Cache<ByteBudget>, object: &Listed) -> bool {
    let hash = object.key.chunk_hash();
    !index.contains(object.key.namespace(), &[hash])[0]
}

fn unknown(why: impl std::fmt::Display) -> L2Error {
    let message = format!("the free space is unknown: {why}");
    L2Error::new(ErrorKind::Unavailable, message)
}

async fn until_stopped(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        sleep(STOP_CHECK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvtier_core::quota::QuotaMode;

    use super::*;
    use crate::Capabilities;
    use crate::testing::TestAdapter;
    use crate::tier::TierConfig;

    #[tokio::test]
    async fn endless_listing_ends_and_its_youngest_are_adopted() {
        let capabilities = Capabilities {
            list: true,
            delete: true,
            ..Capabilities::default()
        };
        let adapter = Arc::new(TestAdapter::new(capabilities, 0).with_endless_listing());
        let config = TierConfig {
            name: "tier-0".into(),
            capacity_bytes: Some(1 << 30),
            eviction: None,
            quota_mode: QuotaMode::Soft,
            quota_default: None,
            reserve_bytes: 0,
        };
        let tier = Tier::new(Arc::clone(&adapter) as _, config);
        let bounds = ListingBounds {
            kept: 20,
            listed: 1000,
            pages: u64::MAX,
        };
        let ended = recover_once(&tier, &AtomicBool::new(false), bounds).await;
        let Ok(recovered) = ended else {
            panic!("not recovered");
        };
        assert_eq!(recovered.objects, 1000);
        assert_eq!(tier.stats().objects, 20);
        // The adapter lists each object as used later than the one before.
        let youngest = TestAdapter::endless_object(999);
        let oldest_kept = TestAdapter::endless_object(980);
        let dropped = TestAdapter::endless_object(979);
        let is_indexed = |object: &Listed| !is_new(&tier.index, object);
        assert!(is_indexed(&youngest) && is_indexed(&oldest_kept) && !is_indexed(&dropped));
        // What the index has no place for is left where it is.
        assert!(adapter.delete_keys().is_empty());
    }
}
