//! Reading a ledger: what is believed, and why the rest is not.

use super::format::{self, FORMAT_VERSION, Identity, record_at, slots};
use super::{Journal, Ledger, ObjectState, Words};
use crate::hashing::ChunkHash;
use crate::object_key::Namespace;
use kvtier_common::extent::Extent;
use std::collections::HashSet;
use std::sync::Arc;

/// Why a ledger is not read at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// The words are no ledger, or one that was not finished.
    #[error("there is none")]
    Absent,
    /// The header's checksum is wrong.
    #[error("its header is damaged")]
    Damaged,
    /// Another format version.
    #[error("it has format version {0}, and this server reads only {FORMAT_VERSION}")]
    Version(u64),
    /// Ledger of other objects: this part of the identity differs.
    #[error("it is of another {0}")]
    Other(&'static str),
    /// Moment of tick 0 in the future.
    #[error("its clock is ahead")]
    Clock,
    /// No memory for a ledger.
    #[error("there is no memory for one")]
    Memory,
}

/// Why an object is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// The checksum of its record is wrong, or its state is none.
    Checksum,
    /// Unknown, damaged or different namespace.
    Namespace,
    /// Memory not fully in the arena: L1 may be smaller than it was.
    Bounds,
    /// Memory that begins between two multiples of the alignment.
    Alignment,
    /// Memory shared with another object, which is left out as well.
    Overlap,
    /// Another object has the same key.
    Duplicate,
}

impl Fault {
    /// All reasons.
    pub const ALL: [Self; 6] = [
        Self::Checksum,
        Self::Namespace,
        Self::Bounds,
        Self::Alignment,
        Self::Overlap,
        Self::Duplicate,
    ];

    /// Name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Checksum => "checksum",
            Self::Namespace => "namespace",
            Self::Bounds => "bounds",
            Self::Alignment => "alignment",
            Self::Overlap => "overlap",
            Self::Duplicate => "duplicate",
        }
    }
}

/// Objects left out, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejected([u64; Fault::ALL.len()]);

impl Rejected {
    pub(crate) fn add(&mut self, fault: Fault) {
        self.0[fault as usize] += 1;
    }

    /// The number for one reason.
    pub fn get(&self, fault: Fault) -> u64 {
        self.0[fault as usize]
    }

    /// The reasons that there were, and the number for each.
    pub fn reasons(&self) -> impl Iterator<Item = (Fault, u64)> {
        let all = Fault::ALL.into_iter().map(|fault| (fault, self.get(fault)));
        all.filter(|(_, count)| *count > 0)
    }

    /// Number for all reasons.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// An object that is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) slot: u32,
    pub(crate) hash: ChunkHash,
    pub(crate) extent: Extent,
    /// Number of the namespace.
    pub(crate) namespace: u32,
    pub(crate) state: ObjectState,
    pub(crate) used_at: u32,
    pub(crate) sequence: u64,
}

/// A ledger's content.
///
/// Checked are: mark, version, checksum and identity of the header; of each record its checksums, its namespace, and that
/// its memory is in the arena, aligned, and no other object's. What the header says nothing about is left out alone.
#[derive(Debug)]
pub struct Snapshot {
    /// Objects in the order of their memory.
    pub(crate) objects: Vec<Found>,
    /// Namespaces by number, as far as objects have them.
    pub(crate) namespaces: Vec<Option<Arc<Namespace>>>,
    pub(crate) rejected: Rejected,
    /// Whether clients may still copy memory of an object that was left out.
    has_lost_granted: bool,
    /// Whether clients may still copy memory that no record names.
    has_unrecorded_grant: bool,
    /// Moment of tick 0.
    origin: u64,
}

impl Snapshot {
    /// Moment of tick 0 of the cache's clock.
    pub fn origin(&self) -> u64 {
        self.origin
    }

    /// Number of objects that are believed.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Memory that clients of the earlier process may still copy.
    pub fn granted(&self) -> impl Iterator<Item = Extent> {
        let granted = self.objects.iter();
        let granted = granted.filter(|found| found.state != ObjectState::Resident);
        granted.map(|found| found.extent)
    }

    /// Whether no object is.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Whether clients of the earlier process may still copy memory of objects that were left out, which so could be granted to
    /// others. A damaged record says nothing about that.
    pub fn has_lost_granted(&self) -> bool {
        self.has_lost_granted
    }

    /// Whether clients of the earlier process may still copy memory whose grant it could not record, so that it is unknown which.
    pub fn has_unrecorded_grant(&self) -> bool {
        self.has_unrecorded_grant
    }

    /// Objects left out so far.
    pub fn rejected(&self) -> &Rejected {
        &self.rejected
    }
}

/// Ticks of the cache's clock at `now`.
fn ticks(origin: u64, now: u64) -> u32 {
    u32::try_from((now - origin) / (1_000_000_000 / 10)).unwrap_or(u32::MAX)
}

impl<W: Words> Ledger<W> {
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
        let slots = slots(&words);
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
                        () => Ok(Found {
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
}
