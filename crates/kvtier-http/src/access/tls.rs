//! TLS for HTTP: a certificate and its key, in PEM.

use std::path::Path;
use std::sync::Arc;

use kvtier_common::error::{Error, Result};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{Error as PemError, PemObject as _};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// What a handshake needs, out of the bytes of both files.
pub(super) fn settings(
    (cert_path, cert): (&Path, &[u8]),
    (key_path, key): (&Path, &[u8]),
) -> Result<ServerConfig> {
    let cert_path = format!("--http-tls-cert {}", cert_path.display());
    let key_path = format!("--http-tls-key {}", key_path.display());
    let chain = CertificateDer::pem_slice_iter(cert).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|_| {
        refused(
            &cert_path,
            "that is no PEM; give a chain, the server's own first",
        )
    })?;
    if chain.is_empty() {
        let what = "there is no certificate in it; give PEM, the server's own first";
        return Err(refused(&cert_path, what));
    }
    // Its error is not repeated: it may hold a part of the key.
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| {
        let what = match error {
            PemError::NoItemsFound => {
                "there is no private key in it; give PEM (PKCS#8, PKCS#1 or SEC1), not encrypted"
            }
            _ => "that is no PEM; give a private key that is not encrypted",
        };
        refused(&key_path, what)
    })?;
    let mut settings = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::refused(&cert_path).source(error))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => Error::refused(format!(
                "{key_path} is not the key of the certificate of {cert_path}"
            )),
            error => Error::refused(format!("{cert_path}, {key_path}")).source(error),
        })?;
    settings.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(settings)
}

fn refused(path: &str, what: &str) -> Error {
    Error::refused(what).context(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    fn told(cert: &str, key: &str) -> String {
        let settings = settings(
            (Path::new("c.pem"), cert.as_bytes()),
            (Path::new("k.pem"), key.as_bytes()),
        );
        settings.map_or_else(|error| error.to_string(), |_| String::new())
    }

    #[test]
    fn bad_files_are_told_by_flag_and_path() {
        let ((cert, key), (_, other)) = (pair(), pair());
        assert_eq!(told(&cert, &key), "");
        let body = key.lines().nth(1).unwrap();
        for (cert, key, expected) in [
            (
                "",
                key.as_str(),
                "--http-tls-cert c.pem: there is no certificate in it",
            ),
            (
                key.as_str(),
                key.as_str(),
                "--http-tls-cert c.pem: there is no certificate in it",
            ),
            (
                "-----BEGIN CERTIFICATE-----\n%\n",
                key.as_str(),
                "--http-tls-cert c.pem: that is no PEM",
            ),
            (
                cert.as_str(),
                "",
                "--http-tls-key k.pem: there is no private key in it",
            ),
            (
                cert.as_str(),
                cert.as_str(),
                "--http-tls-key k.pem: there is no private key in it",
            ),
            (
                cert.as_str(),
                other.as_str(),
                "--http-tls-key k.pem is not the key of the certificate of",
            ),
            (
                cert.as_str(),
                &key.replace("-----END", "%-----END"),
                "--http-tls-key k.pem: that is no PEM",
            ),
            (
                cert.as_str(),
                &key.replace(body, &body[..20]),
                "--http-tls-cert c.pem, --http-tls-key k.pem: ",
            ),
        ] {
            let told = told(cert, key);
            assert!(told.starts_with(expected), "{told}");
            assert!(!told.contains(&body[..12]), "{told}");
        }
    }
}
