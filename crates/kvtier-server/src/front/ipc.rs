//! A request socket that is a file: its permissions decide which clients may connect.
//!
//! Only a socket on which no process listens any more is removed from the path, and no client can connect before the mode
//! is the configured one.

use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvtier_common::error::{Error, ErrorKind, Result};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, chmodat, fchmod, flock, openat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};

use super::socket::BACKLOG;

/// How long a server waits for its turn to check and bind, which takes microseconds; the directory may belong to another
/// user, and a process may lock it for ever.
const TURN: Duration = Duration::from_secs(1);

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(10);

const UNOPENED: &str = "its directory cannot be opened";

/// The file of a socket; removed when this is dropped, unless it belongs to another server by then.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    id: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if id(&self.path) == Some(self.id) {
            // It would be found stale by the next server.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn id(path: &Path) -> Option<(u64, u64)> {
    let data = std::fs::symlink_metadata(path).ok()?;
    Some((data.dev(), data.ino()))
}

/// Checks that a socket could be made at `path`, whatever is there.
///
/// # Errors
/// The directory does not allow it; [`ErrorKind::InUse`] if a server listens there, which may be the reason.
pub(super) fn preflight(path: &Path) -> Result<()> {
    check_directory(directory(path)).map_err(|error| match UnixStream::connect(path) {
        Ok(_) => Error::new(ErrorKind::InUse, error.to_string()),
        Err(_) => error,
    })
}

/// Checks the file of a socket that a service manager has bound at `path`: clients reach it, and no others than with `mode`.
///
/// # Errors
/// The file is no socket any more, or its mode allows more than `mode`.
pub(super) fn check_inherited(path: &Path, mode: u32) -> Result<()> {
    let data = std::fs::symlink_metadata(path).ok();
    let Some(data) = data.filter(|data| data.file_type().is_socket()) else {
        return Err(Error::refused(
            "the service manager's socket is not there any more, so no client can connect; restart its socket unit, and set \
             RuntimeDirectoryPreserve=yes if the socket is in a RuntimeDirectory= of the service",
        ));
    };
    let found = data.mode() & 0o777;
    if found & !mode != 0 {
        return Err(Error::refused(format!(
            "the service manager's socket has mode {found:04o}, more than --ipc-mode {mode:04o} allows; set SocketMode={mode:04o} \
             in its socket unit, or change --ipc-mode"
        )));
    }
    Ok(())
}

fn check_directory(directory: &Path) -> Result<()> {
    let opened = std::fs::File::open(directory).and_then(|file| file.metadata());
    if opened.map_err(|error| Error::io(UNOPENED, error))?.is_dir() {
        rustix::fs::access(directory, rustix::fs::Access::WRITE_OK)
            .map_err(|error| Error::io("its directory cannot be written to", error))
    } else {
        let what = format!("{} is no directory", directory.display());
        Err(Error::refused(what))
    }
}

fn directory(path: &Path) -> &Path {
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    directory.unwrap_or(Path::new("."))
}

/// Listens at `path`.
///
/// # Errors
/// One line that says what is in the way.
pub(super) fn listen_at(path: &Path, mode: u32) -> Result<(OwnedFd, SocketFile)> {
    listen_within(path, mode, TURN)
}

fn listen_within(path: &Path, mode: u32, timeout: Duration) -> Result<(OwnedFd, SocketFile)> {
    let failed = |error| Error::from(std::io::Error::from(error));
    let directory = openat(
        CWD,
        directory(path),
        OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(|error| Error::io(UNOPENED, error))?;
    // One server at a time looks and binds. Without a lock (some file systems have none) the window is small.
    let until = Instant::now() + timeout;
    while flock(&directory, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
        && Instant::now() < until
    {
        std::thread::sleep(PAUSE);
    }
    remove_stale(path)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(failed)?;
    // The file gets the socket's mode, less what the umask takes; it is never wider than this.
    fchmod(&socket, Mode::from_bits_truncate(mode)).map_err(failed)?;
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    bind(&socket, &address).map_err(failed)?;
    let file = SocketFile {
        id: id(path).ok_or_else(|| Error::new(ErrorKind::Io, "it went away again"))?,
        path: path.to_owned(),
    };
    chmodat(
        CWD,
        path,
        Mode::from_bits_truncate(mode),
        rustix::fs::AtFlags::empty(),
    )
    .map_err(failed)?;
    listen(&socket, BACKLOG).map_err(failed)?;
    Ok((socket, file))
}

/// Takes away what a server that was killed left behind.
fn remove_stale(path: &Path) -> Result<()> {
    let data = match std::fs::symlink_metadata(path) {
        Ok(data) => data,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if !data.file_type().is_socket() {
        return Err(Error::refused(
            "there is a file of that name that is no socket; it is left alone",
        ));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(Error::new(
            ErrorKind::InUse,
            "a server listens there already",
        )),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(|error| {
                Error::io("the socket of an ended server cannot be removed", error)
            })
        }
        Err(error) => Err(Error::io(
            "it is unknown whether a server listens there",
            error,
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_file_has_the_mode_and_goes_with_the_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        for mode in [0o600, 0o660, 0o777] {
            let (socket, file) = listen_at(&path, mode).unwrap();
            let data = std::fs::symlink_metadata(&path).unwrap();
            assert_eq!(data.mode() & 0o777, mode);
            UnixStream::connect(&path).unwrap();
            let error = listen_at(&path, mode).unwrap_err();
            assert_eq!(error.to_string(), "a server listens there already");
            drop((socket, file));
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_locked_directory_is_waited_for_briefly() {
        let directory = tempfile::tempdir().unwrap();
        let locked = std::fs::File::open(directory.path()).unwrap();
        flock(&locked, FlockOperation::LockExclusive).unwrap();
        let path = directory.path().join("s");
        let (_socket, _file) = listen_within(&path, 0o600, Duration::ZERO).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_stale_socket_is_replaced_and_nothing_else_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let (_socket, file) = listen_at(&path, 0o600).unwrap();
        UnixStream::connect(&path).unwrap();
        // It belongs to another server by now.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        drop(file);
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        let told = |path| listen_at(path, 0o600).unwrap_err().to_string();
        assert!(told(&path).contains("no socket"));
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        let told = told(&directory.path().join("no/s"));
        assert!(told.starts_with("its directory cannot be opened"), "{told}");
    }
}
