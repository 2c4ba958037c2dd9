//! A link that is only so fast.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

/// Below this nothing is waited for: timers are not finer. What was not waited for adds to later transfers.
const TICK: Duration = Duration::from_millis(1);

/// One transfer takes at most this.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// All transfers together go at one speed: each one waits until those before it and itself would be through.
#[derive(Debug)]
pub(super) struct Link {
    bytes_per_second: f64,
    free_at: Mutex<Instant>,
}

impl Link {
    pub(super) fn new(bytes_per_second: f64) -> Self {
        Self {
            bytes_per_second,
            free_at: Mutex::new(Instant::now()),
        }
    }

    pub(super) async fn transfer(&self, bytes: u64) {
        let seconds = bytes as f64 / self.bytes_per_second;
        let time = Duration::try_from_secs_f64(seconds).map_or(LONGEST, |time| time.min(LONGEST));
        let now = Instant::now();
        let through = {
            let mut free_at = self.free_at.lock();
            *free_at = now.max(*free_at) + time;
            *free_at
        };
        if through.duration_since(now) >= TICK {
            sleep_until(through).await;
        }
    }
}
