//! Trailer behind an object's bytes in its file, and the lengths of files.
//!
//! A file starts with the object's bytes, as LMCache writes and reads them; LMCache ignores the rest. kvtier's files then
//! have, from the end: the trailer of [`LEN`] bytes, before it the text of the key if the name is a hash, and zeroes.
//! Their lengths differ from those of all files without a trailer of the same object, so a lost or damaged trailer is
//! always detected.
//!
//! | version | layout |
//! | --- | --- |
//! | 1 | a hash by an algorithm that changes with the compiler: compares with nothing, so the file is a miss |
//! | 2 | the fingerprint of `docs/identity.md`, with its own version in it, and [`PAGE_BOUND`](crate::PAGE_BOUND) |
//!
//! A file of another version is a miss, and the next store of its object replaces it.

use crate::object::{ObjectSpec, key_digest};

/// Bytes of a trailer.
pub const LEN: usize = 64;

/// Unit of lengths and addresses of direct I/O, here and in LMCache.
pub const BLOCK: u64 = 4096;

const MAGIC: [u8; 4] = *b"kvtr";

/// Version that is written. In the file it follows the magic bytes as a number of 16 bits.
pub const VERSION: u16 = 2;

/// The trailer of an object's file; all numbers are little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    /// Version of the trailer. If it is not [`VERSION`], the layout has another meaning; in later ones perhaps all fields.
    pub version: u16,
    /// Bytes of the key's text before the trailer.
    pub text_len: u16,
    /// Bytes of the object.
    pub len: u64,
    /// Layout of the object.
    pub layout: u64,
    /// xxh3-128 of the key's text.
    pub key: u128,
    /// xxh3-128 of the object's bytes.
    pub data: u128,
}

impl Trailer {
    /// Returns the trailer of an object with this checksum, without a text before it.
    pub fn new(object: &ObjectSpec, data: u128) -> Self {
        Self {
            version: VERSION,
            text_len: 0,
            len: object.len,
            layout: object.layout,
            key: key_digest(&object.key),
            data,
        }
    }

