//! L1: the arena with the bytes, and the cache that decides about them.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_common::extent::Extent;
use kvtier_core::cache::{Cache, CacheConfig};
use kvtier_core::quota::QuotaConfig;
use kvtier_memory::{
    Arena, ArenaError, ArenaKind, SHM, SHM_PREFIX, Space, hugetlbfs_mounts, remove_kept,
};

use super::allocator::{L1Allocator, parts};
use super::heritage::EarlierMemory;
use super::kept::{Begun, KeptL1};
use super::place::{named_place, with_ledger};
use super::unavailable;
use crate::tenants::Opened;
use kvtier_config::{HostMemory, NumaNodes, ServerConfig, in_gib};

/// Bytes of a part, at least: an object lies in one, and none is a tenth as large.
const LEAST_PART: u64 = 4 << 30;

/// Part of L1 (a quarter) that may be staged at once.
const STAGING_PART: u64 = 4;

/// Bytes of the arena of a preflight check, in place of a pool.
const PREFLIGHT_BYTES: u64 = 2 << 20;

/// Host memory and the cache over it.
pub struct L1 {
    /// The bytes.
    pub arena: Arc<Arena>,
    /// Cache of the objects in the arena.
    pub cache: Cache<L1Allocator>,
    /// What L1 has of the server before.
    pub heritage: EarlierMemory,
    /// The NUMA node of each part of the arena; none when it has no parts.
    nodes: Vec<u32>,
    /// Whether it was left to the next server or discarded, which happens once.
    is_closed: AtomicBool,
    /// Whether it ends with the process, as an operator interrupted the server.
    is_last: AtomicBool,
    /// Why it ends with the process, if it does.
    unkept: Option<String>,
}

impl L1 {
    /// The cache over an untouched arena, or the objects of the server before. `nodes` are the nodes that its memory comes from; with several, each has a
    /// part of it.
    ///
    /// # Errors
    /// One line that names what is unavailable.
    pub fn create(
        config: &ServerConfig,
        quotas: &Opened,
        arena: Arc<Arena>,
        kept: KeptL1,
        nodes: &[u32],
    ) -> Result<Self> {
        let divided = divide(&arena, config, nodes)?;
        let (nodes, allocator) = keep_whole(divided, kept.granted(), &arena, config)?;
        let cache_config = CacheConfig {
            eviction: config.eviction_policy.kind(),
            max_pinned_share: config.max_pinned_share,
            event_log_size: config.kv_event_log_size as usize,
            quotas: QuotaConfig {
                watermark: config.eviction_trigger_watermark,
                ratio: config.eviction_ratio,
                ..quotas.config("l1")
            },
            ..CacheConfig::default()
        };
        let Begun {
            cache,
            restored,
            unkept,
        } = kept.begin(allocator, cache_config);
        let heritage = EarlierMemory::new(restored, &cache, arena.path());
        heritage.release_unreachable(&arena);
        for (salt, grant) in quotas.grants("l1") {
            cache.set_grant(salt, Some(grant));
        }
        Ok(Self {
            arena,
            cache,
            heritage,
            nodes,
            is_closed: AtomicBool::new(false),
            is_last: AtomicBool::new(false),
            unkept,
        })
    }

    /// L1 with a part for each of these nodes, whatever the machine has.
    #[cfg(any(test, feature = "testing"))]
    pub fn in_parts(self, nodes: &[u32]) -> Self {
        let parts = parts(&self.arena, 4096, nodes.len());
        let allocator = L1Allocator::over(parts, 4096).expect("a good size");
        Self {
            cache: Cache::new(allocator, CacheConfig::default()),
            nodes: nodes.to_vec(),
            ..self
        }
    }

    /// Removes the name of memory that has lost pages, so that no later server finds it however this one ends.
    pub fn expire(&self) {
        if !self.is_closed.load(Ordering::Acquire) {
            self.remove_lost();
        }
    }

    /// Leaves L1 to the next server, unless it was [discarded](L1::discard): nothing of it may be written any more. Without a
    /// ledger it ends with the process.
    pub fn close(&self) {
        let is_kept = self.cache.has_ledger();
        self.cache.detach_ledger();
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let is_lost = self.remove_lost();
        if let (true, false, Ok(memory)) = (is_kept, is_lost, self.kept_in()) {
            let [memory, ledger] = with_ledger(memory);
            if self.ends_with_process() {
                self.arena.remove();
                remove_kept(
                    Path::new(SHM),
                    &ledger.file_name().unwrap_or_default().to_string_lossy(),
                );
                tracing::info!(memory = %memory.display(), "freed L1, since the server was interrupted; SIGTERM keeps it");
            } else {
                tracing::info!(
                    memory = %memory.display(),
                    ledger = %ledger.display(),
                    "L1 is left to the next server"
                );
            }
        }
        self.arena.unlink();
        self.arena.release();
    }

