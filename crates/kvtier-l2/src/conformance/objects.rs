//! Keys, and bytes that are unique to them.

use kvtier_core::ChunkHash;
use kvtier_core::object_key::{ObjectKey, kv_rank};

use crate::object::ObjectSpec;
use crate::sample;
use kvtier_core::random::SplitMix64;

/// Returns object `number` with this length.
#[must_use]
pub fn object(number: u64, len: u64) -> ObjectSpec {
    object_with(number, len, "org/model", "tenant")
}

/// Returns object `number` of a model and a tenant.
///
/// # Panics
/// If the model or the salt is invalid.
#[must_use]
pub fn object_with(number: u64, len: u64, model: &str, salt: &str) -> ObjectSpec {
    let mut hash = [0; ChunkHash::LEN];
    for (at, part) in (0..).zip(hash.chunks_exact_mut(8)) {
        part.copy_from_slice(&SplitMix64::nth(number, at).to_le_bytes());
    }
    let key = ObjectKey::new(ChunkHash(hash), model, kv_rank(2, 1), 0, salt);
    ObjectSpec {
        key: key.expect("a valid model and salt"),
        len,
        layout: sample::LAYOUT,
    }
}

/// Returns the bytes of `object`, which depend on its key, layout and length. They are bfloat16 values of similar sizes, as KV
/// is, so that they can be compressed.
#[must_use]
pub fn content(object: &ObjectSpec) -> Vec<u8> {
    let text = format!("{:?} {} {}", object.key, object.layout, object.len);
    let seed = kvtier_memory::checksum::checksum64(text.as_bytes());
    sample::values(seed, object.len as usize)
}
