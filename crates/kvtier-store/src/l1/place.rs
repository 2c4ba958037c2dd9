//! Place of L1 of an instance, and the places where earlier servers of it have left theirs.

use std::path::{Path, PathBuf};

use kvtier_common::error::Result;
use kvtier_config::{L1Restore, ServerConfig, in_gib};
use kvtier_memory::checksum::checksum128;
use kvtier_memory::{ArenaKind, SHM, SHM_PREFIX, Space, hugetlbfs_mounts, pool_name, remove_kept};

use super::unavailable;

/// Ends the name of a ledger, behind the arena's and a dot.
const LEDGER: &str = "ledger";

/// Most of `/dev/shm`, in percent, that memory which no client maps takes by default: others use it too. A quarter of the machine's
/// memory, the default of L1, is half of it where it has its usual size.
const LARGEST_PRIVATE: u64 = 60;

/// The server whose L1 it is: a configuration's `instance`, as its state folder knows it.
#[derive(Clone, Copy, Debug)]
pub struct ServerInstance<'a> {
    /// Identity of that folder: another state directory may have the name too, and the same `/dev/shm`.
    pub folder: &'a str,
    /// Number that stands for the names of tenants.
    pub tenants: u64,
    /// The file there that says where L1 is.
    pub record: Option<&'a Path>,
}

impl ServerInstance<'_> {
    /// A number that no other instance or folder has.
    pub(super) fn number(&self, config: &ServerConfig) -> u64 {
        checksum128(format!("{}\0{}", config.state.instance, self.folder).as_bytes()) as u64
    }

    /// Files in which earlier servers of the instance have left L1, as they wrote down. Of other files nothing is believed.
    fn recorded(&self) -> Vec<PathBuf> {
        let text = self
            .record
            .and_then(|record| std::fs::read_to_string(record).ok());
        let text = text.unwrap_or_default();
        let folders = hugetlbfs_mounts().unwrap_or_default();
        let is_segment = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let folder = path.parent().unwrap_or(path);
            name.starts_with(SHM_PREFIX)
                && (folder == Path::new(SHM) || folders.iter().any(|other| other == folder))
        };
        text.lines().map(PathBuf::from).filter(is_segment).collect()
    }

    /// [`remove_others`](Self::remove_others), and [`write_record`](Self::write_record).
    pub(super) fn free_others_and_record(&self, config: &ServerConfig, own: &[PathBuf]) {
        self.remove_others(config, own);
        self.write_record(own);
    }

    /// Frees what earlier servers have left, as they wrote down or where this configuration has it, but for `own`.
    pub(super) fn remove_others(&self, config: &ServerConfig, own: &[PathBuf]) {
        let folders = hugetlbfs_mounts().unwrap_or_default();
        let private_file = pool_name(&private_name(config));
        let private = folders.into_iter().chain([SHM.into()]);
        let private = private.map(|folder| folder.join(&private_file));
        let named = pool_path(config).into_iter().chain(private);
        let earlier = self.recorded().into_iter();
        let earlier = earlier.chain(named.flat_map(with_ledger));
        remove_earlier(earlier.filter(|path| !own.contains(path)));
    }

    /// Writes down where L1 is, beside what could not be removed, so that a server with other flags removes it.
    pub(super) fn write_record(&self, paths: &[PathBuf]) {
        let Some(record) = self.record else { return };
        let earlier = self.recorded().into_iter();
        let left = earlier.filter(|path| path.exists() && !paths.contains(path));
        let all = paths.iter().cloned().chain(left);
        let text: String = all.map(|path| format!("{}\n", path.display())).collect();
        if std::fs::read_to_string(record).unwrap_or_default() == text {
            return;
        }
        let next = record.with_extension("next");
        let written = std::fs::write(&next, text).and_then(|()| std::fs::rename(&next, record));
        if let Err(error) = written {
            tracing::warn!(
                file = %record.display(),
                %error,
                "where L1 is cannot be written down: a later server with other flags will not free its memory"
            );
        }
    }
}

