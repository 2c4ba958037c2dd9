//! Streams and the work on them. Submitting work needs the stream's context to be current ([`Context::make_current`]).

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::DevicePtr;
use super::context::Context;
use super::event::Event;
use super::table::{CopyAttributes, HostFunction, Location, Raw, is_ready};
use crate::cuda::error::{CudaError, code};

/// `CU_STREAM_NON_BLOCKING`: does not synchronize with the default stream.
const NON_BLOCKING: u32 = 1;

/// When a batch reads its sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SourceOrder {
    /// In the order of the stream.
    Stream = 1,
    /// At any time: the sources are not written until the batch is done.
    Any = 3,
}

/// Copies started by one call: three lists of equal length. Addresses are unified: of GPU memory or of host memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopyBatch {
    /// Destination of each copy.
    pub dsts: Vec<u64>,
    /// Source of each copy.
    pub srcs: Vec<u64>,
    /// Bytes of each; none is 0.
    pub sizes: Vec<usize>,
}

impl CopyBatch {
    /// Number of copies.
    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Whether the batch has no copies.
    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// Appends a copy.
    pub fn push(&mut self, dst: u64, src: u64, bytes: usize) {
        self.dsts.push(dst);
        self.srcs.push(src);
        self.sizes.push(bytes);
    }

    /// Removes all copies and keeps the memory of the lists.
    pub fn clear(&mut self) {
        self.dsts.clear();
        self.srcs.clear();
        self.sizes.clear();
    }
}

/// A stream: its work runs in order. Destroyed when dropped; submitted work still runs.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: Raw,
}

// SAFETY: a stream is a handle; the driver's functions may be called from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream. Lower numbers have precedence and are clamped to the GPU's range: `i32::MIN` is the highest
    /// priority, 0 the default.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(context: &Arc<Context>, priority: i32) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the address is that of a live pointer.
        unsafe {
            context
                .driver()
                .cuStreamCreateWithPriority(&mut raw, NON_BLOCKING, priority)
        }?;
        Ok(Self {
            context: context.clone(),
            raw,
        })
    }

    /// Context of the stream.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether all work on the stream is done. Does not wait.
    ///
    /// # Errors
    /// The driver's error, possibly of earlier asynchronous work.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let driver = self.context.driver();
        // SAFETY: it lives.
        is_ready(unsafe { driver.cuStreamQuery(self.raw) })
    }

    /// Waits until all work on the stream is done.
    ///
    /// # Errors
    /// The driver's error, possibly of earlier asynchronous work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: it lives.
        unsafe { self.context.driver().cuStreamSynchronize(self.raw) }
    }

    /// Delays later work of the stream until an event of this process is complete. With an event of another process the
    /// stream could wait for ever, and a wait cannot be cancelled.
    ///
    /// # Errors
    /// The driver's error.
    pub fn wait_event(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live.
        unsafe {
            self.context
                .driver()
                .cuStreamWaitEvent(self.raw, event.raw(), 0)
        }
    }

    /// Writes 8 bytes after all earlier work of the stream.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// The address is a multiple of 8, in memory that lives until the write is done and may be written.
    pub unsafe fn write_value(&self, at: DevicePtr, value: u64) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe {
            self.context
                .driver()
                .cuStreamWriteValue64_v2(self.raw, at.0, value, 0)
        }
    }

    /// Copies between unified addresses.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// Both ranges live until the copy is done, the destination may be written, and host memory is pinned or stays
    /// unchanged until the call returns.
    pub unsafe fn copy(&self, dst: u64, src: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe {
            self.context
                .driver()
                .cuMemcpyAsync(dst, src, bytes, self.raw)
        }
    }

    /// Copies from the host to the GPU.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// As for [`Stream::copy`].
    pub unsafe fn copy_to_device(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe {
            self.context
                .driver()
                .cuMemcpyHtoDAsync_v2(dst.0, src.cast(), bytes, self.raw)
        }
    }

    /// Copies from the GPU to the host.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// As for [`Stream::copy`].
    pub unsafe fn copy_to_host(
        &self,
        dst: *mut u8,
        src: DevicePtr,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe {
            self.context
                .driver()
                .cuMemcpyDtoHAsync_v2(dst.cast(), src.0, bytes, self.raw)
        }
    }

    /// Starts all copies of a batch with one call. They may run in any order and concurrently.
    ///
    /// # Errors
    /// [`CudaError::Missing`] unless [`super::Driver::has_batch_copy`]; lists of unequal lengths; the driver's error.
    /// Some of the copies may have been started.
    ///
    /// # Safety
    /// As for [`Stream::copy`], for every copy; no two overlap. With [`SourceOrder::Any`], earlier writes of the stream
    /// to the sources may not be seen.
    pub unsafe fn copy_batch(
        &self,
        batch: &CopyBatch,
        order: SourceOrder,
    ) -> Result<(), CudaError> {
        const NAME: &str = "cuMemcpyBatchAsync";
        let driver = self.context.driver();
        let function = driver
            .batch_copy
            .ok_or(CudaError::Missing { function: NAME })?;
        let count = batch.sizes.len();
        if batch.dsts.len() != count || batch.srcs.len() != count {
            return Err(CudaError::Call {
                function: NAME,
                code: code::INVALID_VALUE,
                name: format!(
                    "{} destinations, {} sources and {count} sizes; allowed: equally many",
                    batch.dsts.len(),
                    batch.srcs.len()
                ),
            });
        }
        if count == 0 {
            return Ok(());
        }
        let attributes = CopyAttributes {
            source_order: order as u32,
            source: Location::default(),
            destination: Location::default(),
            flags: 0,
        };
        let first = 0usize;
        let mut failed = usize::MAX;
        // SAFETY: the lists have one length and live, as does the rest; the caller promises for the addresses in them.
        let code = unsafe {
            function(
                batch.dsts.as_ptr(),
                batch.srcs.as_ptr(),
                batch.sizes.as_ptr(),
                count,
                &attributes,
                &first,
                1,
                &mut failed,
                self.raw,
            )
        };
        driver.check(NAME, code).map_err(|error| {
            if failed < count {
                error.with_details(&format!("copy {failed} of {count}"))
            } else {
                error
            }
        })
    }

    /// Sets bytes of GPU memory to a value.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// The range lives until the work is done and may be written.
    pub unsafe fn fill(&self, at: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe {
            self.context
                .driver()
                .cuMemsetD8Async(at.0, value, bytes, self.raw)
        }
    }

    /// Calls a function on a thread of the driver after all earlier work of the stream.
    ///
    /// # Errors
    /// The driver's error; the function is not called then.
    ///
    /// # Safety
    /// The function calls no driver function and does not unwind, and `argument` is valid for it on another thread.
    pub unsafe fn call(
        &self,
        function: HostFunction,
        argument: *mut c_void,
    ) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe {
            self.context
                .driver()
                .cuLaunchHostFunc(self.raw, function, argument)
        }
    }

    pub(super) fn raw(&self) -> Raw {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _current = self.context.enter();
        // SAFETY: created once and destroyed once; the driver finishes submitted work.
        let _ = unsafe { self.context.driver().cuStreamDestroy_v2(self.raw) };
    }
}
