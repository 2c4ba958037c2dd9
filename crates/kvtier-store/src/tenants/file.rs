//! The file that keeps what tenants were granted.
//!
//! It is JSON, written as a whole beside the old one and moved over it, so that a reader finds the old content or the
//! new. There is exactly one way to write a table, checksum included, so whatever differs from that is damage and is
//! refused as a whole.
//!
//! The mutex guards the file's identity as last read or written; no other lock is acquired inside.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_common::error::{Error, Result};
use kvtier_common::sync::Mutex;
use kvtier_core::object_key::check_cache_salt;
use kvtier_memory::checksum::checksum128;
use serde::Deserialize;

use super::table::{Entry, MAX_TENANTS, Table};

/// The newest form: tables with places of tiers. Those without are written as version 1 has it.
const VERSION: u64 = 2;

/// Largest file that is read, bytes: half a kilobyte for each tenant there may be.
const MAX_LEN: u64 = 512 * MAX_TENANTS as u64;

const NO_NAME: &str = "it is no name of a file";

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

impl std::fmt::Display for QuotaPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.flag, self.path.display())
    }
}

/// A place for a table on disk.
#[derive(Debug)]
pub struct QuotaFile {
    /// Path with no symbolic link at its end, which would be replaced.
    path: PathBuf,
    directory: PathBuf,
    /// Starts the names of files that are not whole yet.
    temporary: String,
    /// What was read or written last; `None` for no file.
    seen: Mutex<Option<Identity>>,
    /// Largest file that is written, bytes; a larger one would not be read.
    max_len: u64,
}

impl QuotaFile {
    /// Reads the table; no file is an empty one. Removes what a server that was killed left half-written.
    ///
    /// # Errors
    /// One line with the file, what is wrong, and what to do.
    pub fn open(place: impl Into<QuotaPlace>) -> Result<(Self, Table)> {
        let place = place.into();
        Self::load(&place.path).map_err(|error| about(&place, error))
    }

