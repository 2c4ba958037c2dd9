//! The open storages of one registration: their mappings, readiness events and reference counters.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::allocations::{Allocations, Mapped, OpenError};
use super::driver::{Context, DevicePtr, Event, IpcHandle};
use super::error::CudaError;
use super::handle::ShareableHandle;
use super::ref_counter::RefCounter;
use crate::error::LayoutError;
use crate::spec::{CudaAllocation, CudaStorage, MemorySpec};

/// Maximum interval between two queries of an event.
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A storage that could not be opened, by its index in [`crate::KvLayout::memories`], which for GPU memory is the index
/// of its tensor in the registration.
#[derive(Debug, thiserror::Error)]
#[error("kv_caches[{index}].{source}")]
pub struct StorageError {
    /// Index of the storage.
    pub index: usize,
    /// Cause.
    pub source: OpenError,
}

/// One open storage. Its mapping is dropped before its counter.
#[derive(Debug)]
pub struct Storage {
    start: DevicePtr,
    bytes: u64,
    mapped: Arc<Mapped>,
    counter: Option<RefCounter>,
}

impl Storage {
    /// Address of the first byte.
    pub fn start(&self) -> DevicePtr {
        self.start
    }

    /// Usable bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The allocation, possibly shared with other storages.
    pub fn allocation(&self) -> &Mapped {
        &self.mapped
    }
}

/// All storages of a registration. Dropping them closes unused allocations and does not wait for other processes.
#[derive(Debug)]
pub struct Storages {
    all: Vec<Storage>,
    /// Events that must complete before the storages are used; each is destroyed once complete.
    pending: Vec<(usize, Event)>,
    context: Arc<Context>,
}

/// Identity of an allocation within a registration.
#[derive(PartialEq, Eq, Hash)]
enum Source {
    Shareable(ShareableHandle),
    Fabric([u8; 64], u64),
}

impl Storages {
    /// Opens every memory of a registration, each allocation once.
    ///
    /// # Errors
    /// The first memory that is not on a GPU, cannot be opened, or is larger than its allocation. Storages opened before
    /// it are closed again.
    pub fn open(
        allocations: &Arc<Allocations>,
        memories: &[MemorySpec],
    ) -> Result<Self, StorageError> {
        let mut opening = Opening {
            allocations,
            mapped: HashMap::new(),
            counters: HashSet::new(),
            events: HashSet::new(),
        };
        let mut storages = Self {
            all: Vec::with_capacity(memories.len()),
            pending: Vec::new(),
            context: Arc::clone(allocations.context()),
        };
        for (index, memory) in memories.iter().enumerate() {
            let opened = cuda(memory)
                .map_err(OpenError::from)
                .and_then(|spec| opening.storage(spec));
            let (storage, event) = opened.map_err(|source| StorageError { index, source })?;
            storages.all.push(storage);
            storages.pending.extend(event.map(|event| (index, event)));
        }
        Ok(storages)
    }

    /// The storages, by index of [`crate::KvLayout::memories`].
    pub fn all(&self) -> &[Storage] {
        &self.all
    }

    /// Decrements no reference counter at the end: the next process of the server will.
    pub fn leave(&self) {
        let counters = self.all.iter().filter_map(|it| it.counter.as_ref());
        counters.for_each(RefCounter::leave);
    }

    /// Whether the engine's work on the storages from before the registration is done. Does not wait.
    ///
    /// # Errors
    /// The driver's error about one of the events.
    pub fn are_ready(&mut self) -> Result<bool, StorageError> {
        while let Some((index, event)) = self.pending.last() {
            let _current = self.context.enter().map_err(|source| StorageError {
                index: *index,
                source: event_error(source),
            })?;
            let complete = event.is_complete().map_err(|source| StorageError {
                index: *index,
                source: event_error(source),
            })?;
            if !complete {
                return Ok(false);
            }
            self.pending.pop();
        }
        Ok(true)
    }

    /// Polls [`Storages::are_ready`] until the deadline; returns whether they are ready. A dead engine's event may never
    /// complete, so it is polled and not waited for.
    ///
    /// # Errors
    /// The driver's error about one of the events.
    pub fn wait_until_ready(&mut self, deadline: Instant) -> Result<bool, StorageError> {
        let mut pause = Duration::from_micros(10);
        loop {
            if self.are_ready()? {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(false);
            }
            std::thread::sleep(pause.min(deadline - now));
            pause = (pause * 2).min(MAX_POLL_INTERVAL);
        }
    }
}

