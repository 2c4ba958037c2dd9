//! The program, as its users run it, and the pages about it.

#![expect(clippy::unwrap_used, reason = "tests")]

mod access;
mod arrows;
mod bench;
mod bench_l2;
mod cli;
mod damage;
mod docs;
#[path = "../../../kvtier-device/tests/it/exporter.rs"]
#[expect(dead_code, reason = "the rest is for the tests of the device")]
mod exporter;
mod gpu_worker;
mod huge_mount;
mod hugepages;
mod kills;
mod limits;
mod locks;
mod log;
mod prompts;
mod server;
mod shm;
mod take_over;
mod take_over_between;
mod take_over_gpu;
mod take_over_steps;
mod take_over_tiers;
mod tier_test;
