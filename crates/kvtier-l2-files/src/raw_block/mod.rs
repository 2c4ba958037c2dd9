//! A block device, or one large file, as a second tier.
//!
//! The format is kvtier's own ([`format`]). The index is in memory and is rebuilt after each start by a scan of the table,
//! so a device belongs to one server at a time. Each load compares the bytes with the checksum of their record: after a
//! crash or a loss of power an object is either whole or a miss.
//!
//! | event | on the device |
//! | --- | --- |
//! | store | bytes into free space, then the record |
//! | replacement | the new object as in a store, then the old record is erased; until then the later one counts |
//! | delete | the record is erased; then, and after the last load, the space is free |
//! | start | all erasures of earlier runs are synced, so that no record of them comes back with a later number |

mod device;
mod format;
mod index;
mod options;
mod scan;
mod space;
#[cfg(test)]
mod tests;
mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use kvtier_core::object_key::{KeyShape, ObjectKey};
use kvtier_memory::FileError;
use kvtier_memory::uring::Tail;
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::io::choice::{self, Choice};
use crate::io::nixl::NixlOptions;
use crate::io::pool::{IoClass, Pool, not_done};
use crate::io::{self, Engine};
use device::Device;
use index::{Index, RawObject};
use kvtier_l2::{
    Adapter, BoxFuture, Capabilities, ErrorKind, L2Error, ListPage, Listed, LoadItem, Loaded,
    ObjectSpec, Recovered, StoreItem, Stored,
};
use scan::{ScanState, TableScanner};
use work::{RawRead, RawWrite};

pub use options::RAW_BLOCK;
pub use options::RawOptions;

/// How long lookups and loads wait for the scan; after that what is on the device is a miss.
const SCAN_WAIT: Duration = Duration::from_millis(250);

/// Largest page of a listing.
const MAX_LIST_PAGE: usize = 65_536;

/// Objects per batch of a recovery.
const RECOVERY_BATCH: usize = 4096;

/// Adapter of a device.
pub struct RawBlockAdapter {
    objects: Arc<RawObjects>,
    scanner: Arc<TableScanner>,
    pool: Pool,
    /// Reason for the I/O engine.
    engine_reason: String,
}

/// Objects of an open device.
struct RawObjects {
    device: Device,
    index: Arc<Index>,
    engine: Box<dyn Engine>,
    fsync: bool,
    damaged: AtomicU64,
    /// Whether the last store failed.
    is_failing: AtomicBool,
    /// What the last check has found.
    is_lost: AtomicBool,
}

impl RawObjects {
    /// The object that is asked for, unless it cannot be read.
    fn find(&self, object: &ObjectSpec) -> Option<Arc<RawObject>> {
        let found = self.index.get(&object.key)?;
        let is_readable = !found.is_unreadable.load(Ordering::Relaxed);
        (is_readable && found.record.is_of(object)).then_some(found)
    }

    fn store(&self, items: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
        let stores = items.into_iter().map(|item| RawWrite::new(self, item));
        let mut results = io::run(&*self.engine, stores);
        if self.fsync
            && let Err(error) = self.device.sync()
        {
            let error = self.device.error("sync", error);
            results
                .iter_mut()
                .for_each(|result| *result = Err(error.clone()));
        }
        let is_failure = |result: &Result<_, L2Error>| matches!(result, Err(error) if error.kind() == ErrorKind::Unavailable);
        if let Some(last) = results.last() {
            self.is_failing.store(is_failure(last), Ordering::Relaxed);
        }
        results
    }

    fn load(&self, items: Vec<LoadItem>) -> Vec<Result<Loaded, L2Error>> {
        let loads = items.into_iter().map(|item| RawRead::new(self, item));
        io::run(&*self.engine, loads)
    }

