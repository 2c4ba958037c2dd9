//! Entries of the prompt memory, in two generations: the young one is being filled.
//!
//! Nothing in here allocates, hashes or frees while the caller holds its lock: tables are allocated at full
//! capacity, entries are passed in, and removed ones are returned.

use crate::hashing::ChunkHash;
use hashbrown::HashTable;
use kvtier_common::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(super) type Table = HashTable<RememberedChunk>;

/// Bytes of heap an entry takes beside its chunk's raw bytes: two hashes and the allocator's own.
const ENTRY_BYTES: usize = 2 * ChunkHash::LEN + 16;

/// Bytes a table takes per entry of its capacity: an entry and a control byte, where a table of a power of two of
/// slots is filled to 7/16 at worst.
const SLOT_BYTES: usize = (size_of::<RememberedChunk>() + 1) * 16 / 7 + 1;

/// Most entries that one prompt moves into the young generation, which bounds how long the lock is held (about 0.2
/// ms). A longer prompt is remembered over as many requests as it takes.
pub(super) const MAX_ARRIVALS: usize = 4096;

/// One remembered chunk.
#[derive(Debug, Default)]
pub(super) struct RememberedChunk {
    /// Keyed hash of the previous chunk's hash and the raw bytes; where the entry is found, never a proof.
    key: u64,
    /// The key of the chunk that followed last time, which spares most walks computing it; 0 when none did.
    next: AtomicU64,
    /// The previous chunk's hash, this chunk's hash, then the raw bytes of its token ids.
    bytes: Box<[u8]>,
}

impl RememberedChunk {
    /// Remembers that the token ids `raw` behind `previous` have the hash `hash`.
    pub(super) fn new(key: u64, previous: &ChunkHash, hash: &ChunkHash, raw: &[u8]) -> Self {
        let bytes = [&previous.0[..], &hash.0, raw].concat().into_boxed_slice();
        Self {
            key,
            next: AtomicU64::new(0),
            bytes,
        }
    }

    pub(super) fn key(&self) -> u64 {
        self.key
    }

    pub(super) fn next(&self) -> &AtomicU64 {
        &self.next
    }

    /// If this is the chunk that follows `previous` in `data`: its hash, and how many bytes of `data` it takes.
    ///
    /// No token id's encoding is the start of another's, so equal bytes are the same number of the same tokens.
    fn follows(&self, previous: &ChunkHash, data: &[u8]) -> Option<(ChunkHash, usize)> {
        let (before, rest) = self.bytes.split_first_chunk()?;
        let (hash, raw) = rest.split_first_chunk()?;
        (*before == previous.0 && data.starts_with(raw)).then_some((ChunkHash(*hash), raw.len()))
    }

    /// What the entry takes of a generation's limits.
    pub(super) fn size(&self) -> Size {
        // The two hashes are counted in both.
        let bytes = self.bytes.len() + ENTRY_BYTES - 2 * ChunkHash::LEN;
        Size { entries: 1, bytes }
    }
}

/// Entries and the bytes they take, without the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) entries: usize,
    pub(super) bytes: usize,
}

impl Size {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            entries: self.entries + other.entries,
            bytes: self.bytes + other.bytes,
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            entries: self.entries - other.entries,
            bytes: self.bytes - other.bytes,
        }
    }

    /// All bytes, the entries' places in their table included.
    pub(super) fn with_table(self) -> usize {
        self.bytes + self.entries * SLOT_BYTES
    }
}

/// The most that one generation holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct GenerationLimits(Size);

impl GenerationLimits {
    /// Limits that keep a generation, its table included, within `bytes`.
    pub(super) fn new(bytes: usize, chunk_size: usize) -> Self {
        // A token id takes at least one byte.
        let smallest = (SLOT_BYTES + ENTRY_BYTES).saturating_add(chunk_size);
        let entries = bytes / smallest;
        let bytes = bytes - entries * SLOT_BYTES;
        Self(Size { entries, bytes })
    }

    pub(super) fn admit(&self, size: Size) -> bool {
        size.entries <= self.0.entries && size.bytes <= self.0.bytes
    }

    /// A table with capacity for a whole generation.
    pub(super) fn table(&self) -> Table {
        Table::with_capacity(self.0.entries)
    }
}

/// Entries of about the same age.
#[derive(Debug)]
struct Generation {
    table: Table,
    size: Size,
}

impl Generation {
    fn new(table: Table) -> Self {
        Self {
            table,
            size: Size::default(),
        }
    }

    fn find(&self, key: u64) -> Option<&RememberedChunk> {
        self.table.find(key, |entry| entry.key == key)
    }

    fn insert(&mut self, entry: RememberedChunk) {
        // The caller checked the capacity, so the table does not grow.
        debug_assert!(self.table.len() < self.table.capacity());
        self.size = self.size.plus(entry.size());
        self.table
            .insert_unique(entry.key, entry, |entry| entry.key);
    }

    fn remove(&mut self, key: u64) -> Option<RememberedChunk> {
        let found = self.table.find_entry(key, |entry| entry.key == key).ok()?;
        let (entry, _) = found.remove();
        self.size = self.size.minus(entry.size());
        Some(entry)
    }
}