    /// Returns the trailer's bytes.
    pub fn encode(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        out[..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&self.version.to_le_bytes());
        out[6..8].copy_from_slice(&self.text_len.to_le_bytes());
        out[8..16].copy_from_slice(&self.len.to_le_bytes());
        out[16..24].copy_from_slice(&self.layout.to_le_bytes());
        out[24..40].copy_from_slice(&self.key.to_le_bytes());
        out[40..56].copy_from_slice(&self.data.to_le_bytes());
        let sum = kvtier_memory::checksum::checksum64(&out[..56]);
        out[56..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Whether it belongs to this object, whatever its bytes.
    pub fn is_of(&self, object: &ObjectSpec, key: u128) -> bool {
        self.version == VERSION
            && (self.len, self.layout, self.key) == (object.len, object.layout, key)
    }

    /// Decodes the trailer at the end of `bytes`, if there is one and it is intact.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; LEN] = bytes.last_chunk()?;
        let sum = kvtier_memory::checksum::checksum64(&bytes[..56]);
        if bytes[..4] != MAGIC || bytes[56..] != sum.to_le_bytes() {
            return None;
        }
        Some(Self {
            version: u16::from_le_bytes(part(bytes, 4)),
            text_len: u16::from_le_bytes(part(bytes, 6)),
            len: u64::from_le_bytes(part(bytes, 8)),
            layout: u64::from_le_bytes(part(bytes, 16)),
            key: u128::from_le_bytes(part(bytes, 24)),
            data: u128::from_le_bytes(part(bytes, 40)),
        })
    }
}

fn part<const N: usize>(bytes: &[u8; LEN], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

/// Rounds up to a multiple of `unit`.
pub fn round_up(len: u64, unit: u64) -> u64 {
    len.checked_next_multiple_of(unit).unwrap_or(u64::MAX)
}

/// Form of a file by its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The object's bytes, possibly with padding.
    Bare,
    /// With a trailer.
    Trailed,
}

/// Returns the length of the file of an object of `len` bytes, which zeroes pad to a multiple of `align`: a multiple of
/// [`BLOCK`] for direct I/O only.
pub fn file_len(len: u64, text_len: usize, align: u64, direct: bool) -> u64 {
    let tail = (LEN + text_len) as u64;
    let padded = round_up(len, align);
    if direct {
        return round_up(padded, BLOCK).saturating_add(round_up(tail, BLOCK));
    }
    let total = padded.saturating_add(tail);
    match total % BLOCK {
        // A bare file might have this length.
        0 => total.saturating_add(LEN as u64),
        _ => total,
    }
}

/// Returns the form of a file of `size` bytes for an object of `len` bytes. `text_len` is the length of the key's text if
/// it must be in the file, else 0. With an `align` above 1 a bare file has exactly the padded length; else the object's, or
/// that padded for direct I/O.
pub fn form_of(size: u64, len: u64, text_len: usize, align: u64) -> Option<Form> {
    let trailed = |direct| size == file_len(len, text_len, align, direct);
    if trailed(false) || trailed(true) {
        return Some(Form::Trailed);
    }
    let bare = match align {
        1 => size == len || size == round_up(len, BLOCK),
        _ => size == round_up(len, align),
    };
    (bare && text_len == 0).then_some(Form::Bare)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailer_reads_back_and_detects_flipped_bits() {
        let trailer = Trailer {
            version: VERSION,
            text_len: 300,
            len: 1 << 40,
            layout: 0x1234_5678_9abc_def0,
            key: u128::MAX - 7,
            data: 11,
        };
        let bytes = trailer.encode();
        assert_eq!(Trailer::decode(&bytes), Some(trailer));
        assert_eq!(
            Trailer::decode(&[&[7; 100][..], &bytes].concat()),
            Some(trailer)
        );
        assert_eq!(Trailer::decode(&bytes[1..]), None);
        for bit in 0..LEN * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Trailer::decode(&flipped), None, "bit {bit}");
        }
    }

    #[test]
    fn trailed_length_is_never_a_bare_one() {
        let lens = (0..20_000).chain([1 << 21, (1 << 21) - 64, u64::MAX, u64::MAX - 5000]);
        for len in lens {
            for (text_len, align) in [0, 1, 500, 4031, 4032, 4033]
                .into_iter()
                .flat_map(|text_len| [1, 512, BLOCK, 1 << 16].map(|align| (text_len, align)))
            {
                for direct in [false, true] {
                    let size = file_len(len, text_len, align, direct);
                    let is_bare = match align {
                        1 => size == len || size == round_up(len, BLOCK),
                        _ => size == round_up(len, align),
                    };
                    assert!(size == u64::MAX || !is_bare);
                    assert_eq!(form_of(size, len, text_len, align), Some(Form::Trailed));
                    assert!(!direct || size == u64::MAX || size.is_multiple_of(BLOCK));
                    // A reader of whole pages finds them all.
                    assert!(size >= round_up(len, align));
                }
            }
            assert_eq!(
                form_of(len, len, 100, 1),
                (len == u64::MAX).then_some(Form::Trailed)
            );
        }
        assert_eq!(form_of(4096, 4000, 0, 1), Some(Form::Bare));
        assert_eq!(form_of(4000, 4000, 0, 1), Some(Form::Bare));
        for size in [0, 3999, 4001, 4063, 4065, 4097, 8191, 8193, 12288] {
            assert_eq!(form_of(size, 4000, 0, 1), None, "{size}");
        }
        for (align, padded) in [(512, 4096), (4096, 4096), (1 << 16, 1 << 16)] {
            assert_eq!(form_of(padded, 4000, 0, align), Some(Form::Bare));
            for size in [0, 4000, padded - 1, padded + 1, 3 * padded] {
                assert_eq!(form_of(size, 4000, 0, align), None, "{size} of {align}");
            }
        }
    }
}
