//! Chunk hashes of prompts, remembered by the bytes the prompts arrived in.
//!
//! Every request repeats its whole prompt, several times a step, and prompts of one conversation repeat each other.
//! So the memory keeps, per chunk, the raw MessagePack bytes of its token ids beside its hash. A prompt is walked
//! chunk by chunk: what follows a known hash with known bytes has a known hash, and is neither decoded nor hashed.
//! From the first unknown chunk on, the prompt is decoded and hashed plainly and remembered for the next time.
//! The last tokens, too few for a chunk, have no hash; they are decoded every time, to check them.
//!
//! Bytes and the hash before them are always compared whole. What the table is searched by only decides where to
//! look, so a client that fills the memory with prompts, or finds two that collide, causes misses and never a wrong hash.
//!
//! `generations` guards the remembered prompts, `retired` those that are being freed; neither has a lock inside.

mod generations;
#[cfg(test)]
mod tests;

use crate::cache::ChunkTokens;
use crate::hashing::{ChunkHash, ChunkHasher};
use foldhash::quality::RandomState;
use generations::{Arrivals, FoundChunk, GenerationLimits, Generations, RememberedChunk, Table};
use kvtier_common::sync::atomic::{AtomicU64, Ordering::Relaxed};
use kvtier_common::sync::{Mutex, RwLock};
use kvtier_proto::key::{OBJECT_KEY_BYTES, TokenReader};
use kvtier_proto::wire::{self, DecodeError, PACKED_TOKEN_BYTES, PackedToken};
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

/// Entries of a retired generation that an insertion frees for each one it makes. More than one, because entries
/// differ in size and a young generation may fill with fewer than the retired one has.
const RETIRED_PER_ARRIVAL: usize = 8;

/// Chunks that are walked under one read lock. A walk of that many takes well below a millisecond, and only
/// prompts beyond a quarter of a million tokens (at 256 a chunk) lock again.
const CHUNKS_PER_LOCK: usize = 1024;

/// A request's token ids, hashed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Token ids in the request.
    pub token_count: usize,
    /// Tokens per chunk.
    pub chunk_size: NonZeroUsize,
    /// The hashes of all full chunks, in order.
    pub hashes: Vec<ChunkHash>,
    /// The token ids; none unless the reader [keeps](PromptReader::keep_tokens) them.
    pub tokens: Vec<u32>,
    /// Whether a client named the hashes: each is an object of its own, and no prefix of the next one.
    pub is_object_keys: bool,
}

impl Prompt {
    /// The tokens of these chunks, if they were kept.
    pub fn chunk_tokens(&self, chunks: Range<usize>) -> Option<Arc<ChunkTokens>> {
        let size = self.chunk_size.get();
        let tokens = self.tokens.get(chunks.start * size..chunks.end * size);
        let tokens = tokens.filter(|tokens| !tokens.is_empty())?;
        Some(Arc::new(ChunkTokens {
            parent: chunks.start.checked_sub(1).map(|at| self.hashes[at]),
            tokens: tokens.into(),
        }))
    }
}

/// Counters of a [`PromptMemory`] since its start, and its present size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptStats {
    /// Prompts read without an error; the next three count these only.
    pub prompts: u64,
    /// Chunks known by their bytes (hits).
    pub chunks_known: u64,
    /// Chunks decoded and hashed (misses).
    pub chunks_hashed: u64,
    /// Token ids decoded, rests of less than a chunk included.
    pub tokens_decoded: u64,
    /// Chunks remembered now.
    pub entries: usize,
    /// Bytes they take, their places in the tables included.
    pub bytes: usize,
}

/// Reads token ids into chunk hashes and remembers both; shared by all threads.
///
/// Locks: `generations` is read-locked once for the walk (extremely long prompts: for each part of it), and
/// write-locked once when something must be moved into the young generation (again where that one is full), by a
/// bounded number of moves. `retired` is locked without the other.
pub struct PromptMemory {
    hasher: ChunkHasher,
    keys: RandomState,
    limits: GenerationLimits,
    generations: RwLock<Generations>,
    /// The key of the chunk that a prompt started with last time; 0 at first.
    first: AtomicU64,
    /// A retired generation. Freeing it at once would stop one request for milliseconds, so every insertion frees a few
    /// of its entries.
    retired: Mutex<hashbrown::hash_table::IntoIter<RememberedChunk>>,
    prompts: AtomicU64,
    chunks_known: AtomicU64,
    chunks_hashed: AtomicU64,
    tokens_decoded: AtomicU64,
}

