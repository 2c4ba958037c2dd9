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
use super::files::{Files, InFiles, LookupScope, READ_FLAGS, count, read_end, size, stat};
use super::names::Place;
use super::options::Fsync;
use crate::io::{self, Batch, Move, Moved, Work};
use kvtier_l2::trailer::{BLOCK, Form, LEN, Trailer, file_len, form_of};
use kvtier_l2::{ErrorKind, L2Error, ObjectSpec, StoreItem, Stored};

/// Largest object that is written without a lookup before, if naming the file shows whether it was there.
const MAX_UNCHECKED_BYTES: u64 = 64 << 10;

/// Attempts of a store while others remove or create what it needs.
const MAX_ATTEMPTS: usize = 4;

/// Contents of an object's place.
enum There {
    Nothing,
    /// The object, with the bytes of its file.
    Object(u64),
    /// A file that is not the object, or damaged.
    Other,
    /// No file.
    Foreign,
}

/// Reason why a file was not written.
enum Failed {
    /// A directory was removed.
    NoDirectory,
    /// The file cannot be renamed into its place from its directory.
    Apart,
    /// The file's place is occupied by an unchecked file.
    Taken,
    Error(L2Error),
}

impl From<L2Error> for Failed {
    fn from(error: L2Error) -> Self {
        Self::Error(error)
    }
}

/// Object that is being stored.
pub(super) struct Storing {
    dir: Arc<OwnedFd>,
    place: Place,
    /// Other places where it may be.
    others: Vec<Place>,
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

type Stores<'a> = Batch<InFiles<'a>, StoreItem, Storing, Stored>;

impl Files {
    /// Stores objects; one result each.
    pub(super) fn store_all(&self, items: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
        Stores::new(self.of_batch(), items).run(&*self.engine)
    }
}

impl Work for Stores<'_> {
    fn next(&mut self) -> Option<Move> {
        while let Some(item) = self.items.get(self.begun) {
            let number = self.begun;
            self.begun += 1;
            let mut tail = self.tails.pop().unwrap_or_default();
            let begun = self
                .place
                .files
                .storing(item, self.place.scope)
                .and_then(|mut storing| {
                    let begun = self.place.files.begin(&mut storing, item, &mut tail)?;
                    Ok((storing, begun))
                });
            let result = match begun {
                Ok((storing, Begun::Writing(file))) => {
                    let body = storing.body;
                    self.in_flight[number] = Some(storing);
                    return Some(Move {
                        number,
                        file,
                        at: 0,
                        buffer: item.from.clone(),
                        body,
                        tail,
                        size: None,
                    });
                }
                Ok((_, Begun::There(bytes))) => Ok(Stored::AlreadyThere(bytes)),
                Err(error) => Err(error),
            };
            self.results[number] = result;
            self.tails.push(tail);
        }
        None
    }

    fn done(&mut self, one: Move, moved: Moved) {
        let Move {
            number,
            file,
            mut tail,
            ..
        } = one;
        let Some(mut storing) = self.in_flight[number].take() else {
            return;
        };
        let (files, item) = (self.place.files, &self.items[number]);
        self.results[number] = files.store(&mut storing, item, &mut tail, file, moved);
        self.tails.push(tail);
    }

    fn lost(&mut self, number: usize) {
        if let Some(Storing {
            dir,
            name: Some(name),
            ..
        }) = self.in_flight[number].take()
        {
            let _ = beneath::unlink(&dir, &name);
        }
    }
}

/// State of a store before its bytes are written.
enum Begun {
    /// The object is there; the bytes of its file.
    There(u64),
    Writing(OwnedFd),
}

impl Files {
    fn storing(&self, item: &StoreItem, scope: LookupScope) -> Result<Storing, L2Error> {
        let object = &item.object;
        item.from.check_len(object.len)?;
        let (place, others) = self.places(&object.key, scope);
        // Writing a small object is cheaper than a lookup.
        let is_blind =
            scope.is_single() && object.len <= MAX_UNCHECKED_BYTES && self.unnamed.is_possible();
        Ok(Storing {
            dir: self.base.current(),
            place,
            others: others.collect(),
            looks: !is_blind,
            replaces: false,
            tries: 0,
            is_beside: false,
            name: None,
            body: 0,
        })
    }