    /// Ends L1 with the process: [`L1::close`] frees it.
    pub fn end_with_process(&self) {
        self.is_last.store(true, Ordering::Release);
    }

    /// Removes the name of memory that has lost pages: a later server would lose them again. Returns whether pages were lost.
    fn remove_lost(&self) -> bool {
        let is_lost = self.arena.poisoned().is_some();
        if is_lost {
            self.arena.remove();
        }
        is_lost
    }

    /// The file that L1 is, which the next server goes on with.
    ///
    /// # Errors
    /// Why there is none, so that L1 ends with the process.
    pub fn kept_in(&self) -> Result<PathBuf, &str> {
        match &self.unkept {
            Some(reason) => Err(reason),
            None => self.arena.path().ok_or("it has no file"),
        }
    }

    /// Whether it ends with the process.
    pub fn ends_with_process(&self) -> bool {
        self.is_last.load(Ordering::Acquire)
    }

    /// Ends L1 with the process, since something that hangs may still write it: no later server finds it. Takes no lock, and
    /// does nothing after [`L1::close`].
    pub fn discard(&self) {
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.arena.remove() {
            tracing::warn!(
                "what hangs may still write L1: it ends with this process, and the next server starts empty"
            );
        }
    }

    /// Bytes that may be staged at once.
    pub fn staging_limit(&self) -> u64 {
        self.arena.len() / STAGING_PART
    }

    /// Bytes of the largest free extent.
    pub fn largest_free(&self) -> u64 {
        let parts = self.cache.free_space().into_iter();
        let largest = parts.map(|part| part.largest_free_bytes).max();
        largest.unwrap_or_default()
    }

    /// The NUMA node of each part of the arena; none when it has no parts.
    pub fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    /// The part of the arena for a device on this node, if it has parts and one of that node.
    pub fn part_near(&self, node: Option<u32>) -> Option<u32> {
        let part = self.nodes.iter().position(|own| Some(*own) == node)?;
        u32::try_from(part).ok()
    }
}

/// Places the arena and its allocator; returns the nodes that have a part each.
///
/// # Errors
/// One line, if requested nodes are unavailable, or the arena cannot be divided as requested.
pub fn divide(
    arena: &Arena,
    config: &ServerConfig,
    gpus: &[u32],
) -> Result<(Vec<u32>, L1Allocator)> {
    let placed = place(arena, config, gpus)?;
    let (nodes, parts) = placed.into_iter().unzip();
    Ok((nodes, allocate_in(parts, arena, config)?))
}

/// Allocator over these parts; without parts, over the whole arena.
fn allocate_in(
    mut parts: Vec<Range<u64>>,
    arena: &Arena,
    config: &ServerConfig,
) -> Result<L1Allocator> {
    if parts.is_empty() {
        parts.push(0..arena.len());
    }
    L1Allocator::over(parts, config.l1_align_bytes).map_err(|error| {
        Error::refused(format!("L1 of {:.2} GiB", in_gib(arena.len()))).source(error)
    })
}

/// Undoes a division that cuts memory which clients of the server before may still copy: in no part it could be kept from others.
fn keep_whole(
    (nodes, allocator): (Vec<u32>, L1Allocator),
    mut granted: impl Iterator<Item = Extent>,
    arena: &Arena,
    config: &ServerConfig,
) -> Result<(Vec<u32>, L1Allocator)> {
    if granted.all(|extent| allocator.is_in_one_part(extent)) {
        Ok((nodes, allocator))
    } else {
        Ok((Vec::new(), allocate_in(Vec::new(), arena, config)?))
    }
}

