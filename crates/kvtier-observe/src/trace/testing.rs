//! Configuration of tests.

use std::net::SocketAddr;

use kvtier_config::{ServerConfig, TracingConfig};

/// Returns the configuration for a collector at this address.
pub fn config(address: SocketAddr) -> TracingConfig {
    let endpoint = format!("http://{address}");
    let flags = ["--enable-tracing", "--otlp-endpoint", &endpoint];
    ServerConfig::from_flags(&flags).unwrap().tracing.unwrap()
}
