//! Bounded workers for what takes processor time, off the threads of the calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::error::{ErrorKind, L2Error};

/// Runs jobs on threads of the runtime that may block, at most `count` at once.
pub(super) struct TransformWorkers {
    free: Arc<Semaphore>,
    count: u32,
    nanos: Arc<AtomicU64>,
}

/// A job in flight. It runs to its end if this is dropped.
pub(super) struct TransformJob<T>(JoinHandle<Result<T, L2Error>>);

impl TransformWorkers {
    pub(super) fn new(count: u32) -> Self {
        Self {
            free: Arc::new(Semaphore::new(count as usize)),
            count,
            nanos: Arc::default(),
        }
    }

    /// Starts `job` as soon as a worker is free.
    pub(super) async fn start<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, L2Error> + Send + 'static,
    ) -> TransformJob<T> {
        // Never closed; without a permit the job would only run at once.
        let permit = Arc::clone(&self.free).acquire_owned().await;
        let nanos = Arc::clone(&self.nanos);
        TransformJob(tokio::task::spawn_blocking(move || {
            let before = thread_nanos();
            let result = job();
            nanos.fetch_add(thread_nanos().saturating_sub(before), Ordering::Relaxed);
            drop(permit);
            result
        }))
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Processor time of all jobs in seconds.
    pub(super) fn seconds(&self) -> f64 {
        self.nanos.load(Ordering::Relaxed) as f64 / 1e9
    }
}

impl<T> TransformJob<T> {
    /// Waits for its result.
    pub(super) async fn result(self) -> Result<T, L2Error> {
        let failed = |_| L2Error::new(ErrorKind::Unavailable, "a transformation was aborted");
        self.0.await.map_err(failed)?
    }
}

fn thread_nanos() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or_default()
}
