//! The program, as its users run it, and the pages about it.

#![expect(clippy::unwrap_used, reason = "tests")]

mod access;
mod arrows;
mod bench;
mod bench_l2;
mod claims;
mod cli;
mod damage;
mod docs;
mod huge_mount;
mod hugepages;
mod kills;
mod limits;
mod locks;
mod log;
mod prompts;
mod server;
mod shm;
mod tier_test;
