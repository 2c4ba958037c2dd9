//! Access to the HTTP API: bearer tokens with a role each, and TLS. Without tokens it stays on loopback.

mod secret_files;
mod tls;
mod tokens;

use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use kvtier_common::error::{Error, Result};
use kvtier_config::{HttpConfig, TOKENS_VARIABLE, is_loopback};
use kvtier_l2::redact;
use tokio_rustls::rustls;

use secret_files::SecretFiles;
pub(crate) use tokens::{Role, Tokens};

/// Sender of a request.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) peer: String,
}

/// Tokens and certificates, which a reload reads again.
pub struct Access {
    host: String,
    /// `None` allows every client on this host everything.
    tokens: Option<SecretFiles<Tokens>>,
    tls: Option<SecretFiles<rustls::ServerConfig>>,
}

impl Access {
    /// Reads what there is to read.
    ///
    /// # Errors
    /// One line that names the flag: a bad file, or a host beyond loopback without tokens.
    pub fn open(config: &HttpConfig) -> Result<Self> {
        // A refused value may be a secret, or contain one.
        Self::read(config).map_err(|error| error.map_text(redact::text))
    }

    fn read(config: &HttpConfig) -> Result<Self> {
        let tls = match (&config.tls_cert, &config.tls_key) {
            (None, None) => None,
            (Some(cert), Some(key)) => {
                let (cert, key) = (cert.clone(), key.clone());
                let paths = vec![cert.clone(), key.clone()];
                let make = move |contents: &[Vec<u8>]| {
                    tls::settings((&cert, &contents[0]), (&key, &contents[1]))
                };
                let flags = "--http-tls-cert, --http-tls-key";
                Some(SecretFiles::open(
                    "the certificate and key of HTTP",
                    flags,
                    paths,
                    make,
                )?)
            }
            _ => {
                return Err(Error::refused(
                    "--http-tls-cert and --http-tls-key: one is no use without the other; give both",
                ));
            }
        };
        let access = Self {
            tokens: tokens(config.token_file.clone(), config.tokens.clone())?,
            host: config.host.clone(),
            tls,
        };
        if access.is_local() == Some(false) {
            access.check_reachable_from_others(&access.host)?;
        }
        Ok(access)
    }

    /// The tokens as last read; `None` without any, which allows every client everything.
    pub(crate) fn tokens(&self) -> Option<Arc<Tokens>> {
        self.tokens.as_ref().map(SecretFiles::get)
    }

    /// How to answer a handshake; `None` without TLS.
    pub(crate) fn tls(&self) -> Option<Arc<rustls::ServerConfig>> {
        self.tls.as_ref().map(SecretFiles::get)
    }

    /// Reads the files again; returns the names of what was read.
    ///
    /// # Errors
    /// Files that cannot be used; what they held stays in use. The others are taken.
    pub fn reload(&self) -> Result<Vec<&'static str>> {
        let tokens = self.tokens.as_ref().map(SecretFiles::reload);
        let tls = self.tls.as_ref().map(SecretFiles::reload);
        tokens.into_iter().chain(tls).collect()
    }

    /// `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// `--http-host`.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Checks that HTTP may be served where the system has bound the host: only then is it known what a name means.
    ///
    /// # Errors
    /// Other hosts reach it, and there is no token.
    pub fn check_bound(&self, bound: SocketAddr) -> Result<()> {
        if is_loopback(bound.ip()) {
            Ok(())
        } else {
            self.check_reachable_from_others(&bound.ip())
        }
    }

    fn check_reachable_from_others(&self, place: &dyn fmt::Display) -> Result<()> {
        if self.tokens.is_some() {
            Ok(())
        } else {
            Err(Error::refused(format!(
                "--http-host: {place} is reachable from other hosts, where every client could change and read everything; \
                 give --http-token-file FILE (or tokens in the environment variable {TOKENS_VARIABLE}), or keep it on loopback"
            )))
        }
    }

    /// Warnings for the operator.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.tokens.is_some() && self.tls.is_none() && self.is_local() == Some(false) {
            warnings.push(format!(
                "--http-host {}: tokens travel in clear, and can be used by all that see the traffic; give --http-tls-cert and \
                 --http-tls-key, unless something in front of it does TLS",
                self.host
            ));
        }
        warnings.extend(self.tokens.as_ref().and_then(SecretFiles::warning));
        warnings.extend(self.tls.as_ref().and_then(SecretFiles::warning));
        warnings
    }

    /// Whether the host is on loopback; `None` for a name that has to be looked up.
    fn is_local(&self) -> Option<bool> {
        match self.host.parse() {
            Ok(ip) => Some(is_loopback(ip)),
            Err(_) => (self.host == "localhost").then_some(true),
        }
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access")
            .field("host", &self.host)
            .field("tokens", &self.tokens)
            .field("tls", &self.tls)
            .finish()
    }
}

