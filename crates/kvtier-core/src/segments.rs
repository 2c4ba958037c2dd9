//! Index of segments: chunks of prompts that are found by their tokens wherever these stand in another prompt.
//!
//! A *segment* is a stored chunk that is not the first of its prompt. Every window of a prompt has a fingerprint, a rolling
//! hash modulo 2^61 - 1 whose base is secret. A window with the fingerprint of a segment matches only if 128 bits of a keyed
//! BLAKE3 of its tokens are equal too. Scope and chunk size are part of both, so one scope never matches another's text.
//!
//! | part | bytes per segment | |
//! | --- | --- | --- |
//! | ring of entries | 52 | the oldest is overwritten; memory is touched as it fills |
//! | their tags | 4 | upper halves of fingerprints, apart from the entries so that they are near each other |
//! | table of their numbers | 6.25 | open addressing with linear probing; removal shifts entries back and leaves no tombstone |
//! | filter | 1.6 | a byte per slot of the table, which keeps nearly all windows from the table and its cache misses |
//! | bitmap of changes | 1/8 | which records differ from the file |
//!
//! The lock guards the index alone: hashes are computed before it is acquired, and nothing is acquired inside.

use crate::{ChunkHash, Namespace};
use foldhash::HashSet;
use kvtier_common::sync::RwLock;

#[cfg(test)]
mod tests;

/// Separates the keys made here from those that others make of the same secret.
const CONTEXT: &str = "kvtier 2026 segments";
/// Modulus of the rolling hash, a Mersenne prime.
const PRIME: u64 = (1 << 61) - 1;
/// Terms of the rolling hash per reduction.
const TERMS: usize = 8;
/// Windows between two questions whether to go on.
const SLICE: usize = 4096;
/// Segments inserted per acquisition of the lock.
const BATCH: usize = 64;
/// Most segments of an index: numbers of entries leave bits for fingerprints in the table's slots.
const MAX_CAPACITY: usize = 1 << 28;
/// Chunk number of an entry that holds no segment.
const VACANT: u32 = u32::MAX;

/// Bytes of the tokens, within a scope.
type Content = [u8; 16];
/// Fingerprints and the contents that were compared with their windows.
type Compared = HashSet<(u64, Content)>;

/// What must be equal for text to be the same segment: model, groups and layouts of rank 0, tenant, chunk size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentScope([u8; 32]);

impl SegmentScope {
    /// The scope of the namespaces of rank 0's object groups, in their order.
    pub fn new<'a>(namespaces: impl IntoIterator<Item = &'a Namespace>, chunk_size: usize) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("kvtier 2026 segment scope");
        hasher.update(&(chunk_size as u64).to_le_bytes());
        for namespace in namespaces {
            for text in [namespace.model_name(), namespace.cache_salt()] {
                hasher.update(&(text.len() as u64).to_le_bytes());
                hasher.update(text.as_bytes());
            }
            hasher.update(&namespace.kv_rank().to_le_bytes());
            hasher.update(&namespace.object_group_id().to_le_bytes());
            hasher.update(&namespace.layout().to_le_bytes());
        }
        Self(hasher.finalize().into())
    }
}

/// Place in a prompt where the tokens of a segment stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentMatch {
    /// Hash of the chunk that holds the segment's KV.
    pub hash: ChunkHash,
    /// Token at which the chunk began in the prompt that was stored.
    pub old_start: usize,
    /// Token at which it begins in the prompt that was searched.
    pub start: usize,
    number: u32,
    content: Content,
}

/// Size of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentStats {
    /// Segments that are registered.
    pub segments: usize,
    /// Most segments at once.
    pub capacity: usize,
    /// Bytes of memory of a full index.
    pub bytes: usize,
}

#[derive(Clone, Copy)]
struct Entry {
    hash: ChunkHash,
    content: Content,
    /// Number of the chunk in its prompt, or [`VACANT`].
    chunk: u32,
}

/// Segment index of one server.
pub struct Segments {
    capacity: usize,
    /// Base of the rolling hash.
    base: u64,
    scope_key: [u8; 32],
    record_key: [u8; 32],
    index: RwLock<Index>,
}

