//! HTTP client of commands, with its token and its trusted certificates.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use clap::Args;
use kvtier_server::escape::escape;
use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use crate::out;

/// Environment variable with the token, if no file is given.
const TOKEN_VARIABLE: &str = "KVTIER_TOKEN";

/// Largest body that is read, in bytes; a status with thousands of workers is far smaller.
const BODY_LIMIT: u64 = 64 << 20;

/// Arguments for authentication.
#[derive(Debug, Args)]
pub struct AccessArgs {
    /// File with the bearer token for the HTTP API [default: the environment variable KVTIER_TOKEN, if it is set]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// CA certificates (PEM); one of them must have issued the certificate of an https:// server [default: the public authorities]
    #[arg(long, value_name = "FILE")]
    ca_cert: Option<PathBuf>,
}

impl AccessArgs {
    /// The token, if there is one.
    fn token(&self) -> anyhow::Result<Option<String>> {
        let (text, place) = match &self.token_file {
            Some(path) => (Some(read(path, "--token-file")?), "--token-file"),
            None => (std::env::var(TOKEN_VARIABLE).ok(), TOKEN_VARIABLE),
        };
        let Some(text) = text.filter(|text| self.token_file.is_some() || !text.is_empty()) else {
            return Ok(None);
        };
        let token = text.trim();
        ensure!(
            !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic()),
            "{place}: that is not a token; give one, of letters, digits and -._~+/="
        );
        Ok(Some(token.to_owned()))
    }

    fn roots(&self) -> anyhow::Result<RootCerts> {
        let Some(path) = &self.ca_cert else {
            return Ok(RootCerts::WebPki);
        };
        let text = read(path, "--ca-cert")?;
        let certificates = parse_pem(text.as_bytes()).filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(Ok(certificate)),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        });
        let certificates: Vec<_> = certificates
            .collect::<Result<_, _>>()
            .with_context(|| format!("--ca-cert {}: that is not PEM", path.display()))?;
        ensure!(
            !certificates.is_empty(),
            "--ca-cert {}: there is no certificate in it; give PEM",
            path.display()
        );
        Ok(RootCerts::Specific(Arc::new(certificates)))
    }
}

fn read(path: &Path, flag: &str) -> anyhow::Result<String> {
    std::fs::read_to_string(path)
        .with_context(|| format!("{flag} {} cannot be read", path.display()))
}

/// One server's HTTP API.
pub(crate) struct Client {
    agent: ureq::Agent,
    pub(crate) base: String,
    authorization: Option<String>,
}

impl Client {
    /// A client of the server at `base`, such as `https://host:8080`. It does not connect yet.
    pub(crate) fn new(base: &str, access: &AccessArgs, timeout: Duration) -> anyhow::Result<Self> {
        let tls = TlsConfig::builder().root_certs(access.roots()?).build();
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .tls_config(tls)
            // A proxy would answer instead of the server, and a redirection lead to another one.
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .build()
            .into();
        let token = access.token()?;
        Ok(Self {
            agent,
            base: base.trim_end_matches('/').to_owned(),
            authorization: token.map(|token| format!("Bearer {token}")),
        })
    }

    /// Sends a request whose answer is a JSON object, and returns that.
    pub(crate) fn json(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let (status, text) = self.request(method, path, body.map(Value::to_string))?;
        ensure!(
            status == 200,
            "{} refuses: {}",
            self.base,
            refusal(status, &text)
        );
        let answer: Option<Value> = serde_json::from_str(&text).ok();
        answer.filter(Value::is_object).with_context(|| {
            format!(
                "{} answers with no JSON object; is it a kvtier server?",
                self.base
            )
        })
    }

    /// Sends `GET base + path`; returns status code and body. Any status is an answer; no answer is an error of one line.
    pub(crate) fn get(&self, path: &str) -> anyhow::Result<(u16, String)> {
        self.request("GET", path, None)
    }

    /// Sends a request of any method, with a body of JSON if there is one.
    pub(crate) fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<String>,
    ) -> anyhow::Result<(u16, String)> {
        let url = format!("{}{path}", self.base);
        let mut request = ureq::http::Request::builder().method(method).uri(&url);
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization);
        }
        let sent = match body {
            None => request.body(()).map(|request| self.agent.run(request)),
            Some(body) => request
                .header("content-type", "application/json")
                .body(body)
                .map(|request| self.agent.run(request)),
        };
        let sent = sent.with_context(|| format!("{url} is not a valid request"))?;
        let mut answer = sent.map_err(|error| match error {
            ureq::Error::Timeout(_) => anyhow!("no answer from {url} in time (--timeout)"),
            ureq::Error::Protocol(_) => {
                anyhow!("what answers at {url} is not HTTP: {error}; is that https, or is that the request port?")
            }
            error if url.starts_with("https") && error.to_string().contains("InvalidContentType") => {
                anyhow!("this port speaks http, not https: {error}; give {}", url.replacen("https", "http", 1))
            }
            error if url.starts_with("https") && error.to_string().contains("CaUsedAsEndEntity") => {
                anyhow!(
                    "the certificate of {url} is not trusted: it is an authority's (CA:TRUE), not a \
                     server's; make it with `openssl req -x509 -addext basicConstraints=critical,CA:FALSE`"
                )
            }
            error if url.starts_with("https") && is_tls(&error) => {
                anyhow!("the certificate of {url} is not trusted: {error}; pass --ca-cert FILE to trust a private CA")
            }
            error => anyhow!(error).context(format!("nothing answers at {url}; start `kvtier server`, or give HOST:PORT of its HTTP API (--http-port)")),
        })?;
        let body = answer
            .body_mut()
            .with_config()
            .limit(BODY_LIMIT)
            .read_to_string()
            .with_context(|| format!("the answer of {url} cannot be read"))?;
        Ok((answer.status().as_u16(), body))
    }
}

/// Reads an answer of the server at `url`, with its texts escaped.
pub(crate) fn typed<T: DeserializeOwned>(url: &str, answer: &Value) -> anyhow::Result<T> {
    kvtier_observe::api::from_value(out::shown(answer))
        .with_context(|| format!("{url} answers with a field of another type"))
}

/// The server's reason for a refusal, with a hint if a token is missing.
pub(crate) fn refusal(status: u16, body: &str) -> String {
    let answer: Value = serde_json::from_str(body).unwrap_or_default();
    let reasons = [&answer["error"], &answer["detail"]];
    let reason = reasons.iter().find_map(|reason| reason.as_str());
    // An engine's HTTP port has no such route, and other web servers answer in HTML.
    if !answer.is_object() || (status, reason) == (404, Some("Not Found")) {
        return format!(
            "{status}; is it a kvtier server? Give HOST:PORT of its HTTP API (--http-port)"
        );
    }
    let hint = if status == 401 {
        "; pass --token-file FILE or set KVTIER_TOKEN"
    } else {
        ""
    };
    format!("{status}, {}{hint}", escape(reason.unwrap_or(body.trim())))
}

/// Whether the server was reached and TLS with it failed.
fn is_tls(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) => true,
        ureq::Error::Io(error) => error.kind() == std::io::ErrorKind::InvalidData,
        _ => false,
    }
}
