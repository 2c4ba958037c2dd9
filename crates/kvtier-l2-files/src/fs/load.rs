//! Loads: reading and verifying an object's file.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use kvtier_core::object_key::shown_path;
use kvtier_memory::uring::Tail;
use rustix::fs::{Advice, Mode, Stat};
use rustix::io::Errno;

use super::base::{is_file, open_direct};
use super::files::{Files, InFiles, LookupScope, READ_FLAGS, count, read_end, size};
use super::names::Place;
use super::store::key_digest;
use crate::io::{self, Batch, Move, Moved, Work};
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

/// File that is being read.
pub(super) struct Reading {
    /// Index of its place among those of its object.
    at: usize,
    place: Place,
    seen: Stat,
    form: Form,
    /// Bytes that are read into the destination; the rest is read into the tail.
    body: u64,
    /// Bytes of the tail that the file has.
    wanted: usize,
}

type Loads<'a> = Batch<InFiles<'a>, LoadItem, Reading, Loaded>;

impl Files {
    /// Loads objects; one result each.
    pub(super) fn load_all(&self, items: Vec<LoadItem>) -> Vec<Result<Loaded, L2Error>> {
        Loads::new(self.of_batch(), items).run(&*self.engine)
    }
}

impl Work for Loads<'_> {
    fn next(&mut self) -> Option<Move> {
        while let Some(item) = self.items.get(self.begun) {
            let number = self.begun;
            self.begun += 1;
            if let Err(error) = item.to.check_len(item.object.len) {
                self.results[number] = Err(error);
                continue;
            }
            let mut tail = self.tails.pop().unwrap_or_default();
            match self
                .place
                .files
                .find(item, self.place.scope, 0, not_found(), &mut tail)
            {
                Ok((reading, file)) => {
                    let (body, size) = (reading.body, Some(size(&reading.seen)));
                    self.in_flight[number] = Some(reading);
                    return Some(Move {
                        number,
                        file,
                        at: 0,
                        buffer: item.to.clone(),
                        body,
                        tail,
                        size,
                    });
                }
                Err(error) => {
                    self.results[number] = Err(error);
                    self.tails.push(tail);
                }
            }
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
        let Some(reading) = self.in_flight[number].take() else {
            return;
        };
        let (files, item) = (self.place.files, &self.items[number]);
        let read = files.judge(&reading, &file, &mut tail, item, moved);
        self.results[number] = match read {
            Err(error) if is_miss(&error) => {
                files.load_from(item, self.place.scope, reading.at + 1, error, &mut tail)
            }
            read => read,
        };
        self.tails.push(tail);
    }

    fn lost(&mut self, number: usize) {
        self.in_flight[number] = None;
    }
}

fn not_found() -> L2Error {
    L2Error::new(ErrorKind::NotFound, "there is no such file")
}

/// Whether the object may be intact in another place.
fn is_miss(error: &L2Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::Corrupt | ErrorKind::Unreadable
    )
}

impl Files {
    /// Reads an object from the first of its places from `from` on that has it.
    fn load_from(
        &self,
        item: &LoadItem,
        scope: LookupScope,
        mut from: usize,
        mut miss: L2Error,
        tail: &mut Tail,
    ) -> Result<Loaded, L2Error> {
        loop {
            let (reading, file) = self.find(item, scope, from, miss, tail)?;
            let moved = self.engine.read(
                (file.as_fd(), 0),
                &item.to,
                reading.body,
                tail,
                size(&reading.seen),
            );
            match self.judge(&reading, &file, tail, item, moved) {
                Err(error) if is_miss(&error) => (from, miss) = (reading.at + 1, error),
                read => return read,
            }
        }
    }

