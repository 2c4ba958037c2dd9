//! MessagePack as the protocol uses it: a reader over borrowed bytes, writer functions, and the token loop.
//!
//! The formats are those the LMCache 0.5.6 wire protocol puts into frames. The reader accepts every width of
//! an integer, keeps `str` and `bin` separate, borrows text and bytes from the frame, never trusts a claimed
//! length beyond the bytes that are there, and skips unknown values without recursion.

pub(crate) mod fields;
mod reader;
mod tokens;
mod value;
mod writer;

pub use reader::{MAX_DEPTH, Reader};
pub(crate) use reader::{is_int, name_shown, unexpected, whole};
pub use tokens::{PACKED_TOKEN_BYTES, PackedToken, decode_tokens, skip_tokens, unpack_tokens};
pub(crate) use value::{WireValue, record, write_all};
pub use writer::{
    write_array_len, write_bin, write_bin_len, write_bool, write_ext, write_f64, write_int,
    write_map_len, write_nil, write_str, write_tokens, write_uint,
};

/// Bytes that are not what the protocol says they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", Prefix(field))]
pub struct DecodeError {
    /// Path of the offending field from the payload's root, such as `key.token_ids[3]`; empty for the root.
    pub field: String,
    /// What was found and what is allowed there.
    pub message: String,
}

/// Shows `field: ` or nothing.
struct Prefix<'a>(&'a str);

impl std::fmt::Display for Prefix<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        write!(f, "{}: ", self.0)
    }
}

/// Reserves memory for `more` values. What a peer sends must not end the process when there is none.
///
/// # Errors
/// The number of values.
#[inline]
pub fn reserve<T>(to: &mut Vec<T>, more: usize) -> Result<(), DecodeError> {
    to.try_reserve(more)
        .map_err(|_| DecodeError::new(format!("out of memory for {} values", to.len() + more)))
}

impl DecodeError {
    /// An error about the current value; the caller that knows its name adds it with [`InField::in_field`].
    #[cold]
    pub fn new(message: impl Into<String>) -> Self {
        Self {
            field: String::new(),
            message: message.into(),
        }
    }

    /// An error about the field `field`.
    #[cold]
    pub fn at(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            message: message.into(),
        }
    }

    /// Returns the error as seen from the structure that holds the value as `outer`.
    #[cold]
    #[must_use]
    pub fn inside(mut self, outer: &str) -> Self {
        self.field = match self.field.chars().next() {
            None => outer.to_owned(),
            Some('[') => format!("{outer}{}", self.field),
            Some(_) => format!("{outer}.{}", self.field),
        };
        self
    }
}

/// Names the field an error happened in while it travels up.
pub trait InField: Sized {
    /// The error's path gets `name` in front.
    fn in_field(self, name: &str) -> Self;
    /// The error's path gets `[index]` in front.
    fn at_index(self, index: usize) -> Self;
}

impl<T> InField for Result<T, DecodeError> {
    #[inline]
    fn in_field(self, name: &str) -> Self {
        self.map_err(|error| error.inside(name))
    }

    #[inline]
    fn at_index(self, index: usize) -> Self {
        self.map_err(|error| error.inside(&format!("[{index}]")))
    }
}
