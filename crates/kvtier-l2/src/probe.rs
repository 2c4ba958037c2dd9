//! Trial of a backend: one object is stored, found, loaded and deleted.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_core::ChunkHash;
use kvtier_core::object_key::ObjectKey;
use kvtier_memory::{Arena, ArenaKind, Extent};

use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, LoadItem, ObjectSpec, StoreItem};
use crate::sample;

/// Bytes of the object.
const LEN: u64 = 64 << 10;

/// How long peers that refuse are asked again.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// A trial that has succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probed {
    /// Whether an object was written; one that is only read was only asked for one.
    pub was_written: bool,
    /// From the first call to the answer to the last.
    pub time: Duration,
    /// Why peers are not connected: no failure, since the first of them to start finds no other.
    pub missing_peers: Option<String>,
}

/// Stores 64 KiB as an object of the model `kvtier/probe` with a random hash, looks it up, loads it, compares its bytes, and
/// deletes it, as far as the adapter can.
///
/// # Errors
/// The first step that fails, and why.
pub async fn probe(adapter: &dyn Adapter) -> Result<Probed, L2Error> {
    let started = Instant::now();
    let capabilities = adapter.capabilities();
    let probed = |was_written| Probed {
        was_written,
        time: started.elapsed(),
        missing_peers: None,
    };
    let (object, stored, loaded) = object().map_err(|error| {
        let what = format!("memory for an object: {error}");
        L2Error::new(ErrorKind::Memory, what)
    })?;
    if capabilities.read_only {
        let found = adapter.lookup(vec![object]).await;
        found.map_err(|error| failed("lookup", &error))?;
        let probed = probed(false);
        let mut status = adapter.status();
        while status["connected_peers"] == 0 && started.elapsed() < CONNECTION_TIMEOUT {
            tokio::time::sleep(Duration::from_millis(10)).await;
            status = adapter.status();
        }
        return Ok(Probed {
            missing_peers: status["error"]
                .as_str()
                .filter(|_| status["connected_peers"] == 0)
                .map(str::to_owned),
            ..probed
        });
    }
    let item = StoreItem {
        object: object.clone(),
        from: stored.clone(),
    };
    one(adapter.store(vec![item]).await).map_err(|error| failed("store", &error))?;
    // What was stored is deleted, whatever comes of it.
    let read = read(adapter, &object, &stored, &loaded).await;
    if capabilities.delete {
        let deleted = one(adapter.delete(vec![object.key]).await);
        deleted.map_err(|error| failed("delete", &error))?;
    }
    read.map(|()| probed(true))
}

async fn read(
    adapter: &dyn Adapter,
    object: &ObjectSpec,
    stored: &Buffer,
    loaded: &Buffer,
) -> Result<(), L2Error> {
    let found = adapter.lookup(vec![object.clone()]).await;
    let found = found.map_err(|error| failed("lookup", &error))?;
    if found != [Some(adapter.size_of(LEN))] {
        let what = "the object that was stored is not found";
        return Err(L2Error::new(ErrorKind::NotFound, format!("lookup: {what}")));
    }
    let item = LoadItem {
        object: object.clone(),
        to: loaded.clone(),
    };
    one(adapter.load(vec![item]).await).map_err(|error| failed("load", &error))?;
    match (stored.checksum(), loaded.checksum()) {
        (Ok(stored), Ok(loaded)) if stored == loaded => Ok(()),
        (Err(error), _) | (_, Err(error)) => Err(failed("load", &error.into())),
        _ => Err(L2Error::new(
            ErrorKind::Corrupt,
            "load: the bytes are not those that were stored",
        )),
    }
}

/// An object with a random key, memory with its bytes, and memory for them.
fn object() -> Result<(ObjectSpec, Buffer, Buffer), Box<dyn std::error::Error>> {
    let random = RandomState::new();
    let mut hash = [0; 32];
    for (at, part) in hash.chunks_mut(8).enumerate() {
        part.copy_from_slice(&random.hash_one(at).to_le_bytes());
    }
    let arena = Arc::new(Arena::create(ArenaKind::Anonymous, 2 * LEN)?);
    let part = |at| Buffer::new(Arc::clone(&arena), Extent::new(at, LEN), Arc::new(()));
    let (stored, loaded) = (part(0), part(LEN));
    stored.write(0, &sample::values(random.hash_one(LEN), LEN as usize))?;
    let object = ObjectSpec {
        key: ObjectKey::new(ChunkHash(hash), "kvtier/probe", 0x0100_0100, 0, "")?,
        len: LEN,
        layout: sample::LAYOUT,
    };
    Ok((object, stored, loaded))
}

fn one<T>(results: Vec<Result<T, L2Error>>) -> Result<T, L2Error> {
    let none = || L2Error::new(ErrorKind::Unavailable, "no result");
    results.into_iter().next().unwrap_or_else(|| Err(none()))
}

fn failed(step: &str, error: &L2Error) -> L2Error {
    L2Error::new(error.kind(), format!("{step}: {error}"))
}
