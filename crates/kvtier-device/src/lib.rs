//! Where an engine's KV pages are, and how their bytes become cache objects.
//!
//! An engine registers tensors ([`TensorSpec`]); [`KvLayout::detect`] works out what their axes
//! mean, groups the layers and fixes the bytes of an object; [`BlockTable`] checks the block ids of
//! one request; [`KvLayout::plan_chunk`] turns (object group, chunk, skip) into [`PlannedCopy`]
//! elements; a [`Device`] opens the tensors and runs the copies.
//!
//! This crate must never know: requests, sessions, keys, hashes, sockets, who is allowed to read
//! what. It moves the bytes it is told to move, or says why it cannot. Everything that describes
//! tensors or blocks comes from another process and is checked before an address is formed.
//!
//! Formats, shapes and the object layout are those of LMCache's multi-process protocol, 0.5.6.

mod blocks;
mod cpu;
pub mod cuda;
mod describe;
mod detect;
mod device;
mod error;
mod format;
mod geometry;
mod groups;
mod layout;
mod physical;
mod plan;
mod spec;

pub use blocks::BlockTable;
pub use cpu::CpuDevice;
pub use describe::{KernelGroupDescription, LayoutDescription};
pub use device::{Begun, ChunkCopy, Device, DeviceError, Done, EngineMemory, Transfer};
pub use error::{LayoutError, PlanError};
pub use format::{Axis, KvFormat, TokenContent};
pub use geometry::{Part, Plane};
pub use groups::{KernelGroup, ObjectGroup};
pub use layout::KvLayout;
pub use plan::{ChunkRequest, Direction, PlannedCopy};
pub use spec::{
    CudaAllocation, CudaStorage, Engine, GroupSpec, KvAxisOrder, KvListLayout, LayoutHints,
    MemorySpec, TensorSpec,
};
