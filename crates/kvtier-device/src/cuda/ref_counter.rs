//! PyTorch's reference counters: what keeps the lending process from giving its memory to others while we use it.
//!
//! A file in shared memory has a header of 64 bytes and 10 000 counters, i64 each. The lender sets one to 1 for each
//! storage it lends; whoever opened the storage counts it down once when it is done. The file is the other process's:
//! it is read and written in place and never mapped here, for it may shrink at any time. The lender has it mapped.

use std::os::fd::OwnedFd;

use kvtier_memory::FileId;
use parking_lot::Mutex;
use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::shm::{self, OFlags};

use crate::error::LayoutError;

/// What the names of these files begin with: `/torch_<process>_<random>_<number>`.
const PREFIX: &str = "/torch_";
/// Longest name of a file.
const NAME_MAX: usize = 255;
/// Bytes before the counters.
const HEADER_BYTES: u64 = 64;
/// Counters of a file.
const COUNTERS: u64 = 10_000;

/// Links are not followed, and nobody is waited for who would have to open the other end of a pipe.
const CAREFUL: OFlags = OFlags::from_bits_retain(
    rustix::fs::OFlags::NOFOLLOW.bits() | rustix::fs::OFlags::NONBLOCK.bits(),
);

/// Reading and writing are two calls; of the processes that use a storage only ours does both.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A counter that is ours to count down: done when this is dropped. Drop it after the mapping.
#[derive(Debug)]
pub struct RefCounter {
    name: String,
    index: u64,
}

impl RefCounter {
    /// Looks at the name and the index only: the file need not be there, as it is not when the lender is gone or
    /// shares no files in memory with us.
    ///
    /// # Errors
    /// A name that is no such file's, or an index behind its end.
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
        })
    }

    /// Counts down; says whether there was something to count.
    fn give_back(&self) -> Result<bool, Errno> {
        let _one = ONE_AT_A_TIME.lock();
        let file = shm::open(&self.name, OFlags::RDWR | CAREFUL, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        let at = HEADER_BYTES + self.index * 8;
        let has_it = u64::try_from(stat.st_size).is_ok_and(|bytes| bytes >= at + 8);
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !has_it {
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

/// The name, if it is one of such a file.
fn checked(name: &[u8]) -> Option<&str> {
    std::str::from_utf8(name).ok().filter(|name| {
        let rest = name.strip_prefix(PREFIX).unwrap_or_default();
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        !rest.is_empty() && name.len() <= NAME_MAX && rest.bytes().all(plain)
    })
}

/// The process that a file's name says, in that process's own PID namespace; above 0.
pub(super) fn process_of(name: &[u8]) -> Option<i32> {
    let (process, _) = checked(name)?.strip_prefix(PREFIX)?.split_once('_')?;
    let digits = process.bytes().all(|byte| byte.is_ascii_digit());
    process.parse().ok().filter(|pid| digits && *pid > 0)
}

/// The file of this name, if it is there.
pub(super) fn file_of(name: &[u8]) -> Option<FileId> {
    FileId::named(checked(name)?)
}

/// 0 when the file ends before.
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
        // Without the file nobody counts: the lender is gone, or will free its memory when it ends.
        let _ = self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{FileExt, symlink};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// A file as PyTorch makes it, removed at the end.
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

    /// What PyTorch's files have.
    const BYTES: u64 = 80_064;

    #[test]
    fn the_counter_goes_down_once_at_the_end_and_no_other_does() {
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
        // Nobody's: the lender may have given it to another storage by now, at 0 it has not.
        drop(counters.counter(9_999));
        assert_eq!(counters.get(9_999), 0);
        counters.set(3, 2);
        drop(counters.counter(3));
        assert_eq!(counters.get(3), 1);
        counters.set(4, -5);
        drop(counters.counter(4));
        assert_eq!(counters.get(4), -5);
        assert_eq!(counters.file.metadata().unwrap().len(), BYTES);
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
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
    fn a_name_says_the_process_and_leads_to_one_file() {
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
    fn a_file_that_is_gone_short_or_no_file_is_left_alone() {
        let gone = Counters::new(BYTES);
        fs::remove_file(&gone.path).unwrap();
        assert_eq!(gone.counter(0).give_back(), Err(Errno::NOENT));

        let short = Counters::new(64 + 8 * 5);
        short.set(4, 1);
        assert_eq!(short.counter(5).give_back(), Ok(false));
        assert_eq!(short.file.metadata().unwrap().len(), 64 + 8 * 5);
        assert_eq!(short.counter(4).give_back(), Ok(true));

        let target = Counters::new(BYTES);
        target.set(0, 1);
        let link = Counters::new(0);
        fs::remove_file(&link.path).unwrap();
        symlink(&target.path, &link.path).unwrap();
        assert_eq!(link.counter(0).give_back(), Err(Errno::LOOP));
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
        assert_eq!(pipe.counter(0).give_back(), Ok(false));
    }
}
