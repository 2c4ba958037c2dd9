//! Access to files below the base directory without following links.
//!
//! The path of the base itself may have links. A link inside of it, which another user with write access could make, would
//! redirect reads, writes and deletes to other places.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// Flags of directories on the path.
const WAY_FLAGS: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Whether the system resolves the path (`openat2`, since Linux 5.6).
static HAS_OPENAT2: AtomicBool = AtomicBool::new(true);

/// Directory of a file.
pub(super) enum Parent<'a> {
    Base(&'a OwnedFd),
    Inside(OwnedFd),
}

impl AsFd for Parent<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Base(dir) => dir.as_fd(),
            Self::Inside(dir) => dir.as_fd(),
        }
    }
}

/// Opens a file or directory. A link, also at the end, is [`Errno::LOOP`] or [`Errno::NOTDIR`].
pub(super) fn open(dir: &OwnedFd, path: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::NOFOLLOW;
    if path.contains('/') && HAS_OPENAT2.load(Ordering::Relaxed) {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        match rustix::fs::openat2(dir, path, flags, mode, resolve) {
            Err(Errno::NOSYS) => HAS_OPENAT2.store(false, Ordering::Relaxed),
            // By the file, or by a seccomp filter that does not know the call.
            Err(Errno::PERM) => {}
            opened => return opened,
        }
    }
    walk(dir, path, flags, mode)
}

/// Opens a file one directory after the other.
fn walk(dir: &OwnedFd, path: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let mut parts = path.split('/').filter(|part| !part.is_empty()).peekable();
    let mut at = Parent::Base(dir);
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rustix::fs::openat(&at, part, flags, mode);
        }
        at = Parent::Inside(rustix::fs::openat(&at, part, WAY_FLAGS, Mode::empty())?);
    }
    Err(Errno::NOENT)
}

/// Returns the directory of a file and its name there.
pub(super) fn parent<'a>(dir: &'a OwnedFd, path: &'a str) -> Result<(Parent<'a>, &'a str), Errno> {
    match path.trim_end_matches('/').rsplit_once('/') {
        None => Ok((Parent::Base(dir), path.trim_end_matches('/'))),
        Some((way, name)) => {
            let inside = open(dir, way, WAY_FLAGS, Mode::empty())?;
            Ok((Parent::Inside(inside), name))
        }
    }
}

pub(super) fn stat(dir: &OwnedFd, path: &str) -> Result<Stat, Errno> {
    let (parent, name) = parent(dir, path)?;
    rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
}

pub(super) fn unlink(dir: &OwnedFd, path: &str) -> Result<(), Errno> {
    let (parent, name) = parent(dir, path)?;
    rustix::fs::unlinkat(parent, name, AtFlags::empty())
}

pub(super) fn rename(dir: &OwnedFd, from: &str, to: &str) -> Result<(), Errno> {
    let ((from_parent, from), (to_parent, to)) = (parent(dir, from)?, parent(dir, to)?);
    rustix::fs::renameat(from_parent, from, to_parent, to)
}

pub(super) fn make_dir(dir: &OwnedFd, path: &str, mode: Mode) -> Result<(), Errno> {
    let (parent, name) = parent(dir, path)?;
    rustix::fs::mkdirat(parent, name, mode)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::fs::base::DIR_FLAGS;

    /// Both ways of walking, in a directory with links.
    #[test]
    fn links_are_not_followed_with_or_without_openat2() {
        let top = tempfile::tempdir().unwrap();
        let at = |path: &str| top.path().join(path);
        fs::create_dir_all(at("base/a/b")).unwrap();
        fs::create_dir_all(at("out/b")).unwrap();
        for file in ["base/f", "base/a/f", "base/a/b/f", "out/f", "out/b/f"] {
            fs::write(at(file), file).unwrap();
        }
        symlink(at("out"), at("base/link")).unwrap();
        symlink("../out", at("base/up")).unwrap();
        symlink("b", at("base/a/within")).unwrap();
        symlink("f", at("base/a/file")).unwrap();
        let base = rustix::fs::open(at("base"), DIR_FLAGS, Mode::empty()).unwrap();
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        for by_hand in [false, true] {
            let open = |path| {
                if by_hand {
                    walk(&base, path, flags | OFlags::NOFOLLOW, Mode::empty())
                } else {
                    open(&base, path, flags, Mode::empty())
                }
            };
            for path in ["f", "a/f", "a/b/f", "a/b", "a/b/"] {
                open(path).unwrap();
            }
            for path in ["link/f", "up/f", "link/b/f", "a/within/f", "a/file", "link"] {
                let error = open(path).unwrap_err();
                assert!(
                    matches!(error, Errno::LOOP | Errno::NOTDIR),
                    "{path}: {error}"
                );
            }
        }
        for path in ["link/f", "up/f", "a/within/f"] {
            assert!(stat(&base, path).is_err() && unlink(&base, path).is_err());
            assert!(rename(&base, "f", path).is_err() && rename(&base, path, "g").is_err());
            assert!(make_dir(&base, &format!("{path}g"), Mode::RWXU).is_err());
        }
        assert!(at("out/f").exists() && at("base/f").exists() && at("base/a/b/f").exists());
        rename(&base, "f", "a/b/g").unwrap();
        unlink(&base, "a/b/g").unwrap();
        make_dir(&base, "a/c", Mode::RWXU).unwrap();
        assert!(stat(&base, "a/c/").is_ok() && !at("base/f").exists());
    }
}
