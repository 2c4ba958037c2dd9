//! L1 that outlives the process: the arena in a segment that keeps its name, or in a file of hugepages, and the ledger in a segment
//! of its own.
//!
//! | what the start finds | what it does |
//! | --- | --- |
//! | both, and a ledger of this instance about this arena | goes on with its objects |
//! | too few hugepages for an L1 that is larger now, or no memory that could have it | nothing: the start ends, and the earlier L1 is still there |
//! | anything else | takes new segments: clients that still map the old ones keep those |
//! | `/dev/shm` without the space, hugepages without a hugetlbfs, `--l1-restore off` | L1 ends with the process |
//! | segments of a server that runs | `--l1-restore auto`: L1 ends with the process; `on`: the start ends |
//! | what a server of the instance left elsewhere ([`super::place`]) | removes it |

use std::fmt;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::ops::Range;
use std::time::{Duration, Instant};

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_common::extent::Extent;
use kvtier_config::{L1Restore, ServerConfig, in_gib};
use kvtier_core::cache::{Cache, CacheConfig, Restored};
use kvtier_core::ledger::{Identity, Ledger, Snapshot, Words, max_words};
use kvtier_memory::checksum::checksum128;
use kvtier_memory::{Arena, ArenaError, ArenaKind, SharedWords};
use rustix::time::{ClockId, clock_gettime};

use super::allocator::L1Allocator;
use super::memory::{check_possible, create_arena};
use super::place::{
    ServerInstance, check_private, kept_place, ledger_name, pool_path, remove_earlier, with_ledger,
};
use super::unavailable;

/// How long a start waits for the segments of a process that has been killed: the system releases them behind the state directory.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause between two tries.
const RELEASE_PAUSE: Duration = Duration::from_millis(10);

/// Words in a segment.
pub(super) struct SegmentWords(SharedWords);

impl Words for SegmentWords {
    #[inline]
    fn get(&self, at: u64) -> u64 {
        self.0.get(at)
    }

    #[inline]
    fn set(&mut self, at: u64, word: u64) {
        self.0.set(at, word);
    }

    #[inline]
    fn set_all(&mut self, at: u64, words: &[u64]) {
        self.0.set_all(at, words);
    }

    fn end(&self) -> u64 {
        self.0.end()
    }

    fn reach(&mut self, words: Range<u64>) -> bool {
        self.0.reach(words)
    }
}

/// What is beside an arena.
pub struct KeptL1(Ledgers);

enum Ledgers {
    /// Nothing, for this reason.
    None(String),
    /// An empty ledger.
    New(Ledger<SegmentWords>),
    /// The objects of the server before.
    Old(Ledger<SegmentWords>, Snapshot),
}

impl fmt::Debug for KeptL1 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match &self.0 {
            Ledgers::None(_) => "None",
            Ledgers::New(_) => "New",
            Ledgers::Old(..) => "Old",
        };
        f.debug_tuple("Kept").field(&name).finish()
    }
}

/// Nanoseconds of a clock that runs on from process to process, also while the machine sleeps.
pub fn boot_time() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Opens the arena of the server before, or makes the one that the configuration asks for. Touches no page of it. `instance`: or why
/// nothing is kept.
///
/// # Errors
/// As [`create_arena`]; another server has the segments.
pub fn open_arena(
    config: &ServerConfig,
    instance: Result<ServerInstance<'_>>,
) -> Result<(Arena, KeptL1)> {
    check_possible(config)?;
    let instance = match instance {
        Ok(instance) => instance,
        Err(reason) => {
            // Its name is taken from an earlier server all the same.
            remove_earlier(pool_path(config).into_iter().flat_map(with_ledger));
            return unkept(config, None, reason);
        }
    };
    let place = match kept_place(config) {
        Ok(place) => place,
        Err(reason) => {
            instance.free_others_and_record(config, &[]);
            return unkept(config, None, reason);
        }
    };
    let reason = match find_released(config, &place, instance) {
        Ok((arena, kept)) => {
            let own: Vec<_> = arena.path().into_iter().flat_map(with_ledger).collect();
            instance.free_others_and_record(config, &own);
            return Ok((arena, kept));
        }
        // Of a server in another network namespace, or of another state directory.
        Err(error) if error.kind() == ErrorKind::InUse && config.l1_restore == L1Restore::Auto => {
            return unkept(config, None, error);
        }
        Err(error) if matches!(error.kind(), ErrorKind::InUse | ErrorKind::Invalid) => {
            return Err(named(config, error));
        }
        Err(error) => error.to_string(),
    };
    instance.remove_others(config, &[]);
    let arena = match &config.shm_name {
        Some(_) => create_arena(config)?,
        None => match create_private(config, place) {
            Ok(arena) => arena,
            Err(error) => return unkept(config, None, format!("{reason}; {error}")),
        },
    };
    let Some(path) = arena.path() else {
        return unkept(config, Some(arena), "there is no shared memory pool");
    };
    match create_ledger(config, &arena, instance) {
        Ok(ledger) => {
            tracing::info!(reason, memory = %path.display(), "L1 starts empty, and stays for the next server");
            // Before there is anything to remove.
            instance.write_record(&with_ledger(path));
            arena.keep();
            Ok((arena, KeptL1(Ledgers::New(ledger))))
        }
        Err(error) => unkept(config, Some(arena), format!("{reason}; {error}")),
    }
}

