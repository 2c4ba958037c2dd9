//! 64-bit words in a shared memory segment that outlives the process.
//!
//! A process that is killed leaves the words that it has written, each whole and in their order: its stores are in memory
//! that the system keeps. The segment is sparse; memory is given to its pieces before they are written, so that a
//! full file system is an answer and no fault.

use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom};

use crate::arena::map_error;
use crate::error::ArenaError;
use crate::mapping::Mapping;
use crate::shm_file::{SHM, ShmFile};

/// Words of a piece: 64 KiB.
const PIECE: u64 = 8192;

/// Words in a segment of this user, mapped by no other process.
pub struct SharedWords {
    mapping: Mapping,
    shm: ShmFile,
    /// One bit for each piece with memory.
    pieces: Vec<u64>,
    /// End of the last piece with memory.
    end: u64,
}

impl SharedWords {
    /// Creates an empty segment in place of an earlier one, for at most `len` words. Its name stays when this is dropped.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn create(name: &str, len: u64) -> Result<Self, ArenaError> {
        let words = Self::over(ShmFile::create(Path::new(SHM), name)?, len)?;
        words.shm.keep();
        Ok(words)
    }

    /// Opens the segment of this name that an earlier process has left, with all of its words, which may be more than `len`; `None` if
    /// there is none that can be trusted.
    ///
    /// # Errors
    /// As [`SharedWords::create`].
    pub fn find(name: &str, len: u64) -> Result<Option<Self>, ArenaError> {
        let Some(shm) = ShmFile::find(Path::new(SHM), name)? else {
            return Ok(None);
        };
        let (size, _) = shm.sizes().unwrap_or_default();
        let mut words = Self::over(shm, len.max(size / 8))?;
        words.find_pieces(size);
        Ok(Some(words))
    }

    fn over(shm: ShmFile, len: u64) -> Result<Self, ArenaError> {
        let bytes = len.next_multiple_of(PIECE).saturating_mul(8);
        let mapped = usize::try_from(bytes)
            .map_err(|_| ArenaError::Size { bytes })
            .and_then(|bytes| {
                let mapped = Mapping::shared(shm.file().as_fd(), bytes, "ledger");
                mapped.map_err(|error| map_error(error, shm.name()))
            });
        let pieces = usize::try_from(len.div_ceil(PIECE).div_ceil(64)).unwrap_or(usize::MAX);
        Ok(Self {
            mapping: mapped?,
            shm,
            pieces: vec![0; pieces],
            end: 0,
        })
    }

    /// Finds the pieces that have memory: all of a piece, if a page of it was written. The others were never used. A piece that
    /// is cut off by the end of the file has none.
    fn find_pieces(&mut self, size: u64) {
        let file = self.shm.file();
        let mut at = 0;
        while let Ok(start) = rustix::fs::seek(file, SeekFrom::Data(at)) {
            let Ok(end) = rustix::fs::seek(file, SeekFrom::Hole(start)) else {
                break;
            };
            let whole = size / (PIECE * 8);
            for piece in start / (PIECE * 8)..end.div_ceil(PIECE * 8).min(whole) {
                if let Some(bits) = self.pieces.get_mut((piece / 64) as usize) {
                    *bits |= 1 << (piece % 64);
                    self.end = (piece + 1) * PIECE;
                }
            }
            at = end;
        }
    }

    fn has_memory(&self, at: u64) -> bool {
        let piece = at / PIECE;
        let bits = self.pieces.get((piece / 64) as usize);
        bits.is_some_and(|bits| bits >> (piece % 64) & 1 == 1)
    }

    #[inline]
    fn word(&self, at: u64) -> Option<&AtomicU64> {
        let place = self.mapping.locate(at.checked_mul(8)?, 8).ok()?;
        // SAFETY: the eight bytes lie in the mapping, which is aligned to pages and lives as long as `self`, and they are
        // only accessed atomically.
        Some(unsafe { AtomicU64::from_ptr(place.as_ptr().cast()) })
    }

    /// A word; 0 where there is no memory.
    #[inline]
    #[must_use]
    pub fn get(&self, at: u64) -> u64 {
        match self.word(at).filter(|_| self.has_memory(at)) {
            Some(word) => word.load(Ordering::Relaxed),
            None => 0,
        }
    }

    /// Writes a word that was [reached](Self::reach); others are dropped.
    #[inline]
    pub fn set(&mut self, at: u64, word: u64) {
        if at < self.end
            && let Some(place) = self.word(at)
        {
            place.store(word, Ordering::Release);
        }
    }

    /// Writes words that were reached together, in their order; if one was not, all are dropped.
    #[inline]
    pub fn set_all(&mut self, at: u64, words: &[u64]) {
        let (first, count) = (at.saturating_mul(8), words.len() as u64);
        let has_memory = at.checked_add(count).is_some_and(|end| end <= self.end);
        let Some(place) = self
            .mapping
            .locate(first, count * 8)
            .ok()
            .filter(|_| has_memory)
        else {
            return;
        };
        // SAFETY: these bytes lie in the mapping, which is aligned to pages and lives as long as `self`, and they are only
        // accessed atomically.
        let places =
            unsafe { std::slice::from_raw_parts(place.as_ptr().cast::<AtomicU64>(), words.len()) };
        for (place, word) in places.iter().zip(words) {
            place.store(*word, Ordering::Release);
        }
    }

    /// Returns the end of the last piece with memory.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Allocates memory for these words; returns whether there was some.
    pub fn reach(&mut self, words: Range<u64>) -> bool {
        for piece in words.start / PIECE..words.end.div_ceil(PIECE) {
            if self.has_memory(piece * PIECE) {
                continue;
            }
            let Some(bits) = self.pieces.get_mut((piece / 64) as usize) else {
                return false;
            };
            let bytes = piece * PIECE * 8;
            let (file, none) = (self.shm.file(), FallocateFlags::empty());
            if rustix::fs::fallocate(file, none, bytes, PIECE * 8).is_err() {
                return false;
            }
            *bits |= 1 << (piece % 64);
            self.end = self.end.max((piece + 1) * PIECE);
        }
        true
    }

    /// Removes the name of the segment.
    pub fn unlink(&self) {
        self.shm.remove();
    }
}

