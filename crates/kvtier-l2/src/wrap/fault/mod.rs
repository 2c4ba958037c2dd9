//! `fault_inject`: wrapper that injects configured faults, for tests.
//!
//! `rate`, `gap_indices` and `gap_tail_ratios` choose failing loads exactly as LMCache does; `faults` is a list of
//! [`Rule`]s for everything else.

mod corruption;
mod pattern;
mod plan;
mod rule;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_core::object_key::ObjectKey;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::sleep;

pub use pattern::Pattern;
pub use rule::{Corruption, Fault, Operation, Rule, Wait};

use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored, forward,
};
use crate::config::{AdapterConfig, Fallback, Interval, Key, Options, Shape};
use crate::error::{ErrorKind, L2Error};
use crate::object::{LoadItem, ObjectSpec, StoreItem};
use crate::registry::{AdapterType, Registry};
use plan::{Plan, error};
use rule::RuleState;

const KEYS: &[Key] = &[
    Key::of(
        "inner",
        Shape::Adapter,
        "Adapter that the faults are injected into",
    )
    .required(),
    Key::number(
        "rate",
        Interval::from(0.0).up_to(1.0),
        "Fraction of all keys whose loads fail",
    )
    .or(Fallback::Number(0.0)),
    Key::integer(
        "seed",
        i64::MIN,
        i64::MAX,
        "Seed that chooses these keys, and of the rates of faults",
    )
    .or(Fallback::Integer(0)),
    Key::of(
        "gap_indices",
        Shape::Integers { min: 0 },
        "Positions in each load, from 0, that fail whatever their keys are",
    ),
    Key::of(
        "gap_tail_ratios",
        Shape::Numbers(Interval::from(0.0).up_to(1.0)),
        "The same by distance from the end of a load: 0 is its last key, 0.5 the middle, 1 the first",
    ),
    Key::of(
        "faults",
        Shape::Tables(rule::KEYS),
        "Further faults, applied in this order; an object with a fault is not seen by later rules",
    ),
];

/// The type `fault_inject`.
pub const FAULT_INJECT: AdapterType = AdapterType::new(
    "fault_inject",
    "Injects faults into another adapter, the same ones in each run; for tests",
    KEYS,
    open,
)
.check(|options| rules(options).map(|_| ()));

fn rules(options: &Options) -> Result<Vec<Rule>, crate::ConfigError> {
    let faults: &[Options] = options.get("faults");
    faults.iter().map(Rule::parse).collect()
}

fn open(config: &AdapterConfig, registry: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    let options = &config.options;
    let rules =
        rules(options).map_err(|error| L2Error::new(ErrorKind::Unsupported, error.to_string()))?;
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
        ?rules,
        "injecting faults, as fault_inject is configured"
    );
    Ok(Arc::new(Faulty::new(inner, pattern, rules)))
}

/// Adapter that fails the loads of a [`Pattern`] and injects the faults of [`Rule`]s.
pub struct Faulty {
    inner: Arc<dyn Adapter>,
    pattern: Pattern,
    rules: Vec<RuleState>,
    failed: AtomicU64,
    /// Without permits: a call that waits for one stalls until the adapter is closed.
    stalled: Semaphore,
}

impl Faulty {
    /// Returns `inner` with injected faults. Rules use the pattern's seed.
    #[must_use]
    pub fn new(inner: Arc<dyn Adapter>, pattern: Pattern, rules: Vec<Rule>) -> Self {
        let rules = (0..).zip(rules);
        Self {
            inner,
            rules: rules
                .map(|(place, rule)| RuleState::new(rule, pattern.seed, place))
                .collect(),
            pattern,
            failed: AtomicU64::new(0),
            stalled: Semaphore::new(0),
        }
    }

    /// Applies the faults before a call. An error is the answer to the whole call.
    async fn begin(
        &self,
        operation: Operation,
        name: &str,
        objects: usize,
    ) -> Result<Plan, L2Error> {
        let plan = Plan::new(&self.rules, operation, objects);
        if plan.stalls {
            let _closed = self.stalled.acquire().await;
            return Err(error(ErrorKind::Unavailable, name));
        }
        pause(plan.before).await;
        match plan.whole {
            Some(kind) => {
                pause(plan.after).await;
                Err(error(kind, name))
            }
            None => Ok(plan),
        }
    }

