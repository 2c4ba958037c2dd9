//! Device backends: open an engine's memories and run copies between them and the arena.

use std::sync::Arc;
use std::time::Instant;

use kvtier_memory::{AccessError, Arena, Extent, SegmentError};

use crate::blocks::BlockTable;
use crate::cuda::CudaError;
use crate::cuda::allocations::OpenError;
use crate::cuda::owner::Owner;
use crate::cuda::storages::StorageError;
use crate::error::{LayoutError, PlanError};
use crate::layout::KvLayout;
use crate::placement::Placement;
use crate::plan::{ChunkRequest, Direction};
use crate::rope::RopeTable;
use crate::spec::TensorSpec;

/// Backend for one kind of engine memory.
pub trait Device: Send + Sync {
    /// Short name for logs and metrics, such as `cpu`.
    fn name(&self) -> &'static str;

    /// Opens every memory of a layout and checks the layout against their real sizes. Dropping the result closes them.
    ///
    /// # Errors
    /// A memory of another kind, one that cannot be opened, or one smaller than its tensors need.
    fn open(&self, layout: Arc<KvLayout>) -> Result<Box<dyn EngineMemory>, DeviceError>;

    /// Copies a cos/sin cache: a tensor `[positions, width]`, as vLLM's, of 16 or 32 bits per element. Its memory is open
    /// meanwhile.
    ///
    /// # Errors
    /// Another shape or dtype, more than 1 GiB as `f32`, or memory that cannot be opened or read.
    fn read_rope_table(&self, tensor: &TensorSpec) -> Result<RopeTable, DeviceError> {
        let (mut table, layout) = RopeTable::new(tensor)?;
        let memory = self.open(Arc::new(layout))?;
        memory.read_blocks(0, &[0], &mut |bytes| table.extend(bytes))?;
        Ok(table)
    }
}

/// One chunk of a transfer and the extent of its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkCopy {
    /// The chunk on the engine's side.
    pub request: ChunkRequest,
    /// The object, at least as long as an object of its group.
    pub extent: Extent,
}

/// The copies of one request.
#[derive(Debug, Clone)]
pub struct Transfer {
    /// Arena of the extents.
    pub arena: Arc<Arena>,
    /// The engine's blocks, checked against the layout of the pages.
    pub blocks: BlockTable,
    /// The chunks, in copy order.
    pub chunks: Vec<ChunkCopy>,
    /// Direction of the copies.
    pub direction: Direction,
    /// The worker's timeout. No copy starts after it, and a transfer that ends after it has failed, because the pages may
    /// already be in use for other data.
    pub deadline: Option<Instant>,
    /// Handle of the event after which the engine's pages are ready; they are not accessed before. The device interprets
    /// it; host memory is ready when the request arrives.
    pub event: Vec<u8>,
}

impl Transfer {
    /// Checks the deadline.
    ///
    /// # Errors
    /// [`DeviceError::DeadlinePassed`].
    pub fn check_deadline(&self, now: Instant) -> Result<(), DeviceError> {
        check_deadline(self.deadline, now)
    }
}

/// Checks a worker's timeout.
///
/// # Errors
/// [`DeviceError::DeadlinePassed`].
pub(crate) fn check_deadline(deadline: Option<Instant>, now: Instant) -> Result<(), DeviceError> {
    match deadline {
        Some(deadline) if deadline < now => Err(DeviceError::DeadlinePassed),
        _ => Ok(()),
    }
}

/// Callback with the handle of an event that completes when all bytes of a transfer have moved.
pub type OnSubmitted = Box<dyn FnOnce(&[u8]) + Send>;

/// Callback with the result of a transfer: bytes moved, or the error.
pub type Done = Box<dyn FnOnce(Result<u64, DeviceError>) + Send>;

/// The open pages of one worker.
///
/// Calls may run concurrently, for different chunks. The caller guarantees exclusive use of the extents, checks
/// that the worker may use the block ids, and bounds the number of transfers in flight.
pub trait EngineMemory: Send + Sync {
    /// The layout these pages were opened with.
    fn layout(&self) -> &Arc<KvLayout>;

    /// Whether the names in the layout still refer to this memory and none of it was lost. A restarted engine may use the
    /// same names for other memory.
    fn is_current(&self) -> bool;

