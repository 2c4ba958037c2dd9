//! Signatures of requests: AWS Signature Version 4 in the `Authorization` header.
//!
//! The path is signed as it is sent, escaped once. The body is not signed (`UNSIGNED-PAYLOAD`): TLS protects it on its way,
//! and the object's own checksum at the end of it.

use std::fmt;
use std::fmt::Write as _;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};

use super::time;

/// What a request is signed with. Its `Debug` shows nothing of it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credentials {
    pub(super) access_key_id: String,
    pub(super) secret_access_key: String,
    pub(super) session_token: Option<String>,
    /// Seconds since the Unix epoch; `None` is never.
    pub(super) expires_at: Option<u64>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(***)")
    }
}

/// The parts of a request that are signed.
pub(super) struct Request<'a> {
    pub(super) method: &'a str,
    /// As sent, quoted.
    pub(super) path: &'a str,
    /// Names and quoted values.
    pub(super) query: &'a [(&'static str, String)],
    /// Names in lower case, with `host`; values without spaces at their ends.
    pub(super) headers: &'a [(&'static str, String)],
}

/// Adds the headers of a signature to `headers`, which are all signed.
pub(super) fn sign(
    request: (&str, &str, &[(&'static str, String)]),
    headers: &mut Vec<(&'static str, String)>,
    credentials: &Credentials,
    region: &str,
    now: u64,
) {
    let at = time::compact(now);
    headers.push(("x-amz-content-sha256", "UNSIGNED-PAYLOAD".to_owned()));
    headers.push(("x-amz-date", at.clone()));
    if let Some(token) = &credentials.session_token {
        headers.push(("x-amz-security-token", token.clone()));
    }
    headers.sort_unstable();
    let (method, path, query) = request;
    let request = Request {
        method,
        path,
        query,
        headers,
    };
    let authorization = authorization(&request, credentials, region, &at);
    headers.push(("authorization", authorization));
}

fn authorization(
    request: &Request<'_>,
    credentials: &Credentials,
    region: &str,
    at: &str,
) -> String {
    let mut query = request.query.to_vec();
    query.sort_unstable();
    let mut canonical = format!("{}\n{}\n", request.method, request.path);
    for (number, (name, value)) in query.iter().enumerate() {
        let separator = if number > 0 { "&" } else { "" };
        let _ = write!(canonical, "{separator}{name}={value}");
    }
    canonical.push('\n');
    for (name, value) in request.headers {
        let _ = writeln!(canonical, "{name}:{value}");
    }
    let names: Vec<_> = request.headers.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    let _ = write!(canonical, "\n{names}\nUNSIGNED-PAYLOAD");

    let day = &at[..8];
    let scope = format!("{day}/{region}/s3/aws4_request");
    let digest = hex::encode(Sha256::digest(canonical));
    let text = format!("AWS4-HMAC-SHA256\n{at}\n{scope}\n{digest}");
    let secret = format!("AWS4{}", credentials.secret_access_key);
    let key = [day, region, "s3", "aws4_request"]
        .into_iter()
        .fold(secret.into_bytes(), |key, part| keyed(&key, part));
    let signature = hex::encode(keyed(&key, &text));
    let id = &credentials.access_key_id;
    format!(
        "AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
}

fn keyed(key: &[u8], text: &str) -> Vec<u8> {
    // HMAC takes keys of any length.
    let Ok(mut hmac) = Hmac::<Sha256>::new_from_slice(key) else {
        return Vec::new();
    };
    hmac.update(text.as_bytes());
    hmac.finalize().into_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signature(method: &str, path: &str, headers: &[(&'static str, &str)]) -> String {
        let credentials = Credentials {
            access_key_id: "k".into(),
            secret_access_key: "s".into(),
            session_token: None,
            expires_at: None,
        };
        let mut headers: Vec<_> = headers
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect();
        headers.push(("host", "127.0.0.1:31440".into()));
        let at = time::parse("2026-11-22T14:04:06Z").unwrap();
        sign(
            (method, path, &[]),
            &mut headers,
            &credentials,
            "us-east-1",
            at,
        );
        let (name, value) = headers.pop().unwrap();
        assert_eq!(name, "authorization");
        value.rsplit_once("Signature=").unwrap().1.to_owned()
    }

    /// Signatures that LMCache 0.5.6 sent.
    // proves: docs/compare.md#s3
    #[test]
    fn signatures_are_those_of_the_peer() {
        let hash = "0a".repeat(32);
        let path = format!("/org/Tiny%20model%4001000100%400%40{hash}");
        assert_eq!(
            signature("GET", &path, &[("range", "bytes=0-8388607")]),
            "eacdccb2ebe7afc4b6175caa09e33f613d2abcacb61e8c3fd90f461869cd2808"
        );
        let path = format!("/org/Tiny%20model%4001000100%401%40{hash}%40tenant%20A%2B%C3%BC");
        let headers = [
            ("content-type", "application/octet-stream"),
            ("content-length", "512"),
        ];
        assert_eq!(
            signature("PUT", &path, &headers),
            "67560b0e5021da43393138e18a074e2178d4be18fda37f19ce9826594f2cd39b"
        );
    }

    #[test]
    fn debug_shows_no_secret() {
        let credentials = Credentials {
            access_key_id: "AKID".into(),
            secret_access_key: "SECRET".into(),
            session_token: Some("TOKEN".into()),
            expires_at: None,
        };
        let shown = format!("{credentials:?}");
        assert!(
            !["AKID", "SECRET", "TOKEN"]
                .iter()
                .any(|part| shown.contains(part))
        );
    }
}