    /// Creates the file unless the object is there.
    fn begin(
        &self,
        storing: &mut Storing,
        item: &StoreItem,
        tail: &mut Tail,
    ) -> Result<Begun, L2Error> {
        let object = &item.object;
        while storing.tries < MAX_ATTEMPTS {
            storing.tries += 1;
            storing.is_beside = self.create_in_place.load(Ordering::Relaxed);
            // Such a file is renamed, which does not show whether another was there.
            storing.looks |= storing.is_beside;
            let place = &storing.place;
            if storing.looks {
                match self.there(&storing.dir, place, object)? {
                    There::Nothing => {}
                    There::Object(bytes) => return Ok(Begun::There(bytes)),
                    // Its own place is looked up first, so the file there has to be the object.
                    There::Other => storing.replaces = true,
                    There::Foreign => {
                        let message =
                            format!("in the place of {:?} is no file", shown_path(&place.path));
                        return Err(L2Error::new(ErrorKind::Refused, message));
                    }
                }
            }
            for other in storing.others.iter().filter(|_| !storing.replaces) {
                if let There::Object(bytes) = self.there(&storing.dir, other, object)? {
                    self.found_at(other);
                    return Ok(Begun::There(bytes));
                }
            }
            let direct = self.is_direct(&item.from);
            storing.body = self.tail(place, item, direct, tail)?;
            match self.make(storing, direct) {
                Ok((file, name)) => {
                    storing.name = name;
                    return Ok(Begun::Writing(file));
                }
                Err(Errno::NOENT) => self.restore(storing)?,
                Err(error) => return Err(io::refused("make a file for", &place.path, error)),
            }
        }
        let message = format!(
            "the directory of {:?} is removed, or the file made, again and again",
            shown_path(&storing.place.path)
        );
        Err(L2Error::new(ErrorKind::Unavailable, message))
    }

    /// Names the file after its bytes are written, and starts again after a conflict.
    fn store(
        &self,
        storing: &mut Storing,
        item: &StoreItem,
        tail: &mut Tail,
        mut file: OwnedFd,
        mut moved: Moved,
    ) -> Result<Stored, L2Error> {
        loop {
            match self.end(storing, item, tail, file, moved) {
                Ok(()) => {
                    if storing.replaces {
                        count(&self.counters.replaced);
                    }
                    return Ok(Stored::Written(storing.body + tail.len() as u64));
                }
                Err(Failed::Taken) => storing.looks = true,
                Err(Failed::NoDirectory) => self.restore(storing)?,
                // This holds for all files.
                Err(Failed::Apart) if !storing.is_beside => {
                    self.create_in_place.store(true, Ordering::Relaxed);
                }
                Err(Failed::Apart) => {
                    let path = &storing.place.path;
                    return Err(io::refused("name", path, Errno::XDEV));
                }
                Err(Failed::Error(error)) => return Err(error),
            }
            file = match self.begin(storing, item, tail)? {
                Begun::Writing(file) => file,
                Begun::There(bytes) => return Ok(Stored::AlreadyThere(bytes)),
            };
            let written = self
                .engine
                .write((file.as_fd(), 0), &item.from, storing.body, tail);
            moved = written.map(|()| (0, None));
        }
    }

    fn restore(&self, storing: &mut Storing) -> Result<(), L2Error> {
        let made = self.base.restored();
        storing.dir = made.map_err(|error| io::refused("make", "the base directory", error))?;
        Ok(())
    }

    /// Names and closes the file.
    fn end(
        &self,
        storing: &mut Storing,
        item: &StoreItem,
        tail: &[u8],
        file: OwnedFd,
        moved: Moved,
    ) -> Result<(), Failed> {
        let (dir, place) = (&storing.dir, &storing.place);
        let name = storing.name.take();
        let written = self
            .written(&file, place, item, (storing.body, tail), moved)
            .map_err(Failed::Error)
            .and_then(|()| self.publish(dir, file, name.as_deref(), place));
        if let (Err(_), Some(name)) = (&written, name) {
            let _ = beneath::unlink(dir, &name);
        }
        written
    }

    /// Creates the file to write to; returns its temporary name if it has one.
    fn make(&self, storing: &Storing, direct: bool) -> Result<(OwnedFd, Option<String>), Errno> {
        let (dir, place) = (&storing.dir, &storing.place.path);
        if storing.is_beside {
            base::make_parents(dir, place)?;
            let inside = &place[..place.rfind('/').map_or(0, |at| at + 1)];
            let Temporary { path, file } = self.base.create(dir, inside, OFlags::WRONLY, direct)?;
            return Ok((file, Some(path)));
        }
        if !storing.replaces && self.unnamed.is_possible() {
            match self.unnamed.create(dir, direct) {
                Ok(file) => return Ok((file, None)),
                // The directory is another one than at the start.
                Err(Errno::OPNOTSUPP | Errno::ISDIR) => self.unnamed.disable(),
                // File systems differ in the error for a removed directory; the other way shows it.
                Err(_) => {}
            }
        }
        let inside = self.base.temporary();
        let Temporary { path, file } = self.base.create(dir, inside, OFlags::WRONLY, direct)?;
        Ok((file, Some(path)))
    }

    /// Returns the tail, and the bytes of the object before it.
    fn tail(
        &self,
        place: &Place,
        item: &StoreItem,
        direct: bool,
        tail: &mut Tail,
    ) -> Result<u64, L2Error> {
        let object = &item.object;
        let text = place.text.as_deref().unwrap_or_default();
        let text_len = u16::try_from(text.len()).map_err(|_| {
            let message = format!("a key of {} bytes is too long", text.len());
            L2Error::new(ErrorKind::Refused, message)
        })?;
        let trailer = Trailer {
            text_len,
            key: key_digest(place, object),
            ..Trailer::new(object, item.from.checksum()?)
        };
        let rest = if direct { object.len % BLOCK } else { 0 };
        let body = object.len - rest;
        tail.resize((file_len(object.len, text.len(), self.align, direct) - body) as usize);
        tail.fill(0);
        let mut unaligned = Vec::new();
        item.from.read_into(body, rest, &mut unaligned)?;
        tail[..unaligned.len()].copy_from_slice(&unaligned);
        let end_at = tail.len() - LEN;
        let (before, end) = tail.split_at_mut(end_at);
        end.copy_from_slice(&trailer.encode());
        let text_at = before.len() - text.len();
        before[text_at..].copy_from_slice(text.as_bytes());
        Ok(body)
    }

