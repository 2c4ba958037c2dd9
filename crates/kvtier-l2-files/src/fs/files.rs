//! State that the workers share, and the places of an object's file.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvtier_core::object_key::{ObjectKey, shown_path};
use rustix::fs::{OFlags, Stat};
use rustix::io::Errno;

use super::base::{Base, Quarantined, is_file};
use super::beneath;
use super::names::{FilePlace, Layout};
use super::naming::Naming;
use super::options::Fsync;
use super::unnamed::Unnamed;
use crate::io::{self, Engine};
pub(super) use kvtier_l2::metadata::count;
use kvtier_l2::trailer::{self, Form, Trailer, form_of};
use kvtier_l2::{Buffer, ErrorKind, KeySet, L2Error, ObjectSpec};

/// Interval of looking for names that no file had so far, as another program may start to use them.
const PROBE_INTERVAL: Duration = Duration::from_secs(60);

/// Flags for reading a file, without following links or waiting for pipes.
pub(super) const READ_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);

/// FileCounters since the start.
#[derive(Debug, Default)]
pub(super) struct FileCounters {
    /// Damaged files kept in the quarantine.
    pub quarantined: AtomicU64,
    /// Damaged files deleted as the quarantine was full.
    pub discarded: AtomicU64,
    /// Damaged files, or files of another layout, that a store replaced.
    pub replaced: AtomicU64,
    /// Loads of intact objects of another layout than requested.
    pub other_layout: AtomicU64,
    /// Loads of files of another release, whose layout cannot be compared.
    pub other_version: AtomicU64,
    /// Files without a layout that were not accepted for a page-bound object.
    pub no_layout: AtomicU64,
    /// Loads with a read error of the disk.
    pub unreadable: AtomicU64,
    /// Objects loaded from files without a checksum.
    pub unverified: AtomicU64,
    /// Files read or written through the page cache in spite of `use_odirect`.
    pub not_direct: AtomicU64,
}

/// The files of a directory.
pub(super) struct Files {
    pub base: Base,
    pub unnamed: Unnamed,
    /// Whether files cannot be renamed across directories, because of quotas or mounts, and so are created in their own.
    pub create_in_place: AtomicBool,
    pub engine: Box<dyn Engine>,
    /// Names that are written.
    pub naming: Naming,
    /// What the bytes of objects are padded to in files.
    pub align: u64,
    pub layout: Layout,
    pub direct: bool,
    pub fsync: Fsync,
    pub require_checksum: bool,
    pub trust_missing_layout: bool,
    pub read_ahead: Option<u64>,
    pub others: OtherPlaces,
    pub counters: FileCounters,
    /// Objects that the disk failed to read. Their files may be intact, so they stay until a store replaces them.
    pub unreadable: KeySet,
}

/// Names and layouts to look for beside those that kvtier is configured to write.
pub(super) struct OtherPlaces {
    naming: AtomicBool,
    layout: AtomicBool,
    opened: Instant,
    /// Seconds after `opened` at which all names are looked for again.
    probe_at: AtomicU64,
}

impl Default for OtherPlaces {
    /// All of them until the first scan.
    fn default() -> Self {
        Self {
            naming: AtomicBool::new(true),
            layout: AtomicBool::new(true),
            opened: Instant::now(),
            probe_at: AtomicU64::new(PROBE_INTERVAL.as_secs()),
        }
    }
}

