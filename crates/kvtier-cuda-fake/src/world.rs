//! The driver's state in this process: devices, contexts, and the objects behind handles.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;

use crate::abi::{
    ERROR_CONTEXT_IS_DESTROYED, ERROR_INVALID_CONTEXT, ERROR_INVALID_HANDLE, ERROR_INVALID_VALUE,
    Fault, Outcome, wrong,
};
use crate::event::{Event, Slots};
use crate::host::Host;
use crate::journal::Journal;
use crate::kernel::{Function, Module};
use crate::script::Script;
use crate::space::{Physical, Space};
use crate::stream::{Engines, Stream};

pub(crate) struct World {
    pub script: Mutex<Script>,
    pub journal: Journal,
    pub state: Mutex<State>,
}

pub(crate) struct State {
    /// Set by `cuInit`.
    pub devices: Option<Vec<Device>>,
    pub space: Space,
    pub host: Host,
    pub slots: Slots,
    pub streams: HashMap<u64, Arc<Stream>>,
    pub events: HashMap<u64, Event>,
    pub modules: HashMap<u64, Module>,
    pub functions: HashMap<u64, Function>,
    pub physical: HashMap<u64, Arc<Physical>>,
    last: u64,
}

pub(crate) struct Device {
    pub retained: u32,
    pub used: u64,
    pub engines: Arc<Engines>,
    /// The stream that handles 0, 1 and 2 mean.
    pub default: Option<Arc<Stream>>,
}

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
        state: Mutex::new(State {
            devices: None,
            space: Space::new(),
            host: Host::default(),
            slots: Slots::default(),
            streams: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            physical: HashMap::new(),
            last: 0,
        }),
    };
    if let Ok(text) = std::env::var("KVTIER_CUDA_FAKE") {
        let done = world.script.lock().apply(&text, crate::api::knows);
        if let Err(why) = done {
            // Continuing would test something else than intended.
            eprintln!("KVTIER_CUDA_FAKE: {why}");
            std::process::abort();
        }
    }
    world
});

pub(crate) fn world() -> &'static World {
    &WORLD
}

const CONTEXTS: u64 = 0x00c0_c000_0000;

/// The handle of a device's primary context.
pub(crate) fn context(device: usize) -> u64 {
    CONTEXTS + 0x100 * device as u64
}

pub(crate) fn device_of(context: u64) -> Option<usize> {
    let at = context.checked_sub(CONTEXTS)?;
    (at.is_multiple_of(0x100) && at < 0x10000).then_some((at / 0x100) as usize)
}

impl State {
    pub(crate) fn devices(&mut self) -> &mut Vec<Device> {
        self.devices.get_or_insert_default()
    }

    pub(crate) fn device(&mut self, ordinal: i32) -> Outcome<usize> {
        let n = self.devices().len();
        usize::try_from(ordinal)
            .ok()
            .filter(|&d| d < n)
            .ok_or_else(|| wrong!(crate::abi::ERROR_INVALID_DEVICE, "device {ordinal} of {n}"))
    }

    /// The device whose context is current on this thread.
    pub(crate) fn current(&mut self) -> Outcome<usize> {
        let current = CURRENT.get();
        let Some(device) = device_of(current) else {
            return Err(wrong!(
                ERROR_INVALID_CONTEXT,
                "no context is current on this thread"
            ));
        };
        self.healthy(device).map(|()| device)
    }

    /// Whether a device's context lives, and no kernel of its went wrong.
    pub(crate) fn healthy(&mut self, device: usize) -> Outcome {
        match self.devices().get(device) {
            Some(d) if d.retained > 0 => match d.engines.poison.load(Ordering::Acquire) {
                0 => Ok(()),
                code => Err(Fault::Code(code)),
            },
            _ => Err(wrong!(
                ERROR_CONTEXT_IS_DESTROYED,
                "the context of device {device} was released"
            )),
        }
    }

    /// A handle that was never used.
    pub(crate) fn handle(&mut self) -> u64 {
        self.last += 1;
        0x5ca1_0000_0000 + self.last * 0x10
    }

    /// A stream of the current context.
    pub(crate) fn stream(&mut self, handle: u64) -> Outcome<Arc<Stream>> {
        let device = self.current()?;
        if handle <= 2 {
            let default = &mut self.devices()[device].default;
            return Ok(default.get_or_insert_with(|| Stream::start(device)).clone());
        }
        match self.streams.get(&handle) {
            Some(stream) if stream.device == device => Ok(stream.clone()),
            Some(stream) => Err(wrong!(
                ERROR_INVALID_CONTEXT,
                "the stream is of device {}, the current context of device {device}",
                stream.device
            )),
            None => Err(unknown("stream", handle)),
        }
    }

    pub(crate) fn event(&self, handle: u64) -> Outcome<&Event> {
        self.events
            .get(&handle)
            .ok_or_else(|| unknown("event", handle))
    }

    /// Ends a device's primary context; frees and lists the objects left in it.
    pub(crate) fn end_of(&mut self, device: usize) -> Vec<String> {
        let mut left = Vec::new();
        let mut note = |n: usize, what: &str| {
            if n > 0 {
                left.push(format!("{n} {what}"));
            }
        };
        note(self.space.drop_of(device), "allocations or mappings");
        note(self.host.drop_of(device), "registrations");
        let n = self.streams.len();
        self.streams.retain(|_, stream| {
            if stream.device == device {
                stream.close();
            }
            stream.device != device
        });
        note(n - self.streams.len(), "streams");
        let n = self.events.len();
        self.events.retain(|_, event| event.device != device);
        note(n - self.events.len(), "events");
        let n = self.modules.len();
        self.modules.retain(|_, module| module.device != device);
        self.functions
            .retain(|_, function| function.device != device);
        note(n - self.modules.len(), "modules");
        let reset = &mut self.devices()[device];
        reset.used = 0;
        reset.engines.poison.store(0, Ordering::Release);
        if let Some(stream) = reset.default.take() {
            stream.close();
        }
        left
    }

    /// Every stream of a device.
    pub(crate) fn streams_of(&mut self, device: usize) -> Vec<Arc<Stream>> {
        let mut all: Vec<_> = self
            .streams
            .values()
            .filter(|s| s.device == device)
            .cloned()
            .collect();
        all.extend(self.devices()[device].default.clone());
        all
    }
}

pub(crate) fn unknown(what: &str, handle: u64) -> Fault {
    wrong!(
        ERROR_INVALID_HANDLE,
        "{handle:#x} is no {what}, or was destroyed"
    )
}

/// Flags with bits that the driver does not know.
pub(crate) fn only(flags: u32, known: u32) -> Outcome {
    if flags & !known == 0 {
        Ok(())
    } else {
        Err(wrong!(
            ERROR_INVALID_VALUE,
            "flags {flags:#x}; there are {known:#x}"
        ))
    }
}
