//! Stores and loads of a batch.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_memory::uring::Tail;

use super::RawObjects;
use super::format::{BLOCK, RawRecord, span};
use super::index::{RawObject, RawPlace};
use crate::io::{self, FileOperation, FileStep, Move, Moved};
use kvtier_l2::{Buffer, ErrorKind, L2Error, LoadItem, Loaded, StoreItem, Stored};

/// Store of one object.
pub(super) struct RawWrite<'a> {
    objects: &'a RawObjects,
    item: StoreItem,
    writing: Option<RecordWrite>,
}

/// An object that is being written.
struct RecordWrite {
    record: RawRecord,
    encoded: Vec<u8>,
    place: RawPlace,
}

/// Load of one object.
pub(super) struct RawRead<'a> {
    objects: &'a RawObjects,
    item: LoadItem,
    /// The object, and its bytes before the tail.
    reading: Option<(Arc<RawObject>, u64)>,
}

/// How an object is moved: the bytes of its memory, those of the tail behind, and by which descriptor.
struct Shape {
    body: u64,
    tail: u64,
    is_aligned: bool,
}

impl Shape {
    fn of(objects: &RawObjects, buffer: &Buffer, len: u64) -> Self {
        let is_aligned = objects.device.is_direct() && buffer.is_aligned(BLOCK);
        let rest = if is_aligned { len % BLOCK } else { 0 };
        Self {
            body: len - rest,
            // Of an empty object, one block is moved.
            tail: if len == 0 {
                BLOCK
            } else {
                rest.next_multiple_of(BLOCK)
            },
            is_aligned,
        }
    }
}

impl<'a> RawWrite<'a> {
    pub(super) fn new(objects: &'a RawObjects, item: StoreItem) -> Self {
        Self {
            objects,
            item,
            writing: None,
        }
    }

    /// Why there is no place for an object.
    fn full(&self) -> L2Error {
        let usage = self.objects.index.usage();
        let what = if usage.free_records == 0 {
            "no record is free; slot_bytes is the size of the smaller objects"
        } else if usage.free_bytes < span(self.item.object.len) {
            "the device is full"
        } else {
            "no piece of the device is large enough"
        };
        L2Error::new(ErrorKind::Full, what)
    }
}

impl FileOperation for RawWrite<'_> {
    type Done = Stored;

    fn begin(&mut self, number: usize, tail: &mut Tail) -> Result<FileStep<Stored>, L2Error> {
        let (objects, StoreItem { object, from }) = (self.objects, &self.item);
        from.check_len(object.len)?;
        let sum = from.checksum()?;
        let is_there = |there: &Arc<RawObject>| {
            there.record.is_of(object)
                && there.record.sum == sum
                && !there.is_unreadable.load(Ordering::Relaxed)
        };
        if let Some(there) = objects.index.get(&object.key).filter(is_there) {
            return Ok(FileStep::Done(Stored::AlreadyThere(there.bytes())));
        }
        let reserved = objects.index.reserve(object.len);
        let (place, sequence) = reserved.ok_or_else(|| self.full())?;
        let record = RawRecord {
            number: place.number,
            sequence,
            key: object.key.clone(),
            len: object.len,
            layout: object.layout,
            sum,
            offset: place.offset,
            stored_at: super::now(),
        };
        let encoded = record
            .encode(&objects.device.superblock.id)
            .ok_or_else(|| {
                let message = format!("a key of more than {} bytes", super::format::MAX_KEY);
                L2Error::new(ErrorKind::Refused, message)
            })?;
        let shape = Shape::of(objects, from, object.len);
        tail.resize(shape.tail as usize);
        tail.fill(0);
        let mut rest = Vec::new();
        from.read_into(shape.body, object.len - shape.body, &mut rest)?;
        tail[..rest.len()].copy_from_slice(&rest);
        let one = Move {
            number,
            file: objects.device.file(shape.is_aligned)?,
            at: objects.device.offset_of(place.offset),
            buffer: from.clone(),
            body: shape.body,
            tail: std::mem::take(tail),
            size: None,
        };
        self.writing = Some(RecordWrite {
            record,
            encoded,
            place,
        });
        Ok(FileStep::Moving(one))
    }

    fn end(self, _: OwnedFd, _: &mut Tail, moved: Moved) -> Result<Stored, L2Error> {
        let objects = self.objects;
        let RecordWrite {
            record,
            encoded,
            place,
        } = self.writing.ok_or_else(io::lost)?;
        moved.map_err(|error| objects.failed("write to", &error))?;
        place.recording();
        let mut block = Tail::default();
        block.resize(encoded.len());
        block.copy_from_slice(&encoded);
        let at = objects.device.geometry().record_at(record.number);
        let written = objects.device.write(&block, at);
        written.map_err(|error| objects.device.error("write a record of", error))?;
        let object = Arc::new(RawObject {
            record,
            is_unreadable: AtomicBool::new(false),
            place,
        });
        let bytes = object.bytes();
        if let Some(older) = objects.index.insert(object) {
            objects.release(&older);
        }
        Ok(Stored::Written(bytes))
    }

    fn lost(self) {
        // The system may still write there.
        if let Some(writing) = self.writing {
            writing.place.recording();
        }
    }
}