/// Name of memory that clients do not map: it has one all the same, for the next server. Not of the state folder, which may be
/// a new one at each start of a container: then none would find what is left in the `/dev/shm` of the machine.
fn private_name(config: &ServerConfig) -> String {
    let user = rustix::process::geteuid().as_raw();
    let number = checksum128(format!("{}\0{user}", config.state.instance).as_bytes()) as u64;
    format!("kvtier_private_{number:016x}")
}

/// Place of an arena that the next server is to find.
///
/// # Errors
/// There is no such place, or none is kept.
pub(super) fn kept_place(config: &ServerConfig) -> Result<ArenaKind> {
    match config.l1_restore {
        L1Restore::Off => Err(unavailable("--l1-restore off")),
        L1Restore::Auto | L1Restore::On => named_place(config),
    }
}

/// Place of an arena that outlives a process.
///
/// # Errors
/// There is no such place.
pub(super) fn named_place(config: &ServerConfig) -> Result<ArenaKind> {
    Ok(match (&config.shm_name, config.l1_use_hugepages) {
        (Some(name), _) => ArenaKind::Shm { name: name.clone() },
        (None, false) => ArenaKind::Shm {
            name: private_name(config),
        },
        (None, true) => ArenaKind::HugeFile {
            folder: hugetlbfs_mounts().map_err(unavailable)?.swap_remove(0),
            name: private_name(config),
        },
    })
}

/// Path at which a server with this configuration keeps L1 for the next one.
///
/// # Errors
/// Why it does not, as far as the configuration and the machine show.
pub fn kept_path(config: &ServerConfig) -> Result<PathBuf> {
    config.state.base.as_ref().map_err(unavailable)?;
    let place = kept_place(config)?;
    match config.shm_name {
        Some(_) => config
            .shm_shortage()
            .map_or(Ok(()), |why| Err(unavailable(why)))?,
        None => check_private(config, &place)?,
    }
    place.path().ok_or_else(|| unavailable("it has no file"))
}

/// Whether new memory that clients do not map may be at this place.
///
/// # Errors
/// `/dev/shm` has too little space for it and for others.
pub(super) fn check_private(config: &ServerConfig, place: &ArenaKind) -> Result<()> {
    let ArenaKind::Shm { name } = place else {
        return Ok(());
    };
    let Some(shm) = Space::of_pool(name) else {
        return Ok(());
    };
    let is_most = config.l1_bytes > shm.size / 100 * LARGEST_PRIVATE;
    if is_most && config.l1_restore == L1Restore::Auto {
        return Err(unavailable(format!(
            "{:.2} GiB are more than {LARGEST_PRIVATE} % of /dev/shm; --l1-restore on uses it all the same",
            in_gib(config.l1_bytes)
        )));
    }
    if shm.free < config.l1_bytes {
        Err(unavailable(format!(
            "/dev/shm has {:.2} GiB free, L1 needs {:.2} GiB",
            in_gib(shm.free),
            in_gib(config.l1_bytes)
        )))
    } else {
        Ok(())
    }
}

/// The file of the pool that clients map.
pub(super) fn pool_path(config: &ServerConfig) -> Option<PathBuf> {
    let name = config.shm_name.as_ref()?;
    Some(Path::new(SHM).join(pool_name(name)))
}

/// Removes what an earlier server of the instance has left at these paths, if it has ended and the files are this user's.
pub(super) fn remove_earlier(paths: impl IntoIterator<Item = PathBuf>) {
    let is_removed = |path: &PathBuf| match (path.parent(), path.file_name()) {
        (Some(folder), Some(name)) => remove_kept(folder, &name.to_string_lossy()),
        _ => false,
    };
    let removed: Vec<_> = paths.into_iter().filter(is_removed).collect();
    if !removed.is_empty() {
        tracing::info!(?removed, "removed L1 that an earlier server has left");
    }
}

/// The name in `/dev/shm` of the ledger of an arena, which has this name.
pub(super) fn ledger_name(arena: &str) -> String {
    format!("{arena}.{LEDGER}")
}