impl fmt::Debug for PromptMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PromptMemory")
            .field("hasher", &self.hasher)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// How token ids are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Encoding {
    /// MessagePack ints.
    Ints,
    /// [`PackedToken`].
    Packed,
}

impl Encoding {
    /// Bytes of the first `count` ids of `data`.
    fn length(self, count: usize, data: &[u8]) -> Result<usize, DecodeError> {
        match self {
            Self::Ints => wire::skip_tokens(count, data),
            Self::Packed => Ok(count * PACKED_TOKEN_BYTES),
        }
    }

    /// Appends the first `count` ids of `data`; returns their bytes.
    fn decode(self, count: usize, data: &[u8], ids: &mut Vec<u32>) -> Result<usize, DecodeError> {
        match self {
            Self::Ints => wire::decode_tokens(count, data, ids),
            Self::Packed => {
                let packed = &data.as_chunks().0[..count];
                ids.extend(wire::unpack_tokens(packed));
                Ok(packed.as_flattened().len())
            }
        }
    }
}

/// How a prompt is cut into chunks.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Tokens per chunk.
    size: NonZeroUsize,
    /// How its ids are written.
    encoding: Encoding,
    /// What the entry of a first chunk stands behind. It differs by `size`, and each later entry stands behind the hash of a
    /// chunk of its own size, so no walk finds an entry of another size.
    start: ChunkHash,
}

impl Cut {
    /// What the entry of a chunk behind one with this hash stands behind. It differs by `encoding`, since the same bytes are
    /// other ids in each.
    fn behind(&self, mut hash: ChunkHash) -> ChunkHash {
        if self.encoding == Encoding::Packed {
            hash.0.iter_mut().for_each(|byte| *byte = !*byte);
        }
        hash
    }
}

/// How far a prompt is known.
struct Walk {
    hashes: Vec<ChunkHash>,
    /// Bytes of the known chunks.
    at: usize,
    /// Filled as far as the walk went; its `fresh` entries come from decoding.
    arrivals: Arrivals,
}

impl Walk {
    /// The hash of the last chunk; `none` before the first.
    fn last_hash(&self, none: ChunkHash) -> ChunkHash {
        self.hashes.last().copied().unwrap_or(none)
    }
}

impl PromptMemory {
    /// `budget` is in bytes and bounds all that is remembered, overhead included; 0 remembers nothing.
    ///
    /// A chunk of 256 tokens takes about 1 KiB. Using an entry keeps it: only what was not used while a third of the
    /// budget was filled with newer or newly used entries is forgotten.
    pub fn new(hasher: ChunkHasher, budget: usize) -> Self {
        // One third for each generation and one for what is on its way out.
        let limits = GenerationLimits::new(budget / 3, hasher.chunk_size().get());
        Self {
            hasher,
            keys: RandomState::default(),
            limits,
            generations: RwLock::new(Generations::new(limits)),
            first: AtomicU64::new(0),
            retired: Mutex::new(Table::new().into_iter()),
            prompts: AtomicU64::new(0),
            chunks_known: AtomicU64::new(0),
            chunks_hashed: AtomicU64::new(0),
            tokens_decoded: AtomicU64::new(0),
        }
    }

    /// How this memory hashes.
    pub fn hasher(&self) -> &ChunkHasher {
        &self.hasher
    }

