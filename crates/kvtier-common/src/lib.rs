//! What every crate may use: the error type, extents, locks and budgets, the state directory.
//!
//! It must never know what an object, a request or a tier is.

#![forbid(unsafe_code)]

pub mod error;
pub mod extent;
pub mod floats;
pub mod state;
pub mod sync;
