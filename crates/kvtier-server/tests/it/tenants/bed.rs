//! A server with a tier, and what tenants do on it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::Instant;

use kvtier_client::{EngineDrivenWorker, Prompt, Scope};

use crate::support::{PATIENCE, TestServer, bytes, range};

/// A server with a tier in a directory and these further flags.
pub fn server(directory: &Path, flags: &[&str]) -> TestServer {
    let tier = format!(r#"{{"type":"fs","base_path":"{}"}}"#, directory.display());
    let l2 = ["--l2-min-free-gb", "0", "--l2-adapter", &tier];
    TestServer::start(&[&l2[..], flags].concat())
}

/// Waits until the tier has all that it is to have.
pub fn settle(server: &TestServer) {
    let started = Instant::now();
    while server.readings().l2_queued_bytes > 0 {
        assert!(started.elapsed() < PATIENCE, "the tier does not store");
        std::thread::yield_now();
    }
}

/// Stores a prompt for a tenant, with bytes that `seed` tells.
pub fn store(worker: &mut EngineDrivenWorker, salt: &str, prompt: &Prompt, seed: u64) {
    let len = worker.chunk_bytes();
    worker.set_salt(salt);
    let all = 0..prompt.len() as u64;
    let source = |chunk| bytes(seed, chunk, len);
    worker.store(prompt, all, "s", source).unwrap();
}

/// Chunks that a tenant finds, which are then read and compared.
pub fn read(
    worker: &mut EngineDrivenWorker,
    salt: &str,
    prompt: &Prompt,
    seed: u64,
    request: &str,
) -> u64 {
    worker.set_salt(salt);
    let hits = lookup(worker, salt, prompt, request);
    if hits > 0 {
        let len = worker.chunk_bytes();
        let read = worker.retrieve(prompt, range(0..hits), request, |chunk, got| {
            assert!(got == bytes(seed, chunk, len), "chunk {chunk} of {salt:?}");
        });
        assert!(read.unwrap().is_some(), "a miss after a hit");
    }
    worker.connection().end_session(request).unwrap();
    hits
}

/// Chunks that a tenant finds.
pub fn lookup(worker: &mut EngineDrivenWorker, salt: &str, prompt: &Prompt, request: &str) -> u64 {
    let scope = Scope::new(worker.spec().scope.model_name.clone()).with_salt(salt);
    let all = 0..prompt.len() as u64;
    let connection = worker.connection();
    connection
        .lookup(&scope.scheduler_key(prompt, all, request))
        .unwrap();
    let found = connection.wait_prefetch_status(request, PATIENCE).unwrap();
    found.expect("a result within the deadlines of the tier")
}

/// An HTTP request's status and body.
pub fn http(server: &TestServer, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(server.http_address()).unwrap();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

/// Files of objects in a directory.
pub fn files(directory: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|end| end == "data"))
        .collect()
}
