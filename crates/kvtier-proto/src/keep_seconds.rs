//! How long the objects of a request are to be kept, inside a key.
//!
//! It is one of the key's free-form settings (`request_configs`), which servers that do not know it ignore. Of a store it is for
//! what the store writes and for what is there already; of a lookup, for what it finds:
//!
//! | value | meaning |
//! | --- | --- |
//! | 1 to [`MAX`] | it is pinned for this number of seconds from the end of the store, or from the lookup on |
//! | 0 | what is written is evicted before other objects, until it is used |

use crate::settings;

/// Name of the setting.
pub(crate) const NAME: &str = "kvtier.keep_seconds";

/// Most seconds: one day.
pub const MAX: u32 = 86_400;

/// The seconds among a key's settings, if there is a valid number.
#[must_use]
pub fn decode(settings: Option<&[u8]>) -> Option<u32> {
    settings::find(settings, NAME, |value| value.int::<u32>()).filter(|seconds| *seconds <= MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_settings::KeySettings;
    use crate::wire;

    #[test]
    fn seconds_are_read_as_they_were_written() {
        for seconds in [0, 1, MAX] {
            let settings = KeySettings {
                keep_seconds: Some(seconds),
                ..KeySettings::default()
            };
            assert_eq!(decode(settings.encode().as_deref()), Some(seconds));
        }
    }

    #[test]
    fn hostile_values_are_no_seconds() {
        let with = |write: &dyn Fn(&mut Vec<u8>)| {
            let mut settings = Vec::new();
            wire::write_map_len(&mut settings, 1);
            wire::write_str(&mut settings, NAME);
            write(&mut settings);
            settings
        };
        for settings in [
            with(&|out| wire::write_uint(out, u64::from(MAX) + 1)),
            with(&|out| wire::write_uint(out, u64::MAX)),
            with(&|out| wire::write_int(out, -1)),
            with(&|out| wire::write_str(out, "60")),
            with(&|out| out.push(0xc3)),
            with(&|out| out.push(0xc0)),
            with(&|_| {}),
            vec![0xc1],
        ] {
            assert_eq!(decode(Some(&settings)), None, "{settings:?}");
        }
        assert_eq!(decode(None), None);
    }
}