impl std::fmt::Debug for SharedWords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedWords")
            .field("name", &self.shm.name())
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(test: &str) -> String {
        format!("kvtier_words_{test}_{}", std::process::id())
    }

    #[test]
    fn words_are_found_again_where_memory_was_given() {
        let name = name("found");
        assert!(SharedWords::find(&name, 100).unwrap().is_none());
        let far = 1 << 28;
        let mut words = SharedWords::create(&name, far + 2 * PIECE).unwrap();
        assert_eq!((words.end(), words.get(far)), (0, 0));
        words.set(far, 1);
        assert_eq!(words.get(far), 0, "no memory, no word");
        assert!(words.reach(far + 1..far + 2) && words.reach(0..1));
        words.set(far + 1, u64::MAX);
        words.set(0, 7);
        words.set_all(PIECE - 2, &[8, 9]);
        assert_eq!([words.get(PIECE - 2), words.get(PIECE - 1)], [8, 9]);
        let end = words.end();
        words.set_all(end - 1, &[5, 5]);
        words.set_all(u64::MAX, &[5]);
        assert_eq!([words.get(end - 1), words.get(end)], [0, 0], "all or none");
        assert!(!words.reach(u64::MAX - 1..u64::MAX), "outside");
        // Locked while it is open.
        let error = SharedWords::find(&name, 100).err();
        assert!(matches!(error, Some(ArenaError::NameInUse { .. })));
        let (_, backed) = words.shm.sizes().unwrap();
        assert_eq!(backed, 2 * PIECE * 8);
        drop(words);
        let again = SharedWords::find(&name, far + 2 * PIECE).unwrap().unwrap();
        assert_eq!(
            [again.get(0), again.get(far + 1), again.get(far)],
            [7, u64::MAX, 0]
        );
        assert_eq!([again.get(PIECE), again.get(u64::MAX)], [0, 0]);
        assert_eq!(again.end(), (far / PIECE + 1) * PIECE);
        drop(again);
        // A smaller server sees all of them: what it leaves out is absent for a larger one after it.
        let mut small = SharedWords::find(&name, PIECE).unwrap().unwrap();
        let all = (far / PIECE + 1) * PIECE;
        assert_eq!((small.end(), small.get(far + 1)), (all, u64::MAX));
        small.set(far + 1, 0);
        // Cut off within a piece: no word of it is there, and none is a fault.
        let half = (far + PIECE / 2) * 8;
        rustix::fs::ftruncate(small.shm.file(), half).unwrap();
        drop(small);
        let cut = SharedWords::find(&name, far + 2 * PIECE).unwrap().unwrap();
        assert_eq!(
            [cut.get(0), cut.get(far), cut.get(far + PIECE - 1)],
            [7, 0, 0]
        );
        assert_eq!(cut.end(), PIECE);
        cut.unlink();
        assert!(SharedWords::find(&name, 100).unwrap().is_none());
    }

    #[test]
    fn segment_that_others_can_open_is_not_found() {
        use std::os::unix::fs::PermissionsExt as _;
        let name = name("open");
        let words = SharedWords::create(&name, PIECE).unwrap();
        let path = format!("/dev/shm/{}", words.shm.name());
        drop(words);
        for (mode, is_found) in [(0o600, true), (0o640, false), (0o602, false)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(
                SharedWords::find(&name, PIECE).unwrap().is_some(),
                is_found,
                "{mode:o}"
            );
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let link = format!("{path}_link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(
            SharedWords::find(&format!("{name}_link"), PIECE)
                .unwrap()
                .is_none()
        );
        std::fs::remove_file(&link).unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}
