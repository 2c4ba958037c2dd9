//! The tiers below L1, and how they are used.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvtier_common::error::{Error, Result};
use kvtier_l2::{AdapterConfig, redact};
use kvtier_l2_resp::{OWN_PORT, PEERS};
use rustix::fs::{Access, access};

use super::GIB;
use super::checks::{gib, refuse};
use super::flags::ServerArgs;
use super::values::{PrefetchPolicy, StorePolicy};

/// The tiers, the first one asked first, and how they are used.
#[derive(Debug, Clone)]
pub struct L2Config {
    /// The adapters.
    pub adapters: Vec<AdapterConfig>,
    /// See [`StorePolicy`].
    pub store_policy: StorePolicy,
    /// See [`PrefetchPolicy`].
    pub prefetch_policy: PrefetchPolicy,
    /// Lookups that may ask the tiers at the same time; the others wait.
    pub prefetch_max_in_flight: usize,
    /// How long a lookup asks the tiers what they have, waiting included.
    pub lookup_timeout: Duration,
    /// How long a lookup waits for what is being loaded.
    pub load_timeout: Duration,
    /// How long a stop waits for what is not stored yet.
    pub drain_timeout: Duration,
    /// Bytes of L1 that may wait for each tier to store them.
    pub store_queue_bytes: u64,
    /// Bytes of L1 that may be loaded into at the same time.
    pub load_bytes: u64,
    /// Bytes that a tier leaves free of the disk it is on.
    pub min_free_bytes: u64,
}

impl L2Config {
    /// One line a tier, in the order they are asked.
    pub fn tiers(&self) -> impl Iterator<Item = String> {
        let line = |adapter: &AdapterConfig| {
            let place = base_path(adapter);
            let place = place.map_or(String::new(), |path| {
                format!(" in {}", redact::text(&path.display().to_string()))
            });
            let size = adapter.capacity_bytes();
            let size = size.map_or("without a bound".to_owned(), |bytes| {
                format!("at most {:.2} GiB", bytes as f64 / GIB as f64)
            });
            format!(
                "L2 tier {}: {}{place}, {size}",
                adapter.tier(),
                adapter.kind
            )
        };
        self.adapters.iter().map(line)
    }

    /// Each tier by its name, and why a check does not try it out, if there is a reason: it would leave something behind.
    pub fn trials(&self) -> impl Iterator<Item = (&str, &AdapterConfig, Option<&'static str>)> {
        let adapters = self.adapters.iter();
        adapters.map(|adapter| (adapter.tier(), adapter, untried(adapter)))
    }

    /// What the adapters' users should know.
    pub fn warnings(&self) -> impl Iterator<Item = String> {
        let warnings = self.adapters.iter().flat_map(|adapter| &adapter.warnings);
        warnings.map(|warning| format!("--l2-adapter: {warning}"))
    }

    /// Checks that the tiers could be opened, as far as a check that creates nothing can find out.
    ///
    /// # Errors
    /// One line that names the tier's type and directory.
    pub fn preflight(&self) -> Result<()> {
        self.adapters.iter().try_for_each(|adapter| {
            let Some(path) = base_path(adapter) else {
                return Ok(());
            };
            check_directory(&path, is_read_only(adapter)).map_err(|what| {
                what.context(format!("base_path {} cannot be used", path.display()))
                    .context(format!("--l2-adapter: type {:?}", adapter.kind))
            })
        })
    }

    /// Each tier that is written to, and the bytes of the file system that it is or will be on.
    pub(super) fn file_systems(&self) -> impl Iterator<Item = (&AdapterConfig, u64)> {
        self.adapters.iter().filter_map(|adapter| {
            let path = base_path(adapter).filter(|_| !is_read_only(adapter))?;
            let size = path
                .ancestors()
                .find_map(|part| rustix::fs::statvfs(part).ok());
            let bytes = size.map(|size| size.f_blocks.saturating_mul(size.f_frsize))?;
            Some((adapter, bytes))
        })
    }

