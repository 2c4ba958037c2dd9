//! What ends with the boot: files in `/dev/shm`, beside the state directory.
//!
//! ```text
//! /dev/shm/kvtier_ID/   mode 0700, of this user; ID is that of the state folder
//!   ...                 files of other crates
//! ```
//!
//! No write there waits for a disk, and nothing is synced: a process that is killed loses nothing that it has written. The
//! folder exists only while it has files. The owner of the [`StateDir`](super::StateDir) alone may use it, and has it locked
//! (flock, shared) from its first use on.
//!
//! A folder outlives its state folder, such as that of a container without a volume, and none can be found by its inode. So a
//! start removes folders of its user that no server has locked and that [`MAX_IDLE`] has passed by: the workers in them register
//! again.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::error::{Error, Result};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};

use super::{check_file, open_base, open_folder, stat};

/// Parent of the folders.
const BASE: &str = "/dev/shm";

/// Begins the name of each folder.
const PREFIX: &str = "kvtier_";

/// Time without a change after which a folder that no server has locked is removed.
const MAX_IDLE: Duration = Duration::from_secs(60 * 60);

/// Name of a file that is being written.
const UNFINISHED: &str = "unfinished";

/// The folder, opened at its first use.
#[derive(Debug)]
pub struct VolatileDir {
    base: PathBuf,
    name: String,
    directory: Option<OwnedFd>,
}

impl VolatileDir {
    /// The folder that belongs to the state folder of this [identity](super::StateDir::id). Nothing is made yet. Without the state
    /// folder's lock it is only for reading: its owner may change it at any time.
    pub fn of(id: &str) -> Self {
        Self {
            base: Path::new(BASE).to_owned(),
            name: format!("{PREFIX}{}", id.replace(':', "_")),
            directory: None,
        }
    }

    /// Path of the folder, which exists or not.
    pub fn path(&self) -> PathBuf {
        self.base.join(&self.name)
    }

    /// The folder; `None` if it does not exist.
    ///
    /// # Errors
    /// It is a symbolic link, belongs to another user, or others may write it.
    fn open(&mut self) -> Result<Option<&OwnedFd>> {
        // Removed while the server runs: it is made again.
        let is_removed = |it: &mut OwnedFd| stat(it).is_ok_and(|found| found.st_nlink == 0);
        let _ = self.directory.take_if(is_removed);
        if self.directory.is_none() {
            let base = open_base(&self.base)?;
            let name = OsStr::new(&self.name);
            match rustix::fs::statat(&base, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(rustix::io::Errno::NOENT) => return Ok(None),
                _ => self.directory = Some(open_shared(&base, name)?),
            }
        }
        Ok(self.directory.as_ref())
    }

