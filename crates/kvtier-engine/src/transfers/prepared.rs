//! Transfers between PREPARE and COMMIT: memory that a client is writing or reading by itself.
//!
//! A client maps the arena and copies by itself, so only its own COMMIT shows that it has stopped: a COMMIT ends a
//! transfer and releases its memory. Until then one id has one store: a second PREPARE of it is granted nothing, so
//! that a COMMIT never means other slots than those that were written. Retrieves of one id are counted, and the last
//! COMMIT ends them all.
//!
//! What is not committed within the write TTL is abandoned ([`PreparedTransfers::expire`]): it can no longer be committed, but
//! its memory stays granted, until a late COMMIT or until:
//!
//! | abandoned | memory is freed |
//! | --- | --- |
//! | store | one write TTL after its instance has left: a late writer would write into objects of others |
//! | retrieve | one write TTL later: a later reader corrupts only its own pages, and its COMMIT is answered "no" |
//!
//! An instance that has left, was replaced or fell silent keeps its memory for one more write TTL
//! ([`PreparedTransfers::abandon`]): clients of LMCache finish their copies after the unregistration was answered, and a stopped
//! process may wake up. A COMMIT under its id can be another process's, and ends nothing.
//!
//! Memory that clients of an earlier process were granted is quarantined too ([`PreparedTransfers::inherit`]), as of instances
//! that have left: until [`GRANT_TTLS`] write TTLs after its grant, however often the server starts, or until no other process
//! maps the pool. So the grant of a store whose instance stays is noted again, once per write TTL.
//!
//! Memory granted or quarantined stays charged to its worker's share of the [staging budget](super::staging), which bounds
//! it.
//!
//! The mutex guards the two tables. Reservations and leases are dropped only after it is released; the budget's lock is
//! taken inside it.

use std::collections::HashMap;
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::ChunkHash;
use kvtier_core::cache::{ReadLease, Reservation};
use kvtier_device::Direction;
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::InstanceId;

use super::skipped::Skipped;
use super::staging::Charge;
use kvtier_store::l1::L1Allocator;

