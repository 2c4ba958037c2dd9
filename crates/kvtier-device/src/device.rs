//! What a backend does: opens an engine's memories and runs copies between them and the arena.

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
use crate::plan::{ChunkRequest, Direction};

/// A kind of memory that engines keep their pages in.
pub trait Device: Send + Sync {
    /// Short name for logs and metrics, such as `cpu`.
    fn name(&self) -> &'static str;

    /// Opens every memory of a layout and checks the layout against what is really there.
    /// Dropping the result closes them.
    ///
    /// # Errors
    /// A memory of another kind, one that cannot be opened, or one smaller than its tensors need.
    fn open(&self, layout: Arc<KvLayout>) -> Result<Box<dyn EngineMemory>, DeviceError>;
}

/// One chunk of a transfer, and where its object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkCopy {
    /// The engine's side.
    pub request: ChunkRequest,
    /// The object, at least as long as its object group's bytes.
    pub extent: Extent,
}

/// The copies of one request.
#[derive(Debug, Clone)]
pub struct Transfer {
    /// Where the extents are.
    pub arena: Arc<Arena>,
    /// The engine's blocks, checked against the layout of the pages.
    pub blocks: BlockTable,
    /// What to move, in order.
    pub chunks: Vec<ChunkCopy>,
    /// Which way.
    pub direction: Direction,
    /// When whoever asked gives up. No copy is begun after it, and a transfer that ends after it
    /// has failed: the pages may be somebody else's.
    pub deadline: Option<Instant>,
    /// What the engine sent to say when its pages are ready: the pages are not touched before. Its
    /// meaning is the device's; host memory is ready when the request arrives.
    pub event: Vec<u8>,
}

impl Transfer {
    /// Whether its time is over.
    ///
    /// # Errors
    /// [`DeviceError::TooLate`] then.
    pub fn in_time(&self, now: Instant) -> Result<(), DeviceError> {
        match self.deadline {
            Some(deadline) if deadline < now => Err(DeviceError::TooLate),
            _ => Ok(()),
        }
    }
}

/// Who is told the event that is complete when everything of a transfer has moved.
pub type Begun = Box<dyn FnOnce(&[u8]) + Send>;

/// Whom a transfer's end is told.
pub type Done = Box<dyn FnOnce(Result<u64, DeviceError>) + Send>;

/// One worker's pages, open.
///
/// Calls may run at the same time, for different chunks. The caller makes sure that nobody else
/// uses the extent meanwhile, that block ids are the engine's to give, and that only so many transfers are under way.
pub trait EngineMemory: Send + Sync {
    /// The layout these pages were opened with.
    fn layout(&self) -> &Arc<KvLayout>;

    /// Whether the names in the layout still lead to this memory, and none of it was lost. An
    /// engine that says the same again may mean other memory: it was started anew.
    fn is_current(&self) -> bool;

    /// The process whose memory this is, where that is certain: when it has ended, so has the engine.
    fn owner(&self) -> Option<Owner> {
        None
    }

    /// Whether the engine's process is known to have ended, where the memory itself tells.
    fn has_ended(&self) -> bool {
        false
    }

    /// Removes from the system what an engine that is taken for dead left behind; nothing whose
    /// maker may live. Gives what it removed, by name, and what it should have removed and could
    /// not.
    fn remove_orphans(&self) -> Vec<Result<String, SegmentError>>;

    /// The NUMA node that the pages' device is on, where that is known and matters.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Which kind of device the pages are on: the device's name in logs and metrics.
    fn device(&self) -> &'static str;

    /// Moves the chunks of one request, and calls `done` when the last byte is in place or when no
    /// more will move: with the bytes moved, or with why it failed. It may be called before this
    /// returns, and from any thread; what it owns outlives every copy, so it is the place for the
    /// leases or reservations of the extents.
    ///
    /// On an error some bytes may have been moved: a store must then not be committed, a retrieve
    /// must be reported as failed.
    ///
    /// A backend that can no longer tell whether its copies have ended never calls `done`: the
    /// memory stays away from others for good, rather than being written by two.
    fn transfer(&self, transfer: Transfer, done: Done);

    /// As [`EngineMemory::transfer`], and calls `begun` as soon as everything is with the device, if an event of the
    /// device can tell the engine when it is done. `begun` is never called after `done`; what was begun may still fail.
    fn transfer_in_steps(&self, transfer: Transfer, begun: Begun, done: Done) {
        drop(begun);
        self.transfer(transfer, done);
    }

    /// Begins no more of any transfer; copies that have begun end as they would, or sooner, as failed.
    fn stop(&self) {}

    /// The event that a finished transfer is answered with, given the one it was asked with.
    fn answer_event<'a>(&self, asked: &'a [u8]) -> &'a [u8];

    /// An event that is complete, for engines that open one with every answer; none where no engine does.
    fn complete_event(&self) -> &[u8] {
        &[]
    }

    /// Gives `sink` the bytes of a layer's blocks, in the tensor's own order of dimensions: what
    /// selecting those blocks from the tensor and making it contiguous gives. For checksums.
    ///
    /// Comes in pieces of at most one block, so that memory use does not depend on the request.
    ///
    /// # Errors
    /// A layer or block that does not exist, or memory that went away.
    fn read_blocks(
        &self,
        layer: usize,
        block_ids: &[i64],
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), DeviceError>;
}

/// A copy or a registration that a backend could not do.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The layout does not fit what is really there.
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
        /// Why.
        source: SegmentError,
    },
    /// Bytes could not be moved.
    #[error("copy: {0}")]
    Access(#[from] AccessError),
    /// The deadline of whoever asked has passed.
    #[error("it is past the deadline that the worker gave")]
    TooLate,
    /// The driver of a GPU refused.
    #[error("GPU: {0}")]
    Cuda(#[from] CudaError),
    /// Memory of a GPU that could not be opened.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// What an engine sent in place of an event.
    #[error("event handle: {0}")]
    Event(OpenError),
    /// An engine's event was not complete in time.
    #[error("the engine's event did not complete in time: its pages were never ready to be copied")]
    NeverReady,
    /// The pages are being closed, or the server ends.
    #[error("the pages are being closed")]
    Stopped,
    /// The driver of a GPU does not come back, so far.
    #[error("the GPU is of no use as long as its driver hangs: {0}")]
    Hangs(String),
    /// An earlier error made the GPU unusable for this process.
    #[error("the GPU is of no use until the server is started anew: {0}")]
    Broken(String),
}
