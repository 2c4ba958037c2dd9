//! Formats, layouts, plans and the CPU backend, from outside.

#![expect(clippy::unwrap_used, reason = "tests")]

mod convert;
mod cpu;
mod device_copies;
mod executors;
mod groups;
mod hostile;
mod model;
mod plan;
mod vectors;
