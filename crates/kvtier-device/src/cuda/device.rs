//! The GPUs of this machine as a [`Device`]. One is taken into use when its first worker registers.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvtier_memory::{Arena, SegmentError};
use parking_lot::Mutex;

use super::device_copy::Place;
use super::driver::{DevicePtr, Driver, Stream};
use super::error::CudaError;
use super::events::ForeignEvents;
use super::gpu::{Gpu, GpuOptions, GpuReadings, Job, NewGpu, Pages, Pinned, PinningStatus};
use super::owner::Owner;
use super::slot::Slot;
use super::storages::Storages;
use super::uuid::Gpus;
use crate::device::{Begun, Device, DeviceError, Done, EngineMemory, Transfer};
use crate::layout::KvLayout;
use crate::physical::visit_block_runs;

/// How long an engine's own work on its fresh pages may take when it registers.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(10);

/// How the driver is found and GPUs are used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// The driver's library; `None` is `libcuda.so.1` where the system finds it.
    pub library: Option<PathBuf>,
    /// How GPUs are used.
    pub gpu: GpuOptions,
}

/// All GPUs that this process sees.
pub struct CudaDevice {
    gpus: Gpus,
    driver_version: i32,
    options: GpuOptions,
    arena: Arc<Arena>,
    /// By position in `gpus`.
    slots: Vec<Slot>,
    /// The arena is pinned once, for all GPUs, when the first of them is taken into use.
    pinned: Mutex<Option<Arc<Pinned>>>,
    /// Held while a GPU is tried out.
    trials: Mutex<()>,
    next_pages: AtomicU64,
    /// No further GPU is taken into use.
    stopped: AtomicBool,
}

/// One GPU for `/status` and metrics.
#[derive(Debug, Clone)]
pub struct DeviceStatus {
    /// Position among the GPUs this process sees.
    pub ordinal: i32,
    /// What the maker calls it.
    pub name: String,
    /// Lower case, `8-4-4-4-12`.
    pub uuid: String,
    /// Such as `0000:3b:00.0`.
    pub pci_bus_id: String,
    /// -1 when unknown.
    pub numa_node: i32,
    /// Why it is of no use, if so.
    pub error: Option<String>,
    /// What it does, if it is in use.
    pub readings: Option<GpuReadings>,
}

impl CudaDevice {
    /// Loads the driver and looks what GPUs there are. Takes none of them into use.
    ///
    /// # Errors
    /// No library, or what the driver says: a machine without a GPU has no such device.
    pub fn find(options: &CudaOptions, arena: Arc<Arena>) -> Result<Self, CudaError> {
        let driver = Driver::load(options.library.as_deref())?;
        let gpus = Gpus::find(&driver)?;
        Ok(Self {
            slots: gpus.all().iter().map(|_| Slot::default()).collect(),
            gpus,
            driver_version: driver.version(),
            options: options.gpu,
            arena,
            pinned: Mutex::default(),
            trials: Mutex::default(),
            next_pages: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
        })
    }

    /// The newest CUDA the driver knows: 12080 is 12.8.
    pub fn driver_version(&self) -> i32 {
        self.driver_version
    }

    /// Every GPU that this process sees. Waits for no driver.
    pub fn status(&self) -> Vec<DeviceStatus> {
        let status = |(gpu, slot): (&super::uuid::Gpu, &Slot)| DeviceStatus {
            ordinal: gpu.device.ordinal(),
            name: gpu.name.clone(),
            uuid: gpu.uuid.clone(),
            pci_bus_id: gpu.pci_bus_id.clone(),
            numa_node: gpu.numa_node,
            error: match slot.used.get() {
                Some(gpu) => gpu.broken(),
                None => slot.hangs(),
            },
            readings: slot.used.get().map(|gpu| gpu.readings()),
        };
        self.gpus
            .all()
            .iter()
            .zip(&self.slots)
            .map(status)
            .collect()
    }

