//! Metadata of an object in the bucket. It is written with the object, in one request, and comes back with each answer about
//! it.

use super::http::Response;
pub(super) use crate::metadata::{Metadata, encode};
use crate::object::ObjectSpec;

/// Header of the metadata.
pub(super) const HEADER: &str = "x-amz-meta-kvtier";

/// Reads the metadata of a response.
pub(super) fn of(response: &Response<'_>, object: &ObjectSpec) -> Metadata {
    match response.head.headers.get(HEADER) {
        None => Metadata::None,
        Some(value) => Metadata::decode(value.as_bytes(), object),
    }
}