/// The error with the flag that names the memory it is about.
pub(super) fn named(config: &ServerConfig, error: Error) -> Error {
    match (&config.shm_name, error.kind()) {
        (Some(name), _) => error.context(format!("--shm-name {name}")),
        (None, ErrorKind::InUse) => {
            error.context(format!("--instance-id {}", config.state.instance))
        }
        (None, _) => error,
    }
}

/// New memory that clients do not map.
fn create_private(config: &ServerConfig, place: ArenaKind) -> Result<Arena> {
    check_private(config, &place)?;
    config.check_memory(0)?;
    let arena = Arena::create(place, config.l1_bytes);
    let arena = arena.map_err(unavailable)?;
    Ok(arena.into_private())
}

/// L1 that no later server finds, for this reason.
fn unkept(
    config: &ServerConfig,
    arena: Option<Arena>,
    reason: impl fmt::Display,
) -> Result<(Arena, KeptL1)> {
    let arena = match arena {
        Some(arena) => arena,
        None => create_arena(config)?,
    };
    let reason = reason.to_string();
    match config.l1_restore {
        L1Restore::On => tracing::warn!(reason, "L1 starts empty, and ends with this process"),
        L1Restore::Auto | L1Restore::Off => {
            tracing::info!(reason, "L1 starts empty, and ends with this process");
        }
    }
    Ok((arena, KeptL1(Ledgers::None(reason))))
}

/// What [`find`] returns, once a process that ends has released it.
fn find_released(
    config: &ServerConfig,
    place: &ArenaKind,
    instance: ServerInstance<'_>,
) -> Result<(Arena, KeptL1)> {
    let until = Instant::now() + RELEASE_TIMEOUT;
    loop {
        match find(config, place, instance) {
            Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < until => {
                std::thread::sleep(RELEASE_PAUSE);
            }
            found => return found,
        }
    }
}

/// The arena as clients may know it.
fn with_privacy(config: &ServerConfig, arena: Arena) -> Arena {
    match config.shm_name {
        Some(_) => arena,
        None => arena.into_private(),
    }
}

/// Error of kind [`ErrorKind::InUse`] if another server has it, and [`ErrorKind::Invalid`] if there are too few hugepages.
fn failed(config: &ServerConfig, error: ArenaError) -> Error {
    match error {
        ArenaError::NameInUse { .. } => Error::new(ErrorKind::InUse, error),
        ArenaError::Hugepages { .. } => Error::refused(format!(
            "--l1-size-gb: L1 of the server before is kept, and cannot become {:.2} GiB large",
            in_gib(config.l1_bytes)
        ))
        .source(error),
        error => unavailable(error),
    }
}

/// An arena that exists, and the bytes of its segment.
pub(super) fn find_arena(config: &ServerConfig, place: &ArenaKind) -> Result<(Arena, u64)> {
    let found = Arena::find(place.clone(), config.l1_bytes);
    let found = found.map_err(|error| failed(config, error))?;
    let (arena, bytes) = found.ok_or_else(|| unavailable("no earlier server has left one"))?;
    Ok((with_privacy(config, arena), bytes))
}

/// The ledger of an arena that exists, and what is in it. `over` makes its words of the segment's.
pub(super) fn find_ledger<W: Words>(
    config: &ServerConfig,
    arena: &Arena,
    bytes: u64,
    instance: ServerInstance<'_>,
    over: impl FnOnce(SharedWords) -> W,
) -> Result<(Ledger<W>, Snapshot)> {
    let len = max_words(arena.len() / config.l1_align_bytes);
    let name = ledger_name(arena.segment_name().unwrap_or_default());
    let words = SharedWords::find(&name, len);
    let words = words.map_err(|error| failed(config, error))?;
    let words = words.ok_or_else(|| unavailable("the earlier one has no ledger"))?;
    let now = boot_time();
    let identity = identity(config, arena, instance, now)?;
    let align = config.l1_align_bytes;
    // Of an arena that was cut off, or is larger now, only what was there is believed.
    let opened = Ledger::open(over(words), &identity, now, bytes, align);
    opened.map_err(|(error, _)| unavailable("the earlier one's ledger is not used").source(error))
}

