//! Query strings. What does not fit is refused in the shape of LMCache's API.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use serde_json::{Value, json};

use super::ApiError;
use super::body::{not_an_integer, not_one_of, out_of_range};

/// The parameters of a request, read by name; unknown ones are ignored.
pub(super) struct Query(pub HashMap<String, String>);

fn at(name: &str) -> Vec<Value> {
    vec!["query".into(), name.into()]
}

impl Query {
    /// A text, if it is there.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// An integer in a range; absent is `default`.
    pub(super) fn int(
        &self,
        name: &str,
        allowed: RangeInclusive<i64>,
        default: i64,
    ) -> Result<i64, ApiError> {
        let Some(text) = self.text(name) else {
            return Ok(default);
        };
        let input = json!(text);
        let (least, most) = allowed.into_inner();
        Err(match text.trim().parse() {
            Err(_) => not_an_integer(at(name), &input),
            Ok(number) if number < least => out_of_range(at(name), true, least, &input),
            Ok(number) if number > most => out_of_range(at(name), false, most, &input),
            Ok(number) => return Ok(number),
        }
        .into())
    }

    /// One of `allowed`; absent is `default`.
    pub(super) fn one_of(
        &self,
        name: &str,
        allowed: &[&'static str],
        default: &'static str,
    ) -> Result<&'static str, ApiError> {
        let Some(text) = self.text(name) else {
            return Ok(default);
        };
        let found = allowed.iter().copied().find(|word| *word == text);
        found.ok_or_else(|| not_one_of(at(name), allowed, &json!(text)).into())
    }
}
