//! What a server shows of itself: bodies of the HTTP API, metrics, traces.
//!
//! It must never know how a value is found or a request served.

#![forbid(unsafe_code)]

pub mod api;
pub mod metrics;
pub mod trace;