    /// Checks the result of a write and syncs the file if configured.
    fn written(
        &self,
        file: &OwnedFd,
        place: &Place,
        item: &StoreItem,
        (body, tail): (u64, &[u8]),
        moved: Moved,
    ) -> Result<(), L2Error> {
        let refused = |error| io::refused("write", &place.path, error);
        let mut written = moved.map(|_| ());
        if let Err(error) = &written
            && self.direct
            && io::refuses_direct(error)
        {
            self.note_not_direct(error);
            io::leave_direct(file).map_err(refused)?;
            written = self.engine.write((file.as_fd(), 0), &item.from, body, tail);
        }
        written.map_err(|error| io::failed("write", &place.path, &error))?;
        if self.fsync != Fsync::Never {
            self.engine.sync(file.as_fd()).map_err(refused)?;
        }
        Ok(())
    }

    /// Publishes a written file under its name.
    fn publish(
        &self,
        dir: &OwnedFd,
        file: OwnedFd,
        temporary: Option<&str>,
        place: &Place,
    ) -> Result<(), Failed> {
        match temporary {
            Some(temporary) => {
                let refused = |error| Failed::Error(io::refused("write", &place.path, error));
                io::close(file).map_err(refused)?;
                let rename = || beneath::rename(dir, temporary, &place.path);
                self.name(dir, place, rename)?;
            }
            None => self.name(dir, place, || self.unnamed.name(&file, dir, &place.path))?,
        }
        if self.fsync == Fsync::FileAndDir {
            let refused = |error| Failed::Error(io::refused("name", &place.path, error));
            self.sync_parents(dir, &place.path).map_err(refused)?;
        }
        Ok(())
    }

    /// Runs `name` and creates missing directories first.
    fn name(
        &self,
        dir: &OwnedFd,
        place: &Place,
        name: impl Fn() -> Result<(), Errno>,
    ) -> Result<(), Failed> {
        let mut named = name();
        if named == Err(Errno::NOENT) {
            match base::make_parents(dir, &place.path) {
                Ok(()) => named = name(),
                failed => named = failed,
            }
        }
        named.map_err(|error| match error {
            Errno::NOENT => Failed::NoDirectory,
            Errno::EXIST => Failed::Taken,
            Errno::XDEV => Failed::Apart,
            error => Failed::Error(io::refused("name", &place.path, error)),
        })
    }

    /// Syncs the directory of a name and those above it, which may be new.
    fn sync_parents(&self, dir: &OwnedFd, path: &str) -> Result<(), Errno> {
        for (end, _) in path.rmatch_indices('/') {
            let parent = beneath::open(dir, &path[..end], base::DIR_FLAGS, Mode::empty())?;
            self.engine.sync(parent.as_fd())?;
        }
        self.engine.sync(dir.as_fd())
    }
}

pub(super) fn key_digest(place: &Place, object: &ObjectSpec) -> u128 {
    match &place.text {
        Some(text) => kvtier_memory::checksum::checksum128(text.as_bytes()),
        None => kvtier_l2::key_digest(&object.key),
    }
}

impl Files {
    /// Checks a place without comparing the bytes of the object.
    fn there(&self, dir: &OwnedFd, place: &Place, object: &ObjectSpec) -> Result<There, L2Error> {
        let Some(seen) = stat(dir, &place.path)? else {
            return Ok(There::Nothing);
        };
        if !is_file(&seen) {
            return Ok(There::Foreign);
        }
        if self.unreadable.remove(&seen) {
            return Ok(There::Other);
        }
        let Some(form) = form_of(size(&seen), object.len, place.text_len(), self.align) else {
            return Ok(There::Other);
        };
        let refused = |error| io::refused("read", &place.path, error);
        let file = match beneath::open(dir, &place.path, READ_FLAGS, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(There::Nothing),
            // It can never be read.
            Err(Errno::ACCESS | Errno::PERM) => return Ok(There::Other),
            Err(error) => return Err(refused(error)),
        };
        let end = match read_end(&file, size(&seen), place.text_len()) {
            Err(error) if io::is_unreadable(error) => return Ok(There::Other),
            end => end.map_err(refused)?,
        };
        let is_object = match (form, end) {
            (Form::Bare, end) => self.accepts(form, object) && end.is_none(),
            (Form::Trailed, None) => false,
            (Form::Trailed, Some((trailer, text))) => {
                trailer.is_of(object, key_digest(place, object))
                    && text == place.text.as_deref().unwrap_or_default().as_bytes()
            }
        };
        Ok(if is_object {
            There::Object(size(&seen))
        } else {
            There::Other
        })
    }
}
