//! The stream of KV events of LMCache's clients: what a model can hit, as batches of the protocol.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use kvtier_core::ChunkHash;
use kvtier_core::cache::{ChunkEvent, Events, Rows, counted};
use kvtier_observe::api::KvEvents;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::Subscription;
use kvtier_proto::response::{EventBatch, EventRecord, Response};
use kvtier_store::tiers::{L2, Located};

use super::{Engine, EngineAnswer};

/// Name of the optional feature by which LMCache's clients up to 0.5.6 recognize a server with such a stream.
pub const KV_EVENTS_FEATURE: &str = "kv_event_stream";

/// Chunks of tiers that a subscriber knows at a time. Beyond it any is announced as removed.
const MAX_TIER_CHUNKS: usize = 1 << 18;

/// Lost objects of a tier behind which the next event waits for other work: the thread that reads them serves requests.
const MAX_REMOVALS: usize = 1024;

/// What the stream needs beside the log.
pub struct KvEventSource {
    /// Whether there is a log.
    is_on: bool,
    /// Whether it, or an index of segments, needs tokens.
    needs_tokens: bool,
    /// Start of this process in nanoseconds: the log begins with it.
    incarnation: i64,
    /// Streams that are open.
    pub subscribers: AtomicUsize,
}

impl KvEventSource {
    /// For a log of this size.
    pub fn new(log_size: u32, has_segments: bool) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let nanos = now.unwrap_or_default().as_nanos();
        Self {
            is_on: log_size > 0,
            needs_tokens: log_size > 0 || has_segments,
            incarnation: i64::try_from(nanos).unwrap_or(i64::MAX),
            subscribers: AtomicUsize::new(0),
        }
    }
}

/// What one subscriber knows of the tiers: chunks that L1 lost and a tier had.
pub struct TierChunks {
    model_name: Box<str>,
    /// For each tier.
    cursors: Vec<u64>,
    /// Whether a tier may have lost more already: no wake-up follows.
    is_behind: bool,
    rows: BTreeMap<ChunkHash, Rows>,
    /// News for the next batch, in this order.
    stored: Vec<ChunkHash>,
    removed: Vec<ChunkHash>,
}

impl TierChunks {
    /// For events from now on.
    fn new(l2: &L2, model_name: &str) -> Self {
        let tiers = l2.tiers().iter();
        let cursors = tiers.map(|tier| tier.removals(model_name, u64::MAX).next_cursor);
        Self {
            model_name: model_name.into(),
            cursors: cursors.collect(),
            is_behind: false,
            rows: BTreeMap::new(),
            stored: Vec::new(),
            removed: Vec::new(),
        }
    }

    /// Whether there are news.
    pub fn has_news(&self) -> bool {
        !self.stored.is_empty() || !self.removed.is_empty()
    }

    /// Whether the tiers are to be followed on, after other work.
    pub fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Follows the events of L1 that the subscriber receives, and the tiers for some events. If events of these are lost, all are.
    fn follow(&mut self, l2: &L2, read: &mut Events) {
        self.stored.clear();
        self.removed.clear();
        if read.lost {
            self.rows.clear();
        }
        for event in &read.events {
            for (of_rows, hashes) in runs(event) {
                let found = hashes.iter().zip(in_tiers(l2, of_rows, hashes));
                for (hash, _) in found.filter(|(_, is_found)| *is_found) {
                    self.rows.insert(*hash, Rows::clone(of_rows));
                    self.stored.push(*hash);
                }
            }
        }
        self.is_behind = false;
        for (number, tier) in l2.tiers().iter().enumerate() {
            let mut lost = Vec::new();
            while lost.len() < MAX_REMOVALS {
                // Only after an empty reading the next removal wakes.
                let removals = tier.removals(&self.model_name, self.cursors[number]);
                self.cursors[number] = removals.next_cursor;
                read.lost |= removals.lost;
                let Some(event) = removals.events.first() else {
                    break;
                };
                lost.extend_from_slice(&event.hashes);
            }
            self.is_behind |= lost.len() >= MAX_REMOVALS;
            self.remove(l2, &lost);
        }
        while self.rows.len() > MAX_TIER_CHUNKS {
            let first = self.rows.pop_first();
            self.removed.extend(first.map(|(hash, _)| hash));
        }
        if read.lost {
            self.rows.clear();
            self.stored.clear();
        }
    }

