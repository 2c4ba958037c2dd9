//! The device address space of this process: regions, and the devices that may access them.
//!
//! Addresses come from one reservation and are never reused, so freed addresses stay invalid.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::abi::*;
use crate::segment::{Mapping, Segment};

/// What devices hand out addresses and VMM sizes in.
pub(crate) const GRANULE: u64 = 2 << 20;
const ADDRESSES: u64 = 4 << 40;

#[derive(Default)]
pub(crate) struct Space {
    reserved: Option<Mapping>,
    /// Bytes of the reservation that were given out.
    given: u64,
    pub regions: BTreeMap<u64, Region>,
}

pub(crate) struct Region {
    pub bytes: u64,
    pub mapping: Arc<Mapping>,
    pub kind: RegionKind,
}

pub(crate) enum RegionKind {
    /// `cuMemAlloc`: the device and the file by which another process opens it.
    Own(usize, Segment),
    /// `cuIpcOpenMemHandle`, and the number of opens.
    Foreign {
        device: usize,
        handle: [u8; 64],
        opens: u32,
    },
    /// `cuMemAddressReserve`, with what is mapped by offset.
    Reserved(BTreeMap<u64, MappedPart>),
}

/// `cuMemMap`: part of a reservation, which `devices` may touch.
pub(crate) struct MappedPart {
    pub bytes: u64,
    pub devices: Vec<usize>,
}

impl Region {
    /// Whether a stream has work on it.
    pub(crate) fn in_use(&self) -> bool {
        Arc::strong_count(&self.mapping) > 1
    }

    /// The device that an allocation is of.
    pub(crate) fn device(&self) -> Option<usize> {
        match self.kind {
            RegionKind::Own(device, _) | RegionKind::Foreign { device, .. } => Some(device),
            RegionKind::Reserved(_) => None,
        }
    }
}

impl Space {
    fn first(&self) -> u64 {
        let first = self.reserved.as_ref().map_or(0, |r| r.at(0) as u64);
        first.next_multiple_of(GRANULE)
    }

    /// Whether an address is one of a device, live or not.
    pub(crate) fn covers(&self, address: u64) -> bool {
        self.reserved.is_some() && (self.first()..self.first() + self.given).contains(&address)
    }

    /// Adds a region; addresses of nothing follow each.
    pub(crate) fn add(
        &mut self,
        bytes: u64,
        mapping: Mapping,
        kind: RegionKind,
    ) -> CudaResult<u64> {
        if self.reserved.is_none() {
            self.reserved = Some(Mapping::reserve(ADDRESSES)?);
        }
        let at = self.first() + self.given;
        let taken = bytes.saturating_add(2 * GRANULE) / GRANULE * GRANULE;
        if taken > ADDRESSES - GRANULE - self.given {
            return Err(Fault::Code(ERROR_OUT_OF_MEMORY));
        }
        self.given += taken;
        let mapping = Arc::new(mapping);
        let region = Region {
            bytes,
            mapping,
            kind,
        };
        self.regions.insert(at, region);
        Ok(at)
    }

    /// Start and size of the allocation or mapping around an address.
    pub(crate) fn range(&self, address: u64) -> Option<(u64, u64)> {
        let (base, region) = self.regions.range(..=address).next_back()?;
        let (start, bytes) = match &region.kind {
            RegionKind::Reserved(parts) => {
                let (offset, part) = parts.range(..=address - base).next_back()?;
                (base + offset, part.bytes)
            }
            _ => (*base, region.bytes),
        };
        (address - start < bytes).then_some((start, bytes))
    }

    /// Locates `bytes` at `address` for a device: where the fake driver sees them, and what keeps them mapped.
    pub(crate) fn find(
        &self,
        address: u64,
        bytes: u64,
        device: usize,
        what: &str,
    ) -> CudaResult<(*mut u8, Arc<Mapping>)> {
        let refuse = |why: &str| {
            let text = format!("{what}: {bytes} bytes at {address:#x}: {why}");
            Err(Fault::Wrong(ERROR_INVALID_VALUE, text))
        };
        let around = self.regions.range(..=address).next_back();
        let Some((base, region)) = around.filter(|(base, r)| address - **base < r.bytes) else {
            return refuse("not in a live allocation or mapping");
        };
        let offset = address - base;
        if bytes > region.bytes - offset {
            return refuse(&format!("beyond the {} bytes at {base:#x}", region.bytes));
        }
        if let Some(owner) = region.device().filter(|&owner| owner != device) {
            return refuse(&format!(
                "memory of device {owner}, touched by device {device}"
            ));
        }
        if let RegionKind::Reserved(parts) = &region.kind {
            let mut at = offset;
            while at < offset + bytes {
                match parts.range(..=at).next_back() {
                    Some((start, part)) if at - start < part.bytes => {
                        if !part.devices.contains(&device) {
                            return refuse("mapped, but without access for this device");
                        }
                        at = start + part.bytes;
                    }
                    _ => return refuse("reserved, but nothing is mapped there"),
                }
            }
        }
        Ok((region.mapping.at(offset), region.mapping.clone()))
    }

    /// The reservation in which all of a range lies, and the range's offset.
    pub(crate) fn reservation(
        &mut self,
        at: u64,
        bytes: u64,
    ) -> CudaResult<(u64, &Arc<Mapping>, &mut BTreeMap<u64, MappedPart>)> {
        if bytes > 0
            && (at | bytes).is_multiple_of(GRANULE)
            && let Some((base, region)) = self.regions.range_mut(..=at).next_back()
            && let RegionKind::Reserved(parts) = &mut region.kind
            && bytes <= region.bytes.saturating_sub(at - base)
        {
            return Ok((at - base, &region.mapping, parts));
        }
        Err(wrong!(
            ERROR_INVALID_VALUE,
            "{bytes} bytes at {at:#x} are not in a reservation, or not multiples of {GRANULE}"
        ))
    }
}
