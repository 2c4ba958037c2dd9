//! Memory that has a name, in `/dev/shm` or another file system of memory: its file, and the lock that says its server lives.

use std::ffi::{CStr, CString, OsStr};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags as FileFlags, RenameFlags};
use rustix::shm::{self, OFlags};

use crate::error::ArenaError;
use crate::kept_files::KeptFile;

/// What every arena's shared-memory name begins with (LMCache 0.5.6 names its pools so, and its
/// clients look for the name they receive, without a slash).
pub const SHM_PREFIX: &str = "lmcache_l1_pool_";

/// Directory in which the system has POSIX shared memory.
pub const SHM: &str = "/dev/shm";

/// How a named file is opened besides: a link in its place is not followed, since others may write the directory, and opening a pipe
/// there does not wait for its other end.
pub(crate) const CAREFULLY: FileFlags = FileFlags::NOFOLLOW
    .union(FileFlags::NONBLOCK)
    .union(FileFlags::CLOEXEC);

/// Tries besides the last to have a name: [`KeptFile`] has each file for a moment.
const LOOKS: usize = 10;

/// Between two tries.
const LOOK: Duration = Duration::from_millis(10);

/// Longest name of a file in one directory, hence of a segment in `/dev/shm`.
pub(crate) const NAME_MAX: usize = 255;

/// A link in the place of a segment is not followed: `/dev/shm` is writable by every user.
pub(crate) const NO_FOLLOW: OFlags = OFlags::from_bits_retain(rustix::fs::OFlags::NOFOLLOW.bits());

/// Opening a pipe there does not wait for its other end, nor that of a file for the end of a lease.
pub(crate) const NO_WAIT: OFlags = OFlags::from_bits_retain(rustix::fs::OFlags::NONBLOCK.bits());

/// Chooses the signal by which a lease is broken, as fcntl(2) has it on Linux.
const F_SETSIG: libc::c_int = 10;

/// Identity of a file, whatever its name. Valid as long as the file is held, as by a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn new(device: u64, inode: u64) -> Self {
        Self { device, inode }
    }

    /// Device and number.
    #[must_use]
    pub fn numbers(&self) -> [u64; 2] {
        [self.device, self.inode]
    }

    pub(crate) fn of(stat: &rustix::fs::Stat) -> Self {
        Self::new(stat.st_dev, stat.st_ino)
    }

    /// Returns the id of the segment that has this name now.
    pub fn named(name: impl rustix::path::Arg) -> Option<Self> {
        let file = shm::open(name, OFlags::RDONLY | NO_FOLLOW | NO_WAIT, Mode::empty()).ok()?;
        Some(Self::of(&rustix::fs::fstat(&file).ok()?))
    }

    fn at(path: &CStr) -> Option<Self> {
        let file = open(path, FileFlags::RDONLY, Mode::empty()).ok()?;
        Some(Self::of(&rustix::fs::fstat(&file).ok()?))
    }
}

fn lock(file: &OwnedFd) -> rustix::io::Result<()> {
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)
}

fn open(path: &CStr, flags: FileFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, flags | CAREFULLY, mode)
}

/// Whether it is known that no other process has a file open or mapped.
pub(crate) fn is_alone(file: &impl AsRawFd) -> bool {
    // SAFETY: the call takes numbers only, and the descriptor is open.
    let end_lease = || unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
    take_lease(file) && end_lease() == 0
}

/// Takes a lease, which ends with the file, if it is known that no other process has the file open or mapped.
pub(crate) fn take_lease(file: &impl AsRawFd) -> bool {
    static REFUSED: Once = Once::new();
    let fd = file.as_raw_fd();
    // The lease is broken by a signal if another process opens the file in the meantime: one that is ignored by default.
    // SAFETY: the calls take numbers only, and the descriptor is open.
    let is_taken = unsafe {
        libc::fcntl(fd, F_SETSIG, libc::SIGURG) == 0
            && libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) == 0
    };
    let error = std::io::Error::last_os_error();
    // Otherwise another process has the file.
    if !is_taken && error.kind() != std::io::ErrorKind::WouldBlock {
        REFUSED.call_once(|| tracing::warn!(%error, "the system grants no lease on a file in memory, so that ended processes may not be noticed"));
    }
    is_taken
}

