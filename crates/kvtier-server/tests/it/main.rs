//! The server in one process with its clients: what it answers to bytes that were captured, what it does when clients
//! misbehave or vanish, and its HTTP API.

#![expect(clippy::unwrap_used, reason = "test")]

mod answers;
mod captures;
mod checksums;
mod http;
mod l2;
mod l2_http;
mod leases;
mod metrics;
mod older_clients;
mod order;
mod quota;
mod replay;
mod restart;
mod segments;
mod sessions;
mod staging;
mod support;
mod transfers;
mod vectors;
mod windows;
