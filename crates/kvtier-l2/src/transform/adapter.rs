//! An adapter with a transformation in front of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_core::object_key::ObjectKey;
use serde_json::{Map, Value};

use super::scratch::{Scratch, ScratchPiece, buffer};
use super::workers::TransformWorkers;
use super::{Transform, stored_layout};
use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored, forward,
};
use crate::error::{ErrorKind, L2Error};
use crate::key_set::KeySet;
use crate::object::{Buffer, LoadItem, ObjectSpec, StoreItem};

/// An adapter whose objects are transformed.
///
/// A batch larger than the scratch memory is processed in slices; each slice is one call of the adapter. While it
/// waits for scratch memory a call holds none, and stores and loads have their own, so waiting always ends.
///
/// An object whose bytes cannot be transformed back is not deleted, as the cause may be a wrong key file; the next store of
/// its key replaces it.
pub(super) struct Transformed {
    inner: Arc<dyn Adapter>,
    transform: Arc<dyn Transform>,
    fingerprint: String,
    workers: TransformWorkers,
    for_stores: Scratch,
    for_loads: Scratch,
    /// Objects that could not be read; the next store replaces them.
    unreadable: KeySet,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    stored_objects: AtomicU64,
    stored_bytes: AtomicU64,
    transformed_bytes: AtomicU64,
    loaded_objects: AtomicU64,
    store_failures: AtomicU64,
    corrupt_loads: AtomicU64,
    refused_loads: AtomicU64,
}

fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

fn missing() -> L2Error {
    L2Error::new(ErrorKind::Unavailable, "the adapter gave no result")
}

impl Transformed {
    pub(super) fn new(
        inner: Arc<dyn Adapter>,
        transform: Arc<dyn Transform>,
        workers: u32,
        scratch_bytes: u64,
    ) -> Self {
        Self {
            inner,
            fingerprint: transform.fingerprint(),
            transform,
            workers: TransformWorkers::new(workers),
            for_stores: Scratch::new(scratch_bytes / 2),
            for_loads: Scratch::new(scratch_bytes / 2),
            unreadable: KeySet::default(),
            counters: Counters::default(),
        }
    }

    /// Returns the transformed object as the adapter knows it.
    fn stored(&self, object: &ObjectSpec) -> Result<ObjectSpec, L2Error> {
        self.transform.check(object)?;
        let kind = self.transform.kind();
        let wrong_len = || {
            let line = format!("{kind} cannot store objects of {} bytes", object.len);
            L2Error::new(ErrorKind::Refused, line)
        };
        Ok(ObjectSpec {
            key: object.key.clone(),
            len: self
                .transform
                .stored_len(object.len)
                .ok_or_else(wrong_len)?,
            layout: stored_layout(object.layout, &self.fingerprint),
        })
    }

    /// [`Self::stored`] of an object with a buffer.
    fn checked(&self, object: &ObjectSpec, buffer: &Buffer) -> Result<ObjectSpec, L2Error> {
        buffer.check_len(object.len)?;
        self.stored(object)
    }

    /// Returns the next object of a slice as the adapter knows it, and scratch memory for it; `None` if the slice ends before
    /// it.
    async fn admitted(
        &self,
        scratch: &Scratch,
        (object, buffer): (&ObjectSpec, &Buffer),
        is_first: bool,
    ) -> Option<Result<(ObjectSpec, ScratchPiece), L2Error>> {
        let stored = match self.checked(object, buffer) {
            Ok(stored) => stored,
            Err(error) => return Some(Err(error)),
        };
        let piece = if is_first {
            scratch.take(stored.len).await
        } else {
            scratch.try_take(stored.len)?
        };
        Some(piece.map(|piece| (stored, piece)))
    }

