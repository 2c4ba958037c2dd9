//! Transfers between PREPARE and COMMIT: memory that a client is writing or reading by itself.
//!
//! A client maps the arena and copies without us, so no clock can tell that it has stopped. Memory lent this way comes
//! back when the client says so (commit, a new prepare of the same transfer, unregister, a new registration). What
//! nobody commits in time can no longer be committed, but its memory stays lent ([`Transfers::expire`]) until the
//! instance is gone; and an instance that merely fell silent keeps its memory for one more write TTL, since a stopped
//! process may still wake up and write.
//!
//! The mutex guards the two tables. Reservations and leases are dropped only after it is released.

use std::collections::HashMap;
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
    /// To read; one lease an object group.
    Retrieve(
        #[expect(dead_code, reason = "held, to be released when dropped")]
        Vec<ReadLease<L1Allocator>>,
    ),
}

struct Pending {
    lent: Lent,
    since: Duration,
}

/// Memory that nobody can commit any more, and whose borrower may still use it.
struct Withheld {
    instance: InstanceId,
    /// When it may go at the latest, once its instance is known to be gone.
    until: Option<Duration>,
    /// Held only to be dropped.
    _lent: Lent,
}

#[derive(Default)]
struct Tables {
    pending: HashMap<TransferId, Pending>,
    withheld: Vec<Withheld>,
}

/// All transfers under way.
#[derive(Default)]
pub struct Transfers {
    tables: Mutex<Tables>,
}

impl Transfers {
    /// Notes a transfer. An earlier one of the same id is over: its client has asked again.
    pub fn begin(&self, id: TransferId, lent: Lent, now: Duration) {
        let earlier = self
            .tables
            .lock()
            .pending
            .insert(id, Pending { lent, since: now });
        drop(earlier);
    }

    /// Ends a transfer and gives what was lent.
    pub fn finish(&self, id: &TransferId) -> Option<Lent> {
        self.tables
            .lock()
            .pending
            .remove(id)
            .map(|pending| pending.lent)
    }

    /// An instance said that it is done: all it had comes back at once. Gives the number of transfers.
    pub fn release(&self, instance: InstanceId) -> usize {
        let mut tables = self.tables.lock();
        let pending: Vec<_> = tables
            .pending
            .extract_if(|id, _| id.instance == instance)
            .collect();
        let withheld: Vec<_> = tables
            .withheld
            .extract_if(.., |held| held.instance == instance)
            .collect();
        drop(tables);
        pending.len() + withheld.len()
    }

    /// An instance fell silent: its transfers can no longer be committed; their memory comes back at `until`.
    pub fn abandon(&self, instance: InstanceId, until: Duration) -> usize {
        let mut tables = self.tables.lock();
        for held in tables
            .withheld
            .iter_mut()
            .filter(|held| held.instance == instance)
        {
            held.until.get_or_insert(until);
        }
        let pending: Vec<_> = tables
            .pending
            .extract_if(|id, _| id.instance == instance)
            .collect();
        let count = pending.len();
        let withheld = pending.into_iter().map(|(_, pending)| Withheld {
            instance,
            until: Some(until),
            _lent: pending.lent,
        });
        tables.withheld.extend(withheld);
        count
    }

    /// Gives up transfers that began before `limit` and frees withheld memory whose time has come.
    /// Gives the number of transfers given up.
    pub fn expire(&self, limit: Duration, now: Duration) -> usize {
        let mut tables = self.tables.lock();
        let due: Vec<_> = tables
            .withheld
            .extract_if(.., |held| held.until.is_some_and(|until| until <= now))
            .collect();
        let expired: Vec<_> = tables
            .pending
            .extract_if(|_, pending| pending.since < limit)
            .collect();
        let count = expired.len();
        let withheld = expired.into_iter().map(|(id, pending)| Withheld {
            instance: id.instance,
            until: None,
            _lent: pending.lent,
        });
        tables.withheld.extend(withheld);
        drop(tables);
        drop(due);
        count
    }

    /// Transfers under way, and lots of memory withheld.
    pub fn counts(&self) -> (usize, usize) {
        let tables = self.tables.lock();
        (tables.pending.len(), tables.withheld.len())
    }
}
