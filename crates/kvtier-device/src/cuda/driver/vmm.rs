//! Virtual memory management: physical allocations, which processes export to each other, and the address ranges they
//! are mapped at.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use super::DevicePtr;
use super::context::Context;
use super::table::{Access, Location};
use crate::cuda::error::CudaError;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: u32 = 3;
/// Bytes of a fabric handle.
pub const FABRIC_BYTES: usize = 64;

/// Kind of handle by which an allocation is exported to another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum HandleKind {
    /// A file descriptor.
    PosixFd = 1,
    /// 64 bytes, valid in all processes of an IMEX domain.
    Fabric = 8,
}

/// A physical allocation, not mapped by itself. Released when dropped; its mappings keep the memory.
#[derive(Debug)]
pub struct Allocation {
    context: Arc<Context>,
    raw: u64,
}

impl Allocation {
    /// Imports an allocation that another process exported as a file descriptor, which stays open.
    ///
    /// # Errors
    /// The driver's error, for example for the descriptor of another kind of file.
    pub fn import_fd(context: &Arc<Context>, fd: BorrowedFd<'_>) -> Result<Self, CudaError> {
        // The driver takes the number in the place of an address.
        let handle = fd.as_raw_fd() as usize as *mut c_void;
        Self::import(context, handle, HandleKind::PosixFd)
    }

    /// Imports an allocation that another process exported as a fabric handle.
    ///
    /// # Errors
    /// The driver's error; a machine without an IMEX channel cannot import any.
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
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: imported once and released once.
        let _ = unsafe { self.context.driver().cuMemRelease(self.raw) };
    }
}

/// A range of GPU addresses, with allocations mapped from its start without gaps. Unmapped and freed when dropped.
#[derive(Debug)]
pub struct Reservation {
    context: Arc<Context>,
    base: DevicePtr,
    bytes: u64,
    /// Bytes of each mapping, in order.
    mapped: Vec<u64>,
}

impl Reservation {
    /// Reserves addresses without memory.
    ///
    /// # Errors
    /// The driver's error.
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

    /// First address of the range.
    pub fn base(&self) -> DevicePtr {
        self.base
    }

    /// Bytes of the range.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Maps the first `bytes` of an allocation behind the last mapping.
    ///
    /// # Errors
    /// The driver's error, for example for an allocation of another size.
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

    /// Allows the GPU to read and write the whole range. All of it must be mapped.
    ///
    /// # Errors
    /// The driver's error.
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
            // SAFETY: mapped once at this address.
            let _ = unsafe { driver.cuMemUnmap(at, *bytes as usize) };
            at += bytes;
        }
        // SAFETY: reserved once; nothing is mapped any more.
        let _ = unsafe { driver.cuMemAddressFree(self.base.0, self.bytes as usize) };
    }
}
