//! The device address space of this process: regions, and the devices that may access them.
//!
//! Addresses come from one reservation and are never reused, so freed addresses stay invalid.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::abi::{
    ERROR_INVALID_VALUE, ERROR_NOT_MAPPED, ERROR_OUT_OF_MEMORY, Fault, Outcome, wrong,
};
use crate::segment::{Held, Mapping, Segment};

/// What devices hand out addresses and VMM sizes in.
pub(crate) const GRANULE: u64 = 2 << 20;
const ADDRESSES: u64 = 4 << 40;

pub(crate) struct Space {
    reserved: Option<Mapping>,
    next: u64,
    regions: BTreeMap<u64, Region>,
}

pub(crate) struct Region {
    pub bytes: u64,
    pub mapping: Arc<Mapping>,
    pub kind: Kind,
}

pub(crate) enum Kind {
    /// `cuMemAlloc`: the name another process opens it by.
    Own {
        device: usize,
        id: u64,
        _segment: Segment,
    },
    /// `cuIpcOpenMemHandle`, and the number of opens.
    Foreign {
        device: usize,
        handle: [u8; 64],
        opens: u32,
    },
    /// `cuMemAddressReserve`.
    Reserved { pieces: BTreeMap<u64, Piece> },
}

/// `cuMemMap`: a physical allocation in a reservation, by offset; `devices` may touch it.
pub(crate) struct Piece {
    pub bytes: u64,
    pub _physical: Arc<Physical>,
    pub devices: Vec<usize>,
}

/// `cuMemCreate`, or imported.
pub(crate) struct Physical {
    pub id: u64,
    pub device: usize,
    pub bytes: u64,
    pub segment: PhysicalFile,
    /// The kinds of handles it can be shared by.
    pub shareable: u32,
}

pub(crate) enum PhysicalFile {
    Own(Segment),
    Imported(std::os::fd::OwnedFd),
}

impl Physical {
    pub(crate) fn fd(&self) -> &std::os::fd::OwnedFd {
        match &self.segment {
            PhysicalFile::Own(segment) => &segment.fd,
            PhysicalFile::Imported(fd) => fd,
        }
    }
}

/// Located device memory: its address in the fake driver, and the guard that keeps it mapped.
pub(crate) struct Found {
    pub at: *mut u8,
    pub held: Held,
}

impl Space {
    pub(crate) fn new() -> Self {
        Self {
            reserved: None,
            next: 0,
            regions: BTreeMap::new(),
        }
    }

    /// Whether an address is one of a device, live or not.
    pub(crate) fn covers(&self, address: u64) -> bool {
        let first = self.reserved.as_ref().map_or(0, |r| r.at(0) as u64);
        first != 0 && (first..first + ADDRESSES).contains(&address)
    }

    /// A new region; a page of nothing follows each.
    pub(crate) fn add(&mut self, bytes: u64, mapping: Mapping, kind: Kind) -> Outcome<u64> {
        if self.reserved.is_none() {
            let reserved = Mapping::reserve(ADDRESSES).ok_or(Fault::Code(ERROR_OUT_OF_MEMORY))?;
            self.next = (reserved.at(0) as u64).next_multiple_of(GRANULE);
            self.reserved = Some(reserved);
        }
        let at = self.next;
        let after = bytes
            .checked_next_multiple_of(GRANULE)
            .and_then(|b| (at + GRANULE).checked_add(b));
        self.next = after
            .filter(|&after| self.covers(after))
            .ok_or(Fault::Code(ERROR_OUT_OF_MEMORY))?;
        self.regions.insert(
            at,
            Region {
                bytes,
                mapping: Arc::new(mapping),
                kind,
            },
        );
        Ok(at)
    }

    pub(crate) fn get(&mut self, base: u64) -> Option<&mut Region> {
        self.regions.get_mut(&base)
    }

    pub(crate) fn remove(&mut self, base: u64) -> Option<Region> {
        self.regions.remove(&base)
    }

    /// Removes the regions of a device's context; returns their number.
    pub(crate) fn drop_of(&mut self, device: usize) -> usize {
        let n = self.regions.len();
        self.regions.retain(|_, region| match &region.kind {
            Kind::Own { device: d, .. } | Kind::Foreign { device: d, .. } => *d != device,
            Kind::Reserved { .. } => true,
        });
        n - self.regions.len()
    }

