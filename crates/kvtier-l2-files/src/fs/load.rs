//! Loads: reading and verifying an object's file.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use kvtier_core::object_key::shown_path;
use kvtier_memory::uring::Tail;
use rustix::fs::{Advice, Mode, Stat};
use rustix::io::Errno;

use super::base::{is_file, open_direct};
use super::files::{Files, LookupScope, READ_FLAGS, count, read_end, size};
use super::names::FilePlace;
use crate::io::{self, FileOperation, FileStep, Move, Moved};
use kvtier_l2::trailer::{self, BLOCK, Form, LEN, Trailer, form_of};
use kvtier_l2::{ErrorKind, L2Error, LoadItem, Loaded};

/// Result of verifying a file.
enum Verdict {
    Object(Loaded),
    /// An object of the same key, intact, but of another layout.
    OtherLayout,
    /// An intact file whose layout cannot be compared, as another release wrote it.
    OtherVersion(u16),
    Damaged(&'static str),
    /// Read error of the disk.
    Unreadable,
}

/// File that may have the object.
struct FileCandidate {
    /// Index of its place among those of the object.
    at: usize,
    place: FilePlace,
    seen: Stat,
    form: Form,
    /// Bytes that are read into the destination; the rest is read into the tail.
    body: u64,
    /// Bytes of the tail that the file has.
    wanted: usize,
}

/// Load of one object.
struct FileRead<'a> {
    files: &'a Files,
    item: LoadItem,
    scope: LookupScope,
    /// File that is being read.
    candidate: Option<FileCandidate>,
}

/// Loads objects; one result each.
pub(super) fn load(files: &Files, items: Vec<LoadItem>) -> Vec<Result<Loaded, L2Error>> {
    let scope = files.lookup_scope();
    let loads = items.into_iter().map(|item| FileRead {
        files,
        item,
        scope,
        candidate: None,
    });
    io::run(&*files.engine, loads)
}

impl FileOperation for FileRead<'_> {
    type Done = Loaded;

    fn begin(&mut self, number: usize, tail: &mut Tail) -> Result<FileStep<Loaded>, L2Error> {
        self.item.to.check_len(self.item.object.len)?;
        let miss = L2Error::new(ErrorKind::NotFound, "there is no such file");
        let (candidate, file) = self.find(0, miss, tail)?;
        let one = Move {
            number,
            file,
            at: 0,
            buffer: self.item.to.clone(),
            body: candidate.body,
            tail: std::mem::take(tail),
            size: Some(size(&candidate.seen)),
        };
        self.candidate = Some(candidate);
        Ok(FileStep::Moving(one))
    }

    /// Verifies the file, and reads those of the places behind it if it is not the object.
    fn end(
        mut self,
        mut file: OwnedFd,
        tail: &mut Tail,
        mut moved: Moved,
    ) -> Result<Loaded, L2Error> {
        let mut candidate = self.candidate.take().ok_or_else(io::lost)?;
        loop {
            let miss = match self.judge(&candidate, &file, tail, moved) {
                Err(error) if is_miss(&error) => error,
                read => return read,
            };
            (candidate, file) = self.find(candidate.at + 1, miss, tail)?;
            moved = self.read(&candidate, &file, tail);
        }
    }
}

/// Whether the object may be intact in another place.
fn is_miss(error: &L2Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::Corrupt | ErrorKind::Unreadable
    )
}

