//! CUDA device: all GPUs of this machine as one [`Device`]. A GPU is activated when its first worker registers.
//!
//! An activation acquires the slot's `activation`, `trials` (one trial at a time), `pinned` (guards the arena once it
//! is pinned), and what pauses pinning, in this order; no other lock is acquired inside.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvtier_common::sync::Mutex;
use kvtier_memory::Arena;

use super::device_copy::AddressRange;
use super::driver::{DevicePtr, Driver, Stream};
use super::error::CudaError;
use super::events::ForeignEvents;
use super::gpu::{Gpu, GpuJob, GpuOptions, GpuReadings, NewGpu, Pages, PinnedArena, PinningStatus};
use super::gpu_slot::GpuSlot;
use super::owner::Owner;
use super::place::place;
use super::storages::Storages;
use super::uuid::Gpus;
use crate::device::{Device, DeviceError, Done, EngineMemory, OnSubmitted, Transfer};
use crate::layout::KvLayout;
use crate::physical::visit_block_runs;
use crate::placement::Placement;

/// Maximum wait, at registration, for the engine's earlier work on its pages.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(10);

/// Options of the CUDA backend.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// Path of the driver library; `None` means `libcuda.so.1` as found by the dynamic linker.
    pub library: Option<PathBuf>,
    /// Options of each GPU.
    pub gpu: GpuOptions,
}

/// All GPUs visible to this process.
pub struct CudaDevice {
    gpus: Gpus,
    driver_version: i32,
    options: GpuOptions,
    arena: Arc<Arena>,
    /// By position in `gpus`.
    slots: Vec<GpuSlot>,
    /// The arena is pinned once for all GPUs, when the first one is activated.
    pinned: Mutex<Option<Arc<PinnedArena>>>,
    /// Held during a GPU's trial.
    trials: Mutex<()>,
    next_pages: AtomicU64,
    /// No further GPU is activated.
    stopped: AtomicBool,
}

/// State of one GPU, for `/status` and metrics.
#[derive(Debug, Clone)]
pub struct DeviceStatus {
    /// Index among the GPUs visible to this process.
    pub ordinal: i32,
    /// Product name.
    pub name: String,
    /// Lower case, `8-4-4-4-12`.
    pub uuid: String,
    /// Such as `0000:3b:00.0`.
    pub pci_bus_id: String,
    /// -1 when unknown.
    pub numa_node: i32,
    /// Why the GPU is unusable, if it is.
    pub error: Option<String>,
    /// Readings, if the GPU is in use.
    pub readings: Option<GpuReadings>,
}

