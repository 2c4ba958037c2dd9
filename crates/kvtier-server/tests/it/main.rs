//! The server in one process with its clients: what it answers to bytes that were captured, what it does when clients
//! misbehave or vanish, tenants beside each other, GPUs over the fake driver, and its HTTP API.

#![expect(clippy::unwrap_used, reason = "test")]

mod answers;
mod blend;
mod captures;
mod checksums;
mod dashboard;
mod engine_driven;
mod explain;
#[path = "../../../kvtier-device/tests/it/exporter.rs"]
#[expect(dead_code, reason = "the rest is for the tests of the device")]
mod exporter;
mod gpu;
mod http;
mod kv_events;
mod l2;
mod l2_http;
mod leases;
mod log;
mod metrics;
mod newer_clients;
mod objects;
mod older_clients;
mod order;
mod peers;
mod prefix;
mod quota;
mod quota_kills;
mod registrations;
mod replay;
mod restart;
mod retention;
mod segments;
mod sessions;
mod staging;
mod state;
mod support;
mod tenants;
mod transfers;
mod vectors;
mod windows;
