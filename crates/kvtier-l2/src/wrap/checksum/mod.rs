//! Checksums for adapters that do not verify their loads.

mod cache;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_core::object_key::ObjectKey;
use kvtier_memory::AccessError;
use kvtier_memory::checksum::checksum128;
use serde_json::{Value, json};

pub use cache::ChecksumCache;

use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored, forward,
};
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, LoadItem, ObjectSpec, StoreItem, key_digest};
use cache::{ChecksumVerdict, Expected, Known};

/// Wrapper that keeps the checksum of each object stored through it and compares it at each load.
///
/// An object with other bytes is an [`ErrorKind::Corrupt`] and is deleted. Objects without a known checksum (stored before
/// the start, by others, or long ago) are returned unverified, or are misses if checksums are required.
pub struct Checksums {
    inner: Arc<dyn Adapter>,
    sums: Arc<ChecksumCache>,
    required: bool,
    verified: AtomicU64,
    unverified: AtomicU64,
    corrupt: AtomicU64,
}

/// Checksum of an object's bytes, key, length and layout, so that bytes of another object never match.
fn checksum(object: &ObjectSpec, key: u128, bytes: &Buffer) -> Result<u128, AccessError> {
    let mut all = [0; 48];
    all[..16].copy_from_slice(&key.to_le_bytes());
    all[16..24].copy_from_slice(&object.len.to_le_bytes());
    all[24..32].copy_from_slice(&object.layout.to_le_bytes());
    all[32..].copy_from_slice(&bytes.checksum()?.to_le_bytes());
    Ok(checksum128(&all))
}

impl Checksums {
    /// Returns `inner` with checksums. The cache may outlive it. If `required`, objects without a known checksum are misses.
    #[must_use]
    pub fn new(inner: Arc<dyn Adapter>, sums: Arc<ChecksumCache>, required: bool) -> Self {
        Self {
            inner,
            sums,
            required,
            verified: AtomicU64::new(0),
            unverified: AtomicU64::new(0),
            corrupt: AtomicU64::new(0),
        }
    }

    fn error(&self, kind: ErrorKind, key: &ObjectKey, what: &str) -> L2Error {
        let name = key.text().shown();
        L2Error::new(kind, format!("{}: {name} {what}", self.inner.kind()))
    }

    /// Stores the items. Their checksums are known before the adapter has the bytes, so loads are compared while the store is
    /// in flight.
    async fn store_some(&self, batch: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
        let mut stores = Vec::with_capacity(batch.len());
        for item in &batch {
            let key = key_digest(&item.object.key);
            // The adapter reports bytes that cannot be read; no stored object has this checksum.
            let sum = checksum(&item.object, key, &item.from).unwrap_or_default();
            stores.push((key, sum));
            tokio::task::yield_now().await;
        }
        let keys: Vec<_> = stores.iter().map(|(key, _)| *key).collect();
        let before = self.sums.get(&keys);
        let in_flight = self.sums.start(stores);
        let results = self.inner.store(batch).await;
        let outcome = |(result, before): (&Result<Stored, L2Error>, Expected)| match result {
            Ok(Stored::Written(_)) => ChecksumVerdict::Stored,
            // The stored bytes may differ: engines do not compute the same KV bit by bit.
            Ok(Stored::AlreadyThere(_)) => ChecksumVerdict::Unchanged,
            Err(error) => match error.kind() {
                ErrorKind::Deadline => ChecksumVerdict::Stored,
                ErrorKind::Unavailable if before.known.is_none() => ChecksumVerdict::Stored,
                _ => ChecksumVerdict::Unchanged,
            },
        };
        in_flight.finish(results.iter().zip(before).map(outcome));
        results
    }

    /// Replaces objects that were there already and have no known checksum.
    async fn replace_unknown(&self, items: &[StoreItem], results: &mut [Result<Stored, L2Error>]) {
        let keys: Vec<_> = items
            .iter()
            .map(|item| key_digest(&item.object.key))
            .collect();
        let mut seen = HashSet::new();
        let mut unknown = Vec::new();
        for (at, expected) in self.sums.get(&keys).into_iter().enumerate() {
            let is_there = matches!(results.get(at), Some(Ok(Stored::AlreadyThere(_))));
            if is_there && expected.is_empty() && seen.insert(keys[at]) {
                unknown.push(at);
            }
        }
        if unknown.is_empty() {
            return;
        }
        let names = unknown.iter().map(|&at| items[at].object.key.clone());
        self.inner.delete(names.collect()).await;
        let again = unknown.iter().map(|&at| items[at].clone());
        let again = self.store_some(again.collect()).await;
        for (at, result) in unknown.into_iter().zip(again) {
            results[at] = result;
        }
    }

