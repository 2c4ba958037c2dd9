//! Allocations of other processes, mapped into this one.
//!
//! - By IPC handle (`cuIpcOpenMemHandle`): a process may open an allocation only once, and closing it closes it for all
//!   users. So one table per GPU counts the users of each open allocation.
//! - By virtual memory management (segments, fabric handles): each registration maps its own range, because a handle such
//!   as a descriptor number may later mean other memory.
//!
//! A driver call may take seconds. The table's lock is not held meanwhile: an entry in [`AllocationEntry::Transition`] makes only
//! users of the same allocation wait.
//!
//! The mutex guards that table; no other lock is acquired inside.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvtier_common::sync::{Condvar, Mutex};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::driver::{Allocation, Context, DevicePtr, IpcHandle, Reservation};
use super::error::CudaError;
use super::handle::{SegmentHandles, ShareableHandle};
use crate::error::LayoutError;

/// An allocation that could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The engine's description is invalid.
    #[error(transparent)]
    Refused(#[from] LayoutError),
    /// The driver returned an error.
    #[error("{what}: {source}; {hint}")]
    Cuda {
        /// Operation.
        what: &'static str,
        /// The driver's error.
        source: CudaError,
        /// Prerequisite of the operation.
        hint: &'static str,
    },
    /// A system call failed.
    #[error("{what} of process {pid}: {source}; {hint}")]
    System {
        /// Operation.
        what: &'static str,
        /// Process that shares the memory.
        pid: i32,
        /// The system's error.
        source: io::Error,
        /// Prerequisite of the operation.
        hint: &'static str,
    },
}

/// Prerequisites of each way of sharing.
const IPC_HINT: &str =
    "needed: a living process other than this one, on this machine, in the same IPC namespace";
const FD_HINT: &str = "needed: a living process in the same PID namespace that this one may trace";
const FABRIC_HINT: &str =
    "needed: a living process in the same IMEX domain, and an IMEX channel here";

/// The open allocations of one GPU; one table per GPU.
#[derive(Debug)]
pub struct Allocations {
    context: Arc<Context>,
    total_bytes: u64,
    /// Allocations opened by IPC handle.
    opened: Mutex<HashMap<IpcHandle, AllocationEntry>>,
    /// Signalled when an entry leaves [`AllocationEntry::Transition`].
    changed: Condvar,
    open: Arc<AtomicUsize>,
}

#[derive(Debug)]
enum AllocationEntry {
    /// A thread is opening or closing the allocation.
    Transition,
    Open(Opened),
}

#[derive(Debug)]
struct Opened {
    base: DevicePtr,
    bytes: u64,
    /// Number of live [`Mapped`]s.
    users: usize,
    _count: OpenCount,
}

/// Counts one open allocation of the GPU while it lives.
#[derive(Debug)]
struct OpenCount(Arc<AtomicUsize>);

impl OpenCount {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for OpenCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Exclusive right to open or close an entry. Dropping it removes the entry, unless it was opened.
struct Transition<'a> {
    table: &'a Allocations,
    handle: &'a IpcHandle,
}

impl Transition<'_> {
    fn open(&self, opened: Opened) {
        let mut table = self.table.opened.lock();
        table.insert(*self.handle, AllocationEntry::Open(opened));
    }
}

impl Drop for Transition<'_> {
    fn drop(&mut self) {
        let mut table = self.table.opened.lock();
        if let Some(AllocationEntry::Transition) = table.get(self.handle) {
            table.remove(self.handle);
        }
        drop(table);
        self.table.changed.notify_all();
    }
}

/// A mapped allocation. Dropping the last user of a table entry closes it; a range is unmapped with this.
#[derive(Debug)]
pub struct Mapped {
    base: DevicePtr,
    bytes: u64,
    backing: Backing,
}

/// Owner of the mapping.
#[derive(Debug)]
enum Backing {
    Table(Arc<Allocations>, IpcHandle),
    Range {
        _range: Reservation,
        _count: OpenCount,
    },
}

impl Mapped {
    /// Address of the first byte.
    pub fn base(&self) -> DevicePtr {
        self.base
    }

