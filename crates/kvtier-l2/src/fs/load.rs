//! Reading an object's file, and telling whether it is the object.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Advice, Mode, Stat};
use rustix::io::Errno;

use super::base::{is_file, open_direct};
use super::files::{Files, Look, READ_FLAGS, Scratch, count, read_end, size};
use super::io;
use super::names::Place;
use super::store::key_digest;
use super::trailer::{BLOCK, Form, LEN, Trailer, form_of};
use crate::adapter::Loaded;
use crate::error::{ErrorKind, L2Error};
use crate::object::LoadItem;

/// What a file's bytes are.
enum Verdict {
    Object(Loaded),
    /// An object of the same key, intact, but of another layout.
    OtherLayout,
    Damaged(&'static str),
    /// The disk failed.
    Unreadable,
}

impl Files {
    /// Reads one object.
    pub(super) fn load(
        &self,
        item: &LoadItem,
        look: Look,
        scratch: &mut Scratch,
    ) -> Result<Loaded, L2Error> {
        if item.to.len() != item.object.len {
            let message = format!("{} bytes of room for {}", item.to.len(), item.object.len);
            return Err(L2Error::new(ErrorKind::Refused, message));
        }
        let dir = self.base.dir();
        let (place, others) = self.places(&item.object.key, look);
        let mut miss = L2Error::new(ErrorKind::NotFound, "there is no such file");
        for place in std::iter::once(place).chain(others) {
            match self.load_from(&dir, &place, item, scratch) {
                Ok(Some(loaded)) => {
                    self.found_at(&place);
                    return Ok(loaded);
                }
                Ok(None) => {}
                // It may be whole in another place.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unreadable) =>
                {
                    miss = error;
                }
                Err(error) => return Err(error),
            }
        }
        Err(miss)
    }

    /// `None` if there is no file.
    fn load_from(
        &self,
        dir: &OwnedFd,
        place: &Place,
        item: &LoadItem,
        scratch: &mut Scratch,
    ) -> Result<Option<Loaded>, L2Error> {
        let refused = |error| io::refused("read", &place.path, error);
        let is_direct = self.is_direct(&item.to);
        let file = match open_direct(dir, &place.path, READ_FLAGS, Mode::empty(), is_direct) {
            Ok(file) => file,
            // A link is nothing of ours.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO) => return Ok(None),
            // Another's, for all we know: it stays until a store replaces it.
            Err(error @ (Errno::ACCESS | Errno::PERM)) => {
                let message = format!("{:?} may not be read: {error}", place.path);
                return Err(L2Error::new(ErrorKind::Corrupt, message));
            }
            Err(error) => return Err(refused(error)),
        };
        let seen = rustix::fs::fstat(&file).map_err(refused)?;
        if !is_file(&seen) {
            return Ok(None);
        }
        let verdict = match form_of(size(&seen), item.object.len, place.text_len()) {
            Some(form) if !self.accepts(form) => return Ok(None),
            Some(form) => self.read(&file, &seen, form, place, item, is_direct, scratch),
            None => self.judge_misfit(&file, &seen, place, item),
        };
        match verdict {
            Ok(Verdict::Object(loaded)) => Ok(Some(loaded)),
            Ok(Verdict::OtherLayout) => {
                let message = format!("{:?} is of another layout", place.path);
                Err(L2Error::new(ErrorKind::Corrupt, message))
            }
            Ok(Verdict::Unreadable) => {
                count(&self.counters.unreadable);
                self.unreadable.add(&seen);
                let message = format!("the disk failed to read {:?}", place.path);
                Err(L2Error::new(ErrorKind::Unreadable, message))
            }
            Ok(Verdict::Damaged(why)) => Err(self.put_aside(dir, &place.path, &seen, why)),
            Err(error) => Err(error),
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "each is one thing known of the file"
    )]
    fn read(
        &self,
        file: &OwnedFd,
        seen: &Stat,
        form: Form,
        place: &Place,
        item: &LoadItem,
        is_direct: bool,
        scratch: &mut Scratch,
    ) -> Result<Verdict, L2Error> {
        if let Some(bytes) = self.read_ahead {
            // Advice: without it the bytes come all the same.
            let bytes = std::num::NonZeroU64::new(bytes);
            let _ = rustix::fs::fadvise(file, 0, bytes, Advice::WillNeed);
        }
        let (len, size) = (item.object.len, size(seen));
        let block = if is_direct { BLOCK } else { 1 };
        let body = len - len % block;
        let wanted = (size - body) as usize;
        let tail = scratch.take(wanted.next_multiple_of(block as usize));
        let (tail, sum) = match self.read_bytes(file, item, body, tail, size) {
            Ok((read, sum)) if read >= size => (&tail[..wanted], sum),
            Ok(_) => return Ok(Verdict::Damaged("became shorter while it was read")),
            Err(error) if io::reason(&error) == Some(Errno::IO) => {
                return Ok(Verdict::Unreadable);
            }
            Err(error) => return Err(io::failed("read", &place.path, &error)),
        };
        let memory =
            |error: kvtier_memory::AccessError| L2Error::new(ErrorKind::Memory, error.to_string());
        let rest = (len - body) as usize;
        item.to.write(body, &tail[..rest]).map_err(memory)?;
        if form == Form::Bare {
            return self.judge_bare(file, size, place, item);
        }
        let Some(trailer) = Trailer::decode(tail) else {
            return Ok(Verdict::Damaged("has a damaged trailer"));
        };
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
            _ => item.to.checksum().map_err(memory)?,
        };
        if trailer.data != sum {
            return Ok(Verdict::Damaged("does not have the bytes that were stored"));
        }
        Ok(Verdict::Object(Loaded { verified: true }))
    }

