//! Fakes for tests, here and in other crates (feature `testing`).

mod adapter;

pub use adapter::{Operation, Step, TestAdapter};

use crate::registry::Registry;
use crate::{mock, wrap};

/// Returns the registry of the types that are in this crate.
#[must_use]
pub fn registry() -> Registry {
    Registry::of(&[wrap::fault::FAULT_INJECT, mock::MOCK])
}
