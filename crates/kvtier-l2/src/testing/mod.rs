//! Fakes for tests, here and in other crates (feature `testing`).

mod adapter;

pub use adapter::{Operation, Step, TestAdapter};
