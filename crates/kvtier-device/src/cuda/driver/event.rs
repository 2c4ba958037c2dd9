//! Events: whether the work that a stream had before them is done.

use std::ptr;
use std::sync::Arc;

use super::context::Context;
use super::stream::Stream;
use super::table::{IpcHandle, Raw, is_ready};
use crate::cuda::error::CudaError;

/// Purpose of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventFlags {
    /// Queried in this process.
    Plain,
    /// Queried in this process, and measures time ([`Event::milliseconds_since`]).
    Timed,
    /// Opened by other processes.
    Shared,
}

impl EventFlags {
    /// `CU_EVENT_DISABLE_TIMING` is 2, `CU_EVENT_INTERPROCESS` 4, which requires timing to be disabled.
    fn raw(self) -> u32 {
        match self {
            Self::Plain => 2,
            Self::Timed => 0,
            Self::Shared => 2 | 4,
        }
    }
}

/// An event of this process, or an opened one of another; destroyed when dropped.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: Raw,
}

// SAFETY: an event is a handle; the driver's functions may be called from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event; one that was never recorded is complete.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(context: &Arc<Context>, flags: EventFlags) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the address is that of a live pointer.
        unsafe { context.driver().cuEventCreate(&mut raw, flags.raw()) }?;
        Ok(Self {
            context: context.clone(),
            raw,
        })
    }

    /// Opens an event of another process.
    ///
    /// # Errors
    /// The driver's error.
    pub fn open(context: &Arc<Context>, handle: &IpcHandle) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the address is that of a live pointer; the driver looks the handle up.
        unsafe { context.driver().cuIpcOpenEventHandle(&mut raw, *handle) }?;
        Ok(Self {
            context: context.clone(),
            raw,
        })
    }

    /// Handle by which other processes open the event; only for [`EventFlags::Shared`].
    ///
    /// # Errors
    /// The driver's error.
    pub fn ipc_handle(&self) -> Result<IpcHandle, CudaError> {
        let _current = self.context.enter()?;
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: the address of the handle is live, and so is the event.
        unsafe {
            self.context
                .driver()
                .cuIpcGetEventHandle(&mut handle, self.raw)
        }?;
        Ok(handle)
    }

    /// Makes the event stand for all work now on the stream. The stream's context must be current.
    ///
    /// # Errors
    /// The driver's error.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live.
        unsafe { self.context.driver().cuEventRecord(self.raw, stream.raw()) }
    }

    /// Whether the work before the event is done. Does not wait.
    ///
    /// # Errors
    /// The driver's error, possibly of earlier asynchronous work.
    pub fn is_complete(&self) -> Result<bool, CudaError> {
        let driver = self.context.driver();
        // SAFETY: it lives.
        is_ready(unsafe { driver.cuEventQuery(self.raw) })
    }

    /// Waits until the event is complete. Only for events of this process: a wait for another process's event cannot be
    /// cancelled.
    ///
    /// # Errors
    /// The driver's error.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: it lives.
        unsafe { self.context.driver().cuEventSynchronize(self.raw) }
    }

    /// Milliseconds between two events, both [`EventFlags::Timed`] and complete.
    ///
    /// # Errors
    /// The driver's error.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32, CudaError> {
        let _current = self.context.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: the address is that of a live number, and both events live.
        unsafe {
            self.context
                .driver()
                .cuEventElapsedTime(&mut milliseconds, start.raw, self.raw)
        }?;
        Ok(milliseconds)
    }

    pub(super) fn raw(&self) -> Raw {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _current = self.context.enter();
        // SAFETY: created once and destroyed once; the driver keeps it until the stream has reached it.
        let _ = unsafe { self.context.driver().cuEventDestroy_v2(self.raw) };
    }
}
