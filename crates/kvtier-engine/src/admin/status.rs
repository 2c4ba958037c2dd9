//! `/status` in the shape of LMCache 0.5.6, with its keys as far as they apply.

use kvtier_core::cache::FreeSpace;
use serde_json::{Map, Value, json};

use super::super::instances::Mode;
use super::Admin;

/// Tag of the only L1.
const TAG: &str = "_default";

impl Admin {
    /// Free space of each part of L1; with one part, none is named.
    fn free_space(&self) -> Vec<Value> {
        let parts = self.context.l1.cache.free_space();
        let nodes = self.context.l1.nodes().iter();
        let part = |(part, node): (FreeSpace, &u32)| {
            json!({
                "numa_node": node,
                "total_bytes": part.capacity_bytes,
                "free_bytes": part.free_bytes,
                "largest_free_bytes": part.largest_free_bytes,
                "free_extents": part.free_extents,
            })
        };
        parts.into_iter().zip(nodes).map(part).collect()
    }

    /// The whole state.
    pub fn status(&self, healthy: bool) -> Value {
        let stats = self.context.l1.cache.stats();
        let (lookups, unread) = self.lookups.held.counts();
        let (transfers, quarantined, quarantined_bytes) = self.transfers.prepared.counts();
        let config = &self.context.config;
        let memory_healthy =
            self.context.l1.arena.poisoned().is_none() && stats.accounting_errors == 0;
        let by_backend = json!({ "dram": stats.capacity_bytes });
        let l1 = json!({
            "is_healthy": memory_healthy,
            "total_object_count": stats.objects,
            "write_locked_count": stats.staged_objects,
            "read_locked_count": stats.leased_objects,
            "temporary_count": 0,
            "staging_object_count": stats.staged_objects,
            "staging_bytes": stats.staged_bytes,
            "staging_uncommitted_bytes": self.transfers.staging.staged_bytes(),
            "staging_limit_bytes": self.transfers.staging.limit(),
            "memory_used_bytes": stats.used_bytes,
            "memory_total_bytes": stats.capacity_bytes,
            "memory_free_bytes": stats.capacity_bytes - stats.used_bytes,
            "memory_largest_free_bytes": self.context.l1.largest_free(),
            "memory_parts": self.free_space(),
            "memory_configured_bytes": config.l1_bytes,
            "capacity_bytes_by_backend": by_backend,
            "memory_usage_ratio": stats.used_bytes as f64 / stats.capacity_bytes.max(1) as f64,
            "write_ttl_seconds": config.write_ttl.as_secs(),
            "read_ttl_seconds": config.read_ttl.as_secs(),
            "prefaulted_bytes": self.prefaulted.load(std::sync::atomic::Ordering::Relaxed),
            "bookkeeping_bytes": stats.bookkeeping_bytes,
            "accounting_errors": stats.accounting_errors,
        });
        let quotas = &self.quotas;
        let enforced_by = quotas.places().iter().filter(|place| place.isolates);
        let enforced_by: Vec<_> = enforced_by.map(|place| &*place.name).collect();
        let quota_settings = quotas.settings();
        let eviction = json!({
            "is_healthy": healthy,
            "thread_alive": healthy,
            "eviction_policy": config.eviction_policy.kind().name(),
            "trigger_watermark": config.eviction_trigger_watermark,
            "eviction_ratio": config.eviction_ratio,
            "current_usage": stats.used_bytes as f64 / stats.capacity_bytes.max(1) as f64,
            "total_bytes_used": stats.used_bytes,
            "total_capacity_bytes": stats.capacity_bytes,
            // Counts only: there may be a hundred thousand tenants.
            "num_cache_salt_buckets": stats.salts,
            "num_over_quota_buckets": stats.over_quota_salts,
            "over_quota_refusals": stats.over_quota_total,
        });
        let l2 = self.context.l2.as_ref();
        let adapters = l2.map_or_else(Vec::new, |l2| l2.adapters_status());
        let adapter_count = adapters.len();
        let stores = l2.map(|l2| l2.store_counts()).unwrap_or_default();
        let loading = l2.map_or(0, |l2| l2.loading());
        let [queued, asking, waiting] = l2.map_or([0; 3], |l2| l2.prefetches());
        let store = json!({
            "is_healthy": healthy, "thread_alive": healthy, "pending_keys_count": stores.queued_objects,
            "pending_bytes": stores.queued_bytes, "dropped_objects": stores.dropped_objects,
            "dropped_bytes": stores.dropped_bytes, "in_flight_task_count": l2.map_or(0, |l2| l2.storing()),
            "num_l2_adapters": adapter_count, "num_active_adapters": adapter_count, "num_draining_adapters": 0,
        });
        let mut pages = Map::new();
        let mut on_device = Map::new();
        let mut known_processes = Vec::new();
        let mut engine_driven = Map::new();
        let mut unserved = Map::new();
        let instances = self.context.instances.all();
        for instance in &instances {
            let id = instance.id.to_string();
            if let Some(reason) = instance.unserved {
                unserved.insert(id.clone(), reason.name().into());
            }
            match &instance.mode {
                Mode::LmcacheDriven { memory, .. } => {
                    on_device.insert(id.clone(), memory.device().into());
                    known_processes.extend(memory.owner().map(|_| instance.id.0));
                    let layout = memory.layout().describe();
                    let groups: Vec<_> = layout
                        .kernel_groups
                        .iter()
                        .map(|group| {
                            json!({
                                "kernel_group_idx": group.kernel_group_idx,
                                "engine_group_idx": group.engine_group_idx,
                                "object_group_idx": group.object_group_idx,
                                "num_layers": group.num_layers,
                                "layer_indices": group.layer_indices,
                                "tokens_per_block": group.tokens_per_block,
                                "slots_per_block": group.slots_per_block,
                                "dtype": group.dtype,
                                "engine_kv_concrete_shape": group.engine_kv_concrete_shape,
                                "is_mla": group.is_mla,
                                "engine_kv_format": group.engine_kv_format,
                                "engine_kv_shape": group.engine_kv_shape,
                                "attention_backend": group.attention_backend,
                            })
                        })
                        .collect();
                    pages.insert(
                        id,
                        json!({
                            "model_name": &*instance.model_name,
                            "world_size": instance.world_size,
                            "kv_cache_layout": {
                                "num_layers": layout.num_layers,
                                "num_blocks": layout.num_blocks,
                                "cache_size_per_token": layout.cache_size_per_token,
                                "kernel_groups": groups,
                            },
                        }),
                    );
                }
                Mode::EngineDriven { layout, .. } => {
                    engine_driven.insert(
                        id,
                        json!({
                            "model_name": &*instance.model_name,
                            "world_size": instance.world_size,
                            "block_size": layout.block_size,
                            "use_mla": layout.use_mla,
                        }),
                    );
                }
            }
        }
        // Some may have left meanwhile.
        self.workers.release(instances);
        let ids = |map: &Map<String, Value>| {
            map.keys()
                .filter_map(|id| id.parse::<i64>().ok())
                .collect::<Vec<_>>()
        };
        let reap = config.worker_reap_timeout;
        json!({
            "is_healthy": healthy && memory_healthy,
            "engine_type": "MPCacheServer",
            "server": "kvtier",
            "version": env!("CARGO_PKG_VERSION"),
            "instance_id": config.instance_id,
            "uptime_seconds": self.context.now().as_secs(),
            "chunk_size": config.chunk_size,
            "hash_algorithm": config.hash_algorithm.name(),
            "active_sessions": lookups,
            "pending_transfers": transfers,
            "withheld_transfers": quarantined,
            "withheld_bytes": quarantined_bytes,
            "storage_manager": {
                "is_healthy": healthy && memory_healthy,
                "l1_managers": { TAG: l1 },
                "l1_manager": l1,
                "store_controllers": { TAG: store },
                "store_controller": store,
                "l1_eviction_controllers": { TAG: eviction },
                "l1_eviction_controller": eviction,
                // The stock CLI reads the policy under this older name.
                "eviction_controller": eviction,
                "prefetch_controller": {
                    "is_healthy": healthy, "thread_alive": healthy,
                    "max_in_flight": l2.map_or(0, |l2| l2.config().prefetch_max_in_flight),
                    "submission_queue_size": 0, "pending_queue_size": queued,
                    "in_flight_request_count": asking + waiting, "lookup_phase_count": asking,
                    "load_phase_count": waiting, "loading_objects": loading,
                    "completed_results_count": unread, "num_l2_adapters": adapter_count,
                    "num_active_adapters": adapter_count, "num_draining_adapters": 0,
                },
                "l2_eviction_controller": {
                    "is_healthy": healthy, "thread_alive": healthy,
                    "adapters": l2.map_or_else(Vec::new, |l2| l2.eviction_status()),
                },
                "l2_adapters": adapters,
                "num_l2_adapters": adapter_count,
                "l1_usage": [stats.used_bytes, stats.capacity_bytes],
                "l1_capacity_bytes_by_backend": by_backend,
            },
            "quotas": {
                "mode": quota_settings.mode_name(),
                "default_limit_bytes": quota_settings.default_limit.0,
                "enforced_by": enforced_by,
                "num_tenants": quotas.table().len(),
                "persisted": quotas.is_persistent(),
                "file": quota_settings.file,
            },
            "active_prefetch_jobs": unread,
            "active_p2p_lookup_jobs": 0,
            "p2p_enabled": false,
            "p2p_state": "unregistered",
            "p2p_peer_count": 0,
            "p2p_peers": [],
            "worker_liveness": {
                "enabled": reap.is_some(),
                "reap_timeout_seconds": reap.map_or(0.0, |timeout| timeout.as_secs_f64()),
                "registration_grace_seconds": config.registration_grace.as_secs_f64(),
                "tracked_instances": self.context.instances.len(),
            },
            "devices": {
                "cuda": self.context.devices.status(),
                "of_instances": on_device,
                // Their end is noticed at once, without waiting for them to be silent.
                "instances_of_known_processes": known_processes,
            },
            "request_port": self.context.metrics.request_port(),
            "unserved_instances": unserved,
            "kv_events": { "enabled": false },
            "registered_gpu_ids": ids(&pages),
            "cache_context_meta": pages,
            "registered_non_cuda_instance_ids": ids(&engine_driven),
            "non_cuda_context_meta": engine_driven,
        })
    }
}