impl Segments {
    /// Bytes of a record in the file.
    pub const RECORD_BYTES: usize = 72;

    /// An empty index of `capacity` segments, at most 2^28. Records are restored only under the secret they were made with.
    /// Texts with equal fingerprints, which cost time, can be computed from it alone.
    pub fn new(secret: [u8; 32], capacity: usize) -> Self {
        let capacity = capacity.min(MAX_CAPACITY);
        let mut keys = blake3::Hasher::new_derive_key(CONTEXT)
            .update(&secret)
            .finalize_xof();
        let [mut base, mut scope_key, mut record_key] = [[0; 32]; 3];
        for key in [&mut base, &mut scope_key, &mut record_key] {
            keys.fill(key);
        }
        Self {
            capacity,
            // Not one of the few small numbers with which the hash is no hash.
            base: 256 + word(&base) % (PRIME - 256),
            scope_key,
            record_key,
            index: RwLock::new(Index::new(capacity)),
        }
    }

    /// Registers chunks of a prompt: `hashes[i]` is the hash of chunk `first + i`, whose tokens are
    /// `tokens[i * chunk_size..]`. Chunk 0 is not registered, since it is found as a prefix. Content that is registered
    /// already gets the hash and the place given now, and keeps its age.
    pub fn register(
        &self,
        scope: &SegmentScope,
        chunk_size: usize,
        first: usize,
        hashes: &[ChunkHash],
        tokens: &[u32],
    ) {
        if chunk_size == 0 || self.capacity == 0 {
            return;
        }
        let windows = self.windows(scope, chunk_size);
        let chunks = (first..).zip(hashes).zip(tokens.chunks_exact(chunk_size));
        let mut entries = chunks.filter_map(|((number, hash), tokens)| {
            let chunk = u32::try_from(number).ok()?;
            (chunk != 0 && chunk != VACANT).then(|| {
                let entry = Entry {
                    hash: *hash,
                    content: windows.content(tokens),
                    chunk,
                };
                (tag(windows.fingerprint(windows.hash(tokens))), entry)
            })
        });
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            batch.extend(entries.by_ref().take(BATCH));
            if batch.is_empty() {
                return;
            }
            let mut index = self.index.write();
            for (tag, entry) in batch.drain(..) {
                index.register(tag, entry);
            }
        }
    }

    /// Places in `tokens`, from token `from` on, where the tokens of a segment stand: by position, without overlaps, each
    /// segment at its first place. `may_go_on` is asked every few thousand tokens, without a lock; `None` if it refused.
    pub fn find(
        &self,
        scope: &SegmentScope,
        chunk_size: usize,
        tokens: &[u32],
        from: usize,
        mut may_go_on: impl FnMut() -> bool,
    ) -> Option<Vec<SegmentMatch>> {
        let mut found = Vec::new();
        if chunk_size == 0 || self.index.read().live == 0 {
            return Some(found);
        }
        let windows = self.windows(scope, chunk_size);
        let count = (tokens.len() + 1).saturating_sub(chunk_size);
        let (mut fingerprints, mut candidates) = (Vec::new(), Vec::new());
        // What was compared is not compared again: text may repeat itself at every token.
        let mut compared = Compared::default();
        let (mut begin, mut at) = (from, from);
        while at < count {
            if at > from && !may_go_on() {
                return None;
            }
            begin = begin.max(at);
            let end = count.min(begin + SLICE);
            windows.roll(&tokens[begin..end + chunk_size - 1], &mut fingerprints);
            while at < end {
                let searched = &fingerprints[at - begin..];
                let index = self.index.read();
                let window = index.lookup(searched, &compared, &mut candidates);
                drop(index);
                at += window;
                let mut step = candidates.len().min(1);
                for (number, entry) in candidates.drain(..) {
                    compared.insert((searched[window], entry.content));
                    if windows.content(&tokens[at..at + chunk_size]) == entry.content {
                        step = chunk_size;
                        found.push(SegmentMatch {
                            hash: entry.hash,
                            old_start: entry.chunk as usize * chunk_size,
                            start: at,
                            number,
                            content: entry.content,
                        });
                    }
                }
                at += step;
            }
            begin = end;
        }
        Some(found)
    }

    /// Whether the tokens of all these segments stand at their places of a prompt.
    pub fn stand_in<'a>(
        &self,
        scope: &SegmentScope,
        chunk_size: usize,
        tokens: &[u32],
        matches: impl IntoIterator<Item = &'a SegmentMatch>,
    ) -> bool {
        let windows = self.windows(scope, chunk_size);
        matches.into_iter().all(|found| {
            let window = tokens.get(found.start..found.start + chunk_size);
            window.is_some_and(|window| windows.content(window) == found.content)
        })
    }

    /// Removes the segment of a match whose object exists nowhere any more, unless it was registered with another hash since.
    pub fn remove(&self, found: &SegmentMatch) {
        let mut index = self.index.write();
        let number = found.number as usize;
        let is_found = |entry: &Entry| entry.content == found.content && entry.hash == found.hash;
        if index.entries.get(number).is_some_and(is_found) {
            index.unlink(number);
            index.mark(number);
        }
    }

    /// Returns the index's size.
    pub fn stats(&self) -> SegmentStats {
        let index = self.index.read();
        SegmentStats {
            segments: index.live,
            capacity: self.capacity,
            bytes: self.capacity * (size_of::<Entry>() + size_of::<u32>())
                + size_of_val(&*index.slots)
                + size_of_val(&*index.filter)
                + size_of_val(&*index.changed),
        }
    }

    /// Records that differ from the file since they were last taken, at most `max`, each with its place in the file counted in
    /// records. One that is not written is missing or old after a restart, which does no harm.
    pub fn take_changes(&self, max: usize) -> Vec<(usize, [u8; Self::RECORD_BYTES])> {
        let changes = self.index.write().take_changes(max);
        let encode = |(place, sequence, tag, entry)| (place, self.encode(sequence, tag, &entry));
        changes.into_iter().map(encode).collect()
    }

    /// Restores the record at a place of the file. Records that are torn, of another secret or too old are ignored; those
    /// of another capacity get the places of this one. Returns whether the record holds a segment that was restored.
    pub fn restore(&self, place: usize, bytes: &[u8]) -> bool {
        let Some((sequence, tag, entry)) = self.decode(bytes) else {
            return false;
        };
        self.capacity > 0 && self.index.write().restore(place, sequence, tag, entry)
    }

    fn encode(&self, sequence: u64, tag: u32, entry: &Entry) -> [u8; Self::RECORD_BYTES] {
        let mut bytes = [0; Self::RECORD_BYTES];
        if entry.chunk == VACANT {
            return bytes;
        }
        bytes[..8].copy_from_slice(&sequence.to_le_bytes());
        bytes[8..40].copy_from_slice(&entry.hash.0);
        bytes[40..56].copy_from_slice(&entry.content);
        bytes[56..60].copy_from_slice(&entry.chunk.to_le_bytes());
        bytes[60..64].copy_from_slice(&tag.to_le_bytes());
        let check = blake3::keyed_hash(&self.record_key, &bytes[..64]);
        bytes[64..].copy_from_slice(&check.as_bytes()[..8]);
        bytes
    }

    fn decode(&self, bytes: &[u8]) -> Option<(u64, u32, Entry)> {
        let bytes: &[u8; Self::RECORD_BYTES] = bytes.try_into().ok()?;
        let (body, check) = bytes.split_at(64);
        if blake3::keyed_hash(&self.record_key, body).as_bytes()[..8] != *check {
            return None;
        }
        let entry = Entry {
            hash: ChunkHash(body[8..40].try_into().ok()?),
            content: body[40..56].try_into().ok()?,
            chunk: word(&body[56..]) as u32,
        };
        let tag = (word(&body[56..]) >> 32) as u32;
        (entry.chunk != VACANT).then_some((word(body), tag, entry))
    }

    fn windows(&self, scope: &SegmentScope, chunk_size: usize) -> Windows {
        let mut keys = blake3::Hasher::new_keyed(&self.scope_key)
            .update(&scope.0)
            .update(&(chunk_size as u64).to_le_bytes())
            .finalize_xof();
        let [mut content_key, mut mix] = [[0; 32]; 2];
        keys.fill(&mut content_key);
        keys.fill(&mut mix);
        let mut powers = [1; TERMS + 1];
        for at in 0..TERMS {
            powers[at + 1] = product(powers[at], self.base);
        }
        let (mut leaving, mut square, mut rest) = (1, self.base, chunk_size);
        while rest > 0 {
            if rest % 2 == 1 {
                leaving = product(leaving, square);
            }
            square = product(square, square);
            rest /= 2;
        }
        Windows {
            size: chunk_size,
            powers,
            leaving: PRIME - leaving,
            content_key,
            mix: [word(&mix), word(&mix[8..]) | 1],
        }
    }
}

