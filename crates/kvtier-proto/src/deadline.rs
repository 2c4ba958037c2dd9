//! A deadline inside a key: when whoever asked has given up.
//!
//! A transfer that begins, or ends, after that touches pages that the engine may have given to others. The deadline is
//! one of the key's free-form settings (`request_configs`), which servers that do not know it ignore. It is told in
//! milliseconds of Unix time: where a server copies an engine's pages, both have the same clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::wire::{self, Reader};

/// Name of the setting.
const NAME: &str = "kvtier.deadline_ms";

/// The settings of a key with this deadline alone.
#[must_use]
pub fn encode(deadline: SystemTime) -> Vec<u8> {
    let since = deadline.duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut settings = Vec::new();
    wire::write_map_len(&mut settings, 1);
    wire::write_str(&mut settings, NAME);
    wire::write_uint(&mut settings, since.as_millis() as u64);
    settings
}

/// The deadline among a key's settings, if there is one that makes sense.
#[must_use]
pub fn decode(settings: Option<&[u8]>) -> Option<SystemTime> {
    let mut millis = None;
    Reader::new(settings?)
        .map(|name, value| {
            if name == NAME {
                millis = Some(value.int::<u64>()?);
                Ok(())
            } else {
                value.skip()
            }
        })
        .ok()?;
    UNIX_EPOCH.checked_add(Duration::from_millis(millis?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_read_as_it_was_written() {
        let deadline = UNIX_EPOCH + Duration::from_millis(1_790_000_000_123);
        assert_eq!(decode(Some(&encode(deadline))), Some(deadline));
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
