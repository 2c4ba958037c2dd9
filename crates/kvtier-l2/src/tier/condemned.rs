//! Objects that the index has given up and that are still in the backend.
//!
//! They count until their delete has answered, whoever waits for it. An object is here or in the index, not in both.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvtier_core::cache::Removed;
use kvtier_core::object_key::ObjectKey;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::Adopted;
use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};

/// What is known of one of them.
#[derive(Debug, Clone, Copy)]
struct Fate {
    bytes: u64,
    /// Its delete was not answered in time and may come yet.
    is_late: bool,
}

/// Those of one tenant.
#[derive(Debug, Default)]
struct Tenant {
    /// To be deleted.
    waiting: HashMap<ObjectKey, Fate>,
    /// Of those and of what is being deleted.
    bytes: u64,
}

#[derive(Debug, Default)]
struct Lists {
    /// By cache salt; those that have any.
    tenants: BTreeMap<Arc<str>, Tenant>,
    /// Being deleted, and how many bytes each had in the index.
    under_way: HashMap<ObjectKey, u64>,
    /// Of all.
    bytes: u64,
}

impl Lists {
    fn waiting(&self, key: &ObjectKey) -> Option<Fate> {
        let tenant = self.tenants.get(key.cache_salt())?;
        tenant.waiting.get(key).copied()
    }

    fn add(&mut self, key: ObjectKey, fate: Fate) {
        self.take(&key);
        self.count(&key, fate.bytes);
        let tenant = self.tenants.entry(Arc::clone(key.cache_salt()));
        tenant.or_default().waiting.insert(key, fate);
    }

    /// It does not wait any more.
    fn take(&mut self, key: &ObjectKey) -> Option<Fate> {
        let fate = self
            .tenants
            .get_mut(key.cache_salt())?
            .waiting
            .remove(key)?;
        self.count_off(key, fate.bytes);
        Some(fate)
    }

    /// Its delete begins.
    fn begin(&mut self, key: ObjectKey, bytes: u64) {
        self.count(&key, bytes);
        *self.under_way.entry(key).or_default() += bytes;
    }

    /// Its delete has ended: what it had in the index.
    fn end(&mut self, key: &ObjectKey) -> u64 {
        let bytes = self.under_way.remove(key).unwrap_or_default();
        self.count_off(key, bytes);
        bytes
    }

    fn count(&mut self, key: &ObjectKey, bytes: u64) {
        let tenant = self.tenants.entry(Arc::clone(key.cache_salt()));
        tenant.or_default().bytes += bytes;
        self.bytes += bytes;
    }

    fn count_off(&mut self, key: &ObjectKey, bytes: u64) {
        let salt = key.cache_salt();
        let Some(tenant) = self.tenants.get_mut(salt) else {
            return;
        };
        tenant.bytes -= bytes;
        self.bytes -= bytes;
        if tenant.bytes == 0 && tenant.waiting.is_empty() {
            self.tenants.remove(salt);
        }
    }

