//! The client against scripted servers.

#![expect(clippy::unwrap_used, reason = "tests")]

mod client;
mod connection;
mod support;
mod workers;
