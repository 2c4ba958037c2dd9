//! PyTorch's reference counters, which keep the owning process from reusing shared memory.
//!
//! A shared-memory file has a header of 64 bytes and 10 000 counters (i64). The owner sets one to 1 per shared storage,
//! and the process that opened the storage decrements it once when done. The file belongs to the other process and may
//! shrink at any time, so it is read and written with system calls and never mapped here.
//!
//! The lock guards the turn of a decrement, of all of this process; no other is acquired inside.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_common::sync::Mutex;
use kvtier_memory::FileId;
use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::shm::{self, OFlags};

use crate::error::LayoutError;

/// Prefix of the file names: `/torch_<process>_<random>_<number>`.
const PREFIX: &str = "/torch_";
/// Maximum length of a file name.
const NAME_MAX: usize = 255;
/// Bytes before the counters.
const HEADER_BYTES: u64 = 64;
/// Counters per file.
const COUNTERS: u64 = 10_000;

/// Symbolic links are not followed, and opening a pipe does not block.
const OPEN_FLAGS: OFlags = OFlags::from_bits_retain(
    rustix::fs::OFlags::NOFOLLOW.bits() | rustix::fs::OFlags::NONBLOCK.bits(),
);

/// Serializes decrements, which read and write in two calls. Only this process decrements its counters.
static DECREMENT_LOCK: Mutex<()> = Mutex::new(());

/// One use of a storage; dropping it decrements the counter. Drop it after the mapping.
#[derive(Debug)]
pub struct RefCounter {
    name: String,
    index: u64,
    is_left: AtomicBool,
}

impl RefCounter {
    /// Checks only the name and the index: the file does not exist if the owner has exited or has another `/dev/shm`.
    ///
    /// # Errors
    /// A name of another form, or an index beyond the last counter.
    pub fn new(name: &[u8], index: u64) -> Result<Self, LayoutError> {
        let Some(text) = checked(name) else {
            let shown = String::from_utf8_lossy(&name[..name.len().min(64)]).into_owned();
            return Err(LayoutError::new(
                "handle[4]",
                format!("{shown:?}"),
                "a name as PyTorch gives it, /torch_ and letters, digits and underscores",
            ));
        };
        if index >= COUNTERS {
            return Err(LayoutError::new(
                "handle[5]",
                index,
                format!("0 to below {COUNTERS}"),
            ));
        }
        Ok(Self {
            name: text.to_owned(),
            index,
            is_left: AtomicBool::new(false),
        })
    }

    /// Leaves the decrement to another process of the server, which uses the storage after this one.
    pub fn leave(&self) {
        self.is_left.store(true, Ordering::Relaxed);
    }

