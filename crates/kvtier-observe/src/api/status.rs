//! Answer of `GET /status`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::devices::DevicesStatus;
use crate::api::tiers::{TierEvictionStatus, TierStatus};

/// State of a server: the answer of `GET /status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Status {
    /// Whether requests are served, no component has failed and L1's accounting has no errors.
    pub is_healthy: bool,
    /// What operators should know although the server is healthy, one sentence each.
    pub warnings: Vec<String>,
    /// LMCache's name of this kind of server.
    pub engine_type: String,
    /// `kvtier`; empty for LMCache's own server.
    pub server: String,
    /// Version of kvtier.
    pub version: Option<String>,
    /// Value of `--instance-id`.
    pub instance_id: Option<String>,
    /// Seconds since the start.
    pub uptime_seconds: Option<u64>,
    /// Tokens per chunk.
    pub chunk_size: Option<u32>,
    /// Hash of token ids, which engines must use too.
    pub hash_algorithm: String,
    /// Requests of engines that hold or held something and have not ended.
    pub active_sessions: Option<usize>,
    /// Sessions of agents that are remembered.
    pub agent_sessions: AgentSessionsStatus,
    /// Chunks that are found elsewhere than in a prefix; `None` without `--engine-type blend`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blend: Option<BlendStatus>,
    /// Transfers in flight.
    pub pending_transfers: Option<usize>,
    /// Abandoned transfers whose memory may still be written.
    pub withheld_transfers: usize,
    /// Bytes of that memory.
    pub withheld_bytes: u64,
    /// L1 and the tiers below it.
    pub storage_manager: StorageManagerStatus,
    /// What outlives the process, and where.
    pub state: StateStatus,
    /// Limits of tenants.
    pub quotas: QuotaStatus,
    /// Lookup results that no client has read.
    pub active_prefetch_jobs: usize,
    /// Always 0.
    pub active_p2p_lookup_jobs: u64,
    /// Always `false`.
    pub p2p_enabled: bool,
    /// Always `unregistered`.
    pub p2p_state: String,
    /// Always 0.
    pub p2p_peer_count: u64,
    /// Always empty.
    pub p2p_peers: Vec<Value>,
    /// Detection of dead workers.
    pub worker_liveness: WorkerLiveness,
    /// GPUs, and the devices of workers.
    pub devices: DevicesStatus,
    /// Connections to the request port.
    pub request_port: RequestPortStatus,
    /// Reads of L1 by peers; `null` without `--peer-port`.
    pub peer_port: Option<PeerPortStatus>,
    /// Workers whose requests are refused, by instance id, with the cause.
    pub unserved_instances: BTreeMap<String, String>,
    /// Log of what models can hit.
    pub kv_events: KvEvents,
    /// Ids of the workers in `cache_context_meta`.
    pub registered_gpu_ids: Vec<i64>,
    /// Workers whose pages the server copies, by instance id.
    pub cache_context_meta: BTreeMap<String, LmcacheDrivenInstance>,
    /// Ids of the workers in `non_cuda_context_meta`.
    pub registered_non_cuda_instance_ids: Vec<i64>,
    /// Workers that copy by themselves, by instance id.
    pub non_cuda_context_meta: BTreeMap<String, EngineDrivenInstance>,
}

/// L1 and the tiers below it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct StorageManagerStatus {
    /// Whether requests are served and L1's memory is sound.
    pub is_healthy: bool,
    /// `l1_manager` under its tag, `_default`.
    pub l1_managers: BTreeMap<String, L1Status>,
    /// L1.
    pub l1_manager: L1Status,
    /// `store_controller` under its tag.
    pub store_controllers: BTreeMap<String, StoreStatus>,
    /// Write-behind, all tiers together.
    pub store_controller: StoreStatus,
    /// `l1_eviction_controller` under its tag.
    pub l1_eviction_controllers: BTreeMap<String, L1EvictionStatus>,
    /// Eviction of L1.
    pub l1_eviction_controller: L1EvictionStatus,
    /// L1's eviction under its older name, which LMCache's command line reads.
    pub eviction_controller: L1EvictionStatus,
    /// Lookups that ask the tiers.
    pub prefetch_controller: PrefetchStatus,
    /// Eviction of the tiers.
    pub l2_eviction_controller: L2EvictionStatus,
    /// The tiers, in the order in which they are asked.
    pub l2_adapters: Vec<TierStatus>,
    /// Number of tiers.
    pub num_l2_adapters: usize,
    /// Bytes of L1 in use, and all bytes of L1.
    pub l1_usage: [u64; 2],
    /// Bytes of L1 by kind of memory.
    pub l1_capacity_bytes_by_backend: BTreeMap<String, u64>,
}

