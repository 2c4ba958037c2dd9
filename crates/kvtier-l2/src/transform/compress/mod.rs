//! `compress`: objects of bfloat16 values, losslessly, at a fixed rate of 12.4 of 16 bits.
//!
//! The length is fixed so that lookups, accounting and transfers stay exact with every adapter. An object whose
//! exponents are too far apart for it, such as one of another type, is not stored. The frame, numbers little-endian:
//!
//! | bytes | |
//! | --- | --- |
//! | 4 | `kvcb` |
//! | 1 | version, 1 |
//! | 1 | bytes per element, 2 |
//! | 2 | 0 |
//! | 8 | length of the object |
//! | 8 | escaped exponents |
//! | 16 | checksum of the object's bytes, key, length and layout |
//! | | signs and mantissas, codes, exponents of blocks, escaped exponents: [`codec`] |
//! | 0 or 1 | the last byte of an odd length |

mod codec;
#[cfg(test)]
mod tests;

use kvtier_memory::checksum::checksum128;
use serde_json::{Map, Value};

use super::Transform;
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, ObjectSpec, key_digest};
use codec::{Parts, Planes};

const MAGIC: &[u8; 4] = b"kvcb";
const VERSION: u8 = 1;
const ELEMENT: u8 = 2;
const HEAD: usize = 40;

/// Plain bytes that are processed at once: whole blocks.
const CHUNK: usize = 32 << 10;

/// Lossless compression of bfloat16 values.
pub(super) struct Compress;

/// Sum over the chunks of an object.
struct Sum(u128);

impl Sum {
    fn new(object: &ObjectSpec) -> Self {
        let mut all = [0; 32];
        all[..16].copy_from_slice(&key_digest(&object.key).to_le_bytes());
        all[16..24].copy_from_slice(&object.len.to_le_bytes());
        all[24..].copy_from_slice(&object.layout.to_le_bytes());
        Self(checksum128(&all))
    }

    fn add(&mut self, chunk: &[u8]) {
        let mut both = [0; 32];
        both[..16].copy_from_slice(&self.0.to_le_bytes());
        both[16..].copy_from_slice(&checksum128(chunk).to_le_bytes());
        self.0 = checksum128(&both);
    }
}

fn head(len: u64, escapes: u64, sum: u128) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(MAGIC);
    (head[4], head[5]) = (VERSION, ELEMENT);
    head[8..16].copy_from_slice(&len.to_le_bytes());
    head[16..24].copy_from_slice(&escapes.to_le_bytes());
    head[24..].copy_from_slice(&sum.to_le_bytes());
    head
}

impl Transform for Compress {
    fn kind(&self) -> &'static str {
        "compress"
    }

    fn fingerprint(&self) -> String {
        "compress bfloat16 1".to_owned()
    }

    fn verifies(&self) -> bool {
        true
    }

    fn stored_len(&self, len: u64) -> Option<u64> {
        let len = usize::try_from(len)
            .ok()
            .filter(|len| *len < usize::MAX / 4)?;
        Some((HEAD + Parts::of(len / 2).total() + len % 2) as u64)
    }

    fn encode(&self, object: &ObjectSpec, from: &Buffer, to: &mut [u8]) -> Result<(), L2Error> {
        let refused = |what: &str| L2Error::new(ErrorKind::Refused, what);
        let len = object.len as usize;
        let wrong = || refused("the object has another length");
        let (head_at, rest) = to.split_first_chunk_mut::<HEAD>().ok_or_else(wrong)?;
        let parts = Parts::of(len / 2);
        let (planes, odd) = rest
            .split_at_mut_checked(parts.total())
            .filter(|(_, odd)| odd.len() == len % 2)
            .ok_or_else(wrong)?;
        let mut planes = Planes::split_mut(planes, parts).ok_or_else(wrong)?;
        let mut sum = Sum::new(object);
        let mut chunk = vec![0; CHUNK];
        let mut escapes = 0;
        for at in (0..len).step_by(CHUNK) {
            let plain = &mut chunk[..CHUNK.min(len - at)];
            from.read(at as u64, plain)?;
            sum.add(plain);
            let (values, last) = plain.split_at(plain.len() / 2 * 2);
            odd[..last.len()].copy_from_slice(last);
            escapes = codec::encode(values, at / 128, &mut planes, escapes).ok_or_else(|| {
                refused("the exponents of the object are too far apart to compress it as bfloat16")
            })?;
        }
        // Scratch memory has other bytes.
        planes.escapes[escapes..].fill(0);
        *head_at = head(object.len, escapes as u64, sum.0);
        Ok(())
    }

    fn decode(&self, object: &ObjectSpec, from: &mut [u8], to: &Buffer) -> Result<(), L2Error> {
        let corrupt = |what: &str| L2Error::new(ErrorKind::Corrupt, what);
        let damaged = || corrupt("is damaged, or another object's");
        if self.stored_len(object.len) != Some(from.len() as u64) {
            return Err(corrupt("has another length"));
        }
        let len = object.len as usize;
        let parts = Parts::of(len / 2);
        let (seen, rest) = from.split_first_chunk::<HEAD>().ok_or_else(damaged)?;
        let (planes, odd) = rest.split_at_checked(parts.total()).ok_or_else(damaged)?;
        let planes = Planes::split(planes, parts).ok_or_else(damaged)?;
        let mut sum = Sum::new(object);
        let mut chunk = vec![0; CHUNK];
        let mut escapes = 0;
        for at in (0..len).step_by(CHUNK) {
            let plain = &mut chunk[..CHUNK.min(len - at)];
            let (values, last) = plain.split_at_mut(plain.len() / 2 * 2);
            escapes = codec::decode(&planes, at / 128, values, escapes).ok_or_else(damaged)?;
            last.copy_from_slice(&odd[..last.len()]);
            sum.add(plain);
            to.write(at as u64, plain)?;
        }
        if *seen != head(object.len, escapes as u64, sum.0) {
            return Err(damaged());
        }
        Ok(())
    }

    fn report(&self, status: &mut Map<String, Value>) {
        status.insert("element".into(), "bfloat16".into());
    }
}
