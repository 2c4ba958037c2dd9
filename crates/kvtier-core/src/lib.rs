//! Every decision of the cache, without input or output: keys, hashes, index, leases, eviction, quotas.
//!
//! Time is an argument, and the same calls give the same answers. This crate must never know a byte of KV data,
//! a socket, a file, a clock, a thread or a task.
#![forbid(unsafe_code)]

mod block_vec;
pub mod cache;
pub mod eviction;
mod group_row;
pub mod hashing;
pub mod ledger;
pub mod object_key;
pub mod prefetch;
pub mod prompt;
pub mod quota;
pub mod random;
pub mod segments;
mod sharded;
pub mod violation;
pub mod window;

pub use group_row::GroupRow;
pub use hashing::ChunkHash;
pub use object_key::{KeyScope, Namespace, ObjectKey, kv_rank};
