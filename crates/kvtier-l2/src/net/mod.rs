//! Connections to other servers, such as backends of tiers and collectors of traces: names, ports, speed, TLS.
//!
//! This module must never know what is said on a connection.

mod connect;
mod link;
pub mod tls;

pub use connect::{connect_any, host_and_port};
pub use link::Link;
pub use tls::{ClientTls, ServerTls, TlsError};
