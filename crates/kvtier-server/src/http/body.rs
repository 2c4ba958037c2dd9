//! JSON bodies, refused in the shape LMCache's API refuses them.

use axum::http::StatusCode;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::ApiError;
use super::json::{self, JsonError};

/// Bytes that a parsed body may take.
const PARSED: usize = 24 << 20;

/// Longest input that an error repeats, bytes of its JSON.
const ECHO: usize = 1024;

/// A request body, or an object in it: fields are read by name; unknown ones are ignored.
pub(super) struct Body {
    fields: Map<String, Value>,
    /// Where it is in the request.
    location: Vec<Value>,
}

/// What is wrong with a value, and where in the request it is.
pub(super) fn schema(
    kind: &str,
    location: &[Value],
    message: &str,
    input: &impl Serialize,
) -> ApiError {
    ApiError::Schema(
        json!([{ "type": kind, "loc": location, "msg": message, "input": echo(input) }]),
    )
}

/// An input for its error; the beginning of its JSON as a text where that is long.
fn echo(input: &impl Serialize) -> Value {
    let mut text = [0; ECHO];
    let mut left = &mut text[..];
    let whole = serde_json::to_writer(&mut left, input).is_ok();
    let len = ECHO - left.len();
    let value = whole.then(|| serde_json::from_slice(&text[..len]).ok());
    value
        .flatten()
        .unwrap_or_else(|| format!("{}...", String::from_utf8_lossy(&text[..len])).into())
}

/// The same for a number beyond a bound.
pub(super) fn out_of_range(
    location: &[Value],
    is_least: bool,
    bound: i64,
    input: &Value,
) -> ApiError {
    let (kind, word, key) = match is_least {
        true => ("greater_than_equal", "greater", "ge"),
        false => ("less_than_equal", "less", "le"),
    };
    ApiError::Schema(json!([{
        "type": kind,
        "loc": location,
        "msg": format!("Input should be {word} than or equal to {bound}"),
        "input": echo(input),
        "ctx": { key: bound },
    }]))
}

/// The same for a word that is not one of those allowed.
pub(super) fn not_one_of(location: &[Value], allowed: &[&str], input: &Value) -> ApiError {
    let quoted: Vec<_> = allowed.iter().map(|word| format!("'{word}'")).collect();
    let expected = match quoted.split_last() {
        Some((last, first)) if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => quoted.concat(),
    };
    ApiError::Schema(json!([{
        "type": "enum",
        "loc": location,
        "msg": format!("Input should be {expected}"),
        "input": echo(input),
        "ctx": { "expected": expected },
    }]))
}

/// The answer to a body whose values would take more than `most` bytes.
fn too_large(most: usize) -> ApiError {
    ApiError::Detail(StatusCode::PAYLOAD_TOO_LARGE, too_many_values(most))
}

/// Error text for such a body.
pub(super) fn too_many_values(most: usize) -> String {
    format!(
        "the body has too many values: they would take more than {} MiB",
        most >> 20
    )
}

