//! The device or file, its superblock, and its lock.

use std::fs::{File, OpenOptions};
use std::io::{Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use kvtier_memory::uring::Tail;
use ring::rand::{SecureRandom as _, SystemRandom};
use rustix::fs::{FallocateFlags, FileType, FlockOperation, OFlags};
use rustix::io::Errno;

use super::format::{BLOCK, First, Geometry, START, SUPERBLOCKS, Superblock, foreign};
use super::options::RawOptions;
use kvtier_l2::{ErrorKind, L2Error};

/// An open device of this format, locked for this process.
pub(super) struct Device {
    path: PathBuf,
    pub(super) superblock: Superblock,
    /// Past the page cache, if that is wanted and possible.
    direct: Option<File>,
    buffered: File,
    /// How often it was synced.
    #[cfg(test)]
    pub(super) syncs: std::sync::atomic::AtomicU64,
}

impl Device {
    /// Opens and locks it, and formats it if it is empty; a file that does not exist is created.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] with the path and what to do about it.
    pub(super) fn open(options: &RawOptions) -> Result<Self, L2Error> {
        let path = &options.device_path;
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            refused(path, &format!("cannot be {what}: {error}"))
        };
        let file = open(path).map_err(|error| failed("opened", &error))?;
        let kind = file
            .metadata()
            .map_err(|error| failed("examined", &error))?
            .file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(refused(path, "is neither a block device nor a file"));
        }
        lock(path, &file)?;
        let geometry = options.geometry();
        if kind.is_file() {
            // Space that is not there would be missed at a store.
            reserve(&file, geometry.bytes()).map_err(|error| failed("preallocated", &error))?;
        }
        let size = size(&file).map_err(|error| failed("examined", &error))?;
        if size < geometry.bytes() {
            let (needed, largest) = (geometry.bytes(), options.largest_capacity(size));
            let what = format!(
                "has {size} bytes, and max_capacity_gb {} takes {needed}; give at most {largest:.3}",
                options.max_capacity_gb
            );
            return Err(refused(path, &what));
        }
        let superblock = superblock(path, &file, geometry, options.force)?;
        let direct = if options.use_odirect {
            direct(path, &file).inspect_err(|error| {
                tracing::warn!(
                    device_path = %path.display(), %error,
                    "direct I/O is not possible there; using the page cache"
                );
            })
        } else {
            Err(Errno::OPNOTSUPP)
        };
        Ok(Self {
            path: path.clone(),
            superblock,
            direct: direct.ok(),
            buffered: file,
            #[cfg(test)]
            syncs: Default::default(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.superblock.geometry
    }

    /// Returns the offset of an object on the device.
    pub(super) fn offset_of(&self, offset: u64) -> u64 {
        self.geometry().data_offset() + offset
    }

    /// Whether it is used past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Returns a descriptor for memory that is aligned to blocks, or not.
    ///
    /// # Errors
    /// Too many are open.
    pub(super) fn file(&self, is_aligned: bool) -> Result<OwnedFd, L2Error> {
        let file = match &self.direct {
            Some(direct) if is_aligned => direct,
            _ => &self.buffered,
        };
        file.try_clone().map(OwnedFd::from).map_err(|error| {
            let what = format!("{}: no further descriptor: {error}", self.path.display());
            L2Error::new(ErrorKind::Unavailable, what)
        })
    }

    fn blocks(&self) -> &File {
        self.direct.as_ref().unwrap_or(&self.buffered)
    }

    /// Reads blocks.
    pub(super) fn read(&self, to: &mut Tail, at: u64) -> Result<(), Errno> {
        let read = self.blocks().read_exact_at(to, at);
        read.map_err(|error| errno(&error))
    }

    /// Writes blocks.
    pub(super) fn write(&self, from: &Tail, at: u64) -> Result<(), Errno> {
        let written = self.blocks().write_all_at(from, at);
        written.map_err(|error| errno(&error))
    }

    /// Makes what was written survive a loss of power.
    pub(super) fn sync(&self) -> Result<(), Errno> {
        #[cfg(test)]
        self.syncs
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        rustix::fs::fdatasync(&self.buffered)
    }

    /// Whether the device is still there and this one's.
    ///
    /// # Errors
    /// What is wrong with it, without its path.
    pub(super) fn check(&self) -> Result<(), L2Error> {
        let lost = |what: String| L2Error::new(ErrorKind::Unavailable, what);
        let mut block = Tail::default();
        block.resize(BLOCK as usize);
        self.read(&mut block, SUPERBLOCKS[0])
            .map_err(|error| lost(format!("cannot be read: {error}")))?;
        match Superblock::decode(&block) {
            First::Ours(found) if found.id == self.superblock.id => {}
            _ => return Err(lost("has other contents than when it was opened".into())),
        }
        // After a restart, what is stored now would not be there.
        let there = rustix::fs::stat(&self.path);
        let there = there.map_err(|error| lost(format!("is not there: {error}")))?;
        let own = rustix::fs::fstat(&self.buffered).map_err(|error| lost(error.to_string()))?;
        if identity(&there) == identity(&own) {
            Ok(())
        } else {
            Err(lost(
                "is another device or file than the one that was opened".into(),
            ))
        }
    }

    /// Lets others use it.
    pub(super) fn unlock(&self) {
        // It fails only if the system has lost the file.
        let _ = rustix::fs::flock(&self.buffered, FlockOperation::Unlock);
    }

    /// The error of a system call.
    pub(super) fn error(&self, action: &str, error: Errno) -> L2Error {
        let what = format!("cannot {action} {}: {error}", self.path.display());
        L2Error::new(ErrorKind::Unavailable, what)
    }
}

fn refused(path: &Path, what: &str) -> L2Error {
    let message = format!("device_path {} {what}", path.display());
    L2Error::new(ErrorKind::Refused, message)
}

fn open(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    // Not if it is mounted, or a part of something that is in use.
    let is_device = std::fs::metadata(path).is_ok_and(|it| it.file_type().is_block_device());
    if is_device {
        options.custom_flags(OFlags::EXCL.bits() as i32)
    } else {
        options.create(true).mode(0o600)
    };
    options.open(path)
}

/// Opens the same device past the page cache.
fn direct(path: &Path, opened: &File) -> Result<File, Errno> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    options.custom_flags(OFlags::DIRECT.bits() as i32);
    let file = options.open(path).map_err(|error| errno(&error))?;
    let both = (rustix::fs::fstat(&file)?, rustix::fs::fstat(opened)?);
    if identity(&both.0) != identity(&both.1) {
        // The path leads to another one by now, which is not locked.
        return Err(Errno::STALE);
    }
    // A device may take larger blocks only.
    let mut block = Tail::default();
    block.resize(BLOCK as usize);
    file.read_exact_at(&mut block, 0)
        .map_err(|error| errno(&error))?;
    Ok(file)
}

/// What tells devices and files apart, whatever leads to them.
fn identity(stat: &rustix::fs::Stat) -> (u64, u64, u64) {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => (stat.st_rdev, 0, 0),
        _ => (0, stat.st_dev, stat.st_ino),
    }
}