/// The arena and the ledger of the server before, which has ended.
///
/// # Errors
/// Why there are none. There are some if another server has them ([`ErrorKind::InUse`]), or there are too few hugepages for what this
/// one asks for ([`ErrorKind::Invalid`]): neither may be replaced.
fn find(
    config: &ServerConfig,
    place: &ArenaKind,
    instance: ServerInstance<'_>,
) -> Result<(Arena, KeptL1)> {
    let (arena, bytes) = find_arena(config, place)?;
    let (mut ledger, snapshot) = find_ledger(config, &arena, bytes, instance, SegmentWords)?;
    check_grants(&arena, &snapshot)?;
    config.check_memory(arena.backed_bytes())?;
    ledger.forget_unrecorded_grants();
    // Only now, when no record names bytes that were not there.
    match arena.grow() {
        Ok(()) => {}
        // While clients keep its pages, there is even less for another one.
        Err(error) if arena.segment_bytes() >= arena.len() && !arena.is_alone() => {
            tracing::warn!(%error, "L1 may lose pages: clients keep those that it has, and there is no space for the others");
        }
        Err(error) => return Err(failed(config, error)),
    }
    Ok((arena, KeptL1(Ledgers::Old(ledger, snapshot))))
}

/// Whether it is known what clients of the server before may still copy.
pub(super) fn check_grants(arena: &Arena, snapshot: &Snapshot) -> Result<()> {
    let lost = match () {
        () if snapshot.has_unrecorded_grant() => Some("whose grant could not be recorded"),
        () if snapshot.has_lost_granted() => Some("that this configuration has another use for"),
        () => None,
    };
    match lost.filter(|_| !arena.is_alone()) {
        Some(lost) => Err(unavailable(format!("clients may still copy memory {lost}"))),
        None => Ok(()),
    }
}

/// What a ledger has to be about.
fn identity(
    config: &ServerConfig,
    arena: &Arena,
    instance: ServerInstance<'_>,
    origin: u64,
) -> Result<Identity> {
    let file = arena.file_id();
    let file = file.ok_or_else(|| unavailable("the arena has no segment"))?;
    Ok(Identity {
        arena: file.numbers(),
        chunk_size: config.chunk_size.into(),
        hash_algorithm: checksum128(config.hashing().as_bytes()) as u64,
        tenants: instance.tenants,
        instance: instance.number(config),
        origin,
    })
}

/// An empty ledger about this arena.
fn create_ledger(
    config: &ServerConfig,
    arena: &Arena,
    instance: ServerInstance<'_>,
) -> Result<Ledger<SegmentWords>> {
    let identity = identity(config, arena, instance, boot_time())?;
    let name = ledger_name(arena.segment_name().unwrap_or_default());
    let len = max_words(arena.len() / config.l1_align_bytes);
    let words = SharedWords::create(&name, len).map_err(unavailable)?;
    // Seeded by the system, so that no two ledgers have the same.
    let id = RandomState::new().build_hasher().finish();
    Ledger::create(SegmentWords(words), id, &identity).map_err(unavailable)
}

impl KeptL1 {
    /// Memory that clients of the server before may still copy.
    pub(super) fn granted(&self) -> impl Iterator<Item = Extent> {
        let snapshot = match &self.0 {
            Ledgers::Old(_, snapshot) => Some(snapshot),
            Ledgers::None(_) | Ledgers::New(_) => None,
        };
        snapshot.into_iter().flat_map(Snapshot::granted)
    }

    /// The cache, with what is kept.
    pub(super) fn begin(self, allocator: L1Allocator, config: CacheConfig) -> Begun {
        let begun = |cache| Begun {
            cache,
            restored: None,
            unkept: None,
        };
        match self.0 {
            Ledgers::None(reason) => Begun {
                unkept: Some(reason),
                ..begun(Cache::new(allocator, config))
            },
            Ledgers::New(ledger) => begun(Cache::with_ledger(allocator, config, ledger)),
            Ledgers::Old(ledger, snapshot) => {
                let age = Duration::from_nanos(boot_time().saturating_sub(snapshot.origin()));
                let (cache, restored) = Cache::restore(allocator, config, ledger, snapshot);
                Begun {
                    restored: Some((restored, age)),
                    ..begun(cache)
                }
            }
        }
    }
}

