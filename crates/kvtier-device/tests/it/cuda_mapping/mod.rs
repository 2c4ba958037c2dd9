//! Memory and events of another process, over the fake driver: opened once, bounded, closed, and never waited for.

mod events;
mod loading;
mod memory;
mod owners;
mod registration;
mod segments;
mod setup;
