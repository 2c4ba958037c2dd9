//! Handles of memory and events for other processes.

use super::exports;
use super::memory::note_use;
use crate::abi::*;
use crate::event::{self, Event, File, Record};
use crate::segment::{self, Mapping, Owner};
use crate::space::Kind;
use crate::world::world;

const MEMORY: &[u8; 8] = b"KVT-mem\0";
pub(super) const MEMORY_FABRIC: &[u8; 8] = b"KVT-fab\0";
const EVENT: &[u8; 8] = b"KVT-evt\0";

/// The 64 bytes of a handle: the owner, the kind and its `id`. `bytes` is a size, or an event's generation.
pub(super) struct Handle {
    kind: &'static [u8; 8],
    pub owner: Owner,
    pub id: u64,
    pub bytes: u64,
    uuid: [u8; 16],
}

impl Handle {
    pub(super) fn ours(
        kind: &'static [u8; 8],
        id: u64,
        bytes: u64,
        device: usize,
    ) -> Outcome<Self> {
        let uuid = uuid_of(device)?;
        Ok(Self {
            kind,
            owner: Owner::us(),
            id,
            bytes,
            uuid,
        })
    }

    pub(super) fn to_bytes(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(self.kind);
        let numbers = [
            u64::from(self.owner.pid),
            self.owner.start,
            self.owner.library,
            self.id,
            self.bytes,
        ];
        for (to, number) in bytes[8..48].chunks_exact_mut(8).zip(numbers) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        bytes[48..].copy_from_slice(&self.uuid);
        bytes
    }

    pub(super) fn parse(from: *const [u8; 64], kind: &'static [u8; 8]) -> Outcome<Self> {
        if from.is_null() {
            return Err(wrong!(ERROR_INVALID_VALUE, "no handle"));
        }
        Self::read(unsafe { &*from }, kind)
    }

    fn read(from: &[u8; 64], kind: &'static [u8; 8]) -> Outcome<Self> {
        if from[..8] != kind[..] {
            return Err(wrong!(
                ERROR_INVALID_HANDLE,
                "these 64 bytes are no such handle"
            ));
        }
        let number = |n: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&from[8 + 8 * n..16 + 8 * n]);
            u64::from_le_bytes(bytes)
        };
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&from[48..]);
        let pid = u32::try_from(number(0)).map_err(|_| Fault::Code(ERROR_INVALID_HANDLE))?;
        let owner = Owner {
            pid,
            start: number(1),
            library: number(2),
        };
        Ok(Self {
            kind,
            owner,
            id: number(3),
            bytes: number(4),
            uuid,
        })
    }

    /// Refuses handles of this process, as the driver does, and of other devices, which are no peers here.
    fn foreign(self, device: usize) -> Outcome<Self> {
        if self.owner.pid == std::process::id() {
            return Err(wrong!(
                ERROR_INVALID_CONTEXT,
                "the handle is of this very process"
            ));
        }
        if self.uuid != uuid_of(device)? {
            return Err(wrong!(
                ERROR_PEER_ACCESS_UNSUPPORTED,
                "the handle is of another device"
            ));
        }
        Ok(self)
    }
}

fn uuid_of(device: usize) -> Outcome<[u8; 16]> {
    let script = world().script.lock();
    script
        .devices
        .get(device)
        .map(|d| d.uuid)
        .ok_or(Fault::Code(ERROR_INVALID_DEVICE))
}

