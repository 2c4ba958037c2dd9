//! Sizes with a unit, and no size at all.

use std::fmt;
use std::str::FromStr;

use kvtier_common::error::{Error, Result};
use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

/// How the absence of a limit is written.
const UNLIMITED: &str = "unlimited";

/// What a size can be.
const SIZES: &str =
    "give a size such as 512MiB, 10GiB or 1.5TiB, at most 1048576TiB; a number alone is GiB";

/// Bytes that one unit has. The larger ones come first, so that a size is written with the largest that fits.
const UNITS: [(&str, u64); 5] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
];

/// Sizes are below this, so that sums of them stay in 64 bits.
pub const MAX_BYTES: u64 = 1 << 60;

/// Bytes that one tenant may have; `None` = unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit(pub Option<u64>);

/// The bytes of a size such as `10GiB`; 0 needs no unit.
///
/// # Errors
/// What a size has to be.
pub fn parse_size(text: &str) -> Result<u64> {
    size(text).ok_or_else(|| Error::refused(SIZES))
}

fn size(text: &str) -> Option<u64> {
    let text = text.trim();
    let letters = |c: char| c.is_ascii_alphabetic();
    let number = text.trim_end_matches(letters);
    let unit = match text[number.len()..].to_ascii_lowercase().as_str() {
        "b" => Some(1),
        "k" | "kb" | "kib" => Some(1_u64 << 10),
        "m" | "mb" | "mib" => Some(1 << 20),
        "" | "g" | "gb" | "gib" => Some(1 << 30),
        "t" | "tb" | "tib" => Some(1 << 40),
        _ => None,
    };
    let bytes = unit.and_then(|unit| Some(number.trim().parse::<f64>().ok()? * unit as f64));
    bytes
        .filter(|bytes| (0.0..=MAX_BYTES as f64).contains(bytes))
        .map(|bytes| bytes as u64)
}

impl FromStr for Limit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.trim().eq_ignore_ascii_case(UNLIMITED) {
            return Ok(Self(None));
        }
        let bytes = size(text).ok_or_else(|| Error::refused(format!("{SIZES}, or {UNLIMITED}")))?;
        Ok(Self(Some(bytes)))
    }
}

impl fmt::Display for Limit {
    /// A form that is read back as the same.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = match self.0 {
            None => return f.write_str(UNLIMITED),
            Some(0) => return f.write_str("0"),
            Some(bytes) => bytes,
        };
        let whole = UNITS.iter().find(|(_, unit)| bytes.is_multiple_of(*unit));
        let (unit, size) = whole.unwrap_or(&("B", 1));
        write!(f, "{}{unit}", bytes / size)
    }
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(bytes) => serializer.serialize_u64(bytes),
            None => serializer.serialize_str(UNLIMITED),
        }
    }
}

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl Visitor<'_> for Either {
            type Value = Limit;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "bytes or {UNLIMITED:?}")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Limit, E> {
                Ok(Limit(Some(bytes)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Limit, E> {
                if text == UNLIMITED {
                    Ok(Limit(None))
                } else {
                    Err(E::invalid_value(de::Unexpected::Str(text), &self))
                }
            }
        }

        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("0", 0),
            ("0GiB", 0),
            ("1B", 1),
            ("64KiB", 65536),
            (" 512 MiB ", 512 << 20),
            ("10gib", 10 << 30),
            ("1.5TiB", 3 << 39),
            ("10", 10 << 30),
            ("10GB", 10 << 30),
            ("10g", 10 << 30),
            ("0.5", 1 << 29),
            ("2 M", 2 << 20),
            ("1e1", 10 << 30),
        ] {
            assert_eq!(text.parse(), Ok(Limit(Some(bytes))), "{text}");
        }
        for text in ["unlimited", "Unlimited"] {
            assert_eq!(text.parse(), Ok(Limit(None)));
        }
        for text in [
            "", "GiB", "-1GiB", "nanGiB", "infGiB", "inf", "1e300GiB", "é", "1é", "10 GiBs", "1PiB",
        ] {
            let told = text.parse::<Limit>().unwrap_err().to_string();
            assert!(
                told.contains("10GiB") && told.contains("unlimited"),
                "{told}"
            );
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        for bytes in [
            0,
            1,
            1023,
            1024,
            3 << 29,
            10 << 30,
            (1 << 40) + 1,
            MAX_BYTES,
        ] {
            let limit = Limit(Some(bytes));
            assert_eq!(limit.to_string().parse(), Ok(limit));
        }
        assert_eq!(Limit(Some(10 << 30)).to_string(), "10GiB");
        assert_eq!(Limit(None).to_string(), "unlimited");
    }
}
