//! Bytes of the LMCache MP protocol: operation tables, requests and responses, client generations as data,
//! tensor descriptors and the restricted pickle reader.
//!
//! This crate turns frames into typed values and back. It must never know a socket, a clock, a task, or
//! anything about what is cached.
#![forbid(unsafe_code)]

pub mod descriptor;
pub mod frames;
pub mod generation;
pub mod key;
mod lenient;
pub mod operation;
pub mod pickle;
pub mod request;
pub mod response;
pub mod wire;
