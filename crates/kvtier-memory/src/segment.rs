//! Shared memory segments that engines create and share: from our side ([`ForeignSegment`]) and
//! from theirs ([`OwnSegment`]).
//!
//! A segment whose file no other process has open or mapped is an orphan: its engine has ended. The kernel answers that for every PID
//! namespace, so the process id in a name means nothing here.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FileType, Mode};
use rustix::shm::{self, OFlags};

use crate::access::AccessError;
use crate::fault::TableFull;
use crate::mapping::{MapError, Mapping};
use crate::shm_file::{
    FileId, NAME_MAX, NO_FOLLOW, NO_WAIT, SHM, SHM_PREFIX, Space, is_alone, take_lease,
};
use kvtier_common::extent::Extent;

/// What every segment's name begins with: `/lmcache_kv_<pid>_<n>` (LMCache 0.5.6 clients, for
/// KV caches in CPU memory). Other names are refused: a client must not make us write into
/// segments that belong to other programs, or into our own arena.
pub const SEGMENT_PREFIX: &str = "/lmcache_kv_";

/// Why a segment could not be opened or created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The name cannot be a client's segment.
    #[error("segment name {name:?} {reason}")]
    Name {
        /// The name given.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A segment of this many bytes cannot be mapped.
    #[error(
        "a segment of {bytes} bytes cannot be mapped; allowed: 1 to {allowed}, what /dev/shm and memory can hold"
    )]
    Size {
        /// Bytes stated.
        bytes: u64,
        /// Most bytes of a segment.
        allowed: u64,
    },
    /// The segments that are mapped have too many bytes together.
    #[error(
        "a segment of {bytes} bytes cannot be mapped beside the {mapped} of others; allowed: {allowed} together, \
         {MAPPED_FACTOR} times what /dev/shm and memory can hold"
    )]
    Sum {
        /// Bytes stated.
        bytes: u64,
        /// Bytes of all segments that are mapped.
        mapped: u64,
        /// Most bytes of all.
        allowed: u64,
    },
    /// The segment is smaller than the client says.
    #[error("segment {name:?} has {actual} bytes, fewer than the {expected} stated")]
    TooSmall {
        /// Name of the segment.
        name: String,
        /// Bytes stated.
        expected: u64,
        /// Bytes it has.
        actual: u64,
    },
    /// The name leads to something that is no segment.
    #[error("{name:?} is no shared memory segment")]
    NotASegment {
        /// The name given.
        name: String,
    },
    /// A system call failed.
    #[error("cannot {action} segment {name:?}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Name of the segment.
        name: String,
        /// What the system said.
        source: io::Error,
    },
    /// The fault guard is full.
    #[error("the segment cannot be guarded: {0}")]
    Guard(#[from] TableFull),
}

/// Most bytes that all clients' segments may have together, as a multiple of what one may have. Engines that restarted have theirs
/// mapped twice for a while; beyond that, segments without memory behind them would use up the addresses of the process.
const MAPPED_FACTOR: u64 = 4;

/// Bytes of the clients' segments that this process has mapped.
static MAPPED_BYTES: AtomicU64 = AtomicU64::new(0);

/// The share of a segment in [`MAPPED_BYTES`]; our own have none.
#[derive(Debug)]
struct MappedBytes(u64);

impl MappedBytes {
    fn add(bytes: u64, allowed: u64) -> Result<Self, SegmentError> {
        // Relaxed: the number guards no other memory.
        let fits = |mapped: u64| mapped.checked_add(bytes).filter(|sum| *sum <= allowed);
        MAPPED_BYTES
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map(|_| Self(bytes))
            .map_err(|mapped| SegmentError::Sum {
                bytes,
                mapped,
                allowed,
            })
    }
}

