//! What a server that takes over opens beside the one that runs, while clients are served: all that may take long.
//!
//! | what | left for the pause |
//! | --- | --- |
//! | L1's memory | its ledger is read |
//! | GPUs that have workers: contexts, trials, L1 pinned | nothing |
//! | the memory of these workers, as their kept registrations name it | registrations are checked, without a call of the driver |
//! | tiers | their state is taken |

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use kvtier_config::ServerConfig;
use kvtier_device::MemorySpec;
use kvtier_error::{Error, ErrorKind, Result};
use kvtier_l1::find_running_arena;
use kvtier_memory::Arena;
use kvtier_proto::request::{InstanceId, Request};
use kvtier_tiers::OpenedTiers;

use super::context::chunk_size;
use super::devices::Devices;
use super::workers::{DriverThreads, layout, peek};

/// How long the drivers of GPUs may take.
const GPU_TIMEOUT: Duration = Duration::from_secs(40);

/// How long the pinning of L1 is waited for after that. The rest is pinned later, as after a start.
const PINNING_TIMEOUT: Duration = Duration::from_secs(15);

/// How often a wait of a take-over looks whether this server is to stop.
pub const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Lets a take-over go on.
///
/// # Errors
/// This server is to stop.
pub fn check_stop(stop: &AtomicBool) -> Result<()> {
    match stop.load(Ordering::Acquire) {
        false => Ok(()),
        true => Err(Error::refused("it was stopped")),
    }
}

/// What is open. Nothing of the server that runs has changed by it.
pub struct Opened {
    pub(super) arena: Arc<Arena>,
    pub(super) devices: Arc<Devices>,
    pub(super) tiers: Option<OpenedTiers>,
}

impl Opened {
    /// Opens it, for this configuration, whose size of L1 is the one of the server that runs.
    ///
    /// # Errors
    /// What cannot be opened, and why; or this server is to stop.
    pub fn beside(config: &ServerConfig, stop: &AtomicBool) -> Result<Self> {
        let base = config.state.base.as_ref();
        let base = base.map_err(Clone::clone)?;
        let folder = kvtier_state::existing_id(base, &config.state.instance);
        let folder = folder.ok_or_else(|| Error::refused("its state directory cannot be used"))?;
        let arena = find_running_arena(config)?;
        let devices = Arc::new(Devices::find(config, &arena)?.beside());
        let tiers = config.l2.as_ref().map(OpenedTiers::beside).transpose()?;
        prepare(&devices, gpu_workers(config, &folder)?, stop)?;
        check_stop(stop)?;
        Ok(Self {
            arena,
            devices,
            tiers,
        })
    }

    /// Keeps the GPUs in use, and L1 pinned, until it is dropped, which may take seconds.
    pub fn devices(&self) -> impl Send + use<> {
        Arc::clone(&self.devices)
    }
}

/// Workers on GPUs, and their memories, as the kept registrations have them.
fn gpu_workers(
    config: &ServerConfig,
    folder: &str,
) -> Result<BTreeMap<InstanceId, Vec<MemorySpec>>> {
    let own = NonZeroUsize::new(config.chunk_size as usize)
        .ok_or_else(|| Error::refused("--chunk-size: 0 is not allowed"))?;
    let mut workers = BTreeMap::new();
    for kept in peek(folder, own)? {
        let of = |error: Error| error.context(format!("worker {}", kept.id));
        if let Request::RegisterKvCache(registration) = kept.request.decode().map_err(of)? {
            let chunk_size = chunk_size(registration.hints.chunk_tokens, own);
            let separate = config.separate_object_groups;
            let caller = kept.request.caller();
            let layout = layout(caller, &registration, chunk_size, separate).map_err(of)?;
            if Devices::is_on_gpu(&layout) {
                workers.insert(kept.id, layout.memories().to_vec());
            }
        }
    }
    Ok(workers)
}

/// Opens the memory of workers on GPUs.
fn prepare(
    devices: &Arc<Devices>,
    mut workers: BTreeMap<InstanceId, Vec<MemorySpec>>,
    stop: &AtomicBool,
) -> Result<()> {
    if workers.is_empty() {
        return Ok(());
    }
    let of = |id: InstanceId, gpu: &str, error: Error| {
        let kind = ErrorKind::Unavailable;
        Error::new(kind, error).context(format!("worker {id} on GPU {gpu}"))
    };
    let until = Instant::now() + GPU_TIMEOUT;
    let (done, ended) = mpsc::channel();
    let threads = DriverThreads::default();
    for (id, memories) in &workers {
        let (id, memories) = (*id, memories.clone());
        let (devices, done) = (Arc::clone(devices), done.clone());
        threads.run(move || {
            let prepared = devices.prepare(memories);
            // The receiver has ended at an earlier error.
            let _ = done.send((id, prepared));
        });
    }
    drop(done);
    while !workers.is_empty() {
        check_stop(stop)?;
        let left = until.saturating_duration_since(Instant::now());
        let (id, prepared) = match ended.recv_timeout(left.min(STOP_POLL_INTERVAL)) {
            Ok(ended) => ended,
            Err(RecvTimeoutError::Timeout) if !left.is_zero() => continue,
            Err(_) => break,
        };
        let memories = workers.remove(&id).unwrap_or_default();
        prepared.map_err(|error| of(id, gpu(&memories), error))?;
    }
    if let Some((id, memories)) = workers.into_iter().next() {
        let late = Error::refused("its driver has not answered in time");
        return Err(of(id, gpu(&memories), late));
    }
    let until = Instant::now() + PINNING_TIMEOUT;
    devices.wait_pinned(|| Instant::now() < until && check_stop(stop).is_ok());
    Ok(())
}

/// The GPU of a worker's memory, as its engine names it.
fn gpu(memories: &[MemorySpec]) -> &str {
    match memories.first() {
        Some(MemorySpec::Cuda(storage)) => &storage.device_uuid,
        _ => "unknown",
    }
}
