//! Stores: writing an object's file.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvtier_core::object_key::shown_path;
use kvtier_memory::uring::Tail;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::base::{self, Temporary, is_file};
use super::beneath;
use super::files::{Files, LookupScope, READ_FLAGS, count, read_end, size, stat};
use super::names::FilePlace;
use super::options::Fsync;
use crate::io::{self, FileOperation, FileStep, Move, Moved};
use kvtier_l2::trailer::{BLOCK, Form, LEN, Trailer, file_len, form_of};
use kvtier_l2::{ErrorKind, L2Error, StoreItem, Stored};

/// Largest object that is written without a lookup before, if naming the file shows whether it was there.
const MAX_UNCHECKED_BYTES: u64 = 64 << 10;

/// Attempts of a store while others remove or create what it needs.
const MAX_ATTEMPTS: usize = 4;

/// Contents of an object's place.
enum PlaceContents {
    Nothing,
    /// The object, with the bytes of its file.
    Object(u64),
    /// A file that is not the object, or damaged.
    Other,
    /// No file.
    Foreign,
}

/// Reason why a file was not written.
enum StoreFailure {
    /// A directory was removed.
    NoDirectory,
    /// The file cannot be renamed into its place from its directory.
    Apart,
    /// The file's place is occupied by an unchecked file.
    Taken,
    Error(L2Error),
}

impl From<L2Error> for StoreFailure {
    fn from(error: L2Error) -> Self {
        Self::Error(error)
    }
}

/// Stores objects; one result each.
pub(super) fn store(files: &Files, items: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
    let scope = files.lookup_scope();
    let stores = items.into_iter();
    let stores = stores.map(|item| FileWrite::new(files, item, scope));
    io::run(&*files.engine, stores)
}

/// Store of one object.
struct FileWrite<'a> {
    files: &'a Files,
    item: StoreItem,
    dir: Arc<OwnedFd>,
    place: FilePlace,
    /// Other places where it may be.
    others: Vec<FilePlace>,
    /// Whether to check its place first, and whether to replace the file there.
    looks: bool,
    replaces: bool,
    tries: usize,
    /// Whether its file is created in the directory of its place.
    is_beside: bool,
    /// Temporary name of its file, if it has one.
    name: Option<String>,
    /// Bytes written from the object's memory; the rest is in the tail.
    body: u64,
}

/// State of a store before its bytes are written.
enum CreatedFile {
    /// The object is there; the bytes of its file.
    Already(u64),
    File(OwnedFd),
}

impl FileOperation for FileWrite<'_> {
    type Done = Stored;

    fn begin(&mut self, number: usize, tail: &mut Tail) -> Result<FileStep<Stored>, L2Error> {
        self.item.from.check_len(self.item.object.len)?;
        Ok(match self.create(tail)? {
            CreatedFile::Already(bytes) => FileStep::Done(Stored::AlreadyThere(bytes)),
            CreatedFile::File(file) => FileStep::Moving(Move {
                number,
                file,
                at: 0,
                buffer: self.item.from.clone(),
                body: self.body,
                tail: std::mem::take(tail),
                size: None,
            }),
        })
    }

    /// Names the file after its bytes are written, and starts again after a conflict.
    fn end(
        mut self,
        mut file: OwnedFd,
        tail: &mut Tail,
        mut moved: Moved,
    ) -> Result<Stored, L2Error> {
        loop {
            match self.name(file, tail, moved) {
                Ok(()) => {
                    if self.replaces {
                        count(&self.files.counters.replaced);
                    }
                    return Ok(Stored::Written(self.body + tail.len() as u64));
                }
                Err(StoreFailure::Taken) => self.looks = true,
                Err(StoreFailure::NoDirectory) => self.restore()?,
                // This holds for all files.
                Err(StoreFailure::Apart) if !self.is_beside => {
                    self.files.create_in_place.store(true, Ordering::Relaxed);
                }
                Err(StoreFailure::Apart) => return Err(self.refused("name", Errno::XDEV)),
                Err(StoreFailure::Error(error)) => return Err(error),
            }
            file = match self.create(tail)? {
                CreatedFile::File(file) => file,
                CreatedFile::Already(bytes) => return Ok(Stored::AlreadyThere(bytes)),
            };
            moved = self.write(&file, tail);
        }
    }

    fn lost(self) {
        if let Some(name) = self.name {
            let _ = beneath::unlink(&self.dir, &name);
        }
    }
}

impl<'a> FileWrite<'a> {
    fn new(files: &'a Files, item: StoreItem, scope: LookupScope) -> Self {
        let (place, others) = files.places(&item.object.key, scope);
        let others = others.collect();
        // Writing a small object is cheaper than a lookup.
        let is_small = item.object.len <= MAX_UNCHECKED_BYTES;
        let is_blind = scope.is_single() && is_small && files.unnamed.is_possible();
        Self {
            files,
            item,
            dir: files.base.current(),
            place,
            others,
            looks: !is_blind,
            replaces: false,
            tries: 0,
            is_beside: false,
            name: None,
            body: 0,
        }
    }

