//! Values of a hand-over in a form that another release reads.

use std::time::Duration;

use kvtier_core::ChunkHash;
use kvtier_error::{Error, Result};

/// Milliseconds of a time.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A chunk hash from hex.
///
/// # Errors
/// It is none.
pub fn hash_of(text: &str) -> Result<ChunkHash> {
    let mut hash = [0; ChunkHash::LEN];
    match hex::decode_to_slice(text, &mut hash) {
        Ok(()) => Ok(ChunkHash(hash)),
        Err(_) => Err(Error::refused(format!("{text:?} is no chunk hash"))),
    }
}