    async fn store_all(&self, batch: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
        let mut results: Vec<_> = batch.iter().map(|_| Err(missing())).collect();
        let mut rest = batch.into_iter().enumerate().peekable();
        while rest.peek().is_some() {
            let mut jobs = Vec::new();
            while let Some((at, item)) = rest.peek() {
                let at = *at;
                let parts = (&item.object, &item.from);
                let admitted = self.admitted(&self.for_stores, parts, jobs.is_empty());
                let (stored, piece) = match admitted.await {
                    Some(Ok(admitted)) => admitted,
                    Some(Err(error)) => {
                        count(&self.counters.store_failures, 1);
                        results[at] = Err(error);
                        rest.next();
                        continue;
                    }
                    None => break,
                };
                let Some((_, item)) = rest.next() else { break };
                let (transform, len) = (Arc::clone(&self.transform), item.object.len);
                let encode = move || encode(&*transform, &item, &stored, piece);
                jobs.push((at, len, self.workers.start(encode).await));
            }
            let (mut places, mut items) = (Vec::new(), Vec::new());
            for (at, len, job) in jobs {
                match job.result().await {
                    Ok(item) => {
                        places.push((at, len));
                        items.push(item);
                    }
                    Err(error) => {
                        count(&self.counters.store_failures, 1);
                        results[at] = Err(error);
                    }
                }
            }
            if items.is_empty() {
                continue;
            }
            self.replace_unreadable(&items).await;
            let lens: Vec<_> = items.iter().map(|item| item.object.len).collect();
            let stored = self.inner.store(items).await;
            for (((at, len), stored_len), result) in places.into_iter().zip(lens).zip(stored) {
                if result.is_ok() {
                    count(&self.counters.stored_objects, 1);
                    count(&self.counters.stored_bytes, len);
                    count(&self.counters.transformed_bytes, stored_len);
                }
                results[at] = result;
            }
        }
        results
    }

    /// Deletes objects that could not be read before they are stored.
    async fn replace_unreadable(&self, items: &[StoreItem]) {
        let can = self.inner.capabilities();
        if !can.delete {
            return;
        }
        let keys = items.iter().map(|item| &item.object.key);
        let keys: Vec<_> = keys
            .filter(|key| self.unreadable.remove(key))
            .cloned()
            .collect();
        if keys.is_empty() {
            return;
        }
        let deleted = self.inner.delete(keys.clone()).await;
        for (key, result) in keys.iter().zip(deleted) {
            if result.is_err() {
                self.unreadable.insert(key);
            }
        }
    }

    /// Makes misses of objects that could not be read, unless another server may have replaced them.
    fn without_unreadable(&self, objects: &[ObjectSpec], found: &mut [Option<u64>]) {
        if self.inner.capabilities().shared || self.unreadable.is_empty() {
            return;
        }
        for (object, found) in objects.iter().zip(found) {
            *found = found.filter(|_| !self.unreadable.contains(&object.key));
        }
    }

    async fn load_all(&self, batch: Vec<LoadItem>) -> Vec<Result<Loaded, L2Error>> {
        let mut results: Vec<_> = batch.iter().map(|_| Err(missing())).collect();
        let mut rest = batch.into_iter().enumerate().peekable();
        while rest.peek().is_some() {
            let (mut slice, mut items) = (Vec::new(), Vec::new());
            while let Some((at, item)) = rest.peek() {
                let at = *at;
                let parts = (&item.object, &item.to);
                let admitted = self.admitted(&self.for_loads, parts, slice.is_empty());
                let (stored, piece) = match admitted.await {
                    Some(Ok(admitted)) => admitted,
                    Some(Err(error)) => {
                        results[at] = Err(error);
                        rest.next();
                        continue;
                    }
                    None => break,
                };
                let (piece, len) = (Arc::new(piece), stored.len);
                let Some((_, item)) = rest.next() else { break };
                let Some(to) = buffer(&piece, len) else { break };
                items.push(LoadItem { object: stored, to });
                slice.push((at, item, piece, len));
            }
            if items.is_empty() {
                continue;
            }
            let loaded = self.inner.load(items).await;
            let mut jobs = Vec::new();
            for ((at, item, piece, len), loaded) in slice.into_iter().zip(loaded) {
                match loaded {
                    Ok(loaded) => {
                        let (transform, object) =
                            (Arc::clone(&self.transform), item.object.clone());
                        let decode = move || decode(&*transform, &item, piece, len);
                        jobs.push((at, object, loaded, self.workers.start(decode).await));
                    }
                    Err(error) => results[at] = Err(error),
                }
            }
            for (at, object, loaded, job) in jobs {
                results[at] = self.loaded(&object, loaded, job.result().await);
            }
        }
        results
    }

    fn loaded(
        &self,
        object: &ObjectSpec,
        loaded: Loaded,
        decoded: Result<(), L2Error>,
    ) -> Result<Loaded, L2Error> {
        let Err(error) = decoded else {
            count(&self.counters.loaded_objects, 1);
            let verified = loaded.verified || self.transform.verifies();
            return Ok(Loaded { verified });
        };
        match error.kind() {
            ErrorKind::Corrupt => {
                count(&self.counters.corrupt_loads, 1);
                self.unreadable.insert(&object.key);
            }
            ErrorKind::Refused => {
                count(&self.counters.refused_loads, 1);
                // In a tier of several servers it may be one that another can read.
                if !self.inner.capabilities().shared {
                    self.unreadable.insert(&object.key);
                }
            }
            _ => {}
        }
        let name = object.key.text().shown();
        let line = format!("{}: {name} {error}", self.inner.kind());
        Err(L2Error::new(error.kind(), line))
    }

