//! Devices in the answer of `GET /status`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// GPUs, and the devices of workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct DevicesStatus {
    /// The GPUs.
    pub cuda: Option<CudaStatus>,
    /// Device of each worker whose pages the server copies, by instance id.
    pub of_instances: BTreeMap<String, String>,
    /// Workers whose end is noticed at once.
    pub instances_of_known_processes: Vec<i64>,
}

/// The GPUs, or why none is used.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct CudaStatus {
    /// Whether the server may use GPUs.
    pub available: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The GPUs, if they are available.
    #[serde(flatten)]
    pub gpus: Option<Gpus>,
}

/// GPUs and their driver.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Gpus {
    /// Version of the driver: 12080 is CUDA 12.8.
    pub driver_version: i32,
    /// Pinned memory; `null` before the first worker on a GPU.
    pub pinning: Option<Pinning>,
    /// One entry per GPU.
    pub gpus: Vec<Gpu>,
}

/// Memory of L1 that GPUs access directly.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Pinning {
    /// Pinned bytes.
    pub pinned_bytes: u64,
    /// Bytes of L1.
    pub total_bytes: u64,
    /// Whether pinning is still running.
    #[serde(rename = "under_way")]
    pub is_running: bool,
    /// Cause, if a piece could not be pinned, of the last such piece; else `null`.
    pub error: Option<String>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Gpu {
    /// Index among the GPUs visible to the process.
    pub ordinal: i32,
    /// Product name.
    pub name: String,
    /// Lower case, `8-4-4-4-12`.
    pub uuid: String,
    /// PCI bus id, such as `0000:3b:00.0`.
    pub pci_bus_id: String,
    /// NUMA node of the GPU; -1 if it is not known.
    pub numa_node: i32,
    /// Whether it had a worker.
    pub in_use: bool,
    /// Why it is unusable; `null` if it is not.
    pub error: Option<String>,
    /// Counters of the GPU; `null` before its first worker.
    pub state: Option<GpuState>,
}

/// Counters of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct GpuState {
    /// Whether the driver still takes work for it.
    pub healthy: bool,
    /// The driver's error if it does not; else `null`.
    pub error: Option<String>,
    /// Open allocations of engines.
    pub open_allocations: Option<usize>,
    /// Transfers in flight.
    #[serde(rename = "transfers_under_way")]
    pub transfers_in_flight: ByDirection<u64>,
    /// Events of engines that did not happen in time.
    pub event_timeouts: u64,
    /// Copied bytes.
    pub moved: Vec<MovedBytes>,
    /// Lengths that separate the counts of `runs`, bytes.
    pub run_length_buckets: Vec<u64>,
    /// Copied runs by length.
    pub runs: ByDirection<Vec<u64>>,
    /// Lengths of the runs of the trial, bytes.
    pub trial_run_lengths: Vec<u64>,
    /// Speed of each executor in the trial, GB/s by length; `null` where it was not tried.
    pub trial_gb_per_second: ByDirection<BTreeMap<String, Vec<Option<f64>>>>,
    /// Executors that cannot be used, with the cause.
    pub unusable_executors: BTreeMap<String, String>,
}

/// A value for each direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ByDirection<T> {
    /// From a GPU to L1.
    pub store: T,
    /// From L1 to a GPU.
    pub retrieve: T,
}

/// Bytes that one executor copied in one direction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct MovedBytes {
    /// `store` or `retrieve`.
    pub direction: String,
    /// Name of the executor.
    pub executor: String,
    /// Copied bytes.
    pub bytes: u64,
    /// Copied pieces.
    pub pieces: u64,
    /// Seconds of copying.
    pub seconds: f64,
}
