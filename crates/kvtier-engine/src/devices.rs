//! Where workers' pages can be: shared memory, and the GPUs there are.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_device::cuda::driver::LIBRARY;
use kvtier_device::cuda::{
    CudaDevice, DeviceStatus, Executor, GpuReadings, RUN_BUCKETS, TRIED_RUNS,
};
use kvtier_device::{
    CpuDevice, Device, Direction, EngineMemory, KvLayout, MemorySpec, RopeTable, TensorSpec,
};
use kvtier_memory::Arena;
use kvtier_observe::api::{ByDirection, CudaStatus, Gpu, GpuState, Gpus, MovedBytes, Pinning};

use kvtier_config::ServerConfig;
use kvtier_observe::metrics::GpuFigures;

/// The devices of this server.
pub struct Devices {
    /// The GPUs, or why there are none.
    cuda: Result<CudaDevice>,
    /// GPUs that do not respond were logged.
    left_is_logged: AtomicBool,
}

/// Why there are no GPUs. If there is no driver, the text is short, without the details of the dynamic linker.
fn absence(error: &str) -> String {
    let missing = format!("{LIBRARY}: cannot open shared object file: No such file or directory");
    if error.contains(&missing) {
        format!("no CUDA driver ({LIBRARY} not found)")
    } else {
        error.to_owned()
    }
}

fn unavailable(why: impl Display) -> Error {
    Error::new(ErrorKind::Unavailable, why)
}

impl Devices {
    /// Finds the GPUs. The first worker of a GPU takes it into use.
    ///
    /// # Errors
    /// One line, if a driver that was asked for by its path cannot be used.
    pub fn find(config: &ServerConfig, arena: &Arc<Arena>) -> Result<Self> {
        let Some(options) = &config.cuda else {
            return Ok(Self {
                cuda: Err(unavailable("this server runs with --cuda-driver off")),
                left_is_logged: AtomicBool::new(false),
            });
        };
        let cuda = CudaDevice::find(options, Arc::clone(arena));
        match &cuda {
            Ok(found) => {
                for gpu in found.status() {
                    tracing::info!(
                        gpu = gpu.ordinal,
                        uuid = gpu.uuid,
                        pci = gpu.pci_bus_id,
                        numa_node = gpu.numa_node,
                        "found {}",
                        gpu.name
                    );
                }
            }
            Err(error) if options.library.is_some() => {
                return Err(unavailable(error).context("--cuda-driver"));
            }
            Err(error) => {
                let reason = absence(&error.to_string());
                tracing::info!(reason, "no GPUs: workers on GPUs cannot register");
            }
        }
        Ok(Self {
            cuda: cuda.map_err(|error| unavailable(absence(&error.to_string()))),
            left_is_logged: AtomicBool::new(false),
        })
    }

    fn gpus(&self) -> Vec<DeviceStatus> {
        let cuda = self.cuda.as_ref().ok();
        cuda.map(CudaDevice::status).unwrap_or_default()
    }

    /// Names of the GPUs, or why there are none.
    pub fn names(&self) -> Result<Vec<String>> {
        let gpus = self.cuda.as_ref().map(CudaDevice::status);
        gpus.map(|gpus| gpus.into_iter().map(|gpu| gpu.name).collect())
            .map_err(Clone::clone)
    }

    /// Flags that have no effect, and why.
    pub fn warning(&self, config: &ServerConfig) -> Option<String> {
        let why = self.cuda.as_ref().err()?;
        let flags = config.gpu_flags.join(", ");
        (!flags.is_empty()).then(|| format!("{flags}: without effect, no GPU is used: {why}"))
    }

