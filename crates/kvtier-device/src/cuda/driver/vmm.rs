//! Memory in two halves: allocations, which processes hand to each other, and address ranges they are mapped at.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::DevicePtr;
use super::context::Context;
use super::table::{Access, AllocationProperties, Location};
use crate::cuda::error::CudaError;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, the only kind there is.
const PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: u32 = 3;
/// Bytes of a fabric handle.
pub const FABRIC_BYTES: usize = 64;

/// How an allocation is handed to another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum HandleKind {
    /// A file descriptor.
    PosixFd = 1,
    /// 64 bytes that mean something to all processes of an IMEX domain.
    Fabric = 8,
}

/// An allocation that is mapped nowhere by itself. Released when dropped; mappings of it keep it alive.
#[derive(Debug)]
pub struct Allocation {
    context: Arc<Context>,
    raw: u64,
}

impl Allocation {
    /// Memory of the GPU that can be exported as `kind`; `bytes` is a multiple of [`Context::granularity`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn create(context: &Arc<Context>, bytes: u64, kind: HandleKind) -> Result<Self, CudaError> {
        let properties = properties(context, kind);
        let mut raw = 0;
        // SAFETY: both addresses are those of live variables.
        unsafe {
            context
                .driver()
                .cuMemCreate(&mut raw, bytes as usize, &properties, 0)
        }?;
        Ok(Self {
            context: context.clone(),
            raw,
        })
    }

    /// What another process exported as a file descriptor, which stays open.
    ///
    /// # Errors
    /// What the driver says, about a descriptor of something else among others.
    pub fn import_fd(context: &Arc<Context>, fd: BorrowedFd<'_>) -> Result<Self, CudaError> {
        // The driver takes the number in the place of an address.
        let handle = fd.as_raw_fd() as usize as *mut c_void;
        Self::import(context, handle, HandleKind::PosixFd)
    }

    /// What another process exported as a fabric handle.
    ///
    /// # Errors
    /// What the driver says; a machine without an IMEX channel cannot.
    pub fn import_fabric(
        context: &Arc<Context>,
        handle: &[u8; FABRIC_BYTES],
    ) -> Result<Self, CudaError> {
        let handle = handle.as_ptr().cast_mut().cast::<c_void>();
        Self::import(context, handle, HandleKind::Fabric)
    }

    fn import(
        context: &Arc<Context>,
        handle: *mut c_void,
        kind: HandleKind,
    ) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let mut raw = 0;
        // SAFETY: the address is that of a live integer; the handle is a descriptor or 64 live bytes, which are read.
        unsafe {
            context
                .driver()
                .cuMemImportFromShareableHandle(&mut raw, handle, kind as u32)
        }?;
        Ok(Self {
            context: context.clone(),
            raw,
        })
    }

    /// A file descriptor for another process.
    ///
    /// # Errors
    /// What the driver says, about memory that was not made for it among others.
    pub fn export_fd(&self) -> Result<OwnedFd, CudaError> {
        let mut fd: i32 = -1;
        // SAFETY: for this kind the address is that of an integer, which lives.
        unsafe {
            self.context.driver().cuMemExportToShareableHandle(
                (&raw mut fd).cast(),
                self.raw,
                HandleKind::PosixFd as u32,
                0,
            )
        }?;
        // SAFETY: the driver just opened it for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A fabric handle for another process.
    ///
    /// # Errors
    /// What the driver says, about memory that was not made for it among others.
    pub fn export_fabric(&self) -> Result<[u8; FABRIC_BYTES], CudaError> {
        let mut handle = [0u8; FABRIC_BYTES];
        // SAFETY: for this kind the address is that of 64 bytes, which live.
        unsafe {
            self.context.driver().cuMemExportToShareableHandle(
                (&raw mut handle).cast(),
                self.raw,
                HandleKind::Fabric as u32,
                0,
            )
        }?;
        Ok(handle)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: made once and released once.
        let _ = unsafe { self.context.driver().cuMemRelease(self.raw) };
    }
}

/// A range of addresses of the GPU, with allocations mapped from its start on without gaps. Unmapped and given back
/// when dropped.
#[derive(Debug)]
pub struct Reservation {
    context: Arc<Context>,
    base: DevicePtr,
    bytes: u64,
    /// Bytes of each mapping, in order.
    mapped: Vec<u64>,
}

impl Reservation {
    /// Addresses, with nothing behind them.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let mut base = 0;
        // SAFETY: the address is that of a live integer.
        unsafe {
            context
                .driver()
                .cuMemAddressReserve(&mut base, bytes as usize, 0, 0, 0)
        }?;
        Ok(Self {
            context: context.clone(),
            base: DevicePtr(base),
            bytes,
            mapped: Vec::new(),
        })
    }

    /// Its first address.
    pub fn base(&self) -> DevicePtr {
        self.base
    }

    /// Addresses it has.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Maps the first `bytes` of an allocation behind what is mapped already.
    ///
    /// # Errors
    /// What the driver says, about allocations of another size among others.
    pub fn map(&mut self, allocation: &Allocation, bytes: u64) -> Result<(), CudaError> {
        let at = self.base.0 + self.mapped.iter().sum::<u64>();
        // SAFETY: the allocation lives; the driver refuses what lies outside the reservation.
        unsafe {
            self.context
                .driver()
                .cuMemMap(at, bytes as usize, 0, allocation.raw, 0)
        }?;
        self.mapped.push(bytes);
        Ok(())
    }

    /// Lets the GPU read and write all of it. Everything must be mapped.
    ///
    /// # Errors
    /// What the driver says.
    pub fn allow_access(&self) -> Result<(), CudaError> {
        let access = Access {
            location: Location {
                kind: DEVICE,
                id: self.context.raw_device(),
            },
            flags: READ_WRITE,
        };
        // SAFETY: the address is that of a live description.
        unsafe {
            self.context
                .driver()
                .cuMemSetAccess(self.base.0, self.bytes as usize, &access, 1)
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let driver = self.context.driver();
        let mut at = self.base.0;
        for bytes in &self.mapped {
            // SAFETY: mapped once at this place.
            let _ = unsafe { driver.cuMemUnmap(at, *bytes as usize) };
            at += bytes;
        }
        // SAFETY: reserved once; nothing is mapped any more.
        let _ = unsafe { driver.cuMemAddressFree(self.base.0, self.bytes as usize) };
    }
}

impl Context {
    /// What sizes of allocations are multiples of.
    ///
    /// # Errors
    /// What the driver says.
    pub fn granularity(&self, kind: HandleKind) -> Result<u64, CudaError> {
        let properties = properties(self, kind);
        let mut bytes = 0;
        // SAFETY: both addresses are those of live variables.
        unsafe {
            self.driver()
                .cuMemGetAllocationGranularity(&mut bytes, &properties, 0)
        }?;
        Ok(bytes as u64)
    }
}

fn properties(context: &Context, kind: HandleKind) -> AllocationProperties {
    AllocationProperties {
        kind: PINNED,
        handle_kinds: kind as u32,
        location: Location {
            kind: DEVICE,
            id: context.raw_device(),
        },
        win32: std::ptr::null_mut(),
        flags: [0; 8],
    }
}
