//! A key's free-form settings (`request_configs`): a map from names to values of any type. Those of kvtier's clients are
//! [`crate::key_settings`].

use crate::wire::{DecodeError, Reader};

/// The value of one setting, the last of that name; `None` if there is none, or if the settings or the value are malformed.
pub(crate) fn find<'a, T>(
    settings: Option<&'a [u8]>,
    name: &str,
    read_value: impl Fn(&mut Reader<'a>) -> Result<T, DecodeError>,
) -> Option<T> {
    let mut found = None;
    Reader::new(settings?)
        .map(|key, value| {
            if key == name {
                found = Some(read_value(value)?);
                Ok(())
            } else {
                value.skip()
            }
        })
        .ok()?;
    found
}
