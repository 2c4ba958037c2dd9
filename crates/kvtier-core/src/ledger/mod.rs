//! The ledger: the cache's objects as the next process finds them, in memory that survives this one.
//!
//! It is an array of 64-bit words beside the arena. The cache writes it under its lock, the bytes of objects are elsewhere.
//! A process may be killed between any two words, so their order is the promise:
//!
//! * a record is valid only from its last word on, which is written when the object's bytes are in place
//! * it is invalid before the object's memory can be written again
//!
//! Reading believes nothing: see [`Snapshot`] for the checks, and `docs/operate.md` for what each case means.

mod format;
mod snapshot;

use crate::hashing::ChunkHash;
use crate::object_key::Namespace;
use format::{HEADER, Life, NAME, NAMES, ObjectRecord, RECORD, name_at, record_at};
use kvtier_common::extent::Extent;
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub use format::{FORMAT_VERSION, Identity, RECORD_BYTES, max_words};
pub(crate) use snapshot::FoundObject;
pub use snapshot::{Fault, LedgerError, Rejected, Snapshot};

/// Words that survive the process.
///
/// The implementer guarantees that a killed process leaves a prefix of the words that it has set, each whole.
pub trait Words: Send {
    /// A word; 0 where none was written.
    fn get(&self, at: u64) -> u64;

    /// Writes a word that was [reached](Self::reach).
    fn set(&mut self, at: u64, word: u64);

    /// Writes words that were reached together, in their order.
    #[inline]
    fn set_all(&mut self, at: u64, words: &[u64]) {
        for (at, word) in (at..).zip(words) {
            self.set(at, *word);
        }
    }

    /// End of the last words that were reached, by an earlier process too.
    fn end(&self) -> u64;

    /// Allocates memory for the words from one place to another; returns whether there was some.
    fn reach(&mut self, words: Range<u64>) -> bool;
}

/// State of an object with memory, as far as the next process has to know it, by its number in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectState {
    /// Readable.
    Resident = 1,
    /// Readable, and a client may be reading its memory.
    Read = 2,
    /// Not readable; a client may be writing or reading its memory.
    Withheld = 3,
}

/// An object as the cache records it.
#[derive(Clone, Copy, Debug)]
pub struct Object<'a> {
    /// The chunk.
    pub hash: &'a ChunkHash,
    /// Number of its namespace, which is another's after [`Journal::forget_namespace`].
    pub namespace: u32,
    /// Memory of the object.
    pub extent: Extent,
    /// Time of the last use, or the grant of memory that is not readable, in ticks of the cache's clock.
    pub used_at: u32,
}

/// Namespaces by their numbers.
pub trait Namespaces {
    /// The namespace of a number that is in use.
    fn namespace(&self, number: u32) -> Option<&Namespace>;
}

/// What a cache writes while it runs. Slots are the cache's; each has at most one object.
pub trait Journal: Send + fmt::Debug {
    /// Records an object in a slot that has none. Its namespace is asked for when its number is new.
    fn insert(
        &mut self,
        slot: u32,
        object: &Object<'_>,
        state: ObjectState,
        namespaces: &dyn Namespaces,
    );

    /// Updates state and last use of a slot's object.
    fn update(&mut self, slot: u32, state: ObjectState, used_at: u32);

    /// Removes a slot's object, if it has one.
    fn remove(&mut self, slot: u32);

    /// The number will be another namespace's.
    fn forget_namespace(&mut self, number: u32);

    /// Objects that could not be recorded so far: the next process does not have them.
    fn unrecorded(&self) -> u64;
}

/// A ledger in some words.
pub struct Ledger<W> {
    words: W,
    /// Mixed into every checksum, so that the words of another ledger are not believed.
    id: u64,
    /// Low half of each recorded namespace's checksum, 0 for none.
    names: Vec<u32>,
    /// Slots below this number have memory for their records.
    slots: u32,
    sequence: u64,
    unrecorded: u64,
}

impl<W> fmt::Debug for Ledger<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger")
            .field("names", &self.names.len())
            .field("sequence", &self.sequence)
            .field("unrecorded", &self.unrecorded)
            .finish_non_exhaustive()
    }
}

impl<W: Words> Ledger<W> {
    /// Makes an empty ledger, whatever the words held. `id` should never have been used before.
    ///
    /// # Errors
    /// The words cannot grow to the size of an empty ledger.
    pub fn create(mut words: W, id: u64, identity: &Identity) -> Result<Self, LedgerError> {
        if !words.reach(0..NAMES) {
            return Err(LedgerError::Memory);
        }
        format::write_header(&mut words, id, identity);
        Ok(Self {
            words,
            id,
            names: Vec::new(),
            slots: 0,
            sequence: 0,
            unrecorded: 0,
        })
    }

