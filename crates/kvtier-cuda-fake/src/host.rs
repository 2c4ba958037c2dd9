//! Host memory that the driver knows: registered, or allocated by it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::abi::*;

/// Registrations by address.
#[derive(Default)]
pub(crate) struct Host(pub BTreeMap<u64, Registration>);

pub(crate) struct Registration {
    pub bytes: u64,
    pub device: usize,
    pub flags: u32,
    /// Whether `cuMemHostAlloc` made it.
    pub owned: bool,
    /// Cloned by work in flight.
    pub users: Arc<()>,
}

impl Registration {
    pub(crate) fn in_use(&self) -> bool {
        Arc::strong_count(&self.users) > 1
    }
}

impl Host {
    pub(crate) fn add(&mut self, base: u64, registration: Registration) -> CudaResult {
        let bytes = registration.bytes;
        if bytes == 0 || base.checked_add(bytes).is_none() {
            return Err(wrong!(ERROR_INVALID_VALUE, "{bytes} bytes at {base:#x}"));
        }
        if let Some((at, other)) = self.0.range(..base + bytes).next_back()
            && at + other.bytes > base
        {
            return Err(wrong!(
                ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                "{bytes} bytes at {base:#x} overlap {} at {at:#x}",
                other.bytes
            ));
        }
        self.0.insert(base, registration);
        Ok(())
    }

    pub(crate) fn remove(&mut self, base: u64, owned: bool) -> CudaResult<Registration> {
        let found = self.0.remove(&base).filter(|range| range.owned == owned);
        found.ok_or_else(|| {
            wrong!(
                ERROR_HOST_MEMORY_NOT_REGISTERED,
                "nothing starts at {base:#x}"
            )
        })
    }

    /// The registration around `bytes` at `address` for a device; `None`: pageable. The driver refuses ranges only partly
    /// in one registration; another device's registration is one for all if it is PORTABLE.
    pub(crate) fn find(
        &self,
        address: u64,
        bytes: u64,
        device: usize,
        what: &str,
    ) -> CudaResult<Option<&Registration>> {
        let end = address.saturating_add(bytes);
        let Some((at, range)) = self.0.range(..end).next_back() else {
            return Ok(None);
        };
        let is_ours = range.device == device || range.flags & HOST_REGISTER_PORTABLE != 0;
        if at + range.bytes <= address || !is_ours {
            return Ok(None);
        }
        if *at <= address && end <= at + range.bytes {
            return Ok(Some(range));
        }
        Err(wrong!(
            ERROR_INVALID_VALUE,
            "{what}: {bytes} bytes at host address {address:#x} are partly outside the registration of {} bytes at {at:#x}",
            range.bytes
        ))
    }
}

/// Number of pages of a range that have no memory yet; `None` if not all of it is mapped.
pub(crate) fn untouched_pages(base: u64, bytes: u64) -> Option<usize> {
    let first = base / 4096 * 4096;
    let end = base.checked_add(bytes)?.checked_next_multiple_of(4096)?;
    let bytes = (end - first) as usize;
    let mut answers = vec![0_u8; bytes / 4096];
    let known = unsafe { libc::mincore(first as *mut _, bytes, answers.as_mut_ptr()) } == 0;
    known.then(|| answers.iter().filter(|&&answer| answer & 1 == 0).count())
}