    /// What distinguishes this memory from other memory under the same names, until the next boot.
    fn identity(&self) -> Vec<u64>;

    /// Leaves to another process of the server what it owes to the engine for the memory, such as the decrement of a reference
    /// counter. To be called when that process will open it again.
    fn leave(&self) {}

    /// The process that owns the memory, if proven: when it exits, the engine has ended.
    fn owner(&self) -> Option<Owner> {
        None
    }

    /// Whether the memory shows that the engine's process has exited.
    fn has_ended(&self) -> bool {
        false
    }

    /// NUMA node of the pages' device, if known and relevant.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Name of the device kind in logs and metrics.
    fn device(&self) -> &'static str;

    /// Moves the chunks of one request and calls `done` when the last byte is in place or no more will move. `done` may
    /// run before this returns and on any thread. The values it owns outlive every copy, so it holds the leases or
    /// reservations of the extents.
    ///
    /// After an error some bytes may have moved: a store must not be committed, a retrieve must be reported as failed.
    ///
    /// A backend that cannot determine whether its copies have ended never calls `done`: the memory stays reserved for
    /// good, which is better than two writers.
    fn transfer(&self, transfer: Transfer, done: Done);

    /// Like [`EngineMemory::transfer`], and calls `submitted` as soon as all copies are submitted to the device, if the
    /// engine can wait for them by an event. `submitted` is never called after `done`; submitted copies may still fail.
    fn transfer_with_event(&self, transfer: Transfer, submitted: OnSubmitted, done: Done) {
        drop(submitted);
        self.transfer(transfer, done);
    }

    /// Writes tokens of objects to other positions of the pages, with their keys rotated, and calls `done` as
    /// [`EngineMemory::transfer`] does. After an error some bytes may have been written.
    fn place(&self, placement: Placement, done: Done) {
        drop(placement);
        done(Err(DeviceError::CannotPlace));
    }

    /// Starts no more copies; running ones finish, or fail early.
    fn stop(&self) {}

    /// The event handle of the answer to a finished transfer, given the request's.
    fn answer_event<'a>(&self, asked: &'a [u8]) -> &'a [u8];

    /// Handle of a completed event, for engines that open one with every answer; empty if no engine does.
    fn complete_event(&self) -> &[u8] {
        &[]
    }

    /// Passes `sink` the bytes of a layer's blocks in the tensor's order of dimensions, as if the blocks were selected
    /// from the tensor and made contiguous. For checksums.
    ///
    /// A piece has at most one block, so memory use does not depend on the request.
    ///
    /// # Errors
    /// A layer or block that does not exist, or memory that was removed.
    fn read_blocks(
        &self,
        layer: usize,
        block_ids: &[i64],
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), DeviceError>;
}

/// A copy or a registration that failed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The layout does not fit the opened memory.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The request does not fit the layout.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A memory could not be opened.
    #[error("memory {name} of the engine: {source}")]
    Open {
        /// Name the engine gave.
        name: String,
        /// Cause.
        source: SegmentError,
    },
    /// Bytes could not be moved.
    #[error("copy: {0}")]
    Access(#[from] AccessError),
    /// The worker's timeout has passed.
    #[error("the worker's deadline has passed")]
    DeadlinePassed,
    /// The driver of a GPU returned an error.
    #[error("GPU: {0}")]
    Cuda(#[from] CudaError),
    /// GPU memory could not be opened.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The engine sent an invalid event handle.
    #[error("event handle: {0}")]
    Event(OpenError),
    /// An engine's event was not complete in time.
    #[error("the engine's event did not complete in time: its pages were never ready to be copied")]
    EventTimeout,
    /// The device cannot rotate keys.
    #[error(
        "the device cannot rotate keys; allowed: a device that can, or keys that the engine computes"
    )]
    CannotPlace,
    /// The pages are being closed, or the server ends.
    #[error("the pages are being closed")]
    Stopped,
    /// A call of the GPU's driver has not returned yet.
    #[error("the GPU is unusable while its driver hangs: {0}")]
    DriverHangs(String),
    /// An earlier error made the GPU unusable for this process.
    #[error("the GPU is unusable until the server is restarted: {0}")]
    Broken(String),
}
