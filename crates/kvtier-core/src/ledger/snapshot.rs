//! Reading a ledger: what is believed, and why the rest is not.

use super::ObjectState;
use super::format::FORMAT_VERSION;
use crate::hashing::ChunkHash;
use crate::object_key::Namespace;
use kvtier_common::extent::Extent;
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
pub(crate) struct FoundObject {
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
    pub(crate) objects: Vec<FoundObject>,
    /// Namespaces by number, as far as objects have them.
    pub(crate) namespaces: Vec<Option<Arc<Namespace>>>,
    pub(crate) rejected: Rejected,
    /// Whether clients may still copy memory of an object that was left out.
    pub(super) has_lost_granted: bool,
    /// Whether clients may still copy memory that no record names.
    pub(super) has_unrecorded_grant: bool,
    /// Moment of tick 0.
    pub(super) origin: u64,
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
