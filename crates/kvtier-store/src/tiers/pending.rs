//! What is deleted while it waits to be stored, or is being stored: it must not come after its delete.
//!
//! [`PendingStores`] guards all batches; L1's cache leases objects inside. `revoked` guards the deleted objects of one
//! batch, with no lock inside.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use kvtier_common::sync::{Mutex, MutexGuard};
use kvtier_core::object_key::ObjectKey;
use kvtier_core::{ChunkHash, Namespace};

use super::L2;
use super::store::{StoreTicket, StoredObjects};

/// Objects of one request and namespace.
pub struct NamespaceObjects {
    /// Namespace as the tiers name it: without a layout.
    pub stored_as: Arc<Namespace>,
    pub namespace: Arc<Namespace>,
    pub hashes: Vec<ChunkHash>,
}

/// What the buffers of a batch hold: the bytes in L1, and their part of the tier's bound. It is dropped with the last
/// buffer: from then on nothing writes the batch any more.
pub struct StoreHold {
    l2: Weak<L2>,
    number: u64,
    pub(super) tier: usize,
    /// Goes before `ticket`: once nothing waits any more, what is to leave L1 has left it.
    pub(super) shared: Arc<StoredObjects>,
    /// Objects that were deleted since they were given to the tier, or before, and whether also while they are read.
    revoked: Mutex<HashMap<ChunkHash, bool>>,
    ticket: Option<StoreTicket>,
}

impl StoreHold {
    /// Takes the objects that are not to be stored. What is revoked from now on is deleted at the end.
    pub fn take_revoked(&self) -> HashMap<ChunkHash, bool> {
        std::mem::take(&mut *self.revoked.lock())
    }

    /// Excludes objects that were deleted, with `force` also while they are read.
    pub fn revoke(&self, hashes: impl IntoIterator<Item = ChunkHash>, force: bool) {
        let mut revoked = self.revoked.lock();
        for hash in hashes {
            *revoked.entry(hash).or_default() |= force;
        }
    }

    /// The objects that are not to be stored.
    pub fn revoked(&self) -> HashSet<ChunkHash> {
        self.revoked.lock().keys().copied().collect()
    }

    /// Whether any is to be deleted.
    pub fn is_revoked(&self) -> bool {
        !self.revoked.lock().is_empty()
    }
}

impl Drop for StoreHold {
    fn drop(&mut self) {
        let Some(l2) = self.l2.upgrade() else { return };
        l2.pending.0.lock().holds.remove(&self.number);
        let revoked = std::mem::take(self.revoked.get_mut());
        if revoked.is_empty() {
            return;
        }
        let key = |(hash, force)| (ObjectKey::of(&self.shared.objects.stored_as, hash), force);
        let (forced, others): (Vec<_>, Vec<_>) = revoked.into_iter().map(key).partition(|it| it.1);
        let (tier, ticket) = (Arc::clone(&l2.tiers[self.tier]), self.ticket.take());
        l2.handle.spawn(async move {
            for (keys, force) in [(forced, true), (others, false)] {
                let keys = keys.into_iter().map(|(key, _)| key).collect();
                let failed = tier.delete(keys, force).await;
                if let Some(Err(error)) = failed.into_iter().find(Result::is_err) {
                    tracing::warn!(tier = tier.name(), %error, "what was deleted while it was stored may still be there");
                }
            }
            drop(ticket);
        });
    }
}

/// All batches that wait or are being stored.
#[derive(Default)]
pub struct PendingStores(Mutex<StoreHolds>);

#[derive(Default)]
struct StoreHolds {
    next: u64,
    holds: HashMap<u64, Weak<StoreHold>>,
}

/// While it lives nothing is revoked. No [`StoreHold`] may go meanwhile.
pub struct StoreAdmission<'a>(MutexGuard<'a, StoreHolds>);

impl PendingStores {
    /// Objects are taken from L1 and recorded here in one step: a deletion there finds them here.
    pub fn admit(&self) -> StoreAdmission<'_> {
        StoreAdmission(self.0.lock())
    }

    /// All batches.
    pub fn all(&self) -> Vec<Arc<StoreHold>> {
        let pending = self.0.lock();
        pending.holds.values().filter_map(Weak::upgrade).collect()
    }

    /// Marks what of these objects waits for this tier; with `force` it is deleted there also while it is read.
    pub fn revoke(&self, tier: usize, keys: &[ObjectKey], force: bool) {
        let holds = self.all();
        let mut by_namespace: HashMap<_, HashSet<ChunkHash>> = HashMap::new();
        for key in keys {
            let hashes = by_namespace.entry(key.namespace()).or_default();
            hashes.insert(key.chunk_hash());
        }
        for hold in holds.iter().filter(|hold| hold.tier == tier) {
            let objects = &hold.shared.objects;
            let Some(gone) = by_namespace.get(&objects.stored_as) else {
                continue;
            };
            let hashes = objects.hashes.iter();
            hold.revoke(hashes.filter(|hash| gone.contains(hash)).copied(), force);
        }
    }
}

impl StoreAdmission<'_> {
    /// Notes objects that are about to be given to a tier.
    pub fn hold(
        &mut self,
        l2: &Arc<L2>,
        tier: usize,
        shared: &Arc<StoredObjects>,
        ticket: StoreTicket,
    ) -> Arc<StoreHold> {
        let number = self.0.next;
        self.0.next += 1;
        let hold = Arc::new(StoreHold {
            l2: Arc::downgrade(l2),
            number,
            tier,
            shared: Arc::clone(shared),
            revoked: Mutex::default(),
            ticket: Some(ticket),
        });
        self.0.holds.insert(number, Arc::downgrade(&hold));
        hold
    }
}
