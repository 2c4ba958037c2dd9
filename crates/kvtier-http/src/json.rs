//! JSON read into a bounded amount of memory: a byte of a body may take a hundred parsed.

use std::cell::Cell;
use std::fmt;

use kvtier_common::error::Error as Refusal;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::{Map, Value};

/// Bytes of a value in its list.
const VALUE: usize = size_of::<Value>();

/// Bytes of an object's first node.
const OBJECT: usize = 11 * (size_of::<String>() + VALUE);

/// Bytes of a text beside its content.
const TEXT: usize = 16;

/// Why there is no value.
#[derive(Debug)]
pub(super) enum JsonError {
    /// The text is not JSON.
    Syntax(serde_json::Error),
    /// Parsed, it would take more than is allowed.
    TooLarge,
}

/// Why entries were not read to the end.
#[derive(Debug)]
pub(super) enum EntriesError {
    /// Error of one value.
    Json(JsonError),
    /// The value is no object with that member, which has to be an object too.
    Shape,
    /// The object has a member of another name.
    Unknown(String),
    /// An entry was refused.
    Refused(Refusal),
}

/// Parses one JSON value that takes about `most` bytes at most.
pub(super) fn parse(bytes: &[u8], most: usize) -> Result<Value, JsonError> {
    let left = Cell::new(most);
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = Bounded(&left).deserialize(&mut reader);
    let value = value.and_then(|value| reader.end().map(|()| value));
    value.map_err(|error| match left.get() {
        0 => JsonError::TooLarge,
        _ => JsonError::Syntax(error),
    })
}

/// Parses an object whose `member` is an object, and gives the entries of that one to `take` as they are read, each of about
/// `most` bytes at most. Members that are `passed` over may be there as well.
pub(super) fn parse_entries(
    bytes: &[u8],
    member: &str,
    passed: &[&str],
    most: usize,
    mut take: impl FnMut(String, Value) -> Result<(), Refusal>,
) -> Result<(), EntriesError> {
    let mut failed = None;
    let outer = Outer {
        member,
        passed,
        inner: Inner {
            most,
            take: &mut take,
            failed: &mut failed,
        },
    };
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let outcome = reader.deserialize_map(outer);
    let outcome = outcome.and_then(|()| reader.end());
    outcome.map_err(|error| match failed {
        Some(failed) => failed,
        None if error.is_data() => EntriesError::Shape,
        None => EntriesError::Json(JsonError::Syntax(error)),
    })
}

struct Outer<'a> {
    member: &'a str,
    passed: &'a [&'a str],
    inner: Inner<'a>,
}

struct Inner<'a> {
    most: usize,
    take: &'a mut dyn FnMut(String, Value) -> Result<(), Refusal>,
    failed: &'a mut Option<EntriesError>,
}

impl<'de> Visitor<'de> for Outer<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut members: A) -> Result<(), A::Error> {
        let (mut is_there, mut unknown) = (false, None);
        while let Some(name) = members.next_key::<String>()? {
            if name == self.member {
                is_there = true;
                members.next_value_seed(&mut self.inner)?;
                continue;
            }
            members.next_value::<IgnoredAny>()?;
            if !self.passed.contains(&name.as_str()) {
                unknown.get_or_insert(name);
            }
        }
        let failure = match (is_there, unknown) {
            (true, None) => return Ok(()),
            (false, _) => EntriesError::Shape,
            (true, Some(name)) => EntriesError::Unknown(name),
        };
        *self.inner.failed = Some(failure);
        Err(A::Error::custom("not the members that are wanted"))
    }
}

impl<'de> DeserializeSeed<'de> for &mut Inner<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<(), D::Error> {
        reader.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Inner<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some(name) = entries.next_key::<String>()? {
            let left = Cell::new(self.most);
            let value = entries.next_value_seed(Bounded(&left));
            if left.get() == 0 {
                *self.failed = Some(EntriesError::Json(JsonError::TooLarge));
            }
            if let Err(refused) = (self.take)(name, value?) {
                *self.failed = Some(EntriesError::Refused(refused));
                return Err(A::Error::custom("refused"));
            }
        }
        Ok(())
    }
}

/// Makes values while there are bytes left; 0 is that there were too few.
struct Bounded<'a>(&'a Cell<usize>);

impl Bounded<'_> {
    fn take<E: serde::de::Error>(&self, bytes: usize) -> Result<(), E> {
        let left = self.0.get().saturating_sub(bytes);
        self.0.set(left);
        match left {
            0 => Err(E::custom("too large")),
            _ => Ok(()),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Value, E> {
        self.take(TEXT + text.len())?;
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = seq.next_element_seed(Bounded(self.0))? {
            self.take(VALUE)?;
            list.try_reserve(1).map_err(A::Error::custom)?;
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let node = if object.is_empty() {
                OBJECT
            } else {
                2 * (size_of::<String>() + VALUE)
            };
            self.take(node + TEXT + key.len())?;
            object.insert(key, entries.next_value_seed(Bounded(self.0))?);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MUCH: usize = 1 << 20;

    #[test]
    fn what_fits_is_parsed_as_ever() {
        for text in [
            "null",
            " true ",
            "-3",
            "18446744073709551615",
            "1.5e3",
            r#""a\u00e9\n""#,
            "[]",
            "{}",
            r#"[1, [2, {"a": null, "b": {"c": "d"}}], "e"]"#,
            r#"{"twice": 1, "twice": 2}"#,
        ] {
            let expected: Value = serde_json::from_str(text).unwrap();
            assert_eq!(parse(text.as_bytes(), MUCH).unwrap(), expected, "{text}");
        }
        for text in ["", "{", "1 x", "nan", "\"\\\"", "\u{fe}", "[1,]", "1e999"] {
            let expected = serde_json::from_str::<Value>(text).unwrap_err();
            let error = match parse(text.as_bytes(), MUCH) {
                Err(JsonError::Syntax(error)) => error,
                other => panic!("{text}: {other:?}"),
            };
            assert_eq!(error.to_string(), expected.to_string());
        }
        let deep = "[".repeat(100_000);
        assert!(matches!(
            parse(deep.as_bytes(), MUCH),
            Err(JsonError::Syntax(_))
        ));
    }

    #[test]
    fn what_would_take_too_much_is_refused_while_it_is_read() {
        let many = |part: &str| {
            let parts = vec![part; MUCH / VALUE];
            format!("[{}]", parts.join(","))
        };
        let keys: Vec<_> = (0..MUCH / VALUE)
            .map(|key| format!("\"{key}\":1"))
            .collect();
        for text in [
            many("1"),
            many("{}"),
            many("[]"),
            format!("[\"{}\"]", "x".repeat(MUCH)),
            format!("{{{}}}", keys.join(",")),
        ] {
            // Cut off, so that it would be refused otherwise if it were read to its end.
            let text = &text.as_bytes()[..text.len() - 1];
            let outcome = parse(text, MUCH / 2);
            assert!(
                matches!(outcome, Err(JsonError::TooLarge)),
                "{:?}",
                outcome.map(|_| ())
            );
        }
        let objects = format!("[{}]", vec![r#"{"a":1}"#; MUCH / OBJECT].join(","));
        assert!(matches!(
            parse(objects.as_bytes(), MUCH),
            Err(JsonError::TooLarge)
        ));
    }
}
