//! Layout and checksum of an object as text that a backend keeps beside it: the trailer of `fs` in hexadecimal digits.

use crate::object::{ObjectSpec, key_digest};
use crate::trailer::{self, Trailer};

/// What is known of a stored object beside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metadata {
    /// Nothing.
    None,
    /// The checksum of its bytes.
    Of(u128),
    /// Metadata of another layout, or of another object.
    Other,
    /// Damaged metadata.
    Damaged,
}

/// Returns the metadata of an object with this checksum.
pub fn encode(object: &ObjectSpec, sum: u128) -> String {
    hex::encode(Trailer::new(object, sum).encode())
}

impl Metadata {
    /// Reads what a backend has beside an object.
    pub fn decode(text: &[u8], object: &ObjectSpec) -> Self {
        let mut bytes = [0; trailer::LEN];
        if hex::decode_to_slice(text, &mut bytes).is_err() {
            return Self::Damaged;
        }
        match Trailer::decode(&bytes) {
            None => Self::Damaged,
            Some(found) if found.is_of(object, key_digest(&object.key)) => Self::Of(found.data),
            Some(_) => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{object, object_with};

    #[test]
    fn metadata_is_of_one_object_and_layout() {
        let one = object(1, 100);
        let text = encode(&one, 7);
        assert_eq!(text.len(), 128);
        let decode = |text: &str, object: &ObjectSpec| Metadata::decode(text.as_bytes(), object);
        assert_eq!(decode(&text, &one), Metadata::Of(7));
        assert_eq!(decode(&text.to_uppercase(), &one), Metadata::Of(7));
        let mut other = one.clone();
        other.layout ^= 1;
        for object in [other, object(1, 101), object_with(1, 100, "org/model", "b")] {
            assert_eq!(decode(&text, &object), Metadata::Other);
        }
        for bad in [
            "",
            "00",
            &text[2..],
            &text.replace('1', "2"),
            &format!("{text}00"),
            "ü",
        ] {
            assert_eq!(decode(bad, &one), Metadata::Damaged, "{bad}");
        }
    }
}
