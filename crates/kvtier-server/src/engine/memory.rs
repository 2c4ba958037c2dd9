//! L1: the arena with the bytes, and the cache that decides about them.

use std::sync::Arc;

use kvtier_core::cache::{self, Cache, CacheConfig};
use kvtier_core::quota::QuotaConfig;
use kvtier_memory::{Arena, ArenaError, ArenaKind, Extent, ExtentAllocator};

use super::devices::Devices;
use crate::config::{NumaNodes, ServerConfig};
use crate::quota::Opened;

/// The arena's allocator as the cache wants it.
pub struct L1Allocator(ExtentAllocator);

impl cache::ExtentAllocator for L1Allocator {
    fn allocate(&mut self, bytes: u64) -> Option<cache::Extent> {
        let extent = self.0.allocate(bytes).ok()?;
        Some(cache::Extent {
            offset: extent.offset,
            len: extent.len,
        })
    }

    fn free(&mut self, extent: cache::Extent) {
        if let Err(error) = self.0.free(to_memory(extent)) {
            // The cache frees what it got, and nothing twice. Anything else is a bug that must be seen.
            tracing::error!(%error, offset = extent.offset, len = extent.len, "an extent of L1 could not be freed");
            debug_assert!(false, "an extent of L1 could not be freed: {error}");
        }
    }

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn used(&self) -> u64 {
        self.0.used()
    }
}

#[cfg(test)]
impl L1Allocator {
    /// For a cache without an arena.
    pub fn of_bytes(bytes: u64) -> Self {
        Self(ExtentAllocator::with_alignment(bytes, 1).expect("a size that can be"))
    }
}

/// The cache's extent as the arena's.
pub fn to_memory(extent: cache::Extent) -> Extent {
    Extent::new(extent.offset, extent.len)
}

/// Host memory and the cache over it.
pub struct L1 {
    /// The bytes.
    pub arena: Arc<Arena>,
    /// Which objects they are.
    pub cache: Cache<L1Allocator>,
}

impl L1 {
    /// Makes the arena that a configuration asks for. Touches no page of it.
    ///
    /// # Errors
    /// One line that names what cannot be had. A pool that nobody asked for by name is done without instead.
    pub fn create(config: &ServerConfig, quotas: &Opened) -> Result<Self, String> {
        let arena = create_arena(config)?;
        let allocator = ExtentAllocator::with_alignment(arena.len(), config.l1_align_bytes)
            .map_err(|error| format!("L1 of {} bytes: {error}", arena.len()))?;
        let cache = Cache::new(
            L1Allocator(allocator),
            CacheConfig {
                eviction: config.eviction_policy.kind(),
                quotas: QuotaConfig {
                    watermark: config.eviction_trigger_watermark,
                    ratio: config.eviction_ratio,
                    ..quotas.config("l1")
                },
                ..CacheConfig::default()
            },
        );
        for (salt, grant) in quotas.grants("l1") {
            cache.set_grant(salt, Some(grant));
        }
        Ok(Self {
            arena: Arc::new(arena),
            cache,
        })
    }
}

impl L1 {
    /// Has the arena, of which nothing was touched yet, come from the NUMA nodes that are wanted.
    ///
    /// # Errors
    /// One line, when nodes that were asked for cannot be had. Those of the GPUs are done without instead.
    pub fn prefer_nodes(&self, wanted: &NumaNodes, devices: &Devices) -> Result<(), String> {
        let result = match wanted {
            NumaNodes::Off => return Ok(()),
            NumaNodes::List(nodes) => {
                let result = self.arena.prefer_nodes(nodes);
                return result.map_err(|error| format!("--l1-numa-nodes: {error}"));
            }
            NumaNodes::Auto => self.arena.prefer_nodes(&devices.numa_nodes()),
        };
        if let Err(error) = result {
            tracing::warn!(%error, "L1 comes from wherever it is touched first");
        }
        Ok(())
    }
}

/// Why there are not the huge pages that an arena needs; they are given back at once.
pub fn hugepage_obstacle(config: &ServerConfig) -> Option<String> {
    create_arena(config).err()
}

fn create_arena(config: &ServerConfig) -> Result<Arena, String> {
    let bytes = config.l1_bytes;
    let describe = |error: ArenaError| format!("L1 of {bytes} bytes (--l1-size-gb): {error}");
    if config.l1_hugepages {
        return Arena::create(ArenaKind::Hugepages, bytes).map_err(describe);
    }
    let Some(name) = &config.shm_name else {
        return Arena::create(ArenaKind::Anonymous, bytes).map_err(describe);
    };
    let shared = Arena::create(ArenaKind::Shm { name: name.clone() }, bytes);
    match shared.map_err(|error| match error {
        ArenaError::NoRoom { available, .. } => config.describe_shortage(available),
        error => error.to_string(),
    }) {
        Ok(arena) => Ok(arena),
        Err(error) if config.shm_required => Err(format!("--shm-name {name}: {error}")),
        Err(error) => {
            tracing::warn!(%error, "no shared memory pool: engine-driven workers will send their data pickled");
            Arena::create(ArenaKind::Anonymous, bytes).map_err(describe)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Salts;

    #[test]
    fn the_pool_of_a_killed_server_goes_before_room_is_looked_for() {
        let name = format!("kvtier_server_test_{}", std::process::id());
        let path = format!("/dev/shm/lmcache_l1_pool_{name}");
        std::fs::write(&path, b"left behind").unwrap();
        // A pebibyte, which no machine has.
        let flags = ["--shm-name", &name, "--l1-size-gb", "1048576"];
        let config = ServerConfig::from_flags(&flags).unwrap();
        let quotas = Opened::open(&config, &Salts::open(&config.tenants).unwrap()).unwrap();
        let error = L1::create(&config, &quotas).err().unwrap();
        for part in [name.as_str(), "--l1-size-gb", "worker that maps it"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(!std::fs::exists(&path).unwrap());
    }
}
