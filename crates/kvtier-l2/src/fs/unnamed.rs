//! Files that have no name until they are whole (`O_TMPFILE`).
//!
//! Nothing of them is left if we die, and making one does not wait for the directory's lock, which all who make or name
//! files there take turns at. A name is only given where there is none, so giving it also tells whether the object was
//! there already: a look beforehand would cost more than all the rest once several threads make files, for the system
//! remembers absent names under that same lock.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::{AtFlags, CWD, FsWord, OFlags};
use rustix::io::Errno;

use super::base::{Base, FILE_MODE, open_direct};
use super::beneath;

/// File systems of this machine. Others may say only when a file is closed that there was no room, which is too late
/// for a file that has its name by then.
const LOCAL: [FsWord; 4] = [
    0x0102_1994, // tmpfs
    0xef53,      // ext2 to ext4
    0x5846_5342, // XFS
    0x9123_683e, // btrfs
];

/// Which way of giving a name works here.
pub(super) struct Unnamed(AtomicU8);

const NONE: u8 = 0;
/// By the descriptor; older systems let only the privileged.
const EMPTY: u8 = 1;
/// By the name that `/proc` has for the descriptor.
const PROC: u8 = 2;

impl Unnamed {
    /// Tries it once.
    pub(super) fn probe(base: &Base) -> Self {
        let dir = base.dir();
        let is_local = rustix::fs::fstatfs(&*dir).is_ok_and(|stat| LOCAL.contains(&stat.f_type));
        if !is_local || base.is_read_only() {
            return Self(AtomicU8::new(NONE));
        }
        let unnamed = Self(AtomicU8::new(NONE));
        for way in [EMPTY, PROC] {
            unnamed.0.store(way, Ordering::Relaxed);
            let name = base.new_name(base.temporary());
            let works = unnamed
                .create(&dir, false)
                .and_then(|file| unnamed.name(&file, &dir, &name))
                .and_then(|()| rustix::fs::unlinkat(&dir, &name, AtFlags::empty()));
            if works.is_ok() {
                return unnamed;
            }
        }
        Self(AtomicU8::new(NONE))
    }

    pub(super) fn is_possible(&self) -> bool {
        self.0.load(Ordering::Relaxed) != NONE
    }

    /// Has files be written under names of their own from now on.
    pub(super) fn give_up(&self) {
        self.0.store(NONE, Ordering::Relaxed);
    }

    /// A file without a name in the file system of this directory.
    pub(super) fn create(&self, dir: &OwnedFd, direct: bool) -> Result<OwnedFd, Errno> {
        let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
        open_direct(dir, ".", flags, FILE_MODE, direct)
    }

    /// Gives a file its name, if no other has it.
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