    /// A reader for the token ids of one request.
    pub fn reader(&self) -> PromptReader<'_> {
        PromptReader {
            memory: self,
            cut: Cut {
                size: self.hasher.chunk_size(),
                encoding: Encoding::Ints,
                start: self.hasher.none_hash(),
            },
            keeps_tokens: false,
        }
    }

    /// Counters and size.
    pub fn stats(&self) -> PromptStats {
        let size = self.generations.read().size();
        PromptStats {
            prompts: self.prompts.load(Relaxed),
            chunks_known: self.chunks_known.load(Relaxed),
            chunks_hashed: self.chunks_hashed.load(Relaxed),
            tokens_decoded: self.tokens_decoded.load(Relaxed),
            entries: size.entries,
            bytes: size.with_table(),
        }
    }

    fn read(&self, cut: &Cut, count: usize, data: &[u8]) -> Result<(Prompt, usize), DecodeError> {
        let mut walk = self.walk(cut, count, data)?;
        let known = walk.hashes.len();
        let tokens_known = known * cut.size.get();
        if self
            .decode(cut, count - tokens_known, data, &mut walk)
            .is_err()
        {
            // Nothing is remembered. Decoding again names the token by its place in the whole prompt.
            return Err(self.explain(count, data));
        }
        let Walk {
            hashes,
            at,
            arrivals,
        } = walk;
        self.prompts.fetch_add(1, Relaxed);
        self.chunks_known.fetch_add(known as u64, Relaxed);
        self.chunks_hashed
            .fetch_add((hashes.len() - known) as u64, Relaxed);
        self.tokens_decoded
            .fetch_add((count - tokens_known) as u64, Relaxed);
        if arrivals.size.entries > 0 {
            self.admit(arrivals);
        }
        Ok((
            Prompt {
                token_count: count,
                chunk_size: cut.size,
                hashes,
                tokens: Vec::new(),
                is_object_keys: false,
            },
            at,
        ))
    }

    /// Follows the prompt through the memory up to the first unknown chunk.
    fn walk(&self, cut: &Cut, count: usize, data: &[u8]) -> Result<Walk, DecodeError> {
        // A token id takes at least one byte, whatever `count` claims.
        let chunks = count.min(data.len()) / cut.size.get();
        let mut hashes = Vec::new();
        wire::reserve(&mut hashes, chunks)?;
        let mut walk = Walk {
            hashes,
            at: 0,
            arrivals: Arrivals::default(),
        };
        let mut next = self.first.load(Relaxed);
        while walk.hashes.len() < chunks {
            let end = chunks.min(walk.hashes.len() + CHUNKS_PER_LOCK);
            match self.walk_some(cut, &mut walk, end, next, data) {
                Some(hint) => next = hint,
                None => break,
            }
        }
        Ok(walk)
    }

    /// Goes on to the chunk `end` under one lock. `next` is where the next chunk may be found; returns the same for the
    /// chunk `end`, or nothing when a chunk before it is unknown.
    fn walk_some(
        &self,
        cut: &Cut,
        walk: &mut Walk,
        end: usize,
        next: u64,
        data: &[u8],
    ) -> Option<u64> {
        let generations = self.generations.read();
        let resumed = AtomicU64::new(next);
        let mut hint = if walk.hashes.is_empty() {
            &self.first
        } else {
            &resumed
        };
        let mut behind = cut.behind(walk.last_hash(cut.start));
        while walk.hashes.len() < end {
            let found = self.find(cut, &generations, hint, &behind, &data[walk.at..])?;
            walk.arrivals.use_entry(&found);
            walk.hashes.push(found.hash);
            walk.at += found.length;
            behind = cut.behind(found.hash);
            hint = found.entry.next();
        }
        Some(hint.load(Relaxed))
    }

    /// The chunk at the start of `data`, if it is known behind `behind`.
    fn find<'a>(
        &self,
        cut: &Cut,
        generations: &'a Generations,
        hint: &AtomicU64,
        behind: &ChunkHash,
        data: &[u8],
    ) -> Option<FoundChunk<'a>> {
        let hinted = generations.find(hint.load(Relaxed), behind, data);
        if hinted.is_some() {
            return hinted;
        }
        // Another prompt came this way last time, or none.
        let length = cut.encoding.length(cut.size.get(), data).ok()?;
        let key = self.search_key(behind, &data[..length]);
        let found = generations.find(key, behind, data)?;
        hint.store(key, Relaxed);
        Some(found)
    }

    /// The search key of the chunk with these raw bytes behind this hash.
    fn search_key(&self, previous: &ChunkHash, raw: &[u8]) -> u64 {
        let mut hasher = self.keys.build_hasher();
        hasher.write(&previous.0);
        hasher.write(raw);
        hasher.finish()
    }

    /// Decodes and hashes the `count` tokens behind the known chunks and makes entries of them.
    fn decode(
        &self,
        cut: &Cut,
        mut count: usize,
        data: &[u8],
        walk: &mut Walk,
    ) -> Result<(), DecodeError> {
        let chunk_size = cut.size.get();
        let mut previous = walk.last_hash(self.hasher.none_hash());
        let mut behind = cut.behind(walk.last_hash(cut.start));
        let mut tokens = Vec::new();
        let mut remembering = true;
        while count > 0 {
            let data = &data[walk.at..];
            tokens.clear();
            let length = cut
                .encoding
                .decode(count.min(chunk_size), data, &mut tokens)?;
            walk.at += length;
            count -= tokens.len();
            if tokens.len() < chunk_size {
                break;
            }
            let hash = self.hasher.hash_chunk(&previous, &tokens);
            if remembering {
                let raw = &data[..length];
                let entry =
                    RememberedChunk::new(self.search_key(&behind, raw), &behind, &hash, raw);
                // Of a prompt too long, the start is kept: that is what others may share.
                remembering = walk.arrivals.push(entry, &self.limits);
            }
            walk.hashes.push(hash);
            (previous, behind) = (hash, cut.behind(hash));
        }
        Ok(())
    }

    fn explain(&self, count: usize, data: &[u8]) -> DecodeError {
        match wire::decode_tokens(count, data, &mut Vec::new()) {
            Err(error) => error,
            Ok(_) => DecodeError::new("the token ids decode in one piece but not by chunks"),
        }
    }

    /// Moves what a walk used or made into the young generation.
    fn admit(&self, mut arrivals: Arrivals) {
        if let (None, Some(entry)) = (arrivals.last, arrivals.fresh.first()) {
            self.first.store(entry.key(), Relaxed);
        }
        let mut spare = None;
        let retired = loop {
            let mut generations = self.generations.write();
            if !generations.must_turn(arrivals.size) {
                generations.admit(&mut arrivals, None);
                break None;
            }
            if let Some(table) = spare.take() {
                let mut retired = generations.turn(table);
                generations.admit(&mut arrivals, Some(&mut retired));
                break Some(retired);
            }
            // Tables are made, and what was retired before is freed, without the lock.
            drop(generations);
            *self.retired.lock() = Table::new().into_iter();
            spare = Some(self.limits.table());
        };
        if let Some(retired) = retired {
            *self.retired.lock() = retired.into_entries();
        } else if let Some(mut retired) = self.retired.try_lock() {
            retired
                .by_ref()
                .take(RETIRED_PER_ARRIVAL * arrivals.size.entries)
                .for_each(drop);
        }
    }
}

