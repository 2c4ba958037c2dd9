//! Walk through all files, with at most one page of names in memory.
//!
//! A page ends at a position of the file system, so created and deleted files shift nothing: a file that exists all the time
//! is returned once, others once or not. (File systems guarantee this; a file renamed within the directory may be returned
//! twice or not at all.)

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvtier_core::object_key::{KeyShape, ObjectKey};
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, RawDir, SeekFrom, Stat};
use rustix::io::Errno;

use super::base::{Base, DIR_FLAGS, is_file};
use super::beneath;
use super::files::{Files, READ_FLAGS, read_end, size, stat};
use super::names::{
    self, FilePlace, Layout, NamedFile, QUARANTINE, TEMPORARY, hashed_name, is_shard_dir, shard,
    shard_path,
};
use crate::io::refused;
use kvtier_l2::{ErrorKind, L2Error, Listed};

/// Buffer of `getdents`, in bytes.
const NAMES: usize = 64 << 10;

/// Age after which a temporary file without a known writer is a leftover.
const STALE_SECONDS: u64 = 60;

/// Age after which a temporary file is a leftover if files cannot be locked.
const STALE_WITHOUT_LOCKS: u64 = 24 * 60 * 60;

/// Position of the walk: first the base directory, then the directories below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    /// Directory below the base, if any.
    shard: Option<u16>,
    /// Next entry as a cookie of the file system; 0 is the first.
    cookie: u64,
}

impl Position {
    pub(super) const START: Self = Self {
        shard: None,
        cookie: 0,
    };

    pub(super) fn parse(text: &str) -> Option<Self> {
        let (shard, cookie) = text.split_once(':')?;
        Some(Self {
            shard: match shard {
                "" => None,
                shard => Some(u16::from_str_radix(shard, 16).ok()?),
            },
            cookie: cookie.parse().ok()?,
        })
    }

    fn next_dir(self) -> Option<Self> {
        let shard = match self.shard {
            None => Some(0),
            Some(shard) => shard.checked_add(1),
        };
        shard.map(|shard| Self {
            shard: Some(shard),
            cookie: 0,
        })
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.shard {
            None => write!(f, ":{}", self.cookie),
            Some(shard) => write!(f, "{shard:04x}:{}", self.cookie),
        }
    }
}

/// Page of the walk.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub objects: Vec<Listed>,
    /// Temporary files and leftovers, relative to the base.
    pub temporary: Vec<String>,
    pub foreign: u64,
    /// Whether there are names or places other than those that are written.
    pub other_naming: bool,
    pub other_layout: bool,
    pub next: Option<Position>,
}

/// Strings shared by many keys.
#[derive(Default)]
struct SharedNames(Option<(Arc<str>, Arc<str>)>);

impl SharedNames {
    fn share(&mut self, key: ObjectKey) -> ObjectKey {
        if let Some((model, salt)) = &self.0
            && (model, salt) == (key.model_name(), key.cache_salt())
        {
            let (model, salt) = (Arc::clone(model), Arc::clone(salt));
            let hash = key.chunk_hash();
            let same = ObjectKey::new(hash, model, key.kv_rank(), key.object_group_id(), salt);
            return same.unwrap_or(key);
        }
        self.0 = Some((Arc::clone(key.model_name()), Arc::clone(key.cache_salt())));
        key
    }
}

/// Walk to the end of one page.
struct PageWalk<'a> {
    files: &'a Files,
    base: Arc<OwnedFd>,
    /// Names that the page may still have.
    left: usize,
    /// The part of the tree that is known to exist.
    within: String,
    names: SharedNames,
    page: Page,
}

/// Returns the page from `at` on, about `limit` names.
pub(super) fn page(files: &Files, at: Position, limit: usize) -> Result<Page, L2Error> {
    let mut walk = PageWalk {
        files,
        base: files.base.current(),
        left: limit.max(1),
        within: String::new(),
        names: SharedNames::default(),
        page: Page::default(),
    };
    let mut buffer = Vec::with_capacity(NAMES);
    let mut position = Some(at);
    while let Some(at) = position
        && walk.left > 0
    {
        position = walk.read(at, buffer.spare_capacity_mut())?;
    }
    walk.page.next = position;
    Ok(walk.page)
}

