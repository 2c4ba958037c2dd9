//! Texts of warnings about clients whose release is not served: what they sent, and what to install.

use kvtier_proto::generation::{Generation, OperationSpec, Unresolved, served_releases};
use kvtier_proto::request::UnknownField;
use kvtier_proto::wire::DecodeError;

/// Page that lists the served releases.
const PAGE: &str = "docs/clients.md";

/// A field of keys that 0.4.1 sends; all else it sends is as of 0.4.2.
const CHUNK_HASH: &str = "chunk_hash";

/// A request that no table knows; `None` if it is of no client of LMCache.
pub fn unresolved(error: &Unresolved) -> Option<String> {
    match error {
        Unresolved::BadOperation(_) => None,
        Unresolved::TooOld { releases } => Some(format!(
            "a client of LMCache {releases} was refused, and its engine does not start; install lmcache {}: {PAGE}",
            served_releases()
        )),
        Unresolved::UnknownOperation { id, .. } => {
            Some(unknown(&format!("operation {id}"), "it was refused"))
        }
        Unresolved::PayloadCount { id, found, .. } => {
            let what = format!("operation {id} with {found} payloads");
            Some(unknown(&what, "it was refused"))
        }
    }
}

fn unknown(what: &str, outcome: &str) -> String {
    format!(
        "a client sent {what}, which no served release of LMCache sends; {outcome}. Served are {}: {PAGE}",
        served_releases()
    )
}

/// A request whose payloads cannot be decoded.
pub fn undecodable(spec: &OperationSpec, error: &DecodeError) -> String {
    format!(
        "a client sent operation {} that cannot be decoded ({error}), and was refused; if its release of LMCache is none of {}, \
         install one of those: {PAGE}",
        spec.operation.name(),
        served_releases()
    )
}

/// A request with a field of a map that is not known, which is ignored.
pub fn unknown_field(spec: &OperationSpec, field: UnknownField<'_>) -> String {
    let UnknownField { payload, name } = field;
    let operation = spec.operation.name();
    let what = format!("field {name:?} in {payload} of operation {operation}");
    unknown(&what, "the field was ignored")
}

/// Whether a request with this unknown field is of 0.4.1.
pub fn is_of_0_4_1(generation: Generation, field: UnknownField<'_>) -> bool {
    generation == Generation::G1 && field.name == CHUNK_HASH
}

/// A client of 0.4.1.
pub fn client_of_0_4_1() -> String {
    format!(
        "a client of LMCache 0.4.1 connected and has no hits: it never pings, so it would not learn of a failed load; \
         install lmcache {}: {PAGE}",
        served_releases()
    )
}
