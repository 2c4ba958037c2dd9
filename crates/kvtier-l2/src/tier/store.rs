//! Storing: bytes are set aside in the index, what has to leave for them is deleted, and then they are written.

use std::collections::BTreeSet;

use kvtier_core::cache::{KeyOutcome, ReadLease, Reservation, ReserveRequest};
use kvtier_core::object_key::ObjectKey;

use super::budget::Budget;
use super::condemned::Claim;
use super::unsent::Waiting;
use super::writing::Begun;
use super::{Adopted, Tier};
use crate::adapter::Stored;
use crate::error::{ErrorKind, L2Error};
use crate::object::StoreItem;

/// Room that the backend had, and what had been written by then.
#[derive(Debug, Clone, Copy)]
struct Room {
    free: u64,
    ended: u64,
}

/// How far an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    /// Not at all, or it was refused: it is not there.
    No,
    /// The work may go on, and nobody tells how it ends.
    Unanswered,
    /// It is there.
    Done,
}

/// Bytes set aside for an object. Dropped without an answer, it is counted as stored once it was sent: it may be there.
struct Staged<'a> {
    tier: &'a Tier,
    place: usize,
    key: ObjectKey,
    bytes: u64,
    /// None where the index has it already, unsure.
    reservation: Option<Reservation<Budget>>,
    /// It does not leave the index then.
    _held: Option<ReadLease<Budget>>,
    /// It was to be deleted before; bytes that are there then.
    spared: Option<u64>,
    sent: Sent,
    unsent: Option<Waiting<'a>>,
    _writing: Begun<'a>,
}

impl Staged<'_> {
    fn settle(mut self, result: &Result<Stored, L2Error>) {
        self.sent = match result {
            Ok(stored) => {
                if stored.bytes() != self.bytes {
                    self.bytes = stored.bytes();
                    drop(self.reservation.take());
                }
                Sent::Done
            }
            Err(error) if error.kind() == ErrorKind::Deadline => Sent::Unanswered,
            Err(_) => Sent::No,
        }
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        let (tier, key) = (self.tier, &self.key);
        let reservation = self.reservation.take();
        if self.sent == Sent::No {
            if let Some(bytes) = self.spared {
                tier.condemned.add(|| vec![(key.clone(), bytes)]);
            }
            drop(reservation);
            return;
        }
        match self.sent {
            Sent::Done => tier.unsure.settle(key),
            _ => tier.unsure.add(key),
        }
        match reservation {
            Some(reservation) => drop(reservation.commit(tier.now())),
            None if tier.enter(key, self.bytes) == Adopted::Known => {}
            None => tier.condemned.add(|| vec![(key.clone(), self.bytes)]),
        }
    }
}

impl Tier {
    /// Writes what is not there yet; one result each.
    ///
    /// Where a capacity or limits hold strictly, it waits until it knows what it held before the start. What is not answered in time counts, as it may
    /// be there; nobody is told that it is before the backend has said so.
    pub async fn store(&self, batch: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
        if self.is_read_only() {
            return batch.iter().map(|_| Err(self.read_only())).collect();
        }
        let mut results: Vec<Option<Result<Stored, L2Error>>> = vec![None; batch.len()];
        match self.room().await {
            Ok(room) => self.store_into(batch, room, &mut results).await,
            Err(error) => results.fill(Some(Err(error))),
        }
        let missing = || L2Error::new(ErrorKind::Refused, "the adapter gave no result");
        let results: Vec<_> = results
            .into_iter()
            .map(|result| result.unwrap_or_else(|| Err(missing())))
            .collect();
        self.count_stored(&results);
        results
    }

