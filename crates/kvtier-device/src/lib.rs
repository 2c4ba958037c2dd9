//! Engine KV pages: their layout, and the copies between them and cache objects.
//!
//! 1. An engine registers tensors ([`TensorSpec`]).
//! 2. [`KvLayout::detect`] finds the meaning of their axes, groups the layers and fixes the object layout.
//! 3. [`BlockTable`] checks the block ids of one request.
//! 4. [`ChunkRequest::plan`] turns (object group, chunk, skip) into [`PlannedCopy`] elements.
//! 5. A [`Device`] opens the tensors and runs the copies.
//! 6. [`Placement`]s write tokens of objects to other positions, with their keys rotated as [`Rope`] says.
//!
//! This crate never knows requests, sessions, keys, hashes, sockets or access rights. Every description of tensors or
//! blocks comes from another process and is checked before an address is formed.
//!
//! Formats, shapes and the object layout are those of LMCache's multi-process protocol, 0.5.6.

mod blocks;
mod cpu;
pub mod cuda;
mod detect;
mod device;
mod error;
mod format;
mod geometry;
mod groups;
mod layout;
mod physical;
mod placement;
mod plan;
mod rope;
mod spec;

pub use blocks::BlockTable;
pub use cpu::CpuDevice;
pub use device::{ChunkCopy, Device, DeviceError, Done, EngineMemory, OnSubmitted, Transfer};
pub use error::{LayoutError, PlanError};
pub use format::{Axis, KvFormat, TokenContent};
pub use geometry::{BlockPart, Plane};
pub use groups::{KernelGroup, ObjectGroup};
pub use layout::{KvLayout, is_untyped};
pub use placement::{Placement, PromptBlocks, SegmentCopy};
pub use plan::{ChunkRequest, Direction, PlannedCopy};
pub use rope::{GroupRope, KvQuant, Rope, RopeTable};
pub use spec::{
    CudaAllocation, CudaStorage, Engine, GroupSpec, KvAxisOrder, KvListLayout, LayoutHints,
    MemorySpec, TensorSpec,
};