impl Drop for MappedBytes {
    fn drop(&mut self) {
        MAPPED_BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Most bytes of a segment that is not sparse: those of its file system, and of the machine with its swap.
fn max_segment_bytes(file: &OwnedFd) -> rustix::io::Result<u64> {
    let info = rustix::system::sysinfo();
    let memory = (info.totalram as u64).saturating_add(info.totalswap as u64);
    let memory = memory.saturating_mul(u64::from(info.mem_unit));
    let space = Space::of_file(file)?;
    Ok(space.map_or(memory, |space| space.size.min(memory)))
}

/// A client's segment, mapped for reading and writing. The client may write it, or take pages
/// away, at any time: the first gives torn bytes, the second [`AccessError::Poisoned`].
#[derive(Debug)]
pub struct ForeignSegment {
    name: String,
    /// The one that is mapped: the kernel counts both as one, so that it can tell whether others have the file.
    file: Option<OwnedFd>,
    id: FileId,
    /// Bytes of the whole file.
    file_bytes: u64,
    mapping: Mapping,
    _mapped: MappedBytes,
}

impl ForeignSegment {
    /// Maps the first `bytes` bytes of the segment `name`, which must have that many.
    ///
    /// # Errors
    /// See [`SegmentError`].
    pub fn open(name: &str, bytes: u64) -> Result<Self, SegmentError> {
        check_name(name)?;
        // A lease of another user would last 45 s.
        Self::map(name, NO_WAIT, bytes)
    }

    /// Maps a server's pool, for clients: `name` as the server reports it, with or without a slash.
    ///
    /// # Errors
    /// See [`SegmentError`].
    pub fn open_pool(name: &str, bytes: u64) -> Result<Self, SegmentError> {
        let plain = name.strip_prefix('/').unwrap_or(name);
        let refuse = |reason| {
            Err(SegmentError::Name {
                name: name.chars().take(NAME_MAX).collect(),
                reason,
            })
        };
        if !plain.starts_with(SHM_PREFIX) {
            return refuse("is not a pool's: those begin with lmcache_l1_pool_");
        }
        if plain.len() > NAME_MAX || plain.contains(['/', '\0']) {
            return refuse("must be one part of a path of at most 255 bytes");
        }
        // Its server may have a lease on it for a moment.
        Self::map(&format!("/{plain}"), OFlags::empty(), bytes)
    }

    fn map(name: &str, flags: OFlags, bytes: u64) -> Result<Self, SegmentError> {
        let system = |action, e: rustix::io::Errno| SegmentError::System {
            action,
            name: name.to_owned(),
            source: e.into(),
        };
        let file = shm::open(name, OFlags::RDWR | NO_FOLLOW | flags, Mode::empty())
            .map_err(|e| system("open", e))?;
        let stat = rustix::fs::fstat(&file).map_err(|e| system("examine", e))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(SegmentError::NotASegment {
                name: name.to_owned(),
            });
        }
        let allowed = max_segment_bytes(&file).map_err(|e| system("examine", e))?;
        let len = mappable(bytes, allowed)?;
        let actual = u64::try_from(stat.st_size).unwrap_or(0);
        if actual < bytes {
            return Err(SegmentError::TooSmall {
                name: name.to_owned(),
                expected: bytes,
                actual,
            });
        }
        let mapped = MappedBytes::add(bytes, allowed.saturating_mul(MAPPED_FACTOR))?;
        let mapping =
            Mapping::shared(file.as_fd(), len, "segment").map_err(|e| map_error(e, name))?;
        Ok(Self {
            _mapped: mapped,
            name: name.to_owned(),
            file: Some(file),
            id: FileId::of(&stat),
            file_bytes: actual,
            mapping,
        })
    }

    /// Whether the name still leads to this memory, and no page of it was lost. A client that
    /// restarts with the process id of an earlier one makes other memory of the same name.
    #[must_use]
    pub fn is_current(&self) -> bool {
        !self.is_poisoned() && FileId::named(&self.name) == Some(self.id)
    }

    /// Device, inode and size of its file. Until the next boot, what has all of these again is the same segment.
    #[must_use]
    pub fn identity(&self) -> [u64; 3] {
        let [device, inode] = self.id.numbers();
        [device, inode, self.file_bytes]
    }

    /// Whether it is known that no other process has it open or mapped: its engine has ended. Of another user's segment, and
    /// after [`Self::close_file`], that is not known.
    #[must_use]
    pub fn is_orphan(&self) -> bool {
        self.file.as_ref().is_some_and(is_alone)
    }

    /// Frees the descriptor, which only [`Self::is_orphan`] uses.
    pub fn close_file(&mut self) {
        self.file = None;
    }

    /// Returns the segment's name, with the slash.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes mapped.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a segment is never empty")]
    pub fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// Whether pages were lost under it. It stays so: the segment is of no further use.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.mapping.poisoned().is_some()
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`], [`AccessError::Poisoned`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.mapping.write(offset, bytes)?;
        self.check()
    }

    /// Copies the bytes from `offset` on to `to`, which has any bytes on error.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`], [`AccessError::Poisoned`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), AccessError> {
        self.mapping.read(offset, to)?;
        self.check()
    }

    /// Appends `len` bytes from `offset` to `buffer`, which stays as it was on error.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`], [`AccessError::OutOfMemory`], [`AccessError::Poisoned`].
    pub fn read_into(
        &self,
        offset: u64,
        len: u64,
        buffer: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        let old = buffer.len();
        self.mapping.read_into(offset, len, buffer)?;
        self.check().inspect_err(|_| buffer.truncate(old))
    }

