//! Whether a lookup is to find nothing, inside a key: `lmcache.skip_load` of a request's parameters.

use crate::{lenient, settings};

/// Whether the setting is there and true, by Python's rules.
#[must_use]
pub fn decode(settings: Option<&[u8]>) -> bool {
    settings::find(settings, "lmcache.skip_load", lenient::bool).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire;

    #[test]
    fn only_what_python_takes_for_true_skips() {
        for (value, expected) in [
            (&[0xc3][..], true),
            (&[1], true),
            (&[0xc2], false),
            (&[0], false),
            (&[0xc0], false),
            (&[0x90], false),
        ] {
            let mut settings = vec![0x81];
            wire::write_str(&mut settings, "lmcache.skip_load");
            settings.extend_from_slice(value);
            assert_eq!(decode(Some(&settings)), expected, "{value:?}");
        }
        assert!(!decode(None) && !decode(Some(&[0x80])));
    }
}
