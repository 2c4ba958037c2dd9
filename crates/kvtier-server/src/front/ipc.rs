//! A request socket that is a file: its permissions decide which clients may connect.
//!
//! Only a socket on which no process listens any more is removed from the path, and no client can connect before the mode
//! is the configured one.

use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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

/// Why nothing can be made at `path`, whatever is there.
pub(super) fn obstacle(path: &Path) -> Option<String> {
    let directory = directory(path);
    let opened = std::fs::File::open(directory).and_then(|file| file.metadata());
    match opened {
        Err(error) => Some(format!("its directory cannot be opened: {error}")),
        Ok(data) if !data.is_dir() => Some(format!("{} is no directory", directory.display())),
        Ok(_) => rustix::fs::access(directory, rustix::fs::Access::WRITE_OK)
            .err()
            .map(|error| {
                let error = std::io::Error::from(error);
                format!("its directory cannot be written to: {error}")
            }),
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
pub(super) fn listen_at(path: &Path, mode: u32) -> Result<(OwnedFd, SocketFile), String> {
    listen_within(path, mode, TURN)
}

fn listen_within(
    path: &Path,
    mode: u32,
    patience: Duration,
) -> Result<(OwnedFd, SocketFile), String> {
    let failed = |error: rustix::io::Errno| std::io::Error::from(error).to_string();
    let directory = openat(
        CWD,
        directory(path),
        OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(|error| format!("its directory cannot be opened: {}", failed(error)))?;
    // One server at a time looks and binds. Without a lock (some file systems have none) the window is small.
    let until = Instant::now() + patience;
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
        id: id(path).ok_or("it went away again")?,
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
fn remove_stale(path: &Path) -> Result<(), String> {
    let data = match std::fs::symlink_metadata(path) {
        Ok(data) => data,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.to_string()),
    };
    if !data.file_type().is_socket() {
        return Err("there is a file of that name that is no socket; it is left alone".into());
    }
    match UnixStream::connect(path) {
        Ok(_) => Err("a server listens there already".into()),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(|error| {
                format!("the socket of an ended server cannot be removed: {error}")
            })
        }
        Err(error) => Err(format!(
            "it cannot be told whether a server listens there: {error}"
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
            assert_eq!(
                listen_at(&path, mode).unwrap_err(),
                "a server listens there already"
            );
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
        let stale = id(&path);
        let (_socket, file) = listen_at(&path, 0o600).unwrap();
        UnixStream::connect(&path).unwrap();
        // It belongs to another server by now.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        assert_ne!(id(&path), stale);
        drop(file);
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        assert!(listen_at(&path, 0o600).unwrap_err().contains("no socket"));
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        let told = listen_at(&directory.path().join("no/s"), 0o600).unwrap_err();
        assert!(told.starts_with("its directory cannot be opened"), "{told}");
    }
}
