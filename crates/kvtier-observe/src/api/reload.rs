//! Answer of `POST /config/reload`.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// What a reload has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Reloaded {
    /// Flags with another value. Empty if the file has not changed, or if there is none.
    pub changed: Vec<ChangedFlag>,
    /// What was read again from other files, such as `the tokens of HTTP`.
    pub checked: Vec<String>,
}

/// A flag with another value; secrets are hidden.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ChangedFlag {
    /// Without the dashes in front.
    pub flag: String,
    /// Value before; null without one.
    pub from: Value,
    /// Value from here on.
    pub to: Value,
}
