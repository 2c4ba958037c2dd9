//! The trace that a request belongs to, inside a key.
//!
//! Its client may name its own span, as W3C Trace Context writes it, in one of the key's free-form settings
//! (`request_configs`), which servers that do not know it ignore.

use crate::settings;

/// Name of the setting.
pub(crate) const NAME: &str = "traceparent";

/// Most bytes of a value; today's have 55.
pub(crate) const MAX_BYTES: usize = 256;

/// The span among a key's settings, if one is named. It is not checked.
#[must_use]
pub fn decode(settings: Option<&[u8]>) -> Option<&str> {
    settings::find(settings, NAME, |value| value.str()).filter(|text| text.len() <= MAX_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_settings::KeySettings;
    use crate::wire;

    fn encode(traceparent: &str) -> Option<Vec<u8>> {
        let settings = KeySettings {
            traceparent: Some(traceparent),
            ..KeySettings::default()
        };
        settings.encode()
    }

    #[test]
    fn a_span_is_read_as_it_was_written() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(decode(encode(text).as_deref()), Some(text));
        assert_eq!(encode(&"0".repeat(MAX_BYTES + 1)), None);
    }

    #[test]
    fn other_settings_are_no_span() {
        let mut others = Vec::new();
        wire::write_map_len(&mut others, 2);
        wire::write_str(&mut others, "lmcache.priority");
        wire::write_uint(&mut others, 3);
        wire::write_str(&mut others, NAME);
        wire::write_uint(&mut others, 3);
        let long = "0".repeat(MAX_BYTES + 1);
        let mut too_long = Vec::new();
        wire::write_map_len(&mut too_long, 1);
        wire::write_str(&mut too_long, NAME);
        wire::write_str(&mut too_long, &long);
        for settings in [None, Some(&others[..]), Some(&[0xc1][..]), Some(&too_long)] {
            assert_eq!(decode(settings), None, "{settings:?}");
        }
    }
}
