//! The file of the segments in the state directory: a header with the secret, then a record for each place of the ring.
//!
//! Once per second what has changed is written. What a kill leaves out, and a record that is torn, is not found until it is stored
//! again. A lookup asks for the object of each segment, so an old record does no harm.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_common::error::{Error, Result};
use kvtier_common::state::StateDir;
use kvtier_core::segments::Segments;

/// Name of the file.
const NAME: &str = "segments";

/// What the file begins with, before the secret.
const MAGIC: [u8; 32] = *b"kvtier segments of prompts 1\n\0\0\0";

const HEADER_BYTES: u64 = 64;

/// Records that one call takes: lookups wait meanwhile, some 100 us.
const CALL_RECORDS: usize = 4096;

/// Calls of one round, at most: some MiB are written.
const ROUND_CALLS: usize = 16;

/// The file.
pub(super) struct SegmentFile {
    file: File,
    /// The secret of its segments.
    pub(super) secret: [u8; 32],
    has_failed: AtomicBool,
}

/// Bytes that no client can guess.
///
/// # Errors
/// The system has none.
pub(super) fn random_secret() -> Result<[u8; 32]> {
    let mut secret = [0; 32];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut secret));
    read.map_err(|error| Error::io("/dev/urandom", error))?;
    Ok(secret)
}

impl SegmentFile {
    /// The file of this instance, which is begun if there is none.
    ///
    /// # Errors
    /// It cannot be trusted, read or created.
    pub(super) fn open(state: &StateDir) -> Result<Self> {
        let path = state.file(NAME)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o600);
        let failed = |error| Error::io(path.display(), error);
        let file = options.open(&path).map_err(failed)?;
        let mut header = [0; HEADER_BYTES as usize];
        let is_known = file.read_exact_at(&mut header, 0).is_ok() && header[..32] == MAGIC;
        if !is_known {
            header[..32].copy_from_slice(&MAGIC);
            header[32..].copy_from_slice(&random_secret()?);
            let written = file.set_len(0);
            written
                .and_then(|()| file.write_all_at(&header, 0))
                .map_err(failed)?;
        }
        let mut secret = [0; 32];
        secret.copy_from_slice(&header[32..]);
        Ok(Self {
            file,
            secret,
            has_failed: AtomicBool::new(false),
        })
    }

    /// Reads the records of the server before.
    pub(super) fn restore(&self, segments: &Segments) {
        let mut file = BufReader::with_capacity(Segments::RECORD_BYTES << 10, &self.file);
        let mut record = [0; Segments::RECORD_BYTES];
        let mut restored = 0;
        if file.seek(SeekFrom::Start(HEADER_BYTES)).is_ok() {
            let mut place = 0;
            while file.read_exact(&mut record).is_ok() {
                restored += usize::from(segments.restore(place, &record));
                place += 1;
            }
        }
        tracing::info!(segments = restored, "segments of the server before");
    }

    /// Writes what has changed, a part in each call; returns whether there may be more. After an error nothing is written any more.
    pub(super) fn keep(&self, segments: &Segments) -> bool {
        if self.has_failed.load(Ordering::Relaxed) {
            return false;
        }
        for _ in 0..ROUND_CALLS {
            let changes = segments.take_changes(CALL_RECORDS);
            let runs = changes.chunk_by(|(place, _), (next, _)| place + 1 == *next);
            for run in runs {
                let bytes: Vec<u8> = run.iter().flat_map(|(_, record)| *record).collect();
                let at = HEADER_BYTES + (run[0].0 * Segments::RECORD_BYTES) as u64;
                if let Err(error) = self.file.write_all_at(&bytes, at) {
                    tracing::warn!(%error, "segments cannot be kept any more; after a restart those since now are found when they are stored again");
                    self.has_failed.store(true, Ordering::Relaxed);
                    return false;
                }
            }
            if changes.len() < CALL_RECORDS {
                return false;
            }
        }
        true
    }
}
