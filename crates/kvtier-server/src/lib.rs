//! The cache server: the engine that connects the other crates, the ZMQ front end, HTTP administration, metrics and
//! configuration.
//!
//! A library, so that tests and `kvtier demo` run it in their own process. It must never do byte arithmetic: layouts,
//! copies and pickles belong to `kvtier-device`, `kvtier-memory` and `kvtier-proto`, decisions of the cache to
//! `kvtier-core`.
#![forbid(unsafe_code)]

mod access;
mod budget;
mod clock;
mod descriptors;
pub mod escape;
pub mod front;
pub mod health;
pub mod http;
pub mod logging;
pub mod preflight;
mod server;

/// Access to the HTTP API.
pub use access::Access;
pub use kvtier_config::{self as config, Parsed, ServerConfig};
pub use kvtier_engine as engine;
/// For programs that start servers whose pools have names that are never used again.
pub use kvtier_memory::remove_stale_pools;
pub use kvtier_metrics as metrics;
pub use kvtier_tenants as quota;
pub use server::Server;
