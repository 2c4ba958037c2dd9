//! Traces: which collector they are sent to, and what OpenTelemetry's variables say about it.

use std::env;
use std::fmt;

use kvtier_common::error::{Error, Result};
use kvtier_l2::net::host_and_port;

use super::checks::refuse;
use super::flags::ServerArgs;

/// Headers of each call, such as a token.
const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";

/// Attributes of this process.
const RESOURCE: &str = "OTEL_RESOURCE_ATTRIBUTES";

/// Variable with the attribute `service.name`.
const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";

/// Port of OTLP over gRPC.
const PORT: u16 = 4317;

/// Headers that belong to gRPC and HTTP/2.
const RESERVED: &[&str] = &["content-type", "te", "user-agent", "host", "connection"];

/// A collector of traces.
#[derive(Debug, Clone)]
pub struct TracingConfig {
    /// Address of the collector.
    pub endpoint: OtlpEndpoint,
    /// Headers of each call.
    pub headers: Pairs,
    /// Attributes of this process, `service.name` among them.
    pub resource: Pairs,
}

/// Address of a collector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtlpEndpoint {
    /// Whether connections are secured.
    pub tls: bool,
    /// Name or address; an IPv6 address without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

/// Names and values, which may be secrets.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Pairs(Vec<(String, String)>);

impl Pairs {
    /// The pairs in their order.
    pub fn iter(&self) -> std::slice::Iter<'_, (String, String)> {
        self.0.iter()
    }
}

impl fmt::Debug for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|(name, _)| name))
            .finish()
    }
}

impl OtlpEndpoint {
    /// Host and port.
    pub fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        }
    }

    /// Reads `http://HOST:PORT` or `https://HOST:PORT`; `None` if it is invalid. As LMCache's, it may do without a scheme or port.
    fn parse(text: &str) -> Option<Self> {
        let (tls, rest) = match text.split_once("://") {
            None => (false, text),
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some(_) => return None,
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = host_and_port(authority, PORT)?;
        Some(Self { tls, host, port })
    }
}

impl fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority())
    }
}

impl TracingConfig {
    /// The collector that the flags name, if traces are sent.
    ///
    /// # Errors
    /// One line: there is no collector, or it or a variable is invalid.
    pub(super) fn of(args: &ServerArgs) -> Result<Option<Self>> {
        let endpoint = args.otlp_endpoint.as_deref().map(|text| {
            OtlpEndpoint::parse(text).ok_or_else(|| {
                // Without a scheme a password would not be recognized, and be logged.
                let shown = match text.rsplit_once('@') {
                    Some((_, host)) => format!("***@{host}"),
                    None => text.to_owned(),
                };
                refuse(
                    "otlp-endpoint",
                    format!("{shown:?}"),
                    "give http://HOST:4317 or https://HOST:4317, without a path (OTLP over gRPC has none) and without user \
                     and password (OTEL_EXPORTER_OTLP_HEADERS has what a collector asks for)",
                )
            })
        });
        let endpoint = endpoint.transpose()?;
        if !args.enable_tracing {
            return Ok(None);
        }
        let Some(endpoint) = endpoint else {
            return Err(Error::refused(
                "--enable-tracing needs --otlp-endpoint; give the collector, as http://HOST:4317",
            ));
        };
        let variable = |name: &'static str| match env::var(name) {
            Ok(text) => pairs(name, &text),
            Err(env::VarError::NotPresent) => Ok(Vec::new()),
            Err(env::VarError::NotUnicode(_)) => Err(invalid(name)),
        };
        let headers = headers(variable(HEADERS)?)?;
        let mut resource = variable(RESOURCE)?;
        let name = env::var(SERVICE_NAME).ok().filter(|name| !name.is_empty());
        if let Some(name) = name {
            resource.retain(|(known, _)| known != "service.name");
            resource.push(("service.name".to_owned(), name));
        } else if resource.iter().all(|(known, _)| known != "service.name") {
            resource.push(("service.name".to_owned(), "kvtier".to_owned()));
        }
        Ok(Some(Self {
            endpoint,
            headers: Pairs(headers),
            resource: Pairs(resource),
        }))
    }
}

