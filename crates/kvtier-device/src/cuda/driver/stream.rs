//! Streams and what is put on them. All of it needs the stream's context to be current ([`Context::make_current`]).

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::DevicePtr;
use super::context::Context;
use super::event::Event;
use super::table::{Copy2d, CopyAttributes, HostFunction, Location, Raw};
use crate::cuda::error::CudaError;

/// `CU_STREAM_NON_BLOCKING`: has nothing to do with the default stream.
const NON_BLOCKING: u32 = 1;
/// `CU_STREAM_WAIT_VALUE_GEQ`.
const AT_LEAST: u32 = 0;
/// `CU_MEMORYTYPE_UNIFIED`.
const UNIFIED: u32 = 4;

/// When a batch reads its sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SourceOrder {
    /// In the order of the stream.
    Stream = 1,
    /// Whenever it likes: nobody writes the sources until the batch is done.
    Any = 3,
}

/// Copies to be started by one call: three lists of the same length. Addresses are the unified ones: a GPU's, or a
/// host's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopyBatch {
    /// Where each copy goes.
    pub dsts: Vec<u64>,
    /// Where each comes from.
    pub srcs: Vec<u64>,
    /// Bytes of each; none is 0.
    pub sizes: Vec<usize>,
}

impl CopyBatch {
    /// How many copies.
    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// One more.
    pub fn push(&mut self, dst: u64, src: u64, bytes: usize) {
        self.dsts.push(dst);
        self.srcs.push(src);
        self.sizes.push(bytes);
    }

    /// None any more; the memory of the lists is kept.
    pub fn clear(&mut self) {
        self.dsts.clear();
        self.srcs.clear();
        self.sizes.clear();
    }
}

/// Rows of the same length at the same distance on each side, as one copy. Addresses are the unified ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Where the first row goes.
    pub dst: u64,
    /// Bytes from row to row there.
    pub dst_pitch: usize,
    /// Where the first row comes from.
    pub src: u64,
    /// Bytes from row to row there.
    pub src_pitch: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// How many rows.
    pub rows: usize,
}

/// A stream: what is put on it happens one after the other. Destroyed when dropped; what is on it still happens.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: Raw,
}

// SAFETY: a stream is a name; the driver's functions may be called from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of its own. Lower numbers go first; what is out of the GPU's range is taken as the end of it, so
    /// `i32::MIN` is the highest priority there is, and 0 the usual.
    ///
    /// # Errors
    /// What the driver says.
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

    /// The context it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether everything on it is done. Does not wait.
    ///
    /// # Errors
    /// What the driver says, also about work that failed earlier.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let driver = self.context.driver();
        // SAFETY: it lives.
        driver.ready(unsafe { driver.cuStreamQuery(self.raw) })
    }

    /// Waits until everything on it is done.
    ///
    /// # Errors
    /// What the driver says, also about work that failed earlier.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: it lives.
        unsafe { self.context.driver().cuStreamSynchronize(self.raw) }
    }

    /// What comes next waits for an event. Only for events of this process: a stream that waits for another one's may
    /// wait for ever, and cannot be taken back.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_event(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live.
        unsafe {
            self.context
                .driver()
                .cuStreamWaitEvent(self.raw, event.raw(), 0)
        }
    }

    /// What comes next waits until the 8 bytes at an address are at least `value`.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The address is a multiple of 8 in memory that lives until the stream got there.
    pub unsafe fn wait_value(&self, at: DevicePtr, value: u64) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe {
            self.context
                .driver()
                .cuStreamWaitValue64_v2(self.raw, at.0, value, AT_LEAST)
        }
    }

    /// Writes 8 bytes when everything before it is done.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The address is a multiple of 8 in memory that lives until the stream got there and is ours to write.
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
    /// What the driver says.
    ///
    /// # Safety
    /// Both ranges live until the copy is done, the destination is ours to write, and memory of the host is pinned or
    /// stays as it is until the call returns.
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
    /// What the driver says.
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
    /// What the driver says.
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

    /// Copies rows.
    ///
    /// # Errors
    /// What the driver says; pitches below the row or above the GPU's limit are refused.
    ///
    /// # Safety
    /// As for [`Stream::copy`], for every row.
    pub unsafe fn copy_rows(&self, rows: &Rows) -> Result<(), CudaError> {
        let copy = Copy2d {
            src_x: 0,
            src_y: 0,
            src_kind: UNIFIED,
            src_host: ptr::null(),
            src_device: rows.src,
            src_array: ptr::null_mut(),
            src_pitch: rows.src_pitch,
            dst_x: 0,
            dst_y: 0,
            dst_kind: UNIFIED,
            dst_host: ptr::null_mut(),
            dst_device: rows.dst,
            dst_array: ptr::null_mut(),
            dst_pitch: rows.dst_pitch,
            row_bytes: rows.row_bytes,
            rows: rows.rows,
        };
        // SAFETY: the description lives, and the caller promises for what it describes.
        unsafe { self.context.driver().cuMemcpy2DAsync_v2(&copy, self.raw) }
    }

    /// Starts all copies of a batch by one call. They may run in any order and at the same time.
    ///
    /// # Errors
    /// [`CudaError::Missing`] unless [`super::Driver::copies_in_batches`]; lists of unequal lengths; what the driver
    /// says. Some of the copies may have been started.
    ///
    /// # Safety
    /// As for [`Stream::copy`], for every copy; no two overlap. With [`SourceOrder::Any`], what is written to the
    /// sources before it on the stream may not be seen.
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
                code: super::code::INVALID_VALUE,
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
        // SAFETY: the lists are of one length and live, as does the rest; the caller promises for the addresses in them.
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

    /// Sets bytes of the GPU to a value.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The range lives until it is done and is ours to write.
    pub unsafe fn fill(&self, at: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe {
            self.context
                .driver()
                .cuMemsetD8Async(at.0, value, bytes, self.raw)
        }
    }

    /// Has a function called on a thread of the driver when everything before it is done.
    ///
    /// # Errors
    /// What the driver says; then it is not called.
    ///
    /// # Safety
    /// The function calls no function of the driver, does not unwind, and `argument` is good for it on another thread.
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
        // SAFETY: made once and destroyed once; the driver finishes what is on it.
        let _ = unsafe { self.context.driver().cuStreamDestroy_v2(self.raw) };
    }
}
