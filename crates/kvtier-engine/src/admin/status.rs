//! `/status` in the shape of LMCache 0.5.6, with its keys as far as they apply.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;

use kvtier_core::cache::FreeSpace;
use kvtier_core::segments::SegmentStats;
use kvtier_device::{Axis, KvLayout};
use kvtier_observe::api::{
    AgentSessionsStatus, BlendStatus, DevicesStatus, EngineDrivenInstance, EvictionStatus,
    KernelGroup, KvCacheLayout, L1EvictionStatus, L1Status, L2EvictionStatus,
    LmcacheDrivenInstance, MemoryPart, PrefetchStatus, QuotaStatus, StateStatus, Status,
    StorageManagerStatus, StoreStatus, WorkerLiveness,
};
use kvtier_store::l1::L1;

use super::super::instances::Mode;
use super::Admin;

/// Tag of the only L1.
const TAG: &str = "_default";

/// A value under the tag of the only L1.
fn tagged<T: Clone>(value: &T) -> BTreeMap<String, T> {
    BTreeMap::from([(TAG.to_owned(), value.clone())])
}

fn kv_cache_layout(layout: &KvLayout) -> KvCacheLayout {
    let groups = layout.kernel_groups().iter().map(|group| {
        let format = group.format;
        let layers = group.layer_indices.len();
        let prefix = if format.separate_k_and_v() {
            format!("2 x {layers} x ")
        } else if format.axes().contains(&Axis::Layer) {
            String::new()
        } else {
            format!("{layers} x ")
        };
        KernelGroup {
            kernel_group_idx: group.index,
            engine_group_idx: group.engine_group_id,
            object_group_idx: group.object_group,
            num_layers: layers,
            layer_indices: group.layer_indices.clone(),
            tokens_per_block: group.tokens_per_block,
            slots_per_block: group.slots_per_block,
            dtype: format!("torch.{}", group.dtype_name),
            engine_kv_concrete_shape: format!("{prefix}{:?}", group.tensor_shape),
            is_mla: format.is_mla(),
            engine_kv_format: format.name().to_owned(),
            engine_kv_shape: format.symbolic_shape().to_owned(),
            attention_backend: format.attention_backend().to_owned(),
        }
    });
    KvCacheLayout {
        num_layers: layout.num_layers(),
        num_blocks: layout.num_blocks(),
        cache_size_per_token: layout.bytes_per_token(),
        kernel_groups: groups.collect(),
    }
}

/// Free space of each part of L1; with one part, none is named.
fn free_space(l1: &L1) -> Vec<MemoryPart> {
    let parts = l1.cache.free_space();
    let nodes = l1.nodes().iter();
    let part = |(part, node): (FreeSpace, &u32)| MemoryPart {
        numa_node: *node,
        total_bytes: part.capacity_bytes,
        free_bytes: part.free_bytes,
        largest_free_bytes: part.largest_free_bytes,
        free_extents: part.free_extents,
    };
    parts.into_iter().zip(nodes).map(part).collect()
}

