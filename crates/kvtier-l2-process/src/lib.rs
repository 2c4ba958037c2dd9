//! A second tier in a process of its own, by the protocol of `docs/tier-protocol.md`: requests by a unix socket, bytes by
//! shared memory.
//!
//! The process is trusted with nothing but its own answers: what it sends is bounded and checked, the memory that it can write
//! holds only objects on their way, and what is copied out of it is compared with the checksum that was stored. If it crashes,
//! hangs or breaks the protocol, its requests in flight fail, and it is connected to again.
//!
//! L1's arena itself is not shared: the process could overwrite objects of other tenants, and write to memory that was given
//! to another object after a deadline. The price is a copy.

mod frame;
mod keys;
mod link;
mod load;
mod message;
mod metadata;
mod options;
mod results;
mod segment;
mod session;
mod store;
mod supervisor;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use kvtier_core::object_key::{KeyShape, ObjectKey};
use serde_json::{Value, json};
use tokio::sync::RwLock;
use tokio::task::JoinSet;
use tokio::time::timeout;

use keys::KeyRequests;
use kvtier_l2::{
    Adapter, BoxFuture, Buffer, Capabilities, ErrorKind, KeySet, L2Error, ListPage, Listed,
    LoadItem, Loaded, ObjectSpec, Recovered, StoreItem, Stored,
};
use link::Link;
use message::Welcome;
use metadata::MetadataCounters;
use segment::ALIGNMENT;
use session::ProcessConnection;

pub use options::PROCESS;
pub use options::ProcessOptions;

/// Bytes and objects per request, so that a tier works on several at once. A larger object has a request of its own.
const GROUP_BYTES: u64 = 8 << 20;
const GROUP_OBJECTS: usize = 128;

/// Bytes from which a copy has a thread of its own.
const MIN_BLOCKING: u64 = 64 << 10;

/// Time for the calls in flight at the end; then they fail.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Adapter of a tier in a process of its own.
///
/// ```
/// use kvtier_l2::{Adapter as _, Registry};
/// use kvtier_l2_process::{PROCESS, ProcessAdapter, ProcessOptions};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let config = r#"{"type": "process", "socket_path": "/run/tier.sock"}"#;
/// let config = Registry::of(&[PROCESS]).parse_json(config)?;
/// let adapter = ProcessAdapter::open(&ProcessOptions::of(&config));
/// assert_eq!(adapter.kind(), "process");
/// // The process has not said yet what it keeps.
/// assert_eq!(adapter.keeps_metadata(), None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ProcessAdapter {
    shared: Arc<ProcessTier>,
    /// Whether it is open. Calls in flight hold it for reading, and the end waits for them.
    open: Arc<RwLock<bool>>,
}

/// What the tasks of calls share.
struct ProcessTier {
    link: Link,
    options: ProcessOptions,
    /// Objects that were found to be damaged: the next store replaces them.
    damaged: KeySet,
    counters: MetadataCounters,
}

/// One item of a call: its place in the batch, and the name of its object.
struct GroupItem<T> {
    number: usize,
    name: String,
    item: T,
}

/// Items of one request.
type Group<T> = Vec<GroupItem<T>>;

/// Results of some items, by their place in the batch.
type Results<R> = Vec<(usize, Result<R, L2Error>)>;

/// What an item is about.
trait About {
    fn object(&self) -> &ObjectSpec;
    fn buffer(&self) -> &Buffer;
}

impl About for StoreItem {
    fn object(&self) -> &ObjectSpec {
        &self.object
    }

    fn buffer(&self) -> &Buffer {
        &self.from
    }
}

impl About for LoadItem {
    fn object(&self) -> &ObjectSpec {
        &self.object
    }

    fn buffer(&self) -> &Buffer {
        &self.to
    }
}

/// Bytes that an object takes in the segment.
fn footprint(len: u64) -> u64 {
    len.max(1).next_multiple_of(ALIGNMENT)
}

/// Returns the key of an object at a tier.
fn name_of(key: &ObjectKey) -> String {
    key.text().name(KeyShape::Grouped)
}

/// Reads what a tier could send, as each kind of answer.
#[cfg(feature = "fuzzing")]
pub fn read_answers(bytes: &[u8]) {
    let Some((head, body)) = bytes.split_first_chunk() else {
        return;
    };
    let _ = frame::Head::decode(head);
    let _ = Welcome::decode(body);
    let count = usize::from(head[0] % 4);
    if let Ok(Ok(entries)) = message::results::<Option<message::ObjectResult>>("load", body, count)
    {
        assert_eq!(entries.len(), count);
        for entry in entries.into_iter().flatten() {
            let _ = entry.failure("load");
            hex::decode(entry.meta().unwrap_or_default()).ok();
        }
    }
    let _ = message::results::<message::Deleted>("delete", body, count);
    let _ = message::free_bytes(body);
    if let Ok(Ok(page)) = message::page(body) {
        assert!(page.objects.len() <= message::MAX_BATCH);
    }
}

