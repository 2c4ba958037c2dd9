//! The hot loop: arrays of token ids, up to a prompt of hundreds of thousands in one request.
//!
//! Which width an id has is close to random in real prompts, and a mispredicted branch costs more than an id, so none
//! is taken: the width is computed from the marker. What bounds the loop is then the way from one marker to the next.
//! With a vocabulary of up to 65,536 nearly all ids take three bytes (`cd`), and five of them at a time are recognised
//! with one comparison. With a larger one most take three or five (`cd`, `ce`), which one instruction tells apart.

use super::reader::{Reader, truncated};
use super::{DecodeError, reserve};

/// Ids recognised at a time when all have three bytes.
const RUN: usize = 5;
/// Bytes examined for a run: 15, and one more for a whole word.
const RUN_WINDOW: usize = 16;
/// Ids of three or five bytes that are recognised at a time.
const WIDE: usize = 3;
/// Ids of one to five bytes that are recognised at a time.
const ANY: usize = 4;
/// How many of each are read before wider ones are tried again.
const REPEATS: usize = 6;

/// What a marker says of its id.
struct Shape {
    /// Bytes in front of the number: 0 where the marker is the id, else 1.
    marker: u8,
    /// Bytes of the number behind the marker.
    behind: u8,
    /// Whether it is the marker of such an id; if not, the rest means nothing.
    known: bool,
}

impl Shape {
    /// Ids of three and five bytes only.
    #[inline(always)]
    fn wide(marker: u8) -> Self {
        // cd and ce hold 2 and 4 bytes.
        Self {
            marker: 1,
            behind: 2 + (marker & 2),
            known: marker.wrapping_sub(0xcd) <= 1,
        }
    }

    /// Ids of one to five bytes.
    #[inline(always)]
    fn any(marker: u8) -> Self {
        // Below 80 the marker is the id; cc, cd and ce hold 1, 2 and 4 bytes.
        let long = marker >> 7;
        Self {
            marker: long,
            behind: long << (marker & 3),
            known: (long == 0) | (marker.wrapping_sub(0xcc) <= 2),
        }
    }
}

/// Reads `N` ids at the start of `data` into `slots`, if `shape` knows them all; returns how many bytes they took.
///
/// Needs eight bytes from each id on, so it fails at the very end of a message.
#[inline(always)]
fn several<const N: usize>(
    data: &[u8],
    slots: &mut [u32; N],
    shape: impl Fn(u8) -> Shape,
) -> Option<usize> {
    let mut at = 0;
    let mut known = true;
    for slot in slots {
        let head: &[u8; 8] = data.get(at..)?.first_chunk()?;
        let shape = shape(head[0]);
        known &= shape.known;
        let bytes = shape.behind + (1 - shape.marker);
        // A marker that is not known may ask for more bytes than there are.
        let right = 64 - 8 * u32::from(bytes & 7);
        *slot = ((u64::from_be_bytes(*head) << (8 * shape.marker)) >> (right & 63)) as u32;
        at += 1 + usize::from(shape.behind);
    }
    known.then_some(at)
}

/// Reads `N` ids a time for as long as all are known, at most `REPEATS` times; returns how many ids and bytes were read.
#[inline(always)]
fn repeat<const N: usize>(
    data: &[u8],
    slots: &mut [u32],
    shape: impl Fn(u8) -> Shape,
) -> (usize, usize) {
    let (mut done, mut at) = (0, 0);
    for slots in slots.as_chunks_mut::<N>().0.iter_mut().take(REPEATS) {
        let Some(length) = several(&data[at..], slots, &shape) else {
            break;
        };
        at += length;
        done += N;
    }
    (done, at)
}

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
    reserve(out, count)?;
    out.resize(before + count, 0);
    let result = fill(0, &mut out[before..], data);
    if result.is_err() {
        out.truncate(before);
    }
    result
}

/// Bytes of a packed token id.
pub const PACKED_TOKEN_BYTES: usize = 4;

/// A token id as `token_bytes` has it: big-endian.
pub type PackedToken = [u8; PACKED_TOKEN_BYTES];

/// The ids of packed tokens.
pub fn unpack_tokens(packed: &[PackedToken]) -> impl ExactSizeIterator<Item = u32> {
    packed.iter().map(|token| u32::from_be_bytes(*token))
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
        let (ids, bytes) = repeat::<WIDE>(rest, &mut slots[done..], Shape::wide);
        (done, rest) = (done + ids, &rest[bytes..]);
        if ids == WIDE * REPEATS {
            continue;
        }
        let (ids, bytes) = repeat::<ANY>(rest, &mut slots[done..], Shape::any);
        (done, rest) = (done + ids, &rest[bytes..]);
        if ids == ANY * REPEATS {
            continue;
        }
        // Another encoding, an error, or the last few.
        if let Some(slot) = slots.get_mut(done) {
            (*slot, rest) =
                any_width(rest).map_err(|error| error.inside(&format!("[{}]", base + done)))?;
            done += 1;
        }
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