    /// Fails once any page was lost, wherever: such a segment is no longer what its creator shared.
    pub(crate) fn check(&self) -> Result<(), AccessError> {
        self.mapping.check_poison(Extent::new(0, u64::MAX))
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

/// A segment of our own, named as a client's: for programs that take the client's side of the
/// protocol. Mode 0600, zeroed, unlinked on drop.
#[derive(Debug)]
pub struct OwnSegment {
    segment: ForeignSegment,
}

impl OwnSegment {
    /// Creates a segment of `bytes` bytes under a name that no segment has.
    ///
    /// # Errors
    /// See [`SegmentError`].
    pub fn create(bytes: u64) -> Result<Self, SegmentError> {
        let len = mappable(bytes, u64::MAX)?;
        let (name, file) = create_file()?;
        let made = rustix::fs::ftruncate(&file, bytes)
            .and_then(|()| rustix::fs::fstat(&file))
            .map_err(MapError::System)
            .and_then(|stat| Ok((stat, Mapping::shared(file.as_fd(), len, "segment")?)));
        match made {
            Ok((stat, mapping)) => Ok(Self {
                segment: ForeignSegment {
                    name,
                    file: None,
                    id: FileId::of(&stat),
                    file_bytes: bytes,
                    mapping,
                    _mapped: MappedBytes(0),
                },
            }),
            Err(e) => {
                // The first error is the one worth telling.
                let _ = shm::unlink(&name);
                Err(map_error(e, &name))
            }
        }
    }

    /// The segment as the other side sees it.
    #[must_use]
    pub fn as_segment(&self) -> &ForeignSegment {
        &self.segment
    }

    /// Returns the segment's name, with the slash, for the other side to open.
    #[must_use]
    pub fn name(&self) -> &str {
        self.segment.name()
    }
}

impl Drop for OwnSegment {
    fn drop(&mut self) {
        // Nothing can be done about a failure.
        let _ = shm::unlink(self.segment.name());
    }
}

/// Removes the segments of this user that no process has open or mapped any more, such as those of killed engines; returns their
/// names.
#[must_use]
pub fn remove_orphans() -> Vec<String> {
    let Ok(all) = std::fs::read_dir(SHM) else {
        return Vec::new();
    };
    let names = all
        .flatten()
        .filter_map(|entry| Some(format!("/{}", entry.file_name().to_str()?)));
    let is_removed = |name: &String| check_name(name).is_ok() && remove_orphan(name) == Ok(true);
    names.filter(is_removed).collect()
}

fn remove_orphan(name: &str) -> rustix::io::Result<bool> {
    let file = shm::open(name, OFlags::RDWR | NO_FOLLOW | NO_WAIT, Mode::empty())?;
    let is_own = rustix::fs::fstat(&file)?.st_uid == rustix::process::geteuid().as_raw();
    // The lease lasts until the file is closed: a process that has just made the file waits for that, and finds that it has no name.
    // Another process may have removed it before, and a client made another one of that name.
    let is_removed = is_own && take_lease(&file) && rustix::fs::fstat(&file)?.st_nlink > 0;
    if is_removed {
        shm::unlink(name)?;
    }
    Ok(is_removed)
}

/// Creates a file under a name that no segment has.
fn create_file() -> Result<(String, OwnedFd), SegmentError> {
    loop {
        let number = RandomState::new().build_hasher().finish() % 10_u64.pow(18);
        let name = format!("{SEGMENT_PREFIX}{}_{number}", std::process::id());
        let system = |e: rustix::io::Errno| SegmentError::System {
            action: "create",
            name: name.clone(),
            source: e.into(),
        };
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        let file = shm::open(&name, flags, Mode::RUSR | Mode::WUSR).map_err(system)?;
        // The name is visible before the system counts the file as open: it may have been removed as an orphan's.
        if rustix::fs::fstat(&file).map_err(system)?.st_nlink > 0 {
            return Ok((name, file));
        }
    }
}

fn check_name(name: &str) -> Result<(), SegmentError> {
    let refuse = |reason| {
        Err(SegmentError::Name {
            name: name.chars().take(NAME_MAX).collect(),
            reason,
        })
    };
    let Some(rest) = name.strip_prefix(SEGMENT_PREFIX) else {
        return refuse("does not begin with /lmcache_kv_");
    };
    if rest.is_empty() {
        return refuse("ends behind its prefix");
    }
    if rest.contains('/') {
        return refuse("has a second slash in it");
    }
    if rest.contains('\0') {
        return refuse("has a zero byte in it");
    }
    if name.len() > NAME_MAX {
        return refuse("is longer than 255 bytes");
    }
    Ok(())
}

fn mappable(bytes: u64, allowed: u64) -> Result<usize, SegmentError> {
    let most = allowed.min(isize::MAX as u64 - rustix::param::page_size() as u64);
    let len = usize::try_from(bytes)
        .ok()
        .filter(|_| (1..=most).contains(&bytes));
    len.ok_or(SegmentError::Size {
        bytes,
        allowed: most,
    })
}

fn map_error(error: MapError, name: &str) -> SegmentError {
    match error {
        MapError::System(e) => SegmentError::System {
            action: "map",
            name: name.to_owned(),
            source: e.into(),
        },
        MapError::Guard(full) => SegmentError::Guard(full),
    }
}
