//! Host memory that the driver knows: registered, or allocated by it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::abi::{
    ERROR_HOST_MEMORY_ALREADY_REGISTERED, ERROR_HOST_MEMORY_NOT_REGISTERED, ERROR_INVALID_VALUE,
    HOST_REGISTER_PORTABLE, Outcome, wrong,
};

#[derive(Default)]
pub(crate) struct Host {
    ranges: BTreeMap<u64, Range>,
}

pub(crate) struct Range {
    pub bytes: u64,
    pub device: usize,
    pub flags: u32,
    /// Whether `cuMemHostAlloc` made it.
    pub owned: bool,
    /// Cloned by work in flight.
    pub users: Arc<()>,
}

impl Range {
    pub(crate) fn in_use(&self) -> bool {
        Arc::strong_count(&self.users) > 1
    }
}

/// Host memory as a copy meets it.
pub(crate) enum Place {
    Registered { users: Arc<()>, flags: u32 },
    Pageable,
}

impl Host {
    pub(crate) fn add(
        &mut self,
        device: usize,
        base: u64,
        bytes: u64,
        flags: u32,
        owned: bool,
    ) -> Outcome {
        let end = base
            .checked_add(bytes)
            .filter(|_| base != 0 && bytes > 0)
            .ok_or_else(|| wrong!(ERROR_INVALID_VALUE, "{bytes} bytes at {base:#x}"))?;
        if let Some((at, range)) = self.ranges.range(..end).next_back()
            && at + range.bytes > base
        {
            return Err(wrong!(
                ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                "{bytes} bytes at {base:#x} overlap {} at {at:#x}",
                range.bytes
            ));
        }
        self.ranges.insert(
            base,
            Range {
                bytes,
                device,
                flags,
                owned,
                users: Arc::new(()),
            },
        );
        Ok(())
    }

    pub(crate) fn remove(&mut self, base: u64, owned: bool) -> Outcome<Range> {
        match self.ranges.remove(&base) {
            Some(range) if range.owned == owned => Ok(range),
            Some(range) => {
                self.ranges.insert(base, range);
                Err(wrong!(
                    ERROR_INVALID_VALUE,
                    "{base:#x} was made by the other kind of call"
                ))
            }
            None => Err(wrong!(
                ERROR_HOST_MEMORY_NOT_REGISTERED,
                "nothing starts at {base:#x}"
            )),
        }
    }

    /// Removes the registrations of a device's context; returns their number.
    pub(crate) fn drop_of(&mut self, device: usize) -> usize {
        let n = self.ranges.len();
        self.ranges.retain(|_, range| range.device != device);
        n - self.ranges.len()
    }

    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Locates `bytes` at `address` for a device. The driver refuses ranges only partly in one registration; another
    /// device's registration is one for all if it is PORTABLE.
    pub(crate) fn find(
        &self,
        address: u64,
        bytes: u64,
        device: usize,
        what: &str,
    ) -> Outcome<Place> {
        let end = address
            .checked_add(bytes)
            .filter(|_| address != 0)
            .ok_or_else(|| {
                wrong!(
                    ERROR_INVALID_VALUE,
                    "{what}: {bytes} bytes at host address {address:#x}"
                )
            })?;
        match self.ranges.range(..end).next_back() {
            Some((at, range)) if at + range.bytes > address => {
                if range.device != device && range.flags & HOST_REGISTER_PORTABLE == 0 {
                    return Ok(Place::Pageable);
                }
                if *at <= address && end <= at + range.bytes {
                    return Ok(Place::Registered {
                        users: range.users.clone(),
                        flags: range.flags,
                    });
                }
                Err(wrong!(
                    ERROR_INVALID_VALUE,
                    "{what}: {bytes} bytes at host address {address:#x} are partly outside the registration \
                     of {} bytes at {at:#x}",
                    range.bytes
                ))
            }
            _ => Ok(Place::Pageable),
        }
    }
}

/// Number of pages of a range that have no memory yet; `None` if not all of it is mapped.
pub(crate) fn untouched_pages(base: u64, bytes: u64) -> Option<u64> {
    let page = 4096;
    let first = base / page * page;
    let end = base.checked_add(bytes)?.checked_next_multiple_of(page)?;
    // In pieces, so that the answers need little memory.
    let mut answers = vec![0_u8; 1 << 16];
    let step = (answers.len() as u64) * page;
    let mut untouched = 0;
    for at in (first..end).step_by(step as usize) {
        let n = step.min(end - at) as usize;
        if unsafe { libc::mincore(at as *mut _, n, answers.as_mut_ptr()) } != 0 {
            return None;
        }
        let answers = &answers[..n / page as usize];
        untouched += answers.iter().filter(|&answer| answer & 1 == 0).count() as u64;
    }
    Some(untouched)
}