    /// Actual size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Backing::Table(table, handle) = &self.backing {
            table.close(handle);
        }
    }
}

impl Allocations {
    /// Creates the empty table of one GPU.
    ///
    /// # Errors
    /// The driver's error about the GPU.
    pub fn new(context: Arc<Context>) -> Result<Arc<Self>, CudaError> {
        Ok(Arc::new(Self {
            total_bytes: context.device().total_bytes()?,
            context,
            opened: Mutex::default(),
            changed: Condvar::new(),
            open: Arc::default(),
        }))
    }

    /// Context of the GPU.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Number of open allocations: one per IPC handle, one per mapped range of a registration. Does not wait.
    pub fn open_count(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Maps an allocation that PyTorch shares.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_shareable(self: &Arc<Self>, handle: &ShareableHandle) -> Result<Mapped, OpenError> {
        match handle {
            ShareableHandle::Legacy(handle) => self.open_ipc(handle),
            ShareableHandle::Expandable {
                pid,
                segment_size,
                handles,
            } => self.open_expandable(*pid, *segment_size, handles),
        }
    }

    /// Maps an allocation by IPC handle, or returns the existing mapping.
    ///
    /// # Errors
    /// The driver's error.
    pub fn open_ipc(self: &Arc<Self>, handle: &IpcHandle) -> Result<Mapped, OpenError> {
        let mut table = self.opened.lock();
        let known = loop {
            match table.get_mut(handle) {
                Some(AllocationEntry::Open(known)) => {
                    known.users += 1;
                    break Some((known.base, known.bytes));
                }
                Some(AllocationEntry::Transition) => self.changed.wait(&mut table),
                None => {
                    table.insert(*handle, AllocationEntry::Transition);
                    break None;
                }
            }
        };
        drop(table);
        let (base, bytes) = match known {
            Some(known) => known,
            None => self.open_new(handle)?,
        };
        Ok(Mapped {
            base,
            bytes,
            backing: Backing::Table(self.clone(), *handle),
        })
    }

    /// Opens the allocation of an entry that the caller put in transition; it has one user then.
    fn open_new(&self, handle: &IpcHandle) -> Result<(DevicePtr, u64), OpenError> {
        let transition = Transition {
            table: self,
            handle,
        };
        let base = self
            .context
            .open_memory(handle)
            .map_err(|source| refused("memory by its IPC handle", source, IPC_HINT))?;
        let bytes = self.bytes_from(base).inspect_err(|_| {
            // SAFETY: just opened, and not used yet.
            let _ = unsafe { self.context.close_memory(base) };
        })?;
        transition.open(Opened {
            base,
            bytes,
            users: 1,
            _count: OpenCount::new(&self.open),
        });
        Ok((base, bytes))
    }

    /// Maps a physical allocation by fabric handle. `bytes` is its size, as stated by the engine.
    ///
    /// # Errors
    /// More bytes than the GPU has, or the driver's error.
    pub fn open_fabric(&self, handle: &[u8; 64], bytes: u64) -> Result<Mapped, OpenError> {
        self.check_total("alloc_size", bytes)?;
        self.map(bytes, 1, FABRIC_HINT, |_| {
            Allocation::import_fabric(&self.context, handle)
                .map_err(|source| refused("memory by its fabric handle", source, FABRIC_HINT))
        })
    }

    fn open_expandable(
        &self,
        pid: i32,
        segment_size: u64,
        handles: &SegmentHandles,
    ) -> Result<Mapped, OpenError> {
        // Parsing has checked that the product does not overflow.
        self.check_total("handle[1] segments", segment_size * handles.len() as u64)?;
        match handles {
            SegmentHandles::PosixFds(fds) => {
                let exporter = Exporter::find(pid)?;
                self.map(segment_size, fds.len(), FD_HINT, |at| {
                    let fd = exporter.descriptor(fds[at])?;
                    Allocation::import_fd(&self.context, fd.as_fd())
                        .map_err(|source| refused("a segment by its descriptor", source, FD_HINT))
                })
            }
            SegmentHandles::Fabric(all) => self.map(segment_size, all.len(), FABRIC_HINT, |at| {
                Allocation::import_fabric(&self.context, &all[at]).map_err(|source| {
                    refused("a segment by its fabric handle", source, FABRIC_HINT)
                })
            }),
        }
    }

    /// Maps `count` pieces of `size` bytes contiguously.
    fn map(
        &self,
        size: u64,
        count: usize,
        hint: &'static str,
        import: impl Fn(usize) -> Result<Allocation, OpenError>,
    ) -> Result<Mapped, OpenError> {
        let cuda = |source| refused("mapping memory", source, hint);
        let bytes = size * count as u64;
        // Mappings keep their allocations alive. On an error, the range unmaps the pieces mapped so far.
        let first = import(0)?;
        let mut range = Reservation::new(&self.context, bytes).map_err(cuda)?;
        range.map(&first, size).map_err(cuda)?;
        for at in 1..count {
            range.map(&import(at)?, size).map_err(cuda)?;
        }
        range.allow_access().map_err(cuda)?;
        Ok(Mapped {
            base: range.base(),
            bytes,
            backing: Backing::Range {
                _range: range,
                _count: OpenCount::new(&self.open),
            },
        })
    }

    /// Refuses sizes above the GPU's memory, which would only reserve addresses.
    fn check_total(&self, field: &str, bytes: u64) -> Result<(), LayoutError> {
        if bytes == 0 || bytes > self.total_bytes {
            return Err(LayoutError::new(
                field,
                format!("{bytes} bytes"),
                format!("1 to {}, the memory of the GPU", self.total_bytes),
            ));
        }
        Ok(())
    }

    fn bytes_from(&self, base: DevicePtr) -> Result<u64, OpenError> {
        let (start, bytes) = self
            .context
            .address_range(base)
            .map_err(|source| refused("the size of opened memory", source, IPC_HINT))?;
        // Opening should return the start of an allocation; any other address is handled too.
        let before = base.0.checked_sub(start.0);
        before
            .and_then(|before| bytes.checked_sub(before))
            .ok_or_else(|| {
                LayoutError::new(
                    "opened memory",
                    format!("{base:?} of {bytes} bytes from {start:?}"),
                    "an address inside",
                )
                .into()
            })
    }

    fn close(&self, handle: &IpcHandle) {
        let mut table = self.opened.lock();
        let Some(AllocationEntry::Open(known)) = table.get_mut(handle) else {
            return;
        };
        known.users -= 1;
        if known.users > 0 {
            return;
        }
        let Some(AllocationEntry::Open(closing)) =
            table.insert(*handle, AllocationEntry::Transition)
        else {
            return;
        };
        drop(table);
        let _transition = Transition {
            table: self,
            handle,
        };
        // SAFETY: the last user was dropped, and users end their copies first. Closing does not need the other process,
        // so it may be dead.
        let _ = unsafe { self.context.close_memory(closing.base) };
        // Counted as open until here.
        drop(closing);
    }
}

fn refused(what: &'static str, source: CudaError, hint: &'static str) -> OpenError {
    OpenError::Cuda { what, source, hint }
}

/// A process that shares memory by file descriptors.
struct Exporter {
    pid: i32,
    process: OwnedFd,
}

impl Exporter {
    fn find(pid: i32) -> Result<Self, OpenError> {
        let not_itself = |pid: &Pid| pid.as_raw_nonzero().get() as u32 != std::process::id();
        let process = Pid::from_raw(pid).filter(not_itself).ok_or_else(|| {
            LayoutError::new("handle[1] process id", pid, "a process other than this one")
        })?;
        Ok(Self {
            pid,
            process: pidfd_open(process, PidfdFlags::empty())
                .map_err(|error| failed("finding memory", pid, error))?,
        })
    }

    fn descriptor(&self, number: i32) -> Result<OwnedFd, OpenError> {
        pidfd_getfd(&self.process, number, PidfdGetfdFlags::empty())
            .map_err(|error| failed("taking a descriptor", self.pid, error))
    }
}

fn failed(what: &'static str, pid: i32, error: rustix::io::Errno) -> OpenError {
    OpenError::System {
        what,
        pid,
        source: error.into(),
        hint: FD_HINT,
    }
}
