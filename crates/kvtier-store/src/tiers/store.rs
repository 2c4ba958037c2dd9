//! Write-behind: what was committed to L1 is stored in every tier.
//!
//! What waits is leased in L1, so neither eviction nor a timeout frees bytes that are being written; in return what may
//! wait is bounded in bytes, for each tier on its own, and what does not fit is not stored there. Lease and bytes go
//! together, with the last buffer of a batch: a tier that has missed its deadline and still reads has them both. So
//! `pending` knows what may still be written.
//!
//! The mutex guards the tiers' queues until stores are stopped; no other lock is acquired inside.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::cache::ReadLease;
use kvtier_core::{ChunkHash, Namespace, ObjectKey};
use kvtier_l2::{ObjectSpec, StoreItem};
use tokio::sync::{Notify, Semaphore, mpsc};

use super::L2;
use super::pending::{NamespaceObjects, StoreAdmission, StoreHold};
use crate::l1::L1Allocator;
use kvtier_config::StorePolicy;
use kvtier_observe::metrics::TierCall;

/// Batches that are stored in a tier at the same time: enough that one slow object does not hold up the others.
pub const BATCHES: usize = 4;

/// Bytes of one batch, unless a single object has more: what a slow disk writes well within a store's deadline.
pub(super) const BATCH_BYTES: u64 = 16 << 20;

/// Pause between hits whose objects are stored again, while tiers cannot store.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Prompt whose objects are stored.
pub struct StoredPrompt {
    /// Namespaces of the prompt as tiers name them.
    namespaces: Vec<Arc<Namespace>>,
    hashes: Arc<[ChunkHash]>,
}

impl StoredPrompt {
    /// Prompt with these chunks, up to the last that is stored, in these namespaces.
    pub fn new<'n>(
        namespaces: impl Iterator<Item = &'n Arc<Namespace>>,
        hashes: Arc<[ChunkHash]>,
    ) -> Arc<Self> {
        let namespaces = namespaces.map(|it| it.without_layout()).collect();
        Arc::new(Self { namespaces, hashes })
    }

    /// Stores a batch of objects of `len` bytes in every tier.
    pub(super) fn store(
        self: &Arc<Self>,
        l2: &Arc<L2>,
        namespace: &Arc<Namespace>,
        hashes: &[ChunkHash],
        len: u64,
    ) {
        let admission = l2.pending.admit();
        let leased = lease(l2, namespace, hashes);
        let gone = hashes.len() - leased.as_ref().map_or(0, |(hashes, _)| hashes.len());
        if gone > 0 {
            let metrics = l2.calls.metrics();
            metrics.not_found("l2_store", namespace.model_name(), gone as u64);
        }
        let Some((hashes, lease)) = leased else {
            return;
        };
        let objects = NamespaceObjects {
            stored_as: namespace.without_layout(),
            namespace: Arc::clone(namespace),
            hashes,
        };
        self.queue(l2, admission, objects, lease, len);
    }

    /// Queues leased objects of `len` bytes for every tier.
    fn queue(
        self: &Arc<Self>,
        l2: &Arc<L2>,
        mut admission: StoreAdmission<'_>,
        objects: NamespaceObjects,
        lease: ReadLease<L1Allocator>,
        len: u64,
    ) {
        let number = objects.hashes.len() as u64;
        let bytes = len * number;
        let written = l2.tiers.iter().enumerate();
        let written = written.filter(|(_, tier)| !tier.is_read_only());
        let extents = lease.extents().to_vec();
        let shared = Arc::new(StoredObjects {
            l2: Arc::downgrade(l2),
            complete: AtomicU64::new(0),
            tiers: written.clone().count() as u64,
            objects,
            lease: Some(lease),
        });
        let holds = written.filter_map(|(tier, _)| {
            let ticket = l2.stores.admit(tier, number, bytes)?;
            Some((tier, admission.hold(l2, tier, &shared, ticket)))
        });
        let holds: Vec<_> = holds.collect();
        drop(admission);
        if (holds.len() as u64) < shared.tiers {
            l2.set_unstored(&shared.objects.namespace, &shared.objects.hashes);
        }
        for (tier, hold) in holds {
            let extents = extents.iter().zip(&shared.objects.hashes);
            let items = extents.map(|(extent, hash)| StoreItem {
                object: ObjectSpec {
                    key: ObjectKey::of(&shared.objects.stored_as, *hash),
                    len,
                    layout: shared.objects.namespace.layout(),
                },
                from: l2.buffer(*extent, Arc::clone(&hold) as _),
            });
            let batch = TierBatch {
                prompt: Arc::clone(self),
                items: items.collect(),
                hold,
                bytes,
            };
            l2.stores.send(tier, batch);
        }
    }
}

