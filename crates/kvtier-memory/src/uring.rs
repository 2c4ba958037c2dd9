//! Files straight from and to arenas, several at a time from one thread (io_uring).
//!
//! The system reads and writes memory here after the call that asked for it has returned. So a [`Ring`] owns all that a
//! transfer touches, file, arena, the tail and whatever keeps the extent in place, from the moment it is handed in until
//! the system reports its completion. There is no other way to that memory meanwhile and none to end a transfer early:
//! a ring that is dropped, also by a panic, waits for the transfers in flight, and what it cannot wait for is never freed.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, types};

use crate::access::AccessError;
use crate::arena::Arena;
use crate::file::{FileError, Pieces};
use kvtier_common::extent::Extent;

/// What tails are aligned to; I/O past the page cache wants no more.
const ALIGN: usize = 4096;

/// Private memory behind an extent in a file, aligned for `O_DIRECT`.
#[derive(Debug, Default)]
pub struct Tail {
    bytes: Vec<u8>,
    len: usize,
}

impl Tail {
    /// Makes it this long; what is in it is undefined.
    pub fn resize(&mut self, len: usize) {
        if self.bytes.len() < len + ALIGN {
            self.bytes = vec![0; len + ALIGN];
        }
        self.len = len;
    }

    fn start(&self) -> usize {
        self.bytes.as_ptr().align_offset(ALIGN)
    }
}

impl std::ops::Deref for Tail {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self.len {
            0 => &[],
            len => &self.bytes[self.start()..][..len],
        }
    }
}

impl std::ops::DerefMut for Tail {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.start();
        match self.len {
            0 => &mut [],
            len => &mut self.bytes[start..][..len],
        }
    }
}

/// Bytes to be moved between a file and first an extent, then a tail.
#[derive(Debug)]
pub struct Transfer<H> {
    /// The file.
    pub file: OwnedFd,
    /// Offset of the bytes in the file.
    pub at: u64,
    /// Arena that the extent is in.
    pub arena: Arc<Arena>,
    /// Part of it.
    pub extent: Extent,
    /// What follows in the file.
    pub tail: Tail,
    /// Bytes after which a read may end; `None` is a write, which takes all.
    pub enough: Option<u64>,
    /// Keeps the extent from being freed; the caller gets it back with the transfer.
    pub hold: H,
}

impl<H> Transfer<H> {
    /// Moves what is left behind the first `done` bytes, with plain system calls; the bytes moved in all.
    ///
    /// # Errors
    /// As [`Arena::read_file`] and [`Arena::write_file`].
    pub fn finish(&mut self, done: u64) -> Result<u64, FileError> {
        let file = self.file.as_fd();
        match self.enough {
            Some(enough) => {
                self.arena
                    .read_rest(self.extent, &mut self.tail, file, self.at, enough, done)
            }
            None => {
                self.arena
                    .write_rest(self.extent, &self.tail, file, self.at, done)?;
                Ok(self.extent.len + self.tail.len() as u64)
            }
        }
    }

    fn pieces(&mut self) -> Result<Pieces, AccessError> {
        let first = self.arena.address(self.extent, 0, self.extent.len)?;
        let tail = &mut *self.tail;
        Ok(Pieces::new(
            first.as_ptr(),
            self.extent.len,
            tail.as_mut_ptr(),
            tail.len(),
        ))
    }
}

/// One transfer in flight, at an address that the system uses.
struct TransferSlot<H> {
    transfer: Transfer<H>,
    vectors: [libc::iovec; 2],
}

/// An io_uring and the transfers in flight in it.
pub struct Ring<H> {
    /// Dropped by hand, and not at all while the system may still use a slot.
    inner: ManuallyDrop<RingInner<H>>,
}

struct RingInner<H> {
    ring: IoUring,
    /// Each in a place of its own, which does not move.
    slots: Vec<Option<Box<TransferSlot<H>>>>,
    free: Vec<usize>,
    is_broken: bool,
}

// SAFETY: the pointers in the slots are to memory that the slots own or hold, whichever thread they are on; a ring
// may be used by any thread, one at a time.
unsafe impl<H: Send> Send for Ring<H> {}

impl<H> Ring<H> {
    /// A ring for `most` transfers at a time.
    ///
    /// # Errors
    /// When the system has no io_uring, forbids it, or lacks what is needed of it.
    pub fn new(most: usize) -> io::Result<Self> {
        let entries = u32::try_from(most).ok().filter(|most| *most > 0);
        let entries = entries.ok_or(io::ErrorKind::InvalidInput)?;
        let ring = IoUring::builder().build(entries.next_power_of_two())?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        for (code, name) in [
            (opcode::Readv::CODE, "READV"),
            (opcode::Writev::CODE, "WRITEV"),
        ] {
            if !probe.is_supported(code) {
                let message = format!("this system's io_uring has no {name}");
                return Err(io::Error::new(io::ErrorKind::Unsupported, message));
            }
        }
        Ok(Self {
            inner: ManuallyDrop::new(RingInner {
                ring,
                slots: (0..most).map(|_| None).collect(),
                free: (0..most).rev().collect(),
                is_broken: false,
            }),
        })
    }

