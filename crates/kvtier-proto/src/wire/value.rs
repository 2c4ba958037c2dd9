//! Values that are read and written the same way everywhere, and records of them: maps with named fields.

use std::borrow::Cow;

use super::writer::*;
use super::{DecodeError, Reader, decode_tokens};

/// A value as messages carry it.
pub(crate) trait WireValue<'a>: Sized {
    /// Fewest bytes that one takes.
    const MIN_BYTES: usize = 1;

    /// Reads one.
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError>;

    /// Appends it.
    fn write(&self, out: &mut Vec<u8>);
}

macro_rules! values {
    ($($type:ty: $min:literal, $read:expr, |$value:ident, $out:ident| $write:expr;)*) => { $(
        impl<'a> WireValue<'a> for $type {
            const MIN_BYTES: usize = $min;

            fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
                $read(reader)
            }

            fn write(&self, $out: &mut Vec<u8>) {
                let $value = self;
                $write;
            }
        }
    )* };
}

values! {
    i64: 1, Reader::int, |value, out| write_int(out, *value);
    u64: 1, Reader::int, |value, out| write_uint(out, *value);
    u32: 1, Reader::int, |value, out| write_uint(out, u64::from(*value));
    bool: 1, Reader::bool, |value, out| write_bool(out, *value);
    &'a str: 1, Reader::str, |value, out| write_str(out, value);
    &'a [u8]: 2, Reader::bin, |value, out| write_bin(out, value);
    Cow<'a, str>: 1, |reader: &mut Reader<'a>| reader.str().map(Cow::from), |value, out| write_str(out, value);
    Cow<'a, [u8]>: 2, |reader: &mut Reader<'a>| reader.bin().map(Cow::from), |value, out| write_bin(out, value);
    Cow<'a, [u64]>: 1, |reader: &mut Reader<'a>| reader.ints().map(Cow::from), |value, out| write_all(out, value);
    Cow<'a, [u32]>: 1, |reader: &mut Reader<'a>| tokens(reader).map(Cow::from), |value, out| write_tokens(out, value);
}

fn tokens(reader: &mut Reader<'_>) -> Result<Vec<u32>, DecodeError> {
    let mut tokens = Vec::new();
    let count = reader.array_len()?;
    let consumed = decode_tokens(count, reader.rest(), &mut tokens)?;
    reader.advance(consumed)?;
    Ok(tokens)
}

impl<'a, V: WireValue<'a>> WireValue<'a> for Vec<V> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        reader.array_of(V::MIN_BYTES, V::read)
    }

    fn write(&self, out: &mut Vec<u8>) {
        write_all(out, self);
    }
}

/// Appends an array.
pub(crate) fn write_all<'a, V: WireValue<'a>>(out: &mut Vec<u8>, values: &[V]) {
    write_array_len(out, values.len());
    values.iter().for_each(|value| value.write(out));
}

impl<'a, V: WireValue<'a>> WireValue<'a> for Option<V> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(if reader.nil()? {
            None
        } else {
            Some(V::read(reader)?)
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Some(value) => value.write(out),
            None => write_nil(out),
        }
    }
}

/// Declares a record by `field: Type = "name"`, and for a field that may be absent its `default`, for one that is read with
/// more checks than its type how it is `read`. Fields of `and` are options, which are absent if they are none. Unknown names
/// are skipped.
macro_rules! record {
    (
        $(#[$attribute:meta])* pub struct $record:ident $(<$lifetime:lifetime>)? {
            $($(#[$doc:meta])* pub $field:ident: $type:ty = $name:literal $(, default $default:expr)? $(, read $read:expr)?;)*
        }
        $(and { $(
            $(#[$option_doc:meta])* pub $option:ident: $option_type:ty = $option_name:literal $(, read $option_read:expr)?;
        )* })?
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $record $(<$lifetime>)? {
            $($(#[$doc])* pub $field: $type,)*
            $($($(#[$option_doc])* pub $option: Option<$option_type>,)*)?
        }

        impl<'a> $crate::wire::WireValue<'a> for $record $(<$lifetime>)? {
            const MIN_BYTES: usize = 1 $(+ record!(@min $name, $type $(, $default)?))*;

            fn read(reader: &mut $crate::wire::Reader<'a>) -> Result<Self, $crate::wire::DecodeError> {
                $(let mut $field = None;)*
                $($(let mut $option = None;)*)?
                reader.map(|name, value| {
                    match name {
                        $($name => $field = Some(record!(@read value $(, $read)?)),)*
                        $($($option_name => $option = Some(record!(@read value $(, $option_read)?)),)*)?
                        _ => value.skip_unknown(name)?,
                    }
                    Ok(())
                })?;
                Ok(Self { $($field: record!(@end $field, $name $(, $default)?),)* $($($option,)*)? })
            }

            fn write(&self, out: &mut Vec<u8>) {
                let fields = <[&str]>::len(&[$($name),*]) $($(+ usize::from(self.$option.is_some()))*)?;
                $crate::wire::write_map_len(out, fields);
                $(
                    $crate::wire::write_str(out, $name);
                    $crate::wire::WireValue::write(&self.$field, out);
                )*
                $($(if let Some(value) = &self.$option {
                    $crate::wire::write_str(out, $option_name);
                    $crate::wire::WireValue::write(value, out);
                })*)?
            }
        }
    };
    (@min $name:literal, $type:ty) => { 1 + $name.len() + <$type as $crate::wire::WireValue<'a>>::MIN_BYTES };
    (@min $name:literal, $type:ty, $default:expr) => { 0 };
    (@read $value:ident) => { $crate::wire::WireValue::read($value)? };
    (@read $value:ident, $read:expr) => { $read($value)? };
    (@end $field:ident, $name:literal) => { $crate::key::required($field, $name)? };
    (@end $field:ident, $name:literal, $default:expr) => { $field.unwrap_or($default) };
}

pub(crate) use record;
