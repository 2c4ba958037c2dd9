//! Layout and checksum of an object as text that a tier keeps beside it: the trailer of `fs` in hexadecimal digits.

use crate::fs::trailer::{self, Trailer};
use crate::object::{ObjectSpec, key_digest};

/// What is known of a stored object beside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Metadata {
    /// Nothing.
    None,
    /// The checksum of its bytes.
    Of(u128),
    /// It belongs to another layout, or to another object.
    Other,
    /// It is damaged.
    Damaged,
}

/// Returns the metadata of an object with this checksum.
pub(super) fn encode(object: &ObjectSpec, sum: u128) -> String {
    let trailer = Trailer {
        version: trailer::VERSION,
        text_len: 0,
        len: object.len,
        layout: object.layout,
        key: key_digest(&object.key),
        data: sum,
    };
    hex::encode(trailer.encode())
}

impl Metadata {
    /// Reads what a tier returned for an object.
    pub(super) fn decode(text: Option<&str>, object: &ObjectSpec) -> Self {
        let Some(text) = text.filter(|text| !text.is_empty()) else {
            return Self::None;
        };
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
        assert_eq!(Metadata::decode(Some(&text), &one), Metadata::Of(7));
        let other = ObjectSpec {
            layout: one.layout ^ 1,
            ..one.clone()
        };
        for object in [other, object(1, 101), object_with(1, 100, "org/model", "b")] {
            assert_eq!(Metadata::decode(Some(&text), &object), Metadata::Other);
        }
        for none in [None, Some("")] {
            assert_eq!(Metadata::decode(none, &one), Metadata::None);
        }
        for bad in ["00", &text[2..], &text.replace('1', "2"), "ü"] {
            assert_eq!(Metadata::decode(Some(bad), &one), Metadata::Damaged);
        }
    }
}
