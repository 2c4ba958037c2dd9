//! The server in one process with its clients, and a second process whose pages are on a GPU, over the fake CUDA driver.

#![expect(clippy::unwrap_used, reason = "test")]

mod death;
#[path = "../../../kvtier-device/tests/it/lender.rs"]
#[expect(dead_code, reason = "the rest is for the tests of the device")]
mod lender;
mod registration;
mod setup;
mod status;
mod stopping;
#[path = "../it/support.rs"]
#[expect(dead_code, reason = "the rest is for the other tests of the server")]
mod support;
