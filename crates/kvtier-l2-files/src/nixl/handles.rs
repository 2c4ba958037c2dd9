//! Owners of the library's objects: each is destroyed when dropped.

use std::ffi::{CStr, c_int};
use std::ptr;

use crate::nixl::agent::Agent;
use crate::nixl::error::{Code, NixlError};
use crate::nixl::table::{Raw, Table};

/// A destructor of the library.
pub(crate) type Destroy = unsafe extern "C" fn(Raw) -> c_int;

/// One object.
pub(crate) struct NixlHandle {
    raw: Raw,
    destroy: Destroy,
}

impl NixlHandle {
    /// Makes an object; `make` writes it to the address.
    pub(crate) fn make(
        action: &'static str,
        destroy: Destroy,
        make: impl FnOnce(*mut Raw) -> c_int,
    ) -> Result<Self, NixlError> {
        let mut raw = ptr::null_mut();
        check(action, make(&mut raw))?;
        if raw.is_null() {
            Err(NixlError::Call {
                action,
                code: Code::SUCCESS,
            })
        } else {
            Ok(Self { raw, destroy })
        }
    }

    pub(crate) fn raw(&self) -> Raw {
        self.raw
    }
}

impl Drop for NixlHandle {
    fn drop(&mut self) {
        // SAFETY: `raw` was made by the function that belongs to this destructor, and is destroyed once.
        unsafe { (self.destroy)(self.raw) };
    }
}

pub(crate) fn check(action: &'static str, status: c_int) -> Result<(), NixlError> {
    match Code(status) {
        Code::SUCCESS => Ok(()),
        code => Err(NixlError::Call { action, code }),
    }
}

/// Bytes that a transfer accesses: of memory at an address, or of a file from its start, by its descriptor.
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    pub kind: c_int,
    pub address: usize,
    pub len: usize,
    pub device: u64,
}

/// Registration of bytes, which ends when dropped.
pub(crate) struct Registered<'a> {
    agent: &'a Agent,
    list: NixlHandle,
}

impl<'a> Registered<'a> {
    pub(crate) fn new(agent: &'a Agent, bytes: Bytes) -> Result<Self, NixlError> {
        let table = agent.table();
        let list = NixlHandle::make("make a list", table.destroy_reg_dlist, |list| {
            // SAFETY: the address is that of a live handle.
            unsafe { (table.create_reg_dlist)(bytes.kind, list) }
        })?;
        let Bytes {
            address,
            len,
            device,
            ..
        } = bytes;
        // SAFETY: the list is live; there is no metadata. The library keeps the numbers, and accesses nothing yet.
        let added =
            unsafe { (table.reg_dlist_add_desc)(list.raw(), address, len, device, ptr::null(), 0) };
        check("list bytes", added)?;
        // SAFETY: agent, list and options are live; what is registered is accessible until the registration ends, which
        // is before the transfer that owns it does.
        let registered = unsafe { (table.register_mem)(agent.raw(), list.raw(), agent.options()) };
        check("register bytes", registered)?;
        Ok(Self { agent, list })
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        let (table, agent) = (self.agent.table(), self.agent);
        // SAFETY: all are live, and this list was registered.
        unsafe { (table.deregister_mem)(agent.raw(), self.list.raw(), agent.options()) };
    }
}

/// Returns a list of these bytes for a transfer.
pub(crate) fn listed(table: &Table, bytes: Bytes) -> Result<NixlHandle, NixlError> {
    let list = NixlHandle::make("make a list", table.destroy_xfer_dlist, |list| {
        // SAFETY: the address is that of a live handle.
        unsafe { (table.create_xfer_dlist)(bytes.kind, list) }
    })?;
    // SAFETY: the list is live; the library keeps the numbers, and accesses nothing yet.
    let added =
        unsafe { (table.xfer_dlist_add_desc)(list.raw(), bytes.address, bytes.len, bytes.device) };
    check("list bytes", added)?;
    Ok(list)
}

/// Returns parameters of a backend.
pub(crate) fn params<'a>(
    table: &Table,
    params: impl Iterator<Item = (&'a CStr, &'a CStr)>,
) -> Result<NixlHandle, NixlError> {
    let made = NixlHandle::make("make parameters", table.destroy_params, |params| {
        // SAFETY: the address is that of a live handle.
        unsafe { (table.create_params)(params) }
    })?;
    for (name, value) in params {
        // SAFETY: the object is live; the library copies both texts.
        let added = unsafe { (table.params_add)(made.raw(), name.as_ptr(), value.as_ptr()) };
        check("add a parameter", added)?;
    }
    Ok(made)
}