    /// NUMA nodes of the GPUs, as far as they are known.
    pub fn numa_nodes(&self) -> Vec<u32> {
        let gpus = self.gpus().into_iter();
        let nodes = gpus.filter_map(|gpu| u32::try_from(gpu.numa_node).ok());
        nodes.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Whether pages are on a GPU, whose driver may take seconds to open and close them.
    pub fn is_on_gpu(layout: &KvLayout) -> bool {
        let on_gpu = |memory: &MemorySpec| matches!(memory, MemorySpec::Cuda(_));
        layout.memories().iter().any(on_gpu)
    }

    /// Opens a worker's pages on the device where they are.
    ///
    /// # Errors
    /// One line: memory of a kind that no device here has, or what the device says.
    pub fn open(&self, layout: KvLayout) -> Result<Arc<dyn EngineMemory>> {
        let device = self.device(Self::is_on_gpu(&layout))?;
        let opened = device.open(Arc::new(layout));
        opened.map(Arc::from).map_err(Error::refused)
    }

    /// Copies a table of cosines and sines from the device where it is.
    ///
    /// # Errors
    /// As [`Devices::open`].
    pub fn read_table(&self, tensor: &TensorSpec) -> Result<RopeTable> {
        let device = self.device(matches!(tensor.memory, MemorySpec::Cuda(_)))?;
        device.read_rope_table(tensor).map_err(Error::refused)
    }

    fn device(&self, is_on_gpu: bool) -> Result<&dyn Device> {
        match &self.cuda {
            _ if !is_on_gpu => Ok(&CpuDevice),
            Ok(cuda) => Ok(cuda),
            Err(why) => {
                let what = "the tensors are on a GPU, and this server uses none";
                Err(why.clone().context(what))
            }
        }
    }

    /// Ends the work on the GPUs and refuses the rest. Afterwards every request is answered, except those on a GPU that
    /// does not respond: each call waits some seconds for it and returns its number.
    pub fn stop(&self) -> Vec<i32> {
        let left = self.cuda.as_ref().map(CudaDevice::stop).unwrap_or_default();
        if !left.is_empty() && !self.left_is_logged.swap(true, Ordering::Relaxed) {
            tracing::error!(gpus = ?left, "transfers have not ended: what these GPUs use is left to the end of the process");
        }
        left
    }

    /// Calls [`Devices::stop`], then releases the pinned arena if every transfer has ended.
    pub fn close(&self) {
        let Ok(cuda) = &self.cuda else {
            return;
        };
        if self.stop().is_empty()
            && let Err(bytes) = cuda.unpin()
        {
            tracing::error!(
                bytes,
                "unpinning timed out; memory stays pinned until the process ends"
            );
        }
    }

    /// Figures of each GPU, for metrics. A GPU that was reported once is reported again, also if it could not be used.
    pub fn figures(&self) -> Vec<GpuFigures> {
        let figures = self.gpus().into_iter().map(|gpu| GpuFigures {
            gpu: gpu.ordinal.to_string().into(),
            healthy: gpu.error.is_none(),
            readings: gpu.readings,
        });
        figures.collect()
    }

    /// Bytes of the arena that are pinned.
    pub fn pinned_bytes(&self) -> u64 {
        let pinning = self.cuda.as_ref().ok().and_then(CudaDevice::pinning);
        pinning.map_or(0, |pinning| pinning.bytes)
    }

    /// Why a GPU is unusable, if one is.
    pub fn broken(&self) -> Option<String> {
        let mut gpus = self.gpus().into_iter();
        gpus.find_map(|gpu| gpu.readings.and_then(|readings| readings.broken))
    }

    /// State of CUDA for `/status`.
    pub fn status(&self) -> CudaStatus {
        let cuda = match &self.cuda {
            Ok(cuda) => cuda,
            Err(why) => {
                return CudaStatus {
                    reason: Some(why.to_string()),
                    ..CudaStatus::default()
                };
            }
        };
        let gpus = cuda.status().into_iter().map(|gpu| Gpu {
            ordinal: gpu.ordinal,
            name: gpu.name,
            uuid: gpu.uuid,
            pci_bus_id: gpu.pci_bus_id,
            numa_node: gpu.numa_node,
            in_use: gpu.readings.is_some(),
            error: gpu.error,
            state: gpu.readings.map(state),
        });
        let gpus = Gpus {
            driver_version: cuda.driver_version(),
            pinning: cuda.pinning().map(|pinning| Pinning {
                pinned_bytes: pinning.bytes,
                total_bytes: pinning.total,
                is_running: pinning.is_running,
                error: pinning.error,
            }),
            gpus: gpus.collect(),
        };
        CudaStatus {
            available: true,
            reason: None,
            gpus: Some(gpus),
        }
    }
}

fn state(readings: GpuReadings) -> GpuState {
    let moved = readings.moved.iter();
    let moved = moved.map(|(direction, executor, moved)| MovedBytes {
        direction: direction.name().to_owned(),
        executor: executor.name().to_owned(),
        bytes: moved.bytes,
        pieces: moved.pieces,
        seconds: moved.nanos as f64 / 1e9,
    });
    let trial = |direction: Direction| {
        let rates = &readings.profile.rates[direction as usize];
        let rates = Executor::ALL.map(|executor| {
            let rates = rates[executor as usize].iter();
            let rates = rates.map(|rate| rate.map(|rate| (rate / 1e6).round() / 1e3));
            (executor.name().to_owned(), rates.collect())
        });
        BTreeMap::from(rates)
    };
    let unusable = readings.profile.obstacles.iter();
    let unusable = unusable.map(|(executor, why)| (executor.name().to_owned(), why.clone()));
    GpuState {
        healthy: readings.broken.is_none(),
        open_allocations: Some(readings.open_allocations),
        transfers_in_flight: by_direction(|direction| readings.in_flight[direction as usize]),
        event_timeouts: readings.event_timeouts,
        moved: moved.collect(),
        run_length_buckets: RUN_BUCKETS.to_vec(),
        runs: by_direction(|direction| readings.runs[direction as usize].to_vec()),
        trial_run_lengths: TRIED_RUNS.to_vec(),
        trial_gb_per_second: by_direction(trial),
        unusable_executors: unusable.collect(),
        error: readings.broken,
    }
}

fn by_direction<T>(value: impl Fn(Direction) -> T) -> ByDirection<T> {
    ByDirection {
        store: value(Direction::Store),
        retrieve: value(Direction::Retrieve),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_is_named_in_short() {
        let missing = "the CUDA driver library libcuda.so.1 cannot be loaded: libcuda.so.1: cannot open shared object file: \
                       No such file or directory";
        assert_eq!(absence(missing), "no CUDA driver (libcuda.so.1 not found)");
        let other = "no CUDA-capable device is detected";
        assert_eq!(absence(other), other);
    }
}
