//! Where the HTTP API is, and where the secrets are that guard it.

use std::ffi::OsString;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

/// Environment variable with tokens, written as in the token file, with line ends or `;` between them.
pub const TOKENS_VARIABLE: &str = "KVTIER_HTTP_TOKENS";

/// The flags of HTTP, and what [`TOKENS_VARIABLE`] holds. Nothing of it has been read or checked.
#[derive(Clone)]
pub struct HttpConfig {
    /// `--http-host`.
    pub host: String,
    /// `--http-token-file`.
    pub token_file: Option<PathBuf>,
    /// Content of [`TOKENS_VARIABLE`]: a secret.
    pub tokens: Option<OsString>,
    /// `--http-tls-cert`.
    pub tls_cert: Option<PathBuf>,
    /// `--http-tls-key`.
    pub tls_key: Option<PathBuf>,
}

impl fmt::Debug for HttpConfig {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpConfig")
            .field("host", &self.host)
            .field("token_file", &self.token_file)
            .field("tls_cert", &self.tls_cert)
            .field("tls_key", &self.tls_key)
            .finish_non_exhaustive()
    }
}

/// Whether an address is reachable from this host only.
pub fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}