/// Windows of one scope and chunk size.
struct Windows {
    size: usize,
    /// Powers of the base, from 0 on.
    powers: [u64; TERMS + 1],
    /// Factor of the token that leaves a window.
    leaving: u64,
    content_key: [u8; 32],
    mix: [u64; 2],
}

impl Windows {
    /// Rolling hash of whole tokens.
    fn hash(&self, tokens: &[u32]) -> u64 {
        let (groups, rest) = tokens.as_chunks::<TERMS>();
        let whole = groups.iter().fold(0, |hash, group| {
            let terms = group.iter().zip(self.powers[..TERMS].iter().rev());
            let terms = terms.map(|(token, power)| u128::from(*token) * u128::from(*power));
            reduce(terms.sum::<u128>() + u128::from(hash) * u128::from(self.powers[TERMS]))
        });
        let step = |hash, token: &u32| {
            reduce(u128::from(hash) * u128::from(self.powers[1]) + u128::from(*token))
        };
        rest.iter().fold(whole, step)
    }

    /// Fingerprint of a window with this rolling hash.
    fn fingerprint(&self, hash: u64) -> u64 {
        let product = u128::from(hash ^ self.mix[0]) * u128::from(self.mix[1]);
        product as u64 ^ (product >> 64) as u64
    }

