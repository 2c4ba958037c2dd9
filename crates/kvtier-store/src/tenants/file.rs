//! The file that keeps what tenants were granted.
//!
//! It is JSON, written as a whole beside the old one and moved over it, so that a reader finds the old content or the
//! new. A file that is not a whole table is refused.
//!
//! The mutex guards the file's identity as last read or written; no other lock is acquired inside.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, Write as _};
use std::marker::PhantomData;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use kvtier_common::error::{Error, Result};
use kvtier_common::sync::Mutex;
use kvtier_core::object_key::check_cache_salt;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::table::{MAX_TENANTS, TenantEntry, TenantTable};

/// Version of what is written. Versions 1 and 2 have a checksum, which is not verified, and version 1 has no places.
const VERSION: u64 = 3;

/// Identity of a file, as far as the file system tells: device, number, size, and time of the last change.
type Identity = (u64, u64, u64, i64, i64);

/// Place of a table on disk, and the flag that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaPlace {
    /// The file, which exists or not.
    pub path: PathBuf,
    /// `--quota-file` or `--state-dir`, for messages.
    pub flag: &'static str,
}

impl QuotaPlace {
    /// Name of the file in a state directory.
    pub const FILE: &'static str = "quotas";

    /// The file of `--quota-file`.
    pub fn given(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            flag: "--quota-file",
        }
    }

    /// The file in a state directory.
    pub fn in_state(path: PathBuf) -> Self {
        Self {
            path,
            flag: "--state-dir",
        }
    }
}

impl<P: AsRef<Path>> From<P> for QuotaPlace {
    fn from(path: P) -> Self {
        Self::given(path.as_ref())
    }
}

impl fmt::Display for QuotaPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.flag, self.path.display())
    }
}

/// A place for a table on disk.
#[derive(Debug)]
pub struct QuotaFile {
    /// Path with no symbolic link at its end, which would be replaced.
    path: PathBuf,
    /// Starts the names of files that are not whole yet.
    temporary: String,
    /// What was read or written last; `None` for no file.
    seen: Mutex<Option<Identity>>,
}

impl QuotaFile {
    /// Reads the table; no file is an empty one. Removes what a server that was killed left half-written.
    ///
    /// # Errors
    /// One line with the file, what is wrong, and what to do.
    pub fn open(place: impl Into<QuotaPlace>) -> Result<(Self, TenantTable)> {
        let place = place.into();
        let (path, seen, table) = load(&place.path).map_err(|error| about(&place, error))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let file = Self {
            temporary: format!(".{name}.kvtier-tmp"),
            seen: Mutex::new(seen),
            path,
        };
        file.remove_stale();
        Ok((file, table))
    }

