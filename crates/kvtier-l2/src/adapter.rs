//! Contract between the planners and a backend.
//!
//! Obligations of an implementer:
//! - Every call has one result per item, in order; a bad item fails alone.
//! - A store is atomic: no reader ever sees a part of an object, also not after a crash.
//! - A load that answers `Ok` has written exactly the object's bytes, of this key and layout. Anything else is an error:
//!   [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) for a miss, [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt)
//!   for an object that is not what was stored. Without [`Capabilities::verifies`] the bytes may be damaged ones.
//! - Dropping a returned future cancels the wait, not necessarily the work, which keeps its buffers until it ends. After
//!   the answer to a call its buffers are not touched.
//! - An adapter tries once and reports. Deadlines, retries, breakers, concurrency limits, checksums and fault injection
//!   are wrappers.
//! - Keys and stored bytes are hostile; an adapter never panics on them.
//!
//! Obligations of a caller: batches are of any size, also empty; `from.len()` and `to.len()` equal `object.len`; several
//! calls may have the same key at once. After a dropped future or an
//! [`ErrorKind::Deadline`](crate::ErrorKind::Deadline) the work may still write to the buffers of a load: they are neither
//! read nor reused until their holds are dropped.

use std::collections::HashSet;
use std::future::Future;
use std::pin::Pin;

use kvtier_core::object_key::ObjectKey;
use kvtier_memory::checksum::checksum128;
use serde_json::Value;

use crate::error::L2Error;
use crate::object::{LoadItem, ObjectSpec, StoreItem};

/// A future that any runtime can poll from any thread.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Optional features of an adapter beyond store, lookup and load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// Objects can be deleted; without it nothing is evicted.
    pub delete: bool,
    /// Objects can be listed, hence also recovered after a restart.
    pub list: bool,
    /// Used for loads only: nothing is stored, deleted, quarantined or evicted.
    pub read_only: bool,
    /// Other processes may store and delete there, so the index can lack objects and have deleted ones.
    pub shared: bool,
    /// Loads compare bytes with a checksum that was stored with them. Without it, a wrapper compares them with the
    /// checksums of what this process stored.
    pub verifies: bool,
    /// Whether no other program uses its space: what is deleted is free at once, though free space may be in pieces that are too small.
    pub owns_space: bool,
}

/// Result of the store of one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// Written; bytes of the object in the backend, which may be more than its own.
    Written(u64),
    /// An equal object was there already; its bytes in the backend.
    AlreadyThere(u64),
}

impl Stored {
    /// Bytes of the object in the backend.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Written(bytes) | Self::AlreadyThere(bytes) => bytes,
        }
    }
}

/// Result of the load of one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loaded {
    /// Whether the bytes were compared with a checksum that was stored with them. Objects of other writers may have none.
    pub verified: bool,
}

/// One object of a listing, ordered by its last use.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listed {
    /// Time of its last use or write as the backend reports it, in seconds since the Unix epoch.
    pub used_at: u64,
    /// Key of the object.
    pub key: ObjectKey,
    /// Bytes of the object in the backend.
    pub bytes: u64,
}

/// Page of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListPage {
    /// Objects, in no particular order. May be empty although there are more.
    pub objects: Vec<Listed>,
    /// Start of the next page, `None` at the end. Only the adapter that returned it can interpret it.
    pub next: Option<String>,
}

/// Result of [`Adapter::recover`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recovered {
    /// Objects found.
    pub objects: u64,
    /// Bytes of the objects found.
    pub bytes: u64,
    /// Removed leftovers of interrupted writes.
    pub removed: u64,
    /// Entries that are not kvtier's, which are kept.
    pub foreign: u64,
}

