//! Calls of an adapter with objects whose bytes are their [`content`].

use super::{Memory, content};
use crate::adapter::{Adapter, Loaded, Stored};
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, LoadItem, ObjectSpec, StoreItem};

/// Stores objects; one result each.
pub async fn store(
    adapter: &dyn Adapter,
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
pub async fn load(
    adapter: &dyn Adapter,
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
        result.map(|_| super::memory::bytes(buffer))
    };
    results.into_iter().zip(&buffers).map(bytes).collect()
}

/// The kinds of errors.
pub fn kinds<T>(results: Vec<Result<T, L2Error>>) -> Vec<Option<ErrorKind>> {
    let kind = |result: Result<T, L2Error>| result.err().map(|error| error.kind());
    results.into_iter().map(kind).collect()
}