    fn read_bytes(
        &self,
        file: &OwnedFd,
        item: &LoadItem,
        body: u64,
        tail: &mut [u8],
        size: u64,
    ) -> Result<(u64, Option<u128>), kvtier_memory::FileError> {
        let read = self.engine.read(file.as_fd(), &item.to, body, tail, size);
        match read {
            Err(error) if self.direct && io::refuses_direct(&error) => {
                self.note_not_direct(&error);
                if io::leave_direct(file).is_err() {
                    return Err(error);
                }
                self.engine.read(file.as_fd(), &item.to, body, tail, size)
            }
            read => read,
        }
    }

    /// A file without room for a trailer: LMCache's, or one of ours of another length.
    fn judge_bare(
        &self,
        file: &OwnedFd,
        size: u64,
        place: &Place,
        item: &LoadItem,
    ) -> Result<Verdict, L2Error> {
        Ok(match self.trailer_at_end(file, size) {
            Err(Errno::IO) => Verdict::Unreadable,
            Err(error) => return Err(io::refused("read", &place.path, error)),
            Ok(None) => {
                count(&self.counters.unverified);
                Verdict::Object(Loaded { verified: false })
            }
            Ok(Some(trailer)) if trailer.key == key_digest(place, &item.object) => {
                Verdict::OtherLayout
            }
            Ok(Some(_)) => Verdict::Damaged("is of another object"),
        })
    }

    /// A file whose length is none that this object's can have.
    fn judge_misfit(
        &self,
        file: &OwnedFd,
        seen: &Stat,
        place: &Place,
        item: &LoadItem,
    ) -> Result<Verdict, L2Error> {
        let key = key_digest(place, &item.object);
        let is_other = |trailer: Trailer| trailer.key == key && !trailer.is_of(&item.object, key);
        Ok(match self.trailer_at_end(file, size(seen)) {
            Err(Errno::IO) => Verdict::Unreadable,
            Err(error) => return Err(io::refused("read", &place.path, error)),
            Ok(Some(trailer)) if is_other(trailer) => Verdict::OtherLayout,
            Ok(_) => Verdict::Damaged("has a wrong length"),
        })
    }

    fn trailer_at_end(&self, file: &OwnedFd, size: u64) -> Result<Option<Trailer>, Errno> {
        if io::is_direct(file) {
            // The end is at no address of a block.
            io::leave_direct(file)?;
        }
        Ok(read_end(file, size, 0)?.map(|(trailer, _)| trailer))
    }
}
