//! Objects as files: what the workers share, and where they look for an object.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvtier_core::object_key::{KeyShape, ObjectKey, shown_path};
use rustix::fs::{OFlags, Stat};
use rustix::io::Errno;

use super::base::{Aside, Base, is_file};
use super::beneath;
use super::io::{self, Engine};
use super::names::{Layout, Place, other_shape};
use super::options::Fsync;
use super::trailer::{self, Form, Trailer, form_of};
use super::unnamed::Unnamed;
use super::unreadable::Unreadable;
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, ObjectSpec};

/// How often names are looked for that nobody was seen to use. Another program may begin to.
const PROBE_EVERY: Duration = Duration::from_secs(60);

/// How a file is opened for reading. Neither links are followed nor pipes waited for.
pub(super) const READ_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);

/// What happened, since the start.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Damaged files kept in the quarantine.
    pub quarantined: AtomicU64,
    /// Damaged files deleted, because the quarantine was full.
    pub discarded: AtomicU64,
    /// Files that a store replaced, because they were damaged or of another layout.
    pub replaced: AtomicU64,
    /// Loads of whole objects of another layout than the one that was wanted.
    pub other_layout: AtomicU64,
    /// Loads of files that an earlier or later release wrote, whose layout cannot be compared.
    pub other_version: AtomicU64,
    /// Files without a layout that were not taken for a page-bound object.
    pub no_layout: AtomicU64,
    /// Loads that the disk failed.
    pub unreadable: AtomicU64,
    /// Objects loaded from files without a checksum.
    pub unverified: AtomicU64,
    /// Files read or written through the page cache although that was not asked for.
    pub not_direct: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The files of a directory.
pub(super) struct Files {
    pub base: Base,
    pub unnamed: Unnamed,
    /// Whether files cannot be moved from directory to directory, because of quotas or mounts, and so are made where
    /// they belong.
    pub is_apart: AtomicBool,
    pub engine: Box<dyn Engine>,
    /// What is written.
    pub shape: KeyShape,
    pub layout: Layout,
    pub direct: bool,
    pub fsync: Fsync,
    pub require_checksum: bool,
    pub trust_missing_layout: bool,
    pub read_ahead: Option<u64>,
    pub others: Others,
    pub counters: Counters,
    pub unreadable: Unreadable,
}

/// Which names besides those that we write are worth a look.
pub(super) struct Others {
    shape: AtomicBool,
    layout: AtomicBool,
    opened: Instant,
    /// Seconds since then at which all names are looked for again.
    probe_at: AtomicU64,
}

impl Default for Others {
    /// All of them, until somebody has looked.
    fn default() -> Self {
        Self {
            shape: AtomicBool::new(true),
            layout: AtomicBool::new(true),
            opened: Instant::now(),
            probe_at: AtomicU64::new(PROBE_EVERY.as_secs()),
        }
    }
}

impl Others {
    /// What a look at the whole directory found.
    pub(super) fn set(&self, shape: bool, layout: bool) {
        self.shape.store(shape, Ordering::Relaxed);
        self.layout.store(layout, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> (bool, bool) {
        (
            self.shape.load(Ordering::Relaxed),
            self.layout.load(Ordering::Relaxed),
        )
    }

    /// Whether it is time to look for all of them; `true` once each time.
    fn is_due(&self) -> bool {
        let now = self.opened.elapsed().as_secs();
        let due = self.probe_at.load(Ordering::Relaxed);
        let next = now + PROBE_EVERY.as_secs();
        let swap = |due| {
            self.probe_at
                .compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed)
        };
        now >= due && swap(due).is_ok()
    }

    #[cfg(test)]
    pub(super) fn make_due(&self) {
        self.probe_at.store(0, Ordering::Relaxed);
    }
}

/// Where to look for a key, for one batch.
#[derive(Clone, Copy)]
pub(super) struct Look {
    shapes: bool,
    layouts: bool,
}

impl Look {
    /// Whether one place is all there is to look at.
    pub(super) fn is_single(self) -> bool {
        !self.shapes && !self.layouts
    }
}

impl Files {
    pub(super) fn look(&self) -> Look {
        let is_due = self.others.is_due();
        let (shape, layout) = self.others.get();
        Look {
            shapes: shape || is_due,
            layouts: layout || is_due,
        }
    }

    /// The place of a key that we write to, and others where it may be.
    pub(super) fn places<'a>(
        &self,
        key: &'a ObjectKey,
        look: Look,
    ) -> (Place, impl Iterator<Item = Place> + use<'a>) {
        let (shape, layout) = (self.shape, self.layout);
        // Keys of other groups have the same name in both shapes.
        let shapes = look.shapes && key.object_group_id() == 0;
        let in_shape = shapes.then_some((other_shape(shape), layout));
        let in_layout = look.layouts.then_some((shape, layout.other()));
        let in_both = in_shape
            .and(in_layout)
            .map(|_| (other_shape(shape), layout.other()));
        let others = [in_shape, in_layout, in_both].into_iter().flatten();
        (
            Place::of(key, shape, layout),
            others.map(|(shape, layout)| Place::of(key, shape, layout)),
        )
    }