    async fn store_into(
        &self,
        batch: Vec<StoreItem>,
        room: Room,
        results: &mut [Option<Result<Stored, L2Error>>],
    ) {
        let mut staged = Vec::new();
        let mut items = Vec::new();
        for (place, item) in batch.into_iter().enumerate() {
            match self.stage(place, &item, room) {
                Ok(Some(object)) => {
                    staged.push(object);
                    items.push(item);
                }
                Ok(None) => {
                    let bytes = self.adapter.size_of(item.object.len);
                    results[place] = Some(Ok(Stored::AlreadyThere(bytes)));
                }
                Err(error) => results[place] = Some(Err(error)),
            }
        }
        self.condemn_evicted();
        let mut at = 0;
        while at < staged.len() {
            match self.condemned.claim(&staged[at].key).await {
                Claim::Unknown => {}
                Claim::Spared(bytes) => staged[at].spared = Some(bytes),
                Claim::Refused => {
                    let message = "its last delete was not answered and may come yet";
                    let error = L2Error::new(ErrorKind::Unavailable, message);
                    results[staged.remove(at).place] = Some(Err(error));
                    items.remove(at);
                    continue;
                }
            }
            at += 1;
        }
        if let Err(error) = self.make_room().await {
            while self.is_over()
                && let Some(object) = staged.pop()
            {
                items.pop();
                let message = format!("{} cannot make room: {error}", self.name());
                results[object.place] = Some(Err(L2Error::new(ErrorKind::Full, message)));
            }
        }
        self.keep_limits(&mut staged, &mut items, results).await;
        if items.is_empty() {
            return;
        }
        for object in &mut staged {
            object.sent = Sent::Unanswered;
            object.unsent = None;
        }
        let stored = self.adapter.store(items).await;
        for (object, result) in staged.into_iter().zip(stored) {
            let place = object.place;
            object.settle(&result);
            results[place] = Some(result);
        }
    }

    /// Gives up what would have its tenant pass a limit that holds strictly: nothing is written before what left for it
    /// is deleted.
    async fn keep_limits(
        &self,
        staged: &mut Vec<Staged<'_>>,
        items: &mut Vec<StoreItem>,
        results: &mut [Option<Result<Stored, L2Error>>],
    ) {
        let salts = staged.iter().map(|object| object.key.cache_salt());
        let salts: BTreeSet<_> = salts.cloned().collect();
        for salt in salts {
            let made = self.make_room_within(&salt).await;
            while self.is_over_limit(&salt) {
                let of_it = |object: &Staged<'_>| *object.key.cache_salt() == salt;
                let Some(at) = staged.iter().rposition(of_it) else {
                    break;
                };
                items.remove(at);
                let object = staged.remove(at);
                let why = match &made {
                    Err(error) => error.to_string(),
                    Ok(()) => "it has too much already".to_owned(),
                };
                let message = format!(
                    "the tenant's limit in {} leaves no room: {why}",
                    self.name()
                );
                results[object.place] = Some(Err(L2Error::new(ErrorKind::OverQuota, message)));
            }
        }
    }

    /// Bytes that the backend has left for us; no bound is the largest number.
    async fn room(&self) -> Result<Room, L2Error> {
        if self.is_strict() {
            self.recovered().await?;
        }
        let ended = self.writing.ended();
        let free = match self.adapter.free_bytes().await? {
            Some(free) => free.saturating_sub(self.config.reserve_bytes),
            None => u64::MAX,
        };
        Ok(Room { free, ended })
    }