/// L1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct L1Status {
    /// Whether its memory is sound and its accounting has no errors.
    pub is_healthy: bool,
    /// Readable objects.
    pub total_object_count: u64,
    /// Objects being written.
    pub write_locked_count: u64,
    /// Leased objects.
    pub read_locked_count: u64,
    /// Objects that requests have pinned.
    pub pinned_object_count: u64,
    /// Bytes of the pinned objects.
    pub pinned_object_bytes: u64,
    /// Objects that were not pinned because pinned ones were at their share.
    pub pins_refused_count: u64,
    /// Always 0.
    pub temporary_count: u64,
    /// Objects reserved and not committed.
    pub staging_object_count: u64,
    /// Bytes reserved and not committed.
    pub staging_bytes: u64,
    /// The part of them by stores of workers.
    pub staging_uncommitted_bytes: u64,
    /// Limit of that part, bytes.
    pub staging_limit_bytes: u64,
    /// Bytes in use.
    pub memory_used_bytes: u64,
    /// All bytes.
    pub memory_total_bytes: u64,
    /// Free bytes.
    pub memory_free_bytes: u64,
    /// Bytes of the largest free extent.
    pub memory_largest_free_bytes: u64,
    /// Free space of each NUMA part; empty without parts.
    pub memory_parts: Vec<MemoryPart>,
    /// Bytes asked for in the configuration.
    pub memory_configured_bytes: u64,
    /// Bytes by kind of memory.
    pub capacity_bytes_by_backend: BTreeMap<String, u64>,
    /// Bytes in use per byte, 0 to 1.
    pub memory_usage_ratio: f64,
    /// Seconds after which an uncommitted reservation ends.
    pub write_ttl_seconds: u64,
    /// Seconds after which a lease ends.
    pub read_ttl_seconds: u64,
    /// Bytes touched since the start.
    pub prefaulted_bytes: Option<u64>,
    /// Bytes of the index.
    pub bookkeeping_bytes: u64,
    /// Accounting errors found; anything but 0 is a bug.
    pub accounting_errors: u64,
    /// Readable objects at the start that the server before had left.
    pub restored_objects: u64,
    /// Bytes of the restored objects.
    pub restored_bytes: u64,
    /// Objects of that server that were left out, by reason.
    pub left_out_objects: BTreeMap<String, u64>,
    /// Objects that the next server will not have, since there was no memory to record them.
    pub unrecorded_objects: u64,
}

/// Free space of one NUMA part of L1.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct MemoryPart {
    /// NUMA node of the part.
    pub numa_node: u32,
    /// All bytes.
    pub total_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Bytes of the largest free extent.
    pub largest_free_bytes: u64,
    /// Free extents.
    pub free_extents: u64,
}

/// Eviction of L1, and whether it runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct L1EvictionStatus {
    /// Whether requests are served.
    pub is_healthy: bool,
    /// Whether requests are served, as `is_healthy`.
    pub thread_alive: bool,
    #[serde(flatten)]
    /// The policy and what it has evicted.
    pub eviction: EvictionStatus,
}

