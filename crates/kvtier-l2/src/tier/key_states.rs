//! State of each key that the index alone does not describe, behind one lock.
//!
//! The index (`kvtier-core`'s cache, with a lock of its own) has resident and reserved objects, their order of use and
//! their leases, so it stays a structure of its own. Stores are not states of a key either: two of the same key may run
//! at once, and each is counted by the guards that it holds ([`UnsentBytes`], [`WriteInFlight`]).
//!
//! The lock guards the states and the byte sums of the tier. It is taken before the index's lock, never inside of it.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kvtier_common::sync::Mutex;
use kvtier_core::cache::Removed;
use kvtier_core::object_key::ObjectKey;
use tokio::sync::watch;

use super::Adopted;

/// State of a key beside the index: three facts, each with its own transitions, since stores and deletes of one key may
/// overlap. A key without a state is what the index says.
///
/// ```text
/// indeterminate   set:   its store or delete was not answered, and the index has it
///                 unset: the backend answered a store, lookup or load; or it was removed from the index by name
/// pending delete  set:   evicted, found beyond a limit, or its delete failed and the index does not have it
///                 unset: its delete was sent; stored or found again, unless it is late; deleted by name
/// deleting        set:   a delete was sent
///                 unset: the last delete in flight has ended. What one that failed had to delete goes back to the
///                        index, then it is indeterminate, or to the pending deletes
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct KeyState {
    /// In the index, but only the backend knows whether it is there.
    is_indeterminate: bool,
    /// Not in the index, in the backend: waits to be deleted, and counts until then.
    pending: Option<PendingDelete>,
    /// Deletes in flight. Their bytes count until they are answered, also if the caller no longer waits.
    deleting: Option<Deleting>,
}

/// Deletes of one key in flight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Deleting {
    /// Bytes of all of them.
    bytes: u64,
    count: u32,
    /// An earlier delete was not answered and may still be executed.
    is_late: bool,
}

/// What one delete in flight has to delete, as far as it is known: `None` if the tier did not know the key.
pub(super) type DeleteBytes = Option<u64>;

/// End of one delete in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeleteEnd {
    /// The delete was answered: the key is not there.
    Deleted,
    /// The delete failed, and the index has the key again.
    Reinserted,
    /// The delete failed; if `is_late` it was not answered, and may still be executed.
    Failed { is_late: bool },
}

/// A delete that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PendingDelete {
    bytes: u64,
    /// An earlier delete was not answered and may still be executed.
    is_late: bool,
}

impl KeyState {
    /// Bytes in the backend that the index does not count.
    fn bytes(self) -> u64 {
        let pending = self.pending.map_or(0, |pending| pending.bytes);
        pending + self.deleting.map_or(0, |deleting| deleting.bytes)
    }
}

/// Sums of one tenant.
#[derive(Debug, Default)]
struct TenantSums {
    /// Keys that wait to be deleted.
    pending: HashSet<ObjectKey>,
    /// Bytes of pending deletes and of those in flight.
    deleting_bytes: u64,
    /// Bytes that the index counts and the backend has not been asked to write.
    unsent_bytes: u64,
}

impl TenantSums {
    fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.deleting_bytes == 0 && self.unsent_bytes == 0
    }
}

/// State under the lock.
#[derive(Debug, Default)]
pub(super) struct KeyTable {
    /// Without empty ones.
    states: HashMap<ObjectKey, KeyState>,
    /// By cache salt, without empty ones.
    tenants: BTreeMap<Arc<str>, TenantSums>,
    /// Keys whose delete is in flight.
    deleting: usize,
    /// Sums of all tenants.
    deleting_bytes: u64,
    unsent_bytes: u64,
    /// Bytes of all writes that were started, and of those that have ended.
    started_bytes: u64,
    ended_bytes: u64,
}

impl KeyTable {
    fn get(&self, key: &ObjectKey) -> KeyState {
        self.states.get(key).copied().unwrap_or_default()
    }

    /// Sets the state of a key and keeps the sums.
    fn set(&mut self, key: &ObjectKey, state: KeyState) {
        let old = if state == KeyState::default() {
            self.states.remove(key)
        } else {
            self.states.insert(key.clone(), state)
        };
        let old = old.unwrap_or_default();
        self.deleting += usize::from(state.deleting.is_some());
        self.deleting -= usize::from(old.deleting.is_some());
        self.deleting_bytes = self.deleting_bytes + state.bytes() - old.bytes();
        self.update_tenant(key.cache_salt(), |tenant| {
            tenant.deleting_bytes = tenant.deleting_bytes + state.bytes() - old.bytes();
            match state.pending {
                Some(_) => tenant.pending.insert(key.clone()),
                None => tenant.pending.remove(key),
            };
        });
    }

