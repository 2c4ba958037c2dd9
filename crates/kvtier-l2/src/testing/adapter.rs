//! An adapter that keeps objects in memory and follows a script.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use kvtier_common::sync::Mutex;
use kvtier_core::ChunkHash;
use kvtier_core::object_key::ObjectKey;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored,
};
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, LoadItem, ObjectSpec, StoreItem};

/// Operation that a script can select.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// [`Adapter::store`].
    Store,
    /// [`Adapter::lookup`].
    Lookup,
    /// [`Adapter::load`].
    Load,
    /// [`Adapter::delete`].
    Delete,
    /// [`Adapter::list`].
    List,
    /// [`Adapter::free_bytes`].
    FreeBytes,
    /// [`Adapter::recover`].
    Recover,
}

/// Outcome of one call.
#[derive(Debug, Clone)]
pub enum Step {
    /// Each item fails with its error or succeeds; the items behind the last one succeed.
    Items(Vec<Option<ErrorKind>>),
    /// All items fail, and nothing is done.
    Fail(ErrorKind),
    /// Waits for a permit of the gate, then succeeds.
    Wait,
    /// Is executed, and all items fail with [`ErrorKind::Deadline`].
    Late,
    /// Keeps the buffers, and all items fail with [`ErrorKind::Deadline`].
    KeepBuffers,
    /// Answers for one item more than requested.
    Surplus,
    /// Panics.
    Panic,
}

#[derive(Debug)]
struct Object {
    key: ObjectKey,
    bytes: Vec<u8>,
    used_at: u64,
}

/// An adapter for tests. Without a script every call succeeds on objects in memory.
#[derive(Debug, Default)]
pub struct TestAdapter {
    capabilities: Capabilities,
    /// If set, each object that is looked up or loaded exists, and its bytes have this value.
    every_object: Option<u8>,
    has_endless_listing: bool,
    /// Bytes per object beyond those of the object.
    overhead: u64,
    /// Bytes that [`Stored`] reports beyond the expected ones.
    pub surplus_bytes: AtomicU64,
    /// Permits for calls that wait; each call takes one.
    pub gate: Gate,
    /// Free bytes of the backend.
    pub free_bytes: Mutex<Option<u64>>,
    /// Bytes of the disk under it: objects beyond them are refused as [`ErrorKind::Full`].
    pub disk_bytes: Mutex<Option<u64>>,
    /// Whether its free bytes are those of that disk.
    pub reports_disk: AtomicBool,
    /// Buffers kept by [`Step::KeepBuffers`].
    pub kept: Mutex<Vec<Buffer>>,
    script: Mutex<VecDeque<(Option<Operation>, Step)>>,
    always: Mutex<BTreeMap<Operation, Step>>,
    objects: Mutex<BTreeMap<String, Object>>,
    refused: Mutex<HashSet<ObjectKey>>,
    log: Mutex<Vec<String>>,
    items: Mutex<BTreeMap<Operation, u64>>,
    store_keys: Mutex<Vec<ObjectKey>>,
    delete_keys: Mutex<Vec<ObjectKey>>,
    peak_bytes: Mutex<BTreeMap<String, u64>>,
    in_flight: AtomicUsize,
    max_in_flight: AtomicUsize,
}

/// A semaphore without permits at first.
#[derive(Debug)]
pub struct Gate(Semaphore);

impl Default for Gate {
    fn default() -> Self {
        Self(Semaphore::new(0))
    }
}

impl std::ops::Deref for Gate {
    type Target = Semaphore;

    fn deref(&self) -> &Semaphore {
        &self.0
    }
}

/// Objects have no order of their own; this one is the same in every run.
fn name(key: &ObjectKey) -> String {
    format!("{key:?}")
}

fn error(kind: ErrorKind) -> L2Error {
    L2Error::new(kind, kind.name())
}

/// Lengths of objects, which stand for their names in the log.
fn lengths<'a>(objects: impl IntoIterator<Item = &'a ObjectSpec>) -> Vec<u64> {
    objects.into_iter().map(|object| object.len).collect()
}

/// One error for the whole call, or a value.
fn whole<T>(outcomes: Vec<Result<(), L2Error>>, value: T) -> Result<T, L2Error> {
    let outcomes: Result<Vec<()>, _> = outcomes.into_iter().collect();
    outcomes.map(|_| value)
}

impl TestAdapter {
    /// Returns an empty adapter whose objects take `overhead` bytes more than their length.
    #[must_use]
    pub fn new(capabilities: Capabilities, overhead: u64) -> Self {
        Self {
            capabilities,
            overhead,
            ..Self::default()
        }
    }

