//! The structures inside payloads, each with its reader and writer side by side.
//!
//! Structures are maps by name (LMCache 0.5.6): unknown fields are skipped, missing ones take their default
//! or are an error, and all fields are written, in declared order.

mod context;
mod layout;
mod records;

pub use context::{EngineDrivenContext, GroupLayout};
pub use layout::{
    EngineGroupInfo, EngineType, HELD_BLOCKS, HELD_BLOCKS_FEATURE, KvLayoutName, KvListLayout,
    LayoutHints,
};
pub use records::{AllocationRecord, LayoutDescriptor, MatchedSegment, ObjectKeyParts};

use crate::wire::{self, DecodeError, Reader};

/// Most tensors of one registration. Real ones have a few per layer.
pub const MAX_TENSORS: usize = 4096;
/// Most groups of layers, each with its own block ids. Real models have a few.
pub const MAX_GROUPS: usize = 4096;

/// A registered engine worker, as the engine numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId(pub i64);

impl std::fmt::Display for InstanceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Reference to a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JobRef<'a> {
    /// By the engine's request: from 0.4.4.
    Request(&'a str),
    /// By the number that the lookup returned: 0.4.2 and 0.4.3.
    Job(i64),
}

/// A time span in seconds; clients send whichever number they hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Seconds {
    /// Whole seconds, an int on the wire.
    Whole(i64),
    /// A float on the wire.
    Fraction(f64),
}

impl Seconds {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        if wire::is_int(reader.peek()?) {
            return reader.int().map(Self::Whole);
        }
        reader.f64().map(Self::Fraction)
    }

    /// The span as a float; may be negative or not finite.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Whole(seconds) => seconds as f64,
            Self::Fraction(seconds) => seconds,
        }
    }

    /// The span as a duration of at most `limit`; negative and undefined spans are none.
    #[must_use]
    pub fn clamped(self, limit: std::time::Duration) -> std::time::Duration {
        let seconds = self.as_f64();
        if seconds.is_nan() || seconds <= 0.0 {
            return std::time::Duration::ZERO;
        }
        std::time::Duration::try_from_secs_f64(seconds).map_or(limit, |span| span.min(limit))
    }
}
