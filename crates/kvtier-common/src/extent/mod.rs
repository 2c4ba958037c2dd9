//! Byte ranges of an arena, and which of them are free.
//!
//! Plain data and arithmetic: what decides about objects (`kvtier-core`) and what moves their bytes (`kvtier-memory`)
//! mean the same [`Extent`]. This module must never know what lies in an extent, nor where the arena is mapped.
mod free_extents;
mod range;

pub use free_extents::{
    AllocateError, AllocatorStats, DEFAULT_ALIGNMENT, FreeError, FreeExtents, GeometryError,
};
pub use range::{ArenaPiece, Extent};
