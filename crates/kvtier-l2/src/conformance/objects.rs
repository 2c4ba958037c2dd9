//! Keys, and bytes that belong to them and to nobody else.

use kvtier_core::ChunkHash;
use kvtier_core::object_key::{ObjectKey, kv_rank};

use crate::object::ObjectSpec;
use crate::wrap::random;

/// The layout of objects that are of no particular one.
const LAYOUT: u64 = 1;

/// Object number `number`, of this length.
#[must_use]
pub fn object(number: u64, len: u64) -> ObjectSpec {
    object_with(number, len, "org/model", "tenant")
}

/// Object number `number` of a model and a tenant.
///
/// # Panics
/// When no key can have these.
#[must_use]
pub fn object_with(number: u64, len: u64, model: &str, salt: &str) -> ObjectSpec {
    let mut hash = [0; ChunkHash::LEN];
    for (at, part) in (0..).zip(hash.chunks_exact_mut(8)) {
        part.copy_from_slice(&random(number, at).to_le_bytes());
    }
    let key = ObjectKey::new(ChunkHash(hash), model, kv_rank(2, 1), 0, salt);
    ObjectSpec {
        key: key.expect("a valid model and salt"),
        len,
        layout: LAYOUT,
    }
}

/// The bytes of `object`: they depend on all of its key, its layout and its length.
#[must_use]
pub fn content(object: &ObjectSpec) -> Vec<u8> {
    let text = format!("{:?} {} {}", object.key, object.layout, object.len);
    let seed = kvtier_memory::checksum::checksum64(text.as_bytes());
    let mut bytes = Vec::with_capacity(object.len as usize + 8);
    for at in 0..object.len.div_ceil(8) {
        bytes.extend_from_slice(&random(seed, at).to_le_bytes());
    }
    bytes.truncate(object.len as usize);
    bytes
}
