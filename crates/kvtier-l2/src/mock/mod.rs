//! `mock`: objects in memory behind a link of a configured speed, for tests and for trying out a configuration.

mod memory_store;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use kvtier_core::object_key::ObjectKey;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};

pub use memory_store::MemoryStore;

use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored, recover_pages,
};
use crate::config::{AdapterConfig, GIB, Interval, Key};
use crate::error::{ErrorKind, L2Error};
use crate::net::Link;
use crate::object::{LoadItem, ObjectSpec, StoreItem};
use crate::registry::{AdapterType, Registry};

const KEYS: &[Key] = &[
    Key::number("max_size_gb", Interval::above(0.0), "Capacity for objects")
        .unit("GiB")
        .required(),
    Key::number(
        "mock_bandwidth_gb",
        Interval::above(0.0),
        "Speed of all stores and loads together",
    )
    .unit("GiB/s")
    .required(),
];

/// The type `mock`.
pub const MOCK: AdapterType = AdapterType::new(
    "mock",
    "Keeps objects in memory at a chosen speed, for as long as the server runs; for tests",
    KEYS,
    open,
);

fn open(config: &AdapterConfig, _: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    let options = &config.options;
    let store = MemoryStore::new(options.gib("max_size_gb"));
    let bytes_per_second = options.get::<f64>("mock_bandwidth_gb") * GIB as f64;
    Ok(Arc::new(Mock::new(Arc::new(store), bytes_per_second)))
}

/// Calls in flight at once; further ones wait.
const MAX_IN_FLIGHT: u32 = 1 << 16;

/// Adapter of a [`MemoryStore`] at the speed of a link.
#[derive(Debug)]
pub struct Mock {
    store: Arc<MemoryStore>,
    link: Link,
    /// One permit per call in flight; closed with the adapter.
    calls: Semaphore,
}

impl Mock {
    /// Returns an adapter of `store`. To be called within a tokio runtime.
    #[must_use]
    pub fn new(store: Arc<MemoryStore>, bytes_per_second: f64) -> Self {
        Self {
            store,
            link: Link::new(bytes_per_second),
            calls: Semaphore::new(MAX_IN_FLIGHT as usize),
        }
    }

    async fn begin(&self) -> Result<SemaphorePermit<'_>, L2Error> {
        let closed = |_| L2Error::new(ErrorKind::Unavailable, "mock: it is closed");
        self.calls.acquire().await.map_err(closed)
    }

    async fn store_one(&self, item: StoreItem) -> Result<Stored, L2Error> {
        let _call = self.begin().await?;
        let mut bytes = Vec::new();
        let read = item.from.read_into(0, item.object.len, &mut bytes);
        read.map_err(|error| L2Error::new(ErrorKind::Memory, format!("mock: {error}")))?;
        self.link.transfer(item.object.len).await;
        self.store.put(&item.object, bytes)
    }

    async fn load_one(&self, item: LoadItem) -> Result<Loaded, L2Error> {
        let _call = self.begin().await?;
        let bytes = self.store.get(&item.object)?;
        self.link.transfer(item.object.len).await;
        let written = item.to.write(0, &bytes);
        written.map_err(|error| L2Error::new(ErrorKind::Memory, format!("mock: {error}")))?;
        Ok(Loaded { verified: false })
    }
}

impl Adapter for Mock {
    fn kind(&self) -> &'static str {
        MOCK.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            delete: true,
            list: true,
            shared: false,
            verifies: false,
            owns_space: false,
            read_only: false,
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(async move {
            let mut results = Vec::with_capacity(batch.len());
            for item in batch {
                results.push(self.store_one(item).await);
            }
            results
        })
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            let _call = self.begin().await?;
            Ok(batch.iter().map(|object| self.store.find(object)).collect())
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(async move {
            let mut results = Vec::with_capacity(batch.len());
            for item in batch {
                results.push(self.load_one(item).await);
            }
            results
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move {
            let call = self.begin().await;
            let one = |key| match &call {
                Ok(_) => Ok(self.store.remove(key)),
                Err(error) => Err(error.clone()),
            };
            keys.iter().map(one).collect()
        })
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async move {
            let _call = self.begin().await?;
            self.store.list(from.as_deref(), limit)
        })
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        let page = |from: Option<String>| -> BoxFuture<'a, _> {
            Box::pin(async { Ok((self.list(from, 1000).await?, 0)) })
        };
        let circles = || L2Error::new(ErrorKind::Refused, "mock: its listing has no end");
        Box::pin(recover_pages(page, found, circles))
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(async { Ok(Some(self.store.capacity() - self.store.used().1)) })
    }

    fn status(&self) -> Value {
        let (objects, bytes) = self.store.used();
        json!({
            "type": self.kind(),
            "is_healthy": true,
            "objects": objects,
            "bytes": bytes,
            "capacity_bytes": self.store.capacity(),
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            // Fails if it was closed before.
            let _all = self.calls.acquire_many(MAX_IN_FLIGHT).await;
            self.calls.close();
        })
    }
}
