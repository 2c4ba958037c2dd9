//! The server in one process with its clients, and a second process whose pages are on a GPU, over the fake CUDA driver.

#![expect(clippy::unwrap_used, reason = "test")]

mod death;
#[path = "../../../kvtier-device/tests/it/exporter.rs"]
#[expect(dead_code, reason = "the rest is for the tests of the device")]
mod exporter;
mod registration;
mod setup;
mod stopping;
#[path = "../it/support.rs"]
#[expect(dead_code, reason = "the rest is for the other tests of the server")]
mod support;