    fn update(&mut self, key: &ObjectKey, update: impl FnOnce(&mut KeyState)) {
        let mut state = self.get(key);
        update(&mut state);
        self.set(key, state);
    }

    fn update_tenant(&mut self, salt: &Arc<str>, update: impl FnOnce(&mut TenantSums)) {
        let tenant = self.tenants.entry(Arc::clone(salt)).or_default();
        update(tenant);
        if tenant.is_empty() {
            self.tenants.remove(salt);
        }
    }

    /// Adds an object that is in the backend and not in the index.
    fn add_pending(&mut self, key: &ObjectKey, bytes: u64) {
        self.update(key, |state| {
            let is_late = state.pending.is_some_and(|pending| pending.is_late);
            state.pending = Some(PendingDelete { bytes, is_late });
        });
    }

    /// Starts a delete of a key, which took `removed` out of the index, and takes over a pending one.
    pub(super) fn start_delete(&mut self, key: &ObjectKey, removed: Removed) -> DeleteBytes {
        let mut state = self.get(key);
        let pending = state.pending.take();
        let is_known = removed.objects > 0 || pending.is_some();
        let bytes = removed.bytes + pending.map_or(0, |pending| pending.bytes);
        // What is not in the index is not indeterminate.
        state.is_indeterminate &= removed.objects == 0;
        let deleting = state.deleting.get_or_insert_default();
        deleting.count += 1;
        deleting.bytes += bytes;
        deleting.is_late |= pending.is_some_and(|pending| pending.is_late);
        self.set(key, state);
        is_known.then_some(bytes)
    }

    /// Ends a delete of a key.
    pub(super) fn end_delete(&mut self, key: &ObjectKey, bytes: DeleteBytes, end: DeleteEnd) {
        let mut state = self.get(key);
        let Some(mut deleting) = state.deleting else {
            return;
        };
        deleting.count -= 1;
        deleting.bytes -= bytes.unwrap_or_default();
        state.deleting = (deleting.count > 0).then_some(deleting);
        match (end, bytes) {
            (DeleteEnd::Reinserted, _) => state.is_indeterminate = true,
            (DeleteEnd::Failed { is_late }, Some(bytes)) => {
                let other = state.pending;
                state.pending = Some(PendingDelete {
                    bytes: other.map_or(bytes, |other| other.bytes.max(bytes)),
                    is_late: is_late
                        || deleting.is_late
                        || other.is_some_and(|other| other.is_late),
                });
            }
            (DeleteEnd::Failed { .. }, None) | (DeleteEnd::Deleted, _) => {}
        }
        self.set(key, state);
    }

    /// Starts up to `limit` pending deletes, of all tenants or of one; returns the keys and their bytes.
    pub(super) fn start_pending(
        &mut self,
        salt: Option<&str>,
        limit: usize,
    ) -> Vec<(ObjectKey, u64)> {
        let (one, all) = match salt {
            Some(salt) => (self.tenants.get(salt), None),
            None => (None, Some(self.tenants.values())),
        };
        let tenants = one.into_iter().chain(all.into_iter().flatten());
        let pending = tenants.flat_map(|tenant| &tenant.pending);
        let keys: Vec<_> = pending.take(limit).cloned().collect();
        let start = |key: ObjectKey| {
            // A delete by name in flight may be about to answer for it.
            let is_idle = self.get(&key).deleting.is_none();
            let bytes = is_idle.then(|| self.start_delete(&key, Removed::default()))??;
            Some((key, bytes))
        };
        keys.into_iter().filter_map(start).collect()
    }

    /// Whether nothing is left to delete, of all tenants or of one.
    pub(super) fn is_idle(&self, salt: Option<&str>) -> bool {
        match salt {
            Some(_) => self.deleting_bytes(salt) == 0,
            None => self.deleting == 0 && !self.has_pending(),
        }
    }

    fn left(&self, free: u64, ended: u64) -> u64 {
        free.saturating_sub(self.started_bytes - ended)
    }

    fn has_pending(&self) -> bool {
        let mut tenants = self.tenants.values();
        tenants.any(|tenant| !tenant.pending.is_empty())
    }