/// A cache, and what it has of the server before.
pub(super) struct Begun {
    pub(super) cache: Cache<L1Allocator>,
    /// Restored objects, and the age of the L1 that they were in.
    pub(super) restored: Option<(Restored<L1Allocator>, Duration)>,
    /// Why it ends with the process, if it does.
    pub(super) unkept: Option<String>,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::tenants::{Opened, Salts};
    use kvtier_config::HostMemory;

    use super::*;
    use crate::l1::L1;
    use crate::l1::earlier::{EarlierL1, find_earlier};
    use crate::l1::testing::{config, open_as};

    #[test]
    fn memory_that_has_lost_pages_is_left_to_no_server() {
        // The second one is killed.
        for is_stopped in [true, false] {
            let (arena, kept) = open_as("lost", &[], "one", None).unwrap();
            let path = arena.path().unwrap();
            let config = config("lost", &[]);
            let quotas = Opened::open(&config, None, &Salts::of(None)).unwrap();
            let l1 = L1::create(&config, &quotas, Arc::new(arena), kept, &[]).unwrap();
            l1.expire();
            assert!(path.exists());
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            file.set_len(0).unwrap();
            l1.arena
                .read(Extent::new(0, 8), 0, &mut [0; 8])
                .unwrap_err();
            if is_stopped {
                l1.close()
            } else {
                l1.expire()
            }
            assert!(!path.exists());
        }
        drop(open_as("lost", &["--l1-restore", "off"], "one", None).unwrap());
    }

    // proves: docs/operate.md#l1-after-a-restart
    #[test]
    fn l1_above_memory_limit_does_not_start() {
        let folder = tempfile::tempdir().unwrap();
        let limited = |flags: &[&str]| ServerConfig {
            memory: HostMemory {
                bytes: 1 << 20,
                limit: Some(folder.path().join("memory.max")),
            },
            ..config("limit", flags)
        };
        let instance = ServerInstance {
            folder: "one",
            tenants: 0,
            record: None,
        };
        let open = |config: &ServerConfig| open_arena(config, Ok(instance));
        for flags in [&[][..], &["--shm-name", ""], &["--l1-restore", "off"]] {
            let config = limited(flags);
            for error in [
                open(&config).err().unwrap(),
                find_earlier(&config, instance).err().unwrap(),
            ] {
                assert_eq!(error.kind(), ErrorKind::Invalid);
                assert!(
                    error.to_string().contains("memory.max, 0.00 GiB"),
                    "{error}"
                );
            }
        }
        // Pages that an earlier server has touched in another cgroup are no memory of this one.
        let (arena, kept) = open_as("limit", &[], "one", None).unwrap();
        let most = Extent::new(0, arena.len() - (1 << 19));
        arena.write(most, 0, &vec![1; most.len as usize]).unwrap();
        drop((arena, kept));
        let config = limited(&[]);
        assert!(matches!(
            find_earlier(&config, instance),
            Ok(EarlierL1::Kept(0))
        ));
        assert!(matches!(open(&config).unwrap().1.0, Ledgers::Old(..)));
        let stat = format!("shmem {}\n", most.len);
        std::fs::write(folder.path().join("memory.stat"), stat).unwrap();
        assert!(open(&config).is_err(), "they are this cgroup's");
        drop(open_as("limit", &["--l1-restore", "off"], "one", None).unwrap());
    }

    /// Two state directories, or network namespaces, with one `/dev/shm`.
    // proves: docs/operate.md#l1-after-a-restart
    #[test]
    fn pool_of_another_server_is_left_alone() {
        let open =
            |restore: &str, folder: &str| open_as("kept", &["--l1-restore", restore], folder, None);
        let (arena, kept) = open("auto", "first").unwrap();
        assert!(matches!(kept.0, Ledgers::New(_)));
        let (other, unkept) = open("auto", "second").unwrap();
        assert!(matches!(unkept.0, Ledgers::None(_)));
        assert_eq!(other.segment_name(), None);
        let error = open("on", "second").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InUse);
        let private = ["--shm-name", "", "--l1-restore", "on"];
        let running = open_as("private", &private, "first", None).unwrap();
        let error = open_as("private", &private, "first", None).err().unwrap();
        assert!(error.to_string().contains("--instance-id "), "{error}");
        drop(running);
        drop(open_as("private", &["--l1-restore", "off"], "first", None).unwrap());
        // It ends: the next one of the instance has its objects, and one that restores nothing removes them.
        let file = arena.path().unwrap();
        drop((arena, kept));
        let found = open("auto", "first").unwrap();
        assert!(matches!(found.1.0, Ledgers::Old(..)));
        drop(found);
        drop(open("off", "first").unwrap());
        assert!(!file.exists() && !file.with_extension("ledger").exists());
    }
}