/// The error of the system; a device that ends too early is one of I/O.
fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

fn lock(path: &Path, file: &File) -> Result<(), L2Error> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => Err(refused(
            path,
            "is in use by another server; a device belongs to one at a time",
        )),
        Err(error) => Err(refused(path, &format!("cannot be locked: {error}"))),
    }
}

fn reserve(file: &File, bytes: u64) -> Result<(), Errno> {
    if file.metadata().is_ok_and(|it| it.len() >= bytes) {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        // Not all file systems can.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => rustix::fs::ftruncate(file, bytes),
        result => result,
    }
}

fn size(file: &File) -> std::io::Result<u64> {
    // Unlike its metadata, right for devices too.
    let mut file = file;
    file.seek(SeekFrom::End(0))
}

/// Returns the superblock of a device, which is formatted if it is empty or that is forced.
fn superblock(
    path: &Path,
    file: &File,
    geometry: Geometry,
    force: bool,
) -> Result<Superblock, L2Error> {
    let mut start = vec![0; START as usize];
    let read = read_start(file, &mut start);
    read.map_err(|error| refused(path, &format!("cannot be read: {error}")))?;
    let found = SUPERBLOCKS.map(|at| Superblock::decode(&start[at as usize..][..BLOCK as usize]));
    let ours = found.iter().find(|found| matches!(found, First::Ours(_)));
    if let Some(First::Ours(ours)) = ours {
        if ours.geometry == geometry {
            if found[0] != found[1] {
                write(path, file, ours)?;
                tracing::warn!(device_path = %path.display(), "a damaged superblock was replaced by its copy");
            }
            return Ok(*ours);
        }
        if !force {
            let Geometry {
                records,
                data_bytes,
            } = ours.geometry;
            let what = format!(
                "was formatted for {data_bytes} bytes of objects and {records} records, and the configuration asks for {} and {}; \
                 give max_capacity_gb and slot_bytes as they were, or \"force\": true to lose what is there",
                geometry.data_bytes, geometry.records
            );
            return Err(refused(path, &what));
        }
    }
    let version = found.iter().find_map(|found| match found {
        First::Version(version) => Some(*version),
        _ => None,
    });
    if !force {
        if let Some(version) = version {
            let what = format!(
                "was formatted by another release (version {version}); use that, or \"force\": true to lose what is there"
            );
            return Err(refused(path, &what));
        }
        if let Some(what) = foreign(&start) {
            let what =
                format!("holds {what}; give an empty device, or \"force\": true to overwrite it");
            return Err(refused(path, &what));
        }
    }
    let mut id = [0; 32];
    SystemRandom::new()
        .fill(&mut id)
        .map_err(|_| refused(path, "cannot be formatted: the system has no random bytes"))?;
    let superblock = Superblock { id, geometry };
    // Other programs recognise what was there by more than the first blocks.
    file.write_all_at(&vec![0; START as usize], 0)
        .map_err(|error| refused(path, &format!("cannot be formatted: {error}")))?;
    write(path, file, &superblock)?;
    tracing::info!(
        device_path = %path.display(),
        bytes = geometry.data_bytes,
        records = geometry.records,
        "formatted a device"
    );
    Ok(superblock)
}

fn read_start(file: &File, to: &mut [u8]) -> std::io::Result<()> {
    let mut done = 0;
    while done < to.len() {
        // A small file ends earlier; the rest is zero.
        match file.read_at(&mut to[done..], done as u64)? {
            0 => return Ok(()),
            read => done += read,
        }
    }
    Ok(())
}

fn write(path: &Path, file: &File, superblock: &Superblock) -> Result<(), L2Error> {
    let block = superblock.encode();
    let written = SUPERBLOCKS
        .iter()
        .try_for_each(|at| file.write_all_at(&block, *at));
    let synced = written.and_then(|()| file.sync_data());
    synced.map_err(|error| refused(path, &format!("cannot be formatted: {error}")))
}
