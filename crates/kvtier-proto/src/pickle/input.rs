//! The bytes of a pickle: fixed numbers, sized pieces and lines, never past the end.

use crate::wire::DecodeError;

pub(super) fn error(message: impl Into<String>) -> DecodeError {
    DecodeError::at("pickle", message)
}

/// Bytes being read, and how far.
#[derive(Debug)]
pub(super) struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Input { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Bytes not read yet.
    pub(super) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    /// The next `len` bytes.
    pub(super) fn take(&mut self, len: u64) -> Result<&'a [u8], DecodeError> {
        let left = self.rest();
        let taken = usize::try_from(len).ok().and_then(|len| left.get(..len));
        let taken = taken.ok_or_else(|| {
            error(format!(
                "{len} bytes wanted at byte {}, {} are left",
                self.at,
                left.len()
            ))
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> Result<u8, DecodeError> {
        Ok(self.take(1)?[0])
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    /// A length of that many bytes, then as many bytes.
    pub(super) fn sized(&mut self, length_bytes: usize) -> Result<&'a [u8], DecodeError> {
        let mut length = [0; 8];
        length[..length_bytes].copy_from_slice(self.take(length_bytes as u64)?);
        self.take(u64::from_le_bytes(length))
    }

    /// A length of that many bytes, then as much text.
    pub(super) fn text(&mut self, length_bytes: usize) -> Result<&'a str, DecodeError> {
        /// More than any text of a real message. A long one, read again for each of many tensors, would cost
        /// far more time than it cost to send.
        const MAX_TEXT: usize = 1024;
        let at = self.at;
        let bytes = self.sized(length_bytes)?;
        if bytes.len() > MAX_TEXT {
            return Err(error(format!(
                "a text of {} bytes at byte {at}; at most {MAX_TEXT} are allowed",
                bytes.len()
            )));
        }
        std::str::from_utf8(bytes).map_err(|_| error(format!("the text at byte {at} is not UTF-8")))
    }

    /// Text up to a line feed, as protocols 2 and 3 name globals.
    pub(super) fn line(&mut self) -> Result<&'a str, DecodeError> {
        /// More than any allowed name.
        const MAX_LINE: usize = 128;
        let left = self.rest();
        let end = left.iter().take(MAX_LINE).position(|&byte| byte == b'\n');
        let end = end.ok_or_else(|| {
            error(format!(
                "no line end within {MAX_LINE} bytes of byte {}",
                self.at
            ))
        })?;
        let line = std::str::from_utf8(&left[..end])
            .map_err(|_| error(format!("the name at byte {} is not UTF-8", self.at)))?;
        self.at += end + 1;
        Ok(line)
    }

    /// A signed little-endian integer of 0 to 8 bytes.
    pub(super) fn long1(&mut self) -> Result<i64, DecodeError> {
        let bytes = self.sized(1)?;
        if bytes.len() > 8 {
            return Err(error(format!(
                "an integer of {} bytes; allowed are 8",
                bytes.len()
            )));
        }
        let negative = bytes.last().is_some_and(|&top| top & 0x80 != 0);
        let mut whole = if negative { [0xff; 8] } else { [0; 8] };
        whole[..bytes.len()].copy_from_slice(bytes);
        Ok(i64::from_le_bytes(whole))
    }
}
