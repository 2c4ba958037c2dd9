//! The types of second tiers that are built in.
//!
//! A new adapter is a crate or a folder with an [`AdapterType`], and one line here. This module knows which there are and
//! nothing else; what a type does is in its own crate, and what all have in common in `kvtier-l2`.

use kvtier_l2::{AdapterType, Registry, mock, wrap};
use kvtier_l2_files::{fs, raw_block};
use kvtier_l2_process as process;
use kvtier_l2_resp as resp;
use kvtier_l2_s3 as s3;

/// In alphabetical order, which is the order of the documentation.
const BUILT_IN: &[AdapterType] = &[
    wrap::fault::FAULT_INJECT,
    fs::FS,
    fs::FS_NATIVE,
    mock::MOCK,
    fs::NIXL_NATIVE,
    fs::NIXL_STORE,
    fs::NIXL_STORE_DYNAMIC,
    resp::PEERS,
    process::PROCESS,
    raw_block::RAW_BLOCK,
    resp::REDIS,
    resp::RESP,
    s3::S3,
    resp::VALKEY,
];

/// Returns the registry of the types that are built in.
#[must_use]
pub fn registry() -> Registry {
    Registry::of(BUILT_IN)
}