/// Objects to be stored in one tier, all of one request and namespace.
pub struct TierBatch {
    prompt: Arc<StoredPrompt>,
    items: Vec<StoreItem>,
    hold: Arc<StoreHold>,
    bytes: u64,
}

/// What the batches of all tiers for the same objects have in common; the last one to be done drops it.
pub struct StoredObjects {
    l2: Weak<L2>,
    pub(super) objects: NamespaceObjects,
    /// Nothing of it leaves L1 meanwhile.
    lease: Option<ReadLease<L1Allocator>>,
    /// Tiers that have all of it; see [`StorePolicy::SkipL1`].
    pub(super) complete: AtomicU64,
    tiers: u64,
}

impl Drop for StoredObjects {
    fn drop(&mut self) {
        drop(self.lease.take());
        let Some(l2) = self.l2.upgrade() else { return };
        let is_complete = self.tiers > 0 && *self.complete.get_mut() == self.tiers;
        if l2.config().store_policy == StorePolicy::SkipL1 && is_complete {
            let NamespaceObjects {
                namespace, hashes, ..
            } = &self.objects;
            l2.cache.unload(namespace, hashes);
        }
    }
}

/// A part of a tier's bound; dropping it gives it back.
pub struct StoreTicket {
    queues: Arc<Queues>,
    tier: usize,
    objects: u64,
    pub(super) bytes: u64,
}

impl Drop for StoreTicket {
    fn drop(&mut self) {
        let queue = &self.queues.of_tier[self.tier];
        queue.objects.fetch_sub(self.objects, Ordering::Relaxed);
        queue.bytes.fetch_sub(self.bytes, Ordering::AcqRel);
        self.queues.drained.notify_waiters();
    }
}

/// What waits to be stored.
pub struct StoreQueue {
    bound: u64,
    senders: Mutex<Vec<mpsc::UnboundedSender<TierBatch>>>,
    queues: Arc<Queues>,
    /// Whether a tier could not store something since the last retry.
    pub(super) is_failing: AtomicBool,
    /// When objects were last stored again, in milliseconds of the clock.
    retried_at: AtomicU64,
}

struct Queues {
    of_tier: Vec<TierQueue>,
    drained: Notify,
}

#[derive(Default)]
struct TierQueue {
    bytes: AtomicU64,
    objects: AtomicU64,
    dropped_objects: AtomicU64,
    dropped_bytes: AtomicU64,
}

/// Figures of the write-behind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreCounts {
    /// Objects waiting or being stored.
    pub queued_objects: u64,
    /// Bytes of the queued objects.
    pub queued_bytes: u64,
    /// Objects that were not stored because too many bytes waited.
    pub dropped_objects: u64,
    /// Bytes of the dropped objects.
    pub dropped_bytes: u64,
}

impl StoreQueue {
    /// A queue for each of `tiers` tiers, and where they are served from.
    pub fn new(tiers: usize, bound: u64) -> (Self, Vec<mpsc::UnboundedReceiver<TierBatch>>) {
        // Unbounded in number: bounded in bytes.
        let (senders, receivers) = (0..tiers).map(|_| mpsc::unbounded_channel()).unzip();
        let queues = Queues {
            of_tier: (0..tiers).map(|_| TierQueue::default()).collect(),
            drained: Notify::new(),
        };
        let queue = Self {
            bound,
            senders: Mutex::new(senders),
            queues: Arc::new(queues),
            is_failing: AtomicBool::new(false),
            retried_at: AtomicU64::new(0),
        };
        (queue, receivers)
    }

    /// Whether objects that could not be stored may be stored again now.
    pub(super) fn may_retry(&self, now: Duration) -> bool {
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let last = self.retried_at.load(Ordering::Acquire);
        let is_early = now.saturating_sub(last) < RETRY_INTERVAL.as_millis() as u64;
        if is_early && self.is_failing.load(Ordering::Acquire) {
            return false;
        }
        self.is_failing.store(false, Ordering::Release);
        self.retried_at.store(now, Ordering::Release);
        true
    }