    fn report(&self) -> Value {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let mut part = Map::new();
        let mut put = |name: &str, value: Value| part.insert(name.into(), value);
        put("type", self.transform.kind().into());
        put("max_workers", self.workers.count().into());
        put("cpu_seconds", self.workers.seconds().into());
        let counters = &self.counters;
        for (name, counter) in [
            ("stored_objects", &counters.stored_objects),
            ("stored_bytes", &counters.stored_bytes),
            ("transformed_bytes", &counters.transformed_bytes),
            ("loaded_objects", &counters.loaded_objects),
            ("store_failures", &counters.store_failures),
            ("corrupt_loads", &counters.corrupt_loads),
            ("refused_loads", &counters.refused_loads),
        ] {
            put(name, read(counter).into());
        }
        let (original, stored) = (
            read(&counters.stored_bytes),
            read(&counters.transformed_bytes),
        );
        let ratio = (original > 0).then(|| stored as f64 / original as f64);
        put("ratio", ratio.into());
        let scratch = [&self.for_stores, &self.for_loads];
        let sum = |of: fn(&Scratch) -> u64| scratch.iter().map(|scratch| of(scratch)).sum::<u64>();
        put("scratch_bytes", sum(Scratch::capacity).into());
        put("scratch_used_bytes", sum(Scratch::used).into());
        self.transform.report(&mut part);
        Value::Object(part)
    }
}

fn encode(
    transform: &dyn Transform,
    item: &StoreItem,
    stored: &ObjectSpec,
    mut piece: ScratchPiece,
) -> Result<StoreItem, L2Error> {
    let none = || L2Error::new(ErrorKind::Memory, "the scratch memory is in use");
    let len = stored.len as usize;
    let bytes = piece.bytes_mut().and_then(|bytes| bytes.get_mut(..len));
    transform.encode(&item.object, &item.from, bytes.ok_or_else(none)?)?;
    let from = buffer(&Arc::new(piece), stored.len).ok_or_else(none)?;
    Ok(StoreItem {
        object: stored.clone(),
        from,
    })
}

fn decode(
    transform: &dyn Transform,
    item: &LoadItem,
    mut piece: Arc<ScratchPiece>,
    len: u64,
) -> Result<(), L2Error> {
    if let Some(bytes) = Arc::get_mut(&mut piece).and_then(ScratchPiece::bytes_mut)
        && let Some(bytes) = bytes.get_mut(..len as usize)
    {
        return transform.decode(&item.object, bytes, &item.to);
    }
    // The adapter still holds the buffer, although it has answered.
    let buffer =
        buffer(&piece, len).ok_or_else(|| L2Error::new(ErrorKind::Memory, "there is no buffer"))?;
    let mut bytes = Vec::new();
    buffer.read_into(0, len, &mut bytes)?;
    transform.decode(&item.object, &mut bytes, &item.to)
}

impl Adapter for Transformed {
    forward!(
        kind, delete, list, recover, free_bytes, check, prefer, close
    );

    fn capabilities(&self) -> Capabilities {
        let inner = self.inner.capabilities();
        Capabilities {
            verifies: inner.verifies || self.transform.verifies(),
            ..inner
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(self.store_all(batch))
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            let stored: Vec<_> = batch
                .iter()
                .map(|object| self.stored(object).ok())
                .collect();
            let known = stored.iter().flatten().cloned().collect();
            let mut found = self.inner.lookup(known).await?.into_iter();
            let one = |stored: Option<ObjectSpec>| stored.and_then(|_| found.next().flatten());
            let mut found: Vec<_> = stored.into_iter().map(one).collect();
            self.without_unreadable(&batch, &mut found);
            Ok(found)
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(self.load_all(batch))
    }

    fn size_of(&self, len: u64) -> u64 {
        let stored = self.transform.stored_len(len);
        stored.map_or(u64::MAX, |stored| self.inner.size_of(stored))
    }

    fn status(&self) -> Value {
        let mut status = self.inner.status();
        if let Some(status) = status.as_object_mut() {
            // The first of the configuration is the outermost, so it is asked last.
            let list = status
                .entry("serde")
                .or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(list) = list {
                list.insert(0, self.report());
            }
        }
        status
    }
}