    fn load(path: &Path) -> Result<(Self, Table)> {
        let path = resolve(path)?;
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Error::refused(NO_NAME));
        };
        let file = Self {
            directory: directory.to_owned(),
            temporary: format!(".{}.kvtier-tmp-", name.to_string_lossy()),
            seen: Mutex::default(),
            max_len: MAX_LEN,
            path,
        };
        file.remove_stale().map_err(no_directory)?;
        let Some((content, seen)) = read(&file.path)? else {
            return Ok((file, Table::default()));
        };
        *file.seen.lock() = Some(seen);
        Ok((file, decode(&content)?))
    }

    /// Reads the table and changes nothing.
    ///
    /// # Errors
    /// As [`QuotaFile::open`].
    pub fn peek(place: impl Into<QuotaPlace>) -> Result<Table> {
        let place = place.into();
        let content = resolve(&place.path).and_then(|path| read(&path));
        let table = content.and_then(|content| match content {
            Some((content, _)) => decode(&content),
            None => Ok(Table::default()),
        });
        table.map_err(|error| about(&place, error))
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the content. Afterwards the file has this table, or with an error what it had.
    ///
    /// # Errors
    /// The system's; if another process has replaced the file since it was read; [`io::ErrorKind::FileTooLarge`] for
    /// more than the next start would read.
    pub fn save(&self, table: &Table) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        if identity(&self.path)? != *self.seen.lock() {
            return Err(io::Error::other(
                "another process has changed it since this server read it; restart the server to use what is there",
            ));
        }
        let content = encode(table);
        if content.len() as u64 > self.max_len {
            let (bytes, most) = (content.len(), self.max_len);
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("the quota file would have {bytes} bytes, and may have {most} at most"),
            ));
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}{}-{number}", self.temporary, std::process::id());
        let temporary = self.directory.join(name);
        // Before there is anything that it could fail.
        let directory = File::open(&self.directory)?;
        let replaced = write(&temporary, content.as_bytes())
            .and_then(|written| fs::rename(&temporary, &self.path).map(|()| written));
        let written = replaced.inspect_err(|_| {
            let _ = fs::remove_file(&temporary);
        })?;
        *self.seen.lock() = Some(written);
        if let Err(error) = directory.sync_all() {
            // Every reader sees the new content by now; to call that a failure would be incorrect.
            tracing::warn!(%error, "the quota file was written, and may be the old one after a power failure");
        }
        Ok(())
    }

    fn remove_stale(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_string_lossy().starts_with(&self.temporary) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

fn about(place: &QuotaPlace, error: Error) -> Error {
    error
        .context(place)
        .hint("put a good copy in its place, or remove it to start without quotas")
}

fn no_directory(error: io::Error) -> Error {
    Error::io("its directory cannot be used", error)
}

/// The path of the file itself, which may be behind symbolic links, and whose directory must be there.
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
    let name = path.file_name().ok_or_else(|| Error::refused(NO_NAME))?;
    let directory = path.parent().filter(|path| !path.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    match fs::metadata(directory) {
        Ok(found) if found.is_dir() => Ok(directory.join(name)),
        Ok(_) => Err(Error::refused("its directory is none")),
        Err(error) => Err(no_directory(error)),
    }
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

/// The bytes that are there.
fn read(path: &Path) -> Result<Option<(Vec<u8>, Identity)>> {
    let describe = |error: io::Error| Error::io("it cannot be read", error);
    match fs::metadata(path) {
        // A pipe would be waited for.
        Ok(found) if !found.is_file() => return Err(Error::refused("it is no file")),
        Ok(found) if found.len() > MAX_LEN => {
            return Err(Error::refused(format!("it has more than {MAX_LEN} bytes")));
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(describe(error)),
    }
    let file = File::open(path).map_err(describe)?;
    let found = file.metadata().map_err(describe)?;
    let mut content = Vec::new();
    file.take(MAX_LEN)
        .read_to_end(&mut content)
        .map_err(describe)?;
    Ok(Some((content, identity_of(&found))))
}

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
fn encode(table: &Table) -> String {
    // A map of texts and numbers can always be written.
    let text = |value: Result<String, serde_json::Error>| value.unwrap_or_default();
    let mut rows = String::from("{");
    for (salt, entry) in table.iter() {
        if rows.len() > 1 {
            rows.push(',');
        }
        rows.push('\n');
        rows.push_str(&text(serde_json::to_string(&**salt)));
        rows.push(':');
        rows.push_str(&text(serde_json::to_string(&**entry)));
    }
    rows.push_str("\n}");
    let (version, content) = if table.places().is_empty() {
        (1, rows)
    } else {
        let places = text(serde_json::to_string(table.places()));
        (VERSION, format!("{rows},\n\"places\":{places}"))
    };
    let checksum = checksum128(content.as_bytes());
    format!("{{\"version\":{version},\"checksum\":\"{checksum:032x}\",\"quotas\":{content}}}\n")
}

/// The table of a text.
fn decode(content: &[u8]) -> Result<Table> {
    #[derive(Deserialize)]
    struct Head {
        version: u64,
    }
    #[derive(Deserialize)]
    struct Whole {
        quotas: BTreeMap<String, Entry>,
        #[serde(default)]
        places: BTreeMap<String, String>,
    }
    let no_file =
        |error: serde_json::Error| Error::refused("it is damaged, or no quota file").source(error);
    let head: Head = serde_json::from_slice(content).map_err(no_file)?;
    if !(1..=VERSION).contains(&head.version) {
        return Err(Error::refused(format!(
            "it has version {}, and this server reads only versions up to {VERSION}",
            head.version
        )));
    }
    let whole: Whole = serde_json::from_slice(content).map_err(no_file)?;
    let table = Table::from_iter(whole.quotas).with_places(whole.places);
    if encode(&table).as_bytes() != content {
        return Err(Error::refused(
            "it is damaged, or was changed by hand: its checksum is another",
        ));
    }
    if table.len() > MAX_TENANTS {
        return Err(Error::refused(format!(
            "it has more than {MAX_TENANTS} tenants"
        )));
    }
    for (number, (salt, _)) in table.iter().enumerate() {
        check_cache_salt(salt).map_err(|error| {
            Error::refused(format!("entry {} is no tenant's", number + 1)).source(error)
        })?;
    }
    Ok(table)
}

#[cfg(test)]
mod tests;
