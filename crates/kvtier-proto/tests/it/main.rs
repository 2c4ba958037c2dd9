//! Encoding and decoding, against bytes of real clients and servers.

#![expect(clippy::unwrap_used, reason = "tests")]

mod conversations;
mod descriptor_vectors;
mod docs;
mod generations;
mod older_versions;
mod operations;
mod pickle;
mod properties;
mod requests;
mod responses;
mod support;
mod tolerance;
