//! A directory as a second tier: `fs` and `fs_native`, which are one adapter.
//!
//! One file per object. Name and first bytes are those of LMCache, so both can use one directory at the same time. The
//! `trailer` behind these bytes lets each load check that it read what was stored.
//!
//! A file is written without a name, or under a temporary one, and named when it is complete, so readers never see a part
//! of it. The directory is the only index: files of other writers are found, deleted ones are misses. A damaged file is a
//! miss, and is moved to `.quarantine` or deleted, so that the object can be stored again. A file that the disk fails to
//! read stays until a store replaces it.

mod base;
mod beneath;
mod files;
mod load;
mod names;
mod naming;
mod nixl;
mod options;
mod store;
#[cfg(test)]
mod tests;
mod unnamed;
mod walk;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_core::object_key::ObjectKey;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::io::choice::{self, Choice};
use crate::io::pool::{IoClass, Pool, not_done};
use base::Base;
use files::{FileCounters, Files, OtherPlaces};
use kvtier_l2::{
    Adapter, BoxFuture, Capabilities, ErrorKind, KeySet, L2Error, ListPage, Listed, LoadItem,
    Loaded, ObjectSpec, Recovered, StoreItem, Stored, redact,
};
use unnamed::Unnamed;
use walk::{Page, Position, no_position};

pub use crate::io::choice::IoEngine;
pub use crate::io::nixl::NixlOptions;
pub use names::Layout;
pub use naming::Naming;
pub use nixl::{NIXL_NATIVE, NIXL_STORE, NIXL_STORE_DYNAMIC};
pub use options::{FS, FS_NATIVE};
pub use options::{FsOptions, Fsync};

/// Names per page of a scan.
const SCAN_PAGE: usize = 4096;

/// Largest page of a listing.
const MAX_LIST_PAGE: usize = 65_536;

/// Adapter of a directory.
///
/// ```
/// use kvtier_l2_files::fs::{FsAdapter, FsOptions};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let directory = tempfile::tempdir()?;
/// let adapter = FsAdapter::open("fs", &FsOptions::new(directory.path()))?;
/// // Stores, loads and deletes one object.
/// assert!(kvtier_l2::probe(&adapter).await?.was_written);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FsAdapter {
    kind: &'static str,
    files: Arc<Files>,
    pool: Pool,
    workers: usize,
    /// Reason for the I/O engine.
    engine_reason: String,
    /// Whether the last store could not reach the directory.
    is_failing: Arc<AtomicBool>,
}

impl FsAdapter {
    /// Opens the directory and creates it if it is missing. `kind` is its type in the configuration.
    ///
    /// # Errors
    /// If the directory cannot be created or opened, or threads cannot be started.
    pub fn open(kind: &'static str, options: &FsOptions) -> Result<Self, L2Error> {
        Self::open_with(kind, options, None)
    }

    fn open_with(
        kind: &'static str,
        options: &FsOptions,
        engine: Option<Choice>,
    ) -> Result<Self, L2Error> {
        let failed = |error: std::io::Error| {
            let path = options.base_path.display();
            L2Error::new(
                ErrorKind::Refused,
                format!("cannot open base_path {path}: {error}"),
            )
        };
        let (path, temporary) = (options.base_path.clone(), &options.relative_tmp_dir);
        let base = if options.read_only {
            Base::open_read_only(path)
        } else {
            Base::open(path, temporary)
        };
        let base = base.map_err(failed)?;
        let Choice { engine, reason } = match engine {
            Some(given) => given,
            None => choice::choose(options.io_engine, options.use_odirect, &options.nixl)?,
        };
        tracing::debug!(
            base_path = redact::text(&options.base_path.display().to_string()),
            io_engine = engine.name(),
            reason,
            "opened a directory"
        );
        let files = Files {
            unnamed: Unnamed::default(),
            create_in_place: AtomicBool::new(false),
            base,
            engine,
            naming: options.names,
            align: options.padding(),
            layout: options.layout,
            direct: options.use_odirect,
            fsync: options.fsync,
            require_checksum: options.require_checksum,
            trust_missing_layout: options.trust_missing_layout,
            read_ahead: options.read_ahead_size,
            others: OtherPlaces::default(),
            counters: FileCounters::default(),
            unreadable: KeySet::default(),
        };
        files.unnamed.probe(&files.base);
        let workers = options.num_workers.max(1);
        Ok(Self {
            workers,
            kind,
            engine_reason: reason,
            files: Arc::new(files),
            pool: Pool::start("kvtier-fs", workers).map_err(failed)?,
            is_failing: Arc::default(),
        })
    }

