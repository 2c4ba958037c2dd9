//! A bucket of S3 as a second tier.
//!
//! One object of the bucket per object. Key and value are those of LMCache, so both can use one bucket at the same time. Layout
//! and checksum are in the metadata of the object, which is written with it; LMCache ignores it.
//!
//! The bucket is the only index: objects of other writers are found, and those that were deleted are misses. An object of
//! another length or layout is a miss, and the next store replaces it.
//!
//! Lookups ask about all their keys, since one behind a gap may be needed: another tier can have what is missing here. Callers
//! ask in growing slices and stop behind gaps themselves.

mod client;
mod content;
mod credentials;
mod delete;
mod errors;
mod http;
mod limit;
mod listing;
mod load;
mod metadata;
mod name;
mod options;
mod sign;
mod store;
#[cfg(test)]
mod tests;
mod time;
mod xml;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_core::object_key::ObjectKey;
use serde_json::{Value as Json, json};
use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tokio::task::JoinSet;

use client::{Call, Client};
use credentials::Variables;
use kvtier_l2::{
    Adapter, BoxFuture, Buffer, Capabilities, ErrorKind, KeySet, L2Error, ListPage, Listed,
    LoadItem, Loaded, ObjectSpec, Recovered, StoreItem, Stored,
};
use limit::S3Class;
use metadata::MetadataCounters;

pub use options::S3;
pub use options::S3Options;

/// Longest answer to a request of one object, beside its bytes.
const MAX_ANSWER: usize = 64 << 10;

/// Adapter of a bucket.
///
/// ```
/// use kvtier_l2::Registry;
/// use kvtier_l2_s3::S3;
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let config = r#"{"type": "s3", "s3_endpoint": "kv.s3.example", "s3_region": "eu-west-1"}"#;
/// let registry = Registry::of(&[S3]);
/// let adapter = registry.open(&registry.parse_json(config)?)?;
/// assert!(adapter.capabilities().shared);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct S3Adapter {
    bucket: Arc<S3Bucket>,
}

/// Held by what is in flight: the end of the adapter waits for it.
type Open = Arc<OwnedRwLockReadGuard<bool>>;

/// The bucket, as the tasks of calls share it.
struct S3Bucket {
    client: Client,
    /// Whether the adapter is open. What is in flight holds it for reading, and the end waits for that.
    open: Arc<RwLock<bool>>,
    key_prefix: String,
    multipart_bytes: u64,
    object_headers: Vec<(&'static str, String)>,
    trust_missing_layout: bool,
    require_checksum: bool,
    /// Whether the server deletes one object per request only.
    deletes_singly: std::sync::atomic::AtomicBool,
    /// Objects that were found to be damaged: the next store replaces them.
    damaged: KeySet,
    counters: MetadataCounters,
    /// Stores of objects that were there with the same bytes.
    skipped: AtomicU64,
}

impl S3Bucket {
    /// The key of an object in the bucket.
    fn key(&self, object: &ObjectSpec) -> Result<String, L2Error> {
        self.key_of(&object.key)
    }

    fn key_of(&self, key: &ObjectKey) -> Result<String, L2Error> {
        let key = name::of(&self.key_prefix, key);
        match key.len() {
            0..=name::MAX_KEY => Ok(key),
            len => {
                let what = format!("a key of {len} bytes; S3 has at most {}", name::MAX_KEY);
                Err(self.client.error(ErrorKind::Refused, &what))
            }
        }
    }

    fn malformed(&self, what: &str) -> L2Error {
        let what = format!("{what}: an unexpected answer");
        self.client.error(ErrorKind::Unavailable, &what)
    }

    /// Whether the buffer is one for the object.
    fn check(&self, object: &ObjectSpec, buffer: &Buffer) -> Result<(), L2Error> {
        let checked = buffer.check(object.len);
        checked.map_err(|error| self.client.error(error.kind(), &error.to_string()))
    }

    /// Whether bytes without a layout are no object's. Copies of a bucket may lose metadata, so what has none may be kvtier's
    /// own, of another layout.
    fn needs_layout(&self) -> bool {
        !self.trust_missing_layout || self.require_checksum
    }

