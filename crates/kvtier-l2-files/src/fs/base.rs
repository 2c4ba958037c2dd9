//! The base directory: its descriptor, temporary files, and the quarantine.
//!
//! Names of temporary files start with the name of their writer, which is a locked file. So a later process recognises
//! leftovers, whichever host or container wrote them.
//!
//! `lock` guards the lock file, and `dir` (the descriptor) may be acquired inside; `lost` guards why the path is
//! another's. Neither of the last two has a lock inside.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kvtier_common::sync::{Mutex, RwLock};
use rustix::fs::{Access, AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::beneath;
use super::names::{QUARANTINE, TEMPORARY};

/// Damaged files kept in the quarantine; further ones are deleted.
const MAX_QUARANTINED: usize = 16;

pub(super) const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);
const DIR_MODE: Mode = Mode::RWXU;

/// The base directory.
pub(super) struct Base {
    path: PathBuf,
    /// Directory of temporary files relative to `path`, with a `/` at its end, or empty.
    temporary: String,
    /// Replaced if the directory was removed.
    dir: RwLock<Arc<OwnedFd>>,
    /// Reason why `path` does not lead to `dir`, as of the last check.
    lost: Mutex<Option<&'static str>>,
    /// Name of this writer, the beginning of its temporary files.
    writer: String,
    /// Lock of that name. Without one, leftovers are recognised by their age.
    lock: Mutex<Option<OwnedFd>>,
    written: AtomicU64,
    kept: AtomicUsize,
    is_read_only: bool,
}

/// Temporary file.
pub(super) struct Temporary {
    pub path: String,
    pub file: OwnedFd,
}

/// Result of quarantining a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quarantined {
    Kept,
    Deleted,
    /// The file was replaced meanwhile.
    Replaced,
}

impl Base {
    /// Opens the directory and creates it if it is missing. `temporary` is relative to it, or empty.
    pub(super) fn open(path: PathBuf, temporary: &str) -> Result<Self, std::io::Error> {
        let temporary = inside(temporary);
        // Absolute, so that it can be recreated whatever the working directory is.
        let path = std::path::absolute(path)?;
        let dir = make(&path, &temporary)?;
        // An error now rather than at each store.
        rustix::fs::access(&path, Access::WRITE_OK | Access::EXEC_OK)?;
        let mut base = Self::of(path, dir);
        base.temporary = temporary;
        base.lock = Mutex::new(lock(&base.dir(), &base.writer));
        Ok(base)
    }

    fn of(path: PathBuf, dir: OwnedFd) -> Self {
        Self {
            kept: AtomicUsize::new(count_kept(&dir)),
            path,
            temporary: String::new(),
            dir: RwLock::new(Arc::new(dir)),
            lost: Mutex::new(None),
            writer: new_writer(),
            lock: Mutex::new(None),
            written: AtomicU64::new(0),
            is_read_only: false,
        }
    }

    /// Opens an existing directory for reading only.
    pub(super) fn open_read_only(path: PathBuf) -> Result<Self, std::io::Error> {
        let path = std::path::absolute(path)?;
        let dir = rustix::fs::open(&path, DIR_FLAGS, Mode::empty())?;
        rustix::fs::access(&path, Access::READ_OK | Access::EXEC_OK)?;
        let mut base = Self::of(path, dir);
        base.is_read_only = true;
        Ok(base)
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    pub(super) fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Directory of temporary files relative to the base, with a `/` at its end, or empty.
    pub(super) fn temporary(&self) -> &str {
        &self.temporary
    }

    /// The directory as last opened.
    pub(super) fn dir(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.dir.read())
    }

    /// The directory, reopened if it was removed and created again.
    pub(super) fn current(&self) -> Arc<OwnedFd> {
        let dir = self.dir();
        if !is_removed(&dir) {
            return dir;
        }
        match rustix::fs::open(&self.path, DIR_FLAGS, Mode::empty()) {
            Ok(new) => self.replace(new),
            Err(_) => dir,
        }
    }