    /// Runs `work` for all items on the pool.
    async fn each<T, R>(
        &self,
        class: IoClass,
        items: Vec<T>,
        pieces: (usize, usize),
        work: impl Fn(&Files, Vec<T>) -> Vec<Result<R, L2Error>> + Send + Sync + 'static,
    ) -> Vec<Result<R, L2Error>>
    where
        T: Send + 'static,
        R: Send + 'static,
    {
        if let Some(why) = self.files.base.lost() {
            return items.iter().map(|_| Err(self.lost(why))).collect();
        }
        let files = Arc::clone(&self.files);
        self.pool
            .map(class, items, pieces, move |items| work(&files, items))
            .await
    }

    /// Error while the path does not lead to the directory.
    fn lost(&self, why: &str) -> L2Error {
        let path = self.files.base.path().display();
        let message = format!("base_path {path} is not the directory that was opened: {why}");
        L2Error::new(ErrorKind::Unavailable, message)
    }

    /// Runs the walk on a thread of its own; it ends when the receiver of its pages is dropped.
    fn walk(&self) -> Result<mpsc::Receiver<Result<Page, L2Error>>, L2Error> {
        let files = Arc::clone(&self.files);
        let (pages, taken) = mpsc::channel(2);
        let walk = move || {
            let mut at = Some(Position::START);
            while let Some(from) = at {
                let page = walk::page(&files, from, SCAN_PAGE);
                at = page.as_ref().ok().and_then(|page| page.next);
                if pages.blocking_send(page).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("kvtier-fs-scan".into())
            .spawn(walk)
            .map_err(|error| {
                let message = format!("cannot start a thread for a scan: {error}");
                L2Error::new(ErrorKind::Unavailable, message)
            })?;
        Ok(taken)
    }
}

fn read_only() -> L2Error {
    L2Error::new(ErrorKind::Unsupported, "the tier is read_only")
}

impl Adapter for FsAdapter {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            delete: true,
            list: true,
            shared: true,
            read_only: self.files.base.is_read_only(),
            verifies: true,
            owns_space: false,
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        if self.files.base.is_read_only() {
            return Box::pin(async move { batch.iter().map(|_| Err(read_only())).collect() });
        }
        let is_failing = Arc::clone(&self.is_failing);
        Box::pin(
            self.each(IoClass::Store, batch, (1, 16), move |files, items| {
                let stored = store::store(files, items);
                for stored in &stored {
                    let is_refused = |error: &L2Error| {
                        matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Refused)
                    };
                    let has_failed = stored.as_ref().is_err_and(is_refused);
                    is_failing.store(has_failed, Ordering::Relaxed);
                }
                stored
            }),
        )
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            let found = self
                .each(IoClass::Read, batch, (32, 256), |files, batch| {
                    files.lookup(&batch)
                })
                .await;
            // An object whose lookup fails is a miss; if all fail, the call fails.
            if found.iter().all(Result::is_err)
                && let Some(Err(error)) = found.first()
            {
                return Err(error.clone());
            }
            Ok(found
                .into_iter()
                .map(|bytes| bytes.ok().flatten())
                .collect())
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(self.each(IoClass::Read, batch, (1, 16), load::load))
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        if self.files.base.is_read_only() {
            return Box::pin(async move { keys.iter().map(|_| Err(read_only())).collect() });
        }
        Box::pin(self.each(IoClass::Read, keys, (8, 64), |files, keys| {
            keys.iter().map(|key| files.delete(key)).collect()
        }))
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async move {
            if let Some(why) = self.files.base.lost() {
                return Err(self.lost(why));
            }
            let at = match &from {
                None => Position::START,
                Some(text) => Position::parse(text).ok_or_else(|| no_position(text))?,
            };
            let (files, limit) = (Arc::clone(&self.files), limit.min(MAX_LIST_PAGE));
            let page = self
                .pool
                .run(IoClass::Read, move || walk::page(&files, at, limit))
                .await;
            let page = page.await.map_err(|_| not_done())??;
            Ok(ListPage {
                objects: page.objects,
                next: page.next.map(|next| next.to_string()),
            })
        })
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(async move {
            if let Some(why) = self.files.base.lost() {
                return Err(self.lost(why));
            }
            let mut recovered = Recovered::default();
            let (mut other_naming, mut other_layout) = (false, false);
            let mut pages = self.walk()?;
            let (mut temporary, mut is_whole) = (Vec::new(), false);
            while let Some(page) = pages.recv().await {
                let page = page?;
                recovered.foreign += page.foreign;
                recovered.objects += page.objects.len() as u64;
                recovered.bytes += page.objects.iter().map(|object| object.bytes).sum::<u64>();
                other_naming |= page.other_naming;
                other_layout |= page.other_layout;
                temporary.extend(page.temporary);
                is_whole = page.next.is_none();
                if !found(page.objects) && !is_whole {
                    return Ok(recovered);
                }
            }
            if !is_whole {
                let message = "the scan ended early";
                return Err(L2Error::new(ErrorKind::Unavailable, message));
            }
            self.files.others.set(other_naming, other_layout);
            if self.files.base.is_read_only() {
                return Ok(recovered);
            }
            let files = Arc::clone(&self.files);
            let removed = self.pool.run(IoClass::Read, move || {
                let base = &files.base;
                // First the files, then the names of their writers, which are in the base.
                let names = walk::temporary_names(base);
                let inside = walk::remove_stale(base, base.temporary(), &names);
                inside + walk::remove_stale(base, "", &temporary)
            });
            recovered.removed = removed.await.await.map_err(|_| not_done())?;
            Ok(recovered)
        })
    }

    fn size_of(&self, len: u64) -> u64 {
        kvtier_l2::trailer::file_len(len, 0, self.files.align, self.files.direct)
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(async move {
            // A remote file system can take as long as for a read.
            let files = Arc::clone(&self.files);
            let free = self
                .pool
                .run(IoClass::Read, move || files.free_bytes())
                .await;
            free.await.map_err(|_| not_done())
        })
    }

    fn check(&self) -> BoxFuture<'_, ()> {
        let files = Arc::clone(&self.files);
        Box::pin(self.pool.check(move || files.base.check()))
    }

    fn status(&self) -> Value {
        let files = &self.files;
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &files.counters;
        let mut status = json!({
            "is_healthy": !self.pool.is_closed()
                && !self.is_failing.load(Ordering::Relaxed)
                && files.base.lost().is_none(),
            "error": files.base.lost().map(|why| self.lost(why).to_string()),
            "type": self.kind,
            "base_path": files.base.path().to_string_lossy(),
            "read_only": files.base.is_read_only(),
            "use_odirect": files.direct,
            "num_workers": self.workers,
            "layout": files.layout.name(),
            "io_engine": files.engine.name(),
            "io_engine_reason": self.engine_reason,
            "quarantined_files": count(&counters.quarantined),
            "discarded_files": count(&counters.discarded),
            "replaced_files": count(&counters.replaced),
            "other_layout_loads": count(&counters.other_layout),
            "other_version_loads": count(&counters.other_version),
            "missing_layout_lookups": count(&counters.no_layout),
            "unreadable_files": count(&counters.unreadable),
            "unverified_loads": count(&counters.unverified),
            "not_direct_files": count(&counters.not_direct),
        });
        if let Some(engine) = files.engine.status() {
            status["io_engine_status"] = engine;
        }
        status
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.pool.close())
    }
}