/// Removes what is at this path unless it is a file of this user. Returns whether nothing is there now.
///
/// It is moved aside first: what has taken its place meanwhile is put back.
///
/// # Errors
/// [`ArenaError::NameOfUser`] if it is a file that is locked, as that of a server of another user; the system's.
fn remove_foreign(name: &str, path: &CStr) -> Result<bool, ArenaError> {
    let failed = |e| failed("replace what another user has left at", path, e);
    let mut found = match rustix::fs::lstat(path) {
        Err(rustix::io::Errno::NOENT) => return Ok(true),
        found => found.map_err(failed)?,
    };
    let kind = FileType::from_raw_mode(found.st_mode);
    let mut file = None;
    if kind == FileType::RegularFile {
        if found.st_uid == rustix::process::geteuid().as_raw() {
            return Ok(false);
        }
        // Locked until it is removed, so that no server takes it meanwhile.
        let opened = open(path, FileFlags::RDONLY, Mode::empty()).map_err(failed)?;
        found = rustix::fs::fstat(&opened).map_err(failed)?;
        lock(&opened).map_err(|_| ArenaError::NameOfUser {
            name: name.to_owned(),
            user: found.st_uid,
        })?;
        file = Some(opened);
    }
    let number = RandomState::new().build_hasher().finish();
    let place = Path::new(OsStr::from_bytes(path.to_bytes()));
    let aside = place.with_file_name(format!(".kvtier-{number:016x}"));
    let rename = |from: &Path, to: &Path| {
        rustix::fs::renameat_with(
            rustix::fs::CWD,
            from,
            rustix::fs::CWD,
            to,
            RenameFlags::NOREPLACE,
        )
    };
    rename(place, &aside).map_err(failed)?;
    let removed = match rustix::fs::lstat(&aside) {
        Ok(moved) if FileId::of(&moved) != FileId::of(&found) => Err(rustix::io::Errno::BUSY),
        Ok(_) if kind == FileType::Directory => rustix::fs::rmdir(&aside),
        moved => moved.and_then(|_| rustix::fs::unlink(&aside)),
    };
    drop(file);
    if let Err(error) = removed {
        // Fails if there is something again: then this stays aside.
        let _ = rename(&aside, place);
        return Err(failed(error));
    }
    tracing::warn!(path = %place.display(), user = found.st_uid, ?kind, "removed what another user had made in the place of an arena");
    Ok(true)
}

fn failed(action: &'static str, path: &CStr, error: rustix::io::Errno) -> ArenaError {
    ArenaError::System {
        action,
        place: path.to_string_lossy().into_owned(),
        source: error.into(),
    }
}

/// The name and file of a shared arena; the file also holds the lock that says "alive".
pub(crate) struct ShmFile {
    /// Without a slash.
    name: String,
    path: CString,
    file: OwnedFd,
    /// Whether the name is to be removed.
    linked: AtomicBool,
}

/// The whole name of a file in `folder`, and its path as the system takes it.
fn names(folder: &Path, name: &str) -> Result<(String, CString), ArenaError> {
    let name = full_name(name)?;
    match CString::new(folder.join(&name).into_os_string().into_vec()) {
        Ok(path) => Ok((name, path)),
        Err(_) => Err(ArenaError::Name {
            name,
            reason: "has a zero byte in its path",
        }),
    }
}

impl ShmFile {
    /// Returns the file's name, without a slash.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The segment itself.
    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Creates the file, in place of one that a dead process left behind, or of what another user made there if that has no
    /// lock and this user may remove it, as root may.
    ///
    /// # Errors
    /// [`ArenaError::NameInUse`] and [`ArenaError::NameOfUser`] while a process has it; the system's.
    pub(crate) fn create(folder: &Path, name: &str) -> Result<Self, ArenaError> {
        for _ in 0..LOOKS {
            match Self::create_now(folder, name) {
                Err(ArenaError::NameInUse { .. } | ArenaError::NameOfUser { .. }) => {
                    std::thread::sleep(LOOK);
                }
                created => return created,
            }
        }
        Self::create_now(folder, name)
    }

