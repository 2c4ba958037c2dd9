//! POSIX shared memory named after its process: `/dev/shm/kvtier-cuda-fake-PID-START-WHAT`.
//!
//! START is the process's start in clock ticks, so a reused PID is another process. A handle for other processes is such
//! a name without the prefix, and the device in its last byte.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::LazyLock;

use crate::abi::*;

const FOLDER: &str = "/dev/shm";
const PREFIX: &str = "kvtier-cuda-fake-";

/// PID and start of this process.
static US: LazyLock<String> = LazyLock::new(|| {
    let pid = std::process::id();
    format!("{pid}-{}-", start_of(pid).unwrap_or(0))
});

/// The start of a process that lives, in clock ticks since boot.
fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok())?
}

/// Whether the process of a name lives.
fn lives(name: &str) -> bool {
    let mut numbers = name.split('-').map(|part| part.parse::<u64>().ok());
    let pid = numbers.next().flatten().and_then(|n| u32::try_from(n).ok());
    let start = numbers.next().flatten();
    start.is_some() && pid.and_then(start_of) == start
}

/// Removes the files of dead processes, and at exit those of this one.
pub(crate) fn clean_up() {
    remove(|name| !lives(name));
    extern "C" fn at_exit() {
        // A forked child inherits this function, but the files are its parent's.
        if US.starts_with(&format!("{}-", std::process::id())) {
            remove(|name| name.starts_with(&*US));
        }
    }
    unsafe { libc::atexit(at_exit) };
}

fn remove(matches: impl Fn(&str) -> bool) {
    for entry in std::fs::read_dir(FOLDER).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if name.is_some_and(&matches) {
            _ = std::fs::remove_file(entry.path());
        }
    }
}

fn open(name: &str, create: bool) -> Option<OwnedFd> {
    let mut options = std::fs::File::options();
    options.read(true).write(true).create_new(create);
    options.mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let file = options.open(format!("{FOLDER}/{PREFIX}{name}"));
    file.ok().map(OwnedFd::from)
}

/// A file of this process, removed when dropped; open descriptors and mappings keep its bytes.
pub(crate) struct Segment {
    name: String,
}

impl Segment {
    /// Creates the file; the kind is a letter.
    pub(crate) fn create(kind: char, id: u64, bytes: u64) -> CudaResult<(Self, OwnedFd)> {
        let name = format!("{}{kind}{id:x}", *US);
        let fd = open(&name, true).ok_or(Fault::Code(ERROR_OUT_OF_MEMORY))?;
        let segment = Self { name };
        match unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as i64) } {
            0 => Ok((segment, fd)),
            _ => Err(Fault::Code(ERROR_OUT_OF_MEMORY)),
        }
    }

    pub(crate) fn handle(&self, device: usize) -> [u8; 64] {
        let mut handle = [0; 64];
        handle[..self.name.len()].copy_from_slice(self.name.as_bytes());
        handle[63] = device as u8;
        handle
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        _ = std::fs::remove_file(format!("{FOLDER}/{PREFIX}{}", self.name));
    }
}

/// Opens the file of a handle, whose process must live.
pub(crate) fn open_handle(handle: &[u8; 64], kind: char) -> CudaResult<OwnedFd> {
    let end = handle.iter().position(|&b| b == 0).unwrap_or(63);
    let name = std::str::from_utf8(&handle[..end]).unwrap_or_default();
    let what = name.rsplit('-').next().unwrap_or_default();
    if name.contains(['/', '.']) || !what.starts_with(kind) {
        let why = "these 64 bytes are no such handle";
        return Err(Fault::Wrong(ERROR_INVALID_HANDLE, why.into()));
    }
    let fd = if lives(name) { open(name, false) } else { None };
    fd.ok_or(Fault::Code(ERROR_INVALID_HANDLE))
}

/// Opens a handle as `cuIpc` functions do: not one of this process, nor of another device, which is no peer here.
pub(crate) fn open_foreign(handle: &[u8; 64], kind: char, device: usize) -> CudaResult<OwnedFd> {
    let fd = open_handle(handle, kind)?;
    let (code, why) = if handle.starts_with(US.as_bytes()) {
        (ERROR_INVALID_CONTEXT, "the handle is of this very process")
    } else if usize::from(handle[63]) != device {
        let why = "the handle is of another device";
        (ERROR_PEER_ACCESS_UNSUPPORTED, why)
    } else {
        return Ok(fd);
    };
    Err(Fault::Wrong(code, why.into()))
}

/// Whether a descriptor is a physical allocation of some fake driver.
pub(crate) fn is_ours(fd: i32) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{fd}"))
        .is_ok_and(|to| to.to_string_lossy().contains(PREFIX))
}

pub(crate) fn bytes_of(fd: &OwnedFd) -> u64 {
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) };
    stat.st_size as u64
}

/// Mapping in which the fake driver itself sees device memory. Callers get other addresses, at which nothing can be read, as
/// with a real device. Work on a stream has a reference.
pub(crate) struct Mapping {
    at: *mut u8,
    bytes: usize,
}

// The bytes are shared with other processes anyway; only copies reach them.
unsafe impl Send for Mapping {}
unsafe impl Sync for Mapping {}

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
const NOTHING: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

impl Mapping {
    /// All of a file.
    pub(crate) fn of(fd: &OwnedFd) -> CudaResult<Self> {
        Self::new(bytes_of(fd), READ_WRITE, libc::MAP_SHARED, fd.as_raw_fd())
    }

    /// Addresses with nothing behind them.
    pub(crate) fn reserve(bytes: u64) -> CudaResult<Self> {
        Self::new(bytes, libc::PROT_NONE, NOTHING, -1)
    }

    fn new(bytes: u64, protection: i32, flags: i32, fd: i32) -> CudaResult<Self> {
        let bytes = bytes as usize;
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(Fault::Code(ERROR_OUT_OF_MEMORY));
        }
        let at = at.cast();
        Ok(Self { at, bytes })
    }

    /// Puts a file into reserved addresses, or nothing again. The range was checked.
    pub(crate) fn place(&self, offset: u64, bytes: u64, file: Option<&OwnedFd>) {
        let (protection, flags, fd) = match file {
            Some(fd) => (READ_WRITE, libc::MAP_SHARED, fd.as_raw_fd()),
            None => (libc::PROT_NONE, NOTHING, -1),
        };
        let (at, flags) = (self.at(offset).cast(), flags | libc::MAP_FIXED);
        unsafe { libc::mmap(at, bytes as usize, protection, flags, fd, 0) };
    }

    pub(crate) fn at(&self, offset: u64) -> *mut u8 {
        self.at.wrapping_add(offset as usize)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}
