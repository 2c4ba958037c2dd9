//! Retries of items with a transient error.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvtier_core::random::SplitMix64;
use serde_json::{Map, Value};
use tokio::time::sleep;

use super::call::{Answer, Call, PerLane};
use super::guarded::Guard;
use crate::adapter::Adapter;

/// Longest pause, unless the first one is longer.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Returns the pause before retry number `retry` (from 0): `first`, doubled per earlier retry, up to [`MAX_PAUSE`]. `random`
/// takes away up to half of it, so that calls that failed together are not retried together.
#[must_use]
pub(super) fn back_off(first: Duration, retry: u32, random: u64) -> Duration {
    let whole = first
        .saturating_mul(1 << retry.min(16))
        .min(first.max(MAX_PAUSE));
    let half = whole / 2;
    half + half.mul_f64(random as f64 / u64::MAX as f64)
}

/// Guard that retries the items of a batch that had a transient error.
pub(super) struct Retry {
    times: u32,
    first_pause: Duration,
    seed: u64,
    drawn: AtomicU64,
    retried: PerLane<AtomicU64>,
}

impl Retry {
    pub(super) fn new(times: u32, first_pause: Duration, seed: u64) -> Self {
        Self {
            times,
            first_pause,
            seed,
            drawn: AtomicU64::new(0),
            retried: PerLane::default(),
        }
    }
}

impl Guard for Retry {
    async fn run<C: Call>(&self, inner: &Arc<dyn Adapter>, call: C) -> C::Answer {
        let mut answer = call.clone().send(&**inner).await;
        for retry in 0..self.times {
            let failed = answer.transient();
            if failed.is_empty() {
                break;
            }
            let random = SplitMix64::nth(self.seed, self.drawn.fetch_add(1, Ordering::Relaxed));
            sleep(back_off(self.first_pause, retry, random)).await;
            self.retried[C::LANE].fetch_add(failed.len() as u64, Ordering::Relaxed);
            let again = call.only(&failed).send(&**inner).await;
            answer.patch(&failed, again);
        }
        answer
    }

    fn report(&self, status: &mut Map<String, Value>) {
        let retried = self
            .retried
            .to_json(|retried| retried.load(Ordering::Relaxed).into());
        status.insert("retried_items".into(), retried);
    }
}
