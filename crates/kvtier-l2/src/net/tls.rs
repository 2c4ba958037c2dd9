//! TLS towards a server: the authorities that are trusted, and the certificate of this side.
//!
//! `read` guards the settings, `SYSTEM` the authorities of the system, each with the time at which it was read; no other lock is
//! acquired inside.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_common::sync::Mutex;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};

/// Name of [`ClientTls::ca`] in errors.
pub const CA: &str = "tls_ca";
/// Name of the certificate of [`ClientTls::identity`].
pub const CERT: &str = "tls_cert";
/// Name of its key.
pub const KEY: &str = "tls_key";
/// Name of [`ClientTls::server_name`].
pub const SERVER_NAME: &str = "tls_server_name";

/// Why a setting was refused: its name, and a path if it has one.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

/// How long [`Settings`] are used before their files are read again.
const SETTINGS_LIFE: Duration = Duration::from_secs(60);

/// How connections are secured.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClientTls {
    /// PEM file of authorities; `None` is those of the system.
    pub ca: Option<PathBuf>,
    /// PEM files of a certificate chain and its key, if the server asks for one.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Name in the server's certificate; `None` is the host.
    pub server_name: Option<String>,
}

impl ClientTls {
    /// Reads the files, which blocks; see [`Settings`].
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn settings(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| refused("TLS", &error.to_string()))?
            .with_root_certificates(self.authorities()?);
        let settings = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let both =
                    builder.with_client_auth_cert(certificates(CERT, cert)?, private_key(key)?);
                both.map_err(|error| refused_file(KEY, key, &error.to_string()))?
            }
        };
        Ok(Arc::new(settings))
    }

    /// The name that the certificate of the server at `host` has to have.
    ///
    /// # Errors
    /// [`TlsError`] if it is neither a DNS name nor an address.
    pub fn name_of(&self, host: &str) -> Result<ServerName<'static>, TlsError> {
        let name = self.server_name.as_deref().unwrap_or(host);
        ServerName::try_from(name.to_owned()).map_err(|_| {
            let what = format!("{name:?} is no DNS name or address; give tls_server_name");
            refused(SERVER_NAME, &what)
        })
    }

    fn authorities(&self) -> Result<Arc<RootCertStore>, TlsError> {
        self.ca.as_deref().map_or_else(system_authorities, of_file)
    }
}

/// How a port for other servers is secured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTls {
    /// PEM file of a certificate chain, the server's own first.
    pub cert: PathBuf,
    /// PEM file of its key.
    pub key: PathBuf,
    /// PEM file of the authorities that sign clients' certificates; clients need none without it.
    pub ca: Option<PathBuf>,
}

impl ServerTls {
    /// Reads the files, which blocks.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn settings(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| refused("TLS", &error.to_string()))?;
        let builder = match &self.ca {
            None => builder.with_no_client_auth(),
            Some(ca) => {
                let clients =
                    WebPkiClientVerifier::builder_with_provider(of_file(ca)?, provider).build();
                let clients = clients.map_err(|error| refused_file(CA, ca, &error.to_string()))?;
                builder.with_client_cert_verifier(clients)
            }
        };
        let chain = certificates(CERT, &self.cert)?;
        let both = builder.with_single_cert(chain, private_key(&self.key)?);
        both.map(Arc::new)
            .map_err(|error| refused_file(KEY, &self.key, &error.to_string()))
    }
}

fn of_file(path: &Path) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(CA, path)? {
        let added = roots.add(certificate);
        added.map_err(|error| refused_file(CA, path, &error.to_string()))?;
    }
    Ok(Arc::new(roots))
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    // Its error is not repeated: it may hold a part of the key.
    PrivateKeyDer::from_pem_slice(&read(KEY, path)?).map_err(|_| {
        let what =
            "there is no private key in it; give PEM (PKCS#8, PKCS#1 or SEC1), not encrypted";
        refused_file(KEY, path, what)
    })
}

/// The authorities of the system, which are some hundred files to parse.
static SYSTEM: Mutex<Option<(Instant, Arc<RootCertStore>)>> = Mutex::new(None);

/// Returns the authorities of the system, read a minute ago at most.
fn system_authorities() -> Result<Arc<RootCertStore>, TlsError> {
    if let Some((since, roots)) = &*SYSTEM.lock()
        && since.elapsed() < SETTINGS_LIFE
    {
        return Ok(Arc::clone(roots));
    }
    let mut roots = RootCertStore::empty();
    // Single ones that cannot be read are no reason to refuse the others.
    let found = rustls_native_certs::load_native_certs().certs;
    if roots.add_parsable_certificates(found).0 == 0 {
        let what =
            "the system has no certification authorities; install ca-certificates, or give tls_ca";
        return Err(refused(CA, what));
    }
    let roots = Arc::new(roots);
    *SYSTEM.lock() = Some((Instant::now(), Arc::clone(&roots)));
    Ok(roots)
}

