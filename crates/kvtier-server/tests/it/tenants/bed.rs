//! A server with a tier, and what tenants do on it.

use std::path::Path;

use kvtier_client::{EngineDrivenWorker, Prompt, Scope};

use crate::l2::{fs, hits, with_tiers};
use crate::support::{Steps as _, TestServer, whole};

/// A server with a tier in a directory and these further flags.
pub fn server(directory: &Path, flags: &[&str]) -> TestServer {
    with_tiers(&[&fs(directory)], flags)
}

/// Stores a prompt for a tenant, with the bytes of `seed`.
pub fn store(worker: &mut EngineDrivenWorker, salt: &str, prompt: &Prompt, seed: u64) {
    worker.set_salt(salt);
    worker.stored(prompt, whole(prompt), seed);
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
        worker.assert_reads(prompt, 0..hits, request, seed);
    }
    worker.connection().end_session(request).unwrap();
    hits
}

/// Chunks that a tenant finds.
pub fn lookup(worker: &mut EngineDrivenWorker, salt: &str, prompt: &Prompt, request: &str) -> u64 {
    let scope = Scope::new(worker.spec().scope.model_name.clone()).with_salt(salt);
    hits(worker.connection(), &scope, prompt, request)
}

/// Files of objects in a directory.
pub fn files(directory: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|end| end == "data"))
        .collect()
}
