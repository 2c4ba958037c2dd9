//! The `results` of an answer.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess,
    Visitor,
};

/// Reader of `results`, at most as many as were asked for: a short text can have very many.
pub(super) struct ResultsReader<T> {
    count: usize,
    of: PhantomData<T>,
}

impl<T> ResultsReader<T> {
    pub(super) fn new(count: usize) -> Self {
        Self {
            count,
            of: PhantomData,
        }
    }
}

/// The object with the list.
impl<'de, T: DeserializeOwned> DeserializeSeed<'de> for ResultsReader<T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Vec<T>, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de, T: DeserializeOwned> Visitor<'de> for ResultsReader<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with {} results", self.count)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<T>, A::Error> {
        let mut results = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == "results" {
                results = map.next_value_seed(List(ResultsReader::new(self.count)))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(results)
    }
}

/// The list itself.
struct List<T>(ResultsReader<T>);

impl<'de, T: DeserializeOwned> DeserializeSeed<'de> for List<T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Vec<T>, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de, T: DeserializeOwned> Visitor<'de> for List<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} results", self.0.count)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut results = Vec::with_capacity(self.0.count);
        while let Some(result) = list.next_element()? {
            if results.len() == self.0.count {
                return Err(A::Error::custom(format!(
                    "more than {} results",
                    self.0.count
                )));
            }
            results.push(result);
        }
        Ok(results)
    }
}
