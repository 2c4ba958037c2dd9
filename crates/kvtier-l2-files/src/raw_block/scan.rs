//! Scan of the table after a start. One that fails is tried again, as the device may come back.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvtier_memory::uring::Tail;
use rustix::io::Errno;

use super::Shared;
use super::format::{BLOCK, Record};
use crate::io;
use kvtier_l2::{ErrorKind, L2Error};

/// Records per read.
const PIECE: u64 = 256;

/// Pause after a scan that failed.
const RETRY_PAUSE: Duration = if cfg!(test) {
    Duration::ZERO
} else {
    Duration::from_secs(30)
};

/// How far the scan is.
#[derive(Debug, Clone)]
pub(super) enum Scan {
    Running,
    /// The number of records that were superseded and erased.
    Done(u64),
    Failed(L2Error, Instant),
}

/// Starts the scan on a thread of its own.
///
/// # Errors
/// If there is no thread.
pub(super) fn start(shared: Arc<Shared>) -> Result<(), L2Error> {
    shared.scan.send_replace(Scan::Running);
    let scanned = Arc::clone(&shared);
    let work = move || scanned.end_scan(scanned.scan_table());
    let thread = std::thread::Builder::new().name("kvtier-raw-scan".into());
    thread.spawn(work).map(drop).map_err(|error| {
        let what = format!("cannot start a thread for a scan: {error}");
        let error = L2Error::new(ErrorKind::Unavailable, what);
        shared.end_scan(Err(error.clone()));
        error
    })
}

/// Starts the scan again if the last one has failed a while ago. Nothing was found then, so nothing is in use.
pub(super) fn retry(shared: &Arc<Shared>) {
    let is_due = match &*shared.scan.borrow() {
        Scan::Failed(_, since) => since.elapsed() >= RETRY_PAUSE,
        _ => false,
    };
    if is_due && !shared.is_closed.load(Ordering::Acquire) {
        // Its failure is the state of the scan.
        let _ = start(Arc::clone(shared));
    }
}

impl Shared {
    fn end_scan(&self, result: Result<u64, L2Error>) {
        let device_path = self.device.path().display();
        match &result {
            Ok(_) if self.has_failed_scan.swap(false, Ordering::Relaxed) => {
                tracing::info!(%device_path, "the table of a device was read again");
            }
            // One that was closed meanwhile is not to be used. Each failure is logged once.
            Err(error)
                if !self.is_closed.load(Ordering::Acquire)
                    && !self.has_failed_scan.swap(true, Ordering::Relaxed) =>
            {
                tracing::error!(%device_path, %error, "the table of a device could not be read; trying again in the background");
            }
            _ => {}
        }
        self.scan.send_replace(match result {
            Ok(erased) => Scan::Done(erased),
            Err(error) => Scan::Failed(error, Instant::now()),
        });
    }
}

impl Shared {
    fn scan_table(&self) -> Result<u64, L2Error> {
        let geometry = self.device.geometry();
        let (mut found, mut unreadable) = (Vec::new(), Vec::new());
        let mut blocks = Tail::default();
        let mut first = 0;
        while first < geometry.records {
            if self.is_closed.load(Ordering::Acquire) {
                return Err(L2Error::new(
                    ErrorKind::Unavailable,
                    "the adapter is closed",
                ));
            }
            let count = PIECE.min(geometry.records - first);
            match self.read_records(&mut blocks, first, count, &mut found) {
                Ok(()) => {}
                Err(error) if io::is_unreadable(error) => {
                    for number in first..first + count {
                        if self
                            .read_records(&mut blocks, number, 1, &mut found)
                            .is_err()
                        {
                            unreadable.push(number);
                        }
                    }
                }
                Err(error) => return Err(self.device.error("read the table of", error)),
            }
            first += count;
        }
        if unreadable.len() as u64 == geometry.records {
            return Err(self.device.error("read the table of", Errno::IO));
        }
        // What earlier runs have erased must not come back after a loss of power: its numbers may be higher than those that
        // are given from now on.
        self.device
            .sync()
            .map_err(|error| self.device.error("sync", error))?;
        let superseded = self.index.fill(geometry, found, &unreadable);
        let mut erased = 0;
        for number in superseded {
            // One that stays loses against the later one after the next start, too.
            if self.erase(number).is_ok() {
                self.index.add_record(number);
                erased += 1;
            }
        }
        if !unreadable.is_empty() {
            tracing::warn!(
                device_path = %self.device.path().display(),
                records = unreadable.len(),
                "records of a device could not be read; their objects are lost"
            );
        }
        Ok(erased)
    }

    fn read_records(
        &self,
        blocks: &mut Tail,
        first: u64,
        count: u64,
        found: &mut Vec<Record>,
    ) -> Result<(), Errno> {
        blocks.resize((count * BLOCK) as usize);
        let superblock = &self.device.superblock;
        self.device
            .read(blocks, superblock.geometry.record_at(first))?;
        let records = blocks.chunks_exact(BLOCK as usize).zip(first..);
        found.extend(
            records.filter_map(|(block, number)| Record::decode(block, number, superblock)),
        );
        Ok(())
    }
}
