//! The contract between the planners and a backend.
//!
//! Obligations of an implementer:
//! - Every call answers for each item it was given, in order; one bad item fails alone.
//! - A store is atomic: nobody ever sees part of an object, nor does a reader after a crash.
//! - A load that answers `Ok` has written exactly the object's bytes, of this key and layout. Anything else is an error:
//!   [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) for a miss, [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt)
//!   for an object that is not what was stored. Without [`Capabilities::verifies`] the bytes may be damaged ones.
//! - Dropping a returned future cancels the wait, not necessarily the work; the work goes on to hold its buffers. Once it
//!   has answered for a call, it touches that call's buffers no more.
//! - Nothing waits for ever by design of the adapter, but deadlines, retries, breakers, concurrency limits, checksums
//!   and fault injection are wrappers: an adapter tries once and reports.
//! - Keys and stored bytes are hostile; an adapter never panics on them.
//!
//! Obligations of a caller: batches are of any size, also empty; `from.len()` and `to.len()` equal `object.len`; the same
//! key may be asked for by several calls at once. After a dropped future or an
//! [`ErrorKind::Deadline`](crate::ErrorKind::Deadline) the work may still write to the buffers of a load: they are neither
//! read nor given to another load until their holds are gone.

use std::future::Future;
use std::pin::Pin;

use kvtier_core::object_key::ObjectKey;
use serde_json::Value;

use crate::error::L2Error;
use crate::object::{LoadItem, ObjectSpec, StoreItem};

/// A future that any runtime can poll from any thread.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What an adapter can do beyond store, lookup and load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// Objects can be deleted; without it nothing is evicted there.
    pub delete: bool,
    /// Objects can be listed, hence also recovered after a restart.
    pub list: bool,
    /// It is asked for loads only: nothing is stored, deleted, put aside or evicted.
    pub read_only: bool,
    /// Other processes may store and delete there: what is not known may be there, what is known may be gone.
    pub shared: bool,
    /// Its loads compare bytes with a checksum that was stored with them. Without it a wrapper compares them, as far as it
    /// can: with what this process stored.
    pub verifies: bool,
}

/// What a store of one object did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// It was written; the bytes it takes there, which may be more than the object has.
    Written(u64),
    /// An equal object was there already; the bytes that takes.
    AlreadyThere(u64),
}

impl Stored {
    /// Bytes the object takes in the backend.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Written(bytes) | Self::AlreadyThere(bytes) => bytes,
        }
    }
}

/// What a load of one object did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loaded {
    /// Whether the bytes were compared with a checksum that was stored with them. Objects that others wrote may have
    /// none.
    pub verified: bool,
}

/// One object of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its identity.
    pub key: ObjectKey,
    /// Bytes it takes in the backend.
    pub bytes: u64,
    /// When it was last used or written, in seconds since the Unix epoch, as far as the backend knows.
    pub used_at: u64,
}

/// A part of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListPage {
    /// Objects, in no particular order. May be empty although there are more.
    pub objects: Vec<Listed>,
    /// Where the next part begins; `None` at the end. Only meaningful to the adapter that gave it.
    pub next: Option<String>,
}

/// What [`Adapter::recover`] found and did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recovered {
    /// Objects found.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Leftovers of writes that never ended, removed.
    pub removed: u64,
    /// Entries that are no objects of ours, left alone.
    pub foreign: u64,
}

/// A backend that keeps whole objects.
pub trait Adapter: Send + Sync + 'static {
    /// Its `type` name, as in the configuration.
    fn kind(&self) -> &'static str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Writes objects; one result each.
    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>>;

    /// Which of these objects are there with a plausible length: their bytes there, `None` for those that are not.
    ///
    /// # Errors
    /// When the backend cannot be asked at all.
    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>>;

    /// Reads objects; one result each.
    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>>;

    /// Deletes objects; whether each was there.
    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>>;

    /// A part of what is there, from `from` (`None` at the start), about `limit` objects.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) without the capability; others of the backend.
    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>>;

    /// Looks through what is there after a start: removes leftovers, and tells each object by `found`, some at a time.
    /// Stops early when `found` answers false. Store, lookup and load work meanwhile.
    ///
    /// # Errors
    /// When the backend cannot be looked through; what was found until then stays found.
    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>>;

    /// Bytes an object of `len` bytes will take in the backend, as far as that is known before it is written.
    fn size_of(&self, len: u64) -> u64 {
        len
    }

    /// Bytes that could still be written, if the backend has a bound of its own such as a disk. `None` is "unknown".
    ///
    /// # Errors
    /// When the backend does not answer.
    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(async { Ok(None) })
    }

    /// Checks whether the backend is still the one that was opened. Called about once a second; [`status`](Self::status)
    /// reports the outcome.
    fn check(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// For `/status`: an object with at least `is_healthy` and `type`.
    fn status(&self) -> Value;

    /// Ends its threads and connections, after the work under way.
    fn close(&self) -> BoxFuture<'_, ()>;
}
