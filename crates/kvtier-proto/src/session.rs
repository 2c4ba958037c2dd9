//! The session of an agent that a request is a turn of, inside a key.
//!
//! Two of the key's free-form settings (`request_configs`), which servers that do not know them ignore. A lookup and the stores of its
//! request name the session; the lookup may say what happens to the session's objects when the request ends.

use crate::settings;

/// Name of the setting for the session's name.
pub(crate) const NAME: &str = "kvtier.session";

/// Name of the setting for what happens when the request ends.
pub(crate) const AT_END: &str = "kvtier.session_action";

/// Most bytes of a session's name.
pub const MAX_BYTES: usize = 256;

/// What happens to the objects that only one session needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionAction {
    /// They are evicted before others, until they are used.
    Release,
    /// Those that a tier has leave L1; the others are evicted first.
    Demote,
}

impl SessionAction {
    /// The name in keys and in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Demote => "demote",
        }
    }

    /// The action of a name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Release, Self::Demote]
            .into_iter()
            .find(|action| action.name() == name)
    }
}

/// Whether a session may have this name.
#[must_use]
pub fn is_valid(name: &str) -> bool {
    (1..=MAX_BYTES).contains(&name.len())
}

/// The session among a key's settings, if there is a valid one.
#[must_use]
pub fn decode(settings: Option<&[u8]>) -> Option<&str> {
    settings::find(settings, NAME, |value| value.str()).filter(|name| is_valid(name))
}

/// What happens when the request ends, if a key's settings say it.
#[must_use]
pub fn decode_at_end(settings: Option<&[u8]>) -> Option<SessionAction> {
    settings::find(settings, AT_END, |value| value.str()).and_then(SessionAction::from_name)
}
