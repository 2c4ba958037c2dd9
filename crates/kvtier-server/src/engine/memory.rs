//! L1: the arena with the bytes, and the cache that decides about them.

use std::sync::Arc;

use kvtier_core::cache::{self, Cache, CacheConfig};
use kvtier_core::eviction::EvictionKind;
use kvtier_memory::{Arena, ArenaError, ArenaKind, Extent, ExtentAllocator};

use crate::config::{EvictionPolicyName, ServerConfig};

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
    pub fn create(config: &ServerConfig) -> Result<Self, String> {
        let arena = create_arena(config)?;
        let allocator = ExtentAllocator::with_alignment(arena.len(), config.l1_align_bytes)
            .map_err(|error| format!("L1 of {} bytes: {error}", arena.len()))?;
        let eviction = match config.eviction_policy {
            EvictionPolicyName::Lru => EvictionKind::Lru,
            EvictionPolicyName::Noop => EvictionKind::Noop,
        };
        let cache = Cache::new(
            L1Allocator(allocator),
            CacheConfig {
                eviction,
                ..CacheConfig::default()
            },
        );
        Ok(Self {
            arena: Arc::new(arena),
            cache,
        })
    }
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
    let shared = match config.shm_shortage() {
        Some(shortage) => Err(shortage),
        None => Arena::create(ArenaKind::Shm { name: name.clone() }, bytes)
            .map_err(|error| error.to_string()),
    };
    match shared {
        Ok(arena) => Ok(arena),
        Err(error) if config.shm_required => Err(format!("--shm-name {name}: {error}")),
        Err(error) => {
            tracing::warn!(%error, "no shared memory pool: engine-driven workers will send their data pickled");
            Arena::create(ArenaKind::Anonymous, bytes).map_err(describe)
        }
    }
}
