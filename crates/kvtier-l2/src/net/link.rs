//! Link of a limited speed.
//!
//! The mutex guards when it is free; no other lock is acquired inside.

use std::time::Duration;

use kvtier_common::sync::Mutex;
use tokio::time::{Instant, sleep};

/// Shortest wait, as timers are not finer. Shorter times are added to later transfers.
const TICK: Duration = Duration::from_millis(1);

/// Longest time of one transfer.
const MAX_TRANSFER_TIME: Duration = Duration::from_secs(24 * 60 * 60);

/// Link that all transfers share: each one waits for the time of those before it and its own.
#[derive(Debug)]
pub struct Link {
    bytes_per_second: f64,
    free_at: Mutex<Instant>,
}

impl Link {
    /// A link that is free.
    pub fn new(bytes_per_second: f64) -> Self {
        Self {
            bytes_per_second,
            free_at: Mutex::new(Instant::now()),
        }
    }

    /// Takes the link for these bytes; returns how long it is until they are through.
    pub fn take(&self, bytes: u64) -> Duration {
        let seconds = bytes as f64 / self.bytes_per_second;
        let time = Duration::try_from_secs_f64(seconds)
            .map_or(MAX_TRANSFER_TIME, |time| time.min(MAX_TRANSFER_TIME));
        let now = Instant::now();
        let mut free_at = self.free_at.lock();
        *free_at = now.max(*free_at) + time;
        *free_at - now
    }

    /// Waits until these bytes are through.
    pub async fn transfer(&self, bytes: u64) {
        let time = self.take(bytes);
        if time >= TICK {
            sleep(time).await;
        }
    }
}