impl<'a> RawRead<'a> {
    pub(super) fn new(objects: &'a RawObjects, item: LoadItem) -> Self {
        Self {
            objects,
            item,
            reading: None,
        }
    }
}

impl FileOperation for RawRead<'_> {
    type Done = Loaded;

    fn begin(&mut self, number: usize, tail: &mut Tail) -> Result<FileStep<Loaded>, L2Error> {
        let (objects, LoadItem { object, to }) = (self.objects, &self.item);
        to.check_len(object.len)?;
        let found = objects.find(object).ok_or_else(|| {
            L2Error::new(ErrorKind::NotFound, "there is no such object on the device")
        })?;
        let shape = Shape::of(objects, to, object.len);
        tail.resize(shape.tail as usize);
        let one = Move {
            number,
            file: objects.device.file(shape.is_aligned)?,
            at: objects.device.offset_of(found.place.offset),
            buffer: to.clone(),
            body: shape.body,
            tail: std::mem::take(tail),
            size: Some(shape.body + shape.tail),
        };
        self.reading = Some((found, shape.body));
        Ok(FileStep::Moving(one))
    }

    fn end(self, _: OwnedFd, tail: &mut Tail, moved: Moved) -> Result<Loaded, L2Error> {
        let (objects, LoadItem { object, to }) = (self.objects, &self.item);
        let (found, body) = self.reading.ok_or_else(io::lost)?;
        let damaged = |kind, what: &str| {
            objects.damaged.fetch_add(1, Ordering::Relaxed);
            if kind == ErrorKind::Unreadable {
                found.is_unreadable.store(true, Ordering::Relaxed);
            } else if objects.index.remove_this(&found) {
                objects.release(&found);
            }
            let path = objects.device.path().display();
            Err(L2Error::new(
                kind,
                format!("{path}, an object at {}: {what}", found.place.offset),
            ))
        };
        let (read, sum) = match moved {
            Ok(moved) => moved,
            Err(error) if io::reason(&error).is_some_and(io::is_unreadable) => {
                return damaged(ErrorKind::Unreadable, "the device failed to read it");
            }
            Err(error) => return Err(objects.failed("read from", &error)),
        };
        if read < body + tail.len() as u64 {
            return damaged(ErrorKind::Corrupt, "the device has become smaller");
        }
        let rest = (object.len - body) as usize;
        to.write(body, &tail[..rest])?;
        let sum = match sum {
            Some(sum) if rest == 0 => sum,
            _ => to.checksum()?,
        };
        if sum != found.record.sum {
            return damaged(
                ErrorKind::Corrupt,
                "its bytes are not those that were stored",
            );
        }
        Ok(Loaded { verified: true })
    }
}