/// The whole state.
pub(super) fn status(admin: &Admin, healthy: bool) -> Status {
    let context = &*admin.context;
    let stats = context.l1.cache.stats();
    let (lookups, unread) = admin.lookups.held.counts();
    let (sessions, chunks) = context.sessions.counts();
    let (transfers, quarantined, quarantined_bytes) = admin.transfers.prepared.counts();
    let workers = admin.workers.restored();
    let heritage = &context.l1.heritage;
    let left_out_objects = heritage.rejected.reasons();
    let left_out_objects = left_out_objects.map(|(fault, count)| (fault.name().to_owned(), count));
    let left_out = workers.left_out.into_iter();
    let left_out = left_out.map(|(reason, count)| (reason.to_owned(), count));
    let (state, kept_in) = (context.state.as_ref(), context.l1.kept_in());
    let shown = |path: &Path| path.to_string_lossy().into_owned();
    let config = context.config();
    let memory_healthy = context.l1.arena.poisoned().is_none() && stats.accounting_errors == 0;
    let by_backend = BTreeMap::from([("dram".to_owned(), stats.capacity_bytes)]);
    let usage = stats.used_bytes as f64 / stats.capacity_bytes.max(1) as f64;
    let l1 = L1Status {
        is_healthy: memory_healthy,
        total_object_count: stats.objects,
        write_locked_count: stats.staged_objects,
        read_locked_count: stats.leased_objects,
        pinned_object_count: stats.pinned_objects,
        pinned_object_bytes: stats.pinned_bytes,
        pins_refused_count: stats.pins_refused_total,
        temporary_count: 0,
        staging_object_count: stats.staged_objects,
        staging_bytes: stats.staged_bytes,
        staging_uncommitted_bytes: admin.transfers.staging.staged_bytes(),
        staging_limit_bytes: admin.transfers.staging.limit(),
        memory_used_bytes: stats.used_bytes,
        memory_total_bytes: stats.capacity_bytes,
        memory_free_bytes: stats.capacity_bytes - stats.used_bytes,
        memory_largest_free_bytes: context.l1.largest_free(),
        memory_parts: free_space(&context.l1),
        memory_configured_bytes: config.l1_bytes,
        capacity_bytes_by_backend: by_backend.clone(),
        memory_usage_ratio: usage,
        write_ttl_seconds: config.write_ttl.as_secs(),
        read_ttl_seconds: config.read_ttl.as_secs(),
        prefaulted_bytes: Some(admin.prefaulted.load(Ordering::Relaxed)),
        bookkeeping_bytes: stats.bookkeeping_bytes,
        accounting_errors: stats.accounting_errors,
        restored_objects: heritage.objects,
        restored_bytes: heritage.bytes,
        left_out_objects: left_out_objects.collect(),
        unrecorded_objects: context.l1.cache.unrecorded(),
    };
    let quotas = &admin.quotas;
    let enforced_by = quotas.places().iter().filter(|place| place.isolates);
    let eviction = L1EvictionStatus {
        is_healthy: healthy,
        thread_alive: healthy,
        eviction: EvictionStatus {
            eviction_policy: config.eviction_policy.kind().name().to_owned(),
            trigger_watermark: Some(config.eviction_trigger_watermark),
            eviction_ratio: config.eviction_ratio,
            current_usage: usage,
            total_bytes_used: stats.used_bytes,
            total_capacity_bytes: stats.capacity_bytes,
            // Counts only: there may be a hundred thousand tenants.
            num_cache_salt_buckets: stats.salts,
            num_over_quota_buckets: stats.over_quota_salts,
            over_quota_refusals: stats.over_quota_total,
        },
    };
    let l2 = context.l2.as_ref();
    let adapters = l2.map_or_else(Vec::new, |l2| l2.adapters_status());
    let adapter_count = adapters.len();
    let stores = l2.map(|l2| l2.store_counts()).unwrap_or_default();
    let [queued, asking, waiting] = l2.map_or([0; 3], |l2| l2.prefetches());
    let store = StoreStatus {
        is_healthy: healthy,
        thread_alive: healthy,
        pending_keys_count: stores.queued_objects,
        pending_bytes: Some(stores.queued_bytes),
        dropped_objects: stores.dropped_objects,
        dropped_bytes: stores.dropped_bytes,
        in_flight_task_count: l2.map_or(0, |l2| l2.storing()),
        num_l2_adapters: adapter_count,
        num_active_adapters: adapter_count,
        num_draining_adapters: 0,
    };
    let mut pages = BTreeMap::new();
    let mut on_device = BTreeMap::new();
    let mut known_processes = Vec::new();
    let mut engine_driven = BTreeMap::new();
    let mut unserved = BTreeMap::new();
    let instances = context.instances.all();
    for instance in &instances {
        let id = instance.id.to_string();
        if let Some(reason) = instance.unserved {
            unserved.insert(id.clone(), reason.name().to_owned());
        }
        let (model_name, world_size) = (instance.model_name.to_string(), instance.world_size);
        let client_releases = instance.releases.to_owned();
        match &instance.mode {
            Mode::LmcacheDriven { memory, .. } => {
                on_device.insert(id.clone(), memory.device().to_owned());
                known_processes.extend(memory.owner().map(|_| instance.id.0));
                let instance = LmcacheDrivenInstance {
                    model_name,
                    world_size,
                    client_releases,
                    chunk_size: instance.layout.chunk_tokens,
                    kv_cache_layout: kv_cache_layout(memory.layout()),
                };
                pages.insert(id, instance);
            }
            Mode::EngineDriven { layout, .. } => {
                let instance = EngineDrivenInstance {
                    model_name,
                    world_size,
                    client_releases,
                    chunk_size: instance.layout.chunk_tokens,
                    block_size: layout.block_size,
                    use_mla: layout.use_mla,
                };
                engine_driven.insert(id, instance);
            }
        }
    }
    // Some may have left meanwhile.
    admin.workers.release(instances);
    fn ids<T>(instances: &BTreeMap<String, T>) -> Vec<i64> {
        let ids = instances.keys();
        ids.filter_map(|id| id.parse().ok()).collect()
    }
    let reap = config.worker_reap_timeout;
    Status {
        is_healthy: healthy && memory_healthy,
        warnings: admin.warnings(),
        engine_type: "MPCacheServer".to_owned(),
        server: "kvtier".to_owned(),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        instance_id: Some(config.instance_id.clone()),
        uptime_seconds: Some(context.clock.uptime().as_secs()),
        chunk_size: Some(config.chunk_size),
        hash_algorithm: config.hash_algorithm.name().to_owned(),
        active_sessions: Some(lookups),
        agent_sessions: AgentSessionsStatus { sessions, chunks },
        blend: context.blend.as_ref().map(|blend| {
            let SegmentStats {
                segments,
                capacity,
                bytes,
            } = blend.segments.stats();
            BlendStatus {
                segments,
                max_segments: capacity,
                max_bytes: bytes,
            }
        }),
        pending_transfers: Some(transfers),
        withheld_transfers: quarantined,
        withheld_bytes: quarantined_bytes,
        storage_manager: StorageManagerStatus {
            is_healthy: healthy && memory_healthy,
            l1_managers: tagged(&l1),
            l1_manager: l1,
            store_controllers: tagged(&store),
            store_controller: store,
            l1_eviction_controllers: tagged(&eviction),
            l1_eviction_controller: eviction.clone(),
            eviction_controller: eviction,
            prefetch_controller: PrefetchStatus {
                is_healthy: healthy,
                thread_alive: healthy,
                max_in_flight: l2.map_or(0, |l2| l2.config().prefetch_max_in_flight),
                submission_queue_size: 0,
                pending_queue_size: queued,
                in_flight_request_count: asking + waiting,
                lookup_phase_count: asking,
                load_phase_count: waiting,
                loading_objects: Some(l2.map_or(0, |l2| l2.loading())),
                completed_results_count: unread,
                num_l2_adapters: adapter_count,
                num_active_adapters: adapter_count,
                num_draining_adapters: 0,
            },
            l2_eviction_controller: L2EvictionStatus {
                is_healthy: healthy,
                thread_alive: healthy,
                adapters: l2.map_or_else(Vec::new, |l2| l2.eviction_status()),
            },
            l2_adapters: adapters,
            num_l2_adapters: adapter_count,
            l1_usage: [stats.used_bytes, stats.capacity_bytes],
            l1_capacity_bytes_by_backend: by_backend,
        },
        state: StateStatus {
            directory: state.ok().map(|state| shown(state.path())),
            reason: state.err().map(ToString::to_string),
            l1_file: kept_in.as_deref().ok().map(shown),
            l1_reason: kept_in.err().map(str::to_owned),
            restored_workers: workers.restored,
            left_out_workers: left_out.collect(),
        },
        quotas: QuotaStatus {
            mode: quotas.mode_name().to_owned(),
            default_limit_bytes: quotas.default_limit().0,
            enforced_by: enforced_by.map(|place| place.name.to_string()).collect(),
            num_tenants: quotas.table().len(),
            persisted: quotas.is_persistent(),
            file: quotas.file().map(shown),
        },
        active_prefetch_jobs: unread,
        active_p2p_lookup_jobs: 0,
        p2p_enabled: false,
        p2p_state: "unregistered".to_owned(),
        p2p_peer_count: 0,
        p2p_peers: Vec::new(),
        worker_liveness: WorkerLiveness {
            enabled: reap.is_some(),
            reap_timeout_seconds: reap.map_or(0.0, |timeout| timeout.as_secs_f64()),
            registration_grace_seconds: config.registration_grace.as_secs_f64(),
            tracked_instances: context.instances.len(),
        },
        devices: DevicesStatus {
            cuda: Some(context.devices.status()),
            of_instances: on_device,
            // Their end is noticed at once, without waiting for them to be silent.
            instances_of_known_processes: known_processes,
        },
        request_port: context.metrics.request_port(),
        peer_port: config.peer_port.map(|_| context.metrics.peer_port()),
        unserved_instances: unserved,
        kv_events: context.kv_events_status(),
        registered_gpu_ids: ids(&pages),
        cache_context_meta: pages,
        registered_non_cuda_instance_ids: ids(&engine_driven),
        non_cuda_context_meta: engine_driven,
    }
}