    /// Whether a file of this form can be this object. One without a trailer does not say which layout it has, which
    /// is enough only where its length decides.
    pub(super) fn accepts(&self, form: Form, object: &ObjectSpec) -> bool {
        if form == Form::Trailed {
            return true;
        }
        let needs_layout = object.is_page_bound() && !self.trust_missing_layout;
        if needs_layout && self.counters.no_layout.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                base_path = %self.base.path().display(),
                "files without a layout are not loaded for models whose pages depend on block size and processor; stores \
                 replace them. trust_missing_layout loads them"
            );
        }
        !needs_layout && !self.require_checksum
    }

    /// Remembers that objects are found there.
    pub(super) fn found_at(&self, place: &Place) {
        if place.shape != self.shape {
            self.others.shape.store(true, Ordering::Relaxed);
        }
        if place.layout != self.layout {
            self.others.layout.store(true, Ordering::Relaxed);
        }
    }

    /// Which of these objects are there: their bytes.
    pub(super) fn lookup(&self, batch: &[ObjectSpec]) -> Vec<Result<Option<u64>, L2Error>> {
        let (dir, look) = (self.base.current(), self.look());
        let find = |object: &ObjectSpec| {
            let (place, others) = self.places(&object.key, look);
            for place in std::iter::once(place).chain(others) {
                let Some(stat) = stat(&dir, &place.path)? else {
                    continue;
                };
                let size = size(&stat);
                let form = form_of(size, object.len, place.text_len());
                if is_file(&stat) && form.is_some_and(|form| self.accepts(form, object)) {
                    self.found_at(&place);
                    return Ok(Some(size));
                }
            }
            Ok(None)
        };
        batch.iter().map(find).collect()
    }

    /// Deletes an object wherever it is; whether it was there.
    pub(super) fn delete(&self, key: &ObjectKey) -> Result<bool, L2Error> {
        let dir = self.base.current();
        let mut was_there = false;
        let everywhere = Look {
            shapes: true,
            layouts: true,
        };
        let (place, others) = self.places(key, everywhere);
        for place in std::iter::once(place).chain(others) {
            if !stat(&dir, &place.path)?.is_some_and(|stat| is_file(&stat)) {
                continue;
            }
            match beneath::unlink(&dir, &place.path) {
                Ok(()) => was_there = true,
                Err(Errno::NOENT) => {}
                Err(error) => return Err(io::refused("delete", &place.path, error)),
            }
        }
        Ok(was_there)
    }

    /// Takes a file out of the way that is not what it has to be, so that the next store can write it; the error to
    /// answer with.
    pub(super) fn put_aside(&self, dir: &OwnedFd, path: &str, seen: &Stat, why: &str) -> L2Error {
        let shown = shown_path(path);
        if self.base.is_read_only() {
            return L2Error::new(ErrorKind::Corrupt, format!("{shown:?} {why}"));
        }
        match self.base.set_aside(dir, path, seen) {
            Ok(aside) => {
                match aside {
                    Aside::Kept => count(&self.counters.quarantined),
                    Aside::Deleted => count(&self.counters.discarded),
                    Aside::Gone => {}
                }
                L2Error::new(ErrorKind::Corrupt, format!("{shown:?} {why}"))
            }
            // The disk rather than the file.
            Err(error @ (Errno::IO | Errno::ROFS)) => {
                let message = format!("{shown:?} {why} and cannot be put aside: {error}");
                L2Error::new(ErrorKind::Unavailable, message)
            }
            Err(error) => {
                let message = format!("{shown:?} {why} and cannot be put aside: {error}");
                L2Error::new(ErrorKind::Corrupt, message)
            }
        }
    }

    /// Room on the disk, where the file system says.
    pub(super) fn free_bytes(&self) -> Option<u64> {
        let room = rustix::fs::fstatvfs(self.base.dir()).ok()?;
        Some(room.f_bavail.saturating_mul(room.f_frsize))
    }

    /// Whether files of this memory can be read and written past the page cache.
    pub(super) fn is_direct(&self, buffer: &Buffer) -> bool {
        let is_aligned = || {
            let start = buffer.arena().address(buffer.extent(), 0, 0);
            start.is_ok_and(|start| {
                start
                    .as_ptr()
                    .addr()
                    .is_multiple_of(trailer::BLOCK as usize)
            })
        };
        self.direct && is_aligned()
    }

    /// Counts a file that has to go through the page cache, and says so the first time.
    pub(super) fn note_not_direct(&self, error: &dyn std::fmt::Display) {
        if self.counters.not_direct.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                base_path = %self.base.path().display(),
                %error,
                "use_odirect is not possible there; such files go through the page cache"
            );
        }
    }
}

/// What is there, if anything is.
pub(super) fn stat(dir: &OwnedFd, path: &str) -> Result<Option<Stat>, L2Error> {
    match beneath::stat(dir, path) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(error) => Err(io::refused("look at", path, error)),
    }
}

/// Bytes of a file.
pub(super) fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// The end of a file: its trailer, and the `text_len` bytes before it.
pub(super) fn read_end(
    file: &OwnedFd,
    size: u64,
    text_len: usize,
) -> Result<Option<(Trailer, Vec<u8>)>, Errno> {
    let len = trailer::LEN + text_len;
    let Some(start) = size.checked_sub(len as u64) else {
        return Ok(None);
    };
    let mut end = vec![0; len];
    let mut read = 0;
    while read < len {
        match rustix::io::pread(file, &mut end[read..], start + read as u64) {
            Ok(0) => return Ok(None),
            Ok(some) => read += some,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    let found = Trailer::decode(&end);
    end.truncate(text_len);
    Ok(found.map(|found| (found, end)))
}
