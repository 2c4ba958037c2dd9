mod cluster;
mod faults;
mod part;
mod redis;
mod secured;
mod server;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::conformance::{Memory, content};

/// Stores objects with their [`content`]; one result each.
async fn store(
    adapter: &RespAdapter,
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
    adapter: &RespAdapter,
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

/// Waits until the adapter is as it should be.
async fn until(adapter: &RespAdapter, is_healthy: bool) {
    while adapter.status()["is_healthy"] != is_healthy {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
