//! Interned values: each has a small number.

use hashbrown::HashTable;

/// Bytes of the two counters of an `Arc`.
pub(super) const SHARED_COUNTERS: usize = 2 * size_of::<usize>();

/// Heap bytes of a shared name: the text and its counters.
pub(super) fn name_bytes(name: &str) -> usize {
    name.len() + SHARED_COUNTERS
}

/// Table from values to small numbers. The number of a removed value is reused.
#[derive(Debug)]
pub(super) struct Interner<T> {
    pub(super) entries: Vec<Option<T>>,
    free: Vec<u32>,
    table: HashTable<u32>,
}

impl<T> Default for Interner<T> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            table: HashTable::new(),
        }
    }
}

impl<T> Interner<T> {
    pub(super) fn find(&self, hash: u64, mut matches: impl FnMut(&T) -> bool) -> Option<u32> {
        self.table
            .find(hash, |&number| self.get(number).is_some_and(&mut matches))
            .copied()
    }

    /// The numbers of all values of a hash, and of others that share its place in the table.
    pub(super) fn of_hash(&self, hash: u64) -> impl Iterator<Item = u32> {
        self.table.iter_hash(hash).copied()
    }

    pub(super) fn get(&self, number: u32) -> Option<&T> {
        self.entries.get(number as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.entries.get_mut(number as usize)?.as_mut()
    }

    pub(super) fn insert(&mut self, hash: u64, value: T, rehash: impl Fn(&T) -> u64) -> u32 {
        let number = self.free.pop().unwrap_or(self.entries.len() as u32);
        match self.entries.get_mut(number as usize) {
            Some(entry) => *entry = Some(value),
            None => self.entries.push(Some(value)),
        }
        self.index(hash, number, rehash);
        number
    }

    fn index(&mut self, hash: u64, number: u32, rehash: impl Fn(&T) -> u64) {
        let entries = &self.entries;
        self.table.insert_unique(hash, number, |&other| {
            entries[other as usize].as_ref().map_or(0, &rehash)
        });
    }

    /// Adds the next number, with a value or free. For a table that has had no removal.
    pub(super) fn append(&mut self, entry: Option<(u64, T)>, rehash: impl Fn(&T) -> u64) {
        let number = self.entries.len() as u32;
        match entry {
            Some((hash, value)) => {
                self.entries.push(Some(value));
                self.index(hash, number, rehash);
            }
            None => {
                self.entries.push(None);
                self.free.push(number);
            }
        }
    }

    pub(super) fn remove(&mut self, hash: u64, number: u32) -> Option<T> {
        let found = self.table.find_entry(hash, |&other| other == number).ok()?;
        found.remove();
        self.free.push(number);
        self.entries[number as usize].take()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Option<T>>()
            + self.free.capacity() * size_of::<u32>()
            + self.table.allocation_size()
    }
}
