//! Arenas: the large blocks of memory that objects lie in.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;

use rustix::mm::{Advice, ProtFlags};
use xxhash_rust::xxh3::Xxh3;

use crate::access::AccessError;
use crate::checksum;
use crate::error::ArenaError;
use crate::file::{self, FileError, Pieces, file_offset};
use crate::hugetlbfs;
use crate::mapping::{HUGE_PAGE, MapError, Mapping};
use crate::numa::{self, NumaError};
use crate::prefault::{self, PrefaultEnd, PrefaultError, PrefaultProgress};
use crate::shm_file::{FileId, SHM, ShmFile, Space, pool_name};
use crate::socket::{self, SocketError};
use kvtier_common::extent::Extent;

/// Bytes that are read before they are hashed; they stay in a second-level cache.
const PIECE: u64 = 256 << 10;

/// Kind of memory that an arena has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArenaKind {
    /// Private memory of this process.
    Anonymous,
    /// A POSIX shared memory segment that engines of the same user can map.
    Shm {
        /// Name of the segment; a leading `/` is dropped and [`SHM_PREFIX`](crate::SHM_PREFIX) put before it unless there.
        name: String,
    },
    /// Private memory in huge pages of 2 MiB, which the administrator must have reserved.
    Hugepages,
    /// A file of such pages, which can outlive the process.
    HugeFile {
        /// A mount of hugetlbfs, as [`crate::hugetlbfs_mounts`] finds them.
        folder: PathBuf,
        /// Name of the file in `folder`, made as that of a segment.
        name: String,
    },
}

impl ArenaKind {
    /// The directory and the name of memory that can outlive the process.
    fn place(&self) -> Option<(&Path, &str)> {
        match self {
            Self::Shm { name } => Some((Path::new(SHM), name)),
            Self::HugeFile { folder, name } => Some((folder, name)),
            Self::Anonymous | Self::Hugepages => None,
        }
    }

    /// Path of memory that can outlive the process.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        let (folder, name) = self.place()?;
        Some(folder.join(pool_name(name)))
    }

    /// Bytes that an earlier process has left there.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        let found = self
            .path()
            .and_then(|path| std::fs::symlink_metadata(path).ok());
        found.map_or(0, |found| found.len())
    }

    fn is_huge(&self) -> bool {
        matches!(self, Self::Hugepages | Self::HugeFile { .. })
    }

    /// Bytes of an arena of at least `bytes`.
    fn whole_pages(&self, bytes: u64) -> Result<usize, ArenaError> {
        let page = if self.is_huge() {
            HUGE_PAGE
        } else {
            rustix::param::page_size()
        };
        usize::try_from(bytes)
            .ok()
            .filter(|len| *len > 0)
            .and_then(|len| len.checked_next_multiple_of(page))
            .filter(|len| *len <= isize::MAX as usize)
            .ok_or(ArenaError::Size { bytes })
    }
}

/// One block of memory. Its bytes are reached by [`Extent`], bounds-checked, through `&self`. The
/// caller decides when an extent may be touched (see the crate's notes).
///
/// ```
/// use kvtier_memory::{Arena, ArenaKind, Extent};
///
/// let arena = Arena::create(ArenaKind::Anonymous, 1 << 20)?;
/// let extent = Extent::new(4096, 5);
/// arena.write(extent, 0, b"bytes")?;
/// let mut read = [0; 3];
/// arena.read(extent, 2, &mut read)?;
/// assert_eq!(&read, b"tes");
/// // Nothing outside the extent is touched.
/// assert!(arena.write(extent, 3, b"more").is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Arena {
    mapping: Mapping,
    kind: ArenaKind,
    shm: Option<ShmFile>,
    /// Whether the name is for later processes of this server only.
    is_private: bool,
}