    /// The directory with its subdirectories, created again if it was removed.
    pub(super) fn restored(&self) -> Result<Arc<OwnedFd>, Errno> {
        match make(&self.path, &self.temporary) {
            Ok(new) => {
                // Another thread may have done this already and have the lock.
                let mut held = self.lock.lock();
                if let Some(new) = lock(&new, &self.writer) {
                    *held = Some(new);
                }
                Ok(self.replace(new))
            }
            Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        }
    }

    /// Reason why the path does not lead to the directory any more; `None` if it does.
    pub(super) fn lost(&self) -> Option<&'static str> {
        *self.lost.lock()
    }

    /// Checks whether the path still leads to the directory. A removed directory is not lost: the next store creates it
    /// again.
    pub(super) fn check(&self) {
        let dir = self.current();
        let (Ok(seen), there) = (rustix::fs::fstat(&*dir), rustix::fs::stat(&self.path)) else {
            return;
        };
        let lost = match there {
            _ if seen.st_nlink == 0 => None,
            Ok(there) if (there.st_dev, there.st_ino) == (seen.st_dev, seen.st_ino) => None,
            Ok(_) => Some("another directory was put or mounted in its place"),
            Err(Errno::NOENT | Errno::NOTDIR) => Some("it was renamed or moved"),
            // It may be the same one, out of reach.
            Err(_) => return,
        };
        let before = std::mem::replace(&mut *self.lost.lock(), lost);
        let base_path = self.path.display();
        match (before, lost) {
            (before, Some(why)) if before != lost => tracing::warn!(
                %base_path,
                why,
                "base_path is not the directory that was opened; tier suspended until it is back or the server is restarted"
            ),
            (Some(_), None) => {
                tracing::info!(%base_path, "base_path is back; tier resumed")
            }
            _ => {}
        }
    }

    fn replace(&self, new: OwnedFd) -> Arc<OwnedFd> {
        let new = Arc::new(new);
        *self.dir.write() = Arc::clone(&new);
        new
    }

    /// Returns a unique name for a temporary file. `inside` ends with a `/` or is empty.
    pub(super) fn new_name(&self, inside: &str) -> String {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        format!("{inside}{}-{number:x}", self.writer)
    }

    /// Creates a temporary file in the directory `inside`.
    pub(super) fn create(
        &self,
        dir: &OwnedFd,
        inside: &str,
        access: OFlags,
        direct: bool,
    ) -> Result<Temporary, Errno> {
        let path = self.new_name(inside);
        let flags = access
            | OFlags::CREATE
            | OFlags::EXCL
            | OFlags::NOFOLLOW
            | OFlags::CLOEXEC
            | OFlags::NONBLOCK;
        let file = open_direct(dir, &path, flags, FILE_MODE, direct)?;
        Ok(Temporary { path, file })
    }

    /// Quarantines a damaged file that was opened as `seen`. A file that replaced it stays.
    pub(super) fn quarantine(
        &self,
        dir: &OwnedFd,
        path: &str,
        seen: &Stat,
    ) -> Result<Quarantined, Errno> {
        match beneath::stat(dir, path) {
            Ok(now) if (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino) => {}
            Ok(_) | Err(Errno::NOENT) => return Ok(Quarantined::Replaced),
            Err(error) => return Err(error),
        }
        let kept = if self.kept.fetch_add(1, Ordering::Relaxed) < MAX_QUARANTINED {
            keep(dir, path)
        } else {
            Err(Errno::NOSPC)
        };
        if kept.is_err() {
            self.kept.fetch_sub(1, Ordering::Relaxed);
        }
        match kept {
            Ok(()) => return Ok(Quarantined::Kept),
            Err(Errno::NOENT) => return Ok(Quarantined::Replaced),
            // No space, or no quarantine directory.
            Err(Errno::NOSPC | Errno::DQUOT | Errno::LOOP | Errno::NOTDIR) => {}
            Err(error) => return Err(error),
        }
        match beneath::unlink(dir, path) {
            Ok(()) => Ok(Quarantined::Deleted),
            Err(Errno::NOENT) => Ok(Quarantined::Replaced),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        if !self.is_read_only {
            let _ = rustix::fs::unlinkat(&*self.dir(), &*self.writer, AtFlags::empty());
        }
    }
}

