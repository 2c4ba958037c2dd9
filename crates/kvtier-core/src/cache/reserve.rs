//! `reserve` and `commit`, a batch at a time.

use super::lease::OrderedHold;
use super::refusal::Refusal;
use super::reservation::{Committed, KeyOutcome, ReserveRequest, StagedObject};
use super::slab::{SlotRef, SlotState};
use super::state::{CacheState, Chunks};
use super::{ExtentAllocator, ReserveOptions};
use crate::group_row::GroupRow;
use crate::hashing::ChunkHash;
use crate::window::needed;
use std::cmp::Reverse;

/// Marks a key that is not resident.
const MISSING: SlotRef = SlotRef::NONE;

/// Prompt whose objects are reserved. What of it is resident is never evicted for a later chunk of it, and a later chunk is
/// evicted before an earlier one is refused.
#[derive(Clone, Copy, Debug)]
pub struct ReservedPrompt<'a> {
    /// All rows of the prompt.
    pub rows: &'a [GroupRow],
    /// All chunks of the prompt, up to the last that is reserved.
    pub hashes: &'a [ChunkHash],
    /// Chunks of the prefix that will be read, 0 if that is not known: what only shorter ones need of a row with a window is not
    /// kept.
    pub prefix: usize,
}

/// One requested key.
struct Key<'a> {
    hash: &'a ChunkHash,
    request: u32,
    /// Position of the key in its request.
    position: u32,
    /// Chunk of the prompt; without one, the position.
    chunk: u32,
    /// Number among all keys.
    at: u32,
    /// Resident object of the key.
    resident: SlotRef,
}

/// One request while it is served.
struct Opened {
    namespace: u32,
    /// Bytes that each of its objects takes.
    taken: u64,
    /// Whether the refusal of one of its keys was recorded.
    is_recorded: bool,
}

/// Resident object that a batch holds, and its chunk.
type Held = (u32, SlotRef);

/// Result of a `reserve`, allocated before the lock is taken.
pub(super) struct ReserveBatch<'a> {
    pub(super) outcomes: Vec<KeyOutcome>,
    pub(super) staged: Vec<StagedObject>,
    /// Bytes taken by what is staged, rounding included.
    pub(super) bytes: u64,
    /// Keys in the order in which they are served.
    keys: Vec<Key<'a>>,
    opened: Vec<Opened>,
    /// Residents by chunk. Up to `held_until` they are held, but for those that are [`MISSING`].
    held: Vec<Held>,
    held_until: usize,
    /// Chunks of the prompt. The state has it meanwhile, until all that is resident of it is in `held`.
    prompt: Option<Chunks>,
}