    /// Opens the ledger of an earlier process. `now` is a moment of the identity's clock, `capacity` the bytes of the arena, and
    /// `align` the power of two at whose multiples objects begin. The identity's own origin is not compared.
    ///
    /// # Errors
    /// See [`LedgerError`], with the words.
    pub fn open(
        mut words: W,
        identity: &Identity,
        now: u64,
        capacity: u64,
        align: u64,
    ) -> Result<(Self, Snapshot), (LedgerError, W)> {
        let header = match format::read_header(&words) {
            None => return Err((LedgerError::Absent, words)),
            Some(Err(())) => return Err((LedgerError::Damaged, words)),
            Some(Ok(header)) => header,
        };
        let found = &header.identity;
        let error = match () {
            () if header.version != FORMAT_VERSION => Some(LedgerError::Version(header.version)),
            () if found.arena != identity.arena => Some(LedgerError::Other("arena")),
            () if found.chunk_size != identity.chunk_size => Some(LedgerError::Other("chunk size")),
            () if found.hash_algorithm != identity.hash_algorithm => Some(LedgerError::Other(
                "hash algorithm or seed (PYTHONHASHSEED)",
            )),
            () if found.tenants != identity.tenants => {
                Some(LedgerError::Other("naming of tenants (--hash-salts)"))
            }
            () if found.instance != identity.instance => Some(LedgerError::Other("instance")),
            () if found.origin > now => Some(LedgerError::Clock),
            () => None,
        };
        if let Some(error) = error {
            return Err((error, words));
        }
        let slots = format::slots(&words);
        // Also those that no process has written: what is written from here on has to be readable.
        if slots > 0 && !words.reach(record_at(0)..record_at(slots)) {
            return Err((LedgerError::Memory, words));
        }
        let mut ledger = Self {
            id: header.id,
            names: vec![0; header.names as usize],
            slots,
            sequence: 0,
            unrecorded: 0,
            words,
        };
        let ticks = ticks(found.origin, now);
        let mut snapshot = Snapshot {
            objects: Vec::new(),
            namespaces: vec![None; header.names as usize],
            rejected: Rejected::default(),
            has_lost_granted: false,
            has_unrecorded_grant: format::has_unrecorded_grant(&ledger.words),
            origin: found.origin,
        };
        ledger.read_names(&mut snapshot);
        ledger.read_objects(&mut snapshot, ticks, capacity, align);
        ledger.leave_out_overlaps(&mut snapshot, align);
        Ok((ledger, snapshot))
    }

    /// Reads the names. The objects of one that is damaged, or is another number's too, are left out, one by one: the number
    /// will be another namespace's.
    fn read_names(&mut self, snapshot: &mut Snapshot) {
        let mut known = HashSet::new();
        for (number, namespace) in (0..).zip(&mut snapshot.namespaces) {
            let Some(Ok((found, reference))) = format::read_name(&self.words, self.id, number)
            else {
                continue;
            };
            let found = Arc::new(found);
            self.names[number as usize] = reference;
            if known.insert(Arc::clone(&found)) {
                *namespace = Some(found)
            } else {
                self.forget_namespace(number)
            }
        }
    }

    fn read_objects(&mut self, snapshot: &mut Snapshot, now: u32, capacity: u64, align: u64) {
        for slot in 0..self.slots {
            let Some(read) = format::read_record(&self.words, self.id, slot) else {
                continue;
            };
            let found = read
                .map_err(|()| Fault::Checksum)
                .and_then(|(record, life)| {
                    let known = self.names.get(record.namespace as usize);
                    let known = known.filter(|reference| **reference != 0);
                    let is_inside = record.extent.end().is_some_and(|end| end <= capacity);
                    match () {
                        () if known != Some(&record.reference) => Err(Fault::Namespace),
                        () if !is_inside || record.extent.len == 0 => Err(Fault::Bounds),
                        () if !record.extent.offset.is_multiple_of(align) => Err(Fault::Alignment),
                        () => Ok(FoundObject {
                            slot,
                            hash: record.hash,
                            extent: record.extent,
                            namespace: record.namespace,
                            state: life.state,
                            used_at: life.used_at.min(now),
                            sequence: record.sequence,
                        }),
                    }
                });
            match found {
                Ok(found) => {
                    self.sequence = self.sequence.max(found.sequence);
                    snapshot.objects.push(found);
                }
                Err(fault) => self.leave_out(snapshot, slot, fault),
            }
        }
    }

    /// Leaves out an object, for later processes too.
    pub(crate) fn leave_out(&mut self, snapshot: &mut Snapshot, slot: u32, fault: Fault) {
        snapshot.rejected.add(fault);
        if let Some(Ok((_, life))) = format::read_record(&self.words, self.id, slot) {
            snapshot.has_lost_granted |= life.state != ObjectState::Resident;
            // Before the record is removed: this process may end before it has made another arena.
            self.note_grant(life.state);
        }
        self.remove(slot);
    }

