//! Options of types whose backend is behind TLS.

use std::path::PathBuf;

use crate::net::{ClientTls, TlsError, tls};

use crate::config::{ConfigError, Key, Options, Shape};
use crate::error::{ErrorKind, L2Error};

/// Key `tls_ca`.
pub const CA: Key = Key::path(
    tls::CA,
    "PEM file of the authorities that sign the server's certificate, instead of those of the system",
);
/// Key `tls_cert`.
pub const CERT: Key = Key::path(
    tls::CERT,
    "PEM file of a certificate chain that the server asks for; needs tls_key",
);
/// Key `tls_key`.
pub const KEY: Key = Key::path(tls::KEY, "PEM file of the key of tls_cert, not encrypted");
/// Key `tls_server_name`.
pub const SERVER_NAME: Key = Key::of(
    tls::SERVER_NAME,
    Shape::Text,
    "Name in the server's certificate, if it is not the host",
);

/// Returns the values of the keys of this module, those that the type has.
pub fn client(options: &Options) -> ClientTls {
    let path = |key| options.find::<&str>(key).map(PathBuf::from);
    ClientTls {
        ca: path(CA.name),
        identity: path(CERT.name).zip(path(KEY.name)),
        server_name: options.find(SERVER_NAME.name),
    }
}

/// Refuses keys of this module without their other half.
pub fn check(options: &Options) -> Result<(), ConfigError> {
    let is_given = |key: Key| options.find::<&str>(key.name).is_some();
    match (is_given(CERT), is_given(KEY)) {
        (true, false) => Err(options.refuse(KEY.name, "the path of the key of tls_cert")),
        (false, true) => Err(options.refuse(CERT.name, "the path of the certificate of tls_key")),
        _ => Ok(()),
    }
}

/// Refuses keys of this module where `tls_enable` is off.
pub fn check_enabled(options: &Options) -> Result<(), ConfigError> {
    let is_given = |key: &&Key| options.find::<&str>(key.name).is_some();
    match [CA, CERT, SERVER_NAME].iter().find(is_given) {
        Some(key) if !options.get::<bool>("tls_enable") => {
            Err(options.refuse(key.name, "it together with tls_enable only"))
        }
        _ => Ok(()),
    }
}

impl From<TlsError> for L2Error {
    fn from(error: TlsError) -> Self {
        Self::new(ErrorKind::Refused, error.to_string())
    }
}