exports! {
    fn cuIpcGetMemHandle(to: *mut [u8; 64], at: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let Some((_, region)) = state.space.around(at) else {
            return Err(wrong!(ERROR_INVALID_VALUE, "{at:#x} is not in a live allocation"));
        };
        match &region.kind {
            Kind::Own { device, id, .. } => put(to, Handle::ours(MEMORY, *id, region.bytes, *device)?.to_bytes()),
            _ => Err(wrong!(ERROR_INVALID_VALUE, "{at:#x} is not memory of cuMemAlloc")),
        }
    }

    // A `CUipcMemHandle` goes by value: as 64 bytes are passed in memory, a structure has to be one here, too.
    fn cuIpcOpenMemHandle_v2(to: *mut u64, handle: Bytes64, flags: u32) {
        let mut state = world().state.lock();
        let device = state.current()?;
        if flags != IPC_LAZY_PEER {
            return Err(wrong!(ERROR_INVALID_VALUE, "flags {flags}; LAZY_ENABLE_PEER_ACCESS is the only one"));
        }
        let name = Handle::read(&handle.0, MEMORY)?.foreign(device)?;
        for (at, region) in state.space.regions() {
            if let Kind::Foreign { device: d, handle: known, opens } = &mut region.kind
                && *d == device
                && *known == handle.0
            {
                *opens += 1;
                return put(to, at);
            }
        }
        let none = || Fault::Code(ERROR_INVALID_HANDLE);
        let fd = segment::open_of(&name.owner, &format!("m{:x}", name.id)).ok_or_else(none)?;
        use std::os::fd::AsRawFd as _;
        if segment::bytes_of(fd.as_raw_fd()) != name.bytes {
            return Err(none());
        }
        let mapping = Mapping::of(&fd, name.bytes).ok_or(Fault::Code(ERROR_MAP_FAILED))?;
        let kind = Kind::Foreign { device, handle: handle.0, opens: 1 };
        put(to, state.space.add(name.bytes, mapping, kind)?)
    }

    fn cuIpcCloseMemHandle(at: u64) {
        let mut state = world().state.lock();
        let current = state.current()?;
        match state.space.get(at).map(|region| &mut region.kind) {
            Some(Kind::Foreign { device, opens, .. }) => {
                if *device != current {
                    return Err(wrong!(ERROR_INVALID_CONTEXT, "opened on device {device}, closed in another context"));
                }
                *opens -= 1;
                if *opens > 0 {
                    return Ok(());
                }
            }
            _ => return Err(wrong!(ERROR_INVALID_VALUE, "nothing that was opened starts at {at:#x}, or it was closed")),
        }
        let region = state.space.remove(at);
        note_use(region.is_some_and(|region| region.mapping.in_use()), "cuIpcCloseMemHandle", at);
        Ok(())
    }

    fn cuIpcGetEventHandle(to: *mut [u8; 64], event: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let event = state.event(event)?;
        if event.imported || event.flags & EVENT_INTERPROCESS == 0 {
            return Err(wrong!(ERROR_INVALID_HANDLE, "not an event made with INTERPROCESS here"));
        }
        let generation = event.record.slot().generation.load(std::sync::atomic::Ordering::Acquire);
        let handle = Handle::ours(EVENT, u64::from(event.record.index), u64::from(generation), event.device)?;
        put(to, handle.to_bytes())
    }

    fn cuIpcOpenEventHandle(to: *mut u64, handle: Bytes64) {
        let mut state = world().state.lock();
        let device = state.current()?;
        let name = Handle::read(&handle.0, EVENT)?.foreign(device)?;
        let invalid = || Fault::Code(ERROR_INVALID_HANDLE);
        let file = segment::open_of(&name.owner, event::FILE).and_then(|fd| File::open(&fd)).ok_or_else(invalid)?;
        let record = u32::try_from(name.id).ok().and_then(|index| Record::new(file, index)).ok_or_else(invalid)?;
        if u64::from(record.slot().generation.load(std::sync::atomic::Ordering::Acquire)) != name.bytes {
            return Err(invalid());
        }
        let stuck = world().script.lock().import_never.as_mut().is_some_and(|when| when.hit());
        let flags = EVENT_DISABLE_TIMING | EVENT_INTERPROCESS;
        let event = Event { record, flags, device, imported: true, stuck, stamp: Default::default() };
        let id = state.handle();
        state.events.insert(id, event);
        put(to, id)
    }
}

/// `CUipcMemHandle` and `CUipcEventHandle`.
#[repr(C)]
pub struct Bytes64([u8; 64]);
