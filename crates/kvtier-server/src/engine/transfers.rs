//! Transfers between PREPARE and COMMIT: memory that a client is writing or reading by itself.
//!
//! A client maps the arena and copies without us, so nothing but its own word tells that it has stopped: a commit ends a
//! transfer and gives its memory back. Until then one id has one store: a second PREPARE of it is lent nothing, so that
//! a COMMIT never means other slots than those that were written. Retrieves of one id are counted, and the last COMMIT
//! ends them all.
//!
//! What is not committed in time can no longer be, but its memory stays lent ([`Transfers::expire`]) as long as its
//! instance is registered. An instance that has left, was replaced or fell silent keeps its memory for one more write
//! TTL ([`Transfers::abandon`]): clients of LMCache finish their copies after the unregistration was answered, and a
//! stopped process may wake up.
//!
//! The mutex guards the two tables. Reservations and leases are dropped only after it is released.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

use kvtier_core::ChunkHash;
use kvtier_core::cache::{ReadLease, Reservation};
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::InstanceId;
use parking_lot::Mutex;

use super::memory::L1Allocator;

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The client writes.
    Store,
    /// The client reads.
    Retrieve,
}

/// What makes two PREPAREs or a PREPARE and a COMMIT the same transfer.
///
/// LMCache compares the key without its request id; with it, two requests with equal prompts do not share a transfer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TransferId {
    instance: InstanceId,
    kind: Kind,
    request_id: Box<str>,
    model_name: Box<str>,
    cache_salt: Box<str>,
    world_size: u32,
    worker_id: Option<u32>,
    start: u64,
    end: u64,
    /// Stands for all tokens up to the end of the range.
    last_hash: Option<ChunkHash>,
}

impl TransferId {
    /// The transfer a key names.
    pub fn new<T>(
        kind: Kind,
        instance: InstanceId,
        key: &CacheKey<'_, T>,
        last_hash: Option<ChunkHash>,
    ) -> Self {
        Self {
            instance,
            kind,
            request_id: key.request_id.into(),
            model_name: key.model_name.into(),
            cache_salt: key.cache_salt.into(),
            world_size: key.world_size,
            worker_id: key.worker_id,
            start: key.start,
            end: key.end,
            last_hash,
        }
    }
}

/// Memory lent to a client.
pub enum Lent {
    /// To write.
    Store(Reservation<L1Allocator>),
    /// To read; one lease an object group, of every PREPARE.
    Retrieve(Vec<ReadLease<L1Allocator>>),
}

struct Pending {
    lent: Lent,
    /// PREPAREs whose COMMIT has not come.
    prepared: usize,
    /// Time of the last PREPARE.
    since: Duration,
}

/// Memory that nobody can commit any more, and whose borrower may still use it.
struct Withheld {
    id: TransferId,
    /// When it may go, once its instance is gone. Before that only a COMMIT ends it.
    until: Option<Duration>,
    /// Held only to be dropped.
    _lent: Lent,
}

#[derive(Default)]
struct Tables {
    pending: HashMap<TransferId, Pending>,
    withheld: Vec<Withheld>,
}

impl Tables {
    fn withhold(
        &mut self,
        until: Option<Duration>,
        gone: impl Fn(&TransferId, &Pending) -> bool,
    ) -> usize {
        let before = self.withheld.len();
        let taken = self.pending.extract_if(|id, pending| gone(id, pending));
        self.withheld.extend(taken.map(|(id, pending)| Withheld {
            id,
            until,
            _lent: pending.lent,
        }));
        self.withheld.len() - before
    }
}

/// What a COMMIT ends.
pub enum Finish {
    /// The transfer.
    Last(Lent),
    /// One of several retrieves of it.
    Earlier,
    /// Nothing that could be committed.
    Unknown,
}

/// All transfers under way.
#[derive(Default)]
pub struct Transfers {
    tables: Mutex<Tables>,
}

impl Transfers {
    /// Whether a transfer is between its PREPARE and its COMMIT.
    pub fn is_pending(&self, id: &TransferId) -> bool {
        self.tables.lock().pending.contains_key(id)
    }

    /// Notes what a PREPARE has lent; false, and nothing is lent, when a store of this id is under way.
    pub fn begin(&self, id: TransferId, lent: Lent, now: Duration) -> bool {
        let mut tables = self.tables.lock();
        let refused = match (tables.pending.entry(id), lent) {
            (Entry::Vacant(free), lent) => {
                free.insert(Pending {
                    lent,
                    prepared: 1,
                    since: now,
                });
                None
            }
            (Entry::Occupied(mut earlier), lent) => {
                let earlier = earlier.get_mut();
                match (&mut earlier.lent, lent) {
                    (Lent::Retrieve(leases), Lent::Retrieve(more)) => {
                        leases.extend(more);
                        earlier.prepared += 1;
                        earlier.since = now;
                        None
                    }
                    (_, lent) => Some(lent),
                }
            }
        };
        drop(tables);
        refused.is_none()
    }

    /// A COMMIT. A late one ends a transfer that was given up: its memory comes back, and there is nothing to commit.
    pub fn finish(&self, id: &TransferId) -> Finish {
        let mut tables = self.tables.lock();
        if let Entry::Occupied(mut pending) = tables.pending.entry(id.clone()) {
            pending.get_mut().prepared -= 1;
            return match pending.get().prepared {
                0 => Finish::Last(pending.remove().lent),
                _ => Finish::Earlier,
            };
        }
        let late = tables
            .withheld
            .iter()
            .position(|held| held.until.is_none() && held.id == *id)
            .map(|index| tables.withheld.swap_remove(index));
        drop(tables);
        drop(late);
        Finish::Unknown
    }

    /// An instance has left, was replaced or fell silent: its transfers can no longer be committed, and their memory
    /// comes back at `until`. Gives the number of transfers that were under way.
    pub fn abandon(&self, instance: InstanceId, until: Duration) -> usize {
        let mut tables = self.tables.lock();
        for held in &mut tables.withheld {
            if held.id.instance == instance {
                held.until.get_or_insert(until);
            }
        }
        tables.withhold(Some(until), |id, _| id.instance == instance)
    }

    /// Gives up transfers that began before `limit` and frees withheld memory whose time has come.
    /// Gives the number of transfers given up.
    pub fn expire(&self, limit: Duration, now: Duration) -> usize {
        let mut tables = self.tables.lock();
        let due: Vec<_> = tables
            .withheld
            .extract_if(.., |held| held.until.is_some_and(|until| until <= now))
            .collect();
        let given_up = tables.withhold(None, |_, pending| pending.since < limit);
        drop(tables);
        drop(due);
        given_up
    }

    /// Transfers under way, and lots of memory withheld.
    pub fn counts(&self) -> (usize, usize) {
        let tables = self.tables.lock();
        (tables.pending.len(), tables.withheld.len())
    }
}
