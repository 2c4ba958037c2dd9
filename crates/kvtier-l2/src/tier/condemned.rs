//! Objects that the index has given up and that are still in the backend.
//!
//! They count until their delete has answered, whoever waits for it. An object is here or in the index, not in both.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvtier_core::object_key::ObjectKey;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};

/// What is known of one of them.
#[derive(Debug, Clone, Copy)]
struct Fate {
    bytes: u64,
    /// Its delete was not answered in time and may come yet.
    is_late: bool,
}

#[derive(Debug, Default)]
struct Lists {
    /// To be deleted.
    waiting: HashMap<ObjectKey, Fate>,
    /// Being deleted, and how many bytes each had in the index.
    under_way: HashMap<ObjectKey, u64>,
    /// Of both.
    bytes: u64,
}

impl Lists {
    fn add(&mut self, key: ObjectKey, fate: Fate) {
        let before = self.waiting.insert(key, fate);
        self.bytes = self.bytes + fate.bytes - before.map_or(0, |before| before.bytes);
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Condemned {
    lists: Mutex<Lists>,
    /// Changes when a delete has ended.
    ended: watch::Sender<()>,
}

/// What became of a key that is about to be stored.
#[derive(Debug)]
pub(super) enum Claim {
    /// It was not here.
    Unknown,
    /// It is not deleted any more; so many bytes are still there.
    Spared(u64),
    /// A delete may still run.
    Refused,
}

/// Deletes under way. What was not answered when it is dropped waits again.
struct Deleting {
    condemned: Arc<Condemned>,
    keys: Vec<(ObjectKey, u64)>,
}

impl Deleting {
    fn settle(mut self, results: impl IntoIterator<Item = Result<bool, L2Error>>) -> Deletes {
        let mut done = Deletes::default();
        let mut results = results.into_iter();
        let mut lists = self.condemned.lists.lock();
        for (key, bytes) in std::mem::take(&mut self.keys) {
            lists.under_way.remove(&key);
            lists.bytes -= bytes;
            match results.next() {
                Some(Ok(_)) => {
                    done.objects += 1;
                    done.bytes += bytes;
                    *done
                        .by_salt
                        .entry(Arc::clone(key.cache_salt()))
                        .or_default() += 1;
                }
                failed => {
                    let error = failed.and_then(Result::err).unwrap_or_else(no_result);
                    let is_late = error.kind() == ErrorKind::Deadline;
                    lists.add(key, Fate { bytes, is_late });
                    done.failed.push(error);
                }
            }
        }
        drop(lists);
        self.condemned.ended.send_replace(());
        done
    }
}

impl Drop for Deleting {
    fn drop(&mut self) {
        if self.keys.is_empty() {
            return;
        }
        let mut lists = self.condemned.lists.lock();
        for (key, bytes) in std::mem::take(&mut self.keys) {
            lists.under_way.remove(&key);
            lists.bytes -= bytes;
            let is_late = true;
            lists.add(key, Fate { bytes, is_late });
        }
        drop(lists);
        self.condemned.ended.send_replace(());
    }
}

/// What deletes did.
#[derive(Debug, Default)]
pub(super) struct Deletes {
    pub objects: u64,
    pub bytes: u64,
    /// Objects by cache salt.
    pub by_salt: BTreeMap<Arc<str>, u64>,
    pub failed: Vec<L2Error>,
}

fn no_result() -> L2Error {
    L2Error::new(ErrorKind::Refused, "the adapter gave no result")
}

impl Condemned {
    /// Takes over what `evicted` gives, in one step: nobody sees it neither here nor there.
    pub(super) fn add(&self, evicted: impl FnOnce() -> Vec<(ObjectKey, u64)>) {
        let mut lists = self.lists.lock();
        for (key, bytes) in evicted() {
            let is_late = false;
            lists.add(key, Fate { bytes, is_late });
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.lists.lock().bytes
    }

    /// Bytes by cache salt.
    pub(super) fn by_salt(&self) -> BTreeMap<Arc<str>, u64> {
        let lists = self.lists.lock();
        let waiting = lists.waiting.iter().map(|(key, fate)| (key, fate.bytes));
        let under_way = lists.under_way.iter().map(|(key, bytes)| (key, *bytes));
        let mut by_salt = BTreeMap::new();
        for (key, bytes) in waiting.chain(under_way) {
            *by_salt.entry(Arc::clone(key.cache_salt())).or_default() += bytes;
        }
        by_salt
    }

    /// Whether any is waiting to be deleted.
    pub(super) fn is_waiting(&self) -> bool {
        !self.lists.lock().waiting.is_empty()
    }

    /// Spares an object that is wanted again, once no delete of it is under way.
    pub(super) async fn claim(&self, key: &ObjectKey) -> Claim {
        let mut ended = self.ended.subscribe();
        // The sender is a part of this.
        let _ = ended
            .wait_for(|()| !self.lists.lock().under_way.contains_key(key))
            .await;
        self.spare(key)
    }

    /// The same for whoever does not wait.
    pub(super) fn spare(&self, key: &ObjectKey) -> Claim {
        let mut lists = self.lists.lock();
        if lists.under_way.contains_key(key) {
            return Claim::Refused;
        }
        match lists.waiting.get(key) {
            None => Claim::Unknown,
            Some(fate) if fate.is_late => Claim::Refused,
            Some(fate) => {
                let bytes = fate.bytes;
                lists.waiting.remove(key);
                lists.bytes -= bytes;
                Claim::Spared(bytes)
            }
        }
    }

    /// Marks keys that somebody deletes by name.
    pub(super) fn mark(self: &Arc<Self>, keys: &[ObjectKey]) -> Marked {
        let mut lists = self.lists.lock();
        let mut marked = Vec::new();
        for key in keys {
            if let Entry::Vacant(entry) = lists.under_way.entry(key.clone()) {
                entry.insert(0);
                marked.push(key.clone());
            }
        }
        Marked {
            condemned: Arc::clone(self),
            keys: marked,
            unanswered: HashMap::new(),
        }
    }

    /// Deletes up to `most` of those that wait, and goes on when nobody waits for it any more; without any, waits for
    /// those that others delete. `None` if there are none at all.
    pub(super) async fn delete(
        self: &Arc<Self>,
        adapter: &Arc<dyn Adapter>,
        most: usize,
    ) -> Option<Deletes> {
        let mut ended = self.ended.subscribe();
        let deleting = {
            let mut lists = self.lists.lock();
            let keys: Vec<_> = lists.waiting.keys().take(most).cloned().collect();
            if keys.is_empty() && lists.under_way.is_empty() {
                return None;
            }
            let mut taken = Vec::with_capacity(keys.len());
            for key in keys {
                if lists.under_way.contains_key(&key) {
                    continue;
                }
                if let Some(fate) = lists.waiting.remove(&key) {
                    lists.under_way.insert(key.clone(), fate.bytes);
                    taken.push((key, fate.bytes));
                }
            }
            Deleting {
                condemned: Arc::clone(self),
                keys: taken,
            }
        };
        if deleting.keys.is_empty() {
            let _ = ended.changed().await;
            return Some(Deletes::default());
        }
        let adapter = Arc::clone(adapter);
        let work = tokio::spawn(async move {
            let keys = deleting.keys.iter().map(|(key, _)| key.clone()).collect();
            let results = adapter.delete(keys).await;
            deleting.settle(results)
        });
        let failed = |error: tokio::task::JoinError| Deletes {
            failed: vec![L2Error::new(ErrorKind::Unavailable, error.to_string())],
            ..Deletes::default()
        };
        Some(work.await.unwrap_or_else(failed))
    }
}

/// Keys that somebody deletes by name: they are not stored meanwhile.
pub(super) struct Marked {
    condemned: Arc<Condemned>,
    keys: Vec<ObjectKey>,
    /// What the index had of them, until their delete has answered.
    unanswered: HashMap<ObjectKey, u64>,
}

impl Marked {
    /// The index does not have it any more.
    pub(super) fn taken_out(&mut self, key: &ObjectKey, bytes: u64) {
        self.unanswered.insert(key.clone(), bytes);
    }

    /// Its delete has answered; what the index had of it.
    pub(super) fn answered(&mut self, key: &ObjectKey) -> Option<u64> {
        self.unanswered.remove(key)
    }

    /// The backend does not have it any more.
    pub(super) fn gone(&mut self, key: &ObjectKey) {
        self.answered(key);
        let mut lists = self.condemned.lists.lock();
        if let Some(fate) = lists.waiting.remove(key) {
            lists.bytes -= fate.bytes;
        }
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        let mut lists = self.condemned.lists.lock();
        for key in &self.keys {
            lists.under_way.remove(key);
        }
        for (key, bytes) in std::mem::take(&mut self.unanswered) {
            let is_late = true;
            lists.add(key, Fate { bytes, is_late });
        }
        drop(lists);
        self.condemned.ended.send_replace(());
    }
}