pub(super) fn cuda(memory: &MemorySpec) -> Result<&CudaStorage, LayoutError> {
    match memory {
        MemorySpec::Cuda(storage) => Ok(storage),
        other => Err(LayoutError::new(
            "type",
            other.kind(),
            "cuda, cuda_raw or cuda_vmm, as the other tensors",
        )),
    }
}

fn event_error(source: CudaError) -> OpenError {
    OpenError::Cuda {
        what: "handle[6], the event of the registration",
        source,
        hint: "needed: a living process on this machine, in the same IPC namespace",
    }
}

/// A registration being opened: the allocations, counters and events already seen.
struct Opening<'a> {
    allocations: &'a Arc<Allocations>,
    mapped: HashMap<Source, Arc<Mapped>>,
    counters: HashSet<(&'a [u8], u64)>,
    events: HashSet<IpcHandle>,
}

impl<'a> Opening<'a> {
    fn storage(&mut self, spec: &'a CudaStorage) -> Result<(Storage, Option<Event>), OpenError> {
        let (counter, event) = match &spec.allocation {
            CudaAllocation::Torch {
                ref_counter, event, ..
            } => (self.counter(ref_counter)?, event.as_deref()),
            CudaAllocation::Raw { .. } | CudaAllocation::Vmm { .. } => (None, None),
        };
        let mapped = self.map(source(&spec.allocation)?)?;
        let end = spec.offset.checked_add(spec.bytes);
        if end.is_none_or(|end| end > mapped.bytes()) {
            return Err(LayoutError::new(
                "storage",
                format!("{} bytes from {} on", spec.bytes, spec.offset),
                format!("inside the {} bytes of its allocation", mapped.bytes()),
            )
            .into());
        }
        let event = event.map(|handle| self.event(handle)).transpose()?;
        let storage = Storage {
            // Inside the allocation, so it does not overflow.
            start: DevicePtr(mapped.base().0 + spec.offset),
            bytes: spec.bytes,
            mapped,
            counter,
        };
        Ok((storage, event.flatten()))
    }

    /// Takes each counter once: a wrapper that is sent twice was counted once.
    fn counter(
        &mut self,
        given: &'a Option<(Vec<u8>, u64)>,
    ) -> Result<Option<RefCounter>, LayoutError> {
        match given {
            Some((name, index)) if self.counters.insert((name, *index)) => {
                RefCounter::new(name, *index).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Opens each event once.
    fn event(&mut self, handle: &[u8]) -> Result<Option<Event>, OpenError> {
        let Ok(handle) = handle.try_into().map(IpcHandle) else {
            let value = format!("{} bytes", handle.len());
            return Err(LayoutError::new("handle[6]", value, "64 bytes, or nil").into());
        };
        if !self.events.insert(handle) {
            return Ok(None);
        }
        let event = Event::open(self.allocations.context(), &handle);
        event.map(Some).map_err(event_error)
    }

    fn map(&mut self, source: Source) -> Result<Arc<Mapped>, OpenError> {
        if let Some(mapped) = self.mapped.get(&source) {
            return Ok(mapped.clone());
        }
        let mapped = Arc::new(match &source {
            Source::Shareable(handle) => self.allocations.open_shareable(handle)?,
            Source::Fabric(handle, bytes) => self.allocations.open_fabric(handle, *bytes)?,
        });
        self.mapped.insert(source, mapped.clone());
        Ok(mapped)
    }
}

fn source(allocation: &CudaAllocation) -> Result<Source, LayoutError> {
    match allocation {
        CudaAllocation::Torch {
            handle: Some(handle),
            ..
        } => ShareableHandle::parse(handle).map(Source::Shareable),
        CudaAllocation::Torch { handle: None, .. } => Err(LayoutError::new(
            "handle[1]",
            "nil",
            "the handle of an allocation",
        )),
        CudaAllocation::Raw { handle } => Ok(Source::Shareable(ShareableHandle::Legacy(
            IpcHandle(*handle),
        ))),
        CudaAllocation::Vmm {
            fabric: Some(fabric),
            bytes,
        } => match fabric.as_slice().try_into() {
            Ok(handle) => Ok(Source::Fabric(handle, *bytes)),
            Err(_) => Err(LayoutError::new(
                "fabric_blob",
                format!("{} bytes", fabric.len()),
                "64 bytes",
            )),
        },
        CudaAllocation::Vmm { fabric: None, .. } => Err(LayoutError::new(
            "kind",
            "posix_fd",
            "fabric: the protocol has no way to send a file descriptor",
        )),
    }
}
