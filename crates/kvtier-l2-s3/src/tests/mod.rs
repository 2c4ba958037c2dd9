mod config;
mod faults;
mod objects;
mod secured;
mod server;
mod suite;

use std::sync::Arc;
use std::time::Duration;

use super::http;
use super::options::BucketPlace;
use super::sign::Credentials;
use super::*;
use kvtier_l2::conformance::{Memory, content, kinds, load, store};
use server::Server;

/// Options for the bucket of a server on loopback.
fn options(port: u16) -> S3Options {
    S3Options {
        place: BucketPlace {
            server: http::Server {
                host: "127.0.0.1".into(),
                port,
                tls: None,
            },
            authority: format!("127.0.0.1:{port}"),
            bucket: "bucket".into(),
            base: "/bucket".into(),
        },
        region: "us-east-1".into(),
        key_prefix: String::new(),
        credentials: Some(Credentials {
            access_key_id: "kvkey".into(),
            secret_access_key: "kvsecret".into(),
            session_token: None,
            expires_at: None,
        }),
        profile: None,
        multipart_bytes: 8 << 20,
        max_connections: 64,
        object_headers: Vec::new(),
        trust_missing_layout: false,
        require_checksum: false,
        connection_timeout: Duration::from_secs(5),
        request_timeout: Duration::from_secs(10),
    }
}

/// A server, and an adapter of its bucket.
struct Bed {
    server: Server,
    memory: Memory,
    adapter: S3Adapter,
}

async fn bed(change: impl FnOnce(&mut S3Options)) -> Bed {
    let server = Server::start().await;
    let mut options = options(server.port);
    options.request_timeout = Duration::from_millis(300);
    change(&mut options);
    Bed {
        adapter: S3Adapter::open(&options),
        memory: Memory::new(1 << 22),
        server,
    }
}
