//! The cache server: the front end of the request port, and the start and end of all that the other crates make.
//!
//! A library, so that tests and `kvtier demo` run it in their own process. It must never do byte arithmetic: layouts,
//! copies and pickles belong to `kvtier-device`, `kvtier-memory` and `kvtier-proto`, decisions of the cache to
//! `kvtier-core`.
#![forbid(unsafe_code)]

mod clock;
mod descriptors;
pub mod escape;
pub mod front;
mod inherited;
pub mod logging;
mod peers;
pub mod preflight;
mod reload;
mod server;

pub use inherited::Inherited;
pub use kvtier_config::{self as config, Parsed, RunMode, ServerConfig};
pub use kvtier_engine as engine;
pub use kvtier_http as http;
/// For programs that start servers whose pools have names that are never used again.
pub use kvtier_memory::remove_stale_pools;
pub use kvtier_observe::metrics;
pub use kvtier_store::tenants as quota;
pub use reload::Reloader;
pub use server::{Server, end_process};