impl Arena {
    /// Creates an arena of at least `bytes` bytes (rounded up to whole pages) without touching
    /// any: time does not depend on the size.
    ///
    /// # Errors
    /// See [`ArenaError`]; nothing is left behind.
    pub fn create(kind: ArenaKind, bytes: u64) -> Result<Self, ArenaError> {
        let len = kind.whole_pages(bytes)?;
        let (mapping, shm) = match &kind {
            ArenaKind::Anonymous => {
                let mapped = Mapping::anonymous(len, false, "arena");
                (mapped.map_err(|e| map_error(e, "memory"))?, None)
            }
            ArenaKind::Hugepages => (map_hugepages(len)?, None),
            ArenaKind::HugeFile { folder, name } => {
                let shm = ShmFile::create(folder, name)?;
                resize(shm.file(), len as u64, &folder.display().to_string())?;
                let prot = ProtFlags::READ | ProtFlags::WRITE;
                (map_huge_file(&shm, len, 0, prot)?, Some(shm))
            }
            ArenaKind::Shm { name } => {
                let shm = ShmFile::create(Path::new(SHM), name)?;
                check_space(shm.file(), len as u64, SHM)?;
                resize(shm.file(), len as u64, SHM)?;
                let mapped = Mapping::shared(shm.file().as_fd(), len, "arena");
                (mapped.map_err(|e| map_error(e, shm.name()))?, Some(shm))
            }
        };
        let arena = Self {
            mapping,
            kind,
            shm,
            is_private: false,
        };
        // It is large and holds other people's prompts.
        arena.advise(Advice::LinuxDontDump);
        Ok(arena)
    }

    /// Opens the shared arena of this name that an earlier process has [kept](Self::keep), with `bytes` bytes, and returns how many
    /// of them it has: these are as they were, later ones are there after [`grow`](Self::grow). `None` if there is none that can
    /// be trusted.
    ///
    /// # Errors
    /// See [`ArenaError`]; the segment stays as it was.
    pub fn find(kind: ArenaKind, bytes: u64) -> Result<Option<(Self, u64)>, ArenaError> {
        let Some((folder, name)) = kind.place() else {
            return Ok(None);
        };
        let Some(shm) = ShmFile::find(folder, name)? else {
            return Ok(None);
        };
        let len = kind.whole_pages(bytes)?;
        let (size, _) = shm.sizes().unwrap_or_default();
        let mapping = if kind.is_huge() {
            // A writable one would grow the file.
            let mut prot = ProtFlags::READ;
            prot.set(ProtFlags::WRITE, size >= len as u64);
            map_huge_file(&shm, len, size, prot)?
        } else {
            Mapping::shared(shm.file().as_fd(), len, "arena")
                .map_err(|e| map_error(e, shm.name()))?
        };
        let arena = Self {
            mapping,
            kind,
            shm: Some(shm),
            is_private: false,
        };
        arena.advise(Advice::LinuxDontDump);
        Ok(Some((arena, size.min(len as u64))))
    }

    /// Makes the segment of an arena that was [found](Self::find) as long as the arena. Bytes behind its former end are 0, so what
    /// names them must have been removed before: a later process cannot tell.
    ///
    /// # Errors
    /// See [`ArenaError`], also if pages that the earlier process has not touched are unavailable by now; the segment stays as it was.
    pub fn grow(&self) -> Result<(), ArenaError> {
        let Some(shm) = &self.shm else { return Ok(()) };
        let (size, backed) = shm.sizes().unwrap_or_default();
        let place = self.kind.place();
        let place = place.map_or(SHM.into(), |(folder, _)| folder.to_string_lossy());
        if !self.kind.is_huge() {
            check_space(shm.file(), self.len().saturating_sub(backed), &place)?;
        }
        if size >= self.len() {
            return Ok(());
        }
        resize(shm.file(), self.len(), &place)?;
        if self.kind.is_huge() {
            // Its mapping has reserved the pages.
            let allowed = self.mapping.allow_writes();
            allowed.map_err(|e| system_error("write", &place, e))?;
        }
        Ok(())
    }

