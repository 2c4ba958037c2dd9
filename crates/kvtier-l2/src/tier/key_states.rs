//! State of each key that the index alone does not describe, behind one lock.
//!
//! The index (`kvtier-core`'s cache, with a lock of its own) has resident and reserved objects, their order of use and
//! their leases, so it stays a structure of its own. Stores are not states of a key either: two of the same key may run
//! at once, and each is counted by the guards that it holds ([`UnsentBytes`], [`WriteInFlight`]).
//!
//! The lock guards the states and the byte sums of the tier. It is taken before the index's lock, never inside of it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kvtier_core::object_key::ObjectKey;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::Adopted;

/// State of a key beside the index. A key without one is what the index says.
///
/// ```text
/// (none)        ── store not answered ──────────────────▶ Indeterminate
/// (none)        ── evicted, or found beyond a limit ────▶ PendingDelete
/// (none)        ── deleted by name ─────────────────────▶ Deleting
/// Indeterminate ── stored, found, loaded, or removed ───▶ (none)
/// Indeterminate ── evicted ─────────────────────────────▶ PendingDelete
/// Indeterminate ── deleted by name ─────────────────────▶ Deleting
/// PendingDelete ── stored or found again, if not late ──▶ (none)
/// PendingDelete ── delete sent ─────────────────────────▶ Deleting
/// Deleting      ── deleted ─────────────────────────────▶ (none)
/// Deleting      ── failed, and back in the index ───────▶ Indeterminate
/// Deleting      ── failed, or late if not answered ─────▶ PendingDelete
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyState {
    /// In the index, but its last store or delete was not answered: only the backend knows whether it is there.
    Indeterminate,
    /// Not in the index, in the backend: waits to be deleted, and counts until then.
    PendingDelete {
        bytes: u64,
        /// An earlier delete was not answered and may still be executed.
        is_late: bool,
    },
    /// Its delete is in flight. It counts until the delete is answered, also if the caller no longer waits.
    Deleting {
        bytes: u64,
        /// State after the delete, left by a store that ended meanwhile.
        raced: Option<Raced>,
    },
}

/// Result of a store that ended while a delete of the same key was in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Raced {
    Indeterminate,
    PendingDelete { bytes: u64 },
}

impl KeyState {
    /// Bytes in the backend that the index does not count.
    fn bytes(self) -> u64 {
        match self {
            Self::Indeterminate => 0,
            Self::PendingDelete { bytes, .. } => bytes,
            Self::Deleting { bytes, raced } => match raced {
                Some(Raced::PendingDelete { bytes: more }) => bytes + more,
                Some(Raced::Indeterminate) | None => bytes,
            },
        }
    }

    fn is_pending(self) -> bool {
        matches!(self, Self::PendingDelete { .. })
    }

    fn is_deleting(self) -> bool {
        matches!(self, Self::Deleting { .. })
    }
}

/// ChecksumCache of one tenant.
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
pub(super) struct Table {
    states: HashMap<ObjectKey, KeyState>,
    /// By cache salt, without empty ones.
    tenants: BTreeMap<Arc<str>, TenantSums>,
    /// Keys whose delete is in flight.
    deleting: usize,
    /// ChecksumCache of all tenants.
    deleting_bytes: u64,
    unsent_bytes: u64,
    /// Bytes of all writes that were started, and of those that have ended.
    started_bytes: u64,
    ended_bytes: u64,
}

impl Table {
    fn get(&self, key: &ObjectKey) -> Option<KeyState> {
        self.states.get(key).copied()
    }

