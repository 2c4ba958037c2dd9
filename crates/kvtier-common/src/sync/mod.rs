//! Locks and channels of all crates, so that tests can check them; budgets of bytes, and which log lines are
//! written of what happens often.
//!
//! | build | locks |
//! | --- | --- |
//! | release | exactly parking_lot's |
//! | with debug assertions, so all tests | parking_lot's in a wrapper that panics at an acquisition against the order |
//! | with `--cfg shuttle` | shuttle's, which explores interleavings; atomics and channels too |
//!
//! This module must never know what a lock guards.

pub mod budget;

#[cfg(all(debug_assertions, not(shuttle)))]
mod checked;
#[cfg(all(debug_assertions, not(shuttle)))]
mod order;
mod outage_log;
mod rate_limited;
#[cfg(shuttle)]
mod shuttled;

#[cfg(all(debug_assertions, not(shuttle)))]
pub use checked::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult,
};
pub use outage_log::OutageLog;
#[cfg(all(not(debug_assertions), not(shuttle)))]
pub use parking_lot::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult,
};
pub use rate_limited::RateLimited;
#[cfg(shuttle)]
pub use shuttle;
#[cfg(shuttle)]
pub use shuttled::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult,
    atomic, channel,
};

/// The locks inside which others are acquired, from the outermost to the innermost: the file that creates each, and, if
/// the file has several, the end of the name of the type that it guards. Inside any other lock none is acquired.
pub const ORDER: &[(&str, &str)] = &[
    ("bindings/python/src/worker/mod.rs", "Threads"),
    ("bindings/python/src/worker/mod.rs", "InstanceIds"),
    ("bindings/python/src/worker/mod.rs", "FinishedTransfers>"),
    ("bindings/python/src/future.rs", ""),
    ("crates/kvtier-server/src/reload.rs", ""),
    ("crates/kvtier-observe/src/metrics/tenants.rs", ""),
    ("crates/kvtier-http/src/waiting.rs", "u64"),
    ("crates/kvtier-client/src/client/health.rs", "WatchState"),
    ("crates/kvtier-store/src/tenants/quotas.rs", "Shares"),
    ("crates/kvtier-device/src/cuda/gpu_slot.rs", "()"),
    ("crates/kvtier-device/src/cuda/device.rs", "()"),
    ("crates/kvtier-device/src/cuda/device.rs", "PinnedArena>>"),
    ("crates/kvtier-device/src/cuda/gpu/pinned.rs", "()"),
    ("crates/kvtier-device/src/cuda/gpu/mod.rs", "Profile"),
    ("crates/kvtier-engine/src/workers/kept.rs", ""),
    ("crates/kvtier-engine/src/instances/table.rs", ""),
    ("crates/kvtier-engine/src/transfers/prepared.rs", ""),
    ("crates/kvtier-engine/src/transfers/staging.rs", ""),
    ("crates/kvtier-engine/src/lookups/held/mod.rs", ""),
    ("crates/kvtier-store/src/tiers/pending.rs", "StoreHolds"),
    ("crates/kvtier-l2/src/tier/key_states.rs", ""),
    (
        "crates/kvtier-l2-files/src/fs/base.rs",
        "Option<std::os::fd::owned::OwnedFd>",
    ),
];

/// Atomics, of std or shuttle.
#[cfg(not(shuttle))]
pub use std::sync::atomic;

/// Unbounded channels, of crossbeam or shuttle.
#[cfg(not(shuttle))]
pub mod channel {
    pub use crossbeam_channel::{Receiver, Sender, unbounded};
}
