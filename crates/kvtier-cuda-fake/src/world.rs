//! The driver's state in this process: devices, contexts, and the objects behind handles.

use std::any::Any;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;

use crate::abi::*;
use crate::event::Event;
use crate::host::Host;
use crate::journal::Journal;
use crate::kernel::{Function, Module};
use crate::script::Script;
use crate::segment::Segment;
use crate::space::Space;
use crate::stream::{Stream, until};

pub(crate) struct World {
    pub script: Mutex<Script>,
    pub journal: Journal,
    pub state: Mutex<WorldState>,
}

#[derive(Default)]
pub(crate) struct WorldState {
    /// Set by `cuInit`.
    pub devices: Option<Vec<Device>>,
    pub space: Space,
    pub host: Host,
    pub streams: HashMap<u64, Arc<Stream>>,
    pub events: HashMap<u64, Event>,
    pub modules: HashMap<u64, Module>,
    pub functions: HashMap<u64, Function>,
    pub physical: HashMap<u64, Physical>,
    last: u64,
}

#[derive(Default)]
pub(crate) struct Device {
    pub retained: u32,
    pub used: u64,
    /// The stream that handles 0, 1 and 2 mean.
    default: Option<Arc<Stream>>,
    /// Set by a failing kernel; every later call of the device returns it.
    pub poison: CUresult,
}

/// `cuMemCreate`, or imported.
pub(crate) struct Physical {
    pub device: usize,
    pub fd: std::os::fd::OwnedFd,
    pub segment: Option<Segment>,
}

/// Memory as a copy meets it: where it is, and what holds it.
pub(crate) struct Touched {
    pub at: *mut u8,
    pub kind: MemoryKind,
    pub held: Option<Arc<dyn Any + Send + Sync>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    Device,
    /// With the flags of the registration.
    Registered(u32),
    Pageable,
}

// Any thread may access the bytes, as with a real device.
unsafe impl Send for Touched {}

thread_local! {
    /// The context that is current on a thread; 0: none.
    pub(crate) static CURRENT: Cell<u64> = const { Cell::new(0) };
    /// Whether this thread runs a host function of a stream.
    pub(crate) static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    crate::segment::clean_up();
    let world = World {
        script: Mutex::default(),
        journal: Journal::default(),
        state: Mutex::default(),
    };
    if let Ok(text) = std::env::var("KVTIER_CUDA_FAKE")
        && let Err(why) = world.script.lock().apply(&text, crate::api::knows)
    {
        // Continuing would test something else than intended.
        eprintln!("KVTIER_CUDA_FAKE: {why}");
        std::process::abort();
    }
    world
});

pub(crate) fn world() -> &'static World {
    &WORLD
}

impl World {
    /// Counts a call, or the start of work on a stream, and holds it as scripted; returns the code with which it fails.
    pub(crate) fn pass(&self, name: &str) -> Option<CUresult> {
        self.journal.add(name, 1);
        let (held, fails) = self.script.lock().act(name);
        if held {
            until(|| !self.script.lock().holds(name));
        }
        fails
    }
}

const CONTEXTS: u64 = 0x00c0_c000_0000;

/// The handle of a device's primary context.
pub(crate) fn context(device: usize) -> u64 {
    CONTEXTS + device as u64 * 0x100
}

impl WorldState {
    pub(crate) fn devices(&mut self) -> &mut Vec<Device> {
        self.devices.get_or_insert_default()
    }

    pub(crate) fn device(&mut self, ordinal: i32) -> CudaResult<usize> {
        let n = self.devices().len();
        let device = usize::try_from(ordinal).ok().filter(|&d| d < n);
        device.ok_or_else(|| wrong!(ERROR_INVALID_DEVICE, "device {ordinal} of {n}"))
    }

    /// The device of a context that is retained.
    pub(crate) fn device_of(&mut self, of: u64) -> Option<usize> {
        let mut retained = self.devices().iter().enumerate();
        retained
            .find(|(device, d)| d.retained > 0 && context(*device) == of)
            .map(|(device, _)| device)
    }

    /// The device whose context is current on this thread.
    pub(crate) fn current(&mut self) -> CudaResult<usize> {
        let current = CURRENT.get();
        let Some(device) = self.device_of(current) else {
            let why = match current {
                0 => "no context is current on this thread",
                _ => "the current context was released",
            };
            return Err(Fault::Wrong(ERROR_INVALID_CONTEXT, why.into()));
        };
        self.healthy(device).map(|()| device)
    }

