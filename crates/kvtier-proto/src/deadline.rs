//! A deadline inside a key: when its client times out.
//!
//! A transfer that begins, or ends, after that touches pages that the engine may have given to others. The deadline is
//! one of the key's free-form settings (`request_configs`), which servers that do not know it ignore. It is in milliseconds
//! of the system's monotonic clock (`CLOCK_MONOTONIC`), which is never set: where a server copies an
//! engine's pages, both are on one system, and their containers share that clock unless one has a time namespace.

use std::time::Duration;

use crate::settings;

/// Name of the setting.
pub(crate) const NAME: &str = "kvtier.deadline_monotonic_ms";

/// The deadline among a key's settings, if there is a valid one.
#[must_use]
pub fn decode(settings: Option<&[u8]>) -> Option<Duration> {
    settings::find(settings, NAME, |value| value.int::<u64>()).map(Duration::from_millis)
}

/// The deadline in the time of the monotonic clock, `now`, that is `left` away by another clock. They are asked in this
/// order: a pause between the two makes the deadline earlier, never later.
pub fn from_left(now: impl FnOnce() -> Duration, left: impl FnOnce() -> Duration) -> Duration {
    let now = now();
    now.saturating_add(left())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_settings::KeySettings;
    use crate::wire;

    #[test]
    fn a_deadline_is_read_as_it_was_written() {
        let settings = KeySettings {
            deadline: Some(Duration::from_millis(1_790_000_000_123)),
            ..KeySettings::default()
        };
        let read = decode(settings.encode().as_deref());
        assert_eq!(read, settings.deadline);
    }

    #[test]
    fn pause_between_clocks_makes_deadline_earlier() {
        // Both clocks show this, and each look at one is followed by a pause of 3 s.
        let time = std::cell::Cell::new(Duration::from_secs(10));
        let look = || time.replace(time.get() + Duration::from_secs(3));
        let deadline = Duration::from_secs(20);
        assert_eq!(
            from_left(look, || deadline - look()),
            Duration::from_secs(17)
        );
    }

    #[test]
    fn other_settings_are_no_deadline() {
        let mut others = Vec::new();
        wire::write_map_len(&mut others, 2);
        wire::write_str(&mut others, "lmcache.priority");
        wire::write_uint(&mut others, 3);
        wire::write_str(&mut others, NAME);
        wire::write_str(&mut others, "soon");
        for settings in [
            None,
            Some(&others[..]),
            Some(&[0xc1][..]),
            Some(&[0x80][..]),
        ] {
            assert_eq!(decode(settings), None, "{settings:?}");
        }
    }
}