/// Places the arena on the requested NUMA nodes; returns those that have a part each, and which.
///
/// # Errors
/// One line, if requested nodes are unavailable. If those of the GPUs are, the arena is placed without them.
fn place(arena: &Arena, config: &ServerConfig, gpus: &[u32]) -> Result<Vec<(u32, Range<u64>)>> {
    let placed = match &config.gpu.l1_numa_nodes {
        NumaNodes::Off => return Ok(Vec::new()),
        NumaNodes::List(nodes) => {
            let failed = |error| unavailable("--l1-numa-nodes").source(error);
            return arena
                .prefer_nodes(nodes)
                .map_err(failed)
                .map(|()| Vec::new());
        }
        NumaNodes::Auto if gpus.len() > 1 && arena.len() / gpus.len() as u64 >= LEAST_PART => {
            let parts = parts(arena, config.l1_align_bytes, gpus.len());
            let parts: Vec<_> = gpus.iter().copied().zip(parts).collect();
            let placed = parts.iter().try_for_each(|(node, part)| {
                arena.prefer_node_in(part.start, part.end - part.start, *node)
            });
            // Some parts may be placed already.
            let turns = |_| arena.prefer_nodes(gpus).map(|()| Vec::new());
            placed.map(|()| parts).or_else(turns)
        }
        NumaNodes::Auto => arena.prefer_nodes(gpus).map(|()| Vec::new()),
    };
    Ok(placed.unwrap_or_else(|error| {
        tracing::warn!(%error, "L1 comes from wherever it is touched first");
        Vec::new()
    }))
}

/// Makes an arena as a start would, to be released at once. A pool is not made, since a running server may have it; if the
/// file system has free space for it, some pages are enough. Hugepages that an earlier server of the instance has left are free
/// for the next one, if there is a state folder that says so.
///
/// # Errors
/// As [`create_arena`].
pub fn preflight_arena(config: &ServerConfig, has_folder: bool) -> Result<Arena> {
    if config.l1_use_hugepages {
        return preflight_hugepages(config, has_folder);
    }
    check_name(config)?;
    let l1_bytes = match (&config.shm_name, config.shm_shortage()) {
        (Some(_), None) => PREFLIGHT_BYTES,
        (Some(name), Some(shortage)) if config.shm_required => {
            return Err(unavailable(shortage).context(format!("--shm-name {name}")));
        }
        _ => config.l1_bytes,
    };
    create_arena(&ServerConfig {
        shm_name: None,
        l1_bytes,
        ..config.clone()
    })
}

/// Checks that the pool that has to have its name can have it.
fn check_name(config: &ServerConfig) -> Result<()> {
    let Some(name) = config.shm_name.as_ref().filter(|_| config.shm_required) else {
        return Ok(());
    };
    let place = ArenaKind::Shm { name: name.clone() };
    match Arena::find(place, PREFLIGHT_BYTES) {
        Err(error @ (ArenaError::NameInUse { .. } | ArenaError::NameOfUser { .. })) => {
            Err(Error::new(ErrorKind::InUse, error).context(format!("--shm-name {name}")))
        }
        _ => Ok(()),
    }
}

fn preflight_hugepages(config: &ServerConfig, has_folder: bool) -> Result<Arena> {
    let kept = named_place(config).ok().filter(|_| has_folder);
    let kept = kept.map_or(0, |place| place.kept_bytes());
    let missing = config.l1_bytes.saturating_sub(kept);
    let arena = match missing {
        0 => Arena::create(ArenaKind::Anonymous, PREFLIGHT_BYTES),
        missing => Arena::create(ArenaKind::Hugepages, missing),
    };
    arena.map_err(|error| no_arena(config, error))
}

/// There is no memory for L1.
fn no_arena(config: &ServerConfig, error: ArenaError) -> Error {
    let (size, memory) = (in_gib(config.l1_bytes), HostMemory::of_this_process());
    let more = if config.l1_bytes > memory.bytes {
        format!(" is more than {memory} of {:.2} GiB", in_gib(memory.bytes))
    } else {
        String::new()
    };
    unavailable(format!("L1 of {size:.2} GiB (--l1-size-gb){more}")).source(error)
}

/// Files of hugepages that servers have left, of any instance, with their sizes.
fn kept_hugepages() -> Vec<String> {
    let files = hugetlbfs_mounts()
        .into_iter()
        .flatten()
        .flat_map(std::fs::read_dir);
    let files = files.flatten().flatten();
    let of_servers =
        files.filter(|file| file.file_name().to_string_lossy().starts_with(SHM_PREFIX));
    let described = of_servers.map(|file| {
        let bytes = file.metadata().map_or(0, |found| found.len());
        format!("{} ({:.2} GiB)", file.path().display(), in_gib(bytes))
    });
    described.collect()
}