/// Client of one backend of whole objects.
pub trait Adapter: Send + Sync + 'static {
    /// Returns the adapter's `type` in the configuration.
    fn kind(&self) -> &'static str;

    /// Returns the adapter's optional features.
    fn capabilities(&self) -> Capabilities;

    /// Writes objects; one result each.
    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>>;

    /// Returns the bytes in the backend per object, `None` for one that is not there or has an impossible length.
    ///
    /// # Errors
    /// If the backend does not answer.
    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>>;

    /// Names a host that is likely to have what is looked up next, one of several that the adapter asks.
    fn prefer(&self, _host: &str) {}

    /// Reads objects; one result each.
    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>>;

    /// Deletes objects; returns whether each was there.
    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>>;

    /// Lists about `limit` objects from `from` on (`None` is the start). An object that is there all the time is on a page, or
    /// on several if the backend reorganises itself meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) without the capability; others of the backend.
    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>>;

    /// Scans the backend after a start: removes leftovers and passes all objects to `found`, in batches. Stops early if
    /// `found` returns false. Store, lookup and load work meanwhile.
    ///
    /// # Errors
    /// If the scan fails; the objects passed to `found` until then are valid.
    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>>;

    /// Expected bytes in the backend of an object of `len` bytes.
    fn size_of(&self, len: u64) -> u64 {
        len
    }

    /// Free bytes of a backend with a bound of its own such as a disk; `None` is unknown.
    ///
    /// # Errors
    /// If the backend does not answer.
    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(async { Ok(None) })
    }

    /// Checks whether the backend is still the one that was opened. Called about once per second; [`status`](Self::status)
    /// has the result.
    fn check(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// Returns its part of `/status`: an object with at least `is_healthy` and `type`.
    fn status(&self) -> Value;

    /// Ends its threads and connections after the calls in flight.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// Forwards methods of [`Adapter`] to the adapter in the field `inner`.
macro_rules! forward {
    ($($method:ident),*) => { $($crate::adapter::forward!(@ $method);)* };
    (@ kind) => { fn kind(&self) -> &'static str { self.inner.kind() } };
    (@ capabilities) => { fn capabilities(&self) -> Capabilities { self.inner.capabilities() } };
    (@ delete) => {
        fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> { self.inner.delete(keys) }
    };
    (@ list) => {
        fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
            self.inner.list(from, limit)
        }
    };
    (@ recover) => {
        fn recover<'a>(
            &'a self,
            found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
        ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
            self.inner.recover(found)
        }
    };
    (@ size_of) => { fn size_of(&self, len: u64) -> u64 { self.inner.size_of(len) } };
    (@ free_bytes) => {
        fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> { self.inner.free_bytes() }
    };
    (@ check) => { fn check(&self) -> BoxFuture<'_, ()> { self.inner.check() } };
    (@ prefer) => { fn prefer(&self, host: &str) { self.inner.prefer(host); } };
    (@ status) => { fn status(&self) -> Value { self.inner.status() } };
    (@ close) => { fn close(&self) -> BoxFuture<'_, ()> { self.inner.close() } };
}

pub(crate) use forward;

/// Passes the objects of all pages of a backend to `found`, until that returns false. `page` returns the page at a position,
/// and the number of entries in it that are not kvtier's.
///
/// # Errors
/// Those of `page`, and `circles` if a position comes again.
pub async fn recover_pages<'a>(
    page: impl Fn(Option<String>) -> BoxFuture<'a, Result<(ListPage, u64), L2Error>>,
    found: &(dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    circles: impl Fn() -> L2Error,
) -> Result<Recovered, L2Error> {
    let (mut recovered, mut next) = (Recovered::default(), None);
    let mut seen = HashSet::new();
    loop {
        let (page, foreign) = page(next).await?;
        recovered.foreign += foreign;
        recovered.objects += page.objects.len() as u64;
        for object in &page.objects {
            recovered.bytes = recovered.bytes.saturating_add(object.bytes);
        }
        if !found(page.objects) {
            return Ok(recovered);
        }
        next = page.next;
        match &next {
            None => return Ok(recovered),
            Some(position) if !seen.insert(checksum128(position.as_bytes())) => {
                return Err(circles());
            }
            Some(_) => {}
        }
    }
}
