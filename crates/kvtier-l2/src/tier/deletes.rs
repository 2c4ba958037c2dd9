//! Deletes in flight.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvtier_core::cache::Removed;
use kvtier_core::object_key::ObjectKey;

use super::key_states::{DeleteBytes, DeleteEnd, KeyStates};
use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};

/// Deletes that were sent. Those that have no result when this is dropped are sent again later.
pub(super) struct DeletesInFlight {
    states: Arc<KeyStates>,
    keys: HashMap<ObjectKey, DeleteBytes>,
}

impl DeletesInFlight {
    /// Starts to delete `keys` by name, which `remove` removes from the index; returns what it returned. Keys that are kept
    /// there are not part of it.
    pub(super) fn start(
        states: &Arc<KeyStates>,
        keys: &[ObjectKey],
        mut remove: impl FnMut(&ObjectKey) -> Removed,
    ) -> (Self, Vec<Removed>) {
        let mut deletes = Self {
            states: Arc::clone(states),
            keys: HashMap::new(),
        };
        let start = |key: &ObjectKey| {
            // One key per hold of the lock: there may be thousands.
            states.with(|table| {
                let removed = remove(key);
                // A key that is named twice is deleted once.
                if removed.kept == 0 && !deletes.keys.contains_key(key) {
                    let bytes = table.start_delete(key, removed);
                    deletes.keys.insert(key.clone(), bytes);
                }
                removed
            })
        };
        let removed = keys.iter().map(start).collect();
        (deletes, removed)
    }

    /// The key was deleted.
    pub(super) fn succeeded(&mut self, key: &ObjectKey) {
        self.end(key, || DeleteEnd::Deleted);
    }

    /// The delete of the key failed; `insert` may put it back into the index.
    pub(super) fn failed(
        &mut self,
        key: &ObjectKey,
        error: &L2Error,
        insert: impl FnOnce() -> bool,
    ) {
        let is_late = error.kind() == ErrorKind::Deadline;
        self.end(key, || {
            if insert() {
                DeleteEnd::Reinserted
            } else {
                DeleteEnd::Failed { is_late }
            }
        });
    }

    fn end(&mut self, key: &ObjectKey, end: impl FnOnce() -> DeleteEnd) {
        if let Some(bytes) = self.keys.remove(key) {
            // Under the lock: the object counts throughout.
            self.states
                .with(|table| table.end_delete(key, bytes, end()));
        }
    }
}

impl Drop for DeletesInFlight {
    fn drop(&mut self) {
        for (key, bytes) in self.keys.drain() {
            let end = DeleteEnd::Failed { is_late: true };
            self.states.with(|table| table.end_delete(&key, bytes, end));
        }
        self.states.notify_deletes_ended();
    }
}

/// Results of deletes.
#[derive(Debug, Default)]
pub(super) struct Deletes {
    pub objects: u64,
    pub bytes: u64,
    /// Objects by cache salt.
    pub by_salt: BTreeMap<Arc<str>, u64>,
    pub failed: Vec<L2Error>,
}

/// Deletes up to `limit` pending keys, of all tenants or of one, and continues if the caller no longer waits. If none
/// is pending, waits for the deletes of others. `None` if there is nothing to delete.
pub(super) async fn delete_pending(
    states: &Arc<KeyStates>,
    adapter: &Arc<dyn Adapter>,
    salt: Option<&str>,
    limit: usize,
) -> Option<Deletes> {
    let mut ended = states.deletes_ended();
    let pending = states.with(|table| {
        let is_idle = table.is_idle(salt);
        (!is_idle).then(|| table.start_pending(salt, limit))
    })?;
    if pending.is_empty() {
        let _ = ended.changed().await;
        return Some(Deletes::default());
    }
    let in_flight = pending
        .iter()
        .map(|(key, bytes)| (key.clone(), Some(*bytes)));
    let mut in_flight = DeletesInFlight {
        states: Arc::clone(states),
        keys: in_flight.collect(),
    };
    let (keys, bytes): (Vec<_>, Vec<_>) = pending.into_iter().unzip();
    let adapter = Arc::clone(adapter);
    let work = tokio::spawn(async move {
        let mut results = adapter.delete(keys.clone()).await.into_iter();
        let mut deletes = Deletes::default();
        for (key, bytes) in keys.iter().zip(bytes) {
            match results.next().unwrap_or_else(|| Err(missing_result())) {
                Ok(_) => {
                    in_flight.succeeded(key);
                    deletes.objects += 1;
                    deletes.bytes += bytes;
                    let salt = Arc::clone(key.cache_salt());
                    *deletes.by_salt.entry(salt).or_default() += 1;
                }
                Err(error) => {
                    in_flight.failed(key, &error, || false);
                    deletes.failed.push(error);
                }
            }
        }
        deletes
    });
    let failed = |error: tokio::task::JoinError| Deletes {
        failed: vec![L2Error::new(ErrorKind::Unavailable, error.to_string())],
        ..Deletes::default()
    };
    Some(work.await.unwrap_or_else(failed))
}

/// Error for an item for which an adapter returned no result.
pub(super) fn missing_result() -> L2Error {
    L2Error::new(ErrorKind::Refused, "the adapter gave no result")
}
