//! Checksums (xxh3, seed 0) of private bytes and of bytes that others may write meanwhile.

use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_128};

use crate::access::AccessError;
use crate::mapping::Mapping;
use kvtier_common::extent::Extent;

/// The 128-bit xxh3 of `bytes`: equal to [`crate::Arena::checksum`] of the same bytes.
#[must_use]
pub fn checksum128(bytes: &[u8]) -> u128 {
    xxh3_128(bytes)
}

/// The 64-bit xxh3 of `bytes`: equal to [`crate::Arena::checksum64`] of the same bytes.
#[must_use]
pub fn checksum64(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

pub(crate) fn mapped128(mapping: &Mapping, extent: Extent) -> Result<u128, AccessError> {
    let mut hasher = Xxh3::new();
    feed(&mut hasher, mapping, extent)?;
    Ok(hasher.digest128())
}

pub(crate) fn mapped64(mapping: &Mapping, extent: Extent) -> Result<u64, AccessError> {
    let mut hasher = Xxh3::new();
    feed(&mut hasher, mapping, extent)?;
    Ok(hasher.digest())
}

/// Hashes by way of a small private buffer that stays in the first-level cache: hashing in
/// place would take a reference over memory that others may write.
pub(crate) fn feed(
    hasher: &mut Xxh3,
    mapping: &Mapping,
    extent: Extent,
) -> Result<(), AccessError> {
    const PIECE: usize = 16 << 10;
    let mut buffer = [0_u8; PIECE];
    let from = mapping.locate(extent.offset, extent.len)?;
    let len = extent.len as usize;
    let mut done = 0;
    while done < len {
        let piece = PIECE.min(len - done);
        // SAFETY: `done + piece <= len` bytes from `from` were checked; `buffer` is private and
        // has capacity for a piece.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr().add(done), buffer.as_mut_ptr(), piece);
        }
        hasher.update(&buffer[..piece]);
        done += piece;
    }
    mapping.check_poison(extent)
}
