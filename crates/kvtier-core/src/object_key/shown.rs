//! Tenants in log lines and error texts: a short hash stands for the salt, which may be a secret.

use std::borrow::Cow;
use std::fmt;

/// Hex digits from which on a field of a name is a chunk's hash; numbers have fewer.
const HASH_DIGITS: usize = 16;

/// A salt that may be printed anywhere: as `~` and eight hex digits of its BLAKE3, `_default` for none.
///
/// Equal salts look the same in every server, so lines can be compared; a salt can be found only by guessing it.
#[derive(Clone, Copy, Debug)]
pub struct ShownSalt<'a>(pub &'a str);

impl fmt::Display for ShownSalt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("_default");
        }
        let hash = blake3::hash(self.0.as_bytes());
        write!(f, "~{}", &hash.to_hex()[..8])
    }
}

/// The path of an object's file, of whatever shape, with its salt as [`ShownSalt`] prints it. Other texts stay.
pub fn shown_path(name: &str) -> Cow<'_, str> {
    let is_hash = |field: &str| {
        field.len() >= HASH_DIGITS && field.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let Some((front, last)) = name.rsplit_once('@') else {
        return name.into();
    };
    let before = front.rsplit_once('@').map_or(front, |(_, before)| before);
    if !is_hash(before) {
        return name.into();
    }
    let (salt, extension) = match last.strip_suffix(".data") {
        Some(salt) => (salt, ".data"),
        None => (last, ""),
    };
    format!("{front}@{}{extension}", ShownSalt(salt)).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ChunkHash;
    use crate::object_key::{KeyShape, ObjectKey};

    #[test]
    fn names_of_every_shape_hide_only_the_salt() {
        for salt in ["acme", "ünïcode", "..", "x.data", "0123456789abcdef"] {
            let key = ObjectKey::new(ChunkHash([0xab; 32]), "m/x", 0x0101_0101, 3, salt).unwrap();
            let hidden = ShownSalt(salt).to_string();
            assert_eq!(hidden.len(), 9);
            for shape in [KeyShape::Grouped, KeyShape::Ungrouped] {
                let file = key.text().file_name(shape);
                let front = file.strip_suffix(&format!("@{salt}.data")).unwrap();
                let expected = format!("{front}@{hidden}.data");
                assert_eq!(shown_path(&file), expected);
                assert_eq!(
                    shown_path(&format!("ab/ab/{file}")),
                    format!("ab/ab/{expected}")
                );
            }
            let name = key.text().name(KeyShape::Grouped);
            let front = name.strip_suffix(salt).unwrap();
            assert_eq!(key.text().shown(), format!("{front}{hidden}"));
        }
    }

    #[test]
    fn names_without_a_salt_and_other_texts_stay() {
        let key = ObjectKey::new(ChunkHash([0xab; 32]), "m", 0x0101_0101, 0, "").unwrap();
        let texts =
            [KeyShape::Grouped, KeyShape::Ungrouped].map(|shape| key.text().file_name(shape));
        for text in texts
            .iter()
            .map(String::as_str)
            .chain(["", "ab/cd", "a@b", ".kvtier-tmp-1"])
        {
            assert_eq!(shown_path(text), text);
        }
        assert_eq!(ShownSalt("").to_string(), "_default");
    }
}
