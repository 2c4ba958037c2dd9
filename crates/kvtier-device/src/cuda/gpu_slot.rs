//! Activation of a GPU. Its driver may take long, or hang.
//!
//! `activation` is held while the GPU is activated; `device.rs` has what is acquired inside. `hang` guards the call
//! that hangs, with no lock inside.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use kvtier_common::sync::Mutex;

use super::error::CudaError;
use super::gpu::Gpu;
use crate::device::DeviceError;

/// Interval at which a wait for the driver checks for a stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// One GPU, which may be in use.
#[derive(Default)]
pub(super) struct GpuSlot {
    pub used: OnceLock<Arc<Gpu>>,
    /// Held during activation; only registrations on this GPU wait for it.
    pub activation: Mutex<()>,
    hang: Mutex<Option<Hang>>,
}

/// A driver call that has timed out.
struct Hang {
    why: String,
    /// Alive as long as the thread of the call.
    thread: Weak<()>,
}

impl GpuSlot {
    /// The call that hangs, while its thread has not returned.
    pub fn hang(&self) -> Option<String> {
        let hang = self.hang.lock();
        let hang = hang.as_ref().filter(|hang| hang.thread.strong_count() > 0);
        hang.map(|hang| hang.why.clone())
    }

    /// Runs `work`, which calls the driver, on a thread of its own. After `timeout` the thread is abandoned and its result
    /// dropped; the driver of this GPU is not called again before that thread returns.
    ///
    /// # Errors
    /// The driver's error; a timeout; the device was stopped meanwhile.
    pub fn run_with_timeout<T: Send + 'static>(
        &self,
        what: &'static str,
        timeout: Duration,
        stopped: &AtomicBool,
        work: impl FnOnce() -> Result<T, CudaError> + Send + 'static,
    ) -> Result<T, DeviceError> {
        if let Some(why) = self.hang() {
            return Err(DeviceError::DriverHangs(why));
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
            // The receiver may have timed out.
            let _ = say.send(work());
        };
        let spawned = std::thread::Builder::new().name("kvtier-gpu-try".into());
        spawned.spawn(run).map_err(|error| {
            let name = format!("no thread: {error}");
            failed(error.raw_os_error().unwrap_or(-1), name)
        })?;
        let began = Instant::now();
        while began.elapsed() < timeout {
            if stopped.load(Ordering::Acquire) {
                return Err(DeviceError::Stopped);
            }
            match hear.recv_timeout(STOP_POLL_INTERVAL.min(timeout)) {
                Ok(done) => return Ok(done?),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(failed(-1, "it ended in a panic".into()).into());
                }
            }
        }
        let why = format!("{what} has not ended in {timeout:?}");
        *self.hang.lock() = Some(Hang {
            why: why.clone(),
            thread,
        });
        Err(DeviceError::DriverHangs(why))
    }
}
