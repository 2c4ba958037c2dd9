//! The tier over its adapters, and the page about them.

#![expect(clippy::unwrap_used, reason = "tests")]

mod docs;
mod tier;
