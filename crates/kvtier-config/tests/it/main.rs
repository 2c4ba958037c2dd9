//! What is built in: the types and the page about them, and transformations and checksums over files.

#![expect(clippy::unwrap_used, reason = "tests")]

mod docs;
mod stacks;
mod types;
