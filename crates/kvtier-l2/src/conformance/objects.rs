//! Keys, and bytes that are unique to them.

use kvtier_core::ChunkHash;
use kvtier_core::object_key::{ObjectKey, kv_rank};

use crate::object::ObjectSpec;
use kvtier_core::random::SplitMix64;

/// Layout of objects without a particular one.
const LAYOUT: u64 = 1;

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
        layout: LAYOUT,
    }
}

/// Exponents of four bfloat16 values; three more bits of each are random.
const EXPONENTS: u64 = 0x3800_3800_3800_3800;
const NOISE: u64 = 0x83ff_83ff_83ff_83ff;

/// Returns the bytes of `object`, which depend on its key, layout and length. They are bfloat16 values of similar sizes, as KV
/// is, so that they can be compressed.
#[must_use]
pub fn content(object: &ObjectSpec) -> Vec<u8> {
    let text = format!("{:?} {} {}", object.key, object.layout, object.len);
    let seed = kvtier_memory::checksum::checksum64(text.as_bytes());
    let mut bytes = Vec::with_capacity(object.len as usize + 8);
    for at in 0..object.len.div_ceil(8) {
        let values = SplitMix64::nth(seed, at) & NOISE | EXPONENTS;
        bytes.extend_from_slice(&values.to_le_bytes());
    }
    bytes.truncate(object.len as usize);
    bytes
}
