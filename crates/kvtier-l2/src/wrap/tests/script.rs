//! An adapter that does as it is told.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvtier_core::object_key::ObjectKey;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored,
};
use crate::error::{ErrorKind, L2Error};
use crate::object::{LoadItem, ObjectSpec, StoreItem};

/// What becomes of one call.
pub enum Step {
    /// Each item by itself; further ones are fine.
    Items(Vec<Option<ErrorKind>>),
    /// All of them.
    All(ErrorKind),
    /// It waits for a permit of `gate`.
    Wait,
    /// It answers for one item more than it was asked for.
    Surplus,
    Panic,
}

/// Follows its steps, and then answers everything well.
pub struct Scripted {
    pub steps: Mutex<VecDeque<Step>>,
    /// The calls that came, as "load 1 2".
    log: Mutex<Vec<String>>,
    pub gate: Semaphore,
    under_way: AtomicUsize,
    pub most: AtomicUsize,
}

impl Scripted {
    pub fn new(steps: impl IntoIterator<Item = Step>) -> Arc<Self> {
        Arc::new(Self {
            steps: Mutex::new(steps.into_iter().collect()),
            log: Mutex::default(),
            gate: Semaphore::new(0),
            under_way: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        })
    }

    pub fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock())
    }

    /// Answers for so many items.
    async fn play(&self, name: &str, which: Vec<u64>) -> Vec<Result<(), L2Error>> {
        let words: Vec<_> = which.iter().map(u64::to_string).collect();
        self.log.lock().push(format!("{name} {}", words.join(" ")));
        let under_way = self.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(under_way, Ordering::Relaxed);
        let step = self.steps.lock().pop_front();
        let fail = |kind: ErrorKind| Err(L2Error::new(kind, kind.name()));
        let mut results = vec![Ok(()); which.len()];
        match step {
            None => {}
            Some(Step::Items(kinds)) => {
                for (result, kind) in results.iter_mut().zip(kinds) {
                    *result = kind.map_or(Ok(()), fail);
                }
            }
            Some(Step::All(kind)) => results.fill(fail(kind)),
            Some(Step::Wait) => self.gate.acquire().await.unwrap().forget(),
            Some(Step::Surplus) => results.push(Ok(())),
            Some(Step::Panic) => panic!("as scripted"),
        }
        self.under_way.fetch_sub(1, Ordering::Relaxed);
        results
    }
}

/// The length of an object stands for its name here.
fn names<'a>(objects: impl IntoIterator<Item = &'a ObjectSpec>) -> Vec<u64> {
    objects.into_iter().map(|object| object.len).collect()
}

fn each<T: Clone>(results: Vec<Result<(), L2Error>>, value: T) -> Vec<Result<T, L2Error>> {
    let value = |result: Result<(), _>| result.map(|()| value.clone());
    results.into_iter().map(value).collect()
}

/// One error for all, or a value.
fn whole<T>(results: Vec<Result<(), L2Error>>, value: T) -> Result<T, L2Error> {
    results
        .into_iter()
        .collect::<Result<Vec<_>, _>>()
        .map(|_| value)
}

impl Adapter for Scripted {
    fn kind(&self) -> &'static str {
        "scripted"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(async move {
            let which = names(batch.iter().map(|item| &item.object));
            each(self.play("store", which).await, Stored::Written(1))
        })
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            let results = self.play("lookup", names(&batch)).await;
            let found = vec![Some(1); results.len()];
            whole(results, found)
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(async move {
            let which = names(batch.iter().map(|item| &item.object));
            each(self.play("load", which).await, Loaded { verified: true })
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move { each(self.play("delete", vec![0; keys.len()]).await, true) })
    }

    fn list(&self, _: Option<String>, _: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async move { whole(self.play("list", vec![0]).await, ListPage::default()) })
    }

    fn recover<'a>(
        &'a self,
        _: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(async { Ok(Recovered::default()) })
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(async move { whole(self.play("free", vec![0]).await, None) })
    }

    fn status(&self) -> Value {
        json!({"type": "scripted", "is_healthy": true})
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.log.lock().push("close".into()) })
    }
}