    /// Creates the file unless the object is there.
    fn create(&mut self, tail: &mut Tail) -> Result<CreatedFile, L2Error> {
        while self.tries < MAX_ATTEMPTS {
            self.tries += 1;
            self.is_beside = self.files.create_in_place.load(Ordering::Relaxed);
            // Such a file is renamed, which does not show whether another was there.
            self.looks |= self.is_beside;
            if self.looks {
                match self.there(&self.place)? {
                    PlaceContents::Nothing => {}
                    PlaceContents::Object(bytes) => return Ok(CreatedFile::Already(bytes)),
                    // Its own place is looked up first, so the file there has to be the object.
                    PlaceContents::Other => self.replaces = true,
                    PlaceContents::Foreign => {
                        let message = format!(
                            "in the place of {:?} is no file",
                            shown_path(&self.place.path)
                        );
                        return Err(L2Error::new(ErrorKind::Refused, message));
                    }
                }
            }
            for other in self.others.iter().filter(|_| !self.replaces) {
                if let PlaceContents::Object(bytes) = self.there(other)? {
                    self.files.found_at(other);
                    return Ok(CreatedFile::Already(bytes));
                }
            }
            let direct = self.files.is_direct(&self.item.from);
            self.body = self.fill(tail, direct)?;
            match self.make(direct) {
                Ok((file, name)) => {
                    self.name = name;
                    return Ok(CreatedFile::File(file));
                }
                Err(Errno::NOENT) => self.restore()?,
                Err(error) => return Err(self.refused("make a file for", error)),
            }
        }
        let message = format!(
            "the directory of {:?} is removed, or the file made, again and again",
            shown_path(&self.place.path)
        );
        Err(L2Error::new(ErrorKind::Unavailable, message))
    }

    fn refused(&self, action: &str, error: Errno) -> L2Error {
        io::refused(action, &self.place.path, error)
    }

    fn write(&self, file: &OwnedFd, tail: &[u8]) -> Moved {
        let (engine, file) = (&self.files.engine, (file.as_fd(), 0));
        let written = engine.write(file, &self.item.from, self.body, tail);
        written.map(|()| (0, None))
    }

    fn restore(&mut self) -> Result<(), L2Error> {
        let made = self.files.base.restored();
        self.dir = made.map_err(|error| io::refused("make", "the base directory", error))?;
        Ok(())
    }

    /// Checks, names and closes the written file.
    fn name(&mut self, file: OwnedFd, tail: &[u8], moved: Moved) -> Result<(), StoreFailure> {
        let name = self.name.take();
        let named = self
            .check(&file, tail, moved)
            .map_err(StoreFailure::Error)
            .and_then(|()| self.publish(file, name.as_deref()));
        if let (Err(_), Some(name)) = (&named, name) {
            let _ = beneath::unlink(&self.dir, &name);
        }
        named
    }

    /// Creates the file to write to; returns its temporary name if it has one.
    fn make(&self, direct: bool) -> Result<(OwnedFd, Option<String>), Errno> {
        let (dir, place) = (&self.dir, &self.place.path);
        let (base, unnamed) = (&self.files.base, &self.files.unnamed);
        let inside = if self.is_beside {
            base::make_parents(dir, place)?;
            &place[..place.rfind('/').map_or(0, |at| at + 1)]
        } else {
            if !self.replaces && unnamed.is_possible() {
                match unnamed.create(dir, direct) {
                    Ok(file) => return Ok((file, None)),
                    // The directory is another one than at the start.
                    Err(Errno::OPNOTSUPP | Errno::ISDIR) => unnamed.disable(),
                    // File systems differ in the error for a removed directory; the other way shows it.
                    Err(_) => {}
                }
            }
            base.temporary()
        };
        let Temporary { path, file } = base.create(dir, inside, OFlags::WRONLY, direct)?;
        Ok((file, Some(path)))
    }