/// Eviction of L1 or of a tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct EvictionStatus {
    /// Name of the policy.
    pub eviction_policy: String,
    /// Used part of the capacity above which objects are evicted in the background, 0 to 1.
    pub trigger_watermark: Option<f64>,
    /// Part of the used bytes that is evicted then, 0 to 1.
    pub eviction_ratio: f64,
    /// Used part of the capacity, 0 to 1; -1 without a capacity.
    pub current_usage: f64,
    /// Bytes in use.
    pub total_bytes_used: u64,
    /// Capacity in bytes; 0 is none.
    pub total_capacity_bytes: u64,
    /// Known tenants.
    pub num_cache_salt_buckets: u64,
    /// Tenants over quota.
    pub num_over_quota_buckets: u64,
    /// Objects refused because of limits.
    pub over_quota_refusals: u64,
}

/// Write-behind, all tiers together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct StoreStatus {
    /// Whether requests are served.
    pub is_healthy: bool,
    /// Whether requests are served, as `is_healthy`.
    pub thread_alive: bool,
    /// Objects that wait or are being stored.
    pub pending_keys_count: u64,
    /// Bytes that wait or are being stored.
    pub pending_bytes: Option<u64>,
    /// Objects that were not stored because the queue was full.
    pub dropped_objects: u64,
    /// Bytes of the objects that were not stored.
    pub dropped_bytes: u64,
    /// Batches being stored.
    pub in_flight_task_count: u64,
    /// Number of tiers.
    pub num_l2_adapters: usize,
    /// Number of tiers, as `num_l2_adapters`.
    pub num_active_adapters: usize,
    /// Always 0.
    pub num_draining_adapters: usize,
}

/// Lookups that ask the tiers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PrefetchStatus {
    /// Whether requests are served.
    pub is_healthy: bool,
    /// Whether requests are served, as `is_healthy`.
    pub thread_alive: bool,
    /// Most lookups that ask at once; 0 without tiers.
    pub max_in_flight: usize,
    /// Always 0.
    pub submission_queue_size: u64,
    /// Queued lookups.
    pub pending_queue_size: u64,
    /// Lookups that ask or wait for loads.
    pub in_flight_request_count: u64,
    /// Lookups that ask.
    pub lookup_phase_count: u64,
    /// Lookups that wait for loads.
    pub load_phase_count: u64,
    /// Objects being loaded.
    pub loading_objects: Option<usize>,
    /// Lookup results that no client has read.
    pub completed_results_count: usize,
    /// Number of tiers.
    pub num_l2_adapters: usize,
    /// Number of tiers, as `num_l2_adapters`.
    pub num_active_adapters: usize,
    /// Always 0.
    pub num_draining_adapters: usize,
}

/// Eviction of the tiers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct L2EvictionStatus {
    /// Whether requests are served.
    pub is_healthy: bool,
    /// Whether requests are served, as `is_healthy`.
    pub thread_alive: bool,
    /// The tiers that evict.
    pub adapters: Vec<TierEvictionStatus>,
}

/// What outlives the process, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct StateStatus {
    /// Folder of this instance in `--state-dir`; `null` without one.
    pub directory: Option<String>,
    /// Why there is none.
    pub reason: Option<String>,
    /// File of L1's memory, which the next server goes on with; `null` if L1 ends with the process.
    pub l1_file: Option<String>,
    /// Why it does.
    pub l1_reason: Option<String>,
    /// Workers whose registrations the start took over from the server before.
    pub restored_workers: u64,
    /// Registrations of that server that were left out, by reason.
    pub left_out_workers: BTreeMap<String, u64>,
}

/// Limits of tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct QuotaStatus {
    /// Value of `--quota-mode`.
    pub mode: String,
    /// Limit of tenants without a quota, bytes; `null` is unlimited.
    pub default_limit_bytes: Option<u64>,
    /// Tiers that enforce limits.
    pub enforced_by: Vec<String>,
    /// Tenants with a quota.
    pub num_tenants: usize,
    /// Whether a restart keeps the quotas.
    pub persisted: bool,
    /// File of the quotas; `null` without one.
    pub file: Option<String>,
}

/// Detection of dead workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct WorkerLiveness {
    /// Whether silent workers are removed.
    pub enabled: bool,
    /// Seconds without a ping after which a worker is considered dead; 0 if it never is.
    pub reap_timeout_seconds: f64,
    /// Silence in seconds granted to a worker that has not pinged yet.
    pub registration_grace_seconds: f64,
    /// Registered workers.
    pub tracked_instances: usize,
}

