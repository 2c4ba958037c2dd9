//! Handles of memory and events for other processes.

use super::exports;
use super::memory::note_use;
use crate::abi::*;
use crate::event::{Event, EventRecord};
use crate::segment::{Mapping, bytes_of, open_foreign};
use crate::space::RegionKind;
use crate::world::world;

exports! {
    fn cuIpcGetMemHandle(to: *mut [u8; 64], at: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let base = state.space.range(at).map(|(base, _)| base);
        match base.and_then(|base| state.space.regions.get(&base)).map(|region| &region.kind) {
            Some(RegionKind::Own(device, segment)) => put(to, segment.handle(*device)),
            _ => Err(wrong!(ERROR_INVALID_VALUE, "{at:#x} is not memory of cuMemAlloc")),
        }
    }

    // A `CUipcMemHandle` goes by value: as 64 bytes are passed in memory, a structure has to be one here, too.
    fn cuIpcOpenMemHandle_v2(to: *mut u64, handle: Bytes64, flags: u32) {
        let mut state = world().state.lock();
        let current = state.current()?;
        if flags != IPC_LAZY_PEER {
            return Err(wrong!(ERROR_INVALID_VALUE, "flags {flags}; LAZY_ENABLE_PEER_ACCESS is the only one"));
        }
        for (at, region) in &mut state.space.regions {
            if let RegionKind::Foreign { device, handle: known, opens } = &mut region.kind
                && (*device, *known) == (current, handle.0)
            {
                *opens += 1;
                return put(to, *at);
            }
        }
        let fd = open_foreign(&handle.0, 'm', current)?;
        let kind = RegionKind::Foreign { device: current, handle: handle.0, opens: 1 };
        put(to, state.space.add(bytes_of(&fd), Mapping::of(&fd)?, kind)?)
    }

    fn cuIpcCloseMemHandle(at: u64) {
        let mut state = world().state.lock();
        let current = state.current()?;
        let Some(region) = state.space.regions.get_mut(&at) else {
            return Err(wrong!(ERROR_INVALID_VALUE, "nothing that was opened starts at {at:#x}, or it was closed"));
        };
        match &mut region.kind {
            RegionKind::Foreign { device, opens, .. } if *device == current => {
                *opens -= 1;
                if *opens > 0 {
                    return Ok(());
                }
            }
            _ => return Err(wrong!(ERROR_INVALID_CONTEXT, "{at:#x} was not opened in the current context")),
        }
        note_use(region.in_use(), "cuIpcCloseMemHandle", at);
        state.space.regions.remove(&at);
        Ok(())
    }

    fn cuIpcGetEventHandle(to: *mut [u8; 64], event: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let event = state.event(event)?;
        match &event.segment {
            Some(segment) if event.flags & EVENT_INTERPROCESS != 0 => put(to, segment.handle(event.device)),
            _ => Err(wrong!(ERROR_INVALID_HANDLE, "not an event made with INTERPROCESS here")),
        }
    }

    fn cuIpcOpenEventHandle(to: *mut u64, handle: Bytes64) {
        let mut state = world().state.lock();
        let device = state.current()?;
        let record = EventRecord::of(&open_foreign(&handle.0, 'e', device)?)?;
        let flags = EVENT_DISABLE_TIMING | EVENT_INTERPROCESS;
        let id = state.handle();
        state.events.insert(id, Event { record, flags, device, segment: None });
        put(to, id)
    }
}

/// `CUipcMemHandle` and `CUipcEventHandle`.
#[repr(C)]
pub struct Bytes64([u8; 64]);
