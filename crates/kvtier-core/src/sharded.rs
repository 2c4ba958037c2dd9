//! A table from hashes to numbers that grows without a long pause.

use hashbrown::HashTable;

/// Shards, selected by the hash's top bits. A full shard grows alone, so no call waits for a move of the whole table.
const SHARDS: usize = 256;

#[derive(Clone, Copy, Debug)]
struct ShardEntry {
    /// Low half of the hash: spares most comparisons of keys, and all of them while a shard grows.
    tag: u32,
    number: u32,
}

/// Table from hashes to numbers. The caller has the keys and compares them.
#[derive(Debug)]
pub(crate) struct Sharded {
    shards: Vec<HashTable<ShardEntry>>,
}

impl Default for Sharded {
    fn default() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| HashTable::new()).collect(),
        }
    }
}

/// Spreads a tag over the bits the table looks at: the low ones for the place, the top seven for the quick compare.
fn spread(tag: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(tag)
}

fn shard(hash: u64) -> usize {
    (hash >> 56) as usize
}

impl Sharded {
    /// The number among those with this hash that `matches` accepts.
    pub(crate) fn find(&self, hash: u64, mut matches: impl FnMut(u32) -> bool) -> Option<u32> {
        let tag = hash as u32;
        self.shards[shard(hash)]
            .find(spread(tag), |entry| {
                entry.tag == tag && matches(entry.number)
            })
            .map(|entry| entry.number)
    }

    /// Inserts a number whose key is not in the table.
    pub(crate) fn insert(&mut self, hash: u64, number: u32) {
        let tag = hash as u32;
        let entry = ShardEntry { tag, number };
        self.shards[shard(hash)].insert_unique(spread(tag), entry, |entry| spread(entry.tag));
    }

    /// Removes the number that `matches` accepts among those with this hash.
    pub(crate) fn remove(
        &mut self,
        hash: u64,
        mut matches: impl FnMut(u32) -> bool,
    ) -> Option<u32> {
        let tag = hash as u32;
        let found = self.shards[shard(hash)].find_entry(spread(tag), |entry| {
            entry.tag == tag && matches(entry.number)
        });
        Some(found.ok()?.remove().0.number)
    }

    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(HashTable::len).sum()
    }

    pub(crate) fn bookkeeping_bytes(&self) -> usize {
        let tables: usize = self.shards.iter().map(HashTable::allocation_size).sum();
        tables + SHARDS * size_of::<HashTable<ShardEntry>>()
    }
}