    /// The tiers of these flags, all checked; `None` without an adapter.
    pub(super) fn of(args: &ServerArgs, l1_bytes: u64) -> Result<Option<Self>> {
        let tiers = args.l2_adapter.len() as u64;
        let config = Self {
            adapters: adapters(args)?,
            store_policy: args.l2_store_policy,
            prefetch_policy: args.l2_prefetch_policy,
            prefetch_max_in_flight: args.l2_prefetch_max_in_flight.into(),
            lookup_timeout: args.l2_lookup_timeout,
            load_timeout: args.l2_load_timeout,
            drain_timeout: args.l2_drain_timeout,
            store_queue_bytes: match args.l2_store_queue_gb {
                Some(size) => store_queue(size, l1_bytes)?,
                None => l1_bytes / 4 / tiers.max(1),
            },
            load_bytes: l1_bytes / 4,
            min_free_bytes: min_free(args.l2_min_free_gb)?,
        };
        refuse_shared_names(&config.adapters)?;
        refuse_shared_places(&config.adapters)?;
        Ok((tiers > 0).then_some(config))
    }
}

/// What waits is leased, so that a slow tier could fill L1 with it.
fn store_queue(size: f64, l1_bytes: u64) -> Result<u64> {
    let bytes = gib("l2-store-queue-gb", size)?;
    let most = l1_bytes / 2;
    if bytes > most {
        Err(refuse(
            "l2-store-queue-gb",
            size,
            &format!("give at most half of L1, {:.2}", most as f64 / GIB as f64),
        ))
    } else {
        Ok(bytes)
    }
}

fn min_free(size: f64) -> Result<u64> {
    if size == 0.0 {
        return Ok(0);
    }
    let allowed = "give a size in GiB from 0 (all of the disk may be used) to 1048576";
    gib("l2-min-free-gb", size).map_err(|_| refuse("l2-min-free-gb", size, allowed))
}

/// A missing directory is created at the start, so the part of its path that exists has to be a writable directory.
fn check_directory(path: &Path, read_only: bool) -> Result<()> {
    if read_only {
        return if path.is_dir() && access(path, Access::READ_OK | Access::EXEC_OK).is_ok() {
            Ok(())
        } else {
            Err(Error::refused(
                "with read_only it has to be a directory that is there and can be read",
            ))
        };
    }
    let there = path.ancestors().find(|part| part.exists());
    let there = there.unwrap_or(Path::new("/"));
    let is_good = there.is_dir()
        && access(there, Access::WRITE_OK | Access::EXEC_OK).is_ok()
        && (there == path || takes_directories(there));
    if is_good {
        Ok(())
    } else {
        Err(Error::refused(format!(
            "{} is no directory that the server's user can write to (under systemd it also needs ReadWritePaths=); a tier with read_only is only read",
            there.display()
        )))
    }
}

/// Whether directories can be made in this one, which permissions alone do not say, as of /proc.
fn takes_directories(there: &Path) -> bool {
    let number = RandomState::new().build_hasher().finish();
    let name = there.join(format!(".kvtier-check-{number:016x}"));
    std::fs::create_dir(&name).is_ok_and(|()| std::fs::remove_dir(&name).is_ok())
}

/// The directory of an adapter, or of the one inside of it. Absolute, as far as the system says where we are.
/// Why a tier is not tried out.
fn untried(adapter: &AdapterConfig) -> Option<&'static str> {
    if let Some(inner) = adapter.options.find("inner") {
        return untried(inner);
    }
    if adapter.options.find("force") == Some(true) {
        return Some("\"force\" overwrites what the device holds");
    }
    let device = adapter
        .options
        .find::<&str>("device_path")
        .map(PathBuf::from);
    let path = base_path(adapter).or(device)?;
    let is_absent = !path.exists();
    is_absent.then_some("it does not exist; a start creates it")
}