    pub(crate) fn regions(&mut self) -> impl Iterator<Item = (u64, &mut Region)> {
        self.regions
            .iter_mut()
            .map(|(base, region)| (*base, region))
    }

    /// The region that an address is in.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, &Region)> {
        let (base, region) = self.regions.range(..=address).next_back()?;
        (address - base < region.bytes).then_some((*base, region))
    }

    /// Start and size of the allocation or mapping around an address.
    pub(crate) fn range(&self, address: u64) -> Option<(u64, u64)> {
        let (base, region) = self.around(address)?;
        match &region.kind {
            Kind::Reserved { pieces } => {
                let (offset, piece) = pieces.range(..=address - base).next_back()?;
                (address - base - offset < piece.bytes).then_some((base + offset, piece.bytes))
            }
            _ => Some((base, region.bytes)),
        }
    }

    /// `bytes` at `address`, to be touched by `device`.
    pub(crate) fn find(
        &self,
        address: u64,
        bytes: u64,
        device: usize,
        what: &str,
    ) -> Outcome<Found> {
        let refuse = |why: &str| {
            Err(wrong!(
                ERROR_INVALID_VALUE,
                "{what}: {bytes} bytes at {address:#x}: {why}"
            ))
        };
        let Some((base, region)) = self.around(address) else {
            return refuse("not in a live allocation or mapping");
        };
        let offset = address - base;
        if bytes > region.bytes - offset {
            return refuse(&format!("beyond the {} bytes at {base:#x}", region.bytes));
        }
        match &region.kind {
            Kind::Own { device: d, .. } | Kind::Foreign { device: d, .. } if *d != device => {
                return refuse(&format!("memory of device {d}, touched by device {device}"));
            }
            Kind::Reserved { pieces } => {
                let mut at = offset;
                while at < offset + bytes {
                    match pieces.range(..=at).next_back() {
                        Some((start, piece)) if at - start < piece.bytes => {
                            if !piece.devices.contains(&device) {
                                return refuse("mapped, but without access for this device");
                            }
                            at = start + piece.bytes;
                        }
                        _ => return refuse("reserved, but nothing is mapped there"),
                    }
                }
            }
            _ => {}
        }
        Ok(Found {
            at: region.mapping.at(offset),
            held: Held::new(&region.mapping),
        })
    }

    /// The reservation in which all of a range lies, and the range's offset.
    pub(crate) fn reservation(
        &mut self,
        address: u64,
        bytes: u64,
    ) -> Outcome<(u64, &Arc<Mapping>, &mut BTreeMap<u64, Piece>)> {
        let refuse = || {
            wrong!(
                ERROR_INVALID_VALUE,
                "{bytes} bytes at {address:#x} are not in a reservation"
            )
        };
        if bytes == 0 || !bytes.is_multiple_of(GRANULE) || !address.is_multiple_of(GRANULE) {
            return Err(wrong!(
                ERROR_INVALID_VALUE,
                "{bytes} bytes at {address:#x}: not multiples of the granularity, {GRANULE}"
            ));
        }
        let (base, region) = self
            .regions
            .range_mut(..=address)
            .next_back()
            .ok_or_else(refuse)?;
        let offset = address - base;
        match &mut region.kind {
            Kind::Reserved { pieces }
                if offset < region.bytes && bytes <= region.bytes - offset =>
            {
                Ok((offset, &region.mapping, pieces))
            }
            _ => Err(refuse()),
        }
    }

    /// The offsets of the pieces that fill a range of a reservation exactly.
    pub(crate) fn pieces(
        pieces: &BTreeMap<u64, Piece>,
        offset: u64,
        bytes: u64,
    ) -> Outcome<Vec<u64>> {
        let mut at = offset;
        let mut found = Vec::new();
        for (start, piece) in pieces.range(offset..offset + bytes) {
            if *start != at {
                break;
            }
            found.push(*start);
            at += piece.bytes;
        }
        if at == offset + bytes {
            Ok(found)
        } else {
            Err(wrong!(
                ERROR_NOT_MAPPED,
                "the range does not consist of whole mappings"
            ))
        }
    }
}