    /// How far pinning has come; `None` before the first GPU is in use.
    pub fn pinning(&self) -> Option<PinningStatus> {
        self.pinned.lock().as_ref().map(|pinned| pinned.status())
    }

    /// Begins nothing more on any GPU, and waits until what was begun has ended and everybody was told. Gives the numbers
    /// of the GPUs that have not ended in [`GpuOptions::leave_timeout`].
    pub fn stop(&self) -> Vec<i32> {
        // One that is being taken into use has nothing to end, but somebody who waits.
        self.stopped.store(true, Ordering::Release);
        let used: Vec<_> = self.slots.iter().map(|slot| slot.used.get()).collect();
        used.iter().flatten().for_each(|gpu| gpu.stop());
        let left = self.gpus.all().iter().zip(&used).filter(|(_, used)| {
            let ended = used.as_ref().is_none_or(|gpu| gpu.wait_end());
            !ended
        });
        left.map(|(gpu, _)| gpu.device.ordinal()).collect()
    }

    /// Gives up what is pinned, once [`CudaDevice::stop`] has left no GPU.
    ///
    /// # Errors
    /// The bytes that are still pinned, when the driver has given up no piece for [`GpuOptions::leave_timeout`].
    pub fn unpin(&self) -> Result<(), u64> {
        let pinned = self.pinned.lock().clone();
        pinned.map_or(Ok(()), |pinned| pinned.unpin())
    }

    /// The GPU, in use.
    fn gpu(&self, found: &super::uuid::Gpu) -> Result<Arc<Gpu>, DeviceError> {
        let same = |(gpu, _): &(&super::uuid::Gpu, _)| gpu.uuid == found.uuid;
        let Some((_, slot)) = self.gpus.all().iter().zip(&self.slots).find(same) else {
            return Err(DeviceError::Broken("it is none of this process's".into()));
        };
        let taking = slot.used.get().is_none().then(|| slot.taking.lock());
        if let Some(gpu) = slot.used.get() {
            return match gpu.broken() {
                None => Ok(Arc::clone(gpu)),
                Some(error) => Err(DeviceError::Broken(error)),
            };
        }
        let (device, options) = (found.device.clone(), self.options);
        let (patience, stopped) = (options.trial_timeout, &self.stopped);
        let prepare = move || NewGpu::prepare(&device);
        let mut gpu = slot.driven("making its context", patience, stopped, prepare)?;
        // One after the other, and while nothing is pinned: both would falsify what is tried. A trial that hangs is not
        // what holds these.
        let trial = self.trials.lock();
        let pinned = self.pinned.lock().clone();
        let quiet = pinned.as_ref().map(|pinned| pinned.pause());
        let try_out = move || gpu.try_out(&options).map(|profile| (gpu, profile));
        let (gpu, profile) = slot.driven("its trial", patience, stopped, try_out)?;
        drop(quiet);
        let pinned = pinned.unwrap_or_else(|| {
            let arena = Arc::clone(&self.arena);
            let (bytes, patience) = (self.options.pin_bytes, self.options.leave_timeout);
            let pinned = Pinned::start(gpu.context(), arena, bytes, patience);
            Arc::clone(self.pinned.lock().insert(Arc::new(pinned)))
        });
        drop(trial);
        let gpu = Arc::new(gpu.start(profile, pinned, self.options)?);
        let used = slot.used.get_or_init(|| gpu);
        drop(taking);
        Ok(Arc::clone(used))
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn open(&self, layout: Arc<KvLayout>) -> Result<Box<dyn EngineMemory>, DeviceError> {
        let found = self.gpus.of(layout.memories())?;
        let numa_node = u32::try_from(found.numa_node).ok();
        let gpu = self.gpu(found)?;
        // First: whoever ends before it is known lends nothing any more, and whoever ends later is noticed.
        let owner = Owner::prove(layout.memories());
        let mut storages = Storages::open(&gpu.allocations, layout.memories())?;
        if !storages.wait_until_ready(Instant::now() + REGISTRATION_TIMEOUT)? {
            return Err(DeviceError::NeverReady);
        }
        let places = storages.all().iter().map(|storage| Place {
            address: storage.start().0,
            bytes: storage.bytes(),
        });
        let places: Vec<_> = places.collect();
        layout.check_memories(|memory| places[memory].bytes)?;
        let pages = Pages {
            number: self.next_pages.fetch_add(1, Ordering::Relaxed),
            places,
            layout,
            stopped: AtomicBool::new(false),
            on_gpu: Arc::clone(gpu.under_way()),
            retrieves: Mutex::default(),
            events: ForeignEvents::new(Arc::clone(&gpu.allocations), None),
            _storages: storages,
        };
        Ok(Box::new(CudaMemory {
            pages: Arc::new(pages),
            owner,
            numa_node,
            gpu,
        }))
    }
}

/// One worker's pages on a GPU. Dropped, they are closed when the last copy has ended; nobody waits for the engine.
struct CudaMemory {
    pages: Arc<Pages>,
    owner: Option<Owner>,
    numa_node: Option<u32>,
    gpu: Arc<Gpu>,
}

impl EngineMemory for CudaMemory {
    fn layout(&self) -> &Arc<KvLayout> {
        &self.pages.layout
    }

