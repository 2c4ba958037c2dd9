mod config;
mod faults;
mod objects;
mod secured;
mod server;
mod suite;

use std::sync::Arc;
use std::time::Duration;

use super::http;
use super::options::Place;
use super::sign::Credentials;
use super::*;
use crate::conformance::{Memory, content};
use server::Server;

/// Options for the bucket of a server on loopback.
fn options(port: u16) -> S3Options {
    S3Options {
        place: Place {
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

/// Stores objects with their [`content`]; one result each.
async fn store(
    adapter: &S3Adapter,
    memory: &Memory,
    objects: &[ObjectSpec],
) -> Vec<Result<Stored, L2Error>> {
    let item = |object: &ObjectSpec| StoreItem {
        object: object.clone(),
        from: memory.filled(&content(object)),
    };
    adapter.store(objects.iter().map(item).collect()).await
}

/// Loads objects; the bytes of each, or its error.
async fn load(
    adapter: &S3Adapter,
    memory: &Memory,
    objects: &[ObjectSpec],
) -> Vec<Result<Vec<u8>, L2Error>> {
    let buffers: Vec<_> = objects
        .iter()
        .map(|object| memory.buffer(object.len))
        .collect();
    let item = |(object, to): (&ObjectSpec, &Buffer)| LoadItem {
        object: object.clone(),
        to: to.clone(),
    };
    let results = adapter
        .load(objects.iter().zip(&buffers).map(item).collect())
        .await;
    let bytes = |(result, buffer): (Result<Loaded, L2Error>, &Buffer)| {
        let mut bytes = Vec::new();
        buffer.read_into(0, buffer.len(), &mut bytes).unwrap();
        result.map(|_| bytes)
    };
    results.into_iter().zip(&buffers).map(bytes).collect()
}

/// The kinds of errors.
fn kinds<T>(results: Vec<Result<T, L2Error>>) -> Vec<Option<ErrorKind>> {
    let kind = |result: Result<T, L2Error>| result.err().map(|error| error.kind());
    results.into_iter().map(kind).collect()
}
