//! Files without a name until they are complete (`O_TMPFILE`).
//!
//! If the process dies, nothing of them is left. Creating one does not take the lock of the directory, for which all that
//! create or name files there contend. `linkat` fails if the name exists, so naming a file also tests whether the object
//! was there already; a lookup before would cost more than all the rest with several threads, as the kernel caches absent
//! names under the same lock.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::{AtFlags, CWD, FsWord, OFlags};
use rustix::io::Errno;

use super::base::{Base, FILE_MODE, open_direct};
use super::beneath;

/// Local file systems. Others may report a lack of space only when a file is closed, after it has its name.
const LOCAL: [FsWord; 4] = [
    0x0102_1994, // tmpfs
    0xef53,      // ext2 to ext4
    0x5846_5342, // XFS
    0x9123_683e, // btrfs
];

/// Way of naming a file that works here; none before it was tried.
#[derive(Default)]
pub(super) struct Unnamed(AtomicU8);

const NONE: u8 = 0;
/// By the descriptor, which older systems allow only with a capability.
const EMPTY: u8 = 1;
/// By the name of the descriptor in `/proc`.
const PROC: u8 = 2;

impl Unnamed {
    /// Tries which way works.
    pub(super) fn probe(&self, base: &Base) {
        let dir = base.dir();
        let is_local = rustix::fs::fstatfs(&*dir).is_ok_and(|stat| LOCAL.contains(&stat.f_type));
        if !is_local || base.is_read_only() {
            return;
        }
        for way in [EMPTY, PROC] {
            self.0.store(way, Ordering::Relaxed);
            let name = base.new_name(base.temporary());
            let works = self
                .create(&dir, false)
                .and_then(|file| self.name(&file, &dir, &name))
                .and_then(|()| rustix::fs::unlinkat(&dir, &name, AtFlags::empty()));
            if works.is_ok() {
                return;
            }
        }
        self.disable();
    }

    pub(super) fn is_possible(&self) -> bool {
        self.0.load(Ordering::Relaxed) != NONE
    }

    /// Uses temporary names from now on.
    pub(super) fn disable(&self) {
        self.0.store(NONE, Ordering::Relaxed);
    }

    /// Creates a file without a name in the file system of this directory.
    pub(super) fn create(&self, dir: &OwnedFd, direct: bool) -> Result<OwnedFd, Errno> {
        let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
        open_direct(dir, ".", flags, FILE_MODE, direct)
    }

    /// Names a file if no other file has the name.
    pub(super) fn name(&self, file: &OwnedFd, dir: &OwnedFd, path: &str) -> Result<(), Errno> {
        let (dir, path) = beneath::parent(dir, path)?;
        match self.0.load(Ordering::Relaxed) {
            PROC => {
                let own = format!("/proc/self/fd/{}", file.as_raw_fd());
                rustix::fs::linkat(CWD, own, dir, path, AtFlags::SYMLINK_FOLLOW)
            }
            _ => rustix::fs::linkat(file, "", dir, path, AtFlags::EMPTY_PATH),
        }
    }
}