    fn beside(&self, salt: Option<&str>) -> UncountedBytes {
        UncountedBytes {
            deleting: self.deleting_bytes(salt),
            unsent: self.unsent_bytes(salt),
        }
    }

    fn deleting_bytes(&self, salt: Option<&str>) -> u64 {
        match salt {
            Some(salt) => self
                .tenants
                .get(salt)
                .map_or(0, |tenant| tenant.deleting_bytes),
            None => self.deleting_bytes,
        }
    }

    fn unsent_bytes(&self, salt: Option<&str>) -> u64 {
        match salt {
            Some(salt) => self
                .tenants
                .get(salt)
                .map_or(0, |tenant| tenant.unsent_bytes),
            None => self.unsent_bytes,
        }
    }
}

/// Bytes that the index does not count, and those that it counts too early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UncountedBytes {
    /// Pending deletes and those in flight.
    pub deleting: u64,
    /// Reserved, but the backend has not been asked to write them: the store still waits for deletes.
    pub unsent: u64,
}

impl UncountedBytes {
    /// Bytes that the backend may hold if the index counts `indexed`.
    pub(super) fn held(self, indexed: u64) -> u64 {
        (indexed + self.deleting).saturating_sub(self.unsent)
    }
}

/// Whether a key may be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// The key may be stored; no delete was pending.
    Free,
    /// The key may be stored; its pending delete was cancelled, and this many bytes are still in the backend.
    Cancelled(u64),
    /// The key may not be stored: a delete may still be executed.
    Refused,
}

/// Table of the key states behind one lock.
#[derive(Debug, Default)]
pub(super) struct KeyStates {
    table: Mutex<KeyTable>,
    /// Changes when deletes have ended.
    deletes_ended: watch::Sender<()>,
}

impl KeyStates {
    /// Runs `update` under the lock.
    pub(super) fn with<T>(&self, update: impl FnOnce(&mut KeyTable) -> T) -> T {
        update(&mut self.table.lock())
    }

    /// A receiver that changes when deletes have ended.
    pub(super) fn deletes_ended(&self) -> watch::Receiver<()> {
        self.deletes_ended.subscribe()
    }

    /// Wakes those that wait for deletes to end.
    pub(super) fn notify_deletes_ended(&self) {
        self.deletes_ended.send_replace(());
    }

    pub(super) fn is_indeterminate(&self, key: &ObjectKey) -> bool {
        self.table.lock().get(key).is_indeterminate
    }

    /// The store of a key that goes into the index was not answered.
    pub(super) fn set_indeterminate(&self, key: &ObjectKey) {
        let mut table = self.table.lock();
        table.update(key, |state| state.is_indeterminate = true);
    }

    /// The backend has answered what became of the key, or the index no longer has it.
    pub(super) fn resolve(&self, key: &ObjectKey) {
        let mut table = self.table.lock();
        table.update(key, |state| state.is_indeterminate = false);
    }

    /// Adds what `evicted` returns to the pending deletes. It runs under the lock, so each object is counted throughout.
    pub(super) fn add_pending(&self, evicted: impl FnOnce() -> Vec<(ObjectKey, u64)>) {
        let mut table = self.table.lock();
        for (key, bytes) in evicted() {
            table.add_pending(&key, bytes);
        }
    }

    /// Returns a reading of the index and the bytes beside it, of all tenants. No object is counted twice.
    pub(super) fn read<T>(&self, index: impl FnOnce() -> T) -> (T, UncountedBytes) {
        let table = self.table.lock();
        let beside = table.beside(None);
        (index(), beside)
    }

    /// Returns a reading of the index and the bytes beside it of each of these tenants. No object is counted twice.
    pub(super) fn read_each<T>(
        &self,
        salts: &[&str],
        index: impl FnOnce() -> T,
    ) -> (T, Vec<UncountedBytes>) {
        let table = self.table.lock();
        let beside = salts.iter().map(|salt| table.beside(Some(salt))).collect();
        (index(), beside)
    }

    /// Returns the bytes that the backend may hold once all reserved bytes are written, of all tenants or of one, and
    /// adds what `evicted` returns to the pending deletes. An object that moves between both meanwhile may count twice.
    pub(super) fn reserved_bytes(
        &self,
        salt: Option<&str>,
        index: impl FnOnce() -> u64,
        evicted: impl FnOnce() -> Vec<(ObjectKey, u64)>,
    ) -> u64 {
        let mut table = self.table.lock();
        // In this order, so that an object evicted in between still counts.
        let bytes = index();
        for (key, bytes) in evicted() {
            table.add_pending(&key, bytes);
        }
        bytes + table.deleting_bytes(salt)
    }