/// Connections to the request port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RequestPortStatus {
    /// Open connections.
    pub connections: i64,
    /// Most connections.
    pub connections_max: i64,
    /// Most open files of the process.
    pub open_files_max: i64,
}

/// Sessions of agents, as their requests name them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct AgentSessionsStatus {
    /// Sessions that are remembered.
    pub sessions: usize,
    /// Chunks of their last prompts.
    pub chunks: usize,
}

/// Chunks that are found elsewhere than in a prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct BlendStatus {
    /// Chunks that are known.
    pub segments: usize,
    /// Chunks that may be known.
    pub max_segments: usize,
    /// Bytes that these take.
    pub max_bytes: usize,
}

/// Reads of L1 by peers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PeerPortStatus {
    /// Open connections.
    pub connections: i64,
    /// Objects sent since start.
    pub sent_objects: u64,
    /// Bytes of the objects.
    pub sent_bytes: u64,
}

/// Log of the chunks that became hits and of those that ended as such, and the streams of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct KvEvents {
    /// Whether there is a log.
    pub enabled: bool,
    /// Start of the server in nanoseconds, with which the log begins.
    pub incarnation: i64,
    /// Events that the log has.
    pub log_depth: usize,
    /// Events that it may have.
    pub log_capacity: usize,
    /// Number of the next event.
    pub next_seq: u64,
    /// Gaps within the log; kvtier has none.
    pub lost_markers: u64,
    /// Stores without tokens; kvtier has none.
    pub unbound_stores: u64,
    /// Open streams.
    pub subscribers: usize,
}

/// Worker whose pages the server copies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct LmcacheDrivenInstance {
    /// Model of the worker.
    pub model_name: String,
    /// Workers of the engine.
    pub world_size: u32,
    /// Releases of LMCache that its client may be of, such as `0.5.3 to 0.5.4`; kvtier's own clients count as the newest.
    pub client_releases: String,
    /// Tokens per chunk.
    pub chunk_size: u64,
    /// Layout of the worker's pages.
    pub kv_cache_layout: KvCacheLayout,
}

/// Worker that copies by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct EngineDrivenInstance {
    /// Model of the worker.
    pub model_name: String,
    /// Workers of the engine.
    pub world_size: u32,
    /// Releases of LMCache that its client may be of, such as `0.5.3 to 0.5.4`; kvtier's own clients count as the newest.
    pub client_releases: String,
    /// Tokens per chunk.
    pub chunk_size: u64,
    /// Tokens per block.
    pub block_size: i64,
    /// What the worker registered; engines with fused K and V set it too.
    pub use_mla: bool,
}

/// Pages of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct KvCacheLayout {
    /// Layers of all groups.
    pub num_layers: usize,
    /// Blocks per layer.
    pub num_blocks: u64,
    /// Bytes per token in all layers.
    pub cache_size_per_token: u64,
    /// Layers of equal shape.
    pub kernel_groups: Vec<KernelGroup>,
}

/// Layers of equal shape.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct KernelGroup {
    /// Position among the kernel groups.
    pub kernel_group_idx: usize,
    /// The engine's group number.
    pub engine_group_idx: i64,
    /// Object group it is stored in.
    pub object_group_idx: usize,
    /// Layers of the group.
    pub num_layers: usize,
    /// Positions of the group's layers in the registration.
    pub layer_indices: Vec<usize>,
    /// Tokens per block id.
    pub tokens_per_block: u64,
    /// Token slots per block.
    pub slots_per_block: u64,
    /// Torch's name, such as `torch.float16`.
    pub dtype: String,
    /// Shape of the engine's tensors, such as `4 x [2, 256, 16, 2, 64]`.
    pub engine_kv_concrete_shape: String,
    /// Whether a token has one latent vector.
    pub is_mla: bool,
    /// Name of the format.
    pub engine_kv_format: String,
    /// The shape in symbols.
    pub engine_kv_shape: String,
    /// The attention implementation, in words.
    pub attention_backend: String,
}
