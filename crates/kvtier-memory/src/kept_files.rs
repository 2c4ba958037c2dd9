//! What servers have made in `/dev/shm` and in file systems of hugepages: its holders, and how it is freed.
//!
//! A server has its files locked (flock) while it runs, in whatever namespace. Engines map a pool without a lock, and so do servers
//! of LMCache, whose pools have the same names. So a file is unused only if no other process has it open either.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::hugetlbfs::hugetlbfs_mounts;
use crate::shm_file::{CAREFULLY, SHM, SHM_PREFIX, is_alone};

/// Ends the name of a pool's ledger.
const LEDGER: &str = "ledger";

/// A file of a server, in a file system of memory: a pool or its ledger.
#[derive(Debug)]
pub struct KeptFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Bytes of its pages.
    pub bytes: u64,
    /// Id of the user that owns it.
    pub user: u32,
    /// Processes that have the file.
    pub holder: Holder,
}

/// Processes that have a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// No process.
    None,
    /// A server that runs: its process, if that is visible from here.
    Server(Option<u32>),
    /// Processes that have it open or mapped without being its server.
    Clients,
    /// Unknown: this user may not open it.
    Unknown,
}

impl KeptFile {
    /// The files of all servers, in the order of their paths.
    pub fn all() -> Vec<Self> {
        Self::named(|name| name.starts_with(SHM_PREFIX))
    }

    /// The files with these names. No others are locked meanwhile.
    pub(crate) fn named(is_named: impl Fn(&str) -> bool) -> Vec<Self> {
        let is_named =
            |path: &PathBuf| is_named(&path.file_name().unwrap_or_default().to_string_lossy());
        let entries = folders().filter_map(|folder| std::fs::read_dir(folder).ok());
        let paths = entries.flatten().flatten().map(|entry| entry.path());
        let mut all: Vec<_> = paths.filter(is_named).filter_map(Self::at).collect();
        all.sort_by(|one, other| one.path.cmp(&other.path));
        all
    }

    /// The file at this path; `None` without one. A folder or a link is none.
    fn at(path: PathBuf) -> Option<Self> {
        let found = std::fs::symlink_metadata(&path).ok()?;
        if !found.is_file() {
            return None;
        }
        let holder = open(&path).map_or(Holder::Unknown, |file| holder(&path, &file));
        Some(Self {
            bytes: found.blocks() * 512,
            user: found.uid(),
            holder,
            path,
        })
    }

    /// Removes it, so that its memory is free.
    ///
    /// # Errors
    /// [`ErrorKind::ResourceBusy`] if a process has it by now; [`ErrorKind::PermissionDenied`] if it is another user's, unless this
    /// one is root; the system's.
    pub fn free(&self) -> Result<()> {
        let file = open(&self.path)?;
        let found = file.metadata()?;
        let user = rustix::process::geteuid();
        if !user.is_root() && found.uid() != user.as_raw() {
            return Err(ErrorKind::PermissionDenied.into());
        }
        // Its lock is held from here on, so that no server takes it meanwhile.
        if holder(&self.path, &file) != Holder::None {
            return Err(ErrorKind::ResourceBusy.into());
        }
        std::fs::remove_file(&self.path)
    }
}

/// Folders of pools.
fn folders() -> impl Iterator<Item = PathBuf> {
    let huge = hugetlbfs_mounts().unwrap_or_default();
    huge.into_iter().chain([PathBuf::from(SHM)])
}

/// Opens a file, and follows no link.
fn open(path: &Path) -> Result<File> {
    let mut options = File::options();
    let flags = CAREFULLY.bits().cast_signed();
    let file = options.read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(Error::other("no regular file"))
    }
}

/// What has the file at this path. A ledger is of no use without its pool, so what has the pool has the ledger.
fn holder(path: &Path, file: &File) -> Holder {
    let own = file_holder(file);
    if own != Holder::None || path.extension().is_none_or(|end| end != LEDGER) {
        return own;
    }
    // In /dev/shm also if the pool is of hugepages.
    let pools = folders().map(|folder| folder.join(path.file_stem().unwrap_or_default()));
    let mut holders = pools.filter_map(|pool| open(&pool).ok().map(|pool| file_holder(&pool)));
    holders
        .find(|holder| *holder != Holder::None)
        .unwrap_or(Holder::None)
}

/// Processes that have a file. If that is no process, its lock is held until it is closed.
fn file_holder(file: &File) -> Holder {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Holder::Server(lock_owner(file)),
        Err(_) => return Holder::Unknown,
    }
    if is_alone(file) {
        Holder::None
    } else {
        Holder::Clients
    }
}

/// The process with the lock of a file (proc_locks(5)), if it is visible from here.
fn lock_owner(file: &File) -> Option<u32> {
    let found = file.metadata().ok()?;
    let device = found.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let wanted = format!("{major:02x}:{minor:02x}:{}", found.ino());
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let owner = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let at = fields.iter().position(|field| *field == wanted)?;
        fields[at.checked_sub(1)?].parse().ok()
    };
    locks.lines().find_map(owner)
}
