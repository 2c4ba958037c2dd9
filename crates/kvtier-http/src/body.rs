//! JSON bodies as the types of their routes. What does not fit is refused in the shape of LMCache's API.

use std::fmt;
use std::marker::PhantomData;

use axum::http::StatusCode;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use serde_path_to_error::{Path, Segment};
use utoipa::ToSchema;

use super::ApiError;
use super::json::{self, JsonError};

/// Bytes that a parsed body may take.
pub(super) const PARSED: usize = 24 << 20;

/// Longest input that an error repeats, bytes of its JSON.
const ECHO: usize = 1024;

/// One invalid value of a request.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Invalid {
    /// Kind of the error, such as `missing`.
    pub r#type: &'static str,
    /// Place of the value: `body` or `query`, then names and indices.
    pub loc: Vec<Value>,
    /// The error.
    pub msg: String,
    /// The value, or the beginning of its JSON.
    pub input: Value,
    /// What is allowed, for some types.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ctx: Option<Value>,
}

/// The error for an invalid value.
pub(super) fn invalid(
    kind: &'static str,
    location: Vec<Value>,
    message: &str,
    input: &Value,
) -> Invalid {
    Invalid {
        r#type: kind,
        loc: location,
        msg: message.to_owned(),
        input: echo(input),
        ctx: None,
    }
}

/// The error for a number beyond a bound.
pub(super) fn out_of_range(
    location: Vec<Value>,
    is_least: bool,
    bound: i64,
    input: &Value,
) -> Invalid {
    let (kind, word, key) = if is_least {
        ("greater_than_equal", "greater", "ge")
    } else {
        ("less_than_equal", "less", "le")
    };
    let message = format!("Input should be {word} than or equal to {bound}");
    Invalid {
        ctx: Some(json!({ key: bound })),
        ..invalid(kind, location, &message, input)
    }
}

/// The error for a word that is not one of those allowed.
pub(super) fn not_one_of(location: Vec<Value>, allowed: &[&str], input: &Value) -> Invalid {
    let quoted: Vec<_> = allowed.iter().map(|word| format!("'{word}'")).collect();
    let expected = match quoted.split_last() {
        Some((last, first)) if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => quoted.concat(),
    };
    let message = format!("Input should be {expected}");
    Invalid {
        ctx: Some(json!({ "expected": expected })),
        ..invalid("enum", location, &message, input)
    }
}

/// The error for a value that is not an integer.
pub(super) fn not_an_integer(location: Vec<Value>, input: &Value) -> Invalid {
    let text = "Input should be a valid integer";
    match input {
        Value::String(_) => {
            let text = format!("{text}, unable to parse string as an integer");
            invalid("int_parsing", location, &text, input)
        }
        _ => invalid("int_type", location, text, input),
    }
}

/// An input for its error; the beginning of its JSON as a text where that is long.
fn echo(input: &Value) -> Value {
    let mut text = [0; ECHO];
    let mut left = &mut text[..];
    match serde_json::to_writer(&mut left, input) {
        Ok(()) => input.clone(),
        Err(_) => format!("{}...", String::from_utf8_lossy(&text)).into(),
    }
}

/// Error text for a body whose values would take more than `most` bytes.
pub(super) fn too_many_values(most: usize) -> String {
    format!(
        "the body has too many values: they would take more than {} MiB",
        most >> 20
    )
}

/// Parses a body that may be absent, into values of at most `most` bytes.
pub(super) fn optional<T: DeserializeOwned>(bytes: &[u8], most: usize) -> Result<T, ApiError> {
    let value = match bytes {
        b"" => Value::Null,
        bytes => json::parse(bytes, most).map_err(|error| match error {
            JsonError::TooLarge => {
                ApiError::Detail(StatusCode::PAYLOAD_TOO_LARGE, too_many_values(most))
            }
            JsonError::Syntax(error) => {
                let location = vec!["body".into(), error.column().into()];
                let text = format!("JSON decode error: {error}");
                invalid("json_invalid", location, &text, &json!({})).into()
            }
        })?,
    };
    let value = match value {
        Value::Null => Value::Object(Map::new()),
        value => value,
    };
    if let Ok(Object(body)) = Object::deserialize(&value) {
        return Ok(body);
    }
    // Again for the place of the error, which takes several times as long to find.
    let parsed = serde_path_to_error::deserialize::<_, Object<T>>(&value);
    parsed
        .map(|Object(body)| body)
        .map_err(|error| refusal(error.path(), &error.inner().to_string(), &value).into())
}