/// All entries. A key is in at most one generation, and at most once.
#[derive(Debug)]
pub(super) struct Generations {
    limits: GenerationLimits,
    young: Generation,
    old: Generation,
}

/// A known chunk of a prompt.
pub(super) struct FoundChunk<'a> {
    pub(super) entry: &'a RememberedChunk,
    pub(super) is_old: bool,
    pub(super) hash: ChunkHash,
    /// Bytes of its token ids.
    pub(super) length: usize,
}

/// What a walk used or made, on its way into the young generation.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// Keys of used entries of the old generation.
    aging: Vec<u64>,
    /// New entries in prompt order.
    pub(super) fresh: Vec<RememberedChunk>,
    /// What all of them take.
    pub(super) size: Size,
    /// The key of the last used entry, which the first of `fresh` follows; none at the start of a prompt.
    pub(super) last: Option<u64>,
}

impl Arrivals {
    /// Notes that an entry was used.
    pub(super) fn use_entry(&mut self, found: &FoundChunk<'_>) {
        self.last = Some(found.entry.key);
        if found.is_old && self.size.entries < MAX_ARRIVALS {
            self.aging.push(found.entry.key);
            self.size = self.size.plus(found.entry.size());
        }
    }

    /// Adds a new entry, which follows the one before. Refuses it when a generation could not hold them all, or when
    /// moving them in would take too long.
    pub(super) fn push(&mut self, entry: RememberedChunk, limits: &GenerationLimits) -> bool {
        let size = self.size.plus(entry.size());
        if size.entries > MAX_ARRIVALS || !limits.admit(size) {
            return false;
        }
        if let Some(before) = self.fresh.last() {
            before.next.store(entry.key, Relaxed);
        }
        self.size = size;
        self.fresh.push(entry);
        true
    }
}

impl Generations {
    pub(super) fn new(limits: GenerationLimits) -> Self {
        Self {
            limits,
            young: Generation::new(limits.table()),
            old: Generation::new(Table::new()),
        }
    }

    /// The entry with this key, if it really is the chunk behind `previous` at the start of `data`.
    pub(super) fn find(
        &self,
        key: u64,
        previous: &ChunkHash,
        data: &[u8],
    ) -> Option<FoundChunk<'_>> {
        let (entry, is_old) = self.entry(key)?;
        let (hash, length) = entry.follows(previous, data)?;
        Some(FoundChunk {
            entry,
            is_old,
            hash,
            length,
        })
    }

    fn entry(&self, key: u64) -> Option<(&RememberedChunk, bool)> {
        let young = self.young.find(key).map(|entry| (entry, false));
        young.or_else(|| self.old.find(key).map(|entry| (entry, true)))
    }

    /// Whether the young generation has to grow old before it takes this much.
    pub(super) fn must_turn(&self, arriving: Size) -> bool {
        !self.limits.admit(self.young.size.plus(arriving))
    }

    /// Makes the young generation the old one, and `table` the young one. Returns the entries that were old.
    pub(super) fn turn(&mut self, table: Table) -> Retired {
        let grown = std::mem::replace(&mut self.young, Generation::new(table));
        Retired(std::mem::replace(&mut self.old, grown))
    }

    /// Takes `arrivals` in, as far as they are still where a walk saw them, or not there yet. The caller has
    /// checked the capacity. Entries not needed stay in `arrivals`.
    pub(super) fn admit(&mut self, arrivals: &mut Arrivals, retired: Option<&mut Retired>) {
        // Entries that were old during the walk have just been retired if there was a turn.
        let from = match retired {
            Some(Retired(generation)) => generation,
            None => &mut self.old,
        };
        for &key in &arrivals.aging {
            if let Some(entry) = from.remove(key) {
                self.young.insert(entry);
            }
        }
        if let Some(first) = arrivals.fresh.first()
            && let Some((last, _)) = arrivals.last.and_then(|key| self.entry(key))
        {
            last.next.store(first.key, Relaxed);
        }
        for entry in &mut arrivals.fresh {
            // Another thread may have read the same prompt in the meantime.
            if self.entry(entry.key).is_none() {
                self.young.insert(std::mem::take(entry));
            }
        }
    }

    /// Sizes are those of the entries and within the limits; a key is held once.
    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        let mut keys = std::collections::HashSet::new();
        for generation in [&self.young, &self.old] {
            let sum = |size: Size, entry: &RememberedChunk| size.plus(entry.size());
            assert_eq!(
                generation.table.iter().fold(Size::default(), sum),
                generation.size
            );
            assert!(self.limits.admit(generation.size));
            assert!(generation.table.iter().all(|entry| keys.insert(entry.key)));
        }
    }

    /// Entries of both generations.
    pub(super) fn size(&self) -> Size {
        self.young.size.plus(self.old.size)
    }
}

/// A generation that is no longer searched.
#[derive(Debug)]
pub(super) struct Retired(Generation);

impl Retired {
    pub(super) fn into_entries(self) -> hashbrown::hash_table::IntoIter<RememberedChunk> {
        self.0.table.into_iter()
    }
}