    /// Reads the table and changes nothing.
    ///
    /// # Errors
    /// As [`QuotaFile::open`].
    pub fn peek(place: impl Into<QuotaPlace>) -> Result<TenantTable> {
        let place = place.into();
        let loaded = load(&place.path).map_err(|error| about(&place, error));
        loaded.map(|(_, _, table)| table)
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the content. Afterwards the file has this table, or with an error what it had.
    ///
    /// # Errors
    /// The system's, or that another process has replaced the file since it was read.
    pub fn save(&self, table: &TenantTable) -> io::Result<()> {
        let mut seen = self.seen.lock();
        if identity(&self.path)? != *seen {
            return Err(io::Error::other(
                "another process has changed it since this server read it; restart the server to use what is there",
            ));
        }
        // Before there is anything that it could fail.
        let directory = File::open(self.path.with_file_name("."))?;
        let content = encode(table)?;
        // A server that shares the file, and its process id from another container, does not write to the same one.
        let random = RandomState::new().build_hasher().finish();
        let name = format!("{}-{random:016x}", self.temporary);
        let temporary = self.path.with_file_name(name);
        let replaced = write(&temporary, &content)
            .and_then(|written| fs::rename(&temporary, &self.path).map(|()| written));
        let written = replaced.inspect_err(|_| {
            let _ = fs::remove_file(&temporary);
        })?;
        *seen = Some(written);
        if let Err(error) = directory.sync_all() {
            // Every reader sees the new content by now; to call that a failure would be incorrect.
            tracing::warn!(%error, "the quota file was written, and may be the old one after a power failure");
        }
        Ok(())
    }

    fn remove_stale(&self) {
        let entries = fs::read_dir(self.path.with_file_name("."))
            .into_iter()
            .flatten();
        for entry in entries.flatten() {
            if entry
                .file_name()
                .to_string_lossy()
                .starts_with(&self.temporary)
            {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

fn about(place: &QuotaPlace, error: Error) -> Error {
    error
        .context(place)
        .hint("put a good copy in its place, or remove it to start without quotas")
}

/// The path of the file itself, its identity and its table.
fn load(path: &Path) -> Result<(PathBuf, Option<Identity>, TenantTable)> {
    let failed = |error| Error::io("it cannot be read", error);
    let path = resolve(path)?;
    let Some(seen) = identity(&path).map_err(failed)? else {
        return Ok((path, None, TenantTable::default()));
    };
    // A pipe would be waited for.
    if !fs::metadata(&path).map_err(failed)?.is_file() {
        return Err(Error::refused("it is no file"));
    }
    let table = decode(&fs::read(&path).map_err(failed)?)?;
    Ok((path, Some(seen), table))
}

/// The path behind symbolic links, whose directory must be there.
fn resolve(path: &Path) -> Result<PathBuf> {
    let mut path = path.to_owned();
    // As many as the system follows.
    for _ in 0..40 {
        let Ok(target) = fs::read_link(&path) else {
            break;
        };
        path.pop();
        path.push(target);
    }
    let name = path.file_name();
    let name = name.ok_or_else(|| Error::refused("it is no name of a file"))?;
    let directory = path.parent().filter(|path| !path.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    fs::read_dir(directory).map_err(|error| Error::io("its directory cannot be used", error))?;
    Ok(directory.join(name))
}

fn identity(path: &Path) -> io::Result<Option<Identity>> {
    match fs::metadata(path) {
        Ok(found) => Ok(Some(identity_of(&found))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn identity_of(found: &fs::Metadata) -> Identity {
    (
        found.dev(),
        found.ino(),
        found.len(),
        found.mtime(),
        found.mtime_nsec(),
    )
}

/// Writes a file that only the server's user can read.
fn write(path: &Path, content: &[u8]) -> io::Result<Identity> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()?;
    Ok(identity_of(&file.metadata()?))
}

/// The text of a table.
fn encode(table: &TenantTable) -> io::Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Content<'a> {
        version: u64,
        quotas: BTreeMap<&'a str, &'a TenantEntry>,
        places: &'a BTreeMap<String, String>,
    }
    let rows = table.iter().map(|(salt, entry)| (&**salt, &**entry));
    Ok(serde_json::to_vec_pretty(&Content {
        version: VERSION,
        quotas: rows.collect(),
        places: table.places(),
    })?)
}

/// A map that has no key twice, as one of the values would have no effect.
struct UniqueKeys<V>(BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueKeys<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for MapVisitor<V> {
            type Value = UniqueKeys<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
                let mut map = BTreeMap::new();
                while let Some((key, value)) = access.next_entry()? {
                    if map.insert(key, value).is_some() {
                        return Err(A::Error::custom("a tenant is named twice"));
                    }
                }
                Ok(UniqueKeys(map))
            }
        }

        deserializer.deserialize_map(MapVisitor(PhantomData))
    }
}

/// The table of a text.
fn decode(content: &[u8]) -> Result<TenantTable> {
    #[derive(Deserialize)]
    struct Head {
        version: u64,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Content {
        #[serde(rename = "version")]
        _version: IgnoredAny,
        #[serde(default, rename = "checksum")]
        _checksum: IgnoredAny,
        quotas: UniqueKeys<TenantEntry>,
        #[serde(default)]
        places: BTreeMap<String, String>,
    }
    let damaged =
        |error: serde_json::Error| Error::refused("it is damaged, or no quota file").source(error);
    let Head { version } = serde_json::from_slice(content).map_err(damaged)?;
    if !(1..=VERSION).contains(&version) {
        return Err(Error::refused(format!(
            "it has version {version}, and this server reads only versions up to {VERSION}"
        )));
    }
    let Content { quotas, places, .. } = serde_json::from_slice(content).map_err(damaged)?;
    let UniqueKeys(quotas) = quotas;
    if quotas.len() > MAX_TENANTS {
        return Err(Error::refused(format!(
            "it has more than {MAX_TENANTS} tenants"
        )));
    }
    for (number, salt) in (1..).zip(quotas.keys()) {
        check_cache_salt(salt).map_err(|error| {
            Error::refused(format!("entry {number} is no tenant's")).source(error)
        })?;
    }
    Ok(TenantTable::from_iter(quotas).with_places(places))
}

#[cfg(test)]
mod tests;
