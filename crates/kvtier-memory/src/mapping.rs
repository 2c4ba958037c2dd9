//! One `mmap`ed range: unmapped on drop, watched by the fault guard, reached only through
//! bounds-checked raw-pointer copies.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

use crate::access::AccessError;
use crate::fault::{Registration, TableFull};
use kvtier_common::extent::Extent;

/// A mapping of `len` bytes that stays where it is until dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    page: usize,
    /// "arena" or "segment", for errors.
    what: &'static str,
    /// Taken back before the unmapping, see `drop`.
    registration: Option<Registration>,
}

// SAFETY: the mapping belongs to no thread; `base` is valid until drop, and all access is
// by raw-pointer copies that tolerate concurrent access by others (see the crate's notes).
unsafe impl Send for Mapping {}
// SAFETY: as above; the only method that hands out a reference into the mapped bytes asks for the mapping alone.
unsafe impl Sync for Mapping {}

/// Why a mapping could not be made.
pub(crate) enum MapError {
    System(rustix::io::Errno),
    Guard(TableFull),
}

impl Mapping {
    /// Maps private zeroed memory, from huge pages of 2 MiB if `huge`.
    pub(crate) fn anonymous(len: usize, huge: bool, what: &'static str) -> Result<Self, MapError> {
        let mut flags = MapFlags::PRIVATE;
        if huge {
            flags |= MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, prot, flags) };
        let page = if huge {
            HUGE_PAGE
        } else {
            rustix::param::page_size()
        };
        Self::adopt(base, len, page, what)
    }

    /// Maps the first `len` bytes of `file`, shared, for reading and writing.
    pub(crate) fn shared(
        file: BorrowedFd<'_>,
        len: usize,
        what: &'static str,
    ) -> Result<Self, MapError> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                prot,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )
        };
        Self::adopt(base, len, rustix::param::page_size(), what)
    }

    /// Maps the first `len` bytes of a file in a hugetlbfs, shared, and reserves the pages that it does not have yet. One that is
    /// writable has its file grown to `len` bytes by the system; others can be written once they are [made so](Self::allow_writes).
    pub(crate) fn huge(
        file: BorrowedFd<'_>,
        len: usize,
        prot: ProtFlags,
        what: &'static str,
    ) -> Result<Self, MapError> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, file, 0) };
        Self::adopt(base, len, HUGE_PAGE, what)
    }

    /// Lets a mapping that could only be read be written.
    pub(crate) fn allow_writes(&self) -> rustix::io::Result<()> {
        let all = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the range is our mapping, and more access than before breaks no other use.
        unsafe { mprotect(self.base.as_ptr().cast(), self.len, all) }
    }

    fn adopt(
        base: rustix::io::Result<*mut c_void>,
        len: usize,
        page: usize,
        what: &'static str,
    ) -> Result<Self, MapError> {
        let base = base.map_err(MapError::System)?;
        let base =
            NonNull::new(base.cast::<u8>()).ok_or(MapError::System(rustix::io::Errno::NOMEM))?;
        let mut mapping = Self {
            base,
            len,
            page,
            what,
            registration: None,
        };
        // From here on drop unmaps, also when the guard is full.
        let range = len.next_multiple_of(page);
        let registration =
            Registration::new(base.as_ptr().addr(), range, page).map_err(MapError::Guard)?;
        mapping.registration = Some(registration);
        Ok(mapping)
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> u64 {
        self.len as u64
    }

    pub(crate) fn page(&self) -> usize {
        self.page
    }

    /// The pages lost so far: from the lowest to the highest, as offsets into the mapping.
    pub(crate) fn poisoned(&self) -> Option<Extent> {
        let (low, high) = self.registration.as_ref()?.poisoned()?;
        let offset = (low - self.base.as_ptr().addr()) as u64;
        Some(Extent::new(offset, (high - low) as u64))
    }

    /// Checks that `len` bytes at `offset` lie inside and returns the address of the first.
    pub(crate) fn locate(&self, offset: u64, len: u64) -> Result<NonNull<u8>, AccessError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len());
        if !inside {
            return Err(AccessError::OutOfBounds {
                what: self.what,
                offset,
                len,
                limit: self.len(),
            });
        }
        // SAFETY: offset <= len of the mapping, which is a single allocation from `base`.
        Ok(unsafe { self.base.add(offset as usize) })
    }

    /// Fails if any page of the range was lost. Called *behind* a copy: the guard marks a page
    /// before it replaces it, so a copy of the replacement sees the mark here.
    pub(crate) fn check_poison(&self, range: Extent) -> Result<(), AccessError> {
        fence(Ordering::SeqCst);
        match self.poisoned() {
            Some(lost) if lost.overlaps(&range) => Err(self.lost()),
            _ => Ok(()),
        }
    }

    /// The error of a page that was lost.
    pub(crate) fn lost(&self) -> AccessError {
        AccessError::Poisoned { what: self.what }
    }

    /// Copies `bytes` into the mapping at `offset`.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let len = bytes.len() as u64;
        let to = self.locate(offset, len)?;
        // SAFETY: `to` has `len` bytes (checked above); `bytes` is private memory and
        // cannot overlap, since references into a mapping exist only while nothing else can reach it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        self.check_poison(Extent::new(offset, len))
    }

    /// Copies bytes at `offset` to `out`, whose bytes are undefined on error.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let len = out.len() as u64;
        let from = self.locate(offset, len)?;
        // SAFETY: `from` has `len` bytes (checked above); `out` is memory that this call has alone and that cannot overlap,
        // since references into a mapping exist only while nothing else can reach it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), out.as_mut_ptr(), out.len()) };
        self.check_poison(Extent::new(offset, len))
    }

    /// All bytes of a mapping of private memory.
    ///
    /// # Safety
    /// No other process maps this memory, and the system has no transfer in flight from or to it.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `base` has `len` initialised bytes until drop; `&mut self` excludes all copies of this process, and the
        // caller all others.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Appends `len` bytes at `offset` to `buffer`, which is left as it was on error.
    pub(crate) fn read_into(
        &self,
        offset: u64,
        len: u64,
        buffer: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        let from = self.locate(offset, len)?;
        let count = len as usize;
        buffer
            .try_reserve(count)
            .map_err(|_| AccessError::OutOfMemory { len })?;
        let old = buffer.len();
        // SAFETY: `from` has `count` bytes (checked above) and the spare capacity of `buffer` takes
        // them; the two cannot overlap. The new length is set once the bytes are there.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), buffer.as_mut_ptr().add(old), count);
            buffer.set_len(old + count);
        }
        self.check_poison(Extent::new(offset, len))
            .inspect_err(|_| buffer.truncate(old))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Out of the guard's table first: once unmapped, the addresses may become someone
        // else's, whose faults are not ours to hide.
        self.registration = None;
        // SAFETY: this is the mapping made at creation, and nothing can use it any more.
        // Failure would mean a bad address, which cannot be.
        let _ = unsafe {
            munmap(
                self.base.as_ptr().cast(),
                self.len.next_multiple_of(self.page),
            )
        };
    }
}

/// Bytes of a huge page (x86-64 and arm64 with 4 KiB base pages).
pub(crate) const HUGE_PAGE: usize = 2 << 20;
