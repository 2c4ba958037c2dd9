//! Bytes that are not what they should be.

use std::sync::Arc;

use kvtier_memory::{Arena, ArenaKind, Extent};

use super::rule::Harm;
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, StoreItem};

fn memory(error: impl std::fmt::Display) -> L2Error {
    L2Error::new(ErrorKind::Memory, format!("fault_inject: {error}"))
}

/// The same object with other bytes, in memory of its own: those in L1 are somebody else's. `draw` says which bit.
pub(super) fn to_store(item: StoreItem, harm: Harm, draw: u64) -> Result<StoreItem, L2Error> {
    let mut bytes = Vec::new();
    item.from
        .read_into(0, item.from.len(), &mut bytes)
        .map_err(memory)?;
    match harm {
        Harm::Short => bytes.truncate(bytes.len() / 2),
        Harm::Long => bytes.push(draw as u8),
        Harm::Corrupt => flip(&mut bytes, draw),
    }
    let len = bytes.len() as u64;
    let arena = Arena::create(ArenaKind::Anonymous, len.max(1)).map_err(memory)?;
    let from = Buffer::new(Arc::new(arena), Extent { offset: 0, len }, Arc::new(()));
    from.write(0, &bytes).map_err(memory)?;
    let mut object = item.object;
    object.len = len;
    Ok(StoreItem { object, from })
}

/// Other bytes in the place of those that were loaded. `draw` says which bit.
pub(super) fn loaded(to: &Buffer, harm: Harm, draw: u64) -> Result<(), L2Error> {
    let (at, len) = match harm {
        Harm::Corrupt if to.is_empty() => return Ok(()),
        Harm::Corrupt => (draw % to.len(), 1),
        Harm::Short | Harm::Long => (to.len() / 2, to.len() - to.len() / 2),
    };
    let mut bytes = Vec::new();
    to.read_into(at, len, &mut bytes).map_err(memory)?;
    match harm {
        Harm::Corrupt => flip(&mut bytes, draw),
        // Not one byte is what it was, whatever it was.
        Harm::Short | Harm::Long => bytes.iter_mut().for_each(|byte| *byte = !*byte),
    }
    to.write(at, &bytes).map_err(memory)
}

fn flip(bytes: &mut [u8], draw: u64) {
    let at = draw.checked_rem(bytes.len() as u64);
    if let Some(byte) = at.and_then(|at| bytes.get_mut(at as usize)) {
        *byte ^= 1 << (draw >> 61);
    }
}
