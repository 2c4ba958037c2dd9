//! In which order objects leave a full cache.
//!
//! One policy a file. The cache tells the policy which objects could leave; the policy says which one goes next.

mod lru;
mod noop;

pub use lru::Lru;
pub use noop::Noop;

use std::fmt;
use std::str::FromStr;

/// An object as a policy sees it: the number of its slot, and the tenant it is counted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The object's slot. Small and dense; reused once the object is gone.
    pub slot: u32,
    /// The interned cache salt, for policies that treat tenants apart.
    pub salt: u32,
}

/// The eviction order.
///
/// The caller guarantees: an object is inserted when nobody holds a lease on it, and withdrawn before anybody gets
/// one or it disappears, so whatever [`victim`](Self::victim) names may leave at once. A slot is inserted at most
/// once at a time. Objects of one batch are inserted and touched from the last chunk to the first.
///
/// The implementer guarantees: no allocation per object beyond dense tables by slot, constant time a call, and no
/// answer but an inserted slot.
pub trait EvictionPolicy: Send + fmt::Debug {
    /// The policy's name in configuration.
    fn name(&self) -> &'static str;

    /// Whether the policy ever names a victim.
    fn evicts(&self) -> bool {
        true
    }

    /// The object may leave from now on and has just been used.
    fn insert(&mut self, candidate: Candidate);

    /// The object may no longer be named: it is leased or gone. Does nothing for an object not inserted.
    fn withdraw(&mut self, candidate: Candidate);

    /// An inserted object has been used.
    fn touch(&mut self, candidate: Candidate);

    /// The object that should leave next; it stays inserted until withdrawn. `None`: nothing may leave.
    fn victim(&self) -> Option<u32>;

    /// Appends the objects that will probably leave next, at most `limit`: a hint, so that a batch of evictions can
    /// fetch what it needs from memory at once instead of one after the other.
    fn upcoming(&self, limit: usize, slots: &mut Vec<u32>);

    /// How many objects could leave.
    fn len(&self) -> usize;

    /// Whether nothing could leave.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The objects in the order in which they would leave, for invariant checks and tests.
    ///
    /// # Errors
    /// Says what is wrong when the policy's own structure is damaged.
    fn order(&self) -> Result<Vec<u32>, String>;

    /// Bytes of bookkeeping held.
    fn bookkeeping_bytes(&self) -> usize;
}

/// The policies by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictionKind {
    /// The least recently used object leaves first.
    #[default]
    Lru,
    /// Nothing ever leaves by itself.
    Noop,
}

impl EvictionKind {
    /// A new, empty policy of this kind.
    pub fn build(self) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::default()),
            Self::Noop => Box::new(Noop::default()),
        }
    }
}

/// The name is no eviction policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("eviction policy {name:?} is unknown: allowed are LRU and noop")]
pub struct UnknownPolicy {
    /// What was given.
    pub name: String,
}

impl FromStr for EvictionKind {
    type Err = UnknownPolicy;

    /// Names are those of LMCache 0.5.6's `--eviction-policy`, in any case.
    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        match name {
            _ if name.eq_ignore_ascii_case("lru") => Ok(Self::Lru),
            _ if name.eq_ignore_ascii_case("noop") => Ok(Self::Noop),
            _ => Err(UnknownPolicy {
                name: name.to_owned(),
            }),
        }
    }
}
