//! The peer that is likely to have a prompt, inside a key.
//!
//! A router knows it. It is one of the key's free-form settings (`request_configs`), which servers that do not know it ignore.

use crate::settings;

/// Name of the setting.
pub(crate) const NAME: &str = "kvtier.peer";

/// Most bytes of a value, a host's name or address.
pub(crate) const MAX_BYTES: usize = 256;

/// The host among a key's settings, if one is named. It is not checked.
#[must_use]
pub fn decode(settings: Option<&[u8]>) -> Option<&str> {
    settings::find(settings, NAME, |value| value.str()).filter(|host| host.len() <= MAX_BYTES)
}
