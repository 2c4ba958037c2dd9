//! `fault_inject`: an adapter of which some loads fail, always the same ones. For tests.

mod pattern;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_core::object_key::ObjectKey;
use serde_json::{Value, json};

pub use pattern::Pattern;

use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored,
};
use crate::config::{AdapterConfig, Fallback, Interval, Key, Shape};
use crate::error::{ErrorKind, L2Error};
use crate::object::{LoadItem, ObjectSpec, StoreItem};
use crate::registry::{AdapterType, Registry};

const KEYS: &[Key] = &[
    Key::of("inner", Shape::Adapter, "The adapter of which loads fail").required(),
    Key::number(
        "rate",
        Interval::from(0.0).up_to(1.0),
        "Part of all keys that never load",
    )
    .or(Fallback::Number(0.0)),
    Key::integer("seed", i64::MIN, i64::MAX, "Which keys these are").or(Fallback::Integer(0)),
    Key::of(
        "gap_indices",
        Shape::Integers { min: 0 },
        "Positions in each load, counted from 0, that fail whatever their keys are",
    ),
    Key::of(
        "gap_tail_ratios",
        Shape::Numbers(Interval::from(0.0).up_to(1.0)),
        "The same by distance from the end of a load: 0 is its last key, 0.5 the middle, 1 the first",
    ),
];

/// The type `fault_inject`.
pub const FAULT_INJECT: AdapterType = AdapterType::new(
    "fault_inject",
    "Another adapter of which some loads fail, always the same ones; for tests",
    KEYS,
    open,
);

fn open(config: &AdapterConfig, registry: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    let options = &config.options;
    let inner = registry.open_bare(options.get("inner"))?;
    let pattern = Pattern {
        rate: options.get("rate"),
        seed: options.get("seed"),
        gap_indices: options.get::<&[i64]>("gap_indices").to_vec(),
        gap_tail_ratios: options.get::<&[f64]>("gap_tail_ratios").to_vec(),
    };
    tracing::warn!(
        adapter = inner.kind(),
        ?pattern,
        "loads will fail, as fault_inject is configured"
    );
    Ok(Arc::new(Faulty::new(inner, pattern)))
}

/// An adapter that fails the loads of a [`Pattern`]. The objects are there: only a load tells otherwise.
pub struct Faulty {
    inner: Arc<dyn Adapter>,
    pattern: Pattern,
    failed: AtomicU64,
}

impl Faulty {
    /// Fails loads of `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Adapter>, pattern: Pattern) -> Self {
        Self {
            inner,
            pattern,
            failed: AtomicU64::new(0),
        }
    }
}

impl Adapter for Faulty {
    fn kind(&self) -> &'static str {
        FAULT_INJECT.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        self.inner.store(batch)
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        self.inner.lookup(batch)
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(async move {
            let failing = self
                .pattern
                .failing(batch.iter().map(|item| &item.object.key));
            let mut results = self.inner.load(batch).await;
            for (result, _) in results.iter_mut().zip(failing).filter(|(_, fails)| *fails) {
                if result.is_ok() {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                }
                let line = "fault_inject: this load fails on purpose";
                *result = Err(L2Error::new(ErrorKind::Refused, line));
            }
            results
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        self.inner.delete(keys)
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        self.inner.list(from, limit)
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        self.inner.recover(found)
    }

    fn size_of(&self, len: u64) -> u64 {
        self.inner.size_of(len)
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        self.inner.free_bytes()
    }

    fn status(&self) -> Value {
        let mut status = self.inner.status();
        status["type"] = self.kind().into();
        status["fault_inject"] = json!({
            "inner": self.inner.kind(),
            "rate": self.pattern.rate,
            "seed": self.pattern.seed,
            "gap_indices": self.pattern.gap_indices,
            "gap_tail_ratios": self.pattern.gap_tail_ratios,
            "failed_loads": self.failed.load(Ordering::Relaxed),
        });
        status
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }
}