/// Runs `work`, which copies `bytes`, where it blocks no other task.
async fn copying<T: Send + 'static>(
    bytes: u64,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, L2Error> {
    if bytes < MIN_BLOCKING {
        return Ok(work());
    }
    let lost = |error| {
        L2Error::new(
            ErrorKind::Memory,
            format!("a copy has ended early: {error}"),
        )
    };
    tokio::task::spawn_blocking(work).await.map_err(lost)
}

impl ProcessTier {
    /// Whether bytes without a layout are no object's.
    fn needs_layout(&self) -> bool {
        !self.options.trust_missing_layout || self.options.require_checksum
    }

    fn check_name(&self, welcome: &Welcome, name: &str) -> Result<(), L2Error> {
        match name.len() as u64 {
            len if len > welcome.max_key_bytes => {
                let what = format!("a key of {len} bytes; at most {}", welcome.max_key_bytes);
                Err(self.link.error(ErrorKind::Refused, &what))
            }
            _ => Ok(()),
        }
    }

    /// Whether an item can be moved.
    fn check(
        &self,
        session: &ProcessConnection,
        item: &impl About,
        name: &str,
    ) -> Result<(), L2Error> {
        let (object, buffer, welcome) = (item.object(), item.buffer(), &session.welcome);
        let refused = |what: String| Err(self.link.error(ErrorKind::Refused, &what));
        self.check_name(welcome, name)?;
        let checked = buffer.check(object.len);
        checked.map_err(|error| self.link.error(error.kind(), &error.to_string()))?;
        if object.len > welcome.max_object_bytes {
            let most = welcome.max_object_bytes;
            return refused(format!(
                "an object of {} bytes; the tier takes {most}",
                object.len
            ));
        }
        let segment = session.segment.memory().len();
        if footprint(object.len) > segment {
            let what = format!(
                "an object of {} bytes does not fit the shared memory of {segment}; raise shared_memory_mb",
                object.len
            );
            return refused(what);
        }
        Ok(())
    }

    /// Divides items into groups, of one request each; results of those that cannot be moved are among `refused`.
    fn groups<T: About, R>(
        &self,
        session: &ProcessConnection,
        items: Vec<T>,
        refused: &mut Results<R>,
    ) -> Vec<(u64, Group<T>)> {
        let most = GROUP_OBJECTS.min(session.welcome.max_batch);
        // Two groups fit, so that one is copied while the tier works on the other.
        let bytes = GROUP_BYTES.min(session.segment.memory().len() / 2);
        let mut groups: Vec<(u64, Group<T>)> = Vec::new();
        for (number, item) in items.into_iter().enumerate() {
            let name = name_of(&item.object().key);
            if let Err(error) = self.check(session, &item, &name) {
                refused.push((number, Err(error)));
                continue;
            }
            let size = footprint(item.object().len);
            let item = GroupItem { number, name, item };
            match groups.last_mut() {
                Some((sum, group)) if group.len() < most && *sum + size <= bytes => {
                    *sum += size;
                    group.push(item);
                }
                _ => groups.push((size, vec![item])),
            }
        }
        groups
    }

    fn closed(&self) -> L2Error {
        self.link
            .error(ErrorKind::Unavailable, "the adapter is closed")
    }
}

impl ProcessAdapter {
    /// Returns an adapter, which starts to connect. To be called within a tokio runtime.
    #[must_use]
    pub fn open(options: &ProcessOptions) -> Self {
        let shared = ProcessTier {
            link: Link::open(options),
            options: options.clone(),
            damaged: KeySet::default(),
            counters: MetadataCounters::default(),
        };
        Self {
            shared: Arc::new(shared),
            open: Arc::new(RwLock::new(true)),
        }
    }

    /// Waits for the first attempt to connect.
    ///
    /// # Errors
    /// Why there is no connection.
    pub async fn connected(&self) -> Result<(), L2Error> {
        self.shared.link.session().await.map(drop)
    }

    /// Whether the tier said that it keeps metadata; `None` before it said anything.
    #[must_use]
    pub fn keeps_metadata(&self) -> Option<bool> {
        Some(self.shared.link.welcome()?.features.metadata)
    }

    /// Runs `work` on a session while the adapter is open.
    async fn with<R, F: Future<Output = Result<R, L2Error>>>(
        &self,
        work: impl FnOnce(Arc<ProcessConnection>) -> F,
    ) -> Result<R, L2Error> {
        let open = self.open.read().await;
        if !*open {
            return Err(self.shared.closed());
        }
        work(self.shared.link.session().await?).await
    }