    /// Removes chunks that a tier has lost objects of, unless another tier has these.
    fn remove(&mut self, l2: &L2, lost: &[ChunkHash]) {
        let known = lost.iter().filter_map(|hash| self.rows.get_key_value(hash));
        let known: Vec<_> = known
            .map(|(hash, rows)| (*hash, Rows::clone(rows)))
            .collect();
        for run in known.chunk_by(|(_, one), (_, other)| one == other) {
            let hashes: Vec<_> = run.iter().map(|(hash, _)| *hash).collect();
            let found = hashes.iter().zip(in_tiers(l2, &run[0].1, &hashes));
            for (hash, _) in found.filter(|(_, is_found)| !is_found) {
                // Each of its objects is an event.
                let removed = self.rows.remove_entry(hash);
                self.removed.extend(removed.map(|(hash, _)| hash));
            }
        }
    }

    fn records(&self, seq: i64) -> impl Iterator<Item = EventRecord<'_>> {
        let news = [("stored", &self.stored), ("removed", &self.removed)];
        let news = news.into_iter().filter(|(_, hashes)| !hashes.is_empty());
        news.map(move |(kind, hashes)| EventRecord {
            seq,
            kind: kind.into(),
            medium: Subscription::STORAGE.into(),
            model_name: (&*self.model_name).into(),
            block_hashes: hashes.iter().map(|hash| hash.0[..].into()).collect(),
            parent_block_hash: None,
            token_ids: Cow::from(&[][..]),
        })
    }
}

/// The removed chunks of an event, by equal rows.
fn runs(event: &ChunkEvent) -> impl Iterator<Item = (&Rows, &[ChunkHash])> {
    let mut hashes = &event.hashes[..];
    event.rows.chunk_by(Rows::eq).map(move |rows| {
        let (run, rest) = hashes.split_at(rows.len());
        hashes = rest;
        (&rows[0], run)
    })
}

/// Whether each of these chunks is in the indexes of the tiers, in all rows that its prompt needs.
fn in_tiers(l2: &L2, rows: &Rows, hashes: &[ChunkHash]) -> Vec<bool> {
    let rows: Vec<_> = counted(rows).cloned().collect();
    let in_l1 = vec![vec![false; hashes.len()]; rows.len()];
    let tiers = Located::indexed(l2, &rows, hashes, &in_l1).tiers;
    let is_found = |chunk: usize| tiers.iter().all(|row| row[chunk].is_some());
    (0..hashes.len()).map(is_found).collect()
}

impl Engine {
    /// Whether there is a log of KV events.
    pub fn has_kv_events(&self) -> bool {
        self.context.kv_events.is_on
    }

    /// Whether the tokens of a request's prompt are to be kept: it may make chunks resident, or needs segments.
    pub fn announces(&self, operation: Operation) -> bool {
        let needs_them = match operation {
            Operation::Store | Operation::PrepareStore | Operation::CommitStore => true,
            Operation::Lookup => self.context.l2.is_some(),
            Operation::CbUnifiedLookup | Operation::CbRetrievePreComputed => {
                self.context.blend.is_some()
            }
            _ => false,
        };
        needs_them && self.context.kv_events.needs_tokens
    }

    /// The events of a model behind `cursor`; see [`kvtier_core::cache::Cache::events`].
    pub fn kv_events(&self, model_name: &str, cursor: u64, max: usize) -> Option<Events> {
        self.context.l1.cache.events(model_name, cursor, max)
    }

    /// What a subscriber to events of the tiers begins with; `None` without a log or tiers.
    pub fn tier_chunks(&self, model_name: &str) -> Option<TierChunks> {
        let l2 = self.context.l2.as_ref()?;
        self.has_kv_events()
            .then(|| TierChunks::new(l2, model_name))
    }

    /// Brings what a subscriber knows up to these events of L1. If events of tiers are lost, these say so.
    pub fn follow_tiers(&self, known: &mut TierChunks, read: &mut Events) {
        if let Some(l2) = &self.context.l2 {
            known.follow(l2, read);
        }
    }

    /// Calls `wake` when there is news; see [`kvtier_core::cache::Cache::wake_by_events`].
    pub fn wake_by_kv_events(&self, wake: impl Fn() + Clone + Send + Sync + 'static) {
        for tier in self.context.l2.iter().flat_map(|l2| l2.tiers()) {
            tier.wake_by_removals(wake.clone());
        }
        self.context.l1.cache.wake_by_events(wake);
    }

    /// Notes the number of open streams.
    pub fn set_kv_event_subscribers(&self, number: usize) {
        let subscribers = &self.context.kv_events.subscribers;
        subscribers.store(number, Ordering::Relaxed);
    }

