//! Keeps web pages of others from using the API through a browser on this host.
//!
//! Only where there are no tokens: a browser adds none by itself. A page can have its own name lead to loopback (DNS
//! rebinding), which the `Host` header tells, and can send simple requests anywhere, which `Origin` tells.

use std::net::IpAddr;

use axum::http::{HeaderMap, header};

/// Why a request is not answered, if so. `own` is the host that was configured.
pub(super) fn foreign(headers: &HeaderMap, own: &str, changes: bool) -> Option<&'static str> {
    let host = headers.get(header::HOST);
    let host = host.map(|host| host.to_str().unwrap_or_default());
    if host.is_some_and(|host| !is_local(host, own)) {
        return Some(
            "the Host header names another host; ask by address or as localhost, or configure tokens",
        );
    }
    let origin = headers.get(header::ORIGIN);
    let is_own = |origin: &str| origin.split_once("://").map(|(_, rest)| rest) == host;
    if changes && origin.is_some_and(|origin| !origin.to_str().is_ok_and(is_own)) {
        return Some("a web page of another origin may change nothing here");
    }
    None
}

/// Whether this is a name that no other party can resolve to this server.
fn is_local(host: &str, own: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || name.eq_ignore_ascii_case(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pairs = pairs.iter();
        pairs
            .map(|(name, value)| ((*name).parse().unwrap(), value.parse().unwrap()))
            .collect::<Vec<(header::HeaderName, header::HeaderValue)>>()
            .into_iter()
            .collect()
    }

    #[test]
    fn a_name_that_others_can_have_lead_here_is_refused() {
        for host in [
            "127.0.0.1",
            "127.0.0.1:8080",
            "[::1]:8080",
            "10.0.0.1",
            "localhost",
            "LocalHost:1",
            "me:80",
            "ME",
        ] {
            assert_eq!(
                foreign(&headers(&[("host", host)]), "me", true),
                None,
                "{host}"
            );
        }
        for host in [
            "evil.example",
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "",
            "me:x",
        ] {
            assert!(
                foreign(&headers(&[("host", host)]), "me", false).is_some(),
                "{host}"
            );
        }
        assert_eq!(foreign(&HeaderMap::new(), "me", true), None);
    }

    #[test]
    fn a_page_of_another_origin_may_read_nothing_new_and_change_nothing() {
        let from = |origin| headers(&[("host", "localhost:8080"), ("origin", origin)]);
        assert_eq!(foreign(&from("http://localhost:8080"), "", true), None);
        assert_eq!(foreign(&from("https://evil.example"), "", false), None);
        for origin in [
            "https://evil.example",
            "null",
            "http://localhost",
            "localhost:8080",
        ] {
            assert!(foreign(&from(origin), "", true).is_some(), "{origin}");
        }
    }
}