/// Tokens of the file and of the variable.
fn tokens(
    file: Option<PathBuf>,
    variable: Option<OsString>,
) -> Result<Option<SecretFiles<Tokens>>> {
    let given = variable.filter(|text| !text.is_empty());
    let given = given.map(|text| {
        let text = text.to_string_lossy().replace(';', "\n");
        let tokens = Tokens::parse(text.as_bytes());
        tokens.map_err(|error| error.context(TOKENS_VARIABLE))
    });
    let given = given.transpose()?;
    if file.is_none() && given.is_none() {
        return Ok(None);
    }
    let name = file
        .as_ref()
        .map_or_else(String::new, |file| file.display().to_string());
    let paths = Vec::from_iter(file);
    let make = move |contents: &[Vec<u8>]| {
        let mut all = given.clone().unwrap_or_default();
        if let Some(content) = contents.first() {
            let tokens = Tokens::parse(content).and_then(|tokens| tokens.and(&all));
            all = tokens.map_err(|error| error.context(format!("--http-token-file {name}")))?;
        }
        Ok(all)
    };
    SecretFiles::open("the tokens of HTTP", "--http-token-file", paths, make).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(host: &str) -> HttpConfig {
        HttpConfig {
            host: host.to_owned(),
            token_file: None,
            tokens: None,
            tls_cert: None,
            tls_key: None,
        }
    }

    // proves: docs/compare.md#http
    #[test]
    fn without_tokens_it_stays_on_loopback() {
        for host in [
            "127.0.0.1",
            "127.8.9.1",
            "::1",
            "::ffff:127.0.0.1",
            "localhost",
        ] {
            let access = Access::open(&wanted(host)).unwrap();
            assert!(access.warnings().is_empty() && access.tokens().is_none());
        }
        for host in ["0.0.0.0", "::", "10.0.0.1", "fe80::1", "::ffff:10.0.0.1"] {
            let told = Access::open(&wanted(host)).unwrap_err().to_string();
            assert!(
                told.starts_with(&format!("--http-host: {host} is reachable")),
                "{told}"
            );
            assert!(told.contains("--http-token-file FILE") && told.contains("KVTIER_HTTP_TOKENS"));
            let mut with = wanted(host);
            with.tokens = Some("read a 0123456789abcdef".into());
            let access = Access::open(&with).unwrap();
            assert!(
                access
                    .warnings()
                    .concat()
                    .contains("tokens travel in clear")
            );
        }
    }

    #[test]
    fn what_a_name_stands_for_counts_once_it_is_bound() {
        let access = Access::open(&wanted("node-7")).unwrap();
        assert_eq!(access.check_bound("127.0.0.1:1".parse().unwrap()), Ok(()));
        let told = access.check_bound("10.0.0.1:1".parse().unwrap());
        let told = told.unwrap_err().to_string();
        assert!(
            told.starts_with("--http-host: 10.0.0.1 is reachable"),
            "{told}"
        );
    }

    #[test]
    fn tokens_of_both_places_count_and_errors_name_theirs() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        let with = |file: &str, variable: &str| {
            std::fs::write(&path, file).unwrap();
            let mut wanted = wanted("::1");
            wanted.token_file = Some(path.clone());
            wanted.tokens = Some(variable.into());
            Access::open(&wanted)
        };
        let variable = "read a MARKER-456789abcdef; admin b MARKER-456789abcdeX";
        let access = with("admin c MARKER-456789abcdeY\n", variable).unwrap();
        let tokens = access.tokens().unwrap();
        for last in ["f", "X", "Y"] {
            assert!(
                tokens
                    .find(format!("MARKER-456789abcde{last}").as_bytes())
                    .is_some()
            );
        }
        assert!(!format!("{access:?}").contains("MARKER"));
        for (file, variable, told) in [
            ("MARKER", variable, "--http-token-file "),
            (
                "admin a MARKER-456789abcdeY",
                variable,
                "--http-token-file ",
            ),
            (
                "admin c MARKER-456789abcdeY",
                "MARKER",
                "KVTIER_HTTP_TOKENS: line 1: ",
            ),
        ] {
            let error = with(file, variable).unwrap_err().to_string();
            assert!(
                error.starts_with(told) && !error.contains("MARKER"),
                "{error}"
            );
        }
        std::fs::remove_file(&path).unwrap();
        let mut gone = wanted("::1");
        gone.token_file = Some(path);
        let error = Access::open(&gone).unwrap_err().to_string();
        assert!(
            error.starts_with("--http-token-file: /") && error.contains("cannot be read"),
            "{error}"
        );
    }

    #[test]
    fn a_certificate_needs_its_key() {
        let mut half = wanted("::1");
        half.tls_cert = Some("c.pem".into());
        let told = Access::open(&half).unwrap_err().to_string();
        assert!(told.contains("give both"));
        let mut gone = wanted("::1");
        gone.tls_cert = Some("/nowhere/c.pem".into());
        gone.tls_key = Some("/nowhere/k.pem".into());
        let told = Access::open(&gone).unwrap_err().to_string();
        assert!(
            told.starts_with("--http-tls-cert, --http-tls-key: /nowhere/c.pem cannot be read"),
            "{told}"
        );
    }
}
