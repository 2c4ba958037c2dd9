//! Layout and checksum of an object: the trailer of `fs`, in hexadecimal digits, as metadata of the object in the bucket.
//! They are written with the object, in one request, and come back with each answer about it.

use super::http::Response;
use crate::fs::trailer::{self, Trailer};
use crate::object::{ObjectSpec, key_digest};

/// Header of the metadata.
pub(super) const HEADER: &str = "x-amz-meta-kvtier";

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

/// Returns the value of the header for an object with this checksum.
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
    /// Reads the metadata of a response.
    pub(super) fn of(response: &Response<'_>, object: &ObjectSpec) -> Self {
        match response.head.headers.get(HEADER) {
            None => Self::None,
            Some(value) => Self::decode(value.as_bytes(), object),
        }
    }

    fn decode(value: &[u8], object: &ObjectSpec) -> Self {
        let mut bytes = [0; trailer::LEN];
        if hex::decode_to_slice(value, &mut bytes).is_err() {
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
        let value = encode(&one, 7);
        let decode = |value: &str, object: &ObjectSpec| Metadata::decode(value.as_bytes(), object);
        assert_eq!(decode(&value, &one), Metadata::Of(7));
        assert_eq!(decode(&value.to_uppercase(), &one), Metadata::Of(7));
        let mut other = one.clone();
        other.layout ^= 1;
        for object in [other, object(1, 101), object_with(1, 100, "org/model", "b")] {
            assert_eq!(decode(&value, &object), Metadata::Other);
        }
        for bad in [
            "",
            "00",
            &value[2..],
            &value.replace('1', "2"),
            &format!("{value}00"),
        ] {
            assert_eq!(decode(bad, &one), Metadata::Damaged, "{bad}");
        }
    }
}
