//! The client against servers that are scripted, and one that is real.

#![expect(clippy::unwrap_used, reason = "tests")]

mod client;
mod connection;
mod support;
mod workers;
