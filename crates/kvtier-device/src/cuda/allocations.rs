//! Allocations of other processes, mapped into ours.
//!
//! The driver's own handle may be opened once in a process: who closes it closes it for everybody. So there is one
//! table for each GPU, which counts who uses what it opened. Memory in two halves has no such rule, and its handles
//! (numbers of descriptors in another process) mean other memory tomorrow, so each registration maps it anew.
//!
//! The driver may take seconds for a mapping. The table's lock is not held meanwhile: whoever wants the same allocation
//! waits for it, everybody else goes on.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::driver::{Allocation, Context, DevicePtr, IpcHandle, Reservation};
use super::error::CudaError;
use super::handle::{SegmentHandles, ShareableHandle};
use crate::error::LayoutError;

/// An allocation that could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// What the engine says cannot be right.
    #[error(transparent)]
    Refused(#[from] LayoutError),
    /// The driver refused.
    #[error("{what}: {source}; {hint}")]
    Cuda {
        /// What was tried.
        what: &'static str,
        /// What it said.
        source: CudaError,
        /// What is needed for it.
        hint: &'static str,
    },
    /// The system refused.
    #[error("{what} of process {pid}: {source}; {hint}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The process that lends the memory.
        pid: i32,
        /// What the system said.
        source: io::Error,
        /// What is needed for it.
        hint: &'static str,
    },
}

/// What each way of lending needs.
const IPC_HINT: &str =
    "needed: a living process other than this one, on this machine, in the same IPC namespace";
const FD_HINT: &str = "needed: a living process in the same PID namespace that this one may trace";
const FABRIC_HINT: &str =
    "needed: a living process in the same IMEX domain, and an IMEX channel here";

/// The allocations opened on one GPU. One table serves all that opens on that GPU.
#[derive(Debug)]
pub struct Allocations {
    context: Arc<Context>,
    total_bytes: u64,
    /// What was opened by the driver's handle.
    opened: Mutex<HashMap<IpcHandle, Entry>>,
    /// An entry that was being opened or closed no longer is.
    settled: Condvar,
    open: Arc<AtomicUsize>,
}

#[derive(Debug)]
enum Entry {
    /// Somebody has the driver open or close it just now.
    Settling,
    Open(Opened),
}

#[derive(Debug)]
struct Opened {
    base: DevicePtr,
    bytes: u64,
    /// Living [`Mapped`]s.
    users: usize,
    _counted: Counted,
}

/// One open allocation in the count of its GPU.
#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The right to settle an entry: it leaves the table when this is dropped, unless it was opened meanwhile.
struct Settling<'a> {
    table: &'a Allocations,
    handle: &'a IpcHandle,
}

impl Settling<'_> {
    fn open(&self, opened: Opened) {
        let mut table = self.table.opened.lock();
        table.insert(*self.handle, Entry::Open(opened));
    }
}

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        let mut table = self.table.opened.lock();
        if let Some(Entry::Settling) = table.get(self.handle) {
            table.remove(self.handle);
        }
        drop(table);
        self.table.settled.notify_all();
    }
}

/// An allocation, mapped. What is in the table is closed when the last user's is dropped, the rest with this.
#[derive(Debug)]
pub struct Mapped {
    base: DevicePtr,
    bytes: u64,
    behind: Behind,
}

/// What holds the mapping.
#[derive(Debug)]
enum Behind {
    Table(Arc<Allocations>, IpcHandle),
    Range {
        _range: Reservation,
        _counted: Counted,
    },
}

impl Mapped {
    /// Its first byte.
    pub fn base(&self) -> DevicePtr {
        self.base
    }

    /// How many bytes there really are.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Behind::Table(table, handle) = &self.behind {
            table.close(handle);
        }
    }
}

impl Allocations {
    /// For one GPU, with nothing open.
    ///
    /// # Errors
    /// What the driver says about the GPU.
    pub fn new(context: Arc<Context>) -> Result<Arc<Self>, CudaError> {
        Ok(Arc::new(Self {
            total_bytes: context.device().total_bytes()?,
            context,
            opened: Mutex::default(),
            settled: Condvar::new(),
            open: Arc::default(),
        }))
    }

