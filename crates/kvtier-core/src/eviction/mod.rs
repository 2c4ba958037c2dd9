//! In which order objects leave a full cache.
//!
//! One policy a file. The cache tells the policy which objects could leave; the policy says which one goes next.

mod arc;
mod isolated;
mod list;
mod lru;
mod noop;

pub use arc::Adaptive;
pub use isolated::IsolatedLru;
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
/// The implementer guarantees: no allocation per object beyond dense tables by slot and a bounded memory of keys
/// that left, constant time a call, and no answer but an inserted slot.
pub trait EvictionPolicy: Send + fmt::Debug {
    /// The policy's name in configuration.
    fn name(&self) -> &'static str;

    /// Whether the policy ever names a victim.
    fn evicts(&self) -> bool {
        true
    }

    /// A new object is in the cache; an insertion follows. `key` is a hash of the object's key, the same each time the
    /// key comes back.
    fn admit(&mut self, _candidate: Candidate, _key: u64) {}

    /// The object was withdrawn and left the cache to make room.
    fn evicted(&mut self, _candidate: Candidate, _key: u64) {}

    /// The object may leave from now on. `was_used`: somebody used it while it could not, other than by bringing it here.
    fn insert(&mut self, candidate: Candidate, was_used: bool);

    /// The object may no longer be named: it is leased or gone. Does nothing for an object not inserted.
    fn withdraw(&mut self, candidate: Candidate);

    /// An inserted object has been used.
    fn touch(&mut self, candidate: Candidate);

    /// The object that should leave next; it stays inserted until withdrawn. `None`: nothing may leave.
    fn victim(&mut self) -> Option<u32>;

    /// Whether every tenant has an order of its own, so that limits and shares can hold.
    fn isolates(&self) -> bool {
        false
    }

    /// The object of one tenant that should leave next, protected or not; `None` where tenants have no order of their
    /// own.
    fn victim_of(&self, _salt: u32) -> Option<u32> {
        None
    }

    /// From now on [`victim`](Self::victim) must not, or may again, name objects of this tenant. Only for policies that
    /// isolate.
    fn protect(&mut self, _salt: u32, _protected: bool) {}

    /// Appends the objects that will probably leave next, of one tenant or of all, at most `limit`: a hint, so that a
    /// batch of evictions can fetch what it needs from memory at once instead of one after the other.
    fn upcoming(&self, salt: Option<u32>, limit: usize, slots: &mut Vec<u32>);

    /// How many objects could leave.
    fn len(&self) -> usize;

    /// Whether nothing could leave.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The objects in the order in which they would leave, protected ones included, for invariant checks and tests.
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
    /// Each tenant has an order of its own; the least recently used object of all that may leave goes first.
    IsolatedLru,
    /// Adaptive replacement: objects used once and objects used again, balanced by what was missed.
    Arc,
    /// Nothing ever leaves by itself.
    Noop,
}

impl EvictionKind {
    /// The name in configuration and in what the server tells.
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
            Self::Arc => Box::new(Adaptive::default()),
            Self::Noop => Box::new(Noop::default()),
        }
    }
}

/// The name is no eviction policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "eviction policy {name:?} is unknown: allowed are LRU, IsolatedLRU (or UserLRU), ARC and noop"
)]
pub struct UnknownPolicy {
    /// What was given.
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