    /// Sorts objects by their memory, and leaves out those that share some: which of them has it is unknown.
    fn leave_out_overlaps(&mut self, snapshot: &mut Snapshot, align: u64) {
        let mut objects = std::mem::take(&mut snapshot.objects);
        objects.sort_unstable_by_key(|found| found.extent.offset);
        let mut overlap = vec![false; objects.len()];
        // Of those so far, the one that ends last.
        let (mut last, mut end) = (0, 0);
        for (at, found) in objects.iter().enumerate() {
            if found.extent.offset < end {
                overlap[last] = true;
                overlap[at] = true;
            }
            let own = (found.extent.offset + found.extent.len).next_multiple_of(align);
            if own > end {
                (last, end) = (at, own);
            }
        }
        let mut at = 0;
        objects.retain(|found| {
            let is_alone = !overlap[at];
            at += 1;
            if !is_alone {
                self.leave_out(snapshot, found.slot, Fault::Overlap);
            }
            is_alone
        });
        snapshot.objects = objects;
    }

    /// Allocates memory for the record of a slot, and for those before it; returns whether it has some.
    #[inline]
    fn reach(&mut self, slot: u32) -> bool {
        slot < self.slots || self.grow(slot)
    }

    /// Counts an object without a record.
    #[cold]
    fn leave_unrecorded(&mut self, state: ObjectState) {
        self.unrecorded += 1;
        self.note_grant(state);
    }

    /// Notes that an object in this state has no record. To the next process its memory is free, and a client may be copying it.
    #[cold]
    fn note_grant(&mut self, state: ObjectState) {
        if state != ObjectState::Resident {
            format::set_unrecorded_grant(&mut self.words, true);
        }
    }

    /// Forgets that grants could not be recorded, when the clients of the earlier process are known to have ended.
    pub fn forget_unrecorded_grants(&mut self) {
        if format::has_unrecorded_grant(&self.words) {
            format::set_unrecorded_grant(&mut self.words, false);
        }
    }

    #[cold]
    fn grow(&mut self, slot: u32) -> bool {
        let wanted = record_at(self.slots)..record_at(slot) + RECORD;
        let is_reached = self.words.reach(wanted);
        if is_reached {
            self.slots = slot + 1;
        }
        is_reached
    }

    /// The reference to a namespace in records, written first if it is new; `None` if it cannot be recorded.
    #[inline]
    fn refer(&mut self, number: u32, namespaces: &dyn Namespaces) -> Option<u32> {
        match self.names.get(number as usize) {
            Some(&known) if known != 0 => Some(known),
            _ => self.write_name(number, namespaces.namespace(number)?),
        }
    }

    #[cold]
    fn write_name(&mut self, number: u32, namespace: &Namespace) -> Option<u32> {
        let at = name_at(number)?;
        if !self.words.reach(at..at + NAME) {
            return None;
        }
        let reference = format::write_name(&mut self.words, at, self.id, number, namespace)?;
        let number = number as usize;
        if self.names.len() <= number {
            self.names.resize(number + 1, 0);
            format::write_names_len(&mut self.words, self.id, self.names.len() as u64);
        }
        self.names[number] = reference;
        Some(reference)
    }
}

/// Ticks of the cache's clock at `now`.
fn ticks(origin: u64, now: u64) -> u32 {
    u32::try_from((now - origin) / (1_000_000_000 / 10)).unwrap_or(u32::MAX)
}

impl<W: Words> Journal for Ledger<W> {
    #[inline]
    fn insert(
        &mut self,
        slot: u32,
        object: &Object<'_>,
        state: ObjectState,
        namespaces: &dyn Namespaces,
    ) {
        if !self.reach(slot) {
            self.leave_unrecorded(state);
            return;
        }
        let at = record_at(slot);
        let Some(reference) = self.refer(object.namespace, namespaces) else {
            format::invalidate(&mut self.words, at);
            self.leave_unrecorded(state);
            return;
        };
        self.sequence += 1;
        let record = ObjectRecord {
            hash: *object.hash,
            extent: object.extent,
            namespace: object.namespace,
            reference,
            sequence: self.sequence,
        };
        let life = Life {
            state,
            used_at: object.used_at,
        };
        format::write_record(&mut self.words, at, self.id, slot, &record, life);
    }

    #[inline]
    fn update(&mut self, slot: u32, state: ObjectState, used_at: u32) {
        let life = Life { state, used_at };
        let is_recorded =
            slot < self.slots && format::write_life(&mut self.words, record_at(slot), life);
        if !is_recorded {
            self.note_grant(state);
        }
    }

    #[inline]
    fn remove(&mut self, slot: u32) {
        if slot < self.slots {
            format::remove_record(&mut self.words, record_at(slot));
        }
    }

    fn forget_namespace(&mut self, number: u32) {
        if let Some(known) = self.names.get_mut(number as usize)
            && std::mem::replace(known, 0) != 0
            && let Some(at) = name_at(number)
        {
            format::remove_name(&mut self.words, at);
        }
    }

    fn unrecorded(&self) -> u64 {
        self.unrecorded
    }
}

const _: () = assert!(HEADER < NAMES && RECORD_BYTES < 160);
