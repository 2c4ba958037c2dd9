//! The hot loop: arrays of token ids, up to a prompt of hundreds of thousands in one request.
//!
//! Most ids of a prompt take three bytes (`cd`), so five of them at a time are recognised with one
//! comparison. Where that fails, the next few go through a table instead of branches: which width comes next
//! is close to random in real prompts, and a mispredicted branch costs more than the table.

use super::DecodeError;
use super::reader::{Reader, truncated};

/// Ids recognised at a time when all have three bytes.
const RUN: usize = 5;
/// Bytes examined for a run: 15, and one more for a whole word.
const RUN_WINDOW: usize = 16;
/// Ids that go through the table before the next run is tried.
const MIXED: usize = 8;

/// How to take one id out of the eight bytes that start with its marker, read as a big-endian number.
#[derive(Clone, Copy)]
struct Shape {
    /// Bits to shift out in front: the marker, unless it is the id.
    left: u8,
    /// Bits to shift out behind, after that.
    right: u8,
    /// Bytes of the whole id; 0 for markers that need the slow path.
    len: u8,
}

const SHAPES: [Shape; 256] = {
    let slow = Shape {
        left: 0,
        right: 0,
        len: 0,
    };
    let mut shapes = [slow; 256];
    let mut marker = 0;
    while marker < 0x80 {
        shapes[marker] = Shape {
            left: 0,
            right: 56,
            len: 1,
        };
        marker += 1;
    }
    // cc, cd and ce hold 1, 2 and 4 bytes.
    let mut power = 0;
    while power < 3 {
        let bytes = 1 << power;
        shapes[0xcc + power] = Shape {
            left: 8,
            right: 64 - 8 * bytes,
            len: 1 + bytes,
        };
        power += 1;
    }
    shapes
};

/// Decodes `count` token ids from the start of `data` behind an array header, appends them to `out`, and
/// returns how many bytes they took.
///
/// A token id is an int of any width with 0 <= id < 2^32; float, bool and everything else is an error.
/// On an error `out` is as it was. Allocates at most four bytes for each byte of `data`.
pub fn decode_tokens(count: usize, data: &[u8], out: &mut Vec<u32>) -> Result<usize, DecodeError> {
    if count > data.len() {
        return Err(truncated());
    }
    let before = out.len();
    out.resize(before + count, 0);
    let result = fill(0, &mut out[before..], data);
    if result.is_err() {
        out.truncate(before);
    }
    result
}

/// Checks `count` token ids like [`decode_tokens`] without keeping them; returns how many bytes they took.
pub fn skip_tokens(count: usize, data: &[u8]) -> Result<usize, DecodeError> {
    if count > data.len() {
        return Err(truncated());
    }
    let mut scratch = [0; 256];
    let mut at = 0;
    let mut done = 0;
    while done < count {
        let batch = scratch.len().min(count - done);
        at += fill(done, &mut scratch[..batch], &data[at..])?;
        done += batch;
    }
    Ok(at)
}

/// Fills `slots` with as many ids from the start of `data`; returns how many bytes they took.
///
/// `base` is the index of the first one, for errors.
fn fill(base: usize, slots: &mut [u32], data: &[u8]) -> Result<usize, DecodeError> {
    let mut rest = data;
    let mut done = 0;
    while done < slots.len() {
        let runs = slots[done..].chunks_exact_mut(RUN);
        for five in runs {
            let Some(window) = rest.first_chunk::<RUN_WINDOW>() else {
                break;
            };
            let word = u128::from_be_bytes(*window);
            if word & every_third(0xff) != every_third(0xcd) {
                break;
            }
            for (index, slot) in five.iter_mut().enumerate() {
                *slot = u32::from((word >> (104 - 24 * index)) as u16);
            }
            rest = &rest[3 * RUN..];
            done += RUN;
        }
        let end = slots.len().min(done + MIXED);
        for (index, slot) in slots[done..end].iter_mut().enumerate() {
            let shape = SHAPES[usize::from(rest.first().copied().unwrap_or(0xc1))];
            match rest.first_chunk() {
                Some(head) if shape.len > 0 => {
                    let word = u64::from_be_bytes(*head);
                    *slot = ((word << shape.left) >> shape.right) as u32;
                    rest = &rest[usize::from(shape.len & 7)..];
                }
                _ => {
                    let (token, behind) = any_width(rest)
                        .map_err(|error| error.inside(&format!("[{}]", base + done + index)))?;
                    *slot = token;
                    rest = behind;
                }
            }
        }
        done = end;
    }
    Ok(data.len() - rest.len())
}

/// The byte at every third place of sixteen, five times.
const fn every_third(byte: u8) -> u128 {
    let mut word = 0;
    let mut index = 0;
    while index < RUN {
        word |= (byte as u128) << (120 - 24 * index);
        index += 1;
    }
    word
}

/// One token id in any encoding, and what follows it.
#[cold]
fn any_width(data: &[u8]) -> Result<(u32, &[u8]), DecodeError> {
    let mut reader = Reader::new(data);
    let value = reader.integer()?;
    let token = u32::try_from(value)
        .map_err(|_| DecodeError::new(format!("token id {value} is outside 0 to {}", u32::MAX)))?;
    Ok((token, reader.rest()))
}