    /// Number of transfers in flight.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.slots.len() - self.inner.free.len()
    }

    /// Whether no transfer is in flight.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether another transfer would be refused for want of a place.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.inner.free.is_empty()
    }

    /// Begins a transfer.
    ///
    /// # Errors
    /// It comes back untouched if it cannot be begun: the ring is full or does not work, or the extent is not in the
    /// arena. [`Transfer::finish`] does it then, or says why not.
    pub fn begin(&mut self, mut transfer: Transfer<H>) -> Result<(), Transfer<H>> {
        let inner = &mut *self.inner;
        let (Ok(pieces), false) = (transfer.pieces(), inner.is_broken) else {
            return Err(transfer);
        };
        let Some(number) = inner.free.pop() else {
            return Err(transfer);
        };
        let slot = inner.slots[number].insert(Box::new(TransferSlot {
            vectors: pieces.from(0),
            transfer,
        }));
        let file = types::Fd(slot.transfer.file.as_raw_fd());
        let (vectors, at) = (slot.vectors.as_ptr(), slot.transfer.at);
        let entry = match slot.transfer.enough {
            Some(_) => opcode::Readv::new(file, vectors, 2).offset(at).build(),
            None => opcode::Writev::new(file, vectors, 2).offset(at).build(),
        };
        let entry = entry.user_data(number as u64);
        // SAFETY: file, vectors and the memory they name belong to the slot. It is freed only when the completion with its
        // number was seen, or below, if the system did not take the entry.
        let is_pushed = unsafe { inner.ring.submission().push(&entry) }.is_ok();
        if is_pushed && inner.enter(1, 0) && inner.ring.submission().is_empty() {
            return Ok(());
        }
        // What lies there cannot be taken back, so nothing is handed in from now on.
        inner.is_broken = true;
        inner.free.push(number);
        match inner.slots[number].take() {
            Some(slot) => Err(slot.transfer),
            None => unreachable!("it was put there above"),
        }
    }

    /// Waits for a transfer to end: it and the bytes moved. What the system left over is moved here. `None` if nothing
    /// is in flight, or if the system does not let us wait; then the ring is broken, and the transfers in flight are never
    /// freed.
    pub fn wait(&mut self) -> Option<(Transfer<H>, Result<u64, FileError>)> {
        let (mut transfer, moved) = self.inner.next()?;
        let result = outcome(&mut transfer, moved);
        Some((transfer, result))
    }

    /// Whether it does not take transfers any more.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.inner.is_broken
    }
}

impl<H> Drop for Ring<H> {
    fn drop(&mut self) {
        while self.inner.next().is_some() {}
        if self.is_empty() {
            // SAFETY: dropped once, here, and not used behind.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        }
    }
}

impl<H> RingInner<H> {
    /// The next transfer that has ended, and what the system says of it.
    fn next(&mut self) -> Option<(Transfer<H>, i32)> {
        while self.free.len() < self.slots.len() {
            let ended = self.ring.completion().next();
            if let Some(ended) = ended {
                let number = ended.user_data() as usize;
                if let Some(slot) = self.slots.get_mut(number).and_then(Option::take) {
                    self.free.push(number);
                    return Some((slot.transfer, ended.result()));
                }
            } else if !self.enter(0, 1) {
                self.is_broken = true;
                return None;
            }
        }
        None
    }

    /// Submits `entries` entries and waits for `ended` completions; returns whether the system did.
    fn enter(&self, entries: u32, ended: u32) -> bool {
        const GET_EVENTS: u32 = io_uring::EnterFlags::GETEVENTS.bits();
        loop {
            let submitter = self.ring.submitter();
            let flags = if ended > 0 { GET_EVENTS } else { 0 };
            // SAFETY: no signal mask is given; the entries are those that `begin` answers for.
            match unsafe { submitter.enter::<libc::sigset_t>(entries, ended, flags, None) } {
                Ok(_) => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }
}

/// Result of a transfer: `moved` is the number of bytes that the system moved, or a negative error number.
fn outcome<H>(transfer: &mut Transfer<H>, moved: i32) -> Result<u64, FileError> {
    let Ok(moved) = u64::try_from(moved) else {
        return match -moved {
            // As plain system calls say it.
            libc::EFAULT => Err(AccessError::Poisoned { what: "arena" }.into()),
            // Not in this way, or not now.
            libc::EAGAIN | libc::EINTR | libc::ECANCELED | libc::EOPNOTSUPP => transfer.finish(0),
            error => Err(FileError::System {
                done: 0,
                source: io::Error::from_raw_os_error(error),
            }),
        };
    };
    let all = transfer.extent.len + transfer.tail.len() as u64;
    let is_whole = match transfer.enough {
        Some(enough) => moved == 0 || moved >= enough.min(all),
        None => moved == all,
    };
    if !is_whole {
        return transfer.finish(moved);
    }
    transfer.arena.mapping().check_poison(transfer.extent)?;
    Ok(moved)
}

#[cfg(test)]
mod tests;