/// Makes the arena that a configuration asks for. Touches no page of it.
///
/// # Errors
/// One line that names what is unavailable. If a pool that no flag names is, the arena is made without it.
pub fn create_arena(config: &ServerConfig) -> Result<Arena> {
    config.check_memory(0)?;
    let bytes = config.l1_bytes;
    let describe = |error| no_arena(config, error);
    if config.l1_use_hugepages {
        return Arena::create(ArenaKind::Hugepages, bytes).map_err(|error| {
            let (error, kept) = (describe(error), kept_hugepages());
            if kept.is_empty() {
                error
            } else {
                error.hint(format!(
                    "earlier servers have left theirs: {}",
                    kept.join(", ")
                ))
            }
        });
    }
    let Some(name) = &config.shm_name else {
        return Arena::create(ArenaKind::Anonymous, bytes).map_err(describe);
    };
    let create = |name| Arena::create(ArenaKind::Shm { name }, bytes);
    let shared = create(name.clone()).or_else(|error| match error {
        ArenaError::NameOfUser { .. } if !config.shm_required => {
            tracing::warn!(%error, "the pool gets another name, which clients receive");
            let number = RandomState::new().build_hasher().finish();
            create(format!("{name}_{number:016x}"))
        }
        error => Err(error),
    });
    match shared.map_err(|error| match error {
        ArenaError::OutOfMemory { available, .. } => {
            unavailable(config.describe_shortage(available))
        }
        ArenaError::NameInUse { .. } | ArenaError::NameOfUser { .. } => {
            Error::new(ErrorKind::InUse, error.to_string())
        }
        error => unavailable(error.to_string()),
    }) {
        Ok(arena) => Ok(arena),
        Err(error) if config.shm_required => Err(error.context(format!("--shm-name {name}"))),
        Err(error) => {
            tracing::warn!(%error, "no shared memory pool: engine-driven workers will send their data pickled");
            Arena::create(ArenaKind::Anonymous, bytes).map_err(describe)
        }
    }
}

/// Refuses an L1 that neither `/dev/shm` nor the system's memory can have, before an earlier one is removed for it.
///
/// # Errors
/// The system does not map that size.
pub(super) fn check_possible(config: &ServerConfig) -> Result<()> {
    let name = config.shm_name.as_deref().unwrap_or(SHM_PREFIX);
    let is_for_shm = Space::of_pool(name).is_none_or(|shm| config.l1_bytes <= shm.size);
    // Of hugepages the earlier L1 has some, and stays if there are too few.
    if is_for_shm || config.l1_use_hugepages {
        return Ok(());
    }
    let trial = Arena::create(ArenaKind::Anonymous, config.l1_bytes);
    trial.map(drop).map_err(|error| no_arena(config, error))
}

#[cfg(test)]
mod tests {
    use kvtier_core::cache::ExtentAllocator as _;

    use super::*;

    #[test]
    fn division_that_cuts_granted_memory_is_undone() {
        let flags = ["--shm-name", "", "--l1-size-gb", "0.001"];
        let config = ServerConfig::from_flags(&flags).unwrap();
        let arena = create_arena(&config).unwrap();
        let border = arena.len() / 2;
        let nodes = |granted: &[(u64, u64)]| {
            let parts = vec![0..border, border..arena.len()];
            let divided = (vec![0, 1], L1Allocator::over(parts, 4096).unwrap());
            let granted = granted.iter().map(|(at, len)| Extent::new(*at, *len));
            let (nodes, allocator) = keep_whole(divided, granted, &arena, &config).unwrap();
            assert_eq!(allocator.capacity(), arena.len());
            nodes
        };
        let beside = (border - 4096, 4096);
        assert_eq!(nodes(&[beside, (border, 4096)]), [0, 1]);
        assert_eq!(nodes(&[beside, (border - 4096, 8192)]), [0; 0]);
    }

    #[test]
    fn pool_of_a_killed_server_is_removed_before_check() {
        let name = format!("kvtier_server_test_{}", std::process::id());
        let path = format!("/dev/shm/lmcache_l1_pool_{name}");
        std::fs::write(&path, b"left behind").unwrap();
        // A pebibyte, which no machine has.
        let flags = ["--shm-name", &name, "--l1-size-gb", "1048576"];
        let config = ServerConfig::from_flags(&flags).unwrap();
        let error = create_arena(&config).err().unwrap().to_string();
        for part in [name.as_str(), "--l1-size-gb", "worker that maps it"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(!std::fs::exists(&path).unwrap());
    }
}
