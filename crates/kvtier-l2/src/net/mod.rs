//! Connections to other servers, such as backends of tiers and collectors of traces: names, ports, TLS.
//!
//! This module must never know what is said on a connection.

mod connect;
pub mod tls;

pub use connect::{connect_any, host_and_port};
pub use tls::{ClientTls, ServerTls, TlsError};
