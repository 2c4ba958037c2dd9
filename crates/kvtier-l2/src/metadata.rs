//! Layout and checksum of an object as text that a backend keeps beside it: the trailer of `fs` in hexadecimal digits.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;

use crate::error::ErrorKind;
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
        match hex::decode_to_slice(text, &mut bytes) {
            Ok(()) => Self::of_trailer(&bytes, object),
            Err(_) => Self::Damaged,
        }
    }

    /// Reads a trailer that a backend has beside an object.
    pub fn of_trailer(bytes: &[u8], object: &ObjectSpec) -> Self {
        match Trailer::decode(bytes).filter(|_| bytes.len() == trailer::LEN) {
            None => Self::Damaged,
            Some(found) if found.is_of(object, key_digest(&object.key)) => Self::Of(found.data),
            Some(_) => Self::Other,
        }
    }
}

/// Adds one to a counter.
pub fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Counters since the start of objects that a backend has without the metadata that was asked for.
#[derive(Debug, Default)]
pub struct MetadataCounters {
    /// Objects loaded without a checksum.
    pub unverified: AtomicU64,
    /// Damaged objects.
    pub corrupt: AtomicU64,
    /// Loads of objects of another layout.
    pub other_layout: AtomicU64,
    /// Objects without a layout that were not accepted.
    pub no_layout: AtomicU64,
}

impl MetadataCounters {
    /// Whether an object can be loaded; without metadata it cannot if it `needs_layout`.
    pub fn is_loadable(&self, metadata: Metadata, needs_layout: bool) -> bool {
        match metadata {
            Metadata::Of(_) => true,
            Metadata::None if needs_layout => {
                count(&self.no_layout);
                false
            }
            Metadata::None => true,
            Metadata::Other | Metadata::Damaged => false,
        }
    }

    /// Returns the checksum that a loaded object has to have; `None` if it has no metadata and needs none.
    ///
    /// # Errors
    /// Why it is not loaded.
    pub fn expected_sum(
        &self,
        metadata: Metadata,
        needs_layout: bool,
    ) -> Result<Option<u128>, (ErrorKind, &'static str)> {
        let (counter, kind, what) = match metadata {
            Metadata::Of(sum) => return Ok(Some(sum)),
            Metadata::None if !needs_layout => return Ok(None),
            Metadata::None => (
                &self.no_layout,
                ErrorKind::NotFound,
                "load: the object has no layout",
            ),
            Metadata::Other => (
                &self.other_layout,
                ErrorKind::NotFound,
                "load: the object is of another layout",
            ),
            Metadata::Damaged => (
                &self.corrupt,
                ErrorKind::Corrupt,
                "load: the metadata of the object is damaged",
            ),
        };
        count(counter);
        Err((kind, what))
    }

    /// Adds the counters to a backend's part of `/status`.
    pub fn show(&self, status: &mut Value) {
        for (name, counter) in [
            ("unverified_loads", &self.unverified),
            ("corrupt_objects", &self.corrupt),
            ("other_layout_loads", &self.other_layout),
            ("missing_layout_lookups", &self.no_layout),
        ] {
            status[name] = counter.load(Ordering::Relaxed).into();
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

    #[test]
    fn loads_and_lookups_agree_and_are_counted() {
        let counters = MetadataCounters::default();
        for (metadata, needs_layout, expected) in [
            (Metadata::Of(7), true, Ok(Some(7))),
            (Metadata::None, false, Ok(None)),
            (Metadata::None, true, Err(ErrorKind::NotFound)),
            (Metadata::Other, false, Err(ErrorKind::NotFound)),
            (Metadata::Damaged, false, Err(ErrorKind::Corrupt)),
        ] {
            let sum = counters.expected_sum(metadata, needs_layout);
            assert_eq!(sum.map_err(|(kind, _)| kind), expected);
            let is_loadable = counters.is_loadable(metadata, needs_layout);
            assert_eq!(is_loadable, expected.is_ok());
        }
        let mut status = serde_json::json!({});
        counters.show(&mut status);
        let expected = serde_json::json!({
            "unverified_loads": 0,
            "corrupt_objects": 1,
            "other_layout_loads": 1,
            "missing_layout_lookups": 2,
        });
        assert_eq!(status, expected);
    }
}
