//! What failed for a passing reason is tried again, a few times.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::sleep;

use super::call::{Answer, Call, PerLane};
use super::guarded::Guard;
use crate::adapter::Adapter;

/// The longest pause, unless the first one is longer.
const LONGEST: Duration = Duration::from_secs(1);

/// The pause before retry number `retry` (from 0): `first`, doubled for each one before it, up to a second. `random`
/// takes away up to half of it, so that those who failed together do not come back together.
#[must_use]
pub fn back_off(first: Duration, retry: u32, random: u64) -> Duration {
    let whole = first
        .saturating_mul(1 << retry.min(16))
        .min(first.max(LONGEST));
    let half = whole / 2;
    half + half.mul_f64(random as f64 / u64::MAX as f64)
}

/// Number `at` of the random numbers of `seed` (splitmix64).
#[must_use]
pub fn random(seed: u64, at: u64) -> u64 {
    let mut z = seed.wrapping_add(at.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Tries the items of a batch again that failed so, and only them.
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
            let random = random(self.seed, self.drawn.fetch_add(1, Ordering::Relaxed));
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