    /// Fills the tail; returns the bytes of the object before it.
    fn fill(&self, tail: &mut Tail, direct: bool) -> Result<u64, L2Error> {
        let StoreItem { object, from } = &self.item;
        let text = self.place.text.as_deref().unwrap_or_default();
        let text_len = u16::try_from(text.len()).map_err(|_| {
            let message = format!("a key of {} bytes is too long", text.len());
            L2Error::new(ErrorKind::Refused, message)
        })?;
        let trailer = Trailer {
            text_len,
            key: self.place.digest(object),
            ..Trailer::new(object, from.checksum()?)
        };
        let rest = if direct { object.len % BLOCK } else { 0 };
        let body = object.len - rest;
        let len = file_len(object.len, text.len(), self.files.align, direct);
        tail.resize((len - body) as usize);
        tail.fill(0);
        let mut unaligned = Vec::new();
        from.read_into(body, rest, &mut unaligned)?;
        tail[..unaligned.len()].copy_from_slice(&unaligned);
        let end_at = tail.len() - LEN;
        let (before, end) = tail.split_at_mut(end_at);
        end.copy_from_slice(&trailer.encode());
        let text_at = before.len() - text.len();
        before[text_at..].copy_from_slice(text.as_bytes());
        Ok(body)
    }

    /// Checks the result of a write and syncs the file if configured.
    fn check(&self, file: &OwnedFd, tail: &[u8], mut moved: Moved) -> Result<(), L2Error> {
        if let Err(error) = &moved
            && self.files.direct
            && io::refuses_direct(error)
        {
            self.files.note_not_direct(error);
            io::leave_direct(file).map_err(|error| self.refused("write", error))?;
            moved = self.write(file, tail);
        }
        moved.map_err(|error| io::failed("write", &self.place.path, &error))?;
        if self.files.fsync != Fsync::Never {
            let synced = self.files.engine.sync(file.as_fd());
            synced.map_err(|error| self.refused("write", error))?;
        }
        Ok(())
    }

    /// Publishes a written file under its name.
    fn publish(&self, file: OwnedFd, temporary: Option<&str>) -> Result<(), StoreFailure> {
        let (dir, path) = (&self.dir, &self.place.path);
        match temporary {
            Some(temporary) => {
                io::close(file).map_err(|error| self.refused("write", error))?;
                self.name_by(|| beneath::rename(dir, temporary, path))?;
            }
            None => self.name_by(|| self.files.unnamed.name(&file, dir, path))?,
        }
        if self.files.fsync == Fsync::FileAndDir {
            let synced = self.sync_parents();
            synced.map_err(|error| self.refused("name", error))?;
        }
        Ok(())
    }

    /// Runs `name`, a second time after missing directories are created.
    fn name_by(&self, name: impl Fn() -> Result<(), Errno>) -> Result<(), StoreFailure> {
        let mut named = name();
        if named == Err(Errno::NOENT) {
            named = base::make_parents(&self.dir, &self.place.path).and_then(|()| name());
        }
        named.map_err(|error| match error {
            Errno::NOENT => StoreFailure::NoDirectory,
            Errno::EXIST => StoreFailure::Taken,
            Errno::XDEV => StoreFailure::Apart,
            error => StoreFailure::Error(self.refused("name", error)),
        })
    }

    /// Syncs the directory of a name and those above it, which may be new.
    fn sync_parents(&self) -> Result<(), Errno> {
        let path = &self.place.path;
        for (end, _) in path.rmatch_indices('/') {
            let parent = beneath::open(&self.dir, &path[..end], base::DIR_FLAGS, Mode::empty())?;
            self.files.engine.sync(parent.as_fd())?;
        }
        self.files.engine.sync(self.dir.as_fd())
    }

    /// Checks a place without comparing the bytes of the object.
    fn there(&self, place: &FilePlace) -> Result<PlaceContents, L2Error> {
        let (files, object) = (self.files, &self.item.object);
        let Some(seen) = stat(&self.dir, &place.path)? else {
            return Ok(PlaceContents::Nothing);
        };
        if !is_file(&seen) {
            return Ok(PlaceContents::Foreign);
        }
        if files.unreadable.remove(&object.key) {
            return Ok(PlaceContents::Other);
        }
        let Some(form) = form_of(size(&seen), object.len, place.text_len(), files.align) else {
            return Ok(PlaceContents::Other);
        };
        let refused = |error| io::refused("read", &place.path, error);
        let file = match beneath::open(&self.dir, &place.path, READ_FLAGS, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(PlaceContents::Nothing),
            // It can never be read.
            Err(Errno::ACCESS | Errno::PERM) => return Ok(PlaceContents::Other),
            Err(error) => return Err(refused(error)),
        };
        let end = match read_end(&file, size(&seen), place.text_len()) {
            Err(error) if io::is_unreadable(error) => return Ok(PlaceContents::Other),
            end => end.map_err(refused)?,
        };
        let is_object = match (form, end) {
            (Form::Bare, end) => files.accepts(form, object) && end.is_none(),
            (Form::Trailed, None) => false,
            (Form::Trailed, Some((trailer, text))) => {
                trailer.is_of(object, place.digest(object))
                    && text == place.text.as_deref().unwrap_or_default().as_bytes()
            }
        };
        Ok(if is_object {
            PlaceContents::Object(size(&seen))
        } else {
            PlaceContents::Other
        })
    }
}