impl FileRead<'_> {
    fn read(&self, candidate: &FileCandidate, file: &OwnedFd, tail: &mut Tail) -> Moved {
        let (engine, size) = (&self.files.engine, size(&candidate.seen));
        engine.read((file.as_fd(), 0), &self.item.to, candidate.body, tail, size)
    }

    /// Opens the first candidate from place `from` on; `miss` if there is none.
    fn find(
        &self,
        from: usize,
        mut miss: L2Error,
        tail: &mut Tail,
    ) -> Result<(FileCandidate, OwnedFd), L2Error> {
        let dir = self.files.base.dir();
        let (place, others) = self.files.places(&self.item.object.key, self.scope);
        let places = std::iter::once(place).chain(others);
        for (at, place) in places.enumerate().skip(from) {
            match self.open(&dir, at, place, tail) {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => {}
                Err(error) if is_miss(&error) => miss = error,
                Err(error) => return Err(error),
            }
        }
        Err(miss)
    }

    /// `None` if there is no file.
    fn open(
        &self,
        dir: &OwnedFd,
        at: usize,
        place: FilePlace,
        tail: &mut Tail,
    ) -> Result<Option<(FileCandidate, OwnedFd)>, L2Error> {
        let (files, LoadItem { object, to }) = (self.files, &self.item);
        let refused = |error| io::refused("read", &place.path, error);
        let is_direct = files.is_direct(to);
        let file = match open_direct(dir, &place.path, READ_FLAGS, Mode::empty(), is_direct) {
            Ok(file) => file,
            // A link is not kvtier's.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO) => return Ok(None),
            // It may be another program's: it stays until a store replaces it.
            Err(error @ (Errno::ACCESS | Errno::PERM)) => {
                let message = format!("{:?} may not be read: {error}", shown_path(&place.path));
                return Err(L2Error::new(ErrorKind::Corrupt, message));
            }
            Err(error) => return Err(refused(error)),
        };
        let seen = rustix::fs::fstat(&file).map_err(refused)?;
        if !is_file(&seen) {
            return Ok(None);
        }
        let form = match form_of(size(&seen), object.len, place.text_len(), files.align) {
            Some(form) if !files.accepts(form, object) => return Ok(None),
            Some(form) => form,
            None => {
                let verdict = self.judge_misfit(&file, &seen, &place)?;
                return self.finish(verdict, &place, &seen).map(|_| None);
            }
        };
        if let Some(bytes) = files.read_ahead {
            // Only advice.
            let bytes = std::num::NonZeroU64::new(bytes);
            let _ = rustix::fs::fadvise(&file, 0, bytes, Advice::WillNeed);
        }
        let block = if is_direct { BLOCK } else { 1 };
        let body = object.len - object.len % block;
        let wanted = (size(&seen) - body) as usize;
        tail.resize(wanted.next_multiple_of(block as usize));
        let candidate = FileCandidate {
            at,
            place,
            seen,
            form,
            body,
            wanted,
        };
        Ok(Some((candidate, file)))
    }

    /// Verifies the bytes that were read.
    fn judge(
        &self,
        candidate: &FileCandidate,
        file: &OwnedFd,
        tail: &mut Tail,
        mut moved: Moved,
    ) -> Result<Loaded, L2Error> {
        if let Err(error) = &moved
            && self.files.direct
            && io::refuses_direct(error)
        {
            self.files.note_not_direct(error);
            if io::leave_direct(file).is_ok() {
                moved = self.read(candidate, file, tail);
            }
        }
        let verdict = self.verdict(candidate, file, tail, moved)?;
        let loaded = self.finish(verdict, &candidate.place, &candidate.seen)?;
        self.files.found_at(&candidate.place);
        Ok(loaded)
    }

    /// Handles a verdict.
    fn finish(&self, verdict: Verdict, place: &FilePlace, seen: &Stat) -> Result<Loaded, L2Error> {
        let files = self.files;
        match verdict {
            Verdict::Object(loaded) => Ok(loaded),
            Verdict::OtherLayout => {
                count(&files.counters.other_layout);
                let message = format!("{:?} is of another layout", shown_path(&place.path));
                Err(L2Error::new(ErrorKind::NotFound, message))
            }
            Verdict::OtherVersion(version) => {
                if files.counters.other_version.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::info!(
                        base_path = %files.base.path().display(),
                        version,
                        "files of another release found; they are misses until stores replace them"
                    );
                }
                let message = format!("{:?} has version {version}", shown_path(&place.path));
                Err(L2Error::new(ErrorKind::NotFound, message))
            }
            Verdict::Unreadable => {
                count(&files.counters.unreadable);
                files.unreadable.insert(&self.item.object.key);
                let message = format!("the disk failed to read {:?}", shown_path(&place.path));
                Err(L2Error::new(ErrorKind::Unreadable, message))
            }
            Verdict::Damaged(why) => {
                Err(files.quarantine(&files.base.dir(), &place.path, seen, why))
            }
        }
    }

    fn verdict(
        &self,
        candidate: &FileCandidate,
        file: &OwnedFd,
        tail: &[u8],
        moved: Moved,
    ) -> Result<Verdict, L2Error> {
        let FileCandidate {
            place, form, body, ..
        } = candidate;
        let LoadItem { object, to } = &self.item;
        let (len, size) = (object.len, size(&candidate.seen));
        let (tail, sum) = match moved {
            Ok((read, sum)) if read >= size => (&tail[..candidate.wanted], sum),
            Ok(_) => return Ok(Verdict::Damaged("became shorter while it was read")),
            Err(error) if io::reason(&error).is_some_and(io::is_unreadable) => {
                return Ok(Verdict::Unreadable);
            }
            Err(error) => return Err(io::failed("read", &place.path, &error)),
        };
        let rest = (len - body) as usize;
        to.write(*body, &tail[..rest])?;
        if *form == Form::Bare {
            return self.judge_bare(file, size, place);
        }
        let Some(trailer) = Trailer::decode(tail) else {
            return Ok(Verdict::Damaged("has a damaged trailer"));
        };
        if trailer.version != trailer::VERSION {
            return Ok(Verdict::OtherVersion(trailer.version));
        }
        let text = place.text.as_deref().unwrap_or_default();
        let before = &tail[rest..tail.len() - LEN];
        if trailer.key != place.digest(object) || !before.ends_with(text.as_bytes()) {
            return Ok(Verdict::Damaged("is of another object"));
        }
        if !trailer.is_of(object, trailer.key) {
            return Ok(Verdict::OtherLayout);
        }
        let sum = match sum {
            Some(sum) if rest == 0 => sum,
            _ => to.checksum()?,
        };
        if trailer.data != sum {
            return Ok(Verdict::Damaged("does not have the bytes that were stored"));
        }
        Ok(Verdict::Object(Loaded { verified: true }))
    }

    /// Verifies a file without a trailer: LMCache's, or a file of kvtier of another length.
    fn judge_bare(&self, file: &OwnedFd, size: u64, place: &FilePlace) -> Result<Verdict, L2Error> {
        Ok(match trailer_at_end(file, size) {
            Err(error) if io::is_unreadable(error) => Verdict::Unreadable,
            Err(error) => return Err(io::refused("read", &place.path, error)),
            Ok(None) => {
                count(&self.files.counters.unverified);
                Verdict::Object(Loaded { verified: false })
            }
            Ok(Some(trailer)) if trailer.version != trailer::VERSION => {
                Verdict::OtherVersion(trailer.version)
            }
            Ok(Some(trailer)) if trailer.key == place.digest(&self.item.object) => {
                Verdict::OtherLayout
            }
            Ok(Some(_)) => Verdict::Damaged("is of another object"),
        })
    }

    /// Verifies a file with an impossible length for the object.
    fn judge_misfit(
        &self,
        file: &OwnedFd,
        seen: &Stat,
        place: &FilePlace,
    ) -> Result<Verdict, L2Error> {
        let object = &self.item.object;
        let key = place.digest(object);
        // A padded one may be the object itself, padded for another alignment.
        let is_padded = self.files.align > 1;
        let is_other =
            |trailer: Trailer| trailer.key == key && (is_padded || !trailer.is_of(object, key));
        Ok(match trailer_at_end(file, size(seen)) {
            Err(error) if io::is_unreadable(error) => Verdict::Unreadable,
            Err(error) => return Err(io::refused("read", &place.path, error)),
            Ok(Some(trailer)) if trailer.version != trailer::VERSION => {
                Verdict::OtherVersion(trailer.version)
            }
            Ok(Some(trailer)) if is_other(trailer) => Verdict::OtherLayout,
            Ok(_) => Verdict::Damaged("has a wrong length"),
        })
    }
}

fn trailer_at_end(file: &OwnedFd, size: u64) -> Result<Option<Trailer>, Errno> {
    if io::is_direct(file) {
        // The end is not aligned to a block.
        io::leave_direct(file)?;
    }
    Ok(read_end(file, size, 0)?.map(|(trailer, _)| trailer))
}
