//! The reader: one pass over a borrowed slice.

use super::{DecodeError, InField, reserve};

/// How deep values that are skipped may nest. Real messages stay below ten.
pub const MAX_DEPTH: usize = 64;

/// Bytes that an array may reserve before its values are read.
const MAX_RESERVED: usize = 1 << 16;

/// Longest piece of a foreign text repeated in an error.
const SHOWN: usize = 40;

/// Reads MessagePack values one after another from a slice.
///
/// Every method either consumes exactly one value (or header) and returns it, or fails; after a failure the
/// position is unspecified and the reader should be dropped.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    rest: &'a [u8],
    unknown_field: Option<&'a str>,
}

impl<'a> Reader<'a> {
    /// A reader at the start of `data`.
    #[must_use]
    pub fn new(data: &'a [u8]) -> Self {
        Self {
            rest: data,
            unknown_field: None,
        }
    }

    /// The bytes not read yet.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Skips `count` bytes. For callers that decoded a part of [`Reader::rest`] themselves.
    pub fn advance(&mut self, count: usize) -> Result<(), DecodeError> {
        self.take(count).map(|_| ())
    }

    /// Ends reading: bytes behind the last value are an error.
    pub fn finish(self) -> Result<(), DecodeError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(DecodeError::new(format!(
            "{} bytes follow the value, none are allowed",
            self.rest.len()
        )))
    }

    /// The next value's first byte, without consuming it.
    pub fn peek(&self) -> Result<u8, DecodeError> {
        self.rest.first().copied().ok_or_else(truncated)
    }

    /// Consumes a nil if one is next; returns whether it did.
    pub fn nil(&mut self) -> Result<bool, DecodeError> {
        let is_nil = self.peek()? == 0xc0;
        if is_nil {
            self.rest = &self.rest[1..];
        }
        Ok(is_nil)
    }

    /// An integer of any width, signed or not. Bool and float are refused.
    pub fn integer(&mut self) -> Result<i128, DecodeError> {
        let marker = self.peek()?;
        self.rest = &self.rest[1..];
        Ok(match marker {
            0x00..=0x7f => i128::from(marker),
            0xe0..=0xff => i128::from(marker as i8),
            0xcc => i128::from(u8::from_be_bytes(self.array()?)),
            0xcd => i128::from(u16::from_be_bytes(self.array()?)),
            0xce => i128::from(u32::from_be_bytes(self.array()?)),
            0xcf => i128::from(u64::from_be_bytes(self.array()?)),
            0xd0 => i128::from(i8::from_be_bytes(self.array()?)),
            0xd1 => i128::from(i16::from_be_bytes(self.array()?)),
            0xd2 => i128::from(i32::from_be_bytes(self.array()?)),
            0xd3 => i128::from(i64::from_be_bytes(self.array()?)),
            _ => return Err(unexpected("an int", marker)),
        })
    }

    /// An integer that must fit `T`.
    pub fn int<T: TryFrom<i128>>(&mut self) -> Result<T, DecodeError> {
        let value = self.integer()?;
        T::try_from(value).map_err(|_| out_of_range::<T>(value))
    }

    /// An integer that must fit `T`, or nil.
    pub fn optional_int<T: TryFrom<i128>>(&mut self) -> Result<Option<T>, DecodeError> {
        if self.nil()? {
            return Ok(None);
        }
        self.int().map(Some)
    }

    /// A bool; nothing else counts as one.
    pub fn bool(&mut self) -> Result<bool, DecodeError> {
        let marker = self.peek()?;
        self.rest = &self.rest[1..];
        match marker {
            0xc2 => Ok(false),
            0xc3 => Ok(true),
            _ => Err(unexpected("a bool", marker)),
        }
    }

    /// A text. `bin` is refused.
    pub fn str(&mut self) -> Result<&'a str, DecodeError> {
        let marker = self.peek()?;
        self.rest = &self.rest[1..];
        let len = match marker {
            0xa0..=0xbf => usize::from(marker & 0x1f),
            0xd9 => self.len8()?,
            0xda => self.len16()?,
            0xdb => self.len32()?,
            _ => return Err(unexpected("a str", marker)),
        };
        std::str::from_utf8(self.take(len)?)
            .map_err(|error| DecodeError::new(format!("the text is not UTF-8: {error}")))
    }

    /// Bytes. `str` is refused.
    pub fn bin(&mut self) -> Result<&'a [u8], DecodeError> {
        let marker = self.peek()?;
        self.rest = &self.rest[1..];
        let len = match marker {
            0xc4 => self.len8()?,
            0xc5 => self.len16()?,
            0xc6 => self.len32()?,
            _ => return Err(unexpected("bytes", marker)),
        };
        self.take(len)
    }

    /// Bytes or nil.
    pub fn optional_bin(&mut self) -> Result<Option<&'a [u8]>, DecodeError> {
        if self.nil()? {
            return Ok(None);
        }
        self.bin().map(Some)
    }

    /// A float of either width; an int is taken as one.
    pub fn f64(&mut self) -> Result<f64, DecodeError> {
        match self.peek()? {
            0xca => {
                self.rest = &self.rest[1..];
                Ok(f64::from(f32::from_be_bytes(self.array()?)))
            }
            0xcb => {
                self.rest = &self.rest[1..];
                Ok(f64::from_be_bytes(self.array()?))
            }
            marker if is_int(marker) => Ok(self.integer()? as f64),
            marker => Err(unexpected("a number", marker)),
        }
    }

    /// An array's header: how many values follow. The count never exceeds the bytes that are left.
    pub fn array_len(&mut self) -> Result<usize, DecodeError> {
        let marker = self.peek()?;
        self.rest = &self.rest[1..];
        let len = match marker {
            0x90..=0x9f => usize::from(marker & 0x0f),
            0xdc => self.len16()?,
            0xdd => self.len32()?,
            _ => return Err(unexpected("an array", marker)),
        };
        self.plausible(len, len)
    }

    /// A map's header: how many key and value pairs follow. The count never exceeds half the bytes left.
    pub fn map_len(&mut self) -> Result<usize, DecodeError> {
        let marker = self.peek()?;
        self.rest = &self.rest[1..];
        let len = match marker {
            0x80..=0x8f => usize::from(marker & 0x0f),
            0xde => self.len16()?,
            0xdf => self.len32()?,
            _ => return Err(unexpected("a map", marker)),
        };
        self.plausible(len, len.saturating_mul(2))
    }

    /// An extension value: type code and body.
    pub fn ext(&mut self) -> Result<(i8, &'a [u8]), DecodeError> {
        let marker = self.peek()?;
        self.rest = &self.rest[1..];
        let len = match marker {
            0xd4..=0xd8 => 1usize << (marker - 0xd4),
            0xc7 => self.len8()?,
            0xc8 => self.len16()?,
            0xc9 => self.len32()?,
            _ => return Err(unexpected("an extension value", marker)),
        };
        let [code] = self.array::<1>()?;
        Ok((code as i8, self.take(len)?))
    }

    /// Calls `entry` with each key of a map; `entry` must consume the value.
    ///
    /// Keys are texts, as in every structure of the protocol.
    pub fn map(
        &mut self,
        mut entry: impl FnMut(&'a str, &mut Self) -> Result<(), DecodeError>,
    ) -> Result<(), DecodeError> {
        let len = self.map_len()?;
        for _ in 0..len {
            let name = self.str().in_field("(map key)")?;
            entry(name, self).map_err(|error| error.inside(name_shown(name)))?;
        }
        Ok(())
    }

    /// An array of values that `element` reads, each at least `min_bytes` long on the wire.
    ///
    /// `min_bytes` bounds what a claimed count can make this allocate.
    pub fn array_of<T>(
        &mut self,
        min_bytes: usize,
        mut element: impl FnMut(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let len = self.array_len()?;
        if len > self.rest.len() / min_bytes.max(1) {
            return Err(truncated());
        }
        // A claimed count may reserve this much at once; what is really there grows it further.
        let mut out = Vec::with_capacity(len.min(MAX_RESERVED / size_of::<T>().max(1)));
        for index in 0..len {
            reserve(&mut out, 1)?;
            out.push(element(self).at_index(index)?);
        }
        Ok(out)
    }

    /// Like [`Reader::array_of`], refusing more than `limit` values: for values that take much more memory
    /// than bytes on the wire.
    pub fn short_array_of<T>(
        &mut self,
        limit: usize,
        element: impl FnMut(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let len = { *self }.array_len()?;
        if len > limit {
            return Err(DecodeError::new(format!(
                "{len} values, at most {limit} are allowed"
            )));
        }
        self.array_of(1, element)
    }

    /// An array of integers that fit `T`.
    pub fn ints<T: TryFrom<i128>>(&mut self) -> Result<Vec<T>, DecodeError> {
        self.array_of(1, Self::int)
    }

    /// Skips one value of any kind, nested at most [`MAX_DEPTH`] deep. No recursion, no allocation.
    pub fn skip(&mut self) -> Result<(), DecodeError> {
        // How many values are still open on each level.
        let mut open = [0usize; MAX_DEPTH];
        let mut depth = 0;
        open[0] = 1;
        loop {
            open[depth] -= 1;
            let inner = self.skip_head()?;
            if inner > 0 {
                depth += 1;
                if depth == MAX_DEPTH {
                    return Err(DecodeError::new(format!(
                        "values nest deeper than the {MAX_DEPTH} levels allowed"
                    )));
                }
                open[depth] = inner;
            }
            while open[depth] == 0 {
                if depth == 0 {
                    return Ok(());
                }
                depth -= 1;
            }
        }
    }

    /// Skips the value of a map's field that no served release sends, and notes its name.
    pub(crate) fn skip_unknown(&mut self, name: &'a str) -> Result<(), DecodeError> {
        self.unknown_field.get_or_insert(name_shown(name));
        self.skip()
    }

    /// The name of the first [unknown](Self::skip_unknown) field, as far as it is shown.
    pub(crate) fn unknown_field(&self) -> Option<&'a str> {
        self.unknown_field
    }

    /// Skips one value and returns its bytes.
    pub fn raw(&mut self) -> Result<&'a [u8], DecodeError> {
        let before = self.rest;
        self.skip()?;
        Ok(&before[..before.len() - self.rest.len()])
    }

    /// Consumes a scalar, or the header of a collection; returns how many values that collection holds.
    fn skip_head(&mut self) -> Result<usize, DecodeError> {
        let marker = self.peek()?;
        match marker {
            0x80..=0x8f | 0xde | 0xdf => return Ok(self.map_len()? * 2),
            0x90..=0x9f | 0xdc | 0xdd => return self.array_len(),
            _ => {}
        }
        self.rest = &self.rest[1..];
        let len = match marker {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => 0,
            0xa0..=0xbf => usize::from(marker & 0x1f),
            0xcc | 0xd0 => 1,
            0xcd | 0xd1 => 2,
            0xca | 0xce | 0xd2 => 4,
            0xcb | 0xcf | 0xd3 => 8,
            0xc4 | 0xd9 => self.len8()?,
            0xc5 | 0xda => self.len16()?,
            0xc6 | 0xdb => self.len32()?,
            0xd4..=0xd8 => 1 + (1usize << (marker - 0xd4)),
            0xc7 => self.len8()? + 1,
            0xc8 => self.len16()? + 1,
            0xc9 => self.len32()?.saturating_add(1),
            _ => return Err(unexpected("a value", marker)),
        };
        self.take(len)?;
        Ok(0)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or_else(truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or_else(truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn len8(&mut self) -> Result<usize, DecodeError> {
        Ok(usize::from(u8::from_be_bytes(self.array()?)))
    }

    fn len16(&mut self) -> Result<usize, DecodeError> {
        Ok(usize::from(u16::from_be_bytes(self.array()?)))
    }

    fn len32(&mut self) -> Result<usize, DecodeError> {
        Ok(u32::from_be_bytes(self.array()?) as usize)
    }

    /// Refuses a collection that claims more values than bytes are left.
    fn plausible(&self, len: usize, values: usize) -> Result<usize, DecodeError> {
        if values > self.rest.len() {
            return Err(truncated());
        }
        Ok(len)
    }
}

/// Decoding one whole payload: the value that `read` takes must be all there is.
pub(crate) fn whole<'a, T>(
    payload: &'a [u8],
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, DecodeError>,
) -> Result<T, DecodeError> {
    let mut reader = Reader::new(payload);
    let value = read(&mut reader)?;
    reader.finish()?;
    Ok(value)
}

/// Whether a value with this first byte is an integer.
pub(crate) fn is_int(marker: u8) -> bool {
    matches!(marker, 0x00..=0x7f | 0xe0..=0xff | 0xcc..=0xcf | 0xd0..=0xd3)
}

/// A foreign text cut to what an error may repeat.
pub(crate) fn name_shown(name: &str) -> &str {
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => &name[..end],
        None => name,
    }
}

#[cold]
pub(crate) fn truncated() -> DecodeError {
    DecodeError::new("the bytes end inside a value")
}

#[cold]
pub(crate) fn unexpected(wanted: &str, marker: u8) -> DecodeError {
    DecodeError::new(format!("expected {wanted}, found {}", kind(marker)))
}

#[cold]
fn out_of_range<T>(value: i128) -> DecodeError {
    DecodeError::new(format!(
        "{value} does not fit the range of {}",
        std::any::type_name::<T>()
    ))
}

/// What a first byte announces, in words.
fn kind(marker: u8) -> &'static str {
    match marker {
        0x00..=0x7f | 0xe0..=0xff | 0xcc..=0xcf | 0xd0..=0xd3 => "an int",
        0x80..=0x8f | 0xde | 0xdf => "a map",
        0x90..=0x9f | 0xdc | 0xdd => "an array",
        0xa0..=0xbf | 0xd9..=0xdb => "a str",
        0xc0 => "nil",
        0xc1 => "the byte c1, which is never used",
        0xc2 | 0xc3 => "a bool",
        0xc4..=0xc6 => "bytes",
        0xc7..=0xc9 | 0xd4..=0xd8 => "an extension value",
        0xca | 0xcb => "a float",
    }
}
