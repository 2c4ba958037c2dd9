//! Stores and loads of a batch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_memory::uring::Tail;
use rustix::io::Errno;

use super::Shared;
use super::format::{BLOCK, Record, span};
use super::index::{Object, Place};
use crate::io::{self, Batch, Move, Moved, Work};
use kvtier_l2::{Buffer, ErrorKind, L2Error, LoadItem, Loaded, StoreItem, Stored};

/// An object that is being written.
pub(super) struct Writing {
    record: Record,
    encoded: Vec<u8>,
    place: Place,
}

pub(super) type Stores<'a> = Batch<&'a Shared, StoreItem, Writing, Stored>;
pub(super) type Loads<'a> = Batch<&'a Shared, LoadItem, Arc<Object>, Loaded>;

/// How an object is moved: the bytes of its memory, those of the tail behind, and by which descriptor.
struct Shape {
    body: u64,
    tail: u64,
    is_aligned: bool,
}

impl Shared {
    fn shape(&self, buffer: &Buffer, len: u64) -> Shape {
        let is_aligned = self.device.is_direct() && buffer.is_aligned(BLOCK);
        let rest = if is_aligned { len % BLOCK } else { 0 };
        Shape {
            body: len - rest,
            tail: rest.next_multiple_of(BLOCK),
            is_aligned,
        }
    }

    /// Returns the offset of an object on the device.
    fn at(&self, offset: u64) -> u64 {
        self.device.geometry().data_offset() + offset
    }
}

impl Work for Stores<'_> {
    fn next(&mut self) -> Option<Move> {
        while let Some(item) = self.items.get(self.begun) {
            let number = self.begun;
            self.begun += 1;
            let mut tail = self.tails.pop().unwrap_or_default();
            match self.place.begin_store(item, &mut tail) {
                Ok(Begun::Writing(writing, mut one)) => {
                    self.in_flight[number] = Some(*writing);
                    one.number = number;
                    one.tail = tail;
                    return Some(one);
                }
                Ok(Begun::There(bytes)) => self.results[number] = Ok(Stored::AlreadyThere(bytes)),
                Err(error) => self.results[number] = Err(error),
            }
            self.tails.push(tail);
        }
        None
    }

    fn done(&mut self, one: Move, moved: Moved) {
        let Move { number, tail, .. } = one;
        self.tails.push(tail);
        if let Some(writing) = self.in_flight[number].take() {
            self.results[number] = self.place.end_store(writing, moved);
        }
    }

    fn lost(&mut self, number: usize) {
        // The system may still write there.
        if let Some(writing) = self.in_flight[number].take() {
            writing.place.recording();
        }
    }
}

enum Begun {
    /// The object is there already; its bytes.
    There(u64),
    Writing(Box<Writing>, Move),
}

impl Shared {
    fn begin_store(&self, item: &StoreItem, tail: &mut Tail) -> Result<Begun, L2Error> {
        let StoreItem { object, from } = item;
        from.check_len(object.len)?;
        let sum = from.checksum()?;
        let is_there = |there: &Arc<Object>| {
            there.record.is_of(object)
                && there.record.sum == sum
                && !there.is_unreadable.load(Ordering::Relaxed)
        };
        if let Some(there) = self.index.get(&object.key).filter(is_there) {
            return Ok(Begun::There(there.bytes()));
        }
        let reserved = self.index.reserve(object.len);
        let (place, sequence) = reserved.ok_or_else(|| self.full(object.len))?;
        let record = Record {
            number: place.number,
            sequence,
            key: object.key.clone(),
            len: object.len,
            layout: object.layout,
            sum,
            offset: place.offset,
            stored_at: super::now(),
        };
        let encoded = record.encode(&self.device.superblock.id).ok_or_else(|| {
            let message = format!("a key of more than {} bytes", super::format::MAX_KEY);
            L2Error::new(ErrorKind::Refused, message)
        })?;
        let shape = self.shape(from, object.len);
        // Of an empty object, one block is written.
        let tail_len = if object.len == 0 { BLOCK } else { shape.tail };
        tail.resize(tail_len as usize);
        tail.fill(0);
        let mut rest = Vec::new();
        from.read_into(shape.body, object.len - shape.body, &mut rest)?;
        tail[..rest.len()].copy_from_slice(&rest);
        let one = Move {
            number: 0,
            file: self.device.file(shape.is_aligned)?,
            at: self.at(place.offset),
            buffer: from.clone(),
            body: shape.body,
            tail: Tail::default(),
            size: None,
        };
        let writing = Writing {
            record,
            encoded,
            place,
        };
        Ok(Begun::Writing(Box::new(writing), one))
    }

    /// Why there is no place for an object.
    fn full(&self, len: u64) -> L2Error {
        let usage = self.index.usage();
        let what = if usage.free_records == 0 {
            "no record is free; slot_bytes is the size of the smaller objects"
        } else if usage.free_bytes < span(len) {
            "the device is full"
        } else {
            "no piece of the device is large enough"
        };
        L2Error::new(ErrorKind::Full, what)
    }

