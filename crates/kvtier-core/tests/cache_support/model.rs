//! The cache as one would write it without thinking of speed: lists searched from end to end.

use super::FirstFit;
use kvtier_core::cache::{Extent, ExtentAllocator, KeyOutcome};
use std::collections::BTreeMap;

/// Which space, which chunk.
pub type Key = (usize, u32);
/// An object for as long as it has memory.
pub type Id = usize;

#[derive(Debug)]
pub struct Object {
    pub key: Key,
    pub extent: Extent,
    pub leases: u32,
}

#[derive(Debug)]
pub struct Model {
    pub memory: FirstFit,
    evicts: bool,
    next: Id,
    pub objects: BTreeMap<Id, Object>,
    pub staged: Vec<Id>,
    pub resident: BTreeMap<Key, Id>,
    /// Resident objects without leases, the next to leave first.
    pub order: Vec<Id>,
    pub evicted: u64,
    pub refused: u64,
}

/// What a writer holds: the request, the position in it, and the object.
pub type ModelStaged = (usize, usize, Id);

impl Model {
    pub fn new(memory: FirstFit, evicts: bool) -> Self {
        Self {
            memory,
            evicts,
            next: 0,
            objects: BTreeMap::new(),
            staged: Vec::new(),
            resident: BTreeMap::new(),
            order: Vec::new(),
            evicted: 0,
            refused: 0,
        }
    }

