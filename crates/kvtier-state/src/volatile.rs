//! What ends with the boot: files in `/dev/shm`, beside the state directory.
//!
//! ```text
//! /dev/shm/kvtier_ID/   mode 0700, of this user; ID is that of the state folder
//!   ...                 files of other crates
//! ```
//!
//! No write there waits for a disk, and nothing is synced: a process that is killed loses nothing that it has written. The
//! folder exists only while it has files. The owner of the [`StateDir`] alone may use it.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use kvtier_error::{Error, Result};
use rustix::fs::{AtFlags, Mode, OFlags};

use super::{StateDir, check_file, open_base, open_folder, stat};

/// Where it is.
const BASE: &str = "/dev/shm";

/// Name of a file that is being written.
const UNFINISHED: &str = "unfinished";

/// The folder, opened at its first use.
#[derive(Debug)]
pub struct VolatileDir {
    base: PathBuf,
    name: String,
    directory: Option<OwnedFd>,
}

impl StateDir {
    /// The folder that ends with the boot. Nothing is made yet.
    pub fn volatile(&self) -> VolatileDir {
        VolatileDir::of(self.id())
    }
}

impl VolatileDir {
    /// The folder that belongs to the state folder of this [identity](StateDir::id). Without the [`StateDir`] it is only for reading:
    /// its owner may change it at any time.
    pub fn of(id: &str) -> Self {
        Self {
            base: Path::new(BASE).to_owned(),
            name: format!("kvtier_{}", id.replace(':', "_")),
            directory: None,
        }
    }

    /// Where it is, or would be.
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
                _ => self.directory = Some(open_folder(&base, name)?),
            }
        }
        Ok(self.directory.as_ref())
    }

    fn open_or_make(&mut self) -> Result<&OwnedFd> {
        if self.open()?.is_none() {
            let base = open_base(&self.base)?;
            let name = OsStr::new(&self.name);
            rustix::fs::mkdirat(&base, name, Mode::RWXU)
                .map_err(|error| Error::io("cannot be created", error))?;
            self.directory = Some(open_folder(&base, name)?);
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