impl OtherPlaces {
    /// Sets the result of a scan of the whole directory.
    pub(super) fn set(&self, naming: bool, layout: bool) {
        self.naming.store(naming, Ordering::Relaxed);
        self.layout.store(layout, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> (bool, bool) {
        (
            self.naming.load(Ordering::Relaxed),
            self.layout.load(Ordering::Relaxed),
        )
    }

    /// Whether to look for all of them now; `true` once per interval.
    fn is_due(&self) -> bool {
        let now = self.opened.elapsed().as_secs();
        let due = self.probe_at.load(Ordering::Relaxed);
        let next = now + PROBE_INTERVAL.as_secs();
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

/// Names and layouts to look up for one batch.
#[derive(Clone, Copy)]
pub(super) struct LookupScope {
    namings: bool,
    layouts: bool,
}

impl LookupScope {
    /// Whether there is only one place to look at.
    pub(super) fn is_single(self) -> bool {
        !self.namings && !self.layouts
    }
}

impl Files {
    pub(super) fn lookup_scope(&self) -> LookupScope {
        let is_due = self.others.is_due();
        let (naming, layout) = self.others.get();
        LookupScope {
            namings: (naming || is_due) && self.naming.other().is_some(),
            layouts: layout || is_due,
        }
    }

    /// Returns the place that a key is written to, and others where it may be.
    pub(super) fn places<'a>(
        &self,
        key: &'a ObjectKey,
        scope: LookupScope,
    ) -> (FilePlace, impl Iterator<Item = FilePlace> + use<'a>) {
        let (naming, layout) = (self.naming, self.layout);
        // Keys of other groups have the same name in both releases.
        let is_in_other = scope.namings && key.object_group_id() == 0;
        let other = naming.other().filter(|_| is_in_other);
        let in_naming = other.map(|other| (other, layout));
        let in_layout = scope.layouts.then_some((naming, layout.other()));
        let in_both = other
            .filter(|_| scope.layouts)
            .map(|other| (other, layout.other()));
        let others = [in_naming, in_layout, in_both].into_iter().flatten();
        (
            FilePlace::of(key, naming, layout),
            others.map(|(naming, layout)| FilePlace::of(key, naming, layout)),
        )
    }

    /// Whether a file of this form can be this object. A file without a trailer has no layout; it is accepted only if the
    /// length is sufficient.
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

    /// Looks for names and layouts of this place from now on.
    pub(super) fn found_at(&self, place: &FilePlace) {
        if place.naming != self.naming {
            self.others.naming.store(true, Ordering::Relaxed);
        }
        if place.layout != self.layout {
            self.others.layout.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the bytes of the objects that are there.
    pub(super) fn lookup(&self, batch: &[ObjectSpec]) -> Vec<Result<Option<u64>, L2Error>> {
        let (dir, scope) = (self.base.current(), self.lookup_scope());
        let find = |object: &ObjectSpec| {
            let (place, others) = self.places(&object.key, scope);
            for place in std::iter::once(place).chain(others) {
                let Some(stat) = stat(&dir, &place.path)? else {
                    continue;
                };
                let size = size(&stat);
                let form = form_of(size, object.len, place.text_len(), self.align);
                if is_file(&stat) && form.is_some_and(|form| self.accepts(form, object)) {
                    self.found_at(&place);
                    return Ok(Some(size));
                }
            }
            Ok(None)
        };
        batch.iter().map(find).collect()
    }

    /// Deletes an object in all places; returns whether it was there.
    pub(super) fn delete(&self, key: &ObjectKey) -> Result<bool, L2Error> {
        let dir = self.base.current();
        let mut was_there = false;
        let everywhere = LookupScope {
            namings: true,
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

    /// Quarantines a damaged file, so that the next store can write it; returns the error of the load.
    pub(super) fn quarantine(&self, dir: &OwnedFd, path: &str, seen: &Stat, why: &str) -> L2Error {
        let shown = shown_path(path);
        if self.base.is_read_only() {
            return L2Error::new(ErrorKind::Corrupt, format!("{shown:?} {why}"));
        }
        match self.base.quarantine(dir, path, seen) {
            Ok(quarantined) => {
                match quarantined {
                    Quarantined::Kept => count(&self.counters.quarantined),
                    Quarantined::Deleted => count(&self.counters.discarded),
                    Quarantined::Replaced => {}
                }
                L2Error::new(ErrorKind::Corrupt, format!("{shown:?} {why}"))
            }
            // A failure of the disk, not of the file.
            Err(error @ (Errno::IO | Errno::ROFS)) => {
                let message = format!("{shown:?} {why} and cannot be quarantined: {error}");
                L2Error::new(ErrorKind::Unavailable, message)
            }
            Err(error) => {
                let message = format!("{shown:?} {why} and cannot be quarantined: {error}");
                L2Error::new(ErrorKind::Corrupt, message)
            }
        }
    }

    /// Returns the free bytes of the file system, if known.
    pub(super) fn free_bytes(&self) -> Option<u64> {
        let stat = rustix::fs::fstatvfs(self.base.dir()).ok()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Whether direct I/O is possible with this memory.
    pub(super) fn is_direct(&self, buffer: &Buffer) -> bool {
        self.direct && buffer.is_aligned(trailer::BLOCK)
    }

    /// Counts a file that has to use the page cache; the first one is logged.
    pub(super) fn note_not_direct(&self, error: &dyn std::fmt::Display) {
        if self.counters.not_direct.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                base_path = %self.base.path().display(),
                %error,
                "use_odirect is not possible there; using the page cache for such files"
            );
        }
    }
}

/// Returns the metadata of a file, `None` if it does not exist.
pub(super) fn stat(dir: &OwnedFd, path: &str) -> Result<Option<Stat>, L2Error> {
    match beneath::stat(dir, path) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(error) => Err(io::refused("stat", path, error)),
    }
}

/// Returns the bytes of a file.
pub(super) fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// Reads the trailer of a file and the `text_len` bytes before it.
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
