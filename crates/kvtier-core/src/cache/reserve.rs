//! `reserve` and `commit`, a batch at a time.

use super::ExtentAllocator;
use super::lease::OrderedHold;
use super::reservation::{Committed, KeyOutcome, ReserveRequest, Staged};
use super::room::NoRoom;
use super::slab::SlotRef;
use super::state::State;

/// Marks a key that is not resident.
const MISSING: SlotRef = SlotRef::NONE;

/// What a `reserve` fills in; its memory is there before the lock is taken.
pub(super) struct ReserveBatch {
    pub(super) outcomes: Vec<KeyOutcome>,
    pub(super) staged: Vec<Staged>,
    /// One for each key: its resident object, held while the batch lasts.
    held: Vec<SlotRef>,
}

impl ReserveBatch {
    pub(super) fn new(requests: &[ReserveRequest<'_>]) -> Self {
        let keys = requests.iter().map(|request| request.hashes.len()).sum();
        Self {
            outcomes: Vec::with_capacity(keys),
            staged: Vec::with_capacity(keys),
            held: Vec::with_capacity(keys),
        }
    }
}

impl<A: ExtentAllocator> State<A> {
    /// See [`super::Cache::reserve`].
    ///
    /// Resident keys are held until the end, so that room for the tail of a prefix is never made of its head.
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
            let space = self.spaces.find(&request.space);
            for hash in request.hashes {
                let found = space.and_then(|space| self.find(space, hash));
                batch
                    .held
                    .push(found.map_or(MISSING, |number| self.pin(number)));
            }
        }
        let mut held = batch.held.iter();
        for (request, which) in requests.iter().zip(0..) {
            let space = self.spaces.open(&request.space);
            let taken = self.allocator.footprint(request.len);
            // Of two equal objects the second is not searched for when the first was not placed.
            let mut refused = None;
            for ((hash, held), position) in request.hashes.iter().zip(&mut held).zip(0..) {
                if *held != MISSING {
                    batch.outcomes.push(KeyOutcome::AlreadyResident);
                    continue;
                }
                let more = request.hashes.len() - 1 - position;
                let staged = match refused {
                    Some(no_room) => Err(no_room),
                    None if taken > staging_left => Err(NoRoom::Staging),
                    None if staging.is_some() && !self.may_stage(space, taken) => {
                        Err(NoRoom::Quota)
                    }
                    None => self.stage(space, *hash, request.len, near, more),
                };
                let (extent, slot) = match staged {
                    Ok(staged) => staged,
                    Err(no_room) => {
                        refused = Some(no_room);
                        batch.outcomes.push(self.refuse(space, no_room));
                        continue;
                    }
                };
                staging_left -= taken;
                batch.outcomes.push(KeyOutcome::Reserved(extent));
                batch.staged.push(Staged {
                    request: which,
                    position: position as u32,
                    extent,
                    slot,
                });
            }
            self.spaces.drop_user(space, &mut self.accounting_errors);
        }
        // Last chunk first, over all requests together: the chunk that is worth least alone becomes the oldest.
        let longest = requests.iter().map(|request| request.hashes.len()).max();
        for position in (0..longest.unwrap_or(0)).rev() {
            let mut start = 0;
            for request in requests {
                if position < request.hashes.len() && batch.held[start + position] != MISSING {
                    self.unpin(batch.held[start + position]);
                }
                start += request.hashes.len();
            }
        }
    }

    /// Whether the limit of a space's tenant, soft ones too, leaves it another staged object. It may always have one.
    fn may_stage(&self, space: u32, bytes: u64) -> bool {
        let tenant = self.spaces.tenants.get(self.spaces.salt_of(space));
        !self.policy.isolates() || tenant.is_none_or(|tenant| tenant.may_stage(bytes))
    }

    /// Admits the staged objects that `keep` marks and gives up the others, in this order.
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