/// What connections are secured by: files read a minute ago at most, so that renewed ones are used.
#[derive(Debug)]
pub struct TlsSettings {
    tls: ClientTls,
    read: Mutex<Option<(Instant, Arc<ClientConfig>)>>,
}

impl TlsSettings {
    /// Returns settings whose files are not read yet.
    pub fn new(tls: ClientTls) -> Self {
        Self {
            tls,
            read: Mutex::new(None),
        }
    }

    /// Returns the settings of a connection to `host`, and the name in the server's certificate.
    ///
    /// # Errors
    /// Those of [`ClientTls::settings`] and [`ClientTls::name_of`].
    pub async fn of(
        &self,
        host: &str,
    ) -> Result<(Arc<ClientConfig>, ServerName<'static>), TlsError> {
        let name = self.tls.name_of(host)?;
        if let Some((since, settings)) = &*self.read.lock()
            && since.elapsed() < SETTINGS_LIFE
        {
            return Ok((Arc::clone(settings), name));
        }
        let tls = self.tls.clone();
        let read = tokio::task::spawn_blocking(move || tls.settings()).await;
        let settings = read.map_err(|error| TlsError(format!("settings of TLS: {error}")))??;
        *self.read.lock() = Some((Instant::now(), Arc::clone(&settings)));
        Ok((settings, name))
    }

    /// Reads the files for the next connection, as a handshake has failed: they may have been renewed.
    pub fn expire(&self) {
        *self.read.lock() = None;
    }
}

fn certificates(key: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bytes = read(key, path)?;
    let chain = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    match chain {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        _ => Err(refused_file(
            key,
            path,
            "there is no certificate in it; give PEM",
        )),
    }
}

fn read(key: &str, path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|error| refused_file(key, path, &error.to_string()))
}

fn refused_file(key: &str, path: &Path, what: &str) -> TlsError {
    refused(key, &format!("{}: {what}", path.display()))
}

fn refused(key: &str, what: &str) -> TlsError {
    TlsError(format!("{key}: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_files_are_refused_by_key_and_path() {
        let directory = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let cert = file("cert.pem", &made.cert.pem());
        let key = file("key.pem", &made.signing_key.serialize_pem());
        let other = file("other.pem", "nothing");
        let absent = directory.path().join("absent");
        let told = |ca: &Path, cert: &Path, key: &Path| {
            let tls = ClientTls {
                ca: Some(ca.to_owned()),
                identity: Some((cert.to_owned(), key.to_owned())),
                server_name: None,
            };
            tls.settings()
                .map_or_else(|error| error.to_string(), |_| String::new())
        };
        assert_eq!(told(&cert, &cert, &key), "");
        for (ca, cert, key, name, path) in [
            (&absent, &cert, &key, "tls_ca", "absent"),
            (&other, &cert, &key, "tls_ca", "other.pem"),
            (&cert, &other, &key, "tls_cert", "other.pem"),
            (&cert, &cert, &other, "tls_key", "other.pem"),
            (&cert, &cert, &cert, "tls_key", "cert.pem"),
        ] {
            let told = told(ca, cert, key);
            assert!(told.starts_with(name) && told.contains(path), "{told}");
        }
    }

    #[tokio::test]
    async fn settings_are_read_again_after_failed_handshake() {
        let directory = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let path = directory.path().join("ca.pem");
        std::fs::write(&path, made.cert.pem()).unwrap();
        let settings = TlsSettings::new(ClientTls {
            ca: Some(path.clone()),
            ..ClientTls::default()
        });
        let first = settings.of("localhost").await.unwrap().0;
        std::fs::remove_file(&path).unwrap();
        let second = settings.of("localhost").await.unwrap().0;
        assert!(Arc::ptr_eq(&first, &second));
        settings.expire();
        let told = settings.of("localhost").await.unwrap_err().to_string();
        assert!(told.contains("ca.pem"), "{told}");
    }

    #[test]
    fn names_are_checked() {
        let tls = ClientTls::default();
        assert!(tls.name_of("redis.example").is_ok() && tls.name_of("127.0.0.1").is_ok());
        let told = tls.name_of("a b").unwrap_err().to_string();
        assert!(told.contains("tls_server_name"), "{told}");
    }
}