    /// Sets or removes the state of a key and keeps the sums.
    fn set(&mut self, key: &ObjectKey, state: Option<KeyState>) {
        let old = match state {
            Some(state) => self.states.insert(key.clone(), state),
            None => self.states.remove(key),
        };
        let is = |state: Option<KeyState>, what: fn(KeyState) -> bool| state.is_some_and(what);
        let bytes = |state: Option<KeyState>| state.map_or(0, KeyState::bytes);
        self.deleting += usize::from(is(state, KeyState::is_deleting));
        self.deleting -= usize::from(is(old, KeyState::is_deleting));
        self.deleting_bytes = self.deleting_bytes + bytes(state) - bytes(old);
        self.update_tenant(key.cache_salt(), |tenant| {
            tenant.deleting_bytes = tenant.deleting_bytes + bytes(state) - bytes(old);
            match is(state, KeyState::is_pending) {
                true => tenant.pending.insert(key.clone()),
                false => tenant.pending.remove(key),
            };
        });
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
        let state = match self.get(key) {
            Some(KeyState::Deleting { bytes: old, .. }) => KeyState::Deleting {
                bytes: old,
                raced: Some(Raced::PendingDelete { bytes }),
            },
            _ => KeyState::PendingDelete {
                bytes,
                is_late: false,
            },
        };
        self.set(key, Some(state));
    }

    /// Ends the delete of a key.
    pub(super) fn deleted(&mut self, key: &ObjectKey) {
        let Some(KeyState::Deleting { raced, .. }) = self.get(key) else {
            return;
        };
        let state = raced.map(|raced| match raced {
            Raced::Indeterminate => KeyState::Indeterminate,
            Raced::PendingDelete { bytes } => KeyState::PendingDelete {
                bytes,
                is_late: false,
            },
        });
        self.set(key, state);
    }

    /// Ends the delete of a key that failed, or whose outcome is unknown if `is_late`. If `insert` puts the key into
    /// the index, it stays there; otherwise it is deleted later.
    pub(super) fn delete_failed(
        &mut self,
        key: &ObjectKey,
        is_late: bool,
        insert: impl FnOnce() -> bool,
    ) {
        let Some(KeyState::Deleting { bytes, raced }) = self.get(key) else {
            return;
        };
        let state = match raced {
            Some(Raced::Indeterminate) => Some(KeyState::Indeterminate),
            _ if insert() => Some(KeyState::Indeterminate),
            Some(Raced::PendingDelete { bytes: more }) => Some(KeyState::PendingDelete {
                bytes: bytes.max(more),
                is_late,
            }),
            None => (bytes > 0).then_some(KeyState::PendingDelete { bytes, is_late }),
        };
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
            let bytes = self.get(&key).map_or(0, KeyState::bytes);
            self.start_delete(&key, 0);
            (key, bytes)
        };
        keys.into_iter().map(start).collect()
    }

    /// Starts the delete of a key, with the bytes that it had in the index; `false` if one is in flight already, which
    /// counts them then.
    pub(super) fn start_delete(&mut self, key: &ObjectKey, in_index: u64) -> bool {
        let (is_new, bytes, raced) = match self.get(key) {
            Some(KeyState::Deleting { bytes, raced }) => (false, bytes, raced),
            Some(KeyState::PendingDelete { bytes, .. }) => (true, bytes, None),
            Some(KeyState::Indeterminate) | None => (true, 0, None),
        };
        let bytes = bytes + in_index;
        self.set(key, Some(KeyState::Deleting { bytes, raced }));
        is_new
    }

    /// Whether nothing is left to delete, of all tenants or of one.
    pub(super) fn is_idle(&self, salt: Option<&str>) -> bool {
        match salt {
            Some(_) => self.deleting_bytes(salt) == 0,
            None => self.deleting == 0 && !self.has_pending(),
        }
    }

    fn has_pending(&self) -> bool {
        let mut tenants = self.tenants.values();
        tenants.any(|tenant| !tenant.pending.is_empty())
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
pub(super) struct Beside {
    /// Pending deletes and those in flight.
    pub deleting: u64,
    /// Reserved, but the backend has not been asked to write them: the store still waits for deletes.
    pub unsent: u64,
}

impl Beside {
    /// Bytes that the backend may hold if the index counts `indexed`.
    pub(super) fn held(self, indexed: u64) -> u64 {
        (indexed + self.deleting).saturating_sub(self.unsent)
    }
}

/// Whether a key may be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// It may; no delete was pending.
    Free,
    /// It may; its pending delete was cancelled, and this many bytes are still in the backend.
    Cancelled(u64),
    /// It may not: a delete may still be executed.
    Refused,
}

