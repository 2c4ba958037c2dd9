//! Checks that flags have in common, and their error.

use kvtier_common::error::{Error, Result};

use super::GIB;

pub(super) fn refuse(flag: &str, value: impl std::fmt::Display, allowed: &str) -> Error {
    Error::invalid(format_args!("--{flag}"), value, allowed)
}

pub(super) fn gib(flag: &str, value: f64) -> Result<u64> {
    // 2^20 GiB keeps every later product of sizes inside 64 bits.
    if value.is_finite() && value > 0.0 && value <= 1_048_576.0 {
        Ok((value * GIB as f64) as u64)
    } else {
        Err(refuse(
            flag,
            value,
            "give a size in GiB above 0 and at most 1048576",
        ))
    }
}
