//! Second tiers in files (`fs`, `fs_native`, and NIXL's directories) and on a block device (`raw_block`).
//!
//! Both move objects by one pool of threads with the I/O engine of their configuration. This crate knows names, formats and
//! system calls; it must never know what wraps an adapter, nor other kinds of tiers.

#![cfg_attr(not(test), deny(unsafe_code))]

pub mod fs;
mod io;
#[expect(unsafe_code, reason = "the library has a C interface")]
mod nixl;
pub mod raw_block;
