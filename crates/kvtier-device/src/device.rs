//! What a backend does: opens an engine's memories and runs copies between them and the arena.

use std::sync::Arc;

use kvtier_memory::{AccessError, Arena, Extent, SegmentError};

use crate::blocks::BlockTable;
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

/// One worker's pages, open.
///
/// Calls may run at the same time, for different chunks. The caller makes sure that nobody else
/// uses the extent meanwhile and that block ids are the engine's to give.
pub trait EngineMemory: Send + Sync {
    /// The layout these pages were opened with.
    fn layout(&self) -> &Arc<KvLayout>;

    /// Whether the names in the layout still lead to this memory, and none of it was lost. An
    /// engine that says the same again may mean other memory: it was started anew.
    fn is_current(&self) -> bool;

    /// Removes from the system what an engine that is taken for dead left behind; nothing whose
    /// maker may live. Gives what it removed, by name, and what it should have removed and could
    /// not.
    fn remove_orphans(&self) -> Vec<Result<String, SegmentError>>;

    /// Copies one chunk of one object group, and returns the bytes moved. Returns when every byte
    /// is in place.
    ///
    /// # Errors
    /// On an error some bytes may have been moved: a store must then not be committed, a retrieve
    /// must be reported as failed.
    fn copy(
        &self,
        blocks: &BlockTable,
        request: ChunkRequest,
        arena: &Arena,
        extent: Extent,
        direction: Direction,
    ) -> Result<u64, DeviceError>;

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
    /// An extent smaller than the object.
    #[error("extent of {len} bytes; allowed: at least {needed}, one object of group {group}")]
    ExtentTooSmall {
        /// Bytes of the extent.
        len: u64,
        /// Bytes of the object.
        needed: u64,
        /// Object group.
        group: usize,
    },
}
