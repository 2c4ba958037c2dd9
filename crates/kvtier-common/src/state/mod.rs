//! The state directory: what of a server outlives its process, in one folder per instance.
//!
//! ```text
//! BASE/                 --state-dir
//!   INSTANCE/           mode 0700, of this user
//!     lock              held (flock) while a server runs; its process id
//!     id                32 random hex digits, from the first use on
//!     ...               files of other crates
//! ```
//!
//! A folder or file that another user owns or may write, and a symbolic link in its place, is never used: root would follow
//! it. This module never knows what the files hold.

use std::fs::{DirBuilder, File};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};
use rustix::fs::{Access, AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};

mod volatile;

pub use volatile::VolatileDir;

/// Name of the lock's file.
const LOCK: &str = "lock";

/// Name of the file with the random part of a folder's [id](StateDir::id).
const ID: &str = "id";
/// Bytes in it.
const ID_LEN: usize = 32;

/// Write permission of the group and of others.
const FOREIGN_WRITE: u32 = 0o022;

/// Most bytes of a folder's name that come from an instance's.
const MAX_NAME_BYTES: usize = 200;

/// The folder of one instance, locked until this is dropped or [released](StateDir::release).
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    directory: OwnedFd,
    lock: File,
    id: String,
}

impl StateDir {
    /// Opens the folder of an instance below `base`, made if it does not exist, and locks it.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`] if another server has it, with that server's process id. Any other kind: it cannot be used.
    pub fn open(base: &Path, instance: &str) -> Result<Self> {
        let path = base.join(folder(instance));
        Self::open_at(base, &path).map_err(|error| error.context(path.display()))
    }

    fn open_at(base: &Path, path: &Path) -> Result<Self> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(base);
        made.map_err(|error| Error::io("cannot be created", error))?;
        let base = open_base(base)?;
        let name = path.file_name().unwrap_or_default();
        match rustix::fs::mkdirat(&base, name, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(Error::io("cannot be created", error)),
        }
        let directory = open_folder(&base, name)?;
        let lock = open_own(&directory, LOCK).map_err(|error| error.context(LOCK))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(in_use(&lock)),
            Err(error) => return Err(Error::io("cannot be locked", error)),
        }
        let stat = stat(&directory)?;
        let random = random_id(&directory).map_err(|error| error.context(ID))?;
        // A file system that is full or read-only would fail later, when something has to be kept.
        // In a pod the host is the pod: without it the id of a process in another one means nothing.
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        let process = format!("{} on {host}\n", std::process::id());
        let written = lock.set_len(0);
        let written = written.and_then(|()| lock.write_all_at(process.as_bytes(), 0));
        written.map_err(|error| Error::io("cannot be written", error))?;
        Ok(Self {
            path: path.to_owned(),
            directory,
            lock,
            id: identity(&stat, &random),
        })
    }

    /// Identity of the folder on this machine. Its device and inode tell it from a copy, its random part from a later folder
    /// that has both again; so one that was copied back is another folder.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file in it, which exists or not.
    ///
    /// # Errors
    /// What is there is no regular file of this user, or others may write it.
    pub fn file(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        check_file(self.directory.as_fd(), name).map_err(|error| error.context(path.display()))?;
        Ok(path)
    }

    /// Lets another server have it. Nothing in it may be written afterwards.
    pub fn release(&self) {
        // Fails for a bad descriptor only. The end of the process releases it too.
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
    }
}

/// Path of an instance's folder below `base`, if the folder could be opened or made now. Nothing is made or changed.
///
/// # Errors
/// As [`StateDir::open`].
pub fn preflight(base: &Path, instance: &str) -> Result<PathBuf> {
    let path = base.join(folder(instance));
    match check_folder(base, &path) {
        Ok(()) => Ok(path),
        Err(error) => Err(error.context(path.display())),
    }
}

fn check_folder(base: &Path, path: &Path) -> Result<()> {
    let is_there = |path: &Path| path.symlink_metadata().is_ok();
    if !is_there(base) {
        let above = base.ancestors().find(|part| is_there(part));
        return check_writable(above.unwrap_or(Path::new(".")));
    }
    let opened = open_base(base)?;
    if !is_there(path) {
        return check_writable(base);
    }
    let directory = open_folder(&opened, path.file_name().unwrap_or_default())?;
    check_writable(path)?;
    check_file(directory.as_fd(), LOCK).map_err(|error| error.context(LOCK))?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let lock = match rustix::fs::openat(&directory, LOCK, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        lock => lock.map_err(|error| Error::io("cannot be opened", error).context(LOCK))?,
    };
    let lock = File::from(lock);
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(in_use(&lock)),
        locked => locked.map_err(|error| Error::io("cannot be locked", error)),
    }
}

/// Checks that this user may make something in a directory.
fn check_writable(directory: &Path) -> Result<()> {
    let access = Access::WRITE_OK | Access::EXEC_OK;
    let flags = AtFlags::EACCESS;
    let found = rustix::fs::accessat(rustix::fs::CWD, directory, access, flags);
    let what = || format!("{} cannot be written to", directory.display());
    found.map_err(|error| Error::io(what(), error))?;
    if directory.is_dir() {
        Ok(())
    } else {
        Err(Error::refused(format!(
            "{} is no directory",
            directory.display()
        )))
    }
}

/// The path of a file of an instance, if the file and its folder are there and can be trusted; changes nothing.
pub fn existing_file(base: &Path, instance: &str, name: &str) -> Option<PathBuf> {
    let folder = folder(instance);
    let directory = open_folder(&open_base(base).ok()?, folder.as_ref()).ok()?;
    check_file(directory.as_fd(), name).ok()?;
    let path = base.join(folder).join(name);
    path.is_file().then_some(path)
}

