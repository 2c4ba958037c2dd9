//! JSON bodies as the types of their routes. Each type bounds the memory that it takes.

use axum::http::StatusCode;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error as _};

use super::{ApiError, detail};

/// Longest text from a client that an error repeats, characters.
const CLIP: usize = 128;

/// Parses a body that may be absent.
pub(super) fn optional<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    match bytes.trim_ascii() {
        b"" | b"null" => required(b"{}"),
        bytes => required(bytes),
    }
}

/// Parses a body that must be there.
pub(super) fn required<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let refused = |text: String| detail(StatusCode::UNPROCESSABLE_ENTITY, text);
    let bytes = bytes.trim_ascii();
    // A list of the values of its fields would be one to serde.
    if !bytes.starts_with(b"{") {
        return Err(refused("the body is no JSON object".into()));
    }
    if let Ok(body) = serde_json::from_slice(bytes) {
        return Ok(body);
    }
    // Again for the place of the error, which takes several times as long to find.
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(&mut reader)
        .map_err(|error| refusal(&error.path().to_string(), error.inner()))
        .and_then(|body| match reader.end() {
            Ok(()) => Ok(body),
            Err(error) => Err(refusal("", &error)),
        })
        .map_err(refused)
}

/// Text for a field whose value is not allowed: the field, the value, and what is allowed.
fn refusal(field: &str, error: &serde_json::Error) -> String {
    let text = text_of(error);
    if !error.is_data() {
        return text;
    }
    let field = if field == "." { "body" } else { field };
    match text.rsplit_once(", expected ") {
        Some((value, allowed)) => not_allowed(field, value, allowed),
        None => format!("{field}: {}", shorten(&text)),
    }
}

/// The text of an error; where it is in the body only if that is not JSON.
pub(super) fn text_of(error: &serde_json::Error) -> String {
    let text = error.to_string();
    if !error.is_data() {
        return format!("the body is not JSON: {text}");
    }
    match text.rsplit_once(" at line ") {
        Some((text, _)) => text.to_owned(),
        None => text,
    }
}

/// The error text for a value that is not allowed.
pub(super) fn not_allowed(field: &str, value: &str, allowed: &str) -> String {
    let allowed = match allowed {
        "i64" | "u64" => "an integer",
        "u32" => "an integer from 0 to 4294967295",
        allowed => allowed,
    };
    format!("{field}: {}; allowed: {allowed}", shorten(value))
}

/// A text from a client, shortened for an error.
pub(super) fn shorten(text: &str) -> String {
    match text.char_indices().nth(CLIP) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

/// A tier in a request: `l1`, `l2` or `all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TierName(pub &'static str);

impl TierName {
    /// All of them.
    pub(super) const ALL: [&str; 3] = ["l1", "l2", "all"];

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
        let name = String::deserialize(reader)?;
        let tier = Self::ALL.into_iter().find(|tier| name == *tier);
        let allowed = Self::ALL.join(", ");
        tier.map(Self)
            .ok_or_else(|| D::Error::custom(format_args!("{name:?}, expected {allowed}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only read")]
    struct Body {
        #[serde(default)]
        list: Vec<u32>,
        tier: Option<TierName>,
    }

    fn told(bytes: &[u8]) -> String {
        match optional::<Body>(bytes) {
            Err(ApiError::Detail(StatusCode::UNPROCESSABLE_ENTITY, text)) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn refusals_name_field_value_and_what_is_allowed() {
        for (body, text) in [
            (
                r#"{"list": [1, -1]}"#,
                "list[1]: invalid value: integer `-1`; allowed: an integer from 0 to 4294967295",
            ),
            (
                r#"{"list": 7}"#,
                "list: invalid type: integer `7`; allowed: a sequence",
            ),
            (
                r#"{"tier": 7}"#,
                "tier: invalid type: integer `7`; allowed: a string",
            ),
            (r#"{"tier": "l9"}"#, "tier: \"l9\"; allowed: l1, l2, all"),
            ("[]", "the body is no JSON object"),
            (
                "{\"list\": [1",
                "the body is not JSON: EOF while parsing a list",
            ),
            ("{} x", "the body is not JSON: trailing characters"),
        ] {
            let told = told(body.as_bytes());
            assert!(told.starts_with(text), "{body}: {told}");
        }
    }

    #[test]
    fn long_inputs_are_not_repeated_whole() {
        let body = format!("{{\"list\": \"{}\"}}", "x".repeat(1 << 20));
        let told = told(body.as_bytes());
        assert!(told.len() < 300 && told.contains("; allowed: "), "{told}");
    }
}