    /// Runs `work` on each item, each in a task of its own; one result each, in order. The tasks own the items, and end if the
    /// returned future is dropped.
    async fn each<T, R, F>(
        self: &Arc<Self>,
        items: Vec<T>,
        work: fn(Arc<Self>, T, Open) -> F,
    ) -> Vec<Result<R, L2Error>>
    where
        T: Send + 'static,
        R: Send + 'static,
        F: Future<Output = Result<R, L2Error>> + Send + 'static,
    {
        let all = |error: L2Error| items.iter().map(|_| Err(error.clone())).collect();
        let open = match self.opened().await {
            Ok(open) => open,
            Err(error) => return all(error),
        };
        let ended_early = "the call has ended early";
        let mut results: Vec<_> = all(self.client.error(ErrorKind::Unavailable, ended_early));
        let mut tasks = JoinSet::new();
        for (number, item) in items.into_iter().enumerate() {
            let (bucket, open) = (Arc::clone(self), Arc::clone(&open));
            tasks.spawn(async move { (number, work(bucket, item, open).await) });
        }
        while let Some(ended) = tasks.join_next().await {
            if let Ok((number, result)) = ended
                && let Some(slot) = results.get_mut(number)
            {
                *slot = result;
            }
        }
        results
    }

    /// Keeps the adapter open.
    ///
    /// # Errors
    /// If it is closed.
    async fn opened(&self) -> Result<Open, L2Error> {
        let open = Arc::clone(&self.open).read_owned().await;
        if *open {
            Ok(Arc::new(open))
        } else {
            Err(self
                .client
                .error(ErrorKind::Unavailable, "the adapter is closed"))
        }
    }
}

/// Returns the bytes of an object in the bucket, if it can be loaded.
async fn lookup(
    bucket: Arc<S3Bucket>,
    object: ObjectSpec,
    _: Open,
) -> Result<Option<u64>, L2Error> {
    let Ok(key) = bucket.key(&object) else {
        return Ok(None);
    };
    let call = Call {
        class: S3Class::Keys,
        ..Call::new("HEAD", &key)
    };
    let answer = bucket.client.send(&call).await?;
    let response = &answer.response;
    let found = match response.status() {
        404 => None,
        200 if response.content_length() != Some(object.len) => None,
        200 => {
            let metadata = metadata::of(response, &object);
            let is_loadable = bucket.counters.is_loadable(metadata, bucket.needs_layout());
            is_loadable.then_some(object.len)
        }
        _ => return Err(answer.failure("lookup").await),
    };
    answer.response.end();
    Ok(found)
}

impl S3Adapter {
    /// Returns an adapter; it connects with the first call. To be called within a tokio runtime.
    #[must_use]
    pub fn open(options: &S3Options) -> Self {
        Self::open_with(options, Variables::of_process())
    }

    fn open_with(options: &S3Options, variables: Variables) -> Self {
        let bucket = S3Bucket {
            client: Client::new(options, variables),
            open: Arc::new(RwLock::new(true)),
            key_prefix: options.key_prefix.clone(),
            multipart_bytes: options.multipart_bytes.max(1),
            object_headers: options.object_headers.clone(),
            trust_missing_layout: options.trust_missing_layout,
            require_checksum: options.require_checksum,
            deletes_singly: false.into(),
            damaged: KeySet::default(),
            counters: MetadataCounters::default(),
            skipped: AtomicU64::new(0),
        };
        Self {
            bucket: Arc::new(bucket),
        }
    }
}

impl Adapter for S3Adapter {
    fn kind(&self) -> &'static str {
        "s3"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            delete: true,
            list: true,
            shared: true,
            read_only: false,
            verifies: true,
            owns_space: false,
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(self.bucket.each(batch, store::store))
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            let found = self.bucket.each(batch, lookup).await;
            let is_denied = |found: &Result<_, L2Error>| matches!(found, Err(error) if error.kind() == ErrorKind::Refused);
            let are_all_denied = found.iter().all(is_denied);
            // A policy may deny single objects.
            let found = found.into_iter().map(|found| match found {
                denied if is_denied(&denied) && !are_all_denied => Ok(None),
                found => found,
            });
            found.collect()
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(self.bucket.each(batch, load::load))
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(delete::delete_all(&self.bucket, keys))
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async move { Ok(listing::page(&self.bucket, from.as_deref(), limit).await?.0) })
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(listing::recover(&self.bucket, found))
    }

    fn check(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if let Ok(_open) = self.bucket.opened().await {
                self.bucket.client.check().await;
            }
        })
    }

    fn status(&self) -> Json {
        let client = &self.bucket.client;
        let (limit, in_flight) = client.limit.now();
        let problem = client.problem();
        let mut status = json!({
            "is_healthy": problem.is_none(),
            "type": "s3",
            "endpoint": client.place.authority,
            "bucket": client.place.bucket,
            "key_prefix": self.bucket.key_prefix,
            "error": problem.map(|error| error.to_string()),
            "requests_in_flight": in_flight,
            "requests_limit": limit,
            "idle_connections": client.idle(),
            "skipped_stores": self.bucket.skipped.load(Ordering::Relaxed),
        });
        self.bucket.counters.show(&mut status);
        status
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            *self.bucket.open.write().await = false;
            self.bucket.client.close();
        })
    }
}
