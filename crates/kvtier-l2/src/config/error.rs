//! Why a configuration is refused.

use std::fmt;

use serde_json::Value;

use crate::redact;

/// Why a configuration was refused: one line that names the key, its value and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

/// Most characters of a value that an error repeats.
const SHOWN: usize = 120;

impl ConfigError {
    /// An error with this line. Line ends, which may come from what was given, become spaces, and secrets are hidden.
    pub fn new(line: impl Into<String>) -> Self {
        let line: String = line.into();
        Self(redact::text(&line.replace(['\n', '\r'], " ")))
    }

    /// Key `key` of `owner` cannot be `value`; `allowed` ends the sentence that begins with "give".
    pub fn value(owner: &str, key: &str, value: &Value, allowed: impl fmt::Display) -> Self {
        Self::new(format!(
            "{owner}: key {key:?}: {} is not allowed; give {allowed}",
            clip(&redact::value(value).to_string())
        ))
    }
}

/// The beginning of `text`, which whoever wrote it will recognise.
pub(crate) fn clip(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
