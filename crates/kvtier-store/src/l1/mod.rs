//! L1: the arena with the bytes, the allocator that places them in it, and the cache that decides about them.
//!
//! It must never know requests, workers or tiers below it.
mod allocator;
mod clock;
mod earlier;
mod heritage;
mod kept;
mod memory;
mod place;
mod tenants;
#[cfg(test)]
mod testing;

pub use allocator::L1Allocator;
pub use clock::Clock;
pub use earlier::{EarlierL1, find_earlier};
pub use heritage::EarlierMemory;
pub use kept::{KeptL1, boot_time, open_arena};
pub use memory::{L1, divide, preflight_arena};
pub use place::{ServerInstance, kept_path};
pub use tenants::L1Tenants;

/// What a start asks for is not there.
fn unavailable(what: impl std::fmt::Display) -> kvtier_common::error::Error {
    kvtier_common::error::Error::new(kvtier_common::error::ErrorKind::Unavailable, what)
}