fn base_path(adapter: &AdapterConfig) -> Option<PathBuf> {
    let Some(path) = adapter.options.find::<&str>("base_path") else {
        return base_path(adapter.options.find("inner")?);
    };
    Some(std::path::absolute(path).unwrap_or_else(|_| path.into()))
}

pub(super) fn is_read_only(adapter: &AdapterConfig) -> bool {
    match adapter.options.find::<&AdapterConfig>("inner") {
        Some(inner) => is_read_only(inner),
        None => adapter.options.find("read_only").unwrap_or(false),
    }
}

/// Location of a tier's data, to tell it from another of the same name; its type, where it keeps nothing on a disk.
pub(super) fn location(adapter: &AdapterConfig) -> String {
    let path = base_path(adapter).map(|path| resolved(&path));
    path.map_or_else(
        || adapter.kind.to_owned(),
        |path| redact::text(&path.display().to_string()),
    )
}

/// Limits, metrics and listings know a tier by its name alone.
fn refuse_shared_names(adapters: &[AdapterConfig]) -> Result<()> {
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    for (number, adapter) in adapters.iter().enumerate() {
        let name = adapter.tier();
        if let Some(other) = names.insert(name, number) {
            return Err(Error::refused(format!(
                "--l2-adapter: adapters {other} and {number}, counted from 0, are both called {name:?}; give each its own \"name\""
            )));
        }
    }
    Ok(())
}

/// Two tiers would evict and count each other's objects in one directory, and hold each object once.
fn refuse_shared_places(adapters: &[AdapterConfig]) -> Result<()> {
    let mut places: Vec<(&str, PathBuf)> = Vec::new();
    for adapter in adapters {
        let Some(path) = base_path(adapter) else {
            continue;
        };
        let (name, path) = (adapter.tier(), resolved(&path));
        let other = places.iter().find(|(_, other)| {
            path.starts_with(other) || other.starts_with(&path) || is_same(&path, other)
        });
        if let Some((other_name, other)) = other {
            return Err(Error::refused(format!(
                "--l2-adapter: base_path {} of {name} and {} of {other_name} are the same directory or one inside the \
                 other; give each tier its own",
                path.display(),
                other.display()
            )));
        }
        places.push((name, path));
    }
    Ok(())
}

/// Without links, as far as the path is there.
fn resolved(path: &Path) -> PathBuf {
    let there = path
        .ancestors()
        .find_map(|part| Some((part, part.canonicalize().ok()?)));
    let Some((part, there)) = there else {
        return path.to_owned();
    };
    match path.strip_prefix(part) {
        Ok(rest) if !rest.as_os_str().is_empty() => there.join(rest),
        _ => there,
    }
}

/// Whether both are there and one directory, be it mounted twice.
fn is_same(one: &Path, other: &Path) -> bool {
    let number = |path: &Path| path.metadata().map(|meta| (meta.dev(), meta.ino())).ok();
    number(one).is_some_and(|one| number(other) == Some(one))
}

/// The adapters, checked; warnings of theirs are logged at the start. A tier without a name is called by its type and number, the first one having 0.
fn adapters(args: &ServerArgs) -> Result<Vec<AdapterConfig>> {
    let registry = crate::adapters::registry();
    let adapter = |(number, spec): (usize, &String)| {
        let parsed = registry.parse_json(spec);
        let mut adapter = parsed.map_err(|error| Error::refused("--l2-adapter").source(error))?;
        let by_number = || format!("{}-{number}", adapter.kind);
        adapter.name.get_or_insert_with(by_number);
        if adapter.kind == PEERS.name() {
            // All servers of a fleet have one.
            if let Some(password) = &args.peer_password
                && adapter.options.get::<&str>("password").is_empty()
            {
                adapter.options.set_text("password", password);
            }
            if let Some(port) = args.peer_port {
                adapter.options.set_integer(OWN_PORT, port.into());
            }
        }
        Ok(adapter)
    };
    args.l2_adapter.iter().enumerate().map(adapter).collect()
}