    /// The GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Allocations that are open: by the driver's handle each once, whoever uses it; a range of pieces once for each
    /// registration that has mapped it. Waits for nothing.
    pub fn open_count(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Maps what PyTorch lends.
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

    /// Maps an allocation by the driver's handle, or gives the mapping there is.
    ///
    /// # Errors
    /// What the driver says.
    pub fn open_ipc(self: &Arc<Self>, handle: &IpcHandle) -> Result<Mapped, OpenError> {
        let mut table = self.opened.lock();
        let known = loop {
            match table.get_mut(handle) {
                Some(Entry::Open(known)) => {
                    known.users += 1;
                    break Some((known.base, known.bytes));
                }
                Some(Entry::Settling) => self.settled.wait(&mut table),
                None => {
                    table.insert(*handle, Entry::Settling);
                    break None;
                }
            }
        };
        drop(table);
        let (base, bytes) = match known {
            Some(known) => known,
            None => self.open_anew(handle)?,
        };
        Ok(Mapped {
            base,
            bytes,
            behind: Behind::Table(self.clone(), *handle),
        })
    }

    /// Opens what the caller has entered as settling; it has one user then.
    fn open_anew(&self, handle: &IpcHandle) -> Result<(DevicePtr, u64), OpenError> {
        let settling = Settling {
            table: self,
            handle,
        };
        let base = self
            .context
            .open_memory(handle)
            .map_err(|source| refused("memory by its IPC handle", source, IPC_HINT))?;
        let bytes = self.bytes_behind(base).inspect_err(|_| {
            // SAFETY: just opened, and nobody knows of it.
            let _ = unsafe { self.context.close_memory(base) };
        })?;
        settling.open(Opened {
            base,
            bytes,
            users: 1,
            _counted: Counted::new(&self.open),
        });
        Ok((base, bytes))
    }

    /// Maps memory in two halves by its fabric handle. `bytes` is the size of the allocation, as the engine says.
    ///
    /// # Errors
    /// More bytes than the GPU has, or what the driver says.
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
        // What was parsed adds up.
        self.check_total("handle[1] segments", segment_size * handles.len() as u64)?;
        match handles {
            SegmentHandles::PosixFds(fds) => {
                let lender = Lender::find(pid)?;
                self.map(segment_size, fds.len(), FD_HINT, |at| {
                    let fd = lender.descriptor(fds[at])?;
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

    /// Maps `count` pieces of `size` bytes one behind the other.
    fn map(
        &self,
        size: u64,
        count: usize,
        hint: &'static str,
        import: impl Fn(usize) -> Result<Allocation, OpenError>,
    ) -> Result<Mapped, OpenError> {
        let cuda = |source| refused("mapping memory", source, hint);
        let bytes = size * count as u64;
        // The mappings keep the allocations; what was mapped when something fails is unmapped with the range.
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
            behind: Behind::Range {
                _range: range,
                _counted: Counted::new(&self.open),
            },
        })
    }

    /// No memory is larger than its GPU; a larger one would only cost us addresses.
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

    fn bytes_behind(&self, base: DevicePtr) -> Result<u64, OpenError> {
        let (start, bytes) = self
            .context
            .address_range(base)
            .map_err(|source| refused("the size of opened memory", source, IPC_HINT))?;
        // Opening gives the start of an allocation; count from where we are all the same.
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
        let Some(Entry::Open(known)) = table.get_mut(handle) else {
            return;
        };
        known.users -= 1;
        if known.users > 0 {
            return;
        }
        let Some(Entry::Open(closing)) = table.insert(*handle, Entry::Settling) else {
            return;
        };
        drop(table);
        let _settling = Settling {
            table: self,
            handle,
        };
        // SAFETY: the last user is gone, and users end their copies first. Nothing of the other process is waited for,
        // so it may be dead.
        let _ = unsafe { self.context.close_memory(closing.base) };
        // Counted until here.
        drop(closing);
    }
}

fn refused(what: &'static str, source: CudaError, hint: &'static str) -> OpenError {
    OpenError::Cuda { what, source, hint }
}

/// A process whose descriptors are asked for.
struct Lender {
    pid: i32,
    process: OwnedFd,
}

impl Lender {
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
