//! Objects and free space of a device, in memory. The device belongs to this process, so what is not here is not there.
//!
//! The mutex guards both; no other lock is acquired inside, and no I/O is done.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use kvtier_common::sync::Mutex;
use kvtier_core::object_key::ObjectKey;

use super::format::{Geometry, RawRecord, span};
use super::space::Space;
use kvtier_l2::Listed;

/// The index of a device.
pub(super) struct Index {
    state: Mutex<IndexState>,
    /// Bytes whose records could not be erased: they are not used again before the next start.
    leaked: AtomicU64,
}

struct IndexState {
    objects: BTreeMap<ObjectKey, Arc<RawObject>>,
    space: Space,
    /// Numbers of unused records, the next one last.
    records: Vec<u64>,
    sequence: u64,
}

/// An object of the device.
pub(super) struct RawObject {
    pub(super) record: RawRecord,
    /// The device could not read its bytes. It keeps its space until it is replaced or deleted: others would fail there too.
    pub(super) is_unreadable: AtomicBool,
    pub(super) place: RawPlace,
}

impl RawObject {
    /// Returns the object's bytes on the device.
    pub(super) fn bytes(&self) -> u64 {
        span(self.record.len)
    }

    pub(super) fn listed(&self) -> Listed {
        Listed {
            key: self.record.key.clone(),
            bytes: self.bytes(),
            used_at: self.record.stored_at,
        }
    }
}

/// Space and record of an object. When it is dropped, after the last load, others may use them.
pub(super) struct RawPlace {
    index: Weak<Index>,
    pub(super) number: u64,
    pub(super) offset: u64,
    span: u64,
    /// Whether the device may have a record of it.
    is_recorded: AtomicBool,
}

impl RawPlace {
    /// Notes that the record is about to be written.
    pub(super) fn recording(&self) {
        self.is_recorded.store(true, Ordering::Release);
    }

    /// Notes that the record was erased.
    pub(super) fn erased(&self) {
        self.is_recorded.store(false, Ordering::Release);
    }
}

impl Drop for RawPlace {
    fn drop(&mut self) {
        let Some(index) = self.index.upgrade() else {
            return;
        };
        if *self.is_recorded.get_mut() {
            index.leaked.fetch_add(self.span, Ordering::Relaxed);
            return;
        }
        let mut state = index.state.lock();
        state.space.put(self.offset, self.span);
        state.records.push(self.number);
    }
}

/// Numbers for `/status`.
pub(super) struct Usage {
    pub(super) objects: usize,
    pub(super) free_bytes: u64,
    pub(super) free_records: usize,
    pub(super) leaked_bytes: u64,
}

impl Index {
    /// Returns the index of a device that was not scanned yet: nothing is there, and nothing is free.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(IndexState {
                objects: BTreeMap::new(),
                space: Space::default(),
                records: Vec::new(),
                sequence: 0,
            }),
            leaked: AtomicU64::new(0),
        })
    }

    /// Takes what a scan has found. Of two records that contradict each other, the one written later counts; returns the
    /// numbers of the others, which have to be erased before their space is used.
    ///
    /// `unreadable` are numbers of records that are not used.
    pub(super) fn fill(
        self: &Arc<Self>,
        geometry: Geometry,
        mut found: Vec<RawRecord>,
        unreadable: &[u64],
    ) -> Vec<u64> {
        found.sort_unstable_by_key(|record| std::cmp::Reverse(record.sequence));
        let mut used = vec![false; geometry.records as usize];
        let mut is_used = |number: u64| {
            if let Some(used) = used.get_mut(number as usize) {
                *used = true;
            }
        };
        unreadable.iter().for_each(|number| is_used(*number));
        let mut space = Space::new(geometry.data_bytes);
        let (mut objects, mut superseded) = (BTreeMap::new(), Vec::new());
        let sequence = found.first().map_or(0, |record| record.sequence);
        for record in found {
            is_used(record.number);
            let span = span(record.len);
            if objects.contains_key(&record.key) || !space.take_at(record.offset, span) {
                superseded.push(record.number);
                continue;
            }
            let place = self.place(record.number, record.offset, span, true);
            let object = RawObject {
                is_unreadable: AtomicBool::new(false),
                place,
                record,
            };
            objects.insert(object.record.key.clone(), Arc::new(object));
        }
        let numbers = (0..geometry.records).rev();
        let records = numbers.filter(|number| !used[*number as usize]).collect();
        *self.state.lock() = IndexState {
            objects,
            space,
            records,
            sequence,
        };
        superseded
    }

    /// Adds a record that was erased to the unused ones.
    pub(super) fn add_record(&self, number: u64) {
        self.state.lock().records.push(number);
    }

    fn place(self: &Arc<Self>, number: u64, offset: u64, span: u64, is_recorded: bool) -> RawPlace {
        RawPlace {
            index: Arc::downgrade(self),
            number,
            offset,
            span,
            is_recorded: AtomicBool::new(is_recorded),
        }
    }

    /// Takes space and a record for an object of `len` bytes, and the next sequence number; `None` if there is none.
    pub(super) fn reserve(self: &Arc<Self>, len: u64) -> Option<(RawPlace, u64)> {
        let span = span(len);
        let mut state = self.state.lock();
        let number = *state.records.last()?;
        let offset = state.space.take(span)?;
        state.records.pop();
        state.sequence += 1;
        Some((self.place(number, offset, span, false), state.sequence))
    }

    /// Adds an object whose record is written. Returns the one that it replaces: the older of both.
    pub(super) fn insert(&self, object: Arc<RawObject>) -> Option<Arc<RawObject>> {
        let mut state = self.state.lock();
        let there = state.objects.get(&object.record.key);
        if there.is_some_and(|there| there.record.sequence > object.record.sequence) {
            return Some(object);
        }
        state.objects.insert(object.record.key.clone(), object)
    }

    pub(super) fn get(&self, key: &ObjectKey) -> Option<Arc<RawObject>> {
        self.state.lock().objects.get(key).cloned()
    }

    pub(super) fn remove(&self, key: &ObjectKey) -> Option<Arc<RawObject>> {
        self.state.lock().objects.remove(key)
    }

    /// Removes this object; returns whether it was still there.
    pub(super) fn remove_this(&self, object: &Arc<RawObject>) -> bool {
        let mut state = self.state.lock();
        let there = state.objects.get(&object.record.key);
        let is_there = there.is_some_and(|there| Arc::ptr_eq(there, object));
        if is_there {
            state.objects.remove(&object.record.key);
        }
        is_there
    }

    /// At most `limit` objects behind a key.
    pub(super) fn page(&self, behind: Option<&ObjectKey>, limit: usize) -> Vec<Arc<RawObject>> {
        let from = behind.map_or(Bound::Unbounded, Bound::Excluded);
        let state = self.state.lock();
        let range = state.objects.range((from, Bound::Unbounded));
        range
            .take(limit)
            .map(|(_, object)| Arc::clone(object))
            .collect()
    }

    pub(super) fn usage(&self) -> Usage {
        let state = self.state.lock();
        Usage {
            objects: state.objects.len(),
            free_bytes: state.space.free(),
            free_records: state.records.len(),
            leaked_bytes: self.leaked.load(Ordering::Relaxed),
        }
    }
}