    /// Lets each object that is looked up or loaded exist, with bytes of this value.
    #[must_use]
    pub fn with_every_object(mut self, value: u8) -> Self {
        self.every_object = Some(value);
        self
    }

    /// Lets it list [`endless_object`](Self::endless_object) 0, 1, 2 and so on, each on a page of its own.
    #[must_use]
    pub fn with_endless_listing(mut self) -> Self {
        self.has_endless_listing = true;
        self
    }

    /// One object of an endless listing; a higher number was used later.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn endless_object(number: u64) -> Listed {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        let key = ObjectKey::new(ChunkHash(hash), "some/model", 0x0100_0100, 0, "");
        Listed {
            used_at: number,
            key: key.expect("a valid key"),
            bytes: 1,
        }
    }

    /// Returns one that has every object and follows these steps, whatever the calls are, before it succeeds.
    #[must_use]
    pub fn scripted(steps: impl IntoIterator<Item = Step>) -> Arc<Self> {
        let adapter = Self::default().with_every_object(0);
        let steps = steps.into_iter().map(|step| (None, step));
        adapter.script.lock().extend(steps);
        Arc::new(adapter)
    }

    /// Sets the steps of the next calls of one operation.
    pub fn script(&self, operation: Operation, steps: impl IntoIterator<Item = Step>) {
        let steps = steps.into_iter().map(|step| (Some(operation), step));
        self.script.lock().extend(steps);
    }

    /// Removes all scripted steps.
    pub fn clear_script(&self) {
        self.script.lock().clear();
    }

    /// Sets the step of all calls of an operation without a scripted one; `None` is success.
    pub fn always(&self, operation: Operation, step: Option<Step>) {
        let mut always = self.always.lock();
        match step {
            Some(step) => always.insert(operation, step),
            None => always.remove(&operation),
        };
    }

    /// Fails all stores, loads and deletes of a key.
    pub fn refuse(&self, key: &ObjectKey) {
        self.refused.lock().insert(key.clone());
    }

    /// Undoes [`refuse`](Self::refuse) for all keys.
    pub fn accept_all(&self) {
        self.refused.lock().clear();
    }

    /// Puts an object there, as another process or an earlier run would.
    pub fn put(&self, key: &ObjectKey, len: u64, used_at: u64) {
        let bytes = vec![7; len as usize];
        self.insert(key.clone(), bytes, used_at);
    }

    fn insert(&self, key: ObjectKey, bytes: Vec<u8>, used_at: u64) {
        let object = Object {
            key,
            bytes,
            used_at,
        };
        self.objects.lock().insert(name(&object.key), object);
    }

    /// Removes all objects.
    pub fn clear(&self) {
        self.objects.lock().clear();
    }

    /// Whether an object is there.
    pub fn contains(&self, key: &ObjectKey) -> bool {
        self.objects.lock().contains_key(&name(key))
    }

    /// Returns the keys of all objects.
    pub fn keys(&self) -> HashSet<ObjectKey> {
        let objects = self.objects.lock();
        objects.values().map(|object| object.key.clone()).collect()
    }

    fn size(&self, object: &Object) -> u64 {
        object.bytes.len() as u64 + self.overhead
    }

    /// Bytes of all objects.
    pub fn bytes(&self) -> u64 {
        let objects = self.objects.lock();
        objects.values().map(|object| self.size(object)).sum()
    }

    /// Bytes of the objects of one tenant.
    pub fn bytes_of(&self, salt: &str) -> u64 {
        let objects = self.objects.lock();
        let objects = objects
            .values()
            .filter(|object| &**object.key.cache_salt() == salt);
        objects.map(|object| self.size(object)).sum()
    }

    /// The most bytes that a tenant has had after a store.
    pub fn peak_bytes(&self, salt: &str) -> u64 {
        let peaks = self.peak_bytes.lock();
        peaks.get(salt).copied().unwrap_or_default()
    }

    /// Number of items of all calls of an operation.
    pub fn items(&self, operation: Operation) -> u64 {
        let items = self.items.lock();
        items.get(&operation).copied().unwrap_or_default()
    }

    /// Keys of all stores.
    pub fn store_keys(&self) -> Vec<ObjectKey> {
        self.store_keys.lock().clone()
    }

    /// Keys of all deletes that were executed.
    pub fn delete_keys(&self) -> Vec<ObjectKey> {
        self.delete_keys.lock().clone()
    }

    /// Returns and clears the log of the calls, such as "load 1 2": the operation and the lengths of its objects.
    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock())
    }

    /// The most calls that were in flight at once.
    pub fn max_in_flight(&self) -> usize {
        self.max_in_flight.load(Ordering::Relaxed)
    }

    /// Writes the bytes of an object that exists because of `every_object`.
    ///
    /// # Panics
    /// If the buffer cannot be written.
    pub fn fill(&self, buffer: &Buffer) {
        let bytes = vec![self.every_object.unwrap_or_default(); buffer.len() as usize];
        buffer
            .write(0, &bytes)
            .expect("a buffer that can be written");
    }

    fn next_step(&self, operation: Operation) -> Option<Step> {
        let mut script = self.script.lock();
        let is_next = |(of, _): &(Option<Operation>, Step)| of.is_none_or(|of| of == operation);
        let scripted = script
            .iter()
            .position(is_next)
            .and_then(|at| script.remove(at));
        match scripted {
            Some((_, step)) => Some(step),
            None => self.always.lock().get(&operation).cloned(),
        }
    }

    /// Plays the step of a call: outcomes of its items, and the step.
    async fn play(
        &self,
        operation: Operation,
        lengths: &[u64],
    ) -> (Vec<Result<(), L2Error>>, Option<Step>) {
        let word = match operation {
            Operation::Store => "store",
            Operation::Lookup => "lookup",
            Operation::Load => "load",
            Operation::Delete => "delete",
            Operation::List => "list",
            Operation::FreeBytes => "free",
            Operation::Recover => "recover",
        };
        let words: Vec<_> = lengths.iter().map(u64::to_string).collect();
        self.log.lock().push(format!("{word} {}", words.join(" ")));
        *self.items.lock().entry(operation).or_default() += lengths.len() as u64;
        let in_flight = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.max_in_flight.fetch_max(in_flight, Ordering::Relaxed);
        let step = self.next_step(operation);
        let mut outcomes = vec![Ok(()); lengths.len()];
        match &step {
            None => {}
            Some(Step::Items(kinds)) => {
                for (outcome, kind) in outcomes.iter_mut().zip(kinds) {
                    *outcome = kind.map_or(Ok(()), |kind| Err(error(kind)));
                }
            }
            Some(Step::Fail(kind)) => outcomes.fill(Err(error(*kind))),
            Some(Step::Wait) => self.gate.acquire().await.expect("an open gate").forget(),
            Some(Step::Late | Step::KeepBuffers) => outcomes.fill(Err(error(ErrorKind::Deadline))),
            Some(Step::Surplus) => outcomes.push(Ok(())),
            Some(Step::Panic) => panic!("as scripted"),
        }
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        (outcomes, step)
    }

    /// Answers the items of a call one by one; `run` executes one.
    async fn each<I, T: Clone>(
        &self,
        operation: Operation,
        lengths: &[u64],
        batch: Vec<I>,
        buffer: impl Fn(&I) -> Option<Buffer>,
        run: impl Fn(I) -> Result<T, L2Error>,
    ) -> Vec<Result<T, L2Error>> {
        let (outcomes, step) = self.play(operation, lengths).await;
        let is_late = matches!(step, Some(Step::Late));
        if matches!(step, Some(Step::KeepBuffers)) {
            self.kept.lock().extend(batch.iter().filter_map(&buffer));
        }
        let mut outcomes = outcomes.into_iter();
        let answer = |item| {
            let outcome = outcomes.next().unwrap_or(Ok(()));
            if is_late {
                let _ = run(item);
                return Err(error(ErrorKind::Deadline));
            }
            outcome.and_then(|()| run(item))
        };
        let mut results: Vec<_> = batch.into_iter().map(answer).collect();
        if matches!(step, Some(Step::Surplus)) {
            results.extend(results.last().cloned());
        }
        results
    }

    fn check_refused(&self, key: &ObjectKey) -> Result<(), L2Error> {
        if self.refused.lock().contains(key) {
            Err(error(ErrorKind::Refused))
        } else {
            Ok(())
        }
    }

    fn store_one(&self, item: StoreItem) -> Result<Stored, L2Error> {
        let key = item.object.key;
        self.check_refused(&key)?;
        let mut bytes = Vec::new();
        let read = item.from.read_into(0, item.object.len, &mut bytes);
        read.expect("a buffer that can be read");
        let surplus = self.surplus_bytes.load(Ordering::Relaxed);
        let written = bytes.len() as u64 + self.overhead + surplus;
        let salt = key.cache_salt().to_string();
        let disk = *self.disk_bytes.lock();
        if disk.is_some_and(|disk| self.bytes() + written > disk) {
            return Err(error(ErrorKind::Full));
        }
        self.insert(key, bytes, 0);
        let bytes = self.bytes_of(&salt);
        let mut peaks = self.peak_bytes.lock();
        let peak = peaks.entry(salt).or_default();
        *peak = bytes.max(*peak);
        Ok(Stored::Written(written))
    }

    fn load_one(&self, item: LoadItem) -> Result<Loaded, L2Error> {
        let loaded = Ok(Loaded { verified: true });
        if self.every_object.is_some() {
            self.fill(&item.to);
            return loaded;
        }
        let objects = self.objects.lock();
        let object = objects.get(&name(&item.object.key));
        let object = object.ok_or_else(|| error(ErrorKind::NotFound))?;
        self.check_refused(&item.object.key)?;
        if object.bytes.len() as u64 != item.object.len {
            return Err(error(ErrorKind::Corrupt));
        }
        let written = item.to.write(0, &object.bytes);
        written.expect("a buffer that can be written");
        loaded
    }

    fn delete_one(&self, key: ObjectKey) -> Result<bool, L2Error> {
        let refused = self.check_refused(&key);
        let removed = refused.map(|()| self.objects.lock().remove(&name(&key)).is_some());
        self.delete_keys.lock().push(key);
        removed
    }
}