    fn create_now(folder: &Path, name: &str) -> Result<Self, ArenaError> {
        let (name, path) = names(folder, name)?;
        let system = |action, e| failed(action, &path, e);
        // Twice: a stale segment is removed in between.
        for _ in 0..2 {
            let flags = FileFlags::CREATE | FileFlags::EXCL | FileFlags::RDWR;
            match open(&path, flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => {
                    match lock(&file) {
                        Ok(()) => {}
                        Err(rustix::io::Errno::WOULDBLOCK) => {
                            return Err(ArenaError::NameInUse { name });
                        }
                        Err(e) => return Err(system("lock", e)),
                    }
                    let created = Self {
                        name,
                        path,
                        file,
                        linked: AtomicBool::new(true),
                    };
                    // Another server that starts now may have taken it for a stale one
                    // before it was locked. Then the name is theirs.
                    if created.is_still_ours() {
                        return Ok(created);
                    }
                    return Err(ArenaError::NameInUse {
                        name: created.name.clone(),
                    });
                }
                Err(rustix::io::Errno::EXIST) => {}
                Err(e) => return Err(system("create", e)),
            }
            if remove_foreign(&name, &path)? {
                continue;
            }
            let stale = match open(&path, FileFlags::RDWR, Mode::empty()) {
                Ok(stale) => stale,
                Err(rustix::io::Errno::NOENT) => continue,
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(ArenaError::NameInUse { name }),
                Err(e) => return Err(system("open the old segment of", e)),
            };
            // Our servers lock their segment as long as they live. Replacing a living one's
            // would send its new clients to our memory.
            match lock(&stale) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(ArenaError::NameInUse { name }),
                Err(e) => return Err(system("lock the old segment of", e)),
            }
            match rustix::fs::unlink(&*path) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(e) => return Err(system("remove the old segment of", e)),
            }
        }
        // Someone created it again in between: it is theirs.
        Err(ArenaError::NameInUse { name })
    }

    /// Opens the file of this name that an earlier process has kept, and locks it. `None` if there is none, or it belongs to another user or can be opened by others.
    ///
    /// # Errors
    /// [`ArenaError::NameInUse`] while a process has it; the system's.
    pub(crate) fn find(folder: &Path, name: &str) -> Result<Option<Self>, ArenaError> {
        let (name, path) = names(folder, name)?;
        let file = match open(&path, FileFlags::RDWR, Mode::empty()) {
            Ok(file) => file,
            // A process tries at this moment whether it is alone with the file.
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(ArenaError::NameInUse { name }),
            // Absent, a link, a directory, or of another user: a new one takes its place, if it can.
            Err(_) => return Ok(None),
        };
        let is_trusted = rustix::fs::fstat(&file).is_ok_and(|stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                && stat.st_uid == rustix::process::geteuid().as_raw()
                && stat.st_mode & 0o077 == 0
                && stat.st_nlink == 1
        });
        if !is_trusted {
            return Ok(None);
        }
        match lock(&file) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(ArenaError::NameInUse { name }),
            Err(_) => return Ok(None),
        }
        let found = Self {
            name,
            path,
            file,
            linked: AtomicBool::new(false),
        };
        Ok(found.is_still_ours().then_some(found))
    }

    /// Lets the name stay when this process ends.
    pub(crate) fn keep(&self) {
        self.linked.store(false, Ordering::Release);
    }

    /// Lets another process have the segment, which this one must not write any more.
    pub(crate) fn release(&self) {
        // Fails for a bad descriptor only. The end of the process releases it too.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }

    pub(crate) fn id(&self) -> Option<FileId> {
        rustix::fs::fstat(&self.file)
            .ok()
            .map(|stat| FileId::of(&stat))
    }

    /// Bytes of the segment, and of the pages behind it.
    pub(crate) fn sizes(&self) -> Option<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.file).ok()?;
        let size = u64::try_from(stat.st_size).ok()?;
        Some((
            size,
            u64::try_from(stat.st_blocks).ok()?.saturating_mul(512),
        ))
    }

    /// Whether it is known that no other process has the segment open or mapped, whatever namespace it is in. The system grants
    /// a lease for writing only then.
    pub(crate) fn is_alone(&self) -> bool {
        is_alone(&self.file)
    }

    /// Removes the name if it is ours, kept or not; returns whether it was kept.
    pub(crate) fn remove(&self) -> bool {
        let was_kept = !self.linked.swap(true, Ordering::AcqRel) && self.is_still_ours();
        self.unlink();
        was_kept
    }

    /// Removes the name, once, if it is still ours and not kept.
    pub(crate) fn unlink(&self) {
        if self.linked.swap(false, Ordering::AcqRel) && self.is_still_ours() {
            // Nothing can be done about a failure, and a second try would not help.
            let _ = rustix::fs::unlink(&*self.path);
        }
    }

    /// Whether the name still leads to our file: another program may have replaced it.
    fn is_still_ours(&self) -> bool {
        rustix::fs::fstat(&self.file)
            .is_ok_and(|ours| FileId::at(&self.path) == Some(FileId::of(&ours)))
    }
}

