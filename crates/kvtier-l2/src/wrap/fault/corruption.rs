//! Corruption of the bytes of objects.

use std::sync::Arc;

use kvtier_memory::{Arena, ArenaKind, Extent};

use super::rule::Corruption;
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, StoreItem};

fn memory(error: impl std::fmt::Display) -> L2Error {
    L2Error::new(ErrorKind::Memory, format!("fault_inject: {error}"))
}

/// Returns the object with corrupted bytes, in memory of its own, as those in L1 are in use. `draw` chooses the bit.
pub(super) fn corrupt_store(
    item: StoreItem,
    corruption: Corruption,
    draw: u64,
) -> Result<StoreItem, L2Error> {
    let mut bytes = Vec::new();
    item.from
        .read_into(0, item.from.len(), &mut bytes)
        .map_err(memory)?;
    match corruption {
        Corruption::Short => bytes.truncate(bytes.len() / 2),
        Corruption::Long => bytes.push(draw as u8),
        Corruption::Corrupt => flip(&mut bytes, draw),
    }
    let len = bytes.len() as u64;
    let arena = Arena::create(ArenaKind::Anonymous, len.max(1)).map_err(memory)?;
    let from = Buffer::new(Arc::new(arena), Extent { offset: 0, len }, Arc::new(()));
    from.write(0, &bytes).map_err(memory)?;
    let mut object = item.object;
    object.len = len;
    Ok(StoreItem { object, from })
}

/// Corrupts loaded bytes in place. `draw` chooses the bit.
pub(super) fn corrupt_loaded(
    to: &Buffer,
    corruption: Corruption,
    draw: u64,
) -> Result<(), L2Error> {
    let (at, len) = match corruption {
        Corruption::Corrupt if to.is_empty() => return Ok(()),
        Corruption::Corrupt => (draw % to.len(), 1),
        Corruption::Short | Corruption::Long => (to.len() / 2, to.len() - to.len() / 2),
    };
    let mut bytes = Vec::new();
    to.read_into(at, len, &mut bytes).map_err(memory)?;
    match corruption {
        Corruption::Corrupt => flip(&mut bytes, draw),
        // Changes each byte, whatever it was.
        Corruption::Short | Corruption::Long => bytes.iter_mut().for_each(|byte| *byte = !*byte),
    }
    to.write(at, &bytes).map_err(memory)
}

fn flip(bytes: &mut [u8], draw: u64) {
    let at = draw.checked_rem(bytes.len() as u64);
    if let Some(byte) = at.and_then(|at| bytes.get_mut(at as usize)) {
        *byte ^= 1 << (draw >> 61);
    }
}