impl Adapter for TestAdapter {
    fn kind(&self) -> &'static str {
        "test"
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn size_of(&self, len: u64) -> u64 {
        len + self.overhead
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(async move {
            let (outcomes, _) = self.play(Operation::FreeBytes, &[0]).await;
            let disk = self.disk_bytes.lock().map(|disk| disk - self.bytes());
            let disk = disk.filter(|_| self.reports_disk.load(Ordering::Relaxed));
            whole(outcomes, disk.or(*self.free_bytes.lock()))
        })
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(async move {
            let keys = batch.iter().map(|item| item.object.key.clone());
            self.store_keys.lock().extend(keys);
            let lengths = lengths(batch.iter().map(|item| &item.object));
            let buffer = |item: &StoreItem| Some(item.from.clone());
            let run = |item| self.store_one(item);
            self.each(Operation::Store, &lengths, batch, buffer, run)
                .await
        })
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            let (outcomes, step) = self.play(Operation::Lookup, &lengths(&batch)).await;
            let objects = self.objects.lock();
            let find = |object: &ObjectSpec| match self.every_object {
                Some(_) => Some(object.len + self.overhead),
                None => Some(self.size(objects.get(&name(&object.key))?)),
            };
            let mut found: Vec<_> = batch.iter().map(find).collect();
            if matches!(step, Some(Step::Surplus)) {
                found.push(None);
            }
            whole(outcomes, found)
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(async move {
            let lengths = lengths(batch.iter().map(|item| &item.object));
            let buffer = |item: &LoadItem| Some(item.to.clone());
            let run = |item| self.load_one(item);
            self.each(Operation::Load, &lengths, batch, buffer, run)
                .await
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move {
            let lengths = vec![0; keys.len()];
            let run = |key| self.delete_one(key);
            self.each(Operation::Delete, &lengths, keys, |_| None, run)
                .await
        })
    }

    fn list(&self, _: Option<String>, _: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async move {
            let (outcomes, _) = self.play(Operation::List, &[0]).await;
            whole(outcomes, ListPage::default())
        })
    }

    /// Reports all objects before it plays its step.
    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(async move {
            if self.has_endless_listing {
                let pages = (0..).take_while(|number| found(vec![Self::endless_object(*number)]));
                let objects = pages.count() as u64 + 1;
                return Ok(Recovered {
                    objects,
                    bytes: objects,
                    ..Recovered::default()
                });
            }
            let list = |object: &Object| Listed {
                key: object.key.clone(),
                bytes: self.size(object),
                used_at: object.used_at,
            };
            let listed: Vec<_> = self.objects.lock().values().map(list).collect();
            let recovered = Recovered {
                objects: listed.len() as u64,
                bytes: listed.iter().map(|object| object.bytes).sum(),
                ..Recovered::default()
            };
            found(listed);
            let (outcomes, _) = self.play(Operation::Recover, &[0]).await;
            whole(outcomes, recovered)
        })
    }

    fn status(&self) -> Value {
        json!({ "is_healthy": true, "type": "test" })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.log.lock().push("close".into()) })
    }
}