impl Drop for ShmFile {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// Removes the pools whose names begin with `prefix` and that no process has, such as those of killed servers. Returns how many
/// were removed.
///
/// Pools that cannot be examined or removed, such as those of another user, stay.
pub fn remove_stale_pools(prefix: &str) -> usize {
    let Ok(prefix) = full_name(prefix) else {
        return 0;
    };
    let all = KeptFile::named(|name| name.starts_with(&prefix)).into_iter();
    all.filter(|file| file.free().is_ok()).count()
}

/// Removes the file of this name in `folder` that an earlier process has kept; returns whether there was one.
pub fn remove_kept(folder: &Path, name: &str) -> bool {
    let found = ShmFile::find(folder, name).ok().flatten();
    found.is_some_and(|found| found.remove())
}

/// Space of a file system that an arena's file is on, or may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes of the file system.
    pub size: u64,
    /// Bytes of it that the file may have.
    pub free: u64,
}

impl Space {
    /// Returns the space in `/dev/shm` for a pool of this name, which replaces an old one: the pages of that count as free.
    /// (They are freed only when no process maps it any more.) `None` if there is no limit, or it is unknown.
    #[must_use]
    pub fn of_pool(name: &str) -> Option<Self> {
        let space = Self::read(&rustix::fs::statvfs(SHM).ok()?)?;
        let old = full_name(name).ok()?;
        Some(space.beside(&Path::new(SHM).join(old)))
    }

    /// Returns the space of the file system that this file is on; `None` if it has no limit.
    pub(crate) fn of_file(file: &OwnedFd) -> rustix::io::Result<Option<Self>> {
        Ok(Self::read(&rustix::fs::fstatvfs(file)?))
    }

    /// A file system without a limit says it has no blocks at all.
    fn read(stat: &rustix::fs::StatVfs) -> Option<Self> {
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        (stat.f_blocks > 0).then(|| Self {
            size: bytes(stat.f_blocks),
            free: bytes(stat.f_bavail),
        })
    }

    /// With the pages of an old file. Links are not followed at creation either.
    fn beside(self, old: &Path) -> Self {
        let old = std::fs::symlink_metadata(old).map_or(0, |old| old.blocks().saturating_mul(512));
        Self {
            free: self.free.saturating_add(old),
            ..self
        }
    }
}

/// The name of the segment of a pool that is asked for as `name`: with [`SHM_PREFIX`], without a slash.
#[must_use]
pub fn pool_name(name: &str) -> String {
    let bare = name.strip_prefix('/').unwrap_or(name);
    if bare.starts_with(SHM_PREFIX) {
        bare.to_owned()
    } else {
        format!("{SHM_PREFIX}{bare}")
    }
}

/// The name a segment gets when `name` is asked for.
pub(crate) fn full_name(name: &str) -> Result<String, ArenaError> {
    let bare = name.strip_prefix('/').unwrap_or(name);
    let refuse = |reason| {
        Err(ArenaError::Name {
            name: name.to_owned(),
            reason,
        })
    };
    if bare.is_empty() {
        return refuse("is empty");
    }
    if bare.contains('/') {
        return refuse("has a slash in it, other than one at its start");
    }
    if bare.contains('\0') {
        return refuse("has a zero byte in it");
    }
    let full = pool_name(bare);
    if full.len() > NAME_MAX {
        return refuse("is longer than 255 bytes with its prefix");
    }
    Ok(full)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_pool_takes_no_space_from_its_successor() {
        let mut stat = rustix::fs::statvfs("/").unwrap();
        (stat.f_frsize, stat.f_blocks, stat.f_bavail) = (4096, 100, 10);
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let old = folder.path().join("old");
        let space = Space::read(&stat).unwrap();
        let free = || (space.beside(&old).size, space.beside(&old).free);
        assert_eq!(free(), (409_600, 40_960));
        // What is behind its pages counts, not what it may have.
        std::fs::write(&old, [1; 8192]).unwrap();
        let file = std::fs::File::options().write(true).open(&old).unwrap();
        file.set_len(1 << 40).unwrap();
        assert_eq!(free(), (409_600, 40_960 + 8192));
        stat.f_blocks = 0;
        assert_eq!(Space::read(&stat), None);
    }
}