    /// Deletes objects, which do not come back then.
    fn delete_all(&self, keys: Vec<ObjectKey>) -> Vec<Result<bool, L2Error>> {
        let mut results: Vec<_> = keys.iter().map(|key| self.delete(key)).collect();
        if self.fsync
            && results.contains(&Ok(true))
            && let Err(error) = self.device.sync()
        {
            // They come back if power is lost now.
            let error = self.device.error("sync", error);
            let deleted = results.iter_mut().filter(|result| **result == Ok(true));
            deleted.for_each(|result| *result = Err(error.clone()));
        }
        results
    }

    fn delete(&self, key: &ObjectKey) -> Result<bool, L2Error> {
        let Some(object) = self.index.remove(key) else {
            return Ok(false);
        };
        if self.release(&object) {
            return Ok(true);
        }
        // It would be there again after a restart.
        if let Some(older) = self.index.insert(object) {
            self.release(&older);
        }
        Err(self.device.error("erase a record of", Errno::IO))
    }

    /// Erases the record of an object that is not in the index; its space is free when no load uses it.
    fn release(&self, object: &RawObject) -> bool {
        let is_erased = self.erase(object.record.number).is_ok();
        if is_erased {
            object.place.erased();
        }
        is_erased
    }

    /// Erases a record.
    fn erase(&self, number: u64) -> Result<(), Errno> {
        let mut block = Tail::default();
        block.resize(format::BLOCK as usize);
        block.fill(0);
        self.device
            .write(&block, self.device.geometry().record_at(number))
    }

    fn failed(&self, action: &str, error: &FileError) -> L2Error {
        io::failed(action, &self.device.path().to_string_lossy(), error)
    }
}

/// Seconds since the Unix epoch.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

impl RawBlockAdapter {
    /// Opens the device, formats it if it is empty, and starts to scan it.
    ///
    /// # Errors
    /// If it cannot be used: it is missing, too small, in use, or holds something else.
    pub fn open(options: &RawOptions) -> Result<Self, L2Error> {
        let Choice { engine, reason } = choice::choose(
            options.io_engine,
            options.use_odirect,
            &NixlOptions::default(),
        )?;
        let objects = Arc::new(RawObjects {
            device: Device::open(options)?,
            index: Index::new(),
            engine,
            fsync: options.fsync,
            damaged: AtomicU64::new(0),
            is_failing: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
        });
        let pool = Pool::start("kvtier-raw", options.num_workers.max(1));
        let pool = pool.map_err(|error| {
            L2Error::new(ErrorKind::Refused, format!("cannot start threads: {error}"))
        })?;
        Ok(Self {
            scanner: TableScanner::start(Arc::clone(&objects))?,
            objects,
            pool,
            engine_reason: reason,
        })
    }

    /// Waits for the end of the scan for a short time.
    async fn scanned_soon(&self) -> Result<(), L2Error> {
        match tokio::time::timeout(SCAN_WAIT, self.scanner.ended()).await {
            Ok(scanned) => scanned.map(drop),
            Err(_) => Ok(()),
        }
    }

    /// Runs `work` for all items on the pool.
    async fn each<T, R>(
        &self,
        class: IoClass,
        items: Vec<T>,
        pieces: (usize, usize),
        work: impl Fn(&RawObjects, Vec<T>) -> Vec<Result<R, L2Error>> + Send + Sync + 'static,
    ) -> Vec<Result<R, L2Error>>
    where
        T: Send + 'static,
        R: Send + 'static,
    {
        let objects = Arc::clone(&self.objects);
        self.pool
            .map(class, items, pieces, move |items| work(&objects, items))
            .await
    }
}

/// Returns one error for all items.
fn all<T, R>(items: &[T], error: &L2Error) -> Vec<Result<R, L2Error>> {
    items.iter().map(|_| Err(error.clone())).collect()
}

