//! Errors of configurations.

use std::fmt;

use serde_json::Value;

use crate::redact;

/// Refusal of a configuration: one line that names the key, its value and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

/// Longest value, in characters, that an error repeats.
const SHOWN: usize = 120;

impl ConfigError {
    /// Returns an error with this line. Line ends, which values may contain, become spaces, and secrets are redacted.
    pub fn new(line: impl Into<String>) -> Self {
        let line: String = line.into();
        Self(redact::text(&line.replace(['\n', '\r'], " ")))
    }

    /// Returns the error for a value of `key` of `owner`; `allowed` follows the word "give".
    pub fn value(owner: &str, key: &str, value: &Value, allowed: impl fmt::Display) -> Self {
        Self::new(format!(
            "{owner}: key {key:?}: {} is not allowed; give {allowed}",
            clip(&redact::value(value).to_string())
        ))
    }
}

/// Returns the beginning of `text`.
pub(crate) fn clip(text: &str) -> String {
    clip_to(text, SHOWN)
}

/// Returns the first `chars` characters of `text`.
pub(crate) fn clip_to(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
