//! Prefault: puts memory behind the pages of an arena before a transfer needs it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use rustix::io::Errno;
use rustix::mm::Advice;

use crate::access::AccessError;
use crate::mapping::Mapping;
use kvtier_common::extent::Extent;

/// How much is asked of the kernel at a time, some 100 µs. Small, because a thread that wants to change the
/// address space meanwhile waits for one of these, and page faults of others wait behind it.
const STEP: usize = 512 << 10;

/// How far prefaulting has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefaultProgress {
    /// Bytes from the start of the extent that have memory behind them.
    pub done: u64,
    /// Bytes of the extent.
    pub total: u64,
}

/// How prefaulting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefaultEnd {
    /// Every page has memory.
    Complete,
    /// `stop` was set; this number of bytes from the start of the extent have memory.
    Stopped {
        /// Bytes done.
        done: u64,
    },
}

/// The system would not give more memory. Later stores may still get some.
#[derive(Debug, thiserror::Error)]
#[error("no memory for the arena beyond its byte {done}: {source}")]
pub struct PrefaultError {
    /// Offset in the arena up to which the extent has memory.
    pub done: u64,
    /// What the system said.
    pub source: io::Error,
}

/// The extent is inside the mapping.
pub(crate) fn run(
    mapping: &Mapping,
    extent: Extent,
    stop: &AtomicBool,
    mut progress: impl FnMut(PrefaultProgress),
) -> Result<PrefaultEnd, PrefaultError> {
    let page = mapping.page();
    let first = extent.offset as usize / page * page;
    let total = (extent.offset + extent.len) as usize - first;
    // Kernels before 5.14 cannot populate; found out once, at the first step.
    let mut can_populate = true;
    let mut done = 0;
    while done < total {
        if stop.load(Ordering::Relaxed) {
            return Ok(PrefaultEnd::Stopped { done: done as u64 });
        }
        let step = STEP.min(total - done);
        let result = if can_populate {
            match populate(mapping, first + done, step, Advice::LinuxPopulateWrite) {
                Err(Errno::INVAL | Errno::NOSYS) if done == 0 => {
                    can_populate = false;
                    continue;
                }
                other => other,
            }
        } else {
            touch(mapping, first + done, step)
        };
        result.map_err(|e| PrefaultError {
            done: (first + done) as u64,
            source: e.into(),
        })?;
        done += step;
        progress(PrefaultProgress {
            done: done as u64,
            total: total as u64,
        });
    }
    Ok(PrefaultEnd::Complete)
}

/// Brings the pages of a range into memory for readers, where the kernel can.
///
/// # Errors
/// [`AccessError::Poisoned`] if some were lost.
pub(crate) fn populate_read(mapping: &Mapping, range: Extent) -> Result<(), AccessError> {
    mapping.locate(range.offset, range.len)?;
    let page = mapping.page();
    let first = range.offset as usize / page * page;
    let end = ((range.offset + range.len) as usize).next_multiple_of(page);
    let end = end.min(mapping.len() as usize);
    match populate(mapping, first, end - first, Advice::LinuxPopulateRead) {
        Ok(()) | Err(Errno::INVAL | Errno::NOSYS) => mapping.check_poison(range),
        Err(_) => Err(mapping.lost()),
    }
}

/// Faults the pages in as reads or writes would, without either: contents do not change, so this is
/// safe beside any use.
fn populate(mapping: &Mapping, offset: usize, len: usize, how: Advice) -> Result<(), Errno> {
    loop {
        // SAFETY: the range lies inside the mapping, which outlives the call; populating leaves
        // contents as they are.
        let result = unsafe {
            let start = mapping.base().as_ptr().add(offset);
            rustix::mm::madvise(start.cast(), len, how)
        };
        match result {
            Err(Errno::INTR | Errno::AGAIN) => {}
            other => return other,
        }
    }
}

/// Faults the pages in on old kernels: an atomic addition of nothing to one byte of each page. It is one
/// indivisible read and write, so no concurrent writer, here or in another process, can lose a
/// byte to it.
fn touch(mapping: &Mapping, offset: usize, len: usize) -> Result<(), Errno> {
    for at in (offset..offset + len).step_by(mapping.page()) {
        // SAFETY: `at` lies inside the mapping, which outlives the reference; atomics are the
        // one kind of reference that others may write beside.
        let byte = unsafe { AtomicU8::from_ptr(mapping.base().as_ptr().add(at)) };
        byte.fetch_add(0, Ordering::Relaxed);
    }
    // The guard has replaced each page that was unavailable.
    mapping
        .check_poison(Extent::new(offset as u64, len as u64))
        .map_err(|_| Errno::NOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_changes_nothing() {
        let Ok(mapping) = Mapping::anonymous(1 << 20, false, "arena") else {
            panic!("1 MiB of memory");
        };
        let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i % 251) as u8).collect();
        mapping.write(0, &bytes).unwrap();
        touch(&mapping, 0, 1 << 20).unwrap();
        populate(&mapping, 0, 1 << 20, Advice::LinuxPopulateWrite).unwrap();
        let mut read = Vec::new();
        mapping.read_into(0, 1 << 20, &mut read).unwrap();
        assert_eq!(read, bytes);
    }
}
