//! Scan of the table after a start.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvtier_memory::uring::Tail;
use rustix::io::Errno;
use tokio::sync::watch;

use super::Shared;
use super::format::{BLOCK, Record};
use crate::error::{ErrorKind, L2Error};
use crate::io;

/// Records per read.
const PIECE: u64 = 256;

/// How far the scan is.
#[derive(Debug, Clone)]
pub(super) enum Scan {
    Running,
    /// The number of records that were superseded and erased.
    Done(u64),
    Failed(L2Error),
}

/// Starts the scan on a thread of its own.
pub(super) fn start(shared: Arc<Shared>) -> Result<watch::Receiver<Scan>, L2Error> {
    let (done, scan) = watch::channel(Scan::Running);
    let work = move || {
        let result = shared.scan();
        // An adapter that is closed does not wait.
        let _ = done.send(match result {
            Ok(erased) => Scan::Done(erased),
            Err(error) => {
                // One that was closed meanwhile is not to be used.
                if !shared.is_closed.load(Ordering::Acquire) {
                    tracing::error!(%error, "a device cannot be used: its table could not be read");
                }
                Scan::Failed(error)
            }
        });
    };
    let thread = std::thread::Builder::new().name("kvtier-raw-scan".into());
    thread.spawn(work).map_err(|error| {
        let what = format!("cannot start a thread for a scan: {error}");
        L2Error::new(ErrorKind::Unavailable, what)
    })?;
    Ok(scan)
}

impl Shared {
    fn scan(&self) -> Result<u64, L2Error> {
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