    fn bytes<'a>(&self, ids: impl IntoIterator<Item = &'a Id>) -> u64 {
        ids.into_iter().map(|id| self.objects[id].extent.len).sum()
    }

    pub fn resident_bytes(&self) -> u64 {
        self.bytes(self.resident.values())
    }

    pub fn staged_bytes(&self) -> u64 {
        self.bytes(&self.staged)
    }

    pub fn leased(&self) -> usize {
        let leased = |id: &&Id| self.objects[id].leases > 0;
        self.resident.values().filter(leased).count()
    }

    fn is_resident(&self, id: Id) -> bool {
        self.resident.get(&self.objects[&id].key) == Some(&id)
    }

    pub fn pin(&mut self, id: Id) {
        self.objects.get_mut(&id).unwrap().leases += 1;
        self.order.retain(|&other| other != id);
    }

    pub fn unpin(&mut self, id: Id) {
        let object = self.objects.get_mut(&id).unwrap();
        object.leases -= 1;
        if object.leases == 0 {
            if self.is_resident(id) {
                self.order.push(id);
            } else {
                self.free(id);
            }
        }
    }

    fn free(&mut self, id: Id) {
        let object = self.objects.remove(&id).unwrap();
        self.memory.free(object.extent);
    }

    fn touch(&mut self, id: Id) {
        if self.order.contains(&id) {
            self.order.retain(|&other| other != id);
            self.order.push(id);
        }
    }

    pub fn touch_all(&mut self, space: usize, chunks: &[u32]) -> usize {
        let ids: Vec<_> = chunks
            .iter()
            .filter_map(|&c| self.resident.get(&(space, c)))
            .copied()
            .collect();
        for &id in ids.iter().rev() {
            self.touch(id);
        }
        ids.len()
    }

    fn allocate(&mut self, len: u64) -> Option<Extent> {
        let evictable = self.bytes(&self.order);
        let all = self.bytes(self.objects.keys());
        let movable = if self.evicts { all - evictable } else { all };
        // With nothing to evict, both ways of saying no are the same.
        if self.evicts && len > self.memory.capacity().saturating_sub(movable) {
            return None;
        }
        loop {
            if let Some(extent) = self.memory.allocate(len) {
                return Some(extent);
            }
            self.evict_one()?;
        }
    }

    fn evict_one(&mut self) -> Option<u64> {
        if !self.evicts || self.order.is_empty() {
            return None;
        }
        let id = self.order.remove(0);
        self.resident.remove(&self.objects[&id].key);
        let bytes = self.objects[&id].extent.len;
        self.free(id);
        self.evicted += 1;
        Some(bytes)
    }

    pub fn evict(&mut self, bytes: u64, objects: usize) -> (usize, u64) {
        let mut evicted = (0, 0);
        while evicted.1 < bytes && evicted.0 < objects {
            let Some(bytes) = self.evict_one() else { break };
            evicted = (evicted.0 + 1, evicted.1 + bytes);
        }
        evicted
    }

    pub fn reserve(
        &mut self,
        requests: &[(usize, Vec<u32>, u64)],
    ) -> (Vec<KeyOutcome>, Vec<ModelStaged>) {
        let mut held = Vec::new();
        for (request, (space, chunks, _)) in requests.iter().enumerate() {
            for (position, &chunk) in chunks.iter().enumerate() {
                if let Some(&id) = self.resident.get(&(*space, chunk)) {
                    self.pin(id);
                    held.push((position, request, id));
                }
            }
        }
        let (mut outcomes, mut staged) = (Vec::new(), Vec::new());
        for (request, (space, chunks, len)) in requests.iter().enumerate() {
            for (position, &chunk) in chunks.iter().enumerate() {
                if held
                    .iter()
                    .any(|held| (held.0, held.1) == (position, request))
                {
                    outcomes.push(KeyOutcome::AlreadyResident);
                } else if let Some(extent) = self.allocate(*len) {
                    let object = Object {
                        key: (*space, chunk),
                        extent,
                        leases: 0,
                    };
                    self.objects.insert(self.next, object);
                    self.staged.push(self.next);
                    staged.push((request, position, self.next));
                    self.next += 1;
                    outcomes.push(KeyOutcome::Reserved(extent));
                } else {
                    self.refused += 1;
                    outcomes.push(KeyOutcome::NoMemory);
                }
            }
        }
        held.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        for (_, _, id) in held {
            self.unpin(id);
        }
        (outcomes, staged)
    }

    /// Gives the counts (inserted, duplicates, aborted), and with `lease` the objects leased, in `staged`'s order.
    pub fn commit(
        &mut self,
        staged: &[ModelStaged],
        keep: impl Fn(usize) -> bool,
        lease: bool,
    ) -> ((usize, usize, usize), Vec<Id>) {
        let mut order: Vec<usize> = (0..staged.len()).collect();
        order.sort_by(|&a, &b| {
            let (a, b) = (staged[a], staged[b]);
            b.1.cmp(&a.1).then(a.0.cmp(&b.0))
        });
        let mut counts = (0, 0, 0);
        let mut leased = vec![0; staged.len()];
        for at in order {
            let id = staged[at].2;
            self.staged.retain(|&other| other != id);
            let key = self.objects[&id].key;
            let mut now_resident = id;
            if !keep(at) {
                counts.2 += 1;
                self.free(id);
                continue;
            } else if let Some(&first) = self.resident.get(&key) {
                counts.1 += 1;
                self.free(id);
                self.touch(first);
                now_resident = first;
            } else {
                counts.0 += 1;
                self.resident.insert(key, id);
                self.order.push(id);
            }
            if lease {
                self.pin(now_resident);
                leased[at] = now_resident;
            }
        }
        (counts, if lease { leased } else { Vec::new() })
    }

    /// Tries every length from the longest. Gives it, and for each row where its chunks start and what they are.
    pub fn lookup(
        &mut self,
        rows: &[(usize, Option<u32>)],
        chunks: &[u32],
    ) -> (usize, Vec<(usize, Vec<Id>)>) {
        let first = |window: Option<u32>, hit: usize| match window {
            None => 0,
            Some(window) => hit.saturating_sub(window.max(1) as usize),
        };
        let serves = |hit: &usize| {
            !rows.is_empty()
                && rows.iter().all(|&(space, window)| {
                    let needed = &chunks[first(window, *hit)..*hit];
                    needed
                        .iter()
                        .all(|&chunk| self.resident.contains_key(&(space, chunk)))
                })
        };
        let hit = (1..=chunks.len()).rev().find(serves).unwrap_or(0);
        let rows: Vec<_> = rows
            .iter()
            .map(|&(space, window)| {
                let start = first(window, hit);
                let needed = chunks[start..hit].iter();
                (
                    start,
                    needed
                        .map(|&c| self.resident[&(space, c)])
                        .collect::<Vec<_>>(),
                )
            })
            .collect();
        for (_, ids) in &rows {
            for &id in ids {
                self.pin(id);
            }
        }
        (hit, rows)
    }

    pub fn remove(&mut self, key: Key, force: bool) -> Option<bool> {
        let &id = self.resident.get(&key)?;
        if self.objects[&id].leases > 0 && !force {
            return Some(false);
        }
        self.resident.remove(&key);
        self.order.retain(|&other| other != id);
        if self.objects[&id].leases == 0 {
            self.free(id);
        }
        Some(true)
    }
}
