//! `reserve` and `commit`, a batch at a time.

use super::ExtentAllocator;
use super::lease::OrderedHold;
use super::refusal::Refusal;
use super::reservation::{Committed, KeyOutcome, ReserveRequest, Staged};
use super::slab::SlotRef;
use super::state::State;

/// Marks a key that is not resident.
const MISSING: SlotRef = SlotRef::NONE;

/// Result of a `reserve`, allocated before the lock is taken.
pub(super) struct ReserveBatch {
    pub(super) outcomes: Vec<KeyOutcome>,
    pub(super) staged: Vec<Staged>,
    /// Taken by what is staged, rounding included.
    pub(super) bytes: u64,
    /// Per key: its resident object, held during the batch.
    held: Vec<SlotRef>,
}

impl ReserveBatch {
    pub(super) fn new(requests: &[ReserveRequest<'_>]) -> Self {
        let keys = requests.iter().map(|request| request.hashes.len()).sum();
        Self {
            outcomes: Vec::with_capacity(keys),
            staged: Vec::with_capacity(keys),
            bytes: 0,
            held: Vec::with_capacity(keys),
        }
    }
}

impl<A: ExtentAllocator> State<A> {
    /// See [`super::Cache::reserve`].
    ///
    /// Resident keys are held until the end, so that the head of a prefix is never evicted for its tail.
    pub(super) fn reserve(
        &mut self,
        requests: &[ReserveRequest<'_>],
        near: Option<u32>,
        staging: Option<u64>,
        batch: &mut ReserveBatch,
    ) {
        self.warm = 0;
        let mut staging_left = staging.unwrap_or(u64::MAX);
        for request in requests {
            let namespace = self.namespaces.find(request.namespace);
            for hash in request.hashes {
                let found = namespace.and_then(|namespace| self.find(namespace, hash));
                batch
                    .held
                    .push(found.map_or(MISSING, |number| self.lease(number)));
            }
        }
        let mut held = batch.held.iter();
        for (request, which) in requests.iter().zip(0..) {
            let namespace = self.namespaces.open(request.namespace);
            let taken = self.allocator.footprint(request.len);
            // Objects of a request are equal in size: if one was refused, so are those after it.
            let mut refused = None;
            for ((hash, held), position) in request.hashes.iter().zip(&mut held).zip(0..) {
                if *held != MISSING {
                    batch.outcomes.push(KeyOutcome::AlreadyResident);
                    continue;
                }
                let more = request.hashes.len() - 1 - position;
                let staged = match refused {
                    Some(refusal) => Err(refusal),
                    None if taken > staging_left => Err(Refusal::Staging),
                    None if staging.is_some() && !self.may_stage(namespace, taken) => {
                        Err(Refusal::Quota)
                    }
                    None => self.stage(namespace, *hash, request.len, near, more),
                };
                let (extent, slot) = match staged {
                    Ok(staged) => staged,
                    Err(refusal) => {
                        // Only the first: engines repeat what was refused, and the ring is of all tenants.
                        if refused.replace(refusal).is_none() {
                            self.lose(namespace, hash, refusal.into());
                        }
                        batch.outcomes.push(self.refuse(namespace, refusal));
                        continue;
                    }
                };
                staging_left -= taken;
                batch.bytes += taken;
                batch.outcomes.push(KeyOutcome::Reserved(extent));
                batch.staged.push(Staged {
                    request: which,
                    position: position as u32,
                    extent,
                    slot,
                });
            }
            self.drop_user(namespace);
        }
        // Last chunk first, across all requests: the chunk that is worth least alone becomes the oldest.
        let longest = requests.iter().map(|request| request.hashes.len()).max();
        for position in (0..longest.unwrap_or(0)).rev() {
            let mut start = 0;
            for request in requests {
                if position < request.hashes.len() && batch.held[start + position] != MISSING {
                    self.end_lease(batch.held[start + position]);
                }
                start += request.hashes.len();
            }
        }
    }

    /// Counts a refusal.
    fn refuse(&mut self, namespace: u32, why: Refusal) -> KeyOutcome {
        let tenant = self.namespaces.tenant_of(namespace);
        let tenant = self.namespaces.tenants.get_mut(tenant);
        match why {
            Refusal::Memory => {
                self.totals.refused += 1;
                if let Some(tenant) = tenant {
                    tenant.totals.refused += 1;
                }
                KeyOutcome::NoMemory
            }
            Refusal::Quota => {
                self.totals.over_quota += 1;
                if let Some(tenant) = tenant {
                    tenant.totals.over_quota += 1;
                }
                KeyOutcome::OverQuota
            }
            Refusal::Staging => KeyOutcome::OverStaging,
        }
    }

    /// Whether the limit of the tenant, also a soft one, allows it another staged object. It may always have one.
    fn may_stage(&self, namespace: u32, bytes: u64) -> bool {
        let tenant = self
            .namespaces
            .tenants
            .get(self.namespaces.tenant_of(namespace));
        !self.policy.isolates() || tenant.is_none_or(|tenant| tenant.may_stage(bytes))
    }

    /// Puts the resident ones of these first in the eviction order, in this order; a leased one, after its leases.
    pub(super) fn evict_first(&mut self, committed: impl Iterator<Item = SlotRef>) {
        for reference in committed {
            // The others were duplicates, or aborted.
            if self.slab.get(reference).is_none() {
                continue;
            }
            let slot = self.slab.at_mut(reference.slot);
            slot.evict_first();
            if slot.leases == 0 {
                let candidate = self.candidate(reference.slot, self.slab.at(reference.slot));
                self.policy.insert_first(candidate);
            }
        }
    }

    /// Pins the resident ones of these objects until a deadline, the first chunks of all requests first: they are worth most if
    /// the shares do not allow all.
    pub(super) fn pin_all(&mut self, requests: &[ReserveRequest<'_>], deadline: u32) {
        let longest = requests.iter().map(|request| request.hashes.len()).max();
        for position in 0..longest.unwrap_or(0) {
            for request in requests {
                let namespace = self.namespaces.find(request.namespace);
                let hash = request.hashes.get(position);
                let found = namespace
                    .zip(hash)
                    .and_then(|(namespace, hash)| self.find(namespace, hash));
                if let Some(number) = found {
                    self.pin(number, deadline);
                }
            }
        }
    }

    /// Admits the staged objects that `keep` marks and aborts the others, in this order.
    pub(super) fn commit(
        &mut self,
        staged: &[Staged],
        order: impl Iterator<Item = usize>,
        keep: &[bool],
    ) -> Committed {
        let mut committed = Committed::default();
        for at in order {
            if !keep[at] {
                self.abort(staged[at].slot);
                committed.aborted += 1;
                continue;
            }
            match self.admit(staged[at].slot) {
                Some((number, true)) => {
                    committed.inserted += 1;
                    committed.inserted_bytes += self.footprint(number);
                }
                _ => committed.duplicates += 1,
            }
        }
        committed
    }

    /// Admits all staged objects and leases each key's resident object.
    pub(super) fn commit_leased(
        &mut self,
        staged: &[Staged],
        order: impl Iterator<Item = usize>,
        hold: &mut OrderedHold,
    ) -> Committed {
        let mut committed = Committed::default();
        for at in order {
            match self.admit(staged[at].slot) {
                Some((number, inserted)) => {
                    hold.slots[at] = self.hold(number);
                    hold.extents[at] = self.slab.at(number).extent;
                    if inserted {
                        committed.inserted += 1;
                        committed.inserted_bytes += self.footprint(number);
                    } else {
                        committed.duplicates += 1;
                    }
                }
                None => committed.duplicates += 1,
            }
        }
        committed
    }
}