/// Reads `name=value,name=value`, where values are percent-encoded.
fn pairs(variable: &str, text: &str) -> Result<Vec<(String, String)>> {
    let parts = text
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let (name, value) = part.split_once('=')?;
        let name = name.trim();
        (!name.is_empty()).then_some((name.to_owned(), decoded(value.trim())?))
    };
    parts
        .map(|part| pair(part).ok_or_else(|| invalid(variable)))
        .collect()
}

/// Headers with their names in lower case, as HTTP/2 has them.
fn headers(pairs: Vec<(String, String)>) -> Result<Vec<(String, String)>> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
    pairs
        .into_iter()
        .map(|(name, value)| {
            let name = name.to_ascii_lowercase();
            let is_text = value.chars().all(|c| c == ' ' || c.is_ascii_graphic());
            if !name.chars().all(is_name) || !is_text {
                return Err(invalid(HEADERS));
            }
            if RESERVED.contains(&name.as_str()) || name.starts_with("grpc-") {
                return Err(Error::refused(format!(
                    "{HEADERS}: header {name} belongs to the transport; allowed: other headers"
                )));
            }
            Ok((name, value))
        })
        .collect()
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        let digits = std::str::from_utf8(digits).ok()?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

/// Error for an invalid variable. The value may be a secret, and is not repeated.
fn invalid(variable: &str) -> Error {
    Error::refused(format!(
        "{variable} is invalid; allowed: name=value pairs, with commas between them and values percent-encoded"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServerConfig;

    #[test]
    fn endpoints_are_scheme_host_and_port() {
        let shown = |text| OtlpEndpoint::parse(text).map(|endpoint| endpoint.to_string());
        for (text, wanted) in [
            ("http://collector:4317", "http://collector:4317"),
            ("https://otel.example", "https://otel.example:4317"),
            ("collector:9", "http://collector:9"),
            ("http://10.0.0.1/", "http://10.0.0.1:4317"),
            ("http://[::1]:5", "http://[::1]:5"),
            ("[::1]", "http://[::1]:4317"),
        ] {
            assert_eq!(shown(text).as_deref(), Some(wanted), "{text}");
        }
        for text in [
            "",
            "http://",
            "grpc://h:4317",
            "http://h:4318/v1/traces",
            "http://me:secret@h:4317",
            "http://h:0",
            "http://h:x",
            "http://h:",
            "http://[::1",
            "http://[h]:1",
            "h h",
        ] {
            assert_eq!(shown(text), None, "{text}");
        }
    }

    #[test]
    fn tracing_needs_a_collector() {
        let tracing = |flags: &[&str]| ServerConfig::from_flags(flags).map(|config| config.tracing);
        assert!(tracing(&[]).unwrap().is_none());
        assert!(
            tracing(&["--otlp-endpoint", "http://h:4317"])
                .unwrap()
                .is_none()
        );
        let both = ["--enable-tracing", "--otlp-endpoint", "http://h:4317"];
        let config = tracing(&both).unwrap().unwrap();
        assert_eq!(config.endpoint.to_string(), "http://h:4317");
        let error = tracing(&["--enable-tracing"]).unwrap_err().to_string();
        assert!(
            error.contains("--enable-tracing needs --otlp-endpoint"),
            "{error}"
        );
        for endpoint in ["http://me:MARK@h:4317", "me:MARK@h:4317"] {
            let bad = ["--otlp-endpoint", endpoint];
            let error = tracing(&bad).unwrap_err().to_string();
            assert!(
                error.contains("--otlp-endpoint") && error.contains("give http://HOST:4317"),
                "{error}"
            );
            assert!(!error.contains("MARK"), "{error}");
        }
    }

    // proves: docs/metrics.md#traces
    #[test]
    fn variables_are_decoded_pairs_and_stay_secret() {
        let read = |text| pairs(HEADERS, text).and_then(headers).map(Pairs);
        let given = read("Authorization=Bearer%20MARK, x-scope = a=b ,").unwrap();
        let wanted = [("authorization", "Bearer MARK"), ("x-scope", "a=b")];
        let wanted = wanted.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(given.0, wanted);
        assert_eq!(format!("{given:?}"), r#"["authorization", "x-scope"]"#);
        for text in [
            "MARK",
            "=MARK",
            "a b=MARK",
            "a=MARK%0a",
            "a=%MARK",
            "a=%+1",
            "te=MARK",
            "grpc-x=MARK",
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(
                error.starts_with(HEADERS) && !error.contains("MARK"),
                "{error}"
            );
        }
    }
}