    /// Removes the folders of this user that have not changed for an hour and that no server has; returns where they were.
    pub fn remove_unused_others(&self, now: SystemTime) -> Vec<PathBuf> {
        let Ok(base) = open_base(&self.base) else {
            return Vec::new();
        };
        let all = std::fs::read_dir(&self.base).into_iter().flatten();
        let names = all
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok());
        let is_removed = |name: &String| {
            is_folder_name(name)
                && *name != self.name
                && remove_unused(&base, &self.base, name, now)
        };
        names
            .filter(is_removed)
            .map(|name| self.base.join(name))
            .collect()
    }

    fn open_or_make(&mut self) -> Result<&OwnedFd> {
        if self.open()?.is_none() {
            let base = open_base(&self.base)?;
            let name = OsStr::new(&self.name);
            rustix::fs::mkdirat(&base, name, Mode::RWXU)
                .map_err(|error| Error::io("cannot be created", error))?;
            self.directory = Some(open_shared(&base, name)?);
        }
        self.directory
            .as_ref()
            .ok_or_else(|| Error::refused("does not exist"))
    }

    /// Names of the files, at most `limit`; none if there is no folder. Changes nothing.
    ///
    /// # Errors
    /// The folder cannot be trusted or read.
    pub fn names(&mut self, limit: usize) -> Result<Vec<String>> {
        let path = self.path();
        if self.open()?.is_none() {
            return Ok(Vec::new());
        }
        let all = std::fs::read_dir(path).map_err(|error| Error::io("cannot be read", error))?;
        let names = all.flatten().map(|entry| entry.file_name().into_string());
        let names = names.flatten().filter(|name| name != UNFINISHED);
        Ok(names.take(limit).collect())
    }

    /// The content of a file.
    ///
    /// # Errors
    /// It is absent, no regular file of this user, or larger than `max_bytes`.
    pub fn read(&mut self, name: &str, max_bytes: u64) -> Result<Vec<u8>> {
        let absent = || Error::refused("does not exist");
        let directory = self.open()?.ok_or_else(absent)?;
        check_file(directory.as_fd(), name)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, name, flags, Mode::empty());
        let file = std::fs::File::from(file.map_err(|error| Error::io("cannot be opened", error))?);
        let bytes = file.metadata().map_or(0, |found| found.len());
        if bytes > max_bytes {
            return Err(Error::refused(format!(
                "it has {bytes} bytes; allowed: at most {max_bytes}"
            )));
        }
        let mut content = vec![0; usize::try_from(bytes).unwrap_or(0)];
        file.read_exact_at(&mut content, 0)
            .map_err(|error| Error::io("cannot be read", error))?;
        Ok(content)
    }

    /// Puts a file in place of the one with this name, as a whole.
    ///
    /// # Errors
    /// The folder cannot be trusted, or there is no space. The earlier file stays then.
    pub fn write(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let failed = |error| Error::io("cannot be written", error);
        let directory = self.open_or_make()?;
        // Left by a process that was killed.
        let _ = rustix::fs::unlinkat(directory, UNFINISHED, AtFlags::empty());
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, UNFINISHED, flags, Mode::RUSR | Mode::WUSR);
        let file = std::fs::File::from(file.map_err(failed)?);
        let written = file.write_all_at(content, 0);
        let written = written.map_err(|error| Error::io("cannot be written", error));
        let named = written.and_then(|()| {
            rustix::fs::renameat(directory, UNFINISHED, directory, name).map_err(failed)
        });
        if named.is_err() {
            let _ = rustix::fs::unlinkat(directory, UNFINISHED, AtFlags::empty());
        }
        named
    }

    /// Overwrites a part of a file that exists.
    ///
    /// # Errors
    /// The file is absent or a link.
    pub fn write_at(&mut self, name: &str, at: u64, bytes: &[u8]) -> Result<()> {
        let absent = || Error::refused("does not exist");
        let directory = self.open()?.ok_or_else(absent)?;
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, name, flags, Mode::empty());
        let file = std::fs::File::from(file.map_err(|error| Error::io("cannot be opened", error))?);
        file.write_all_at(bytes, at)
            .map_err(|error| Error::io("cannot be written", error))
    }

    /// Removes a file, if it exists, and the folder with its last file.
    ///
    /// # Errors
    /// The folder cannot be trusted, or the name is a directory's.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        let Some(directory) = self.open()? else {
            return Ok(());
        };
        match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(Error::io("cannot be removed", error)),
        }
        // Left by a process that was killed, it would keep the folder.
        let _ = rustix::fs::unlinkat(directory, UNFINISHED, AtFlags::empty());
        if std::fs::remove_dir(self.path()).is_ok() {
            self.directory = None;
        }
        Ok(())
    }
}

/// Opens a folder, which is this process's to use until it is closed.
fn open_shared(base: &OwnedFd, name: &OsStr) -> Result<OwnedFd> {
    let directory = open_folder(base, name)?;
    // Fails while another process removes it: then it is made again at the next use.
    let _ = rustix::fs::flock(&directory, FlockOperation::NonBlockingLockShared);
    Ok(directory)
}

/// Whether it is the name of a folder of a state folder: device, inode and random part in hex.
fn is_folder_name(name: &str) -> bool {
    let Some(id) = name.strip_prefix(PREFIX) else {
        return false;
    };
    let is_hex = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parts: Vec<_> = id.split('_').collect();
    parts.len() == 3 && parts[2].len() == super::ID_LEN && parts.iter().all(|part| is_hex(part))
}

