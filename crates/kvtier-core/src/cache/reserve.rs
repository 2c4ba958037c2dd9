//! `reserve` and `commit`, a batch at a time.

use super::eviction::MemoryDemand;
use super::refusal::Refusal;
use super::reservation::{KeyOutcome, ReserveRequest, StagedObject};
use super::slab::{SlotRef, SlotState};
use super::state::{CacheState, Chunks};
use super::{Extent, ExtentAllocator, ReserveOptions};
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
struct ReserveKey<'a> {
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
struct OpenRequest {
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
    keys: Vec<ReserveKey<'a>>,
    opened: Vec<OpenRequest>,
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
                keys.push(ReserveKey {
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

    /// See [`super::Cache::reserve`].
    ///
    /// Resident keys are held until the end, so that the head of a prefix is never evicted for its tail. With a prompt, keys are
    /// served chunk by chunk, and once one is refused, so are those after it.
    pub(super) fn reserve(
        &mut self,
        state: &mut CacheState<impl ExtentAllocator>,
        requests: &[ReserveRequest<'_>],
        options: &ReserveOptions<'_>,
    ) {
        state.warm.left = 0;
        let has_prompt = options.prompt.is_some();
        let mut staging_left = options.max_staged_bytes.unwrap_or(u64::MAX);
        for request in requests {
            self.opened.push(OpenRequest {
                namespace: state.namespaces.open(request.namespace),
                taken: state.allocator.footprint(request.len),
                is_recorded: false,
            });
        }
        let mut keys = std::mem::take(&mut self.keys);
        for key in &mut keys {
            let namespace = self.opened[key.request as usize].namespace;
            if let Some(number) = state.find(namespace, key.hash) {
                key.resident = state.lease(number);
                self.held.push((key.chunk, key.resident));
            }
        }
        self.held_until = self.held.len();
        state.kept_prompt = self.prompt.take();
        // Objects of a request are equal in size: if one was refused, so are those after it.
        let mut refused: Option<(u32, Refusal)> = None;
        for key in &keys {
            if key.resident != MISSING && state.is_resident(key.resident) {
                continue;
            }
            let (number, at) = (key.request, key.at as usize);
            let request = &requests[number as usize];
            let OpenRequest {
                namespace, taken, ..
            } = self.opened[number as usize];
            let more = request.hashes.len() - 1 - key.position as usize;
            let staged = match refused {
                Some((other, refusal)) if has_prompt || other == number => Err(refusal),
                _ if taken > staging_left => Err(Refusal::Staging),
                _ if options.max_staged_bytes.is_some() && !may_stage(state, namespace, taken) => {
                    Err(Refusal::Quota)
                }
                _ => {
                    if self.held_until < self.held.len() {
                        self.hold_until(state, key.chunk);
                    }
                    // Once again at most, with less that is held.
                    let mut prompt = options.prompt;
                    loop {
                        let staged =
                            stage(state, namespace, *key.hash, request.len, options.near, more);
                        match (staged, prompt.take()) {
                            (Err(_), Some(prompt)) if self.keep_until(state, key.chunk, prompt) => {
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
                        && !self.staged.is_empty();
                    // Only the first: engines repeat what was refused, and the ring is of all tenants.
                    let is_recorded = &mut self.opened[number as usize].is_recorded;
                    if !is_stored_later && !std::mem::replace(is_recorded, true) {
                        state.lose(namespace, key.hash, refusal.into());
                    }
                    self.outcomes[at] = refuse(state, namespace, refusal);
                    continue;
                }
            };
            staging_left -= taken;
            self.bytes += taken;
            self.outcomes[at] = KeyOutcome::Reserved(extent);
            self.staged.push(StagedObject {
                request: number,
                position: key.position,
                extent,
                slot,
            });
        }
        self.prompt = state.kept_prompt.take().or(self.prompt.take());
        for opened in &self.opened {
            state.drop_user(opened.namespace);
        }
        if requests.len() > 1 {
            self.staged
                .sort_by_key(|staged| (staged.request, staged.position));
            self.held[..self.held_until].sort_by_key(|(chunk, _)| Reverse(*chunk));
        } else {
            self.held[..self.held_until].reverse();
        }
        // Last chunk first, across all requests: the chunk that is worth least alone becomes the oldest.
        for (_, reference) in &self.held[..self.held_until] {
            if *reference != MISSING {
                state.end_lease(*reference);
            }
        }
    }

    /// Holds what of a prompt is resident up to a chunk, and nothing behind it: that becomes the youngest of what may be evicted,
    /// its last chunk the oldest of it. Returns whether that can help a store that was refused.
    #[cold]
    fn keep_until(
        &mut self,
        state: &mut CacheState<impl ExtentAllocator>,
        chunk: u32,
        prompt: ReservedPrompt<'_>,
    ) -> bool {
        let Some(kept) = state.kept_prompt.take() else {
            return false;
        };
        self.prompt = Some(kept);
        for row in prompt.rows {
            let Some(namespace) = state.namespaces.find(&row.namespace) else {
                continue;
            };
            let needed = needed(row.window, prompt.prefix).start..prompt.hashes.len();
            for (hash, chunk) in prompt.hashes[needed.clone()]
                .iter()
                .zip(needed.start as u32..)
            {
                if let Some(number) = state.find(namespace, hash) {
                    self.held.push((chunk, state.hold(number)));
                }
            }
        }
        self.held.sort_by_key(|(chunk, _)| *chunk);
        self.held_until = self.held.partition_point(|(held, _)| *held <= chunk);
        for (_, reference) in self.held[self.held_until..].iter().rev() {
            state.end_lease(*reference);
        }
        true
    }

    /// Holds what of a prompt is resident up to a later chunk.
    fn hold_until(&mut self, state: &mut CacheState<impl ExtentAllocator>, chunk: u32) {
        while let Some((of, reference)) = self.held.get_mut(self.held_until)
            && *of <= chunk
        {
            if state.is_resident(*reference) {
                state.hold(reference.slot);
            } else {
                *reference = MISSING;
            }
            self.held_until += 1;
        }
    }
}

/// Stages an object: allocates its memory, evicting others for it; see [`MemoryDemand::allocate`].
fn stage(
    state: &mut CacheState<impl ExtentAllocator>,
    namespace: u32,
    hash: ChunkHash,
    bytes: u64,
    near: Option<u32>,
    more: usize,
) -> Result<(Extent, SlotRef), Refusal> {
    let nowhere = Extent { offset: 0, len: 0 };
    let reference = state
        .slab
        .take(hash, namespace, nowhere)
        .ok_or(Refusal::Memory)?;
    let number = reference.slot;
    let demand = MemoryDemand {
        tenant: state.namespaces.tenant_of(namespace),
        kept: u64::MAX,
        bytes,
        near,
        more,
        owner: number,
    };
    let extent = demand
        .allocate(state)
        .inspect_err(|_| state.slab.free(number))?;
    state.slab.at_mut(number).extent = extent;
    state.namespaces.add_user(namespace);
    let taken = state.allocator.footprint(bytes);
    state.account(namespace, taken, SlotState::Free, SlotState::Staged);
    Ok((extent, reference))
}

/// Counts a refusal.
fn refuse(
    state: &mut CacheState<impl ExtentAllocator>,
    namespace: u32,
    why: Refusal,
) -> KeyOutcome {
    let tenant = state.namespaces.tenant_of(namespace);
    let tenant = state.namespaces.tenants.get_mut(tenant);
    match why {
        Refusal::Memory => {
            state.totals.refused += 1;
            if let Some(tenant) = tenant {
                tenant.totals.refused += 1;
            }
            KeyOutcome::NoMemory
        }
        Refusal::Quota => {
            state.totals.over_quota += 1;
            if let Some(tenant) = tenant {
                tenant.totals.over_quota += 1;
            }
            KeyOutcome::OverQuota
        }
        Refusal::Staging => KeyOutcome::OverStaging,
    }
}

/// Whether the limit of the tenant, also a soft one, allows it another staged object. It may always have one.
fn may_stage(state: &CacheState<impl ExtentAllocator>, namespace: u32, bytes: u64) -> bool {
    let tenant = state
        .namespaces
        .tenants
        .get(state.namespaces.tenant_of(namespace));
    !state.policy.isolates() || tenant.is_none_or(|tenant| tenant.may_stage(bytes))
}