    /// Bytes of its segment now; of an arena without one, its own.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        match &self.shm {
            Some(shm) => shm.sizes().unwrap_or_default().0,
            None => self.len(),
        }
    }

    /// Bytes of the pages that its segment has; 0 without one.
    #[must_use]
    pub fn backed_bytes(&self) -> u64 {
        let sizes = self.shm.as_ref().and_then(ShmFile::sizes);
        sizes.unwrap_or_default().1
    }

    /// Lets the segment of a shared arena stay when this process ends, for [`find`](Self::find).
    pub fn keep(&self) {
        if let Some(shm) = &self.shm {
            shm.keep();
        }
    }

    /// Lets another process [find](Self::find) the arena. This one must not write it any more.
    pub fn release(&self) {
        if let Some(shm) = &self.shm {
            shm.release();
        }
    }

    /// Identity of the segment of a shared arena.
    #[must_use]
    pub fn file_id(&self) -> Option<FileId> {
        self.shm.as_ref()?.id()
    }

    /// Whether it is known that no other process can reach the arena.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.shm.as_ref().is_none_or(ShmFile::is_alone)
    }

    /// Frees the memory of the rest of an arena that was larger, if no other process can reach it.
    pub fn trim(&self) {
        let Some(shm) = &self.shm else { return };
        let (size, _) = shm.sizes().unwrap_or_default();
        if size > self.len() && shm.is_alone() {
            // Nothing but memory is lost if it fails.
            let _ = rustix::fs::ftruncate(shm.file(), self.len());
        }
    }

    /// Advice is a wish: a kernel that does not know it loses nothing but speed.
    fn advise(&self, advice: Advice) {
        let base = self.mapping.base().as_ptr().cast();
        // SAFETY: the range is our mapping, and neither advice used changes its contents.
        let _ = unsafe { rustix::mm::madvise(base, self.mapping.len() as usize, advice) };
    }

    /// Bytes of the arena: what was asked for, rounded up to whole pages.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an arena is never empty")]
    pub fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// Returns the kind of memory that was asked for.
    #[must_use]
    pub fn kind(&self) -> &ArenaKind {
        &self.kind
    }

    /// Bytes of the pages it was mapped with.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.mapping.page() as u64
    }

    /// Name of its shared memory segment, as clients receive it: prefixed, without a slash.
    #[must_use]
    pub fn shm_name(&self) -> Option<&str> {
        self.segment_name().filter(|_| !self.is_private)
    }

    /// Returns the name of the shared memory segment, also where clients do not receive it.
    #[must_use]
    pub fn segment_name(&self) -> Option<&str> {
        self.shm.as_ref().map(ShmFile::name)
    }

    /// Path of that segment.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        let (folder, _) = self.kind.place()?;
        Some(folder.join(self.segment_name()?))
    }

    /// Returns the arena as one whose name clients do not receive.
    #[must_use]
    pub fn into_private(self) -> Self {
        Self {
            is_private: true,
            ..self
        }
    }

    /// Removes the name of a shared arena, so that no later process finds it; those that map it
    /// keep it. Drop does this too; call it where the process may end without drops. It takes no
    /// lock, allocates nothing, and may be called again.
    pub fn unlink(&self) {
        if let Some(shm) = &self.shm {
            shm.unlink();
        }
    }

    /// Removes the name of a shared arena also if it was [kept](Self::keep), under the conditions of [`unlink`](Self::unlink).
    /// Returns whether it was kept.
    pub fn remove(&self) -> bool {
        self.shm.as_ref().is_some_and(ShmFile::remove)
    }

    /// Address of the first byte: for registering the arena with a device, and for I/O straight
    /// from or to it. Valid as long as the arena lives.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// Address of `len` bytes at `at` inside `extent`, checked to lie inside both.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`].
    pub fn address(&self, extent: Extent, at: u64, len: u64) -> Result<NonNull<u8>, AccessError> {
        self.mapping.locate(self.offset(extent, at, len)?, len)
    }

    /// Copies `bytes` to offset `at` of `extent`.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`] (nothing was written), [`AccessError::Poisoned`].
    pub fn write(&self, extent: Extent, at: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let offset = self.offset(extent, at, bytes.len() as u64)?;
        self.mapping.write(offset, bytes)
    }

    /// Copies bytes from offset `at` of `extent` to `out`, whose bytes are undefined on error.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`], [`AccessError::Poisoned`].
    pub fn read(&self, extent: Extent, at: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let offset = self.offset(extent, at, out.len() as u64)?;
        self.mapping.read(offset, out)
    }

    /// All bytes of an anonymous arena, for work in place; `None` for an arena that other processes can map, or whose
    /// pages can get lost.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        match self.kind {
            ArenaKind::Anonymous | ArenaKind::Hugepages => {
                // SAFETY: the memory is private to this process; transfers in flight hold a share of the arena, so there
                // are none while it is borrowed exclusively.
                Some(unsafe { self.mapping.bytes_mut() })
            }
            ArenaKind::HugeFile { .. } | ArenaKind::Shm { .. } => None,
        }
    }

    /// Appends `len` bytes from offset `at` of `extent` to `buffer`, which stays as it was on
    /// error.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`], [`AccessError::OutOfMemory`], [`AccessError::Poisoned`].
    pub fn read_into(
        &self,
        extent: Extent,
        at: u64,
        len: u64,
        buffer: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        let offset = self.offset(extent, at, len)?;
        self.mapping.read_into(offset, len, buffer)
    }

    /// Brings the pages of `extent` into memory, so that reading them waits for nothing. Kernels before 5.14 do not.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`], [`AccessError::Poisoned`].
    pub fn populate(&self, extent: Extent) -> Result<(), AccessError> {
        let offset = self.offset(extent, 0, extent.len)?;
        prefault::populate_read(&self.mapping, Extent::new(offset, extent.len))
    }

    /// The 128-bit xxh3 of the bytes of `extent`.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`], [`AccessError::Poisoned`].
    pub fn checksum(&self, extent: Extent) -> Result<u128, AccessError> {
        checksum::mapped128(&self.mapping, extent)
    }

    /// The 64-bit xxh3 of the bytes of `extent`.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`], [`AccessError::Poisoned`].
    pub fn checksum64(&self, extent: Extent) -> Result<u64, AccessError> {
        checksum::mapped64(&self.mapping, extent)
    }

    /// The part of the arena that lost pages: from the lowest to the highest of them. Accesses
    /// that overlap it fail. A server that sees this should call itself unhealthy.
    #[must_use]
    pub fn poisoned(&self) -> Option<Extent> {
        self.mapping.poisoned()
    }

    /// Has the system put memory behind every page of `extent` now, front to back, so that no later store
    /// waits for it. Made for a thread of its own: the arena can be used meanwhile, by other
    /// processes too, and no byte changes. `progress` is called after each step, of some 100 µs; before it `stop` is
    /// checked.
    ///
    /// # Errors
    /// [`PrefaultError`] when the system has no more memory, or `extent` is not in the arena; the arena stays usable.
    pub fn prefault(
        &self,
        extent: Extent,
        stop: &AtomicBool,
        progress: impl FnMut(PrefaultProgress),
    ) -> Result<PrefaultEnd, PrefaultError> {
        if let Err(error) = self.mapping.locate(extent.offset, extent.len) {
            return Err(PrefaultError {
                done: extent.offset,
                source: std::io::Error::other(error),
            });
        }
        prefault::run(&self.mapping, extent, stop, progress)
    }

    /// Has pages that are touched from now on come from these NUMA nodes: from the only one while it has memory left, or
    /// from several by turns. No nodes change nothing.
    ///
    /// # Errors
    /// [`NumaError`]; the arena is as good as before.
    pub fn prefer_nodes(&self, nodes: &[u32]) -> Result<(), NumaError> {
        // Of several the system leaves out those that are not there; one by one, and elsewhere, it refuses them.
        if let [_, _, ..] = nodes
            && let Ok(other) = Self::create(ArenaKind::Anonymous, 1)
        {
            let each = nodes.iter();
            each.copied()
                .try_for_each(|node| other.prefer_node_in(0, 1, node))?;
        }
        numa::bind(&self.mapping, self.whole(), nodes)
    }

    /// [`Arena::prefer_nodes`] for `bytes` bytes from `offset`, the start of a page. Bytes beyond the arena are ignored.
    ///
    /// # Errors
    /// As [`Arena::prefer_nodes`].
    pub fn prefer_node_in(&self, offset: u64, bytes: u64, node: u32) -> Result<(), NumaError> {
        let bytes = bytes.min(self.len().saturating_sub(offset));
        numa::bind(
            &self.mapping,
            Extent::new(offset.min(self.len()), bytes),
            &[node],
        )
    }

    /// Reads `file` from its byte `at` on: into `extent`, and behind it into `tail`, until `enough` bytes are there or
    /// the file ends. Returns the bytes read, which may be more than `enough`.
    ///
    /// With `O_DIRECT` the extent, `tail` and `at` must be aligned as the file system wants it, and `enough` should be
    /// what the file has: a second read would begin where the first ended.
    ///
    /// # Errors
    /// [`FileError`]; what is in the extent then is undefined.
    pub fn read_file(
        &self,
        extent: Extent,
        tail: &mut [u8],
        file: BorrowedFd<'_>,
        at: u64,
        enough: u64,
    ) -> Result<u64, FileError> {
        self.read_rest(extent, tail, file, at, enough, 0)
    }

    /// [`Self::read_file`] behind the first `done` bytes; returns those too.
    pub(crate) fn read_rest(
        &self,
        extent: Extent,
        tail: &mut [u8],
        file: BorrowedFd<'_>,
        at: u64,
        enough: u64,
        mut done: u64,
    ) -> Result<u64, FileError> {
        let first = self.address(extent, 0, extent.len)?.as_ptr();
        let pieces = Pieces::new(first, extent.len, tail.as_mut_ptr(), tail.len());
        while done < enough.min(pieces.len()) {
            let vectors = pieces.from(done as usize);
            // SAFETY: `vectors` name writable memory that outlives the call: the extent, checked to lie inside this
            // arena, and `tail`, which is borrowed exclusively. Others may write the extent meanwhile; the system does
            // not mind, and we make no reference to it.
            let moved = unsafe {
                libc::preadv(
                    file.as_raw_fd(),
                    vectors.as_ptr(),
                    2,
                    file_offset(at, done, pieces.len())?,
                )
            };
            match file::outcome(moved, done)? {
                Some(0) => break,
                Some(moved) => done += moved,
                None => {}
            }
        }
        self.mapping.check_poison(extent)?;
        Ok(done)
    }

    /// [`Self::read_file`], which also returns the [`Self::checksum`] of the extent. The bytes are hashed piece by piece while
    /// the processor's caches have them, so it suits files in the page cache; others are better read whole.
    ///
    /// # Errors
    /// As [`Self::read_file`].
    pub fn read_file_summed(
        &self,
        extent: Extent,
        tail: &mut [u8],
        file: BorrowedFd<'_>,
        at: u64,
        enough: u64,
    ) -> Result<(u64, u128), FileError> {
        let mut hasher = Xxh3::new();
        let mut done = 0;
        loop {
            // The last piece comes with the tail.
            let left = extent.len - done;
            let is_last = left <= 2 * PIECE;
            let piece = Extent::new(extent.offset + done, if is_last { left } else { PIECE });
            let (tail, wanted) = if is_last {
                (&mut *tail, enough.saturating_sub(done))
            } else {
                (&mut [][..], PIECE)
            };
            let read = self.read_file(piece, tail, file, at.saturating_add(done), wanted)?;
            checksum::feed(&mut hasher, &self.mapping, piece)?;
            done += read;
            if is_last || read < piece.len {
                return Ok((done, hasher.digest128()));
            }
        }
    }

    /// Writes `extent` and behind it `tail` to `file` from its byte `at` on, all of it.
    ///
    /// # Errors
    /// [`FileError`]; the file may have part of the bytes then.
    pub fn write_file(
        &self,
        extent: Extent,
        tail: &[u8],
        file: BorrowedFd<'_>,
        at: u64,
    ) -> Result<(), FileError> {
        self.write_rest(extent, tail, file, at, 0)
    }

    /// [`Self::write_file`] behind the first `done` bytes.
    pub(crate) fn write_rest(
        &self,
        extent: Extent,
        tail: &[u8],
        file: BorrowedFd<'_>,
        at: u64,
        mut done: u64,
    ) -> Result<(), FileError> {
        let first = self.address(extent, 0, extent.len)?.as_ptr();
        let pieces = Pieces::new(first, extent.len, tail.as_ptr().cast_mut(), tail.len());
        while done < pieces.len() {
            let vectors = pieces.from(done as usize);
            // SAFETY: `vectors` name readable memory that outlives the call: the extent, checked to lie inside this
            // arena, and `tail`, which is borrowed. The system only reads them.
            let moved = unsafe {
                libc::pwritev(
                    file.as_raw_fd(),
                    vectors.as_ptr(),
                    2,
                    file_offset(at, done, pieces.len())?,
                )
            };
            match file::outcome(moved, done)? {
                Some(0) => return Err(FileError::Stuck(done)),
                Some(moved) => done += moved,
                None => {}
            }
        }
        Ok(self.mapping.check_poison(extent)?)
    }

    /// Receives what `socket` has, at most all of `extent`, without waiting. Returns the number of bytes; 0 if the other side
    /// has ended, or `extent` is empty.
    ///
    /// # Errors
    /// [`SocketError`]; what is in the extent then is undefined.
    pub fn receive(&self, extent: Extent, socket: BorrowedFd<'_>) -> Result<usize, SocketError> {
        let first = self.address(extent, 0, extent.len)?;
        loop {
            // SAFETY: the extent lies inside this arena, which outlives the call. Others may write it meanwhile; the system
            // does not mind, and we make no reference to it.
            let moved = unsafe {
                libc::recv(
                    socket.as_raw_fd(),
                    first.as_ptr().cast(),
                    extent.len as usize,
                    libc::MSG_DONTWAIT,
                )
            };
            if let Some(moved) = socket::outcome(moved)? {
                self.mapping.check_poison(extent)?;
                return Ok(moved);
            }
        }
    }

    /// All of it.
    pub fn whole(&self) -> Extent {
        Extent::new(0, self.len())
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Offset in the arena of `len` bytes at `at` of `extent`, checked against the extent only.
    fn offset(&self, extent: Extent, at: u64, len: u64) -> Result<u64, AccessError> {
        let inside = at.checked_add(len).is_some_and(|end| end <= extent.len);
        let offset = extent.offset.checked_add(at).filter(|_| inside);
        offset.ok_or(AccessError::OutOfBounds {
            what: "extent",
            offset: at,
            len,
            limit: extent.len,
        })
    }
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena")
            .field("kind", &self.kind)
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

fn system_error(action: &'static str, place: &str, error: rustix::io::Errno) -> ArenaError {
    ArenaError::System {
        action,
        place: place.to_owned(),
        source: error.into(),
    }
}

/// Checks that the file system has `bytes` free bytes: touching a page that it cannot back would be a fault, long after
/// start.
fn check_space(file: &OwnedFd, bytes: u64, place: &str) -> Result<(), ArenaError> {
    let space = Space::of_file(file);
    match space.map_err(|e| system_error("ask for the free space of", place, e))? {
        Some(Space { free, .. }) if free < bytes => Err(ArenaError::OutOfMemory {
            bytes,
            available: free,
            place: place.to_owned(),
        }),
        _ => Ok(()),
    }
}

fn resize(file: &OwnedFd, bytes: u64, place: &str) -> Result<(), ArenaError> {
    rustix::fs::ftruncate(file, bytes).map_err(|e| system_error("size", place, e))
}

fn map_hugepages(len: usize) -> Result<Mapping, ArenaError> {
    Mapping::anonymous(len, true, "arena").map_err(|e| hugepage_error(e, len as u64, "huge pages"))
}

/// Maps a file that has `size` bytes already.
fn map_huge_file(
    shm: &ShmFile,
    len: usize,
    size: u64,
    prot: ProtFlags,
) -> Result<Mapping, ArenaError> {
    let missing = (len as u64).saturating_sub(size);
    let mapped = Mapping::huge(shm.file().as_fd(), len, prot, "arena");
    mapped.map_err(|e| hugepage_error(e, missing, shm.name()))
}

fn hugepage_error(error: MapError, missing: u64, place: &str) -> ArenaError {
    match error {
        MapError::System(rustix::io::Errno::NOMEM) => ArenaError::Hugepages {
            needed: missing / HUGE_PAGE as u64,
            free: hugetlbfs::free_pages(),
        },
        error => map_error(error, place),
    }
}

pub(crate) fn map_error(error: MapError, place: &str) -> ArenaError {
    match error {
        MapError::System(e) => ArenaError::System {
            action: "map",
            place: place.to_owned(),
            source: e.into(),
        },
        MapError::Guard(full) => ArenaError::Guard(full),
    }
}