/// Parses a body that must be there.
pub(super) fn required<T: DeserializeOwned>(bytes: &[u8], most: usize) -> Result<T, ApiError> {
    match bytes.trim_ascii() {
        b"" | b"null" => {
            let location = vec!["body".into()];
            Err(invalid("missing", location, "Field required", &Value::Null).into())
        }
        bytes => optional(bytes, most),
    }
}

/// The error of LMCache's API for an error of serde: its kind follows from what serde expected.
fn refusal(path: &Path, error: &str, body: &Value) -> Invalid {
    let (mut location, mut input) = (vec!["body".into()], body);
    for segment in path {
        let (place, inner): (Value, _) = match segment {
            Segment::Seq { index } => ((*index).into(), input.get(index)),
            Segment::Map { key } => (key.as_str().into(), input.get(key)),
            Segment::Enum { .. } | Segment::Unknown => continue,
        };
        location.push(place);
        input = inner.unwrap_or(&Value::Null);
    }
    let missing = error.strip_prefix("missing field `");
    if let Some(field) = missing.and_then(|field| field.strip_suffix('`')) {
        location.push(field.into());
        return invalid("missing", location, "Field required", input);
    }
    let expected = error.rsplit("expected ").next().unwrap_or_default();
    let (kind, message) = match (expected, input.as_i64()) {
        (TierName::EXPECTED, _) => return not_one_of(location, &TierName::ALL, input),
        ("u32", Some(..0)) => return out_of_range(location, true, 0, input),
        ("u32", Some(_)) => return out_of_range(location, false, u32::MAX.into(), input),
        ("u32" | "i64", _) => return not_an_integer(location, input),
        ("a boolean", _) => ("bool_parsing", "Input should be true or false"),
        ("a string", _) => ("string_type", "Input should be a valid string"),
        ("a sequence", _) => ("list_type", "Input should be a valid list"),
        (OBJECT, _) => ("dict_type", "Input should be a JSON object"),
        _ => ("value_error", error),
    };
    invalid(kind, location, message, input)
}

/// What [`Object`] expects.
const OBJECT: &str = "a JSON object";

/// A struct that is an object in JSON; serde takes a list of its values too.
#[derive(Debug)]
pub(super) struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(OBJECT)
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(Object)
            }
        }
        reader.deserialize_map(Fields(PhantomData))
    }
}

/// A tier in a request: `l1`, `l2` or `all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TierName(pub &'static str);

impl TierName {
    /// All of them.
    pub(super) const ALL: [&str; 3] = ["l1", "l2", "all"];

    const EXPECTED: &str = "a tier";

    /// L1.
    pub(super) fn l1() -> Self {
        Self("l1")
    }

    /// The tiers below L1.
    pub(super) fn l2() -> Self {
        Self("l2")
    }
}

impl<'de> Deserialize<'de> for TierName {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(reader)?;
        let tier = Self::ALL.into_iter().find(|tier| value == *tier);
        tier.map(Self)
            .ok_or_else(|| D::Error::custom(format_args!("expected {}", Self::EXPECTED)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_inputs_are_not_repeated_whole() {
        let short = json!({ "a": [1, "b"] });
        assert_eq!(echo(&short), short);
        let long = echo(&json!(vec!["é"; 1 << 20]));
        let text = long.as_str().unwrap();
        assert!(text.starts_with("[\"é\",") && text.ends_with("...") && text.len() < 2 * ECHO);
    }

    #[test]
    fn bodies_of_too_many_values_are_refused() {
        let body = format!("{{\"block_ids\": [{}1]}}", "1,".repeat((8 << 20) / 2 - 32));
        match optional::<Value>(body.as_bytes(), PARSED) {
            Err(ApiError::Detail(StatusCode::PAYLOAD_TOO_LARGE, text)) => {
                assert!(text.contains("24 MiB"), "{text}");
            }
            _ => panic!("parsed"),
        }
    }

    #[test]
    fn lists_are_refused_where_objects_belong() {
        #[derive(Debug, Deserialize)]
        struct Body {
            #[serde(default)]
            _list: Vec<Object<Body>>,
        }
        for (body, location) in [
            ("[]", json!(["body"])),
            (r#"{"_list": [[]]}"#, json!(["body", "_list", 0])),
        ] {
            match optional::<Body>(body.as_bytes(), PARSED) {
                Err(ApiError::Invalid(error)) => {
                    assert_eq!((error.r#type, json!(error.loc)), ("dict_type", location));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