    /// Fingerprints of all windows of these tokens.
    fn roll(&self, tokens: &[u32], fingerprints: &mut Vec<u64>) {
        let steps = tokens.len() - self.size;
        fingerprints.clear();
        fingerprints.resize(steps + 1, 0);
        // Two halves at once, since each hash waits for the one before.
        let half = steps / 2;
        let middle = steps - half;
        let [mut hash, mut other] =
            [0, middle].map(|start| self.hash(&tokens[start..start + self.size]));
        fingerprints[0] = self.fingerprint(hash);
        fingerprints[middle] = self.fingerprint(other);
        let (first, second) = fingerprints.split_at_mut(middle + 1);
        let rolls = |start: usize| tokens[start..].iter().zip(&tokens[start + self.size..]);
        let places = first[1..=half].iter_mut().zip(second);
        for ((to, to_other), (roll, other_roll)) in places.zip(rolls(0).zip(rolls(middle))) {
            hash = self.rolled(hash, roll);
            other = self.rolled(other, other_roll);
            *to = self.fingerprint(hash);
            *to_other = self.fingerprint(other);
        }
    }

    /// Hash of the next window.
    fn rolled(&self, hash: u64, (leaving, entering): (&u32, &u32)) -> u64 {
        reduce(
            u128::from(hash) * u128::from(self.powers[1])
                + u128::from(*leaving) * u128::from(self.leaving)
                + u128::from(*entering),
        )
    }

    /// The first 128 bits of a keyed BLAKE3 of the tokens: of the low 16 bits of each, the next 8, and the last 8 unless all are
    /// 0. All 4 bytes of each would take a third longer.
    fn content(&self, tokens: &[u32]) -> Content {
        let all = tokens.iter().fold(0, |all, token| all | token);
        let width = if all >> 24 == 0 { 3 } else { 4 };
        let mut hasher = blake3::Hasher::new_keyed(&self.content_key);
        // Pieces on the stack: many small updates would cost more than the hash.
        let mut bytes = [0; 1024];
        for piece in tokens.chunks(bytes.len() / 4) {
            let (low, high) = bytes.split_at_mut(piece.len() * 2);
            for (to, token) in low.as_chunks_mut().0.iter_mut().zip(piece) {
                *to = (*token as u16).to_le_bytes();
            }
            for (part, shift) in high.chunks_exact_mut(piece.len()).zip([16, 24]) {
                for (to, token) in part.iter_mut().zip(piece) {
                    *to = (token >> shift) as u8;
                }
            }
            hasher.update(&bytes[..piece.len() * width]);
        }
        let mut content = [0; 16];
        content.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        content
    }
}