    /// Whether no kernel of a device's context went wrong.
    pub(crate) fn healthy(&mut self, device: usize) -> CudaResult {
        match self.devices()[device].poison {
            SUCCESS => Ok(()),
            code => Err(Fault::Code(code)),
        }
    }

    /// A handle that was never used.
    pub(crate) fn handle(&mut self) -> u64 {
        self.last += 1;
        0x5ca1_0000_0000 + self.last * 0x10
    }

    /// A stream of the current context.
    pub(crate) fn stream(&mut self, handle: u64) -> CudaResult<Arc<Stream>> {
        let device = self.current()?;
        if handle <= 2 {
            let default = &mut self.devices()[device].default;
            return Ok(default.get_or_insert_with(|| Stream::start(device)).clone());
        }
        let stream = self.streams.get(&handle);
        let stream = stream.ok_or_else(|| unknown("stream", handle))?;
        if stream.device != device {
            return Err(wrong!(
                ERROR_INVALID_CONTEXT,
                "the stream is of device {}, the current context of device {device}",
                stream.device
            ));
        }
        Ok(stream.clone())
    }

    pub(crate) fn event(&self, handle: u64) -> CudaResult<&Event> {
        let event = self.events.get(&handle);
        event.ok_or_else(|| unknown("event", handle))
    }

    /// Takes memory of a device.
    pub(crate) fn allocate(&mut self, device: usize, bytes: u64) -> CudaResult {
        let (total, used) = (
            world().script.lock().memory,
            &mut self.devices()[device].used,
        );
        if bytes > total.saturating_sub(*used) {
            return Err(Fault::Code(ERROR_OUT_OF_MEMORY));
        }
        *used += bytes;
        Ok(())
    }

    /// Locates memory of a device or of the host that a device is to access.
    pub(crate) fn touch(
        &self,
        device: usize,
        address: u64,
        bytes: u64,
        what: &str,
    ) -> CudaResult<Touched> {
        if self.space.covers(address) {
            let (at, mapping) = self.space.find(address, bytes, device, what)?;
            return Ok(Touched {
                at,
                kind: MemoryKind::Device,
                held: Some(mapping),
            });
        }
        let range = self.host.find(address, bytes, device, what)?;
        Ok(Touched {
            at: std::ptr::with_exposed_provenance_mut(address as usize),
            kind: range.map_or(MemoryKind::Pageable, |r| MemoryKind::Registered(r.flags)),
            held: range.map(|range| range.users.clone() as _),
        })
    }

    /// Ends a device's primary context; frees the objects left in it, and returns their number.
    pub(crate) fn end_of(&mut self, device: usize) -> usize {
        let objects = |state: &Self| {
            let (regions, modules) = (state.space.regions.len(), state.modules.len());
            regions + modules + state.host.0.len() + state.streams.len() + state.events.len()
        };
        let before = objects(self);
        let regions = &mut self.space.regions;
        regions.retain(|_, region| region.device() != Some(device));
        self.host.0.retain(|_, range| range.device != device);
        self.streams.retain(|_, stream| stream.device != device);
        self.events.retain(|_, event| event.device != device);
        self.modules.retain(|_, module| module.device != device);
        self.functions
            .retain(|_, function| function.device != device);
        self.devices()[device] = Device::default();
        before - objects(self)
    }

    /// Every stream of a device.
    pub(crate) fn streams_of(&mut self, device: usize) -> Vec<Arc<Stream>> {
        let default = self.devices()[device].default.clone();
        let others = self.streams.values().filter(|s| s.device == device);
        others.cloned().chain(default).collect()
    }
}

pub(crate) fn unknown(what: &str, handle: u64) -> Fault {
    wrong!(
        ERROR_INVALID_HANDLE,
        "{handle:#x} is no {what}, or was destroyed"
    )
}

/// Refuses flags with bits that the driver does not know.
pub(crate) fn only(flags: u32, known: u32) -> CudaResult {
    if flags & !known == 0 {
        return Ok(());
    }
    Err(wrong!(
        ERROR_INVALID_VALUE,
        "flags {flags:#x}; there are {known:#x}"
    ))
}