/// Table of the key states behind one lock.
#[derive(Debug, Default)]
pub(super) struct KeyStates {
    table: Mutex<Table>,
    /// Changes when deletes have ended.
    deletes_ended: watch::Sender<()>,
}

impl KeyStates {
    /// Runs `update` under the lock.
    pub(super) fn with<T>(&self, update: impl FnOnce(&mut Table) -> T) -> T {
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
        self.table.lock().get(key) == Some(KeyState::Indeterminate)
    }

    /// The store of a key that goes into the index was not answered.
    pub(super) fn set_indeterminate(&self, key: &ObjectKey) {
        let mut table = self.table.lock();
        let state = match table.get(key) {
            Some(KeyState::Deleting { bytes, .. }) => KeyState::Deleting {
                bytes,
                raced: Some(Raced::Indeterminate),
            },
            _ => KeyState::Indeterminate,
        };
        table.set(key, Some(state));
    }

    /// The backend has answered what became of the key, or the index no longer has it.
    pub(super) fn resolve(&self, key: &ObjectKey) {
        let mut table = self.table.lock();
        match table.get(key) {
            Some(KeyState::Indeterminate) => table.set(key, None),
            Some(KeyState::Deleting {
                bytes,
                raced: Some(Raced::Indeterminate),
            }) => table.set(key, Some(KeyState::Deleting { bytes, raced: None })),
            _ => {}
        }
    }

    /// Adds what `evicted` returns to the pending deletes. It runs under the lock, so each object is counted throughout.
    pub(super) fn add_pending(&self, evicted: impl FnOnce() -> Vec<(ObjectKey, u64)>) {
        let mut table = self.table.lock();
        for (key, bytes) in evicted() {
            table.add_pending(&key, bytes);
        }
    }

    /// Returns a reading of the index and the bytes beside it, of all tenants or of one. No object is counted twice.
    pub(super) fn read<T>(&self, salt: Option<&str>, index: impl FnOnce() -> T) -> (T, Beside) {
        let table = self.table.lock();
        let beside = Beside {
            deleting: table.deleting_bytes(salt),
            unsent: table.unsent_bytes(salt),
        };
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
        let is_deleting = |table: &Table| matches!(table.get(key), Some(KeyState::Deleting { .. }));
        let mut ended = self.deletes_ended();
        // Cannot fail: `self` has the sender.
        let _ = ended.wait_for(|()| !is_deleting(&self.table.lock())).await;
        let mut table = self.table.lock();
        match table.get(key) {
            Some(KeyState::Indeterminate) | None => Claim::Free,
            Some(KeyState::PendingDelete {
                bytes,
                is_late: false,
            }) => {
                table.set(key, None);
                Claim::Cancelled(bytes)
            }
            Some(KeyState::PendingDelete { is_late: true, .. } | KeyState::Deleting { .. }) => {
                Claim::Refused
            }
        }
    }

    /// Cancels the pending delete of a key that was found in the backend if `insert` takes it into the index.
    pub(super) fn adopt(&self, key: &ObjectKey, insert: impl FnOnce() -> Adopted) -> Adopted {
        let mut table = self.table.lock();
        let state = table.get(key);
        if let Some(KeyState::Deleting { .. } | KeyState::PendingDelete { is_late: true, .. }) =
            state
        {
            return Adopted::Deleting;
        }
        let adopted = insert();
        if adopted == Adopted::Indexed || state == Some(KeyState::Indeterminate) {
            table.set(key, None);
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

    /// Starts a write if it fits into `free` beside all writes that had not ended when `ended` was read; otherwise
    /// returns the bytes that would fit.
    pub(super) fn start_write(
        &self,
        bytes: u64,
        free: u64,
        ended: u64,
    ) -> Result<WriteInFlight<'_>, u64> {
        let mut table = self.table.lock();
        let left = free.saturating_sub(table.started_bytes - ended);
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