    /// The batch with these events and the news of tiers; without a log it says that there is none.
    pub fn kv_event_batch(
        &self,
        read: Option<&Events>,
        tiers: Option<&TierChunks>,
    ) -> EngineAnswer {
        let seq = read.map_or(0, |read| read.next_cursor as i64);
        let events = read.iter().flat_map(|read| &read.events);
        let of_l1 = events.map(|event| record(event));
        let of_tiers = tiers.into_iter().flat_map(|tiers| tiers.records(seq));
        let batch = EventBatch {
            enabled: read.is_some(),
            incarnation: self.context.kv_events.incarnation,
            next_cursor: seq,
            lost: read.is_some_and(|read| read.lost),
            events: of_l1.chain(of_tiers).collect(),
        };
        EngineAnswer::from(Response::EventBatch(batch))
    }
}

fn record(event: &ChunkEvent) -> EventRecord<'_> {
    let stored = event.stored.as_ref();
    let parent = stored.and_then(|stored| stored.parent.as_ref());
    EventRecord {
        seq: event.seq as i64,
        kind: if stored.is_some() {
            "stored"
        } else {
            "removed"
        }
        .into(),
        medium: Subscription::CPU.into(),
        model_name: (&*event.model_name).into(),
        block_hashes: event.hashes.iter().map(|hash| hash.0[..].into()).collect(),
        parent_block_hash: parent.map(|parent| Cow::from(&parent.0[..])),
        token_ids: stored.map_or(&[][..], |stored| &stored.tokens).into(),
    }
}

impl super::Context {
    /// The state of log and streams. Stores have their tokens with them, so none is unbound, and no bus drops an event.
    pub fn kv_events_status(&self) -> KvEvents {
        let log = self.l1.cache.event_log();
        let state = log.unwrap_or_default();
        KvEvents {
            enabled: log.is_some(),
            incarnation: self.kv_events.incarnation,
            log_depth: state.depth,
            log_capacity: state.capacity,
            next_seq: log.map_or(1, |state| state.next_seq),
            lost_markers: 0,
            unbound_stores: 0,
            subscribers: self.kv_events.subscribers.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvtier_core::GroupRow;
    use kvtier_core::object_key::{KeyScope, ObjectKey};
    use kvtier_l2::{Buffer, ObjectSpec, StoreItem};
    use kvtier_memory::Extent;

    use super::*;
    use crate::testing::engine;

    #[test]
    fn removals_of_a_tier_are_followed_some_at_a_time() {
        const LEN: u64 = 4096;
        let mock = r#"{"type":"mock","max_size_gb":2,"mock_bandwidth_gb":1000}"#;
        let engine = engine(&["--l2-adapter", mock]);
        let l2 = engine.context.l2.as_ref().unwrap();
        let scope = KeyScope::new("model", "", 1, None).unwrap();
        let row = GroupRow {
            namespace: scope.namespace(1, 0, 0),
            window: None,
            object_bytes: LEN,
        };
        let hashes = (0..2 * MAX_REMOVALS as u32 + 1).map(|number| {
            let mut hash = [0; 32];
            hash[..4].copy_from_slice(&number.to_be_bytes());
            ChunkHash(hash)
        });
        let keys: Vec<_> = hashes
            .map(|hash| ObjectKey::of(&row.namespace, hash))
            .collect();
        let items = keys.iter().map(|key| StoreItem {
            object: ObjectSpec {
                key: key.clone(),
                len: LEN,
                layout: row.namespace.layout(),
            },
            from: Buffer::new(
                Arc::clone(&engine.context.l1.arena),
                Extent {
                    offset: 0,
                    len: LEN,
                },
                Arc::new(()),
            ),
        });
        let tier = &l2.tiers()[0];
        let stored = l2.handle().block_on(tier.store(items.collect()));
        assert!(stored.iter().all(Result::is_ok));
        let mut known = engine.tier_chunks("model").unwrap();
        let rows = Rows::from([row]);
        known.rows = keys
            .iter()
            .map(|key| (key.chunk_hash(), Rows::clone(&rows)))
            .collect();
        l2.handle().block_on(tier.delete(keys, false));
        for (removed, is_behind) in [(MAX_REMOVALS, true), (MAX_REMOVALS, true), (1, false)] {
            engine.follow_tiers(&mut known, &mut Events::default());
            assert_eq!(
                (known.removed.len(), known.is_behind()),
                (removed, is_behind)
            );
        }
        assert!(known.rows.is_empty());
    }
}
