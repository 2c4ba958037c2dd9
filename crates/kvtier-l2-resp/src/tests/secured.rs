//! TLS: the conformance suite, and servers or clients without a certificate to trust.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;

use super::part::ClusterPart;
use super::server::Redis;
use super::*;
use kvtier_l2::conformance::{object, run};
use kvtier_l2::net::ClientTls;

/// An authority, and certificates that it has signed, as files.
pub(super) struct Files {
    directory: TempDir,
}

impl Files {
    pub(super) fn new(name: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut of_authority = CertificateParams::default();
        of_authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Another name than that of certificates, which would be self-signed ones otherwise.
        let common_name = format!("authority of {name}");
        of_authority
            .distinguished_name
            .push(DnType::CommonName, common_name);
        let key = KeyPair::generate().unwrap();
        let authority = CertifiedIssuer::self_signed(of_authority, key).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        for (file, text) in [
            ("ca.pem", authority.pem()),
            ("cert.pem", certificate.pem()),
            ("key.pem", key.serialize_pem()),
        ] {
            std::fs::write(directory.path().join(file), text).unwrap();
        }
        Self { directory }
    }

    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(file)
    }

    /// A server with the certificate.
    fn server(&self, asks_for_certificates: bool) -> Redis {
        let path = |file| self.path(file).display().to_string();
        Redis::start(&[
            "--port",
            "0",
            "--tls-port",
            "{port}",
            "--tls-cert-file",
            &path("cert.pem"),
            "--tls-key-file",
            &path("key.pem"),
            "--tls-ca-cert-file",
            &path("ca.pem"),
            "--tls-auth-clients",
            if asks_for_certificates { "yes" } else { "no" },
        ])
    }

    pub(super) fn tls(&self) -> ClientTls {
        ClientTls {
            ca: Some(self.path("ca.pem")),
            ..ClientTls::default()
        }
    }
}

fn secured(server: &Redis, tls: ClientTls) -> RespOptions {
    RespOptions {
        tls: Some(tls),
        ..server.options()
    }
}

// proves: docs/compare.md#redis-valkey
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_with_tls_passes() {
    let files = Files::new("127.0.0.1");
    let server = files.server(false);
    run(ClusterPart::maker(vec![server], move |nodes| {
        secured(&nodes[0], files.tls())
    }))
    .await;
}

#[tokio::test]
async fn large_objects_come_whole_through_tls() {
    let files = Files::new("127.0.0.1");
    let (server, memory) = (files.server(false), Memory::new(64 << 20));
    let adapter = RespAdapter::open("resp", &secured(&server, files.tls()));
    let objects: Vec<_> = [(1, 3 << 20), (3, 1), (4, 128 << 10), (5, 5_000_001)]
        .map(|(number, len)| object(number, len))
        .to_vec();
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None; 4]);
    let loaded = load(&adapter, &memory, &objects).await;
    for (object, loaded) in objects.iter().zip(loaded) {
        assert!(loaded.unwrap() == content(object), "{}", object.len);
    }
    memory.until_unused().await;
}

/// What a store says.
async fn error_of(options: RespOptions) -> Option<(ErrorKind, String)> {
    let memory = Memory::new(1 << 20);
    let adapter = RespAdapter::open("resp", &options);
    let stored = store(&adapter, &memory, &[object(1, 100)]).await;
    let error = stored.into_iter().next().unwrap().err()?;
    Some((error.kind(), error.to_string()))
}

#[tokio::test]
async fn servers_and_clients_without_proof_are_refused() {
    let (files, others) = (Files::new("127.0.0.1"), Files::new("redis.example"));
    let server = files.server(false);
    assert_eq!(error_of(secured(&server, files.tls())).await, None);
    // Signed by another authority, or for another name, or no TLS at all.
    let told = error_of(secured(&server, others.tls())).await.unwrap().1;
    assert!(told.contains("invalid peer certificate"), "{told}");
    let other_name = ClientTls {
        server_name: Some("redis.example".into()),
        ..files.tls()
    };
    let told = error_of(secured(&server, other_name)).await.unwrap().1;
    assert!(told.contains("not valid for name"), "{told}");
    assert!(error_of(server.options()).await.is_some());
    let plain = Redis::start(&[]);
    let impatient = RespOptions {
        connection_timeout: Duration::from_millis(500),
        ..secured(&plain, files.tls())
    };
    let told = error_of(impatient).await.unwrap().1;
    assert!(told.contains("TLS"), "{told}");

    let renamed = others.server(false);
    let its_name = ClientTls {
        server_name: Some("redis.example".into()),
        ..others.tls()
    };
    assert_eq!(error_of(secured(&renamed, its_name)).await, None);

    let strict = files.server(true);
    assert!(error_of(secured(&strict, files.tls())).await.is_some());
    let with_identity = ClientTls {
        identity: Some((files.path("cert.pem"), files.path("key.pem"))),
        ..files.tls()
    };
    assert_eq!(error_of(secured(&strict, with_identity)).await, None);
}
