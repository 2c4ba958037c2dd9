//! Events: the log of chunks that became hits of their model, and of those that ended as such.
//!
//! A chunk is announced once, when it is resident in all rows that its prompt needs: those of full attention, or all if there are none of
//! these. The rows with a window need only the last chunks of a prompt, so their objects neither complete nor end a chunk. The first of its
//! objects that is evicted or removed ends it, once. Tokens come with the request that completes a chunk; nothing else knows them, so what
//! a cache has of an earlier process is announced when it is stored again. Chunks with a salt are never announced: an event has no place for it,
//! and a router would send prompts to hits that they cannot have.
//!
//! The log is a ring, bounded by events and by bytes. A reader learns that it has missed events, not which.
//!
//! The index of a tier may have a log too, of removals alone: each object that it loses is one, whatever chunk it was of.

use crate::group_row::GroupRow;
use crate::hashing::ChunkHash;
use crate::object_key::Namespace;
use foldhash::quality::RandomState;
use hashbrown::HashMap;
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of the ring, at most. As many events as LMCache has by default, of chunks of 256 tokens, take half of it.
const MAX_BYTES: usize = 64 << 20;

/// Bytes of an event beside its hashes and tokens.
const EVENT_BYTES: usize = size_of::<ChunkEvent>() + 2 * size_of::<usize>();

/// Bytes of an announced chunk beside the ring.
const ANNOUNCED_BYTES: usize = size_of::<(ChunkHash, Vec<Rows>)>() + 2 * size_of::<Rows>();

/// Events that a log of removals has, at most.
const MAX_REMOVALS: usize = 4096;

/// Hashes of one event, at most.
const MAX_HASHES: usize = 1024;

/// Events that are examined under one hold of the lock.
const SLICE: usize = 4096;

/// Tokens after which a batch has no further event.
const BATCH_TOKENS: usize = 1 << 16;

/// Sets of rows that a chunk is known to be complete in, at most: one for each world size and change of layout.
const MAX_ROW_SETS: usize = 8;

/// All rows of a prompt.
pub type Rows = Arc<[GroupRow]>;

/// Tokens of consecutive chunks of a prompt.
#[derive(Clone, Debug, Default)]
pub struct ChunkTokens {
    /// The chunk in front of them.
    pub parent: Option<ChunkHash>,
    /// The tokens.
    pub tokens: Vec<u32>,
}

/// A change of what a model can hit.
#[derive(Debug, PartialEq, Eq)]
pub struct ChunkEvent {
    /// Number of the event, from 1 on.
    pub seq: u64,
    /// The model.
    pub model_name: Arc<str>,
    /// The chunks: one that was stored, or some that were removed.
    pub hashes: Vec<ChunkHash>,
    /// What is known of a stored chunk; `None` for removals.
    pub stored: Option<StoredChunk>,
    /// Rows that each removed chunk was complete in last. Empty for a stored chunk, and in a log of removals alone.
    pub rows: Vec<Rows>,
}

/// A chunk that became a hit.
#[derive(Debug, PartialEq, Eq)]
pub struct StoredChunk {
    /// The chunk in front of it.
    pub parent: Option<ChunkHash>,
    /// The chunk's tokens.
    pub tokens: Box<[u32]>,
}

/// What a reader has of the log.
#[derive(Debug, Default)]
pub struct Events {
    /// Number of the last event that was examined.
    pub next_cursor: u64,
    /// Whether there were events before these that the log has no more, or the log ends before the cursor: what the reader knows is void.
    pub lost: bool,
    /// Events of the model.
    pub events: Vec<Arc<ChunkEvent>>,
}

/// State of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventLogState {
    /// Events that it has.
    pub depth: usize,
    /// Events that it may have.
    pub capacity: usize,
    /// Number of the next event.
    pub next_seq: u64,
}