/// Reads the token ids of one request by way of a [`PromptMemory`].
///
/// Its result is that of decoding all token ids and hashing them, always.
#[derive(Debug)]
pub struct PromptReader<'m> {
    memory: &'m PromptMemory,
    cut: Cut,
    keeps_tokens: bool,
}

impl PromptReader<'_> {
    /// Keeps the token ids in the prompts from here on, which decodes them.
    pub fn keep_tokens(&mut self) {
        self.keeps_tokens = true;
    }
}

impl TokenReader for PromptReader<'_> {
    type Output = Prompt;

    fn set_chunk_tokens(&mut self, tokens: u32) {
        let hasher = &self.memory.hasher;
        let size = usize::try_from(tokens).ok().and_then(NonZeroUsize::new);
        let size = size.unwrap_or(hasher.chunk_size());
        let start = match size == hasher.chunk_size() {
            true => hasher.none_hash(),
            // No chunk hash is made like this.
            false => {
                let mut start = blake3::Hasher::new_derive_key("kvtier prompt memory, first chunk");
                start.update(hasher.none_hash().as_bytes());
                start.update(&(size.get() as u64).to_le_bytes());
                ChunkHash(start.finalize().into())
            }
        };
        (self.cut.size, self.cut.start) = (size, start);
    }

    fn read(&mut self, count: usize, data: &[u8]) -> Result<(Prompt, usize), DecodeError> {
        let (mut prompt, length) = self.memory.read(&self.cut, count, data)?;
        if self.keeps_tokens {
            wire::decode_tokens(count, data, &mut prompt.tokens)?;
        }
        Ok((prompt, length))
    }

    fn read_packed(&mut self, tokens: &[PackedToken]) -> Result<Prompt, DecodeError> {
        let cut = Cut {
            encoding: Encoding::Packed,
            ..self.cut
        };
        let (mut prompt, _) = self
            .memory
            .read(&cut, tokens.len(), tokens.as_flattened())?;
        if self.keeps_tokens {
            prompt.tokens.extend(wire::unpack_tokens(tokens));
        }
        Ok(prompt)
    }

    fn read_object_keys(&mut self, keys: &[[u8; OBJECT_KEY_BYTES]]) -> Result<Prompt, DecodeError> {
        let mut hashes = Vec::new();
        wire::reserve(&mut hashes, keys.len())?;
        hashes.extend(keys.iter().map(|key| ChunkHash(*key)));
        Ok(Prompt {
            token_count: keys.len().saturating_mul(self.cut.size.get()),
            chunk_size: self.cut.size,
            hashes,
            tokens: Vec::new(),
            is_object_keys: true,
        })
    }
}