    /// Decrements the counter; returns whether it was above 0.
    fn decrement(&self) -> Result<bool, Errno> {
        let _one = DECREMENT_LOCK.lock();
        let file = shm::open(&self.name, OFlags::RDWR | OPEN_FLAGS, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        let at = HEADER_BYTES + self.index * 8;
        let in_file = u64::try_from(stat.st_size).is_ok_and(|bytes| bytes >= at + 8);
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !in_file {
            return Ok(false);
        }
        let count = read(&file, at)?;
        if count <= 0 {
            return Ok(false);
        }
        let written = rustix::io::pwrite(&file, &(count - 1).to_ne_bytes(), at)?;
        Ok(written == 8)
    }
}

/// The name, if it has the form of a counter file's.
fn checked(name: &[u8]) -> Option<&str> {
    std::str::from_utf8(name).ok().filter(|name| {
        let rest = name.strip_prefix(PREFIX).unwrap_or_default();
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        !rest.is_empty() && name.len() <= NAME_MAX && rest.bytes().all(plain)
    })
}

/// Process id in a file's name, in that process's own PID namespace; above 0.
pub(super) fn process_of(name: &[u8]) -> Option<i32> {
    let (process, _) = checked(name)?.strip_prefix(PREFIX)?.split_once('_')?;
    let digits = process.bytes().all(|byte| byte.is_ascii_digit());
    process.parse().ok().filter(|pid| digits && *pid > 0)
}

/// The file of this name, if it exists.
pub(super) fn file_of(name: &[u8]) -> Option<FileId> {
    FileId::named(checked(name)?)
}

/// Reads a counter; 0 if the file ends before it.
fn read(file: &OwnedFd, at: u64) -> Result<i64, Errno> {
    let mut bytes = [0; 8];
    let read = rustix::io::pread(file, &mut bytes, at)?;
    Ok(if read == 8 {
        i64::from_ne_bytes(bytes)
    } else {
        0
    })
}

impl Drop for RefCounter {
    fn drop(&mut self) {
        if !self.is_left.load(Ordering::Relaxed) {
            // Without the file there is no counter: the owner has exited, or frees its memory when it exits.
            let _ = self.decrement();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{FileExt, symlink};
    use std::path::PathBuf;
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// A counter file as PyTorch makes it, removed on drop.
    struct Counters {
        name: String,
        path: PathBuf,
        file: File,
    }

    impl Counters {
        fn new(bytes: u64) -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("/torch_{}_77_{number}", std::process::id());
            let path = PathBuf::from(format!("/dev/shm{name}"));
            let mut options = File::options();
            let file = options.read(true).write(true).create_new(true);
            let file = file.open(&path).unwrap();
            file.set_len(bytes).unwrap();
            Self { name, path, file }
        }

        fn set(&self, index: u64, value: i64) {
            let bytes = value.to_ne_bytes();
            self.file.write_all_at(&bytes, 64 + index * 8).unwrap();
        }

        fn get(&self, index: u64) -> i64 {
            let mut bytes = [0; 8];
            self.file.read_exact_at(&mut bytes, 64 + index * 8).unwrap();
            i64::from_ne_bytes(bytes)
        }

        fn counter(&self, index: u64) -> RefCounter {
            RefCounter::new(self.name.as_bytes(), index).unwrap()
        }
    }

    impl Drop for Counters {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Size of PyTorch's files.
    const BYTES: u64 = 80_064;

    #[test]
    fn drop_decrements_its_own_counter_once() {
        let counters = Counters::new(BYTES);
        for index in 0..10_000 {
            counters.set(index, 1);
        }
        counters.file.write_all_at(&[7; 64], 0).unwrap();
        let ours = counters.counter(9_999);
        assert_eq!(counters.get(9_999), 1);
        drop(ours);
        assert_eq!(counters.get(9_999), 0);
        assert!((0..9_999).all(|index| counters.get(index) == 1));
        let mut header = [0; 64];
        counters.file.read_exact_at(&mut header, 0).unwrap();
        assert_eq!(header, [7; 64]);
        // Not decremented below 0.
        drop(counters.counter(9_999));
        assert_eq!(counters.get(9_999), 0);
        // Left to the next process.
        let left = counters.counter(7);
        left.leave();
        drop(left);
        assert_eq!(counters.get(7), 1);
        counters.set(3, 2);
        drop(counters.counter(3));
        assert_eq!(counters.get(3), 1);
        counters.set(4, -5);
        drop(counters.counter(4));
        assert_eq!(counters.get(4), -5);
        assert_eq!(counters.file.metadata().unwrap().len(), BYTES);
    }

    #[test]
    fn names_of_other_files_are_refused() {
        let long = format!("/torch_{}", "1".repeat(300));
        for name in [
            b"".as_slice(),
            b"/",
            b"/torch_",
            b"torch_1_2_3",
            b"/lmcache_kv_1_2",
            b"/torch_1/../x",
            b"/torch_../../etc/passwd",
            b"/torch_1_2_3\0",
            b"/torch_1 2",
            b"/torch_\xff",
            long.as_bytes(),
        ] {
            let error = RefCounter::new(name, 0).unwrap_err().to_string();
            assert!(error.starts_with("handle[4] is "), "{error}");
            assert!(error.len() < 400, "{error}");
        }
        let error = RefCounter::new(b"/torch_1_2_3", 10_000).unwrap_err();
        assert!(error.to_string().contains("handle[5] is 10000"), "{error}");
    }

    #[test]
    fn name_identifies_the_process_and_the_file() {
        let process = |name: &str| process_of(name.as_bytes());
        assert_eq!(process("/torch_4711_2_3"), Some(4711));
        for name in [
            "/torch_0_2_3",
            "/torch_-1_2",
            "/torch_1",
            "/torch_a1_2",
            "/torch_99999999999_2",
            "/x_1_2",
        ] {
            assert_eq!(process(name), None, "{name}");
        }
        let (one, two) = (Counters::new(BYTES), Counters::new(BYTES));
        let file = |counters: &Counters| file_of(counters.name.as_bytes());
        assert!(file(&one).is_some() && file(&one) == file(&one) && file(&one) != file(&two));
        fs::remove_file(&two.path).unwrap();
        assert_eq!(file(&two), None);
    }

    #[test]
    fn missing_short_and_special_files_are_untouched() {
        let deleted = Counters::new(BYTES);
        fs::remove_file(&deleted.path).unwrap();
        assert_eq!(deleted.counter(0).decrement(), Err(Errno::NOENT));

        let short = Counters::new(64 + 8 * 5);
        short.set(4, 1);
        assert_eq!(short.counter(5).decrement(), Ok(false));
        assert_eq!(short.file.metadata().unwrap().len(), 64 + 8 * 5);
        assert_eq!(short.counter(4).decrement(), Ok(true));

        let target = Counters::new(BYTES);
        target.set(0, 1);
        let link = Counters::new(0);
        fs::remove_file(&link.path).unwrap();
        symlink(&target.path, &link.path).unwrap();
        assert_eq!(link.counter(0).decrement(), Err(Errno::LOOP));
        assert_eq!(target.get(0), 1);

        let pipe = Counters::new(0);
        fs::remove_file(&pipe.path).unwrap();
        let made = rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe.path,
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        );
        made.unwrap();
        assert_eq!(pipe.counter(0).decrement(), Ok(false));
    }
}
