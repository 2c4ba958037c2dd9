//! Events: whether what was on a stream before them is done.

use std::ptr;
use std::sync::Arc;

use super::IpcHandle;
use super::context::Context;
use super::stream::Stream;
use super::table::Raw;
use crate::cuda::error::CudaError;

/// What an event is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventFlags {
    /// To be asked in this process.
    Plain,
    /// To be asked in this process, and to tell times ([`Event::milliseconds_since`]).
    Timed,
    /// To be opened by other processes.
    Shared,
}

impl EventFlags {
    /// `CU_EVENT_DISABLE_TIMING` is 2, `CU_EVENT_INTERPROCESS` 4, which must not tell times.
    fn raw(self) -> u32 {
        match self {
            Self::Plain => 2,
            Self::Timed => 0,
            Self::Shared => 2 | 4,
        }
    }
}

/// An event, of this process or opened; destroyed when dropped.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: Raw,
}

// SAFETY: an event is a name; the driver's functions may be called from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event; one that was never recorded is complete.
    ///
    /// # Errors
    /// What the driver says.
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
    /// What the driver says.
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

    /// The name by which other processes open it; only for [`EventFlags::Shared`].
    ///
    /// # Errors
    /// What the driver says.
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

    /// From here on it stands for what is on the stream now. The stream's context must be current.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live.
        unsafe { self.context.driver().cuEventRecord(self.raw, stream.raw()) }
    }

    /// Whether what it stands for is done. Does not wait.
    ///
    /// # Errors
    /// What the driver says, also about work that failed earlier.
    pub fn is_complete(&self) -> Result<bool, CudaError> {
        let driver = self.context.driver();
        // SAFETY: it lives.
        driver.ready(unsafe { driver.cuEventQuery(self.raw) })
    }

    /// Waits. Only for events of this process: nobody can end a wait for another one's.
    ///
    /// # Errors
    /// What the driver says.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: it lives.
        unsafe { self.context.driver().cuEventSynchronize(self.raw) }
    }

    /// Milliseconds between two events, both [`EventFlags::Timed`] and complete.
    ///
    /// # Errors
    /// What the driver says.
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
        // SAFETY: made once and destroyed once; the driver keeps it until the stream got there.
        let _ = unsafe { self.context.driver().cuEventDestroy_v2(self.raw) };
    }
}