    /// Handles of another process's memory are its own: the counter file of PyTorch's has a random name, the driver's
    /// are new with each allocation.
    fn is_current(&self) -> bool {
        true
    }

    fn owner(&self) -> Option<Owner> {
        self.owner.clone()
    }

    /// The driver takes memory back when its process ends.
    fn remove_orphans(&self) -> Vec<Result<String, SegmentError>> {
        Vec::new()
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    fn device(&self) -> &'static str {
        "cuda"
    }

    fn transfer(&self, transfer: Transfer, done: Done) {
        self.submit(transfer, None, done);
    }

    fn transfer_in_steps(&self, transfer: Transfer, begun: Begun, done: Done) {
        self.submit(transfer, Some(begun), done);
    }

    fn stop(&self) {
        self.pages.stopped.store(true, Ordering::Release);
        self.gpu.nudge();
    }

    /// No event: the answer comes when the bytes are in place.
    fn answer_event<'a>(&self, _: &'a [u8]) -> &'a [u8] {
        &[]
    }

    fn complete_event(&self) -> &[u8] {
        self.gpu.complete_event()
    }

    fn read_blocks(
        &self,
        layer: usize,
        block_ids: &[i64],
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), DeviceError> {
        let planes = self.pages.layout.layer_planes(layer)?;
        let context = self.gpu.allocations.context();
        let _current = context.enter()?;
        let stream = Stream::new(context, 0)?;
        let mut block = Vec::new();
        planes.visit_blocks(block_ids, |plane, id| {
            block.clear();
            let place = self.pages.places[plane.memory];
            visit_block_runs(plane, id, |at, bytes| {
                let to = block.len();
                block.resize(to + bytes as usize, 0);
                // SAFETY: `open` has shown that every block lies inside its place, which is mapped as long as the
                // pages are; the vector has room for the bytes, and nothing moves it before the copy has ended.
                unsafe {
                    let to = block.as_mut_ptr().add(to);
                    stream.copy_to_host(to, DevicePtr(place.address + at), bytes as usize)?;
                }
                stream.synchronize()
            })?;
            sink(&block);
            Ok(())
        })
    }
}

impl CudaMemory {
    /// Hands a transfer to the thread of its GPU. No driver is asked here: one that hangs costs only that GPU.
    fn submit(&self, transfer: Transfer, begun: Option<Begun>, done: Done) {
        let timeout = self.gpu.options().event_timeout;
        let job = Job::new(Arc::clone(&self.pages), transfer, timeout, done);
        self.gpu.submit(match begun {
            Some(begun) => job.telling(begun),
            None => job,
        });
    }
}