/// The first eight bytes as a number.
fn word(bytes: &[u8]) -> u64 {
    bytes
        .first_chunk()
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Remainder modulo [`PRIME`] of a number below 2^124.
fn reduce(number: u128) -> u64 {
    let folded = (number as u64 & PRIME) + (number >> 61) as u64;
    let folded = (folded & PRIME) + (folded >> 61);
    folded - if folded >= PRIME { PRIME } else { 0 }
}

fn product(a: u64, b: u64) -> u64 {
    reduce(u128::from(a) * u128::from(b))
}

fn tag(fingerprint: u64) -> u32 {
    (fingerprint >> 32) as u32
}

/// Ring of entries and the table by which they are found.
struct Index {
    capacity: usize,
    entries: Vec<Entry>,
    tags: Vec<u32>,
    /// Sequence number of the next segment. Its entry is the remainder by the capacity.
    next: u64,
    /// Entries that hold a segment.
    live: usize,
    /// Zero, or bits of a fingerprint and, below them, the entry's number plus one.
    slots: Vec<u32>,
    /// Bits of the entry's number in a slot.
    number_bits: u32,
    /// For each slot, which of eight parts of its tags the table holds.
    filter: Vec<u8>,
    /// A bit per entry that differs from its record in the file.
    changed: Vec<u64>,
}

impl Index {
    fn new(capacity: usize) -> Self {
        let slots = capacity * 25 / 16 + 1;
        Self {
            capacity,
            entries: Vec::with_capacity(capacity),
            tags: Vec::with_capacity(capacity),
            next: 0,
            live: 0,
            slots: vec![0; slots],
            number_bits: (capacity + 1).next_power_of_two() as u32 - 1,
            filter: vec![0; slots],
            changed: vec![0; capacity.div_ceil(64)],
        }
    }

    /// First slot for a tag, and the bits of the slots that hold it.
    fn home(&self, tag: u32) -> (usize, u32) {
        let place = u64::from(tag) * self.slots.len() as u64;
        ((place >> 32) as usize, place as u32 & !self.number_bits)
    }

    /// The slot behind one.
    fn after(&self, slot: usize) -> usize {
        if slot + 1 == self.slots.len() {
            0
        } else {
            slot + 1
        }
    }

    /// The number in an occupied slot.
    fn number(&self, slot: u32) -> usize {
        (slot & self.number_bits) as usize - 1
    }

    /// Slots from the home of a tag to the next free one.
    fn cluster(&self, home: usize) -> impl Iterator<Item = (usize, u32)> {
        let all = self.slots[home..].iter().chain(&self.slots[..home]);
        let places = (home..self.slots.len()).chain(0..home);
        places.zip(all.copied()).take_while(|(_, slot)| *slot != 0)
    }

    /// Numbers of the entries with a tag.
    fn numbers(&self, tag: u32) -> impl Iterator<Item = usize> {
        let (home, bits) = self.home(tag);
        self.cluster(home)
            .filter(move |(_, slot)| slot & !self.number_bits == bits)
            .map(|(_, slot)| self.number(slot))
            .filter(move |number| self.tags[*number] == tag)
    }

    /// Byte of the filter and bit in it for a tag. Only tags with one home share them.
    fn filter_bit(&self, tag: u32) -> (usize, u8) {
        let (home, bits) = self.home(tag);
        (home, 1 << (bits >> 29))
    }

    /// Finds the first window with candidates that were not compared yet; the number of windows if there is none.
    fn lookup(
        &self,
        fingerprints: &[u64],
        compared: &Compared,
        candidates: &mut Vec<(u32, Entry)>,
    ) -> usize {
        for (window, fingerprint) in fingerprints.iter().enumerate() {
            let tag = tag(*fingerprint);
            let (byte, bit) = self.filter_bit(tag);
            if self.filter[byte] & bit == 0 {
                continue;
            }
            let entries = self
                .numbers(tag)
                .map(|number| (number as u32, self.entries[number]));
            candidates.extend(
                entries.filter(|(_, entry)| !compared.contains(&(*fingerprint, entry.content))),
            );
            if !candidates.is_empty() {
                return window;
            }
        }
        fingerprints.len()
    }

    fn number_of(&self, tag: u32, entry: &Entry) -> Option<usize> {
        self.numbers(tag)
            .find(|number| self.entries[*number].content == entry.content)
    }

    fn register(&mut self, tag: u32, entry: Entry) {
        if let Some(number) = self.number_of(tag, &entry) {
            self.entries[number] = entry;
            self.mark(number);
        } else {
            let number = (self.next % self.capacity as u64) as usize;
            self.put(number, tag, entry);
            self.mark(number);
            self.next += 1;
        }
    }

    /// Puts a new segment into the place of an entry.
    fn put(&mut self, number: usize, tag: u32, entry: Entry) {
        if number < self.entries.len() {
            self.unlink(number);
        } else {
            let vacant = Entry {
                chunk: VACANT,
                ..entry
            };
            self.entries.resize(number + 1, vacant);
            self.tags.resize(number + 1, 0);
        }
        self.entries[number] = entry;
        self.tags[number] = tag;
        let (home, bits) = self.home(tag);
        let mut slot = home;
        while self.slots[slot] != 0 {
            slot = self.after(slot);
        }
        self.slots[slot] = bits | (number as u32 + 1);
        let (byte, bit) = self.filter_bit(tag);
        self.filter[byte] |= bit;
        self.live += 1;
    }

    /// Makes an entry vacant.
    fn unlink(&mut self, number: usize) {
        if self.entries[number].chunk == VACANT {
            return;
        }
        self.entries[number].chunk = VACANT;
        self.live -= 1;
        let (home, bit) = self.filter_bit(self.tags[number]);
        let (mut hole, mut is_shared) = (home, false);
        for (slot, content) in self.cluster(home) {
            let other = self.number(content);
            hole = if other == number { slot } else { hole };
            // A slot tells the bit, and only the entry's tag its home.
            let has_bit = other != number && 1 << (content >> 29) == bit;
            is_shared |= has_bit && self.home(self.tags[other]).0 == home;
        }
        if !is_shared {
            self.filter[home] &= !bit;
        }
        let len = self.slots.len();
        let distance = |from: usize, to: usize| {
            if to >= from {
                to - from
            } else {
                to + len - from
            }
        };
        let mut at = self.after(hole);
        while self.slots[at] != 0 {
            let tag = self.tags[self.number(self.slots[at])];
            if distance(self.home(tag).0, at) >= distance(hole, at) {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.slots[hole] = 0;
    }

    fn mark(&mut self, number: usize) {
        self.changed[number / 64] |= 1 << (number % 64);
    }

    fn take_changes(&mut self, max: usize) -> Vec<(usize, u64, u32, Entry)> {
        let mut changes = Vec::new();
        let capacity = self.capacity as u64;
        for (word, base) in self.changed.iter_mut().zip((0..).step_by(64)) {
            while *word != 0 && changes.len() < max {
                let number = base + word.trailing_zeros() as usize;
                *word &= *word - 1;
                // The last sequence number so far that leaves this remainder.
                let age = (self.next + capacity - 1 - number as u64) % capacity;
                let sequence = self.next.saturating_sub(age + 1);
                changes.push((number, sequence, self.tags[number], self.entries[number]));
            }
        }
        changes
    }

    fn restore(&mut self, place: usize, sequence: u64, tag: u32, entry: Entry) -> bool {
        let capacity = self.capacity as u64;
        let is_old = sequence.saturating_add(capacity) < self.next;
        if is_old || sequence >> 62 != 0 || self.number_of(tag, &entry).is_some() {
            return false;
        }
        let number = (sequence % capacity) as usize;
        let is_taken = |entry: &Entry| entry.chunk != VACANT;
        if sequence < self.next && self.entries.get(number).is_some_and(is_taken) {
            return false;
        }
        self.put(number, tag, entry);
        if number != place {
            self.mark(number);
        }
        self.next = self.next.max(sequence + 1);
        true
    }
}