/// The log.
#[derive(Debug)]
pub(super) struct EventLog {
    ring: VecDeque<Arc<ChunkEvent>>,
    state: EventLogState,
    /// Bytes of the ring.
    bytes: usize,
    /// Whether no reader has seen the last event, so that a removal may join it.
    is_last_unread: bool,
    /// The chunks that are announced, by model, with the sets of rows that each is complete in.
    announced: HashMap<Arc<str>, HashMap<ChunkHash, Vec<Rows>, RandomState>, RandomState>,
    announced_chunks: usize,
    /// Whether each removal of an object is an event, announced or not.
    is_of_objects: bool,
    /// The rows of the last announcement: chunks of one model share them.
    rows: Option<Rows>,
    /// Whether a reader waits for the next event.
    is_awaited: bool,
    /// Whether there is an event that was waited for.
    pub(super) must_wake: bool,
}

/// The rows whose objects make a chunk a hit.
pub fn counted(rows: &[GroupRow]) -> impl Iterator<Item = &GroupRow> {
    let has_full = rows.iter().any(|row| row.window.is_none());
    rows.iter()
        .filter(move |row| row.window.is_none() || !has_full)
}

fn bytes(event: &ChunkEvent) -> usize {
    let tokens = event.stored.as_ref().map_or(0, |it| it.tokens.len());
    EVENT_BYTES
        + event.hashes.capacity() * ChunkHash::LEN
        + event.rows.capacity() * size_of::<Rows>()
        + tokens * size_of::<u32>()
}

