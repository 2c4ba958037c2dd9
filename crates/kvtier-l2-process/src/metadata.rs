//! Metadata of an object in the answers of a tier.

use kvtier_l2::ObjectSpec;
pub(super) use kvtier_l2::metadata::{Metadata, MetadataCounters, count, encode};

/// Reads what a tier returned for an object.
pub(super) fn of(text: Option<&str>, object: &ObjectSpec) -> Metadata {
    match text {
        None | Some("") => Metadata::None,
        Some(text) => Metadata::decode(text.as_bytes(), object),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtier_l2::conformance::object;

    #[test]
    fn text_may_be_absent() {
        let one = object(1, 100);
        for none in [None, Some("")] {
            assert_eq!(of(none, &one), Metadata::None);
        }
        assert_eq!(of(Some(&encode(&one, 7)), &one), Metadata::Of(7));
        assert_eq!(of(Some("00"), &one), Metadata::Damaged);
    }
}