    fn end_store(&self, writing: Writing, moved: Moved) -> Result<Stored, L2Error> {
        let Writing {
            record,
            encoded,
            place,
        } = writing;
        moved.map_err(|error| self.failed("write to", &error))?;
        place.recording();
        let mut block = Tail::default();
        block.resize(encoded.len());
        block.copy_from_slice(&encoded);
        let at = self.device.geometry().record_at(record.number);
        self.device
            .write(&block, at)
            .map_err(|error| self.device.error("write a record of", error))?;
        let object = Arc::new(Object {
            record,
            is_unreadable: AtomicBool::new(false),
            place,
        });
        let bytes = object.bytes();
        if let Some(older) = self.index.insert(object) {
            self.release(&older);
        }
        Ok(Stored::Written(bytes))
    }

    /// Erases the record of an object that is not in the index; its space is free when no load uses it.
    pub(super) fn release(&self, object: &Object) -> bool {
        let is_erased = self.erase(object.record.number).is_ok();
        if is_erased {
            object.place.erased();
        }
        is_erased
    }

    /// Erases a record.
    pub(super) fn erase(&self, number: u64) -> Result<(), Errno> {
        let mut block = Tail::default();
        block.resize(BLOCK as usize);
        block.fill(0);
        self.device
            .write(&block, self.device.geometry().record_at(number))
    }

    fn failed(&self, action: &str, error: &kvtier_memory::FileError) -> L2Error {
        io::failed(action, &self.device.path().to_string_lossy(), error)
    }
}

impl Work for Loads<'_> {
    fn next(&mut self) -> Option<Move> {
        while let Some(item) = self.items.get(self.begun) {
            let number = self.begun;
            self.begun += 1;
            let mut tail = self.tails.pop().unwrap_or_default();
            match self.place.begin_load(item, &mut tail) {
                Ok((object, mut one)) => {
                    self.in_flight[number] = Some(object);
                    one.number = number;
                    one.tail = tail;
                    return Some(one);
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
            number, body, tail, ..
        } = one;
        if let Some(object) = self.in_flight[number].take() {
            let item = &self.items[number];
            self.results[number] = self.place.end_load(&object, item, body, &tail, moved);
        }
        self.tails.push(tail);
    }

    fn lost(&mut self, number: usize) {
        self.in_flight[number] = None;
    }
}

impl Shared {
    fn begin_load(&self, item: &LoadItem, tail: &mut Tail) -> Result<(Arc<Object>, Move), L2Error> {
        let LoadItem { object, to } = item;
        to.check_len(object.len)?;
        let found = self.find(object).ok_or_else(|| {
            L2Error::new(ErrorKind::NotFound, "there is no such object on the device")
        })?;
        let shape = self.shape(to, object.len);
        // Of an empty object, the block that was written.
        let tail_len = if object.len == 0 { BLOCK } else { shape.tail };
        tail.resize(tail_len as usize);
        let one = Move {
            number: 0,
            file: self.device.file(shape.is_aligned)?,
            at: self.at(found.place.offset),
            buffer: to.clone(),
            body: shape.body,
            tail: Tail::default(),
            size: Some(shape.body + tail_len),
        };
        Ok((found, one))
    }

    pub(super) fn end_load(
        &self,
        object: &Arc<Object>,
        item: &LoadItem,
        body: u64,
        tail: &[u8],
        moved: Moved,
    ) -> Result<Loaded, L2Error> {
        let damaged = |kind, what: &str| {
            self.count_damaged();
            if kind == ErrorKind::Unreadable {
                object.is_unreadable.store(true, Ordering::Relaxed);
            } else if self.index.remove_this(object) {
                self.release(object);
            }
            let path = self.device.path().display();
            Err(L2Error::new(
                kind,
                format!("{path}, an object at {}: {what}", object.place.offset),
            ))
        };
        let (read, sum) = match moved {
            Ok(moved) => moved,
            Err(error) if io::reason(&error).is_some_and(io::is_unreadable) => {
                return damaged(ErrorKind::Unreadable, "the device failed to read it");
            }
            Err(error) => return Err(self.failed("read from", &error)),
        };
        if read < body + tail.len() as u64 {
            return damaged(ErrorKind::Corrupt, "the device has become smaller");
        }
        let rest = (item.object.len - body) as usize;
        item.to.write(body, &tail[..rest])?;
        let sum = match sum {
            Some(sum) if rest == 0 => sum,
            _ => item.to.checksum()?,
        };
        if sum != object.record.sum {
            return damaged(
                ErrorKind::Corrupt,
                "its bytes are not those that were stored",
            );
        }
        Ok(Loaded { verified: true })
    }
}