impl Body {
    /// Parses the bytes of a body. Nothing at all is an empty object.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        Self::parse_within(bytes, PARSED)
    }

    fn parse_within(bytes: &[u8], most: usize) -> Result<Self, ApiError> {
        let body = |fields| Self {
            fields,
            location: vec!["body".into()],
        };
        if bytes.is_empty() {
            return Ok(body(Map::new()));
        }
        match json::parse(bytes, most) {
            Ok(Value::Object(fields)) => Ok(body(fields)),
            Ok(Value::Null) => Ok(body(Map::new())),
            Ok(other) => Err(schema(
                "dict_type",
                &["body".into()],
                "Input should be a JSON object",
                &other,
            )),
            Err(JsonError::TooLarge) => Err(too_large(most)),
            Err(JsonError::Syntax(error)) => {
                let text = format!("JSON decode error: {error}");
                Err(schema(
                    "json_invalid",
                    &["body".into(), error.column().into()],
                    &text,
                    &json!({}),
                ))
            }
        }
    }

    /// The same for a route that cannot do without a body.
    pub(super) fn required(bytes: &[u8]) -> Result<Self, ApiError> {
        Self::required_within(bytes, PARSED)
    }

    /// The same with another bound of what it may take parsed, bytes.
    pub(super) fn required_within(bytes: &[u8], most: usize) -> Result<Self, ApiError> {
        match bytes.trim_ascii() {
            b"" | b"null" => Err(schema(
                "missing",
                &["body".into()],
                "Field required",
                &Value::Null,
            )),
            bytes => Self::parse_within(bytes, most),
        }
    }

    fn at(&self, name: &str) -> Vec<Value> {
        let mut location = self.location.clone();
        location.push(name.into());
        location
    }

    fn refuse(&self, name: &str, kind: &str, message: &str, value: &Value) -> ApiError {
        schema(kind, &self.at(name), message, value)
    }

    fn get(&self, name: &str) -> Result<&Value, ApiError> {
        self.fields
            .get(name)
            .ok_or_else(|| schema("missing", &self.at(name), "Field required", &self.fields))
    }

    /// Whether a field is there, and not null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.fields.get(name).is_some_and(|value| !value.is_null())
    }

    /// A text that must be there.
    pub(super) fn text(&self, name: &str) -> Result<&str, ApiError> {
        let value = self.get(name)?;
        value.as_str().ok_or_else(|| {
            self.refuse(name, "string_type", "Input should be a valid string", value)
        })
    }

    /// A text; absent or null is none.
    pub(super) fn optional_text(&self, name: &str) -> Result<Option<&str>, ApiError> {
        match self.fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => self.text(name).map(Some),
        }
    }

    /// An integer that must be there.
    pub(super) fn required_int(&self, name: &str) -> Result<i64, ApiError> {
        let value = self.get(name)?;
        value
            .as_i64()
            .ok_or_else(|| not_an_integer(&self.at(name), value))
    }

    /// A list of token ids that must be there.
    pub(super) fn token_ids(&self, name: &str) -> Result<Vec<u32>, ApiError> {
        let value = self.get(name)?;
        let Value::Array(list) = value else {
            return Err(self.refuse(name, "list_type", "Input should be a valid list", value));
        };
        let token = |(index, value): (usize, &Value)| {
            let at = || [&self.at(name)[..], &[index.into()]].concat();
            match value.as_i64() {
                None => Err(not_an_integer(&at(), value)),
                Some(id) if id < 0 => Err(out_of_range(&at(), true, 0, value)),
                Some(id) => u32::try_from(id)
                    .map_err(|_| out_of_range(&at(), false, u32::MAX.into(), value)),
            }
        };
        list.iter().enumerate().map(token).collect()
    }

    /// A list of objects that must be there; how many there are is checked by `check` before they are looked at.
    pub(super) fn objects(
        &mut self,
        name: &str,
        check: impl FnOnce(usize) -> Result<(), ApiError>,
    ) -> Result<Vec<Self>, ApiError> {
        self.get(name)?;
        let list = match self.fields.remove(name) {
            Some(Value::Array(list)) => list,
            other => {
                let other = other.unwrap_or_default();
                return Err(self.refuse(name, "list_type", "Input should be a valid list", &other));
            }
        };
        check(list.len())?;
        let object = |(index, value): (usize, Value)| {
            let mut location = self.at(name);
            location.push(index.into());
            match value {
                Value::Object(fields) => Ok(Self { fields, location }),
                other => Err(schema(
                    "dict_type",
                    &location,
                    "Input should be a JSON object",
                    &other,
                )),
            }
        };
        list.into_iter().enumerate().map(object).collect()
    }

    /// A truth value; absent or null is `default`.
    pub(super) fn bool(&self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.fields.get(name) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(value) => {
                Err(self.refuse(name, "bool_parsing", "Input should be true or false", value))
            }
        }
    }

    /// An integer; absent or null is `default`.
    pub(super) fn int(&self, name: &str, default: i64) -> Result<i64, ApiError> {
        match self.fields.get(name) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => value
                .as_i64()
                .ok_or_else(|| not_an_integer(&self.at(name), value)),
        }
    }

    /// A list of integers; absent or null is empty.
    pub(super) fn ints(&self, name: &str) -> Result<Vec<i64>, ApiError> {
        let refuse = |value| {
            self.refuse(
                name,
                "list_type",
                "Input should be a list of integers",
                value,
            )
        };
        match self.fields.get(name) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(value) => value
                .as_array()
                .and_then(|list| list.iter().map(Value::as_i64).collect())
                .ok_or_else(|| refuse(value)),
        }
    }

    /// One of `allowed`; absent is `default`.
    pub(super) fn one_of(
        &self,
        name: &str,
        allowed: &[&'static str],
        default: &'static str,
    ) -> Result<&'static str, ApiError> {
        let Some(value) = self.fields.get(name) else {
            return Ok(default);
        };
        allowed
            .iter()
            .copied()
            .find(|word| value.as_str() == Some(*word))
            .ok_or_else(|| not_one_of(&self.at(name), allowed, value))
    }
}

fn not_an_integer(location: &[Value], value: &Value) -> ApiError {
    match value {
        Value::String(_) => schema(
            "int_parsing",
            location,
            "Input should be a valid integer, unable to parse string as an integer",
            value,
        ),
        _ => schema(
            "int_type",
            location,
            "Input should be a valid integer",
            value,
        ),
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
        match Body::parse(body.as_bytes()) {
            Err(ApiError::Detail(StatusCode::PAYLOAD_TOO_LARGE, text)) => {
                assert!(text.contains("24 MiB"), "{text}");
            }
            _ => panic!("parsed"),
        }
    }
}