    /// Bytes of pending deletes and of those in flight by cache salt; no entry is 0.
    pub(super) fn deleting_by_salt(&self) -> BTreeMap<Arc<str>, u64> {
        let table = self.table.lock();
        let tenants = table.tenants.iter();
        let bytes = tenants.map(|(salt, tenant)| (Arc::clone(salt), tenant.deleting_bytes));
        bytes.filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// Bytes that the index counts and that were not sent, of one tenant.
    pub(super) fn unsent_bytes(&self, salt: &str) -> u64 {
        self.table.lock().unsent_bytes(Some(salt))
    }

    pub(super) fn has_pending(&self) -> bool {
        self.table.lock().has_pending()
    }

    /// Cancels the pending delete of a key that is about to be stored. Waits while a delete of it is in flight.
    pub(super) async fn claim(&self, key: &ObjectKey) -> Claim {
        let is_deleting = |table: &KeyTable| table.get(key).deleting.is_some();
        let mut ended = self.deletes_ended();
        // Cannot fail: `self` has the sender.
        let _ = ended.wait_for(|()| !is_deleting(&self.table.lock())).await;
        let mut table = self.table.lock();
        let state = table.get(key);
        match state.pending {
            _ if state.deleting.is_some() => Claim::Refused,
            None => Claim::Free,
            Some(pending) if pending.is_late => Claim::Refused,
            Some(pending) => {
                table.update(key, |state| state.pending = None);
                Claim::Cancelled(pending.bytes)
            }
        }
    }

    /// Cancels the pending delete of a key that was found in the backend if `insert` takes it into the index.
    pub(super) fn adopt(&self, key: &ObjectKey, insert: impl FnOnce() -> Adopted) -> Adopted {
        let mut table = self.table.lock();
        let state = table.get(key);
        if state.deleting.is_some() || state.pending.is_some_and(|pending| pending.is_late) {
            return Adopted::Deleting;
        }
        let adopted = insert();
        if adopted == Adopted::Indexed {
            table.update(key, |state| state.pending = None);
        }
        adopted
    }

    /// Counts bytes as not sent until the result is dropped. Called before the index counts them.
    pub(super) fn add_unsent(&self, salt: &Arc<str>, bytes: u64) -> UnsentBytes<'_> {
        let mut table = self.table.lock();
        table.unsent_bytes += bytes;
        table.update_tenant(salt, |tenant| tenant.unsent_bytes += bytes);
        UnsentBytes {
            states: self,
            salt: Arc::clone(salt),
            bytes,
        }
    }

    /// Bytes of the writes that have ended. Read before the backend's free bytes, for [`start_write`](Self::start_write).
    pub(super) fn ended_bytes(&self) -> u64 {
        self.table.lock().ended_bytes
    }

    /// Bytes of `free` beside all writes that had not ended when `ended` was read.
    pub(super) fn left(&self, free: u64, ended: u64) -> u64 {
        self.table.lock().left(free, ended)
    }

    /// Starts a write if it fits into `free` beside all writes that had not ended when `ended` was read; otherwise
    /// returns the bytes that would fit.
    pub(super) fn start_write(
        &self,
        bytes: u64,
        free: u64,
        ended: u64,
    ) -> Result<WriteInFlight<'_>, u64> {
        let mut table = self.table.lock();
        let left = table.left(free, ended);
        if bytes > left {
            return Err(left);
        }
        table.started_bytes += bytes;
        Ok(WriteInFlight {
            states: self,
            bytes,
        })
    }
}

/// Bytes that the index counts and the backend has not been asked to write.
#[derive(Debug)]
pub(super) struct UnsentBytes<'a> {
    states: &'a KeyStates,
    salt: Arc<str>,
    bytes: u64,
}

impl Drop for UnsentBytes<'_> {
    fn drop(&mut self) {
        let mut table = self.states.table.lock();
        table.unsent_bytes -= self.bytes;
        table.update_tenant(&self.salt, |tenant| tenant.unsent_bytes -= self.bytes);
    }
}

/// A write that has not ended.
#[derive(Debug)]
pub(super) struct WriteInFlight<'a> {
    states: &'a KeyStates,
    bytes: u64,
}

impl Drop for WriteInFlight<'_> {
    fn drop(&mut self) {
        self.states.table.lock().ended_bytes += self.bytes;
    }
}
