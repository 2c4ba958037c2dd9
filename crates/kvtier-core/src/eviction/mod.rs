//! Eviction policies: the order in which objects are evicted from a full cache.
//!
//! One policy per file. The cache inserts evictable objects into the policy; the policy names the next victim.

mod arc;
mod isolated;
mod list;
mod lru;
mod noop;
pub(crate) mod pins;

pub use arc::ArcPolicy;
pub use isolated::IsolatedLru;
pub use lru::Lru;
pub use noop::Noop;

use std::fmt;
use std::str::FromStr;

use crate::violation::Violation;

/// An object as a policy sees it: its slot and its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The object's slot. Small and dense; reused once the object was removed.
    pub slot: u32,
    /// The tenant's number, for policies that keep tenants separate.
    pub tenant: u32,
}

/// The eviction order.
///
/// The caller guarantees: an object is inserted while it has no lease and no pin, and removed before it gets one or is removed
/// from the cache, so that the [`victim`](Self::victim) may be evicted at once. A slot is inserted at most once at a time.
/// Objects of one batch are inserted and touched from the last chunk to the first.
///
/// The implementer guarantees: no allocation per object beyond dense tables by slot and a bounded memory of evicted keys,
/// constant time per call, and victims that are inserted slots.
pub trait EvictionPolicy: Send + fmt::Debug {
    /// The policy's name in configuration.
    fn name(&self) -> &'static str;

    /// Whether the policy ever names a victim.
    fn evicts(&self) -> bool {
        true
    }

    /// Records a new object of the cache; an insertion follows. `key` is a hash of the object's key, the same whenever the
    /// key returns.
    fn admit(&mut self, _candidate: Candidate, _key: u64) {}

    /// Records the eviction of an object, which was removed before.
    fn evicted(&mut self, _candidate: Candidate, _key: u64) {}

    /// Inserts an object that may be evicted from now on. `was_used`: it was used while it was not inserted, storing it
    /// aside.
    fn insert(&mut self, candidate: Candidate, was_used: bool);

    /// Inserts an object that is to be evicted before those inserted otherwise, and after those inserted so before.
    fn insert_first(&mut self, candidate: Candidate);

    /// Removes an object that is leased, pinned or no longer in the cache. Does nothing if it is not inserted.
    fn remove(&mut self, candidate: Candidate);

    /// Records a use of an inserted object.
    fn touch(&mut self, candidate: Candidate);

    /// The object to evict next; it stays inserted until removed. `None`: nothing may be evicted.
    fn victim(&mut self) -> Option<u32>;

    /// Whether every tenant has its own order, so that limits and shares can be enforced.
    fn isolates(&self) -> bool {
        false
    }

    /// The object of one tenant to evict next, protected or not; `None` if tenants have no orders of their own.
    fn victim_of(&self, _tenant: u32) -> Option<u32> {
        None
    }

    /// Forbids, or allows again, [`victim`](Self::victim) to name objects of this tenant. Only for policies that isolate.
    fn protect(&mut self, _tenant: u32, _protected: bool) {}

    /// Appends the objects that will probably be evicted next, of one tenant or of all, at most `limit`: a hint, so that a
    /// batch of evictions fetches their metadata from memory at once instead of one after the other.
    fn upcoming(&self, tenant: Option<u32>, limit: usize, slots: &mut Vec<u32>);

    /// Number of objects inserted.
    fn len(&self) -> usize;

    /// Whether no object is inserted.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The objects in eviction order, protected ones included: for invariant checks and tests.
    ///
    /// # Errors
    /// A description of the damage to the policy's own structure.
    fn order(&self) -> Result<Vec<u32>, Violation>;

    /// Bytes of bookkeeping.
    fn bookkeeping_bytes(&self) -> usize;
}

/// The policies by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictionKind {
    /// Evicts the least recently used object.
    #[default]
    Lru,
    /// Each tenant has its own order; evicts the least recently used object of all unprotected tenants.
    IsolatedLru,
    /// Adaptive replacement: objects used once and objects used again, balanced by what was missed.
    Arc,
    /// Evicts nothing.
    Noop,
}

impl EvictionKind {
    /// The name in configuration and status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "LRU",
            Self::IsolatedLru => "IsolatedLRU",
            Self::Arc => "ARC",
            Self::Noop => "noop",
        }
    }

    /// A new, empty policy of this kind.
    pub fn build(self) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::default()),
            Self::IsolatedLru => Box::new(IsolatedLru::default()),
            Self::Arc => Box::new(ArcPolicy::default()),
            Self::Noop => Box::new(Noop::default()),
        }
    }
}

/// Unknown name of an eviction policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "eviction policy {name:?} is unknown: allowed are LRU, IsolatedLRU (or UserLRU), ARC and noop"
)]
pub struct UnknownPolicy {
    /// The given name.
    pub name: String,
}

impl FromStr for EvictionKind {
    type Err = UnknownPolicy;

    /// Names are those of LMCache 0.5.6's `--eviction-policy`, in any case.
    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let kinds = [Self::Lru, Self::IsolatedLru, Self::Arc, Self::Noop];
        // The name of the older design.
        let name_now = if name.eq_ignore_ascii_case("UserLRU") {
            "IsolatedLRU"
        } else {
            name
        };
        let found = kinds
            .into_iter()
            .find(|kind| kind.name().eq_ignore_ascii_case(name_now));
        found.ok_or_else(|| UnknownPolicy {
            name: name.to_owned(),
        })
    }
}
