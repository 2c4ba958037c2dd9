//! What errors of a backend mean.

use super::xml;
use kvtier_l2::ErrorKind;

/// Codes of credentials that no request may be signed with.
const CREDENTIALS: &[&str] = &[
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
];

/// An error response.
pub(super) struct Failure {
    pub(super) kind: ErrorKind,
    /// Whether other requests would fail too.
    pub(super) is_of_backend: bool,
    /// Whether it may be about the one object: policies may allow the others.
    pub(super) is_denial: bool,
    /// Whether other credentials may be accepted.
    pub(super) is_of_credentials: bool,
    pub(super) text: String,
}

impl Failure {
    pub(super) fn of(status: u16, body: &[u8]) -> Self {
        let body = xml::error(body).unwrap_or_default();
        let code = body.code.as_str();
        let kind = kind(status, code);
        let is_missing_bucket = code == "NoSuchBucket";
        let is_of_credentials = CREDENTIALS.contains(&code);
        let advice = match (status, code) {
            (_, "NoSuchBucket") => "; create the bucket",
            (_, "RequestTimeTooSkewed") => "; set the clock",
            (403, "") => {
                ", the credentials are wrong or may not do this (lookups need s3:ListBucket)"
            }
            (301 | 307, _) => "; set s3_endpoint and s3_region to those of the bucket",
            _ => "",
        };
        // Hostile bytes, in a log line.
        let plain =
            |text: &str| -> String { text.chars().filter(|c| !c.is_control()).take(200).collect() };
        let text = match code {
            "" => format!("status {status}{advice}"),
            code => format!(
                "status {status}, {}: {}{advice}",
                plain(code),
                plain(&body.message)
            ),
        };
        Self {
            kind,
            is_of_backend: is_missing_bucket
                || is_of_credentials
                || matches!(status, 401 | 403 | 429 | 500 | 502..=504 | 300..=399)
                || matches!((status, code), (400, "" | "AuthorizationHeaderMalformed")),
            is_denial: match status {
                403 => !is_of_credentials,
                // An answer to HEAD has no code: an expired token, or a wrong region.
                400 => code.is_empty(),
                _ => false,
            },
            is_of_credentials: is_of_credentials
                || matches!(status, 400 | 401 | 403) && code.is_empty(),
            text,
        }
    }
}

fn kind(status: u16, code: &str) -> ErrorKind {
    match (status, code) {
        (_, "NoSuchBucket") => ErrorKind::Refused,
        (507, _) | (_, "QuotaExceeded" | "XMinioStorageFull" | "InsufficientStorage") => {
            ErrorKind::Full
        }
        // New credentials are looked for before the next try.
        (_, "ExpiredToken" | "TokenRefreshRequired") => ErrorKind::Unavailable,
        (_, "SlowDown" | "RequestTimeout" | "OperationAborted" | "TooManyRequests") => {
            ErrorKind::Unavailable
        }
        (429 | 500 | 502 | 503 | 504, _) => ErrorKind::Unavailable,
        (404, _) => ErrorKind::NotFound,
        // As with an expired token: others are looked for before the next try.
        (400, "") => ErrorKind::Unavailable,
        // In an archive.
        (403, "InvalidObjectState") => ErrorKind::Unreadable,
        // Replaced, or deleted and stored again, between two parts of a load.
        (409 | 412, _) => ErrorKind::Unavailable,
        // Fewer bytes than the range asks for.
        (416, _) => ErrorKind::Corrupt,
        (405 | 501, _) => ErrorKind::Unsupported,
        _ => ErrorKind::Refused,
    }
}
