//! Memory and events of another process, over the fake driver: opened once, bounded, given back, and never
//! waited for.

#![expect(clippy::unwrap_used, reason = "tests")]

mod events;
#[path = "../common/lender.rs"]
mod lender;
mod loading;
mod memory;
mod owners;
mod registration;
mod segments;
mod setup;
