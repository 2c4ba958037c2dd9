//! Formats, layouts, plans, the CPU backend and the CUDA backend, from outside.
//!
//! The tests over the fake driver share it with their process: each holds `exporter::FakeDriver::alone` while it runs.

#![expect(clippy::unwrap_used, reason = "tests")]

mod convert;
mod cpu;
mod cuda_device;
mod cuda_mapping;
mod device_copies;
mod executors;
mod exporter;
mod groups;
mod hostile;
mod keys;
mod model;
mod placement;
mod plan;
mod vectors;
