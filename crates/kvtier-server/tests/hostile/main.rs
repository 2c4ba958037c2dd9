//! Clients that send anything at all, beside one that works: it is always served, and the server stays as it was.
//!
//! A test program of its own, because it measures the memory of its process.
#![expect(clippy::unwrap_used, reason = "test")]

mod flood;
mod good;
mod mutated;
#[path = "../it/replay.rs"]
#[expect(dead_code, reason = "the rest is for the other test program")]
mod replay;
#[path = "../it/support.rs"]
#[expect(dead_code, reason = "the rest is for the other test program")]
mod support;
mod wire;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The tests measure the memory of their process, so they run one after the other.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of this process that are its own; the pool is not among them.
fn own_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .unwrap();
    line.trim()
        .strip_suffix(" kB")
        .unwrap()
        .parse::<usize>()
        .unwrap()
        << 10
}
