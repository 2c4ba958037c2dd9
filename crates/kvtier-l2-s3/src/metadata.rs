//! Metadata of an object in the bucket. It is written with the object, in one request, and comes back with each answer about
//! it.

use super::http::Response;
use kvtier_l2::ObjectSpec;
pub(super) use kvtier_l2::metadata::{Metadata, MetadataCounters, count, encode};

/// Header of the metadata.
pub(super) const HEADER: &str = "x-amz-meta-kvtier";

/// Reads the metadata of a response.
pub(super) fn of(response: &Response<'_>, object: &ObjectSpec) -> Metadata {
    match response.head.headers.get(HEADER) {
        None => Metadata::None,
        Some(value) => Metadata::decode(value.as_bytes(), object),
    }
}
