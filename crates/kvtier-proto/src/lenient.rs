//! Leniency for ints and bools that are a whole payload or response.
//!
//! LMCache 0.5.6 decodes those untyped and then coerces them (`int(x)`, `bool(x)` of Python): true is 1,
//! 3.7 is 3, "12" is 12, every non-empty text is true. Nil is an error for both. Inside structures ints
//! and bools are strict.

use crate::wire::{DecodeError, Reader, is_int, name_shown, unexpected};

/// An int, or what Python's `int()` makes one of.
pub(crate) fn int<T: TryFrom<i128>>(reader: &mut Reader<'_>) -> Result<T, DecodeError> {
    let value = match reader.peek()? {
        0xc2 | 0xc3 => i128::from(reader.bool()?),
        0xca | 0xcb => {
            let float = reader.f64()?;
            if !float.is_finite() {
                return Err(DecodeError::new(format!("{float} has no integer part")));
            }
            float.trunc() as i128
        }
        0xa0..=0xbf | 0xd9..=0xdb => text(reader.str()?)?,
        marker if is_int(marker) => reader.integer()?,
        marker => return Err(unexpected("an int", marker)),
    };
    T::try_from(value).map_err(|_| {
        DecodeError::new(format!(
            "{value} does not fit the range of {}",
            std::any::type_name::<T>()
        ))
    })
}

/// A bool, or what Python's `bool()` makes one of: zero and empty are false.
pub(crate) fn bool(reader: &mut Reader<'_>) -> Result<bool, DecodeError> {
    match reader.peek()? {
        0xc2 | 0xc3 => reader.bool(),
        0xca | 0xcb => Ok(reader.f64()? != 0.0),
        0xa0..=0xbf | 0xd9..=0xdb => Ok(!reader.str()?.is_empty()),
        0xc4..=0xc6 => Ok(!reader.bin()?.is_empty()),
        marker if is_int(marker) => Ok(reader.integer()? != 0),
        marker => Err(unexpected("a bool", marker)),
    }
}

/// Decimal digits, perhaps with a sign and spaces around them.
fn text(text: &str) -> Result<i128, DecodeError> {
    text.trim()
        .parse()
        .map_err(|_| DecodeError::new(format!("{:?} is not a decimal integer", name_shown(text))))
}