impl<'a> ReserveBatch<'a> {
    pub(super) fn new(requests: &[ReserveRequest<'a>], prompt: Option<ReservedPrompt<'_>>) -> Self {
        let mut keys = Vec::with_capacity(requests.iter().map(|it| it.hashes.len()).sum());
        for (request, number) in requests.iter().zip(0..) {
            let mut chunks = prompt.map(|prompt| prompt.hashes.iter().zip(0..));
            for (hash, position) in request.hashes.iter().zip(0..) {
                // A request has its chunks in the order of the prompt.
                let chunk = chunks.as_mut().and_then(|chunks| {
                    chunks.find_map(|(of_prompt, chunk)| (of_prompt == hash).then_some(chunk))
                });
                keys.push(Key {
                    hash,
                    request: number,
                    position,
                    chunk: chunk.unwrap_or(position),
                    at: keys.len() as u32,
                    resident: MISSING,
                });
            }
        }
        if prompt.is_some() && requests.len() > 1 {
            keys.sort_by_key(|key| key.chunk);
        }
        Self {
            outcomes: vec![KeyOutcome::AlreadyResident; keys.len()],
            staged: Vec::with_capacity(keys.len()),
            bytes: 0,
            opened: Vec::with_capacity(requests.len()),
            held: Vec::with_capacity(keys.len()),
            held_until: 0,
            prompt: prompt.map(|prompt| prompt.hashes.iter().copied().collect()),
            keys,
        }
    }
}

impl<A: ExtentAllocator> CacheState<A> {
    /// See [`super::Cache::reserve`].
    ///
    /// Resident keys are held until the end, so that the head of a prefix is never evicted for its tail. With a prompt, keys are
    /// served chunk by chunk, and once one is refused, so are those after it.
    pub(super) fn reserve(
        &mut self,
        requests: &[ReserveRequest<'_>],
        options: &ReserveOptions<'_>,
        batch: &mut ReserveBatch<'_>,
    ) {
        self.warm = 0;
        let has_prompt = options.prompt.is_some();
        let mut staging_left = options.max_staged_bytes.unwrap_or(u64::MAX);
        for request in requests {
            batch.opened.push(Opened {
                namespace: self.namespaces.open(request.namespace),
                taken: self.allocator.footprint(request.len),
                is_recorded: false,
            });
        }
        let mut keys = std::mem::take(&mut batch.keys);
        for key in &mut keys {
            let namespace = batch.opened[key.request as usize].namespace;
            if let Some(number) = self.find(namespace, key.hash) {
                key.resident = self.lease(number);
                batch.held.push((key.chunk, key.resident));
            }
        }
        batch.held_until = batch.held.len();
        self.kept_prompt = batch.prompt.take();
        // Objects of a request are equal in size: if one was refused, so are those after it.
        let mut refused: Option<(u32, Refusal)> = None;
        for key in &keys {
            if key.resident != MISSING && self.is_resident(key.resident) {
                continue;
            }
            let (number, at) = (key.request, key.at as usize);
            let request = &requests[number as usize];
            let Opened {
                namespace, taken, ..
            } = batch.opened[number as usize];
            let more = request.hashes.len() - 1 - key.position as usize;
            let staged = match refused {
                Some((other, refusal)) if has_prompt || other == number => Err(refusal),
                _ if taken > staging_left => Err(Refusal::Staging),
                _ if options.max_staged_bytes.is_some() && !self.may_stage(namespace, taken) => {
                    Err(Refusal::Quota)
                }
                _ => {
                    if batch.held_until < batch.held.len() {
                        self.hold_until(key.chunk, batch);
                    }
                    // Once again at most, with less that is held.
                    let mut prompt = options.prompt;
                    loop {
                        let staged =
                            self.stage(namespace, *key.hash, request.len, options.near, more);
                        match (staged, prompt.take()) {
                            (Err(_), Some(prompt)) if self.keep_until(key.chunk, prompt, batch) => {
                            }
                            (staged, _) => break staged,
                        }
                    }
                }
            };
            let (extent, slot) = match staged {
                Ok(staged) => staged,
                Err(refusal) => {
                    refused = Some((number, refusal));
                    let is_stored_later = options.has_further_pieces
                        && matches!(refusal, Refusal::Staging)
                        && !batch.staged.is_empty();
                    // Only the first: engines repeat what was refused, and the ring is of all tenants.
                    let is_recorded = &mut batch.opened[number as usize].is_recorded;
                    if !is_stored_later && !std::mem::replace(is_recorded, true) {
                        self.lose(namespace, key.hash, refusal.into());
                    }
                    batch.outcomes[at] = self.refuse(namespace, refusal);
                    continue;
                }
            };
            staging_left -= taken;
            batch.bytes += taken;
            batch.outcomes[at] = KeyOutcome::Reserved(extent);
            batch.staged.push(StagedObject {
                request: number,
                position: key.position,
                extent,
                slot,
            });
        }
        batch.prompt = self.kept_prompt.take().or(batch.prompt.take());
        for opened in &batch.opened {
            self.drop_user(opened.namespace);
        }
        if requests.len() > 1 {
            batch
                .staged
                .sort_by_key(|staged| (staged.request, staged.position));
            batch.held[..batch.held_until].sort_by_key(|(chunk, _)| Reverse(*chunk));
        } else {
            batch.held[..batch.held_until].reverse();
        }
        // Last chunk first, across all requests: the chunk that is worth least alone becomes the oldest.
        for (_, reference) in &batch.held[..batch.held_until] {
            if *reference != MISSING {
                self.end_lease(*reference);
            }
        }
    }

    /// Whether the object of a key is still resident.
    fn is_resident(&self, reference: SlotRef) -> bool {
        let slot = self.slab.get(reference);
        slot.is_some_and(|slot| slot.state() == SlotState::Resident)
    }

    /// Holds what of a prompt is resident up to a chunk, and nothing behind it: that becomes the youngest of what may be evicted,
    /// its last chunk the oldest of it. Returns whether that can help a store that was refused.
    #[cold]
    fn keep_until(
        &mut self,
        chunk: u32,
        prompt: ReservedPrompt<'_>,
        batch: &mut ReserveBatch<'_>,
    ) -> bool {
        let Some(kept) = self.kept_prompt.take() else {
            return false;
        };
        batch.prompt = Some(kept);
        for row in prompt.rows {
            let Some(namespace) = self.namespaces.find(&row.namespace) else {
                continue;
            };
            let needed = needed(row.window, prompt.prefix).start..prompt.hashes.len();
            for (hash, chunk) in prompt.hashes[needed.clone()]
                .iter()
                .zip(needed.start as u32..)
            {
                if let Some(number) = self.find(namespace, hash) {
                    batch.held.push((chunk, self.hold(number)));
                }
            }
        }
        batch.held.sort_by_key(|(chunk, _)| *chunk);
        batch.held_until = batch.held.partition_point(|(held, _)| *held <= chunk);
        for (_, reference) in batch.held[batch.held_until..].iter().rev() {
            self.end_lease(*reference);
        }
        true
    }

    /// Holds what of a prompt is resident up to a later chunk.
    fn hold_until(&mut self, chunk: u32, batch: &mut ReserveBatch<'_>) {
        while let Some((of, reference)) = batch.held.get_mut(batch.held_until)
            && *of <= chunk
        {
            if self.is_resident(*reference) {
                self.hold(reference.slot);
            } else {
                *reference = MISSING;
            }
            batch.held_until += 1;
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
        staged: &[StagedObject],
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
        staged: &[StagedObject],
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