impl Adapter for RawBlockAdapter {
    fn kind(&self) -> &'static str {
        RAW_BLOCK.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            delete: true,
            list: true,
            shared: false,
            read_only: false,
            verifies: true,
            owns_space: true,
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(async move {
            match self.scanner.ended().await {
                Ok(_) => {
                    self.each(IoClass::Store, batch, (1, 16), RawObjects::store)
                        .await
                }
                Err(error) => all(&batch, &error),
            }
        })
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            self.scanned_soon().await?;
            if self.pool.is_closed() {
                return Err(not_done());
            }
            let found = batch.iter().map(|object| self.objects.find(object));
            Ok(found.map(|found| Some(found?.bytes())).collect())
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(async move {
            if let Err(error) = self.scanned_soon().await {
                return all(&batch, &error);
            }
            self.each(IoClass::Read, batch, (1, 16), RawObjects::load)
                .await
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move {
            if let Err(error) = self.scanner.ended().await {
                return all(&keys, &error);
            }
            self.each(IoClass::Read, keys, (8, 64), RawObjects::delete_all)
                .await
        })
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async move {
            let behind = match &from {
                None => None,
                Some(text) => Some(
                    ObjectKey::parse_name(text, Some(KeyShape::Grouped)).map_err(|error| {
                        L2Error::new(
                            ErrorKind::Refused,
                            format!("no place of a listing: {error}"),
                        )
                    })?,
                ),
            };
            self.scanner.ended().await?;
            let limit = limit.clamp(1, MAX_LIST_PAGE);
            let page = self.objects.index.page(behind.as_ref(), limit);
            let next = (page.len() == limit).then(|| page.last()).flatten();
            Ok(ListPage {
                next: next.map(|object| object.record.key.text().name(KeyShape::Grouped)),
                objects: page.iter().map(|object| object.listed()).collect(),
            })
        })
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(async move {
            let mut recovered = Recovered {
                removed: self.scanner.ended().await?,
                ..Recovered::default()
            };
            let mut last = None;
            loop {
                let page = self.objects.index.page(last.as_ref(), RECOVERY_BATCH);
                let Some(object) = page.last() else {
                    return Ok(recovered);
                };
                last = Some(object.record.key.clone());
                let page: Vec<_> = page.iter().map(|object| object.listed()).collect();
                recovered.objects += page.len() as u64;
                recovered.bytes += page.iter().map(|object| object.bytes).sum::<u64>();
                if !found(page) {
                    return Ok(recovered);
                }
            }
        })
    }

    fn size_of(&self, len: u64) -> u64 {
        format::span(len)
    }

    fn check(&self) -> BoxFuture<'_, ()> {
        let (objects, scanner) = (Arc::clone(&self.objects), Arc::clone(&self.scanner));
        Box::pin(self.pool.check(move || {
            scanner.retry();
            let found = objects.device.check();
            let was_lost = objects.is_lost.swap(found.is_err(), Ordering::Relaxed);
            if let Err(error) = found
                && !was_lost
            {
                let device_path = objects.device.path().display();
                tracing::warn!(%device_path, %error, "a device is not usable; trying again in the background");
            }
        }))
    }

    fn status(&self) -> Value {
        let (objects, scan) = (&self.objects, self.scanner.state.borrow().clone());
        let usage = objects.index.usage();
        let is_usable = !matches!(&scan, ScanState::Failed(..));
        let scan = match &scan {
            ScanState::Running => "running".to_owned(),
            ScanState::Done(_) => "done".to_owned(),
            ScanState::Failed(error, _) => error.to_string(),
        };
        json!({
            "is_healthy": is_usable
                && !self.pool.is_closed()
                && !objects.is_failing.load(Ordering::Relaxed)
                && !objects.is_lost.load(Ordering::Relaxed),
            "type": RAW_BLOCK.name(),
            "device_path": objects.device.path().to_string_lossy(),
            "use_odirect": objects.device.is_direct(),
            "io_engine": objects.engine.name(),
            "io_engine_reason": self.engine_reason,
            "scan": scan,
            "objects": usage.objects,
            "free_bytes": usage.free_bytes,
            "free_records": usage.free_records,
            "leaked_bytes": usage.leaked_bytes,
            "damaged_objects": objects.damaged.load(Ordering::Relaxed),
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.scanner.stop();
            self.pool.close().await;
            // An error is the end of its thread, too.
            let _ = self.scanner.ended().await;
            self.objects.device.unlock();
        })
    }
}
