//! The tier over its adapters.

#![expect(clippy::unwrap_used, reason = "tests")]

mod tier;
