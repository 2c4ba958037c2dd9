//! Errors of layouts and requests. Each names the field, its value and the allowed values.

/// An invalid or unsupported registration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}; allowed: {allowed}")]
pub struct LayoutError {
    /// Field, such as `kv_caches[3].stride`.
    pub field: String,
    /// Value of the field.
    pub value: String,
    /// Allowed values.
    pub allowed: String,
}

impl LayoutError {
    pub(crate) fn new(
        field: impl Into<String>,
        value: impl std::fmt::Display,
        allowed: impl Into<String>,
    ) -> Self {
        Self {
            field: field.into(),
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }
}

/// Block ids or a chunk position that the registered tensors cannot satisfy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The system has no memory for the block ids of the request.
    #[error("out of memory for {ids} block ids")]
    OutOfMemory {
        /// Ids needed.
        ids: usize,
    },
    /// The number of block-id lists is not the number of kernel groups.
    #[error("block id lists: {given} given; allowed: exactly {expected}, one per kernel group")]
    GroupCount {
        /// Lists in the request.
        given: usize,
        /// Kernel groups of the layout.
        expected: usize,
    },
    /// A list is shorter than the chunks of the request need. LMCache's server answers such a request with "not ok" and
    /// moves nothing.
    #[error("block ids of kernel group {group}: {given} given; allowed: at least {needed}")]
    TooFewBlocks {
        /// Kernel group.
        group: usize,
        /// Ids given.
        given: usize,
        /// Ids needed.
        needed: usize,
    },
    /// A list is longer than needed and not whole chunks.
    #[error(
        "block ids of kernel group {group}: {given} given; allowed: a multiple of \
         {blocks_per_chunk}, the blocks of one chunk"
    )]
    NotWholeChunks {
        /// Kernel group.
        group: usize,
        /// Ids given.
        given: usize,
        /// Blocks of one chunk.
        blocks_per_chunk: usize,
    },
    /// An id outside the tensors' blocks.
    #[error("block_ids[{group}][{position}] is {id}; allowed: 0 to {last}", last = num_blocks - 1)]
    BlockOutOfRange {
        /// Kernel group.
        group: usize,
        /// Position in the group's list.
        position: usize,
        /// The id.
        id: i64,
        /// Blocks of every tensor of the group.
        num_blocks: u64,
    },
    /// The request has more chunks than can be counted in blocks.
    #[error("chunks of the request: {chunks}; allowed: at most {most}")]
    TooManyChunks {
        /// Chunks of the request.
        chunks: usize,
        /// Limit.
        most: usize,
    },
    /// A chunk position outside the checked block ids.
    #[error("chunk is {chunk}; allowed: 0 to below {chunks}")]
    NoSuchChunk {
        /// Requested position.
        chunk: usize,
        /// Chunks of the request.
        chunks: usize,
    },
    /// An object group the layout does not have.
    #[error("object group is {group}; allowed: 0 to below {groups}")]
    NoSuchObjectGroup {
        /// Requested group.
        group: usize,
        /// Object groups of the layout.
        groups: usize,
    },
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
    /// Block ids, or a description of RoPE, that were checked for another layout.
    #[error(
        "block table or rope was made for another layout; allowed: one made by the same layout"
    )]
    ForeignBlockTable,
    /// A segment with more tokens than a chunk, the blocks of the request or a cos/sin cache has.
    #[error("{field} of segment {segment} is {value}; allowed: at most {most}")]
    InvalidSegment {
        /// Position of the segment in the request.
        segment: usize,
        /// Field.
        field: &'static str,
        /// Value of the field.
        value: u64,
        /// Largest allowed value.
        most: u64,
    },
    /// A layer the layout does not have.
    #[error("layer is {layer}; allowed: 0 to below {layers}, and part of a group")]
    NoSuchLayer {
        /// Requested layer.
        layer: usize,
        /// Layers registered.
        layers: usize,
    },
}
