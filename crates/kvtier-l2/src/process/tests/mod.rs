mod config;
mod fake;
mod faults;
mod python;

use std::path::Path;

use super::*;
use crate::conformance::{Memory, content};

fn options(socket_path: &Path) -> ProcessOptions {
    ProcessOptions {
        socket_path: socket_path.into(),
        command: Vec::new(),
        options: serde_json::Map::new(),
        shared_memory_bytes: 16 << 20,
        trust_missing_layout: false,
        require_checksum: false,
        request_timeout: Duration::from_secs(60),
    }
}

/// Waits until the tier is connected.
async fn until_connected(adapter: &ProcessAdapter) {
    while adapter.connected().await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Stores objects with their [`content`]; one result each.
async fn store(
    adapter: &ProcessAdapter,
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
    adapter: &ProcessAdapter,
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
