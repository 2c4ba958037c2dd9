//! TLS: only a server that proves its name is used.

use std::path::Path;

use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use super::*;
use kvtier_l2::conformance::object;
use kvtier_l2::net::ClientTls;

/// A server with a certificate for this name, and the file that has it.
async fn secured(name: &str, directory: &Path) -> (Server, std::path::PathBuf) {
    let made = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
    let file = directory.join(name);
    std::fs::write(&file, made.cert.pem()).unwrap();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    (Server::secured_on(listener, Some(acceptor)), file)
}

fn adapter(port: u16, ca: Option<&Path>) -> S3Adapter {
    let mut options = options(port);
    options.multipart_bytes = 300_000;
    options.place.server.tls = Some(ClientTls {
        ca: ca.map(Path::to_owned),
        ..ClientTls::default()
    });
    S3Adapter::open(&options)
}

#[tokio::test]
async fn only_servers_that_prove_their_name_are_used() {
    let directory = tempfile::tempdir().unwrap();
    let memory = Memory::new(1 << 22);
    let objects = [object(1, 1000), object(2, 1_000_000)];
    let (server, own) = secured("127.0.0.1", directory.path()).await;
    let (other, others) = secured("s3.example", directory.path()).await;
    let right = adapter(server.port, Some(&own));
    assert_eq!(kinds(store(&right, &memory, &objects).await), [None; 2]);
    let loaded = load(&right, &memory, &objects).await;
    assert_eq!(loaded, [Ok(content(&objects[0])), Ok(content(&objects[1]))]);
    for (port, ca, kind) in [
        (server.port, Some(&others), ErrorKind::Unavailable),
        (server.port, None, ErrorKind::Unavailable),
        (other.port, Some(&others), ErrorKind::Unavailable),
        (
            server.port,
            Some(&directory.path().join("absent")),
            ErrorKind::Refused,
        ),
    ] {
        let adapter = adapter(port, ca.map(std::path::PathBuf::as_path));
        let found = adapter.lookup(vec![objects[0].clone()]).await;
        assert_eq!(found.unwrap_err().kind(), kind, "{port} {ca:?}");
        assert_eq!(adapter.status()["is_healthy"], false);
    }
    assert!(other.requests().is_empty());
}