pub(super) const DIR_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// Opens a file, for direct I/O if requested and possible.
pub(super) fn open_direct(
    dir: &OwnedFd,
    path: &str,
    flags: OFlags,
    mode: Mode,
    direct: bool,
) -> Result<OwnedFd, Errno> {
    if direct {
        match beneath::open(dir, path, flags | OFlags::DIRECT, mode) {
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                // Some file systems refuse only after creating the file.
                if flags.contains(OFlags::EXCL) {
                    let _ = beneath::unlink(dir, path);
                }
            }
            opened => return opened,
        }
    }
    beneath::open(dir, path, flags, mode)
}

/// Creates the parent directories of a file.
pub(super) fn make_parents(dir: &OwnedFd, path: &str) -> Result<(), Errno> {
    for (end, _) in path.match_indices('/') {
        match beneath::make_dir(dir, &path[..end], DIR_MODE) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether it is a regular file.
pub(super) fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

/// The directory of temporary files, as [`Base::temporary`] has it.
fn inside(temporary: &str) -> String {
    match temporary.trim_matches('/') {
        "" | "." => String::new(),
        inside => format!("{inside}/"),
    }
}

fn new_writer() -> String {
    format!("{TEMPORARY}{:016x}", unique())
}

fn make(path: &std::path::Path, temporary: &str) -> Result<OwnedFd, std::io::Error> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(DIR_MODE.as_raw_mode())
        .create(path)?;
    let dir = rustix::fs::openat(CWD, path, DIR_FLAGS, Mode::empty())?;
    let inside = match temporary {
        "" => ".",
        inside => inside,
    };
    let made = make_parents(&dir, temporary)
        .and_then(|()| beneath::open(&dir, inside, DIR_FLAGS, Mode::empty()));
    let made = made.map_err(|error| {
        let message = format!("{inside} cannot be used, where links are not followed: {error}");
        std::io::Error::other(message)
    })?;
    if rustix::fs::fstat(&made)?.st_dev != rustix::fs::fstat(&dir)?.st_dev {
        let message =
            format!("{inside} is on another file system, so no file can be renamed from there");
        return Err(std::io::Error::other(message));
    }
    Ok(dir)
}

/// Locks the name of a writer as long as the file is open.
fn lock(dir: &OwnedFd, writer: &str) -> Option<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, writer, flags, FILE_MODE).ok()?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(file)
}

/// Moves a damaged file to the quarantine.
fn keep(dir: &OwnedFd, path: &str) -> Result<(), Errno> {
    match rustix::fs::mkdirat(dir, QUARANTINE, DIR_MODE) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    let name = path.rsplit('/').next().unwrap_or(path);
    beneath::rename(dir, path, &format!("{QUARANTINE}/{name}"))
}

fn is_removed(dir: &OwnedFd) -> bool {
    rustix::fs::fstat(dir.as_fd()).is_ok_and(|stat| stat.st_nlink == 0)
}

fn count_kept(dir: &OwnedFd) -> usize {
    let flags = DIR_FLAGS | OFlags::NOFOLLOW;
    let Ok(quarantine) = rustix::fs::openat(dir, QUARANTINE, flags, Mode::empty()) else {
        return 0;
    };
    // Without `.` and `..`.
    let names = Dir::read_from(&quarantine)
        .map_or(0, |names| names.flatten().take(MAX_QUARANTINED + 2).count());
    names.saturating_sub(2)
}

/// Returns a number that is unique across hosts; it is not a secret.
fn unique() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one((
        std::process::id(),
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos()),
    ))
}