    fn bytes_of(&self, salt: &str) -> u64 {
        self.tenants.get(salt).map_or(0, |tenant| tenant.bytes)
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
    keys: Vec<ObjectKey>,
}

impl Deleting {
    fn settle(mut self, results: impl IntoIterator<Item = Result<bool, L2Error>>) -> Deletes {
        let mut done = Deletes::default();
        let mut results = results.into_iter();
        let mut lists = self.condemned.lists.lock();
        for key in std::mem::take(&mut self.keys) {
            let bytes = lists.end(&key);
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
        for key in std::mem::take(&mut self.keys) {
            let bytes = lists.end(&key);
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

    /// What `index` tells, and the bytes that are here at that moment, of all or of one tenant. No object is counted by
    /// both.
    pub(super) fn beside<T>(&self, salt: Option<&str>, index: impl FnOnce() -> T) -> (T, u64) {
        let lists = self.lists.lock();
        let bytes = salt.map_or(lists.bytes, |salt| lists.bytes_of(salt));
        (index(), bytes)
    }

    /// What may be in the backend, of all or of one tenant: what `index` tells, what is here, and what `evicted` gives,
    /// which is taken over. What goes from here to there or back meanwhile is counted, maybe twice.
    pub(super) fn sum(
        &self,
        salt: Option<&str>,
        index: impl FnOnce() -> u64,
        evicted: impl FnOnce() -> Vec<(ObjectKey, u64)>,
    ) -> u64 {
        let mut lists = self.lists.lock();
        // In this order: what is evicted in between counts as it did before.
        let bytes = index();
        for (key, bytes) in evicted() {
            let is_late = false;
            lists.add(key, Fate { bytes, is_late });
        }
        bytes + salt.map_or(lists.bytes, |salt| lists.bytes_of(salt))
    }

    /// Bytes by cache salt.
    pub(super) fn by_salt(&self) -> BTreeMap<Arc<str>, u64> {
        let lists = self.lists.lock();
        let tenants = lists.tenants.iter();
        let bytes = tenants.map(|(salt, tenant)| (Arc::clone(salt), tenant.bytes));
        bytes.filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// Whether any is waiting to be deleted.
    pub(super) fn is_waiting(&self) -> bool {
        let lists = self.lists.lock();
        let mut tenants = lists.tenants.values();
        tenants.any(|tenant| !tenant.waiting.is_empty())
    }

    /// Spares an object that is about to be stored, once no delete of it is under way.
    pub(super) async fn claim(&self, key: &ObjectKey) -> Claim {
        let mut ended = self.ended.subscribe();
        // The sender is a part of this.
        let _ = ended
            .wait_for(|()| !self.lists.lock().under_way.contains_key(key))
            .await;
        let mut lists = self.lists.lock();
        if lists.under_way.contains_key(key) {
            return Claim::Refused;
        }
        match lists.waiting(key) {
            None => Claim::Unknown,
            Some(fate) if fate.is_late => Claim::Refused,
            Some(fate) => {
                lists.take(key);
                Claim::Spared(fate.bytes)
            }
        }
    }

    /// Spares an object that was found if `enter`, which takes it into the index, says so.
    pub(super) fn adopt(&self, key: &ObjectKey, enter: impl FnOnce() -> Adopted) -> Adopted {
        let mut lists = self.lists.lock();
        let is_late = |fate: Fate| fate.is_late;
        if lists.under_way.contains_key(key) || lists.waiting(key).is_some_and(is_late) {
            return Adopted::Leaving;
        }
        let adopted = enter();
        if adopted == Adopted::Known {
            lists.take(key);
        }
        adopted
    }

    /// Marks keys that somebody deletes by name.
    pub(super) fn mark(self: &Arc<Self>, keys: &[ObjectKey]) -> Marked {
        let mut lists = self.lists.lock();
        let mut marked = Vec::new();
        for key in keys {
            if !lists.under_way.contains_key(key) {
                lists.begin(key.clone(), 0);
                marked.push(key.clone());
            }
        }
        Marked {
            condemned: Arc::clone(self),
            keys: marked,
        }
    }

    /// Deletes up to `most` of those that wait, of all or of one tenant, and goes on when nobody waits for it any more;
    /// without any, waits for those that others delete. `None` if there are none at all.
    pub(super) async fn delete(
        self: &Arc<Self>,
        adapter: &Arc<dyn Adapter>,
        salt: Option<&str>,
        most: usize,
    ) -> Option<Deletes> {
        let mut ended = self.ended.subscribe();
        let deleting = {
            let mut lists = self.lists.lock();
            let keys: Vec<_> = {
                let (one, all) = match salt {
                    Some(salt) => (lists.tenants.get(salt), None),
                    None => (None, Some(lists.tenants.values())),
                };
                let tenants = one.into_iter().chain(all.into_iter().flatten());
                let waiting = tenants.flat_map(|tenant| tenant.waiting.keys());
                waiting.take(most).cloned().collect()
            };
            let is_idle = match salt {
                Some(salt) => lists.bytes_of(salt) == 0,
                None => lists.under_way.is_empty(),
            };
            if keys.is_empty() && is_idle {
                return None;
            }
            let mut taken = Vec::with_capacity(keys.len());
            for key in keys {
                if !lists.under_way.contains_key(&key)
                    && let Some(fate) = lists.take(&key)
                {
                    lists.begin(key.clone(), fate.bytes);
                    taken.push(key);
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
            let results = adapter.delete(deleting.keys.clone()).await;
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
}

impl Marked {
    /// Takes it out of the index; it counts here until its delete has answered.
    pub(super) fn take_out(&self, key: &ObjectKey, remove: impl FnOnce() -> Removed) -> Removed {
        let mut lists = self.condemned.lists.lock();
        let was = remove();
        if was.objects > 0 {
            lists.begin(key.clone(), was.bytes);
        }
        was
    }

    /// Its delete has failed: it goes back to the index if `enter` says so; otherwise it is deleted later.
    pub(super) fn failed(&self, key: &ObjectKey, enter: impl FnOnce(u64) -> Adopted) {
        let mut lists = self.condemned.lists.lock();
        let bytes = lists.under_way.get(key).copied().unwrap_or_default();
        if bytes > 0 && enter(bytes) == Adopted::Known {
            lists.end(key);
            lists.begin(key.clone(), 0);
        }
    }

    /// The backend does not have it any more.
    pub(super) fn gone(&self, key: &ObjectKey) {
        let mut lists = self.condemned.lists.lock();
        lists.take(key);
        if lists.under_way.contains_key(key) {
            lists.end(key);
            lists.begin(key.clone(), 0);
        }
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        let mut lists = self.condemned.lists.lock();
        for key in std::mem::take(&mut self.keys) {
            let bytes = lists.end(&key);
            if bytes > 0 {
                let is_late = true;
                lists.add(key, Fate { bytes, is_late });
            }
        }
        drop(lists);
        self.condemned.ended.send_replace(());
    }
}
