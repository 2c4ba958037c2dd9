//! Objects in memory and their accounting.
//!
//! The mutex guards both; no other lock is acquired inside.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::SystemTime;

use kvtier_common::sync::Mutex;
use kvtier_core::object_key::{KeyShape, ObjectKey};

use crate::adapter::{ListPage, Listed, Stored};
use crate::error::{ErrorKind, L2Error};
use crate::object::ObjectSpec;

/// Objects in memory up to a capacity. They outlive the adapters of the store.
#[derive(Debug)]
pub struct MemoryStore {
    capacity: u64,
    /// The objects and the sum of their bytes.
    objects: Mutex<Objects>,
}

#[derive(Debug, Default)]
struct Objects {
    by_key: BTreeMap<ObjectKey, MockObject>,
    used: u64,
}

/// One object. Tests may damage its bytes: their number is checked here, the bytes by the checksum wrapper.
#[derive(Debug, Clone)]
struct MockObject {
    len: u64,
    layout: u64,
    bytes: Arc<Vec<u8>>,
    used_at: u64,
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

impl Objects {
    fn remove(&mut self, key: &ObjectKey) -> bool {
        let removed = self.by_key.remove(key);
        self.used -= removed.as_ref().map_or(0, |kept| kept.len);
        removed.is_some()
    }
}

impl MemoryStore {
    /// Returns an empty store of `capacity` bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            objects: Mutex::default(),
        }
    }

    /// Returns the number of objects and their bytes.
    #[must_use]
    pub fn used(&self) -> (u64, u64) {
        let objects = self.objects.lock();
        (objects.by_key.len() as u64, objects.used)
    }

    /// Returns the capacity in bytes.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn find(&self, object: &ObjectSpec) -> Option<u64> {
        let objects = self.objects.lock();
        let kept = objects.by_key.get(&object.key)?;
        (kept.len == object.len && kept.layout == object.layout).then_some(kept.len)
    }

    /// Inserts an object and replaces one of another length or layout.
    pub(super) fn put(&self, object: &ObjectSpec, bytes: Vec<u8>) -> Result<Stored, L2Error> {
        let len = object.len;
        let kept = MockObject {
            len,
            layout: object.layout,
            bytes: Arc::new(bytes),
            used_at: now(),
        };
        let mut objects = self.objects.lock();
        let mut freed = 0;
        if let Some(there) = objects.by_key.get_mut(&object.key) {
            if there.len == len && there.layout == object.layout {
                there.used_at = now();
                return Ok(Stored::AlreadyThere(len));
            }
            freed = there.len;
        }
        let used = objects.used - freed;
        if len > self.capacity - used {
            let line = format!(
                "mock: {len} bytes do not fit, {used} of {} are used",
                self.capacity
            );
            return Err(L2Error::new(ErrorKind::Full, line));
        }
        objects.used = used + len;
        objects.by_key.insert(object.key.clone(), kept);
        Ok(Stored::Written(len))
    }

    /// Returns the bytes of an object. One whose length has changed is removed.
    pub(super) fn get(&self, object: &ObjectSpec) -> Result<Arc<Vec<u8>>, L2Error> {
        let error = |kind, what: &str| {
            let name = object.key.text().shown();
            L2Error::new(kind, format!("mock: {name} {what}"))
        };
        let kept = {
            let mut objects = self.objects.lock();
            let Some(kept) = objects.by_key.get_mut(&object.key) else {
                return Err(error(ErrorKind::NotFound, "is not there"));
            };
            if kept.len != object.len || kept.layout != object.layout {
                return Err(error(ErrorKind::Corrupt, "has another length or layout"));
            }
            kept.used_at = now();
            kept.clone()
        };
        if kept.bytes.len() as u64 == kept.len {
            return Ok(kept.bytes);
        }
        let mut objects = self.objects.lock();
        // It may have been stored again meanwhile.
        let there = objects.by_key.get(&object.key);
        if there.is_some_and(|there| Arc::ptr_eq(&there.bytes, &kept.bytes)) {
            objects.remove(&object.key);
        }
        Err(error(
            ErrorKind::Corrupt,
            "has not the length it was stored with",
        ))
    }

    pub(super) fn remove(&self, key: &ObjectKey) -> bool {
        self.objects.lock().remove(key)
    }

    /// Lists about `limit` objects behind the one that `from` names.
    pub(super) fn list(&self, from: Option<&str>, limit: usize) -> Result<ListPage, L2Error> {
        let after = match from.map(|name| ObjectKey::parse_name(name, Some(KeyShape::Grouped))) {
            None => Bound::Unbounded,
            Some(Ok(key)) => Bound::Excluded(key),
            Some(Err(error)) => {
                let line = format!("mock: invalid position of a listing: {error}");
                return Err(L2Error::new(ErrorKind::Refused, line));
            }
        };
        let objects = self.objects.lock();
        let mut rest = objects.by_key.range((after, Bound::Unbounded));
        let page: Vec<_> = rest
            .by_ref()
            .take(limit.max(1))
            .map(|(key, kept)| Listed {
                key: key.clone(),
                bytes: kept.len,
                used_at: kept.used_at,
            })
            .collect();
        let last = page.last().filter(|_| rest.next().is_some());
        let next = last.map(|last| last.key.text().name(KeyShape::Grouped));
        Ok(ListPage {
            objects: page,
            next,
        })
    }

    /// Damages an object, for tests; returns `false` if there is none.
    #[cfg(any(test, feature = "conformance"))]
    pub fn damage(&self, key: &ObjectKey, how: crate::conformance::Damage) -> bool {
        use crate::conformance::Damage;

        let mut objects = self.objects.lock();
        let Some(kept) = objects.by_key.get_mut(key) else {
            return false;
        };
        let bytes = Arc::make_mut(&mut kept.bytes);
        match how {
            Damage::Flip => bytes[kept.len as usize / 2] ^= 4,
            Damage::Truncate => bytes.truncate(kept.len as usize - 1),
            Damage::Extend => bytes.push(0),
            Damage::Empty => bytes.clear(),
            Damage::Remove => return objects.remove(key),
        }
        true
    }
}