    /// Compares loaded bytes with the checksums known `before` the load and after it.
    async fn compare(
        &self,
        items: &[(ObjectSpec, Buffer)],
        results: &mut [Result<Loaded, L2Error>],
        keys: &[u128],
        before: &[Expected],
    ) {
        let after = self.sums.get(keys);
        // Position, key digest, and checksum of what was loaded.
        let mut wrong = Vec::new();
        for (at, ((object, to), result)) in items.iter().zip(results.iter_mut()).enumerate() {
            let Ok(loaded) = result else { continue };
            if before[at].is_empty() && after[at].is_empty() {
                let count = if loaded.verified {
                    &self.verified
                } else {
                    &self.unverified
                };
                count.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            match checksum(object, keys[at], to) {
                Ok(sum) if before[at].allows(sum) || after[at].allows(sum) => {
                    loaded.verified = true;
                    self.verified.fetch_add(1, Ordering::Relaxed);
                }
                Ok(sum) => wrong.push((at, sum)),
                Err(error) => {
                    *result = Err(self.error(ErrorKind::Memory, &object.key, &error.to_string()));
                }
            }
            tokio::task::yield_now().await;
        }
        if wrong.is_empty() {
            return;
        }
        // An object that was stored again meanwhile is not corrupt.
        let wrong_keys: Vec<_> = wrong.iter().map(|(at, _)| keys[*at]).collect();
        let now = self.sums.get(&wrong_keys);
        let mut damaged = Vec::new();
        for ((at, sum), now) in wrong.into_iter().zip(now) {
            let key = &items[at].0.key;
            if now.allows(sum) {
                results[at] = Ok(Loaded { verified: true });
                self.verified.fetch_add(1, Ordering::Relaxed);
            } else if let Some(right) = now.known
                && now == before[at]
                && now.in_flight.is_empty()
            {
                let what = "has other bytes than were stored";
                results[at] = Err(self.error(ErrorKind::Corrupt, key, what));
                self.corrupt.fetch_add(1, Ordering::Relaxed);
                damaged.push((key.clone(), (keys[at], right)));
            } else {
                let what = "was stored while it was loaded, and has other bytes";
                results[at] = Err(self.error(ErrorKind::NotFound, key, what));
            }
        }
        let (names, known): (Vec<_>, Vec<Known>) = damaged.into_iter().unzip();
        let deleted = self.inner.delete(names).await;
        // The checksum of an object that could not be deleted is kept, so that the next load detects it too.
        let forgotten = known.into_iter().zip(deleted);
        self.sums
            .forget(forgotten.filter_map(|(known, result)| result.ok().map(|_| known)));
    }
}

impl Adapter for Checksums {
    forward!(
        kind, list, recover, size_of, free_bytes, check, prefer, close
    );

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            verifies: true,
            ..self.inner.capabilities()
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(async move {
            if !(self.required && self.inner.capabilities().delete) {
                return self.store_some(batch).await;
            }
            let mut results = self.store_some(batch.clone()).await;
            self.replace_unknown(&batch, &mut results).await;
            results
        })
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        if !self.required {
            return self.inner.lookup(batch);
        }
        let keys: Vec<_> = batch.iter().map(|object| key_digest(&object.key)).collect();
        Box::pin(async move {
            let mut found = self.inner.lookup(batch).await?;
            for (found, expected) in found.iter_mut().zip(self.sums.get(&keys)) {
                *found = found.filter(|_| !expected.is_empty());
            }
            Ok(found)
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(async move {
            let one = |item: &LoadItem| (item.object.clone(), item.to.clone());
            let items: Vec<_> = batch.iter().map(one).collect();
            let keys: Vec<_> = items
                .iter()
                .map(|(object, _)| key_digest(&object.key))
                .collect();
            let before = self.sums.get(&keys);
            let mut results = self.inner.load(batch).await;
            self.compare(&items, &mut results, &keys, &before).await;
            for ((object, _), result) in items.iter().zip(&mut results) {
                if self.required && matches!(result, Ok(loaded) if !loaded.verified) {
                    let what = "has no checksum that is known";
                    *result = Err(self.error(ErrorKind::NotFound, &object.key, what));
                }
            }
            results
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move {
            let digests: Vec<_> = keys.iter().map(key_digest).collect();
            let before = self.sums.get(&digests);
            let deleted = self.inner.delete(keys).await;
            let known = digests.into_iter().zip(before).zip(&deleted);
            self.sums
                .forget(known.filter_map(|((key, was), result)| {
                    result.is_ok().then_some((key, was.known?))
                }));
            deleted
        })
    }

    fn status(&self) -> Value {
        let mut status = self.inner.status();
        if let Some(status) = status.as_object_mut() {
            let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
            let checksums = json!({
                "remembered": self.sums.len(),
                "bound": self.sums.bound(),
                "verified_loads": read(&self.verified),
                "unverified_loads": read(&self.unverified),
                "corrupt_loads": read(&self.corrupt),
            });
            status.insert("checksums".into(), checksums);
        }
        status
    }
}
