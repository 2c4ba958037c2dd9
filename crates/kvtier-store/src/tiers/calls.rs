//! Calls in flight between L1 and the tiers, and their results.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvtier_observe::metrics::{Metrics, PrefetchPhase, TierCall};
use kvtier_observe::trace::{LookupSpan, TierSpan, TierWork};

/// Counts calls of tiers and phases of prefetches.
pub struct Calls {
    metrics: Arc<Metrics>,
    tiers: Vec<TierCalls>,
    phases: [AtomicU64; 3],
}

/// Calls in flight of one tier.
struct TierCalls {
    name: Arc<str>,
    calls: [AtomicU64; 3],
    loading_bytes: AtomicU64,
}

/// A call of a tier. It is over when this is dropped, whether there was an answer or not.
pub struct TrackedCall<'a> {
    calls: &'a Calls,
    tier: &'a TierCalls,
    call: TierCall,
    bytes: u64,
    started: Instant,
    traced: Option<Traced>,
}

/// Span of a call.
struct Traced {
    lookup: LookupSpan,
    work: TierWork,
    objects: usize,
    /// Objects that were found or loaded, and bytes, once the tier has answered.
    succeeded: Option<(usize, u64)>,
}

/// A prefetch that is in this phase until it is dropped.
pub struct Phase<'a> {
    calls: &'a Calls,
    phase: PrefetchPhase,
}

impl Calls {
    /// Counters for tiers of these names.
    pub fn new<'a>(metrics: Arc<Metrics>, names: impl Iterator<Item = &'a str>) -> Self {
        let in_flight = |name: &str| TierCalls {
            name: name.into(),
            calls: Default::default(),
            loading_bytes: AtomicU64::new(0),
        };
        Self {
            metrics,
            tiers: names.map(in_flight).collect(),
            phases: Default::default(),
        }
    }

    /// What else is counted.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Metrics, shared so that the caller can keep them.
    pub fn shared_metrics(&self) -> Arc<Metrics> {
        Arc::clone(&self.metrics)
    }

    /// A tier is given a batch, for a lookup if that is traced.
    pub fn begin(
        &self,
        call: TierCall,
        tier: usize,
        salt: &str,
        objects: usize,
        bytes: u64,
        lookup: Option<&LookupSpan>,
    ) -> TrackedCall<'_> {
        let tier = &self.tiers[tier];
        self.metrics.l2.began(call, salt, objects);
        tier.calls[call as usize].fetch_add(1, Ordering::Relaxed);
        if call == TierCall::Load {
            tier.loading_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        TrackedCall {
            calls: self,
            tier,
            call,
            bytes,
            started: Instant::now(),
            traced: lookup.zip(traced(call)).map(|(lookup, work)| Traced {
                lookup: lookup.clone(),
                work,
                objects,
                succeeded: None,
            }),
        }
    }

    /// A prefetch begins to wait for its turn.
    pub fn queue(&self) -> Phase<'_> {
        self.phases[PrefetchPhase::Queue as usize].fetch_add(1, Ordering::Relaxed);
        Phase {
            calls: self,
            phase: PrefetchPhase::Queue,
        }
    }

    /// Prefetches by their phase.
    pub fn phases(&self) -> [u64; 3] {
        values(&self.phases)
    }

    /// Calls of a tier in flight, by kind.
    pub fn of_tier(&self, tier: usize) -> [u64; 3] {
        values(&self.tiers[tier].calls)
    }

    /// Bytes of L1 that a tier is loading into.
    pub fn loading_bytes(&self, tier: usize) -> u64 {
        self.tiers[tier].loading_bytes.load(Ordering::Relaxed)
    }
}

/// Stores belong to no lookup.
fn traced(call: TierCall) -> Option<TierWork> {
    match call {
        TierCall::Lookup => Some(TierWork::Lookup),
        TierCall::Load => Some(TierWork::Load),
        TierCall::Store => None,
    }
}

fn values(counters: &[AtomicU64; 3]) -> [u64; 3] {
    counters
        .each_ref()
        .map(|counter| counter.load(Ordering::Relaxed))
}

impl TrackedCall<'_> {
    /// The tier has answered, with success for this many objects and bytes.
    pub fn answered(mut self, salt: &str, objects: usize, bytes: u64) {
        if let Some(traced) = &mut self.traced {
            traced.succeeded = Some((objects, bytes));
        }
        let (took, name) = (self.started.elapsed(), &self.tier.name);
        let metrics = &self.calls.metrics.l2;
        metrics.ended(self.call, name, salt, objects, bytes, took);
    }

    /// The tier has answered what it has of the batch.
    pub fn found<T>(&mut self, objects: &[Option<T>]) {
        if let Some(traced) = &mut self.traced {
            traced.succeeded = Some((objects.iter().flatten().count(), 0));
        }
    }
}

impl Drop for TrackedCall<'_> {
    fn drop(&mut self) {
        let took = self.started.elapsed();
        self.calls.metrics.l2.took(self.call, &self.tier.name, took);
        self.tier.calls[self.call as usize].fetch_sub(1, Ordering::Relaxed);
        if self.call == TierCall::Load {
            let loading = &self.tier.loading_bytes;
            loading.fetch_sub(self.bytes, Ordering::Relaxed);
        }
        if let Some(traced) = &self.traced {
            let (objects, bytes) = traced.succeeded.unzip();
            let call = TierSpan {
                work: traced.work,
                tier: Arc::clone(&self.tier.name),
                objects: traced.objects as u64,
                succeeded: objects.map(|objects| objects as u64),
                bytes: bytes.unwrap_or(0),
            };
            traced.lookup.tier_call(call, took);
        }
    }
}

impl Phase<'_> {
    /// The next phase begins.
    pub fn is_now(&mut self, phase: PrefetchPhase) {
        let phases = &self.calls.phases;
        phases[phase as usize].fetch_add(1, Ordering::Relaxed);
        phases[self.phase as usize].fetch_sub(1, Ordering::Relaxed);
        self.phase = phase;
    }
}

impl Drop for Phase<'_> {
    fn drop(&mut self) {
        self.calls.phases[self.phase as usize].fetch_sub(1, Ordering::Relaxed);
    }
}