    /// Sets bytes of a tier's bound aside; counts what does not fit.
    pub(super) fn admit(&self, tier: usize, objects: u64, bytes: u64) -> Option<StoreTicket> {
        let queue = &self.queues.of_tier[tier];
        let admitted = queue
            .bytes
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |queued| {
                queued.checked_add(bytes).filter(|sum| *sum <= self.bound)
            });
        if admitted.is_err() {
            queue.dropped_objects.fetch_add(objects, Ordering::Relaxed);
            queue.dropped_bytes.fetch_add(bytes, Ordering::Relaxed);
            return None;
        }
        queue.objects.fetch_add(objects, Ordering::Relaxed);
        Some(StoreTicket {
            queues: Arc::clone(&self.queues),
            tier,
            objects,
            bytes,
        })
    }

    fn send(&self, tier: usize, batch: TierBatch) {
        if let Some(sender) = self.senders.lock().get(tier) {
            // Fails when it is ending; the batch releases what it holds.
            let _ = sender.send(batch);
        }
    }

    /// Takes nothing more.
    pub fn end(&self) {
        self.senders.lock().clear();
    }

    /// Waits until nothing waits.
    pub async fn drained(&self) {
        loop {
            let news = self.queues.drained.notified();
            if self.counts().queued_bytes == 0 {
                return;
            }
            news.await;
        }
    }

    /// Figures of all tiers together.
    pub fn counts(&self) -> StoreCounts {
        let tiers = (0..self.queues.of_tier.len()).map(|tier| self.of_tier(tier));
        tiers.fold(StoreCounts::default(), |sum, tier| StoreCounts {
            queued_objects: sum.queued_objects + tier.queued_objects,
            queued_bytes: sum.queued_bytes + tier.queued_bytes,
            dropped_objects: sum.dropped_objects + tier.dropped_objects,
            dropped_bytes: sum.dropped_bytes + tier.dropped_bytes,
        })
    }

    /// Figures of one tier.
    pub fn of_tier(&self, tier: usize) -> StoreCounts {
        let queue = &self.queues.of_tier[tier];
        StoreCounts {
            queued_objects: queue.objects.load(Ordering::Relaxed),
            queued_bytes: queue.bytes.load(Ordering::Relaxed),
            dropped_objects: queue.dropped_objects.load(Ordering::Relaxed),
            dropped_bytes: queue.dropped_bytes.load(Ordering::Relaxed),
        }
    }
}

/// A lease on those of these objects that are still resident.
pub(super) fn lease(
    l2: &L2,
    namespace: &Namespace,
    hashes: &[ChunkHash],
) -> Option<(Vec<ChunkHash>, ReadLease<L1Allocator>)> {
    if let Some(lease) = l2.cache.hold(l2.now(), namespace, hashes) {
        return (!hashes.is_empty()).then(|| (hashes.to_vec(), lease));
    }
    let resident = l2.cache.contains(namespace, hashes);
    let left: Vec<_> = hashes
        .iter()
        .zip(resident)
        .filter(|(_, resident)| *resident)
        .map(|(hash, _)| *hash)
        .collect();
    let lease = l2.cache.hold(l2.now(), namespace, &left)?;
    (!left.is_empty()).then_some((left, lease))
}

/// Stores the batches of one tier, until its queue ends.
pub async fn serve(l2: Weak<L2>, number: usize, mut queue: mpsc::UnboundedReceiver<TierBatch>) {
    let places = Arc::new(Semaphore::new(BATCHES));
    while let Some(batch) = queue.recv().await {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        let Some(l2) = l2.upgrade() else { return };
        let tier = Arc::clone(&l2.tiers[number]);
        tokio::spawn(async move {
            let _place = place;
            let TierBatch {
                prompt,
                mut items,
                // It waits until its results are counted.
                hold,
                bytes,
            } = batch;
            let shared = &hold.shared;
            let bytes_each = bytes / (items.len() as u64).max(1);
            let revoked = hold.take_revoked();
            items.retain(|item| !revoked.contains_key(&item.object.key.chunk_hash()));
            if items.is_empty() {
                return;
            }
            let salt = shared.objects.namespace.cache_salt();
            let bytes = bytes_each * items.len() as u64;
            let call = TierCall::Store;
            let call = l2.calls.begin(call, number, salt, items.len(), bytes, None);
            let hashes = items.iter().map(|item| item.object.key.chunk_hash());
            let hashes: Vec<_> = hashes.collect();
            // What the batch replaces is of other prompts, or else the end of its own.
            tier.renew(&prompt.namespaces, &prompt.hashes);
            let results = tier.store(items).await;
            // What was deleted meanwhile is not stored again.
            let gone = hold.revoked();
            let failed = hashes.iter().zip(&results).filter(|(hash, result)| {
                let error = result.as_ref().err();
                !gone.contains(*hash) && error.is_some_and(|error| error.kind().is_transient())
            });
            let failed: Vec<_> = failed.map(|(hash, _)| *hash).collect();
            if !failed.is_empty() {
                l2.set_unstored(&shared.objects.namespace, &failed);
            }
            let stored = results.iter().filter(|result| result.is_ok()).count();
            call.answered(salt, stored, bytes_each * stored as u64);
            let is_whole = revoked.is_empty() && !hold.is_revoked();
            if is_whole && results.iter().all(Result::is_ok) {
                shared.complete.fetch_add(1, Ordering::AcqRel);
            }
        });
    }
}
