//! The hot loop: arrays of token ids.

use super::DecodeError;
use super::reader::{Reader, truncated};

/// Decodes `count` token ids from the start of `data` behind an array header, appends them to `out`, and
/// returns how many bytes they took.
///
/// A token id is an int of any width with 0 <= id < 2^32; float, bool and everything else is an error.
/// On an error `out` is as it was.
pub fn decode_tokens(count: usize, data: &[u8], out: &mut Vec<u32>) -> Result<usize, DecodeError> {
    if count > data.len() {
        return Err(truncated());
    }
    let before = out.len();
    out.resize(before + count, 0);
    let mut at = 0;
    for index in 0..count {
        match slow(data, at) {
            Ok((token, end)) => {
                out[before + index] = token;
                at = end;
            }
            Err(error) => {
                out.truncate(before);
                return Err(error.inside(&format!("[{index}]")));
            }
        }
    }
    Ok(at)
}

/// Checks `count` token ids like [`decode_tokens`] without keeping them; returns how many bytes they took.
pub fn skip_tokens(count: usize, data: &[u8]) -> Result<usize, DecodeError> {
    let mut at = 0;
    for index in 0..count {
        at = slow(data, at)
            .map_err(|error| error.inside(&format!("[{index}]")))?
            .1;
    }
    Ok(at)
}

/// One token id in any encoding, from `at`; returns it and where it ends.
fn slow(data: &[u8], at: usize) -> Result<(u32, usize), DecodeError> {
    let rest = data.get(at..).ok_or_else(truncated)?;
    let mut reader = Reader::new(rest);
    let value = reader.integer()?;
    let token = u32::try_from(value)
        .map_err(|_| DecodeError::new(format!("token id {value} is outside 0 to {}", u32::MAX)))?;
    Ok((token, data.len() - reader.rest().len()))
}
