//! POSIX shared memory named after its process: `/dev/shm/kvtier-cuda-fake-PID-START-LIBRARY-WHAT`.
//!
//! START is the process's start in clock ticks, so a reused PID is another process; LIBRARY distinguishes copies
//! of the fake driver in one process.

use std::ffi::CString;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

const PREFIX: &str = "kvtier-cuda-fake-";
const FOLDER: &str = "/dev/shm";

/// A process, as a handle names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner {
    pub pid: u32,
    pub start: u64,
    pub library: u64,
}

static US: LazyLock<Owner> = LazyLock::new(|| {
    let pid = std::process::id();
    Owner {
        pid,
        start: start_of(pid).unwrap_or(0),
        library: std::ptr::from_ref(&US).addr() as u64,
    }
});

/// The start of a process that lives, in clock ticks since boot.
fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok())?
}

impl Owner {
    pub(crate) fn us() -> Self {
        *US
    }

    pub(crate) fn lives(&self) -> bool {
        start_of(self.pid) == Some(self.start)
    }

    fn path(&self, what: &str) -> String {
        format!(
            "{FOLDER}/{PREFIX}{}-{}-{:x}-{what}",
            self.pid, self.start, self.library
        )
    }
}

/// Removes the files of dead processes, and at exit those of this one.
pub(crate) fn clean_up() {
    remove(|owner| !owner.lives());
    extern "C" fn at_exit() {
        // A forked child inherits this function, but the files are its parent's.
        if std::process::id() == Owner::us().pid {
            remove(|owner| *owner == Owner::us());
        }
    }
    unsafe { libc::atexit(at_exit) };
}

fn remove(matches: impl Fn(&Owner) -> bool) {
    let Ok(folder) = std::fs::read_dir(FOLDER) else {
        return;
    };
    for entry in folder.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(owner_of);
        if owner.is_some_and(|owner| matches(&owner)) {
            _ = std::fs::remove_file(entry.path());
        }
    }
}

fn owner_of(name: &str) -> Option<Owner> {
    let mut parts = name.strip_prefix(PREFIX)?.split('-');
    Some(Owner {
        pid: parts.next()?.parse().ok()?,
        start: parts.next()?.parse().ok()?,
        library: u64::from_str_radix(parts.next()?, 16).ok()?,
    })
}

/// A file of this process, removed when dropped; open descriptors keep its bytes.
pub(crate) struct Segment {
    pub fd: OwnedFd,
    path: String,
}

impl Segment {
    pub(crate) fn create(what: &str, bytes: u64) -> Option<Self> {
        let path = Owner::us().path(what);
        let fd = open(&path, libc::O_CREAT | libc::O_EXCL)?;
        let segment = Self { fd, path };
        let sized = unsafe { libc::ftruncate(segment.fd.as_raw_fd(), bytes as i64) } == 0;
        sized.then_some(segment)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        _ = std::fs::remove_file(&self.path);
    }
}

/// A segment of a process that lives, by name.
pub(crate) fn open_of(owner: &Owner, what: &str) -> Option<OwnedFd> {
    if !owner.lives() {
        return None;
    }
    open(&owner.path(what), 0)
}

fn open(path: &str, flags: i32) -> Option<OwnedFd> {
    let path = CString::new(path).ok()?;
    let flags = flags | libc::O_RDWR | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let fd = unsafe { libc::open(path.as_ptr(), flags, 0o600) };
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether a descriptor is a physical allocation of some fake driver.
pub(crate) fn is_ours(fd: i32) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|to| {
        to.to_string_lossy()
            .starts_with(&format!("{FOLDER}/{PREFIX}"))
    })
}

pub(crate) fn bytes_of(fd: i32) -> u64 {
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    if unsafe { libc::fstat(fd, &mut stat) } == 0 {
        stat.st_size as u64
    } else {
        0
    }
}

/// Mapping in which the fake driver itself sees device memory. Callers get other addresses, at which nothing can be read, as
/// with a real device.
pub(crate) struct Mapping {
    at: *mut u8,
    bytes: usize,
    users: AtomicUsize,
}

// The bytes are shared with other processes anyway; only copies reach them.
unsafe impl Send for Mapping {}
unsafe impl Sync for Mapping {}

impl Mapping {
    /// All of a file.
    pub(crate) fn of(fd: &OwnedFd, bytes: u64) -> Option<Self> {
        Self::new(
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd.as_raw_fd(),
        )
    }

    /// Addresses with nothing behind them.
    pub(crate) fn reserve(bytes: u64) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::new(bytes, libc::PROT_NONE, flags, -1)
    }

    fn new(bytes: u64, protection: i32, flags: i32, fd: i32) -> Option<Self> {
        let bytes = usize::try_from(bytes).ok()?;
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0) };
        (at != libc::MAP_FAILED).then_some(Self {
            at: at.cast(),
            bytes,
            users: AtomicUsize::new(0),
        })
    }

    /// Puts a file into reserved addresses.
    pub(crate) fn place(&self, offset: u64, bytes: u64, fd: &OwnedFd) -> bool {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        self.fixed(
            offset,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            fd.as_raw_fd(),
        )
    }

    /// Takes the value, unless it is in use.
    pub(crate) fn clear(&self, offset: u64, bytes: u64) {
        if !self.in_use() {
            let flags =
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            self.fixed(offset, bytes, libc::PROT_NONE, flags, -1);
        }
    }

    fn fixed(&self, offset: u64, bytes: u64, protection: i32, flags: i32, fd: i32) -> bool {
        // Inside this mapping: `offset` and `bytes` were checked against the region it belongs to.
        let at = self.at(offset).cast();
        unsafe { libc::mmap(at, bytes as usize, protection, flags, fd, 0) == at }
    }

    pub(crate) fn at(&self, offset: u64) -> *mut u8 {
        self.at.wrapping_add(offset as usize)
    }

    pub(crate) fn in_use(&self) -> bool {
        self.users.load(Ordering::Acquire) > 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}

/// A reference held by work on a stream.
pub(crate) struct Held(std::sync::Arc<Mapping>);

impl Held {
    pub(crate) fn new(mapping: &std::sync::Arc<Mapping>) -> Self {
        mapping.users.fetch_add(1, Ordering::AcqRel);
        Self(mapping.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::AcqRel);
    }
}
