//! Scan of the table after a start. One that fails is tried again, as the device may come back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvtier_memory::uring::Tail;
use rustix::io::Errno;
use tokio::sync::watch;

use super::RawObjects;
use super::format::{BLOCK, RawRecord};
use crate::io::{self, pool::not_done};
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
pub(super) enum ScanState {
    Running,
    /// The number of records that were superseded and erased.
    Done(u64),
    Failed(L2Error, Instant),
}

/// The scan of a device.
pub(super) struct TableScanner {
    objects: Arc<RawObjects>,
    pub(super) state: watch::Sender<ScanState>,
    /// Whether the last scan that has ended has failed.
    has_failed: AtomicBool,
    is_stopped: AtomicBool,
}

impl TableScanner {
    /// Starts the scan on a thread of its own.
    ///
    /// # Errors
    /// If there is no thread.
    pub(super) fn start(objects: Arc<RawObjects>) -> Result<Arc<Self>, L2Error> {
        let scanner = Arc::new(Self {
            objects,
            state: watch::Sender::new(ScanState::Running),
            has_failed: AtomicBool::new(false),
            is_stopped: AtomicBool::new(false),
        });
        scanner.begin()?;
        Ok(scanner)
    }

    fn begin(self: &Arc<Self>) -> Result<(), L2Error> {
        self.state.send_replace(ScanState::Running);
        let scanner = Arc::clone(self);
        let work = move || scanner.end(scanner.scan_table());
        let thread = std::thread::Builder::new().name("kvtier-raw-scan".into());
        thread.spawn(work).map(drop).map_err(|error| {
            let what = format!("cannot start a thread for a scan: {error}");
            let error = L2Error::new(ErrorKind::Unavailable, what);
            self.end(Err(error.clone()));
            error
        })
    }

    /// Starts the scan again if the last one has failed a while ago. Nothing was found then, so nothing is in use.
    pub(super) fn retry(self: &Arc<Self>) {
        let is_due = match &*self.state.borrow() {
            ScanState::Failed(_, since) => since.elapsed() >= RETRY_PAUSE,
            _ => false,
        };
        if is_due && !self.is_stopped() {
            // Its failure is the state of the scan.
            let _ = self.begin();
        }
    }

    /// Waits for the end of the scan; returns the number of records that it has erased.
    pub(super) async fn ended(&self) -> Result<u64, L2Error> {
        let mut state = self.state.subscribe();
        let ended = state
            .wait_for(|scan| !matches!(scan, ScanState::Running))
            .await;
        match ended.as_deref() {
            Ok(ScanState::Done(erased)) => Ok(*erased),
            Ok(ScanState::Failed(error, _)) => Err(error.clone()),
            _ => Err(not_done()),
        }
    }

    /// Lets the scan end early; no other one starts.
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    fn end(&self, result: Result<u64, L2Error>) {
        let device_path = self.objects.device.path().display();
        match &result {
            Ok(_) if self.has_failed.swap(false, Ordering::Relaxed) => {
                tracing::info!(%device_path, "the table of a device was read again");
            }
            // One that was closed meanwhile is not to be used. Each failure is logged once.
            Err(error) if !self.is_stopped() && !self.has_failed.swap(true, Ordering::Relaxed) => {
                tracing::error!(%device_path, %error, "the table of a device could not be read; trying again in the background");
            }
            _ => {}
        }
        self.state.send_replace(match result {
            Ok(erased) => ScanState::Done(erased),
            Err(error) => ScanState::Failed(error, Instant::now()),
        });
    }

    fn scan_table(&self) -> Result<u64, L2Error> {
        let (device, index) = (&self.objects.device, &self.objects.index);
        let geometry = device.geometry();
        let (mut found, mut unreadable) = (Vec::new(), Vec::new());
        let mut blocks = Tail::default();
        let mut first = 0;
        while first < geometry.records {
            if self.is_stopped() {
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
                Err(error) => return Err(device.error("read the table of", error)),
            }
            first += count;
        }
        if unreadable.len() as u64 == geometry.records {
            return Err(device.error("read the table of", Errno::IO));
        }
        // What earlier runs have erased must not come back after a loss of power: its numbers may be higher than those that
        // are given from now on.
        device.sync().map_err(|error| device.error("sync", error))?;
        let superseded = index.fill(geometry, found, &unreadable);
        let mut erased = 0;
        for number in superseded {
            // One that stays loses against the later one after the next start, too.
            if self.objects.erase(number).is_ok() {
                index.add_record(number);
                erased += 1;
            }
        }
        if !unreadable.is_empty() {
            tracing::warn!(
                device_path = %device.path().display(),
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
        found: &mut Vec<RawRecord>,
    ) -> Result<(), Errno> {
        blocks.resize((count * BLOCK) as usize);
        let device = &self.objects.device;
        let superblock = &device.superblock;
        device.read(blocks, superblock.geometry.record_at(first))?;
        let records = blocks.chunks_exact(BLOCK as usize).zip(first..);
        found.extend(
            records.filter_map(|(block, number)| RawRecord::decode(block, number, superblock)),
        );
        Ok(())
    }
}