    /// Opens the first candidate file from place `from` on; `miss` if there is none.
    fn find(
        &self,
        item: &LoadItem,
        scope: LookupScope,
        from: usize,
        mut miss: L2Error,
        tail: &mut Tail,
    ) -> Result<(Reading, OwnedFd), L2Error> {
        let dir = self.base.dir();
        let (place, others) = self.places(&item.object.key, scope);
        let places = std::iter::once(place).chain(others);
        for (at, place) in places.enumerate().skip(from) {
            match self.open(&dir, at, place, item, tail) {
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
        place: Place,
        item: &LoadItem,
        tail: &mut Tail,
    ) -> Result<Option<(Reading, OwnedFd)>, L2Error> {
        let refused = |error| io::refused("read", &place.path, error);
        let is_direct = self.is_direct(&item.to);
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
        let form = match form_of(size(&seen), item.object.len, place.text_len(), self.align) {
            Some(form) if !self.accepts(form, &item.object) => return Ok(None),
            Some(form) => form,
            None => {
                let verdict = self.judge_misfit(&file, &seen, &place, item)?;
                return self.finish(verdict, &place, &seen).map(|_| None);
            }
        };
        if let Some(bytes) = self.read_ahead {
            // Only advice.
            let bytes = std::num::NonZeroU64::new(bytes);
            let _ = rustix::fs::fadvise(&file, 0, bytes, Advice::WillNeed);
        }
        let block = if is_direct { BLOCK } else { 1 };
        let body = item.object.len - item.object.len % block;
        let wanted = (size(&seen) - body) as usize;
        tail.resize(wanted.next_multiple_of(block as usize));
        let reading = Reading {
            at,
            place,
            seen,
            form,
            body,
            wanted,
        };
        Ok(Some((reading, file)))
    }

    /// Verifies the bytes that were read.
    fn judge(
        &self,
        reading: &Reading,
        file: &OwnedFd,
        tail: &mut Tail,
        item: &LoadItem,
        moved: Moved,
    ) -> Result<Loaded, L2Error> {
        let moved = match moved {
            Err(error) if self.direct && io::refuses_direct(&error) => {
                self.note_not_direct(&error);
                match io::leave_direct(file) {
                    Ok(()) => {
                        let size = size(&reading.seen);
                        let (to, body) = (&item.to, reading.body);
                        self.engine.read((file.as_fd(), 0), to, body, tail, size)
                    }
                    Err(_) => Err(error),
                }
            }
            moved => moved,
        };
        let verdict = self.verdict(reading, file, tail, item, moved)?;
        let loaded = self.finish(verdict, &reading.place, &reading.seen)?;
        self.found_at(&reading.place);
        Ok(loaded)
    }

    /// Handles a verdict.
    fn finish(&self, verdict: Verdict, place: &Place, seen: &Stat) -> Result<Loaded, L2Error> {
        match verdict {
            Verdict::Object(loaded) => Ok(loaded),
            Verdict::OtherLayout => {
                count(&self.counters.other_layout);
                let message = format!("{:?} is of another layout", shown_path(&place.path));
                Err(L2Error::new(ErrorKind::NotFound, message))
            }
            Verdict::OtherVersion(version) => {
                if self.counters.other_version.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::info!(
                        base_path = %self.base.path().display(),
                        version,
                        "files of another release found; they are misses until stores replace them"
                    );
                }
                let message = format!("{:?} has version {version}", shown_path(&place.path));
                Err(L2Error::new(ErrorKind::NotFound, message))
            }
            Verdict::Unreadable => {
                count(&self.counters.unreadable);
                self.unreadable.add(seen);
                let message = format!("the disk failed to read {:?}", shown_path(&place.path));
                Err(L2Error::new(ErrorKind::Unreadable, message))
            }
            Verdict::Damaged(why) => Err(self.quarantine(&self.base.dir(), &place.path, seen, why)),
        }
    }

    fn verdict(
        &self,
        reading: &Reading,
        file: &OwnedFd,
        tail: &[u8],
        item: &LoadItem,
        moved: Moved,
    ) -> Result<Verdict, L2Error> {
        let Reading {
            place, form, body, ..
        } = reading;
        let (len, size) = (item.object.len, size(&reading.seen));
        let (tail, sum) = match moved {
            Ok((read, sum)) if read >= size => (&tail[..reading.wanted], sum),
            Ok(_) => return Ok(Verdict::Damaged("became shorter while it was read")),
            Err(error) if io::reason(&error).is_some_and(io::is_unreadable) => {
                return Ok(Verdict::Unreadable);
            }
            Err(error) => return Err(io::failed("read", &place.path, &error)),
        };
        let rest = (len - body) as usize;
        item.to.write(*body, &tail[..rest])?;
        if *form == Form::Bare {
            return self.judge_bare(file, size, place, item);
        }
        let Some(trailer) = Trailer::decode(tail) else {
            return Ok(Verdict::Damaged("has a damaged trailer"));
        };
        if trailer.version != trailer::VERSION {
            return Ok(Verdict::OtherVersion(trailer.version));
        }
        let text = place.text.as_deref().unwrap_or_default();
        let before = &tail[rest..tail.len() - LEN];
        if trailer.key != key_digest(place, &item.object) || !before.ends_with(text.as_bytes()) {
            return Ok(Verdict::Damaged("is of another object"));
        }
        if !trailer.is_of(&item.object, trailer.key) {
            return Ok(Verdict::OtherLayout);
        }
        let sum = match sum {
            Some(sum) if rest == 0 => sum,
            _ => item.to.checksum()?,
        };
        if trailer.data != sum {
            return Ok(Verdict::Damaged("does not have the bytes that were stored"));
        }
        Ok(Verdict::Object(Loaded { verified: true }))
    }

    /// Verifies a file without a trailer: LMCache's, or a file of kvtier of another length.
    fn judge_bare(
        &self,
        file: &OwnedFd,
        size: u64,
        place: &Place,
        item: &LoadItem,
    ) -> Result<Verdict, L2Error> {
        Ok(match self.trailer_at_end(file, size) {
            Err(error) if io::is_unreadable(error) => Verdict::Unreadable,
            Err(error) => return Err(io::refused("read", &place.path, error)),
            Ok(None) => {
                count(&self.counters.unverified);
                Verdict::Object(Loaded { verified: false })
            }
            Ok(Some(trailer)) if trailer.version != trailer::VERSION => {
                Verdict::OtherVersion(trailer.version)
            }
            Ok(Some(trailer)) if trailer.key == key_digest(place, &item.object) => {
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
        place: &Place,
        item: &LoadItem,
    ) -> Result<Verdict, L2Error> {
        let key = key_digest(place, &item.object);
        // A padded one may be the object itself, padded for another alignment.
        let is_padded = self.align > 1;
        let is_other = |trailer: Trailer| {
            trailer.key == key && (is_padded || !trailer.is_of(&item.object, key))
        };
        Ok(match self.trailer_at_end(file, size(seen)) {
            Err(error) if io::is_unreadable(error) => Verdict::Unreadable,
            Err(error) => return Err(io::refused("read", &place.path, error)),
            Ok(Some(trailer)) if trailer.version != trailer::VERSION => {
                Verdict::OtherVersion(trailer.version)
            }
            Ok(Some(trailer)) if is_other(trailer) => Verdict::OtherLayout,
            Ok(_) => Verdict::Damaged("has a wrong length"),
        })
    }

    fn trailer_at_end(&self, file: &OwnedFd, size: u64) -> Result<Option<Trailer>, Errno> {
        if io::is_direct(file) {
            // The end is not aligned to a block.
            io::leave_direct(file)?;
        }
        Ok(read_end(file, size, 0)?.map(|(trailer, _)| trailer))
    }
}
