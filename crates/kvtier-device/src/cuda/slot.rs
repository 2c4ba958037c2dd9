//! A GPU on its way into use, which its driver may take long for, or for ever.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::error::CudaError;
use super::gpu::Gpu;
use crate::device::DeviceError;

/// How long a stop may go unnoticed by who waits for a driver.
const LOOK: Duration = Duration::from_millis(20);

/// One of the GPUs, which may be in use.
#[derive(Default)]
pub(super) struct Slot {
    pub used: OnceLock<Arc<Gpu>>,
    /// Held while it is taken into use, by and for those alone who register on it and need it too.
    pub taking: Mutex<()>,
    hang: Mutex<Option<Hang>>,
}

/// What a driver was not done with in time.
struct Hang {
    why: String,
    /// Of the thread that the driver has.
    thread: Weak<()>,
}

impl Slot {
    /// Why it cannot be taken into use, as long as its driver hangs.
    pub fn hangs(&self) -> Option<String> {
        let hang = self.hang.lock();
        let hang = hang.as_ref().filter(|hang| hang.thread.strong_count() > 0);
        hang.map(|hang| hang.why.clone())
    }

    /// Has something done by the driver, on a thread that is left to it when that takes longer than `patience`: what
    /// comes of it then is dropped. Nobody asks such a driver again before it has come back.
    ///
    /// # Errors
    /// What the driver says; that it hangs; that the device was stopped meanwhile.
    pub fn driven<T: Send + 'static>(
        &self,
        what: &'static str,
        patience: Duration,
        stopped: &AtomicBool,
        work: impl FnOnce() -> Result<T, CudaError> + Send + 'static,
    ) -> Result<T, DeviceError> {
        if let Some(why) = self.hangs() {
            return Err(DeviceError::Hangs(why));
        }
        let failed = |code, name| CudaError::Call {
            function: what,
            code,
            name,
        };
        let (say, hear) = channel();
        let alive = Arc::new(());
        let thread = Arc::downgrade(&alive);
        let run = move || {
            // Dropped last.
            let _alive = alive;
            // Nobody may wait any more.
            let _ = say.send(work());
        };
        let spawned = std::thread::Builder::new().name("kvtier-gpu-try".into());
        spawned.spawn(run).map_err(|error| {
            let name = format!("no thread: {error}");
            failed(error.raw_os_error().unwrap_or(-1), name)
        })?;
        let began = Instant::now();
        while began.elapsed() < patience {
            if stopped.load(Ordering::Acquire) {
                return Err(DeviceError::Stopped);
            }
            match hear.recv_timeout(LOOK.min(patience)) {
                Ok(done) => return Ok(done?),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(failed(-1, "it ended in a panic".into()).into());
                }
            }
        }
        let why = format!("{what} has not ended in {patience:?}");
        *self.hang.lock() = Some(Hang {
            why: why.clone(),
            thread,
        });
        Err(DeviceError::Hangs(why))
    }
}