    /// Runs a call with one answer per item.
    async fn each<I, T>(
        &self,
        operation: Operation,
        name: &str,
        items: Vec<I>,
        call: impl AsyncFnOnce(&Plan, Vec<I>) -> Vec<Result<T, L2Error>>,
    ) -> Vec<Result<T, L2Error>> {
        let count = items.len();
        let plan = match self.begin(operation, name, count).await {
            Ok(plan) => plan,
            Err(error) => return (0..count).map(|_| Err(error.clone())).collect(),
        };
        let answers = call(&plan, plan.sent(items)).await;
        pause(plan.after).await;
        plan.answers(answers, name)
    }

    /// Runs a call with one answer.
    async fn whole<T>(
        &self,
        operation: Operation,
        name: &str,
        call: impl Future<Output = Result<T, L2Error>>,
    ) -> Result<T, L2Error> {
        let plan = self.begin(operation, name, 0).await?;
        let answer = call.await;
        pause(plan.after).await;
        answer
    }
}

async fn pause(time: std::time::Duration) {
    if !time.is_zero() {
        sleep(time).await;
    }
}

impl Adapter for Faulty {
    forward!(size_of, check, prefer);

    fn kind(&self) -> &'static str {
        FAULT_INJECT.name()
    }

    fn capabilities(&self) -> Capabilities {
        let inner = self.inner.capabilities();
        // Bytes that the inner adapter verifies are corrupted after or before that.
        let corruptions = |rule: &RuleState| matches!(rule.rule.fault, Fault::Corruption(_));
        Capabilities {
            verifies: inner.verifies && !self.rules.iter().any(corruptions),
            ..inner
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        let call = async |plan: &Plan, batch: Vec<StoreItem>| {
            let mut failed = Vec::new();
            let mut altered = Vec::with_capacity(batch.len());
            let corruptions = plan.corruptions();
            for (at, (item, corruption)) in batch.into_iter().zip(corruptions).enumerate() {
                match corruption {
                    None => altered.push(item),
                    Some((corruption, draw)) => {
                        match corruption::corrupt_store(item, corruption, draw) {
                            Ok(item) => altered.push(item),
                            Err(error) => failed.push((at, error)),
                        }
                    }
                }
            }
            let mut results = self.inner.store(altered).await;
            for (at, error) in failed {
                results.insert(at, Err(error));
            }
            results
        };
        Box::pin(self.each(Operation::Store, "store", batch, call))
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            let plan = self.begin(Operation::Lookup, "lookup", batch.len()).await?;
            let mut found = self.inner.lookup(batch).await?;
            for (found, fault) in found.iter_mut().zip(&plan.objects) {
                *found = found.filter(|_| fault.is_none());
            }
            pause(plan.after).await;
            Ok(found)
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        let failing = self
            .pattern
            .failing(batch.iter().map(|item| &item.object.key));
        let call = async |plan: &Plan, batch: Vec<LoadItem>| {
            let buffers: Vec<_> = batch.iter().map(|item| item.to.clone()).collect();
            let mut results = self.inner.load(batch).await;
            for ((result, to), corruption) in
                results.iter_mut().zip(buffers).zip(plan.corruptions())
            {
                if let (Ok(_), Some((corruption, draw))) = (&result, corruption) {
                    let corrupted = corruption::corrupt_loaded(&to, corruption, draw);
                    *result = corrupted.map(|()| Loaded { verified: false });
                }
            }
            results
        };
        Box::pin(async move {
            let mut results = self.each(Operation::Load, "load", batch, call).await;
            for (result, _) in results.iter_mut().zip(failing).filter(|(_, fails)| *fails) {
                if result.is_ok() {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                }
                *result = Err(error(ErrorKind::Refused, "load"));
            }
            results
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move {
            let call = async |_: &Plan, keys| self.inner.delete(keys).await;
            let deleted = self.each(Operation::Delete, "delete", keys, call).await;
            // For a delete, a missing object is no error.
            let one = |result: Result<bool, L2Error>| match result {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
                result => result,
            };
            deleted.into_iter().map(one).collect()
        })
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(self.whole(Operation::List, "list", self.inner.list(from, limit)))
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(self.whole(Operation::List, "recovery", self.inner.recover(found)))
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(self.whole(Operation::Free, "free bytes", self.inner.free_bytes()))
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
            "faults": self.rules.iter().map(RuleState::report).collect::<Vec<_>>(),
        });
        status
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.stalled.close();
        self.inner.close()
    }
}