impl PageWalk<'_> {
    /// Reads names of the directory of `at`; returns where to go on.
    fn read(
        &mut self,
        at: Position,
        buffer: &mut [MaybeUninit<u8>],
    ) -> Result<Option<Position>, L2Error> {
        let dir = match at.shard {
            None => open_dir(&self.base, ".")?,
            Some(shard) => {
                let first = &shard_path(shard)[..2];
                if first != self.within && self.open_shard(first)?.is_none() {
                    // None of the 256 directories with this prefix exists.
                    let last = Position {
                        shard: Some(shard | 0xff),
                        cookie: 0,
                    };
                    return Ok(last.next_dir());
                }
                first.clone_into(&mut self.within);
                self.open_shard(&shard_path(shard))?
            }
        };
        let Some(dir) = dir else {
            return Ok(at.next_dir());
        };
        let base_path = self.files.base.path();
        let io = |error| refused("list", &base_path.to_string_lossy(), error);
        rustix::fs::seek(&dir, SeekFrom::Start(at.cookie)).map_err(io)?;
        let mut names = RawDir::new(&dir, buffer);
        while let Some(entry) = names.next() {
            let entry = entry.map_err(io)?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                self.meet(&dir, at.shard, name, entry.file_type());
                self.left -= 1;
            }
            if self.left == 0 {
                return Ok(Some(Position {
                    cookie: entry.next_entry_cookie(),
                    ..at
                }));
            }
        }
        Ok(at.next_dir())
    }

    /// Opens a directory of objects; one that may not be read has none of kvtier's.
    fn open_shard(&mut self, path: &str) -> Result<Option<OwnedFd>, L2Error> {
        match try_open_dir(&self.base, path) {
            Err(Errno::ACCESS | Errno::PERM) => {
                self.page.foreign += 1;
                Ok(None)
            }
            opened => opened.map_err(|error| refused("list", path, error)),
        }
    }

    /// Adds an entry of a directory to the page.
    fn meet(&mut self, dir: &OwnedFd, shard_number: Option<u16>, name: &[u8], kind: FileType) {
        let (files, page) = (self.files, &mut self.page);
        let Ok(name) = std::str::from_utf8(name) else {
            page.foreign += 1;
            return;
        };
        if shard_number.is_none() && is_own_dir(&files.base, name, kind) {
            return;
        }
        let layout = match shard_number {
            None => Layout::Flat,
            Some(_) => Layout::Sharded,
        };
        let found = match names::parse(name) {
            NamedFile::Temporary => {
                let inside = shard_number.map_or(String::new(), |shard| shard_path(shard) + "/");
                page.temporary.push(inside + name);
                return;
            }
            NamedFile::Foreign => None,
            NamedFile::Object(key, naming) => examine(dir, name)
                .filter(|_| naming == files.naming || Some(naming) == files.naming.other())
                .map(|stat| (*key, naming, stat)),
            NamedFile::Hashed => examine(dir, name).and_then(|stat| {
                let key = hashed_key(dir, name, &stat)?;
                // Its name is the same in all namings.
                Some((key, files.naming, stat))
            }),
        };
        let found =
            found.filter(|(key, ..)| shard_number.is_none_or(|number| shard(key) == number));
        let Some((key, naming, stat)) = found else {
            page.foreign += 1;
            return;
        };
        let is_other_naming = naming != files.naming && key.object_group_id() == 0;
        let is_other_layout = layout != files.layout;
        page.other_naming |= is_other_naming;
        page.other_layout |= is_other_layout;
        // The place that is looked up first may have it too.
        let place = || FilePlace::of(&key, files.naming, files.layout);
        if (is_other_naming || is_other_layout) && is_there(&self.base, &place()) {
            return;
        }
        page.objects.push(Listed {
            key: self.names.share(key),
            bytes: size(&stat),
            used_at: used_at(&stat),
        });
    }
}

/// Whether it is a directory of kvtier's.
fn is_own_dir(base: &Base, name: &str, kind: FileType) -> bool {
    let first = base.temporary().split('/').next();
    let is_ours = name == QUARANTINE || is_shard_dir(name) || Some(name) == first;
    is_ours && matches!(kind, FileType::Directory | FileType::Unknown)
}

fn examine(dir: &OwnedFd, name: &str) -> Option<Stat> {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    is_file(&stat).then_some(stat)
}