/// Removes a folder of this user if it has not changed for [`MAX_IDLE`] and no server has it.
fn remove_unused(base: &OwnedFd, path: &Path, name: &str, now: SystemTime) -> bool {
    let Ok(directory) = open_folder(base, name.as_ref()) else {
        return false;
    };
    let directory = File::from(directory);
    let path = path.join(name);
    let files = std::fs::read_dir(&path).into_iter().flatten().flatten();
    let changed = files
        .filter_map(|entry| entry.metadata().ok())
        .chain(directory.metadata())
        .filter_map(|found| found.modified().ok())
        .max();
    let is_idle =
        changed.is_some_and(|at| now.duration_since(at).is_ok_and(|idle| idle > MAX_IDLE));
    is_idle
        && rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok()
        && std::fs::remove_dir_all(path).is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn volatile(base: &Path) -> VolatileDir {
        VolatileDir {
            base: base.to_owned(),
            name: "kvtier_x".to_owned(),
            directory: None,
        }
    }

    #[test]
    fn folder_exists_while_it_has_files() {
        let base = tempfile::tempdir().unwrap();
        let mut dir = volatile(base.path());
        assert_eq!(dir.names(9).unwrap(), [""; 0]);
        assert!(dir.remove("a").is_ok() && !dir.path().exists());
        dir.write("a", b"one").unwrap();
        dir.write("a", b"two!").unwrap();
        dir.write_at("a", 1, b"H").unwrap();
        let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(
            (mode(dir.path()), mode(dir.path().join("a"))),
            (0o700, 0o600)
        );
        // As the next process finds it.
        let mut next = volatile(base.path());
        assert_eq!(next.names(9).unwrap(), ["a"]);
        assert_eq!(next.read("a", 4).unwrap(), b"tHo!");
        assert!(next.read("a", 3).is_err() && next.read("b", 3).is_err());
        assert!(next.write_at("b", 0, b"x").is_err());
        next.remove("a").unwrap();
        assert!(!next.path().exists());
        next.write("b", b"").unwrap();
        assert_eq!(next.names(9).unwrap(), ["b"]);
    }

    /// Another process may be writing it.
    #[test]
    fn unfinished_file_is_no_file_and_stays_until_a_removal() {
        let base = tempfile::tempdir().unwrap();
        let mut dir = volatile(base.path());
        dir.write("a", b"x").unwrap();
        let unfinished = dir.path().join(UNFINISHED);
        std::fs::write(&unfinished, "half").unwrap();
        assert_eq!(volatile(base.path()).names(9).unwrap(), ["a"]);
        assert!(unfinished.exists());
        dir.remove("a").unwrap();
        assert!(!dir.path().exists());
    }

    #[test]
    fn removed_folder_is_made_again() {
        let base = tempfile::tempdir().unwrap();
        let mut dir = volatile(base.path());
        for name in ["a", "b"] {
            dir.write(name, b"x").unwrap();
            assert_eq!(dir.names(9).unwrap(), [name]);
            std::fs::remove_dir_all(dir.path()).unwrap();
            assert!(dir.read(name, 9).is_err() && dir.write_at(name, 0, b"y").is_err());
            dir.remove(name).unwrap();
        }
    }

    // proves: docs/operate.md#l1-after-a-restart
    // proves: docs/operate.md#state
    #[test]
    fn folders_that_no_server_has_are_removed() {
        let base = tempfile::tempdir().unwrap();
        let named = |inode: u32, prefix: &str| VolatileDir {
            base: base.path().to_owned(),
            name: format!("{prefix}2a_{inode:x}_{}", "0".repeat(32)),
            directory: None,
        };
        let mut own = named(1, PREFIX);
        let mut running = named(2, PREFIX);
        let make = |mut dir: VolatileDir| {
            dir.write("a", b"x").unwrap();
            dir.path()
        };
        let (ended, other) = (make(named(3, PREFIX)), make(named(4, "kvtier-")));
        own.write("a", b"x").unwrap();
        running.write("a", b"x").unwrap();
        let link = base.path().join(named(5, PREFIX).name);
        symlink(&other, &link).unwrap();
        let after = |time| SystemTime::now() + time;
        // The server may be about to start again.
        assert!(own.remove_unused_others(after(MAX_IDLE / 2)).is_empty());
        let later = after(MAX_IDLE * 2);
        // As the next process of its instance finds its own.
        drop(own);
        let own = named(1, PREFIX);
        assert_eq!(
            own.remove_unused_others(later),
            std::slice::from_ref(&ended)
        );
        assert!(!ended.exists());
        for path in [&own.path(), &running.path(), &other, &link] {
            assert!(path.exists(), "{}", path.display());
        }
        drop(running);
        assert_eq!(own.remove_unused_others(later), [named(2, PREFIX).path()]);
    }

    // proves: docs/operate.md#workers-after-a-restart
    #[test]
    fn links_and_foreign_permissions_are_refused() {
        let base = tempfile::tempdir().unwrap();
        let victim = base.path().join("victim");
        std::fs::write(&victim, "kept").unwrap();
        let mut dir = volatile(base.path());
        dir.write("a", b"x").unwrap();
        let link = dir.path().join("link");
        symlink(&victim, &link).unwrap();
        assert!(dir.read("link", 9).is_err() && dir.write_at("link", 0, b"x").is_err());
        // A file that takes the place of a link leaves alone what it led to.
        dir.write("link", b"own").unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(dir.path(), open).unwrap();
        let mut next = volatile(base.path());
        assert!(next.names(9).is_err() && next.write("a", b"y").is_err());
        std::fs::rename(dir.path(), base.path().join("moved")).unwrap();
        symlink(base.path().join("moved"), dir.path()).unwrap();
        let mut next = volatile(base.path());
        assert!(next.names(9).is_err() && next.write("a", b"y").is_err());
    }
}
