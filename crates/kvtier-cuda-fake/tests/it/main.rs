//! The fake driver, loaded as its users load it.

#![expect(clippy::unwrap_used, reason = "a test's helpers")]

mod copies;
mod devices;
mod driver;
mod kernel;
mod memory;
mod processes;
mod scripts;
mod streams;
mod vmm;