impl CudaDevice {
    /// Loads the driver and lists the GPUs without activating any.
    ///
    /// # Errors
    /// The library is missing, or the driver's error, for example on a machine without a GPU.
    pub fn find(options: &CudaOptions, arena: Arc<Arena>) -> Result<Self, CudaError> {
        let driver = Driver::load(options.library.as_deref())?;
        let gpus = Gpus::find(&driver)?;
        Ok(Self {
            slots: gpus.all().iter().map(|_| GpuSlot::default()).collect(),
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

    /// Newest CUDA version the driver supports: 12080 is 12.8.
    pub fn driver_version(&self) -> i32 {
        self.driver_version
    }

    /// State of every visible GPU. Does not wait for a driver.
    pub fn status(&self) -> Vec<DeviceStatus> {
        let status = |(gpu, slot): (&super::uuid::Gpu, &GpuSlot)| DeviceStatus {
            ordinal: gpu.device.ordinal(),
            name: gpu.name.clone(),
            uuid: gpu.uuid.clone(),
            pci_bus_id: gpu.pci_bus_id.clone(),
            numa_node: gpu.numa_node,
            error: match slot.used.get() {
                Some(gpu) => gpu.broken(),
                None => slot.hang(),
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

    /// Progress of pinning; `None` before the first GPU is in use.
    pub fn pinning(&self) -> Option<PinningStatus> {
        self.pinned.lock().as_ref().map(|pinned| pinned.status())
    }

    /// Stops all GPUs and waits until their transfers have ended and were reported. Returns the ordinals of the GPUs that
    /// have not ended within [`GpuOptions::leave_timeout`].
    pub fn stop(&self) -> Vec<i32> {
        // A GPU being activated has no transfers, but a registration that waits.
        self.stopped.store(true, Ordering::Release);
        let used: Vec<_> = self.slots.iter().map(|slot| slot.used.get()).collect();
        used.iter().flatten().for_each(|gpu| gpu.stop());
        let left = self.gpus.all().iter().zip(&used).filter(|(_, used)| {
            let ended = used.as_ref().is_none_or(|gpu| gpu.wait_end());
            !ended
        });
        left.map(|(gpu, _)| gpu.device.ordinal()).collect()
    }

    /// Unpins the arena, after [`CudaDevice::stop`] has returned no GPU.
    ///
    /// # Errors
    /// The bytes still pinned, if the driver has unpinned no piece for [`GpuOptions::leave_timeout`].
    pub fn unpin(&self) -> Result<(), u64> {
        let pinned = self.pinned.lock().clone();
        pinned.map_or(Ok(()), |pinned| pinned.unpin())
    }

    /// Returns the GPU, activating it if needed.
    fn gpu(&self, found: &super::uuid::Gpu) -> Result<Arc<Gpu>, DeviceError> {
        let same = |(gpu, _): &(&super::uuid::Gpu, _)| gpu.uuid == found.uuid;
        let Some((_, slot)) = self.gpus.all().iter().zip(&self.slots).find(same) else {
            return Err(DeviceError::Broken(
                "it is not visible to this process".into(),
            ));
        };
        let activation = slot.used.get().is_none().then(|| slot.activation.lock());
        if let Some(gpu) = slot.used.get() {
            return match gpu.broken() {
                None => Ok(Arc::clone(gpu)),
                Some(error) => Err(DeviceError::Broken(error)),
            };
        }
        let (device, options) = (found.device.clone(), self.options);
        let (timeout, stopped) = (options.trial_timeout, &self.stopped);
        let prepare = move || NewGpu::prepare(&device);
        let mut gpu = slot.run_with_timeout("making its context", timeout, stopped, prepare)?;
        // One trial at a time, and not while the arena is pinned: both would falsify the measured rates. A trial that
        // hangs does not keep these locks.
        let trial = self.trials.lock();
        let pinned = self.pinned.lock().clone();
        let quiet = pinned.as_ref().map(|pinned| pinned.pause());
        let try_out = move || gpu.try_out(&options).map(|profile| (gpu, profile));
        let (gpu, profile) = slot.run_with_timeout("its trial", timeout, stopped, try_out)?;
        drop(quiet);
        let pinned = pinned.unwrap_or_else(|| {
            let arena = Arc::clone(&self.arena);
            let (bytes, timeout) = (self.options.pin_bytes, self.options.leave_timeout);
            let pinned = PinnedArena::start(gpu.context(), arena, bytes, timeout);
            Arc::clone(self.pinned.lock().insert(Arc::new(pinned)))
        });
        drop(trial);
        let gpu = Arc::new(gpu.start(profile, pinned, self.options)?);
        let used = slot.used.get_or_init(|| gpu);
        drop(activation);
        Ok(Arc::clone(used))
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn open(&self, layout: Arc<KvLayout>) -> Result<Box<dyn EngineMemory>, DeviceError> {
        let memories = layout.memories();
        let found = self.gpus.of(memories)?;
        let numa_node = u32::try_from(found.numa_node).ok();
        let gpu = self.gpu(found)?;
        // First: opening fails for a process that exits before this, and a later exit is noticed.
        let owner = Owner::identify(memories);
        let mut storages = Storages::open(&gpu.allocations, memories)?;
        if !storages.wait_until_ready(Instant::now() + REGISTRATION_TIMEOUT)? {
            return Err(DeviceError::EventTimeout);
        }
        let places = storages.all().iter().map(|storage| AddressRange {
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
            on_gpu: Arc::clone(gpu.in_flight()),
            retrieves: Mutex::default(),
            events: ForeignEvents::new(Arc::clone(&gpu.allocations), None),
            storages,
        };
        Ok(Box::new(CudaMemory {
            pages: Arc::new(pages),
            owner,
            numa_node,
            gpu,
        }))
    }
}

/// The pages of one worker on a GPU. Dropping it closes them when the last copy has ended, without waiting for the
/// engine.
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

    /// Always: handles identify one allocation. The name of PyTorch's counter file is random, and the driver's handles are
    /// new for each allocation.
    fn is_current(&self) -> bool {
        true
    }

    /// Whether its process is proven. The rest is in the handles: the driver opens one only while the allocation exists that it was made
    /// for. Memory of PyTorch's allocator also has a reference counter in a file of a random name, which may not exist any more; raw
    /// and fabric memory has none.
    fn identity(&self) -> Vec<u64> {
        vec![u64::from(self.owner.is_some())]
    }

    fn leave(&self) {
        self.pages.storages.leave();
    }

    fn owner(&self) -> Option<Owner> {
        self.owner.clone()
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

    fn transfer_with_event(&self, transfer: Transfer, submitted: OnSubmitted, done: Done) {
        self.submit(transfer, Some(submitted), done);
    }

    fn place(&self, placement: Placement, done: Done) {
        place(
            Arc::clone(&self.gpu),
            Arc::clone(&self.pages),
            placement,
            done,
        );
    }

    fn stop(&self) {
        self.pages.stopped.store(true, Ordering::Release);
        self.gpu.wake_threads();
    }

    /// No event: the answer is sent when the bytes are in place.
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
                // SAFETY: `open` has checked that every block is inside its memory, which is mapped as long as the pages
                // live; the vector is large enough, and is not moved before the copy has ended.
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
    /// Hands a transfer to the thread of its GPU. Makes no driver call, so a driver that hangs blocks only that GPU.
    fn submit(&self, transfer: Transfer, submitted: Option<OnSubmitted>, done: Done) {
        let timeout = self.gpu.options().event_timeout;
        let job = GpuJob::new(Arc::clone(&self.pages), transfer, timeout, done);
        self.gpu.submit(match submitted {
            Some(submitted) => job.on_submitted(submitted),
            None => job,
        });
    }
}
