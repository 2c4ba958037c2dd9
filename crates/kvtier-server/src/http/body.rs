//! JSON bodies, refused in the shape LMCache's API refuses them.

use serde_json::{Map, Value, json};

use super::ApiError;

/// A request body: a JSON object whose fields are read by name; unknown ones are ignored.
pub(super) struct Body(Map<String, Value>);

fn schema(kind: &str, location: &[Value], message: &str, input: &Value) -> ApiError {
    ApiError::Schema(json!([{ "type": kind, "loc": location, "msg": message, "input": input }]))
}

impl Body {
    /// Parses the bytes of a body. Nothing at all is an empty object.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        if bytes.is_empty() {
            return Ok(Self(Map::new()));
        }
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(Value::Null) => Ok(Self(Map::new())),
            Ok(other) => Err(schema(
                "dict_type",
                &["body".into()],
                "Input should be a JSON object",
                &other,
            )),
            Err(error) => {
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

    fn refuse(name: &str, kind: &str, message: &str, value: &Value) -> ApiError {
        schema(kind, &["body".into(), name.into()], message, value)
    }

    /// A truth value; absent or null is `default`.
    pub(super) fn bool(&self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(value) => Err(Self::refuse(
                name,
                "bool_parsing",
                "Input should be true or false",
                value,
            )),
        }
    }

    /// An integer; absent or null is `default`.
    pub(super) fn int(&self, name: &str, default: i64) -> Result<i64, ApiError> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => value.as_i64().ok_or_else(|| {
                Self::refuse(name, "int_type", "Input should be a valid integer", value)
            }),
        }
    }

    /// A list of integers; absent or null is empty.
    pub(super) fn ints(&self, name: &str) -> Result<Vec<i64>, ApiError> {
        let refuse = |value| {
            Self::refuse(
                name,
                "list_type",
                "Input should be a list of integers",
                value,
            )
        };
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(value) => value
                .as_array()
                .and_then(|list| list.iter().map(Value::as_i64).collect())
                .ok_or_else(|| refuse(value)),
        }
    }

    /// One of `allowed`; absent is the first of them.
    pub(super) fn one_of(
        &self,
        name: &str,
        allowed: &[&'static str],
    ) -> Result<&'static str, ApiError> {
        let Some(value) = self.0.get(name) else {
            return Ok(allowed[0]);
        };
        allowed
            .iter()
            .copied()
            .find(|word| value.as_str() == Some(*word))
            .ok_or_else(|| {
                let quoted: Vec<_> = allowed.iter().map(|word| format!("'{word}'")).collect();
                let expected = match quoted.split_last() {
                    Some((last, first)) if !first.is_empty() => {
                        format!("{} or {last}", first.join(", "))
                    }
                    _ => quoted.concat(),
                };
                ApiError::Schema(json!([{
                    "type": "enum",
                    "loc": ["body", name],
                    "msg": format!("Input should be {expected}"),
                    "input": value,
                    "ctx": { "expected": expected },
                }]))
            })
    }
}