fn is_there(base: &OwnedFd, place: &FilePlace) -> bool {
    stat(base, &place.path).is_ok_and(|stat| stat.is_some_and(|stat| is_file(&stat)))
}

/// Removes those of these files in `inside` that are leftovers.
pub(super) fn remove_stale(base: &Base, inside: &str, temporary: &[String]) -> u64 {
    let base = base.current();
    // Writers last, since their files are recognised by them.
    let mut stale: Vec<_> = temporary
        .iter()
        .filter(|name| is_stale(&base, inside, name))
        .collect();
    stale.sort_unstable_by_key(|name| std::cmp::Reverse(name.len()));
    let is_removed = |name: &&&String| beneath::unlink(&base, &format!("{inside}{name}")).is_ok();
    stale.iter().filter(is_removed).count() as u64
}

/// Returns the names in the directory of temporary files, if it has one of its own.
pub(super) fn temporary_names(base: &Base) -> Vec<String> {
    let inside = base.temporary();
    let base = base.current();
    if inside.is_empty() {
        return Vec::new();
    }
    let Ok(Some(dir)) = open_dir(&base, inside) else {
        return Vec::new();
    };
    let mut buffer = [MaybeUninit::uninit(); 8 << 10];
    let mut entries = RawDir::new(&dir, &mut buffer);
    let mut names = Vec::new();
    while let Some(Ok(entry)) = entries.next() {
        if let Ok(name) = entry.file_name().to_str()
            && names::parse(name) == NamedFile::Temporary
        {
            names.push(name.to_owned());
        }
    }
    names
}

/// Opens a directory; `None` if it does not exist.
fn open_dir(base: &OwnedFd, path: &str) -> Result<Option<OwnedFd>, L2Error> {
    try_open_dir(base, path).map_err(|error| refused("list", path, error))
}

fn try_open_dir(base: &OwnedFd, path: &str) -> Result<Option<OwnedFd>, Errno> {
    match beneath::open(base, path, DIR_FLAGS, Mode::empty()) {
        Ok(dir) => Ok(Some(dir)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads the key of a file whose name is a hash.
fn hashed_key(dir: &OwnedFd, name: &str, stat: &Stat) -> Option<ObjectKey> {
    let file = rustix::fs::openat(dir, name, READ_FLAGS, Mode::empty()).ok()?;
    let (trailer, _) = read_end(&file, size(stat), 0).ok()??;
    let (_, text) = read_end(&file, size(stat), usize::from(trailer.text_len)).ok()??;
    let text = std::str::from_utf8(&text).ok()?;
    let key = ObjectKey::parse_name(text, Some(KeyShape::Grouped)).ok()?;
    (hashed_name(text) == name && names::key_text(&key) == text).then_some(key)
}

fn used_at(stat: &Stat) -> u64 {
    u64::try_from(stat.st_mtime.max(stat.st_atime)).unwrap_or(0)
}

/// Whether this temporary file is a leftover.
fn is_stale(base: &OwnedFd, inside: &str, name: &str) -> bool {
    let path = format!("{inside}{name}");
    let name = &name[name.rfind('/').map_or(0, |at| at + 1)..];
    let writer_len = name
        .strip_prefix(TEMPORARY)
        .and_then(|rest| rest.find('-'))
        .map_or(name.len(), |at| TEMPORARY.len() + at);
    let age = || match stat(base, &path) {
        Ok(Some(stat)) if is_file(&stat) => now().checked_sub(stat.st_mtime.try_into().ok()?),
        _ => None,
    };
    let file = match rustix::fs::openat(base, &name[..writer_len], READ_FLAGS, Mode::empty()) {
        Ok(file) => file,
        // The directory of its writer was removed, or it is not kvtier's.
        Err(_) => return age().is_some_and(|age| age >= STALE_SECONDS),
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => true,
        Err(Errno::WOULDBLOCK) => false,
        Err(_) => age().is_some_and(|age| age >= STALE_WITHOUT_LOCKS),
    }
}

fn now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Error of an unknown position of a listing.
pub(super) fn no_position(text: &str) -> L2Error {
    L2Error::new(
        ErrorKind::Refused,
        format!("{text:?} is no position of a listing of files"),
    )
}