    /// Sets bytes aside for an object, on the disk and in the index; `None` if it is there already.
    fn stage(
        &self,
        place: usize,
        item: &StoreItem,
        room: Room,
    ) -> Result<Option<Staged<'_>>, L2Error> {
        let key = &item.object.key;
        let bytes = self.adapter.size_of(item.object.len);
        let is_unsure = self.unsure.has(key);
        let mut unsent = Some(self.unsent.add(key.cache_salt(), bytes));
        if !is_unsure && self.index.contains(key.namespace(), &[key.chunk_hash()])[0] {
            // Counts as used; unless it was evicted just now, it is there.
            if self.reserve(key, bytes)?.is_none() {
                return Ok(None);
            }
        }
        // Before anything is evicted for it in vain.
        let writing = self.writing.begin(bytes, room.free, room.ended);
        let writing = writing.map_err(|left| {
            L2Error::new(
                ErrorKind::Full,
                format!(
                    "{} has room for {left} bytes beside its reserve of {}, and {bytes} are needed",
                    self.name(),
                    self.config.reserve_bytes
                ),
            )
        })?;
        let (reservation, held) = loop {
            if let Some(reservation) = self.reserve(key, bytes)? {
                break (Some(reservation), None);
            }
            if !is_unsure {
                return Ok(None);
            }
            let held = self
                .index
                .hold(self.now(), key.namespace(), &[key.chunk_hash()]);
            if held.is_some() {
                // It may be there already.
                unsent = None;
                break (None, held);
            }
        };
        Ok(Some(Staged {
            tier: self,
            place,
            key: key.clone(),
            bytes,
            reservation,
            _held: held,
            spared: None,
            sent: Sent::No,
            unsent,
            _writing: writing,
        }))
    }

    /// Sets bytes aside in the index; `None` if the object is there already.
    pub(super) fn reserve(
        &self,
        key: &ObjectKey,
        bytes: u64,
    ) -> Result<Option<Reservation<Budget>>, L2Error> {
        let hash = key.chunk_hash();
        let request = ReserveRequest {
            namespace: key.namespace(),
            hashes: std::slice::from_ref(&hash),
            len: bytes.max(1),
        };
        let reserved = self
            .index
            .reserve(self.now(), &[request])
            .map_err(|error| L2Error::new(ErrorKind::Refused, error.to_string()))?;
        match reserved.outcomes.first() {
            Some(KeyOutcome::AlreadyResident) => Ok(None),
            Some(KeyOutcome::Reserved(_)) => Ok(Some(reserved.reservation)),
            Some(KeyOutcome::OverQuota) => Err(L2Error::new(
                ErrorKind::OverQuota,
                format!("the tenant's limit in {} leaves no room", self.name()),
            )),
            Some(KeyOutcome::NoMemory | KeyOutcome::OverStaging) | None => Err(L2Error::new(
                ErrorKind::Full,
                format!(
                    "{} is at its capacity of {} bytes and nothing can be evicted",
                    self.name(),
                    self.config.capacity_bytes.unwrap_or_default()
                ),
            )),
        }
    }

    fn count_stored(&self, results: &[Result<Stored, L2Error>]) {
        let mut trouble = None;
        for result in results {
            match result {
                Ok(Stored::Written(bytes)) => {
                    self.counters.stored_objects.add(1);
                    self.counters.stored_bytes.add(*bytes);
                }
                Ok(Stored::AlreadyThere(_)) => self.counters.already_there.add(1),
                Err(error) => {
                    self.counters.store_failures.add(error.kind());
                    // One tenant's limit is no trouble of the tier's.
                    if error.kind() != ErrorKind::OverQuota {
                        trouble = Some(error.clone());
                    }
                }
            }
        }
        if !results.is_empty() {
            self.note(trouble);
        }
    }

    /// Notes how the last store went. The log hears of each kind of trouble once, and of its end.
    fn note(&self, trouble: Option<L2Error>) {
        let before = std::mem::replace(&mut *self.trouble.lock(), trouble.clone());
        let kind = |trouble: &Option<L2Error>| trouble.as_ref().map(L2Error::kind);
        if kind(&before) == kind(&trouble) {
            return;
        }
        let tier = self.name();
        match trouble {
            Some(error) if error.kind() == ErrorKind::Full => {
                tracing::warn!(tier, %error, "no room: objects are not stored until there is some again");
            }
            Some(error) => tracing::warn!(tier, %error, "objects cannot be stored"),
            None => tracing::info!(tier, "objects are stored again"),
        }
    }
}