impl EventLog {
    /// A log of this many events, at least 1.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            ring: VecDeque::new(),
            state: EventLogState {
                depth: 0,
                capacity,
                next_seq: 1,
            },
            bytes: 0,
            is_last_unread: false,
            announced: HashMap::default(),
            announced_chunks: 0,
            is_of_objects: false,
            rows: None,
            is_awaited: false,
            must_wake: false,
        }
    }

    /// A log of removals alone.
    pub(super) fn of_objects() -> Self {
        Self {
            is_of_objects: true,
            ..Self::new(MAX_REMOVALS)
        }
    }

    pub(super) fn state(&self) -> EventLogState {
        EventLogState {
            depth: self.ring.len(),
            ..self.state
        }
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        self.bytes + self.announced_chunks * ANNOUNCED_BYTES
    }

    /// The announced chunks and the rows that each is complete in.
    pub(super) fn announced(&self) -> impl Iterator<Item = (&ChunkHash, &GroupRow)> {
        let chunks = self.announced.values().flatten();
        chunks.flat_map(|(hash, sets)| {
            let rows = sets.iter().flat_map(|rows| counted(rows));
            rows.map(move |row| (hash, row))
        })
    }

    /// Rows equal to these: those of the last announcement, if they are.
    pub(super) fn shared(&mut self, rows: &Rows) -> Rows {
        if self.rows.as_ref() != Some(rows) {
            self.rows = Some(Arc::clone(rows));
        }
        Arc::clone(self.rows.as_ref().unwrap_or(rows))
    }

    /// Whether a chunk is announced as complete in these rows.
    pub(super) fn knows(&self, hash: &ChunkHash, rows: &Rows) -> bool {
        let chunks = rows
            .first()
            .and_then(|row| self.announced.get(&**row.namespace.model_name()));
        let sets = chunks.and_then(|chunks| chunks.get(hash));
        sets.is_some_and(|sets| sets.len() >= MAX_ROW_SETS || sets.contains(rows))
    }

    /// Notes a chunk that is complete in these rows, and announces it unless it is.
    pub(super) fn stored(&mut self, hash: ChunkHash, rows: &Rows, stored: StoredChunk) {
        let Some(model_name) = rows.first().map(|row| row.namespace.model_name()) else {
            return;
        };
        let chunks = self.announced.entry(Arc::clone(model_name)).or_default();
        let sets = chunks.entry(hash).or_default();
        sets.push(Arc::clone(rows));
        if sets.len() == 1 {
            self.announced_chunks += 1;
            self.append(model_name, hash, Some(stored), None);
        }
    }

    /// Notes that an object is not resident any more.
    pub(super) fn removed(&mut self, namespace: &Namespace, hash: &ChunkHash) {
        let rows = if self.is_of_objects {
            None
        } else {
            let Some(rows) = self.end(namespace, hash) else {
                return;
            };
            Some(rows)
        };
        let model_name = namespace.model_name();
        if self.is_last_unread
            && let Some(last) = self.ring.back_mut().and_then(Arc::get_mut)
            && last.stored.is_none()
            && last.model_name == *model_name
            && last.hashes.len() < MAX_HASHES
        {
            let before = bytes(last);
            last.hashes.push(*hash);
            last.rows.extend(rows);
            self.bytes += bytes(last) - before;
            return;
        }
        self.append(model_name, *hash, None, rows);
    }

    /// Forgets the sets of rows that an object is of. Returns the last one if the chunk has no other.
    fn end(&mut self, namespace: &Namespace, hash: &ChunkHash) -> Option<Rows> {
        let model_name = &**namespace.model_name();
        let chunks = self.announced.get_mut(model_name)?;
        let sets = chunks.get_mut(hash)?;
        let is_of = |rows: &mut Rows| counted(rows).any(|row| *row.namespace == *namespace);
        let ended = sets.extract_if(.., is_of).last()?;
        if !sets.is_empty() {
            return None;
        }
        chunks.remove(hash);
        if chunks.is_empty() {
            self.announced.remove(model_name);
        }
        self.announced_chunks -= 1;
        Some(ended)
    }

    /// Adds the event of a stored chunk, or of a removed one and its rows.
    fn append(
        &mut self,
        model_name: &Arc<str>,
        hash: ChunkHash,
        stored: Option<StoredChunk>,
        rows: Option<Rows>,
    ) {
        let event = ChunkEvent {
            seq: self.state.next_seq,
            model_name: Arc::clone(model_name),
            hashes: vec![hash],
            stored,
            rows: rows.into_iter().collect(),
        };
        self.state.next_seq += 1;
        self.bytes += bytes(&event);
        self.ring.push_back(Arc::new(event));
        while self.ring.len() > self.state.capacity || self.bytes > MAX_BYTES && self.ring.len() > 1
        {
            self.bytes -= self.ring.pop_front().map_or(0, |event| bytes(&event));
        }
        self.is_last_unread = true;
        self.must_wake |= std::mem::take(&mut self.is_awaited);
    }

    /// Reads on, some events. Returns whether there is more to read.
    pub(super) fn read(&mut self, read: &mut Events, model_name: &str, max: usize) -> bool {
        let last = self.state.next_seq - 1;
        let first = self.state.next_seq - self.ring.len() as u64;
        if read.next_cursor < first - 1 || read.next_cursor > last {
            read.lost = true;
            read.events.clear();
            read.next_cursor = read.next_cursor.max(first - 1).min(last);
        }
        let skipped = (read.next_cursor + 1 - first) as usize;
        let mut tokens: usize = read.events.iter().map(|event| weight(event)).sum();
        for event in self.ring.iter().skip(skipped).take(SLICE) {
            read.next_cursor = event.seq;
            if *event.model_name != *model_name {
                continue;
            }
            read.events.push(Arc::clone(event));
            tokens += weight(event);
            if read.events.len() >= max || tokens >= BATCH_TOKENS {
                break;
            }
        }
        let is_full = read.events.len() >= max || tokens >= BATCH_TOKENS;
        if read.next_cursor == last {
            self.is_last_unread = false;
            self.is_awaited |= read.events.is_empty() && !read.lost;
        }
        read.next_cursor < last && !is_full
    }
}

/// What an event counts in a batch, in tokens.
fn weight(event: &ChunkEvent) -> usize {
    let tokens = event.stored.as_ref().map_or(0, |it| it.tokens.len());
    tokens + event.hashes.len() * ChunkHash::LEN / size_of::<u32>()
}

/// The chunks of these tokens, each with the one in front of it.
pub(super) fn chunks(hashes: &[ChunkHash], known: &ChunkTokens) -> Vec<StoredChunk> {
    let size = known.tokens.len() / hashes.len().max(1);
    let parents = std::iter::once(known.parent).chain(hashes.iter().copied().map(Some));
    let chunks = known.tokens.chunks_exact(size.max(1)).zip(parents);
    let chunks = chunks.map(|(tokens, parent)| StoredChunk {
        parent,
        tokens: tokens.into(),
    });
    chunks.collect()
}