    /// Runs `work`, which asks about keys, while the adapter is open.
    async fn ask<R>(
        &self,
        work: impl AsyncFnOnce(&KeyRequests<'_>) -> Result<R, L2Error>,
    ) -> Result<R, L2Error> {
        let tier = &*self.shared;
        self.with(async |session| work(&KeyRequests { tier, session }).await)
            .await
    }

    /// Moves items in groups, each in a task of its own; one result per item, in order. The tasks end if the returned future
    /// is dropped.
    async fn each<T, R, F>(
        &self,
        items: Vec<T>,
        work: fn(Arc<ProcessTier>, Arc<ProcessConnection>, u64, Group<T>) -> F,
    ) -> Vec<Result<R, L2Error>>
    where
        T: About + Send + 'static,
        R: Send + 'static,
        F: Future<Output = Result<Results<R>, L2Error>> + Send + 'static,
    {
        let count = items.len();
        let all = |error: L2Error| -> Vec<_> { (0..count).map(|_| Err(error.clone())).collect() };
        let moved = self.with(async |session| {
            let mut results = Results::new();
            let mut tasks = JoinSet::new();
            for (bytes, group) in self.shared.groups(&session, items, &mut results) {
                let (shared, session) = (Arc::clone(&self.shared), Arc::clone(&session));
                let numbers: Vec<_> = group.iter().map(|item| item.number).collect();
                let moved = work(shared, session, bytes, group);
                tasks.spawn(async move {
                    let fail = |error: L2Error| {
                        let failed = numbers.into_iter();
                        failed.map(|number| (number, Err(error.clone()))).collect()
                    };
                    moved.await.unwrap_or_else(fail)
                });
            }
            while let Some(ended) = tasks.join_next().await {
                results.extend(ended.unwrap_or_default());
            }
            Ok(results)
        });
        let moved = match moved.await {
            Ok(moved) => moved,
            Err(error) => return all(error),
        };
        let ended_early = "the call has ended early";
        let mut results = all(self.shared.link.error(ErrorKind::Unavailable, ended_early));
        for (number, result) in moved {
            if let Some(place) = results.get_mut(number) {
                *place = result;
            }
        }
        results
    }
}

impl Adapter for ProcessAdapter {
    fn kind(&self) -> &'static str {
        "process"
    }

    fn capabilities(&self) -> Capabilities {
        // Before the tier has said what it can, it may be able to do all. Its index is of no use without a listing.
        let welcome = self.shared.link.welcome();
        let can = welcome.as_ref().map(|welcome| welcome.features);
        Capabilities {
            delete: can.is_none_or(|can| can.delete),
            list: can.is_none_or(|can| can.list),
            shared: can.is_none_or(|can| can.shared || !can.list),
            read_only: false,
            verifies: !self.shared.options.trust_missing_layout,
            owns_space: false,
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(self.each(batch, store::store))
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(self.ask(async move |keys| keys.lookup(batch).await))
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(self.each(batch, load::load))
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move {
            let count = keys.len();
            let deleted = self.ask(async |asked| asked.delete(keys).await);
            match deleted.await {
                Ok(deleted) => deleted,
                Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
            }
        })
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(self.ask(async move |keys| Ok(keys.page(from.as_deref(), limit).await?.0)))
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(self.ask(async move |keys| keys.recover(found).await))
    }

    fn size_of(&self, len: u64) -> u64 {
        let welcome = self.shared.link.welcome();
        let overhead = welcome.map_or(0, |welcome| welcome.overhead_bytes);
        len.saturating_add(overhead)
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(self.ask(async |keys| keys.free_bytes().await))
    }

    fn check(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if let Some(session) = self.shared.link.current() {
                session.ping();
            }
        })
    }

    fn status(&self) -> Value {
        let ProcessTier { link, options, .. } = &*self.shared;
        let (problem, session) = (link.problem(), link.current());
        let mut status = json!({
            "is_healthy": problem.is_none(),
            "type": "process",
            "socket_path": options.socket_path,
            "tier": link.welcome().map(|welcome| welcome.tier.clone()),
            "error": problem.map(|error| error.to_string()),
            "requests_in_flight": session.as_ref().map_or(0, |session| session.in_flight()),
            "requests_limit": session.as_ref().map_or(0, |session| session.welcome.max_in_flight),
            "shared_memory_bytes": options.shared_memory_bytes,
            "shared_memory_used_bytes": session.as_ref().map_or(0, |session| session.segment.used()),
            "command_restarts": link.restarts(),
        });
        self.shared.counters.show(&mut status);
        status
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if let Ok(mut open) = timeout(CLOSE_TIMEOUT, self.open.write()).await {
                *open = false;
            }
            // What is still in flight fails by this.
            self.shared.link.close().await;
            *self.open.write().await = false;
        })
    }
}