/// The [identity](StateDir::id) of the folder of an instance, if it is there and can be trusted; changes nothing.
pub fn existing_id(base: &Path, instance: &str) -> Option<String> {
    let path = existing_file(base, instance, ID)?;
    let directory = open_folder(&open_base(base).ok()?, folder(instance).as_ref()).ok()?;
    let random = known_random(&File::open(path).ok()?)?;
    Some(identity(&stat(&directory).ok()?, &random))
}

/// Name of an instance's folder: the instance's, with `%` and two hex digits for each byte that is not a letter, a digit, `-`,
/// `_` or an inner `.`.
fn folder(instance: &str) -> String {
    let mut name = String::new();
    for (at, byte) in instance.bytes().enumerate() {
        match byte {
            b'.' if at > 0 => name.push('.'),
            b'-' | b'_' => name.push(byte.into()),
            byte if byte.is_ascii_alphanumeric() => name.push(byte.into()),
            byte => name.push_str(&format!("%{byte:02X}")),
        }
    }
    if name.len() > MAX_NAME_BYTES {
        // FNV-1a: two long names that begin alike are two folders. Names come from the operator.
        let hash = instance
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
        name.truncate(MAX_NAME_BYTES - 17);
        name.push_str(&format!("%{hash:016x}"));
    }
    name
}

/// The base may be behind a link, as systemd makes one; what it leads to must not be replaceable by others.
fn open_base(base: &Path) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
    let found = rustix::fs::open(base, flags, Mode::empty())
        .map_err(|error| Error::io("cannot be opened", error))?;
    let stat = stat(&found)?;
    // In a sticky directory such as /tmp others cannot rename what is ours.
    let is_sticky = stat.st_mode & Mode::SVTX.bits() != 0;
    let is_owned = [0, own_user()].contains(&stat.st_uid);
    if !is_sticky && (!is_owned || stat.st_mode & FOREIGN_WRITE != 0) {
        return Err(untrusted(&stat, base.display()));
    }
    Ok(found)
}

fn open_folder(base: &OwnedFd, name: &std::ffi::OsStr) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let directory =
        rustix::fs::openat(base, name, flags, Mode::empty()).map_err(|error| match error {
            rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP => {
                Error::refused("is a symbolic link or no directory")
            }
            error => Error::io("cannot be opened", error),
        })?;
    check_owner(&stat(&directory)?)?;
    Ok(directory)
}

/// Opens a file in the folder, made if it does not exist.
fn open_own(directory: &OwnedFd, name: &str) -> Result<File> {
    check_file(directory.as_fd(), name)?;
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let file = rustix::fs::openat(directory, name, flags, mode);
    let file = file.map_err(|error| Error::io("cannot be written", error))?;
    Ok(File::from(file))
}

fn identity(stat: &Stat, random: &str) -> String {
    format!("{:x}:{:x}:{random}", stat.st_dev, stat.st_ino)
}

/// The random part of a folder's id. A server that was killed as it wrote it has left a part of it, which is none.
fn known_random(file: &File) -> Option<String> {
    let mut found = [0; ID_LEN + 1];
    let len = file.read_at(&mut found, 0).ok()?;
    let known = std::str::from_utf8(&found[..len]).ok()?;
    let is_whole = len == ID_LEN && known.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_whole.then(|| known.to_owned())
}

/// Random part of a folder's id, written if it is not there. The folder is locked.
fn random_id(directory: &OwnedFd) -> Result<String> {
    let file = open_own(directory, ID)?;
    if let Some(known) = known_random(&file) {
        return Ok(known);
    }
    // Seeded by the system.
    let random = || RandomState::new().build_hasher().finish();
    let id = format!("{:016x}{:016x}", random(), random());
    let written = file
        .set_len(0)
        .and_then(|()| file.write_all_at(id.as_bytes(), 0));
    written.map_err(|error| Error::io("cannot be written", error))?;
    Ok(id)
}

fn check_file(directory: std::os::fd::BorrowedFd<'_>, name: &str) -> Result<()> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(error) => Err(Error::io("cannot be examined", error)),
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile => {
            Err(Error::refused("is a symbolic link or no file"))
        }
        Ok(stat) => check_owner(&stat),
    }
}

fn check_owner(stat: &Stat) -> Result<()> {
    if stat.st_uid == own_user() && stat.st_mode & FOREIGN_WRITE == 0 {
        Ok(())
    } else {
        Err(untrusted(stat, "it"))
    }
}

fn untrusted(stat: &Stat, what: impl std::fmt::Display) -> Error {
    let (owner, own) = (stat.st_uid, own_user());
    let mode = stat.st_mode & 0o7777;
    Error::refused(format!(
        "{what} belongs to user {owner} and has mode {mode:04o}; allowed: user {own}, and no write permission for others"
    ))
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn stat(file: &OwnedFd) -> Result<Stat> {
    rustix::fs::fstat(file).map_err(|error| Error::io("cannot be examined", error))
}

/// The error for a folder that another server has locked.
fn in_use(lock: &File) -> Error {
    let mut start = [0; 128];
    let read = lock.read_at(&mut start, 0).unwrap_or(0);
    let text = std::str::from_utf8(&start[..read]).unwrap_or_default();
    let id = text.split_whitespace().next().map(str::parse::<u32>);
    let server = match id {
        Some(Ok(_)) => format!("process {}", text.trim()),
        _ => "another process".to_owned(),
    };
    Error::new(
        ErrorKind::InUse,
        format!("in use by the server that is {server}"),
    )
    .hint("give this one another --instance-id or --state-dir")
}

#[cfg(test)]
mod tests;
