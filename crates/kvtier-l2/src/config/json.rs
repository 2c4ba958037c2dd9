//! JSON in a bounded amount of memory and without duplicate keys: parsed, a byte of a text may take a hundred, and
//! `serde_json` alone would silently take the last value of a key.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Bytes of a value in its list.
const VALUE: usize = size_of::<Value>();

/// Bytes of an object's first node.
const OBJECT: usize = 11 * (size_of::<String>() + VALUE);

/// Bytes of a text beside its content.
const TEXT: usize = 16;

/// Parses one JSON value.
///
/// # Errors
/// For text that is not JSON, and in the category [`Data`](serde_json::error::Category::Data) for a duplicate key.
pub(crate) fn parse(text: &str) -> Result<Value, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = Bounded::new(usize::MAX).deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Reads a value that takes about a number of bytes at most.
#[derive(Debug)]
pub struct Bounded {
    most: usize,
    left: Cell<usize>,
}

impl Bounded {
    /// A reader of a value of at most `most` bytes.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            most,
            left: Cell::new(most),
        }
    }

    fn take<E: Error>(&self, bytes: usize) -> Result<(), E> {
        match self.left.get().checked_sub(bytes) {
            Some(left) => {
                self.left.set(left);
                Ok(())
            }
            None => Err(E::custom(format_args!(
                "too many values: they would take more than {} bytes",
                self.most
            ))),
        }
    }
}

impl<'de> DeserializeSeed<'de> for &Bounded {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &Bounded {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
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

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.take(TEXT + value.len())?;
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            self.take(VALUE)?;
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                let key = super::clip(&key);
                return Err(A::Error::custom(format!("key {key:?} is given twice")));
            }
            let node = if map.is_empty() {
                OBJECT
            } else {
                2 * (size_of::<String>() + VALUE)
            };
            self.take(node + TEXT + key.len())?;
            let value = entries.next_value_seed(self)?;
            map.insert(key, value);
        }
        Ok(map.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MUCH: usize = 1 << 20;

    #[test]
    fn values_beyond_the_bound_are_refused_while_read() {
        let many = |part: &str, bytes: usize| {
            let parts = vec![part; MUCH / bytes];
            format!("[{}]", parts.join(","))
        };
        let keys: Vec<_> = (0..MUCH / VALUE)
            .map(|key| format!("\"{key}\":1"))
            .collect();
        for text in [
            many("1", VALUE),
            many("{}", VALUE),
            many("[]", VALUE),
            many(r#"{"a":1}"#, OBJECT),
            format!("[\"{}\"]", "x".repeat(MUCH)),
            format!("{{{}}}", keys.join(",")),
        ] {
            // Cut off, so that it would be refused otherwise if it were read to its end.
            let text = &text[..text.len() - 1];
            let mut reader = serde_json::Deserializer::from_str(text);
            let error = Bounded::new(MUCH / 2).deserialize(&mut reader).unwrap_err();
            assert!(error.to_string().contains("too many values"), "{error}");
        }
    }
}
