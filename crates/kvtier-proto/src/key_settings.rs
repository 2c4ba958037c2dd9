//! The settings of a key that a client of kvtier's own may add, in one map.

use std::time::Duration;

use crate::session::{self, SessionAction};
use crate::{deadline, keep_seconds, peer, traceparent, wire};

/// Each is left out if it is `None`; a server ignores those that it does not know.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeySettings<'a> {
    /// See [`deadline`]; in the time of the monotonic clock.
    pub deadline: Option<Duration>,
    /// See [`keep_seconds`].
    pub keep_seconds: Option<u32>,
    /// See [`peer`]; left out if it is too long to be read.
    pub peer: Option<&'a str>,
    /// See [`session`]; left out if no session may have the name.
    pub session: Option<&'a str>,
    /// What happens to the session's objects when the request ends.
    pub session_action: Option<SessionAction>,
    /// See [`traceparent`]; left out if it is too long to be read.
    pub traceparent: Option<&'a str>,
}

impl KeySettings<'_> {
    /// Encodes the settings for a key; `None` without any.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        let Self {
            deadline,
            keep_seconds,
            peer,
            session,
            session_action,
            traceparent,
        } = *self;
        let peer = peer.filter(|host| host.len() <= peer::MAX_BYTES);
        let session = session.filter(|name| session::is_valid(name));
        let traceparent = traceparent.filter(|text| text.len() <= traceparent::MAX_BYTES);
        let texts = [
            (peer::NAME, peer),
            (session::NAME, session),
            (session::AT_END, session_action.map(SessionAction::name)),
            (traceparent::NAME, traceparent),
        ];
        let texts = texts
            .into_iter()
            .filter_map(|(name, text)| Some((name, text?)));
        let len = usize::from(deadline.is_some())
            + usize::from(keep_seconds.is_some())
            + texts.clone().count();
        if len == 0 {
            return None;
        }
        let mut out = Vec::new();
        wire::write_map_len(&mut out, len);
        if let Some(deadline) = deadline {
            wire::write_str(&mut out, deadline::NAME);
            let millis = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
            wire::write_uint(&mut out, millis);
        }
        if let Some(seconds) = keep_seconds {
            wire::write_str(&mut out, keep_seconds::NAME);
            wire::write_uint(&mut out, seconds.into());
        }
        for (name, text) in texts {
            wire::write_str(&mut out, name);
            wire::write_str(&mut out, text);
        }
        Some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_beside_each_other() {
        let all = KeySettings {
            deadline: Some(Duration::from_millis(1_790_000_000_123)),
            keep_seconds: Some(60),
            peer: Some("host.example"),
            session: Some("agent 7"),
            session_action: Some(SessionAction::Demote),
            traceparent: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        };
        let encoded = all.encode();
        let read = KeySettings {
            deadline: deadline::decode(encoded.as_deref()),
            keep_seconds: keep_seconds::decode(encoded.as_deref()),
            peer: peer::decode(encoded.as_deref()),
            session: session::decode(encoded.as_deref()),
            session_action: session::decode_at_end(encoded.as_deref()),
            traceparent: traceparent::decode(encoded.as_deref()),
        };
        assert_eq!(read, all);
        assert_eq!(KeySettings::default().encode(), None);
        let long = "a".repeat(peer::MAX_BYTES + 1);
        let settings = KeySettings {
            peer: Some(&long),
            session: Some(&long),
            ..KeySettings::default()
        };
        assert_eq!(settings.encode(), None);
    }
}
