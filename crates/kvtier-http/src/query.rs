//! Query strings.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use axum::http::StatusCode;

use super::body::not_allowed;
use super::{ApiError, detail};

/// The parameters of a request, read by name; unknown ones are ignored.
pub(super) struct Query(pub HashMap<String, String>);

fn refused(name: &str, value: &str, allowed: &str) -> ApiError {
    let text = not_allowed(name, &format!("{value:?}"), allowed);
    detail(StatusCode::UNPROCESSABLE_ENTITY, text)
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
        let number = text.trim().parse().ok();
        number
            .filter(|number| allowed.contains(number))
            .ok_or_else(|| {
                let allowed = format!("an integer from {} to {}", allowed.start(), allowed.end());
                refused(name, text, &allowed)
            })
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
        found.ok_or_else(|| refused(name, text, &allowed.join(", ")))
    }
}
