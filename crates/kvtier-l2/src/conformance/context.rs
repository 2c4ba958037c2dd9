//! Context of a case.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use kvtier_core::object_key::ObjectKey;

use super::memory::{Memory, bytes};
use super::{Subject, content};
use crate::adapter::{Adapter, Listed, Stored};
use crate::error::L2Error;
use crate::object::{LoadItem, ObjectSpec, StoreItem};

/// Store and memory of a case.
pub(super) struct TestContext {
    pub subject: Arc<dyn Subject>,
    pub memory: Memory,
}

/// Number of pages after which a listing is considered endless.
const MAX_PAGES: usize = 100_000;

impl TestContext {
    pub(super) fn new(subject: Arc<dyn Subject>) -> Self {
        Self {
            subject,
            memory: Memory::new(64 << 20),
        }
    }

    pub(super) async fn open(&self) -> Arc<dyn Adapter> {
        self.subject.open().await
    }

    /// Returns a store of `object` with its expected bytes.
    pub(super) fn store_item(&self, object: &ObjectSpec) -> StoreItem {
        StoreItem {
            object: object.clone(),
            from: self.memory.filled(&content(object)),
        }
    }

    pub(super) fn store_items(&self, objects: &[ObjectSpec]) -> Vec<StoreItem> {
        objects
            .iter()
            .map(|object| self.store_item(object))
            .collect()
    }

    pub(super) fn load_item(&self, object: &ObjectSpec) -> LoadItem {
        LoadItem {
            object: object.clone(),
            to: self.memory.buffer(object.len),
        }
    }

    pub(super) fn load_items(&self, objects: &[ObjectSpec]) -> Vec<LoadItem> {
        objects
            .iter()
            .map(|object| self.load_item(object))
            .collect()
    }

    /// Stores objects; all must succeed.
    pub(super) async fn store(&self, to: &dyn Adapter, objects: &[ObjectSpec]) -> Vec<Stored> {
        let results = to.store(self.store_items(objects)).await;
        assert_eq!(results.len(), objects.len(), "results of a store");
        let each = objects.iter().zip(results);
        each.map(|(object, result)| match result {
            Ok(stored) => stored,
            Err(error) => panic!("store of {}: {error}", name(object)),
        })
        .collect()
    }

    /// Loads objects and checks the bytes of those that are `Ok`.
    pub(super) async fn load(
        &self,
        from: &dyn Adapter,
        objects: &[ObjectSpec],
    ) -> Vec<Result<(), L2Error>> {
        let items = self.load_items(objects);
        let buffers: Vec<_> = items.iter().map(|item| item.to.clone()).collect();
        let results = from.load(items).await;
        assert_eq!(results.len(), objects.len(), "results of a load");
        let each = objects.iter().zip(results).zip(buffers);
        each.map(|((object, result), buffer)| {
            result.map(|_| {
                let right = bytes(&buffer) == content(object);
                assert!(right, "load of {} is Ok with other bytes", name(object));
            })
        })
        .collect()
    }

    /// Loads objects; all must succeed.
    pub(super) async fn load_all(&self, from: &dyn Adapter, objects: &[ObjectSpec]) {
        for (object, result) in objects.iter().zip(self.load(from, objects).await) {
            if let Err(error) = result {
                panic!("load of {}: {error}", name(object));
            }
        }
    }

    /// Returns the answer to a lookup, which must succeed.
    pub(super) async fn lookup(
        &self,
        from: &dyn Adapter,
        objects: &[ObjectSpec],
    ) -> Vec<Option<u64>> {
        let found = from.lookup(objects.to_vec()).await;
        let found = found.unwrap_or_else(|error| panic!("lookup: {error}"));
        assert_eq!(found.len(), objects.len(), "results of a lookup");
        found
    }

    /// Returns all objects of a listing, which has none twice unless the backend reorganises itself.
    pub(super) async fn list(
        &self,
        from: &dyn Adapter,
        limit: usize,
    ) -> BTreeMap<ObjectKey, Listed> {
        let mut all = BTreeMap::new();
        let mut next = None;
        for _ in 0..MAX_PAGES {
            let page = from.list(next, limit).await;
            let page = page.unwrap_or_else(|error| panic!("list: {error}"));
            for listed in page.objects {
                let (key, bytes) = (listed.key.clone(), listed.bytes);
                let twice = all.insert(key, listed);
                let may_be_there =
                    |twice: &Listed| self.subject.may_list_twice() && twice.bytes == bytes;
                let is_right = twice.as_ref().is_none_or(may_be_there);
                assert!(is_right, "{twice:?} is listed twice");
            }
            next = page.next;
            if next.is_none() {
                return all;
            }
        }
        panic!("a listing has more than {MAX_PAGES} pages");
    }
}

/// Returns the name of an object for messages.
pub(super) fn name(object: &ObjectSpec) -> String {
    let key = object.key.text().name(Default::default());
    format!("{key} ({} bytes, layout {})", object.len, object.layout)
}

/// Returns the keys of objects.
pub(super) fn keys(objects: &[ObjectSpec]) -> Vec<ObjectKey> {
    objects.iter().map(|object| object.key.clone()).collect()
}

/// Polls a future once; returns its output if it was ready, else drops it.
pub async fn poll_once<F: Future>(future: F) -> Option<F::Output> {
    polls(future, 1).await
}

/// Polls a future `times` times with other tasks running in between, then drops it.
pub(super) async fn polls<F: Future>(future: F, times: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    for _ in 0..times {
        let poll = poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await;
        if let Poll::Ready(output) = poll {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}