/// The file of an arena and that of its ledger.
pub(super) fn with_ledger(arena: PathBuf) -> [PathBuf; 2] {
    let name = arena.file_name().unwrap_or_default().to_string_lossy();
    let ledger = Path::new(SHM).join(ledger_name(&name));
    [arena, ledger]
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use kvtier_memory::Arena;

    use super::*;
    use crate::l1::kept::KeptL1;
    use crate::l1::testing::open_as;

    /// The memory of a server, which ends.
    fn ended((arena, kept): (Arena, KeptL1)) -> PathBuf {
        assert_ne!(format!("{kept:?}"), "Kept(\"None\")");
        arena.path().unwrap()
    }

    #[test]
    fn instance_leaves_one_l1_whatever_its_flags() {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join("l1");
        let open = |flags: &[&str], folder| open_as("flags", flags, folder, Some(&record)).unwrap();
        let other = format!("kvtier_kept_{}", std::process::id());
        let none = ["--shm-name", ""];
        let (own, private, off) = (["--shm-name", &other], none, ["--l1-restore", "off"]);
        let mut before: Option<PathBuf> = None;
        for flags in [&[][..], &own, &private, &own, &[], &off] {
            let opened = open(flags, "one");
            let left = if flags == off {
                drop(opened);
                None
            } else {
                Some(ended(opened))
            };
            let is_gone = before.is_none_or(|path| {
                let [memory, ledger] = with_ledger(path);
                !memory.exists() && !ledger.exists()
            });
            assert!(is_gone, "before {flags:?}");
            before = left;
        }
        // A container may have a new folder with each start.
        let first = ended(open_as("flags", &none, "one", None).unwrap());
        let second = open_as("flags", &none, "two", None).unwrap();
        let kept = format!("{:?}", second.1);
        assert_eq!(kept, "Kept(\"New\")", "not of this folder");
        assert_eq!(ended(second), first);
        drop(open(&off, "two"));
        assert!(!first.exists());
    }

    #[test]
    fn name_that_another_users_server_has_is_not_taken() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root may make a file of another user");
            return;
        }
        let path = pool_path(&crate::l1::testing::config("foreign", &[])).unwrap();
        let file = std::fs::File::create(&path).unwrap();
        file.lock().unwrap();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        let (arena, _kept) = open_as("foreign", &[], "one", None).unwrap();
        let other = arena.shm_name().unwrap().to_owned();
        drop((arena, _kept));
        remove_earlier(with_ledger(Path::new(SHM).join(&other)));
        let named = ["--shm-name", &path.file_name().unwrap().to_string_lossy()];
        let error = open_as("foreign", &named, "one", None).unwrap_err();
        assert!(error.to_string().contains("user 65534"), "{error}");
        assert!(file.metadata().unwrap().nlink() == 1 && !path.ends_with(&other));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn size_that_no_memory_has_removes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join("l1");
        let open = |flags: &[&str]| open_as("size", flags, "one", Some(&record));
        for flags in [&[][..], &["--shm-name", ""]] {
            let left = ended(open(flags).unwrap());
            let error = open(&[flags, &["--l1-size-gb", "1000000"]].concat()).unwrap_err();
            assert!(error.to_string().contains("--l1-size-gb"), "{error}");
            assert!(left.exists(), "{flags:?}");
            let again = open(flags).unwrap();
            assert!(
                format!("{:?}", again.1).contains("Old"),
                "{flags:?}: {again:?}"
            );
            drop(again);
            drop(open(&[flags, &["--l1-restore", "off"]].concat()).unwrap());
        }
    }

    #[test]
    fn file_that_names_what_is_no_l1_removes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (record, mine) = (
            folder.path().join("l1"),
            folder.path().join(format!("{SHM_PREFIX}x")),
        );
        let shared = Path::new(SHM).join(format!("kvtier_kept_mine_{}", std::process::id()));
        for path in [&mine, &shared] {
            std::fs::write(path, "mine").unwrap();
            let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(path, private).unwrap();
        }
        std::fs::write(
            &record,
            format!("{}\n{}\n\0\n", mine.display(), shared.display()),
        )
        .unwrap();
        drop(open_as("named", &["--l1-restore", "off"], "one", Some(&record)).unwrap());
        assert!(mine.exists() && shared.exists());
        std::fs::remove_file(shared).unwrap();
    }
}