/// What makes two PREPAREs or a PREPARE and a COMMIT the same transfer.
///
/// LMCache compares the key without its request id; with it, two requests with equal prompts do not share a transfer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TransferId {
    instance: InstanceId,
    direction: Direction,
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
        direction: Direction,
        instance: InstanceId,
        key: &CacheKey<'_, T>,
        last_hash: Option<ChunkHash>,
    ) -> Self {
        Self {
            instance,
            direction,
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

/// Memory granted to a client.
pub enum Grant {
    /// Memory to write, but for chunks that each group skips.
    Store(Reservation<L1Allocator>, Charge, Skipped),
    /// Objects to read; one lease per object group, of every PREPARE, and one charge per PREPARE.
    Retrieve(Vec<ReadLease<L1Allocator>>, Vec<Charge>),
}

/// PREPAREs of one retrieve that may wait for their COMMIT. A worker has one in flight; some of its answers may be
/// lost.
const MAX_PREPARED: usize = 8;

/// Transfers known at most. Each holds at least an object of L1, but retrieves may hold the same ones.
const MAX_TRANSFERS: usize = 65_536;

impl Grant {
    /// Notes that the instance of the grant has left.
    fn depart(&mut self) {
        match self {
            Self::Store(_, charge, _) => charge.depart(),
            Self::Retrieve(_, charges) => charges.iter_mut().for_each(Charge::depart),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Store(_, charge, _) => charge.bytes(),
            Self::Retrieve(_, charges) => charges.iter().map(Charge::bytes).sum(),
        }
    }
}

struct PreparedTransfer {
    grant: Grant,
    /// PREPAREs whose COMMIT has not come.
    prepared: usize,
    /// Time of the first PREPARE.
    since: Duration,
}

/// Write TTLs after a grant by which memory of an earlier process's clients is free: one to commit, and one as for an instance
/// that left then.
pub const GRANT_TTLS: u32 = 2;

/// Memory that can no longer be committed, and that its client may still use.
struct QuarantinedTransfer {
    /// When its memory is freed without a COMMIT.
    until: Option<Duration>,
    /// When the ledger last noted the grant.
    noted_at: Duration,
    /// Whether the instance has left, so that no COMMIT ends the transfer.
    has_departed: bool,
    bytes: u64,
    grant: Grant,
}

#[derive(Default)]
struct PreparedTables {
    pending: HashMap<TransferId, PreparedTransfer>,
    quarantined: HashMap<TransferId, QuarantinedTransfer>,
    /// Memory of an earlier process's clients.
    inherited: Vec<(Duration, Grant)>,
    /// Sum of all that is quarantined or inherited.
    quarantined_bytes: u64,
}

impl PreparedTables {
    /// Quarantines the transfers that `which` names; returns how many.
    fn quarantine(
        &mut self,
        until: Duration,
        has_departed: bool,
        which: impl Fn(&TransferId, &PreparedTransfer) -> bool,
    ) -> usize {
        // No id is in both tables, so none is displaced here.
        let taken = self.pending.extract_if(|id, pending| which(id, pending));
        let before = self.quarantined.len();
        let sum = &mut self.quarantined_bytes;
        self.quarantined.extend(taken.map(|(id, mut pending)| {
            if has_departed {
                pending.grant.depart();
            }
            let is_freed = has_departed || matches!(pending.grant, Grant::Retrieve(..));
            let quarantined = QuarantinedTransfer {
                until: is_freed.then_some(until),
                noted_at: pending.since,
                has_departed,
                bytes: pending.grant.bytes(),
                grant: pending.grant,
            };
            *sum += quarantined.bytes;
            (id, quarantined)
        }));
        self.quarantined.len() - before
    }
}

/// What a COMMIT ends.
pub enum Finish {
    /// The transfer, and when it began.
    Last(Grant, Duration),
    /// One of several retrieves of the same transfer.
    Earlier,
    /// An abandoned transfer: there is nothing to commit, and no other transfer had its memory until now.
    Abandoned,
    /// Nothing that is known.
    Unknown,
}

/// All transfers in flight.
#[derive(Default)]
pub struct PreparedTransfers {
    tables: Mutex<PreparedTables>,
}

impl PreparedTransfers {
    /// Whether memory is granted under this id, to be committed or not.
    pub fn is_granted(&self, id: &TransferId) -> bool {
        let tables = self.tables.lock();
        tables.pending.contains_key(id) || tables.quarantined.contains_key(id)
    }

    /// Records what a PREPARE is granted. If this id has a store in flight, too many retrieves, or memory of an
    /// abandoned transfer, which a COMMIT could mean, nothing is granted and the result is `false`; the same if there
    /// are too many transfers.
    pub fn begin(&self, id: TransferId, grant: Grant, now: Duration) -> bool {
        let mut tables = self.tables.lock();
        let is_full = tables.pending.len() + tables.quarantined.len() >= MAX_TRANSFERS;
        let may_begin = !is_full && !tables.quarantined.contains_key(&id);
        match (tables.pending.get_mut(&id), grant) {
            (None, grant) if may_begin => {
                let pending = PreparedTransfer {
                    grant,
                    prepared: 1,
                    since: now,
                };
                tables.pending.insert(id, pending);
            }
            (
                Some(PreparedTransfer {
                    grant: Grant::Retrieve(leases, charges),
                    prepared,
                    ..
                }),
                Grant::Retrieve(more, charge),
            ) if may_begin && *prepared < MAX_PREPARED => {
                leases.extend(more);
                charges.extend(charge);
                *prepared += 1;
            }
            (_, refused) => {
                drop(tables);
                drop(refused);
                return false;
            }
        }
        true
    }

    /// A PREPARE of a retrieve that was a miss: its client commits all the same, and that COMMIT must not end what
    /// another PREPARE of the id was granted.
    pub fn missed(&self, id: &TransferId) {
        if let Some(pending) = self.tables.lock().pending.get_mut(id)
            && matches!(pending.grant, Grant::Retrieve(..))
        {
            pending.prepared = pending.prepared.saturating_add(1);
        }
    }

    /// Finishes a transfer by its COMMIT. A late one ends an abandoned transfer: its memory is released, and there is
    /// nothing to commit.
    pub fn finish(&self, id: &TransferId) -> Finish {
        let mut tables = self.tables.lock();
        if let Some(pending) = tables.pending.get_mut(id) {
            pending.prepared -= 1;
            if pending.prepared > 0 {
                return Finish::Earlier;
            }
            return match tables.pending.remove(id) {
                Some(pending) => Finish::Last(pending.grant, pending.since),
                None => Finish::Unknown,
            };
        }
        let late = match tables.quarantined.get(id) {
            Some(held) if !held.has_departed => tables.quarantined.remove(id),
            Some(_) => return Finish::Abandoned,
            None => return Finish::Unknown,
        };
        tables.quarantined_bytes -= late.as_ref().map_or(0, |held| held.bytes);
        drop(tables);
        drop(late);
        Finish::Abandoned
    }

    /// Abandons the transfers of an instance that has left, was replaced or fell silent: they can no longer be
    /// committed, and their memory is released at `until`. Returns the number of transfers that were in flight.
    pub fn abandon(&self, instance: InstanceId, until: Duration) -> usize {
        let mut tables = self.tables.lock();
        for (id, held) in &mut tables.quarantined {
            if id.instance == instance {
                held.until.get_or_insert(until);
                held.has_departed = true;
                held.grant.depart();
            }
        }
        tables.quarantine(until, true, |id, _| id.instance == instance)
    }

    /// Abandons transfers that began more than a write TTL ago and frees quarantined memory whose time has come.
    /// Returns the number of transfers abandoned.
    pub fn expire(&self, write_ttl: Duration, now: Duration) -> usize {
        let limit = now.saturating_sub(write_ttl);
        let mut tables = self.tables.lock();
        let due: Vec<_> = tables
            .quarantined
            .extract_if(|_, held| held.until.is_some_and(|until| until <= now))
            .collect();
        tables.quarantined_bytes -= due.iter().map(|(_, held)| held.bytes).sum::<u64>();
        let until = now.saturating_add(write_ttl);
        let abandoned = tables.quarantine(until, false, |_, pending| pending.since < limit);
        for held in tables.quarantined.values_mut() {
            if let Grant::Store(memory, ..) = &held.grant
                && held.until.is_none()
                && held.noted_at < limit
            {
                memory.grant(now);
                held.noted_at = now;
            }
        }
        drop(tables);
        drop(due);
        abandoned
    }

    /// Quarantines memory that clients of an earlier process were granted, each until its time.
    pub fn inherit(&self, grants: impl IntoIterator<Item = (Duration, Grant)>) {
        let mut tables = self.tables.lock();
        let before = tables.inherited.len();
        tables.inherited.extend(grants);
        let inherited = &tables.inherited[before..];
        let bytes: u64 = inherited.iter().map(|(_, grant)| grant.bytes()).sum();
        tables.quarantined_bytes += bytes;
    }

    /// Whether memory of an earlier process's clients is withheld.
    pub fn has_inherited(&self) -> bool {
        !self.tables.lock().inherited.is_empty()
    }

    /// Frees memory of an earlier process's clients whose time has come, or all of it if no client can reach it any more.
    /// Returns whether there was some.
    pub fn expire_inherited(&self, now: Duration, is_unreachable: bool) -> bool {
        let mut tables = self.tables.lock();
        let inherited = &mut tables.inherited;
        let due = inherited.extract_if(.., |(until, _)| is_unreachable || *until <= now);
        let due: Vec<_> = due.collect();
        let bytes: u64 = due.iter().map(|(_, grant)| grant.bytes()).sum();
        tables.quarantined_bytes -= bytes;
        drop(tables);
        !due.is_empty()
    }

    /// The number of transfers in flight and of those quarantined, and the bytes of the quarantined.
    pub fn counts(&self) -> (usize, usize, u64) {
        let tables = self.tables.lock();
        let quarantined = tables.quarantined.len() + tables.inherited.len();
        (tables.pending.len(), quarantined, tables.quarantined_bytes)
    }
}
