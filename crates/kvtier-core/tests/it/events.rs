//! The log of events: whatever a client reads from it, and from where on, it ends with what is announced and resident.

use crate::cache_support::{FirstFit, NOW, hash, hashes, namespace, request};
use kvtier_core::cache::{Cache, CacheConfig, ChunkTokens, Events};
use kvtier_core::{ChunkHash, GroupRow};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The model of [`namespace`].
const MODEL: &str = "some/model";

const CHUNKS: u32 = 12;

/// Rows of the model: two that a prompt needs from its start, one that needs its end.
const GROUPS: [Option<u32>; 3] = [None, None, Some(2)];

fn rows(salt: &str) -> Arc<[GroupRow]> {
    let row = |(group, window): (usize, &Option<u32>)| GroupRow {
        namespace: Arc::clone(namespace(group as u32, salt)),
        window: *window,
        object_bytes: 1,
    };
    GROUPS.iter().enumerate().map(row).collect()
}

/// Four tokens of each chunk, all different.
fn tokens(chunks: std::ops::Range<u32>) -> ChunkTokens {
    ChunkTokens {
        parent: chunks.start.checked_sub(1).map(hash),
        tokens: chunks
            .flat_map(|chunk| (0..4).map(move |at| 4 * chunk + at))
            .collect(),
    }
}

fn cache(event_log_size: usize, capacity: u64) -> Cache<FirstFit> {
    let config = CacheConfig {
        event_log_size,
        check_invariants_every: 1,
        ..CacheConfig::default()
    };
    Cache::new(FirstFit::new(capacity, 1), config)
}

/// Stores these chunks of one row.
fn store(cache: &Cache<FirstFit>, group: u32, salt: &str, chunks: std::ops::Range<u32>) {
    let hashes = hashes(chunks);
    let reserved = cache.reserve(NOW, &request(namespace(group, salt), &hashes, 1));
    reserved.unwrap().reservation.commit(NOW);
}

/// A client as LMCache's: it forgets all it knows when events are lost.
#[derive(Debug, Default)]
struct Client {
    cursor: u64,
    /// Events up to here are unknown to it.
    floor: u64,
    chunks: BTreeSet<ChunkHash>,
}

impl Client {
    /// Reads a batch; returns whether there was anything.
    fn read(&mut self, cache: &Cache<FirstFit>, max: usize) -> bool {
        let Events {
            next_cursor,
            lost,
            events,
        } = cache.events(MODEL, self.cursor, max).unwrap();
        let log = cache.event_log().unwrap();
        let is_ahead = self.cursor >= log.next_seq;
        self.cursor = next_cursor;
        if lost {
            self.chunks.clear();
            self.floor = log.next_seq - 1;
            if !is_ahead {
                self.floor -= log.depth as u64;
            }
        }
        assert!(events.len() <= max);
        for event in &events {
            for hash in &event.hashes {
                let is_known = match &event.stored {
                    Some(stored) => {
                        let chunk = u32::from_be_bytes(hash.0[..4].try_into().unwrap());
                        let known = tokens(chunk..chunk + 1);
                        assert_eq!(stored.parent, known.parent);
                        assert_eq!(stored.tokens[..], known.tokens[..]);
                        !self.chunks.insert(*hash)
                    }
                    None => !self.chunks.remove(hash),
                };
                // Nothing is announced twice, and nothing removed that was not announced.
                assert!(!is_known || self.floor > 0 && event.stored.is_none());
            }
        }
        lost || !events.is_empty()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Store(u32, std::ops::Range<u32>, bool),
    Announce(std::ops::Range<u32>),
    Evict(usize),
    Remove(u32, std::ops::Range<u32>),
    Clear(bool),
    Read(usize, usize),
    Restart(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let span = || (0..CHUNKS, 1..5u32).prop_map(|(from, n)| from..CHUNKS.min(from + n));
    prop_oneof![
        8 => (0..3u32, span(), any::<bool>()).prop_map(|(g, s, salted)| Step::Store(g, s, salted)),
        4 => span().prop_map(Step::Announce),
        1 => (1..6usize).prop_map(Step::Evict),
        2 => (0..3u32, span()).prop_map(|(g, s)| Step::Remove(g, s)),
        1 => any::<bool>().prop_map(Step::Clear),
        6 => (0..3usize, 1..5usize).prop_map(|(c, n)| Step::Read(c, n)),
        1 => (0..3usize, 0..40u64).prop_map(|(c, at)| Step::Restart(c, at)),
    ]
}

/// Whether the rows that count have a chunk.
fn is_complete(cache: &Cache<FirstFit>, hash: ChunkHash) -> bool {
    (0..2).all(|group| cache.contains(namespace(group, ""), &[hash]) == [true])
}

proptest! {
    // proves: docs/vllm.md#kv-events
    #[test]
    fn clients_end_with_what_is_announced_and_resident(
        size in 1..40usize,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let cache = cache(size, 30);
        let mut clients: [Client; 3] = Default::default();
        // The announced chunks, with the numbers of their events.
        let mut announced = BTreeMap::new();
        for step in steps {
            match step {
                Step::Store(group, chunks, salted) => {
                    let salt = if salted { "a" } else { "" };
                    store(&cache, group, salt, chunks.clone());
                    cache.announce(&rows("a"), &hashes(chunks.clone()), &tokens(chunks));
                }
                Step::Announce(chunks) => {
                    let mut seq = cache.event_log().unwrap().next_seq;
                    for hash in hashes(chunks.clone()) {
                        if is_complete(&cache, hash) && !announced.contains_key(&hash) {
                            announced.insert(hash, seq);
                            seq += 1;
                        }
                    }
                    cache.announce(&rows(""), &hashes(chunks.clone()), &tokens(chunks));
                    prop_assert_eq!(cache.event_log().unwrap().next_seq, seq);
                }
                Step::Evict(objects) => {
                    cache.evict(NOW, u64::MAX, objects);
                }
                Step::Remove(group, chunks) => {
                    cache.remove(namespace(group, ""), &hashes(chunks), true);
                }
                Step::Clear(force) => {
                    cache.clear(force);
                }
                Step::Read(client, max) => {
                    clients[client].read(&cache, max);
                }
                Step::Restart(client, cursor) => {
                    clients[client] = Client { cursor, floor: cursor, ..Client::default() };
                }
            }
            announced.retain(|hash, _| is_complete(&cache, *hash));
        }
        for client in &mut clients {
            while client.read(&cache, 3) {}
            let known = announced.iter().filter(|(_, seq)| **seq > client.floor);
            let known: BTreeSet<_> = known.map(|(hash, _)| *hash).collect();
            prop_assert_eq!(&client.chunks, &known);
        }
    }
}

#[test]
fn a_removal_of_many_chunks_is_one_event_and_no_reader_misses_a_part_of_it() {
    let cache = cache(100, 100);
    for group in 0..2 {
        store(&cache, group, "", 0..6);
    }
    cache.announce(&rows(""), &hashes(0..6), &tokens(0..6));
    let mut client = Client::default();
    client.read(&cache, 10);
    cache.remove(namespace(0, ""), &hashes(0..2), false);
    client.read(&cache, 10);
    // That event has been read, so the next removals are another one.
    cache.clear(false);
    assert_eq!(cache.event_log().unwrap().next_seq, 6 + 1 + 2);
    client.read(&cache, 10);
    assert!(client.chunks.is_empty());
}

#[test]
fn readers_that_found_nothing_are_woken_by_the_next_event_once() {
    let cache = cache(100, 100);
    let woken = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&woken);
    cache.wake_by_events(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let announce = |chunk: u32| {
        store(&cache, 0, "", chunk..chunk + 1);
        store(&cache, 1, "", chunk..chunk + 1);
        cache.announce(&rows(""), &[hash(chunk)], &tokens(chunk..chunk + 1));
        woken.load(Ordering::Relaxed)
    };
    assert_eq!(announce(0), 0);
    let mut client = Client::default();
    assert!(client.read(&cache, 10));
    assert_eq!(announce(1), 0, "it has not asked again");
    assert!(client.read(&cache, 10));
    assert!(!client.read(&cache, 10));
    assert_eq!(announce(2), 1);
    assert_eq!(announce(3), 1);
}

#[test]
fn without_a_log_there_are_no_events() {
    let cache = cache(0, 100);
    store(&cache, 0, "", 0..1);
    cache.announce(&rows(""), &[hash(0)], &tokens(0..1));
    assert!(cache.events(MODEL, 0, 1).is_none());
    assert_eq!(cache.event_log(), None);
}

#[test]
fn removals_of_any_object_are_logged_from_the_first_reading_on() {
    let cache = cache(0, 3);
    store(&cache, 0, "", 0..3);
    cache.remove(namespace(0, ""), &hashes(0..1), false);
    let first = cache.removals(MODEL, u64::MAX);
    assert_eq!((first.next_cursor, first.events.len()), (0, 0));
    cache.remove(namespace(0, ""), &hashes(1..2), false);
    store(&cache, 1, "", 0..3);
    let read = cache.removals(MODEL, first.next_cursor);
    let removed = read.events.iter().flat_map(|event| &event.hashes);
    assert_eq!(removed.copied().collect::<Vec<_>>(), hashes(1..3));
    assert!(read.events.iter().all(|event| event.stored.is_none()));
    assert!(cache.removals(MODEL, read.next_cursor).events.is_empty());
}

#[test]
fn the_log_is_bounded_by_its_bytes() {
    let cache = cache(1 << 20, 1 << 10);
    let long = vec![7; 4 << 20];
    for chunk in 0..8 {
        store(&cache, 0, "", chunk..chunk + 1);
        store(&cache, 1, "", chunk..chunk + 1);
        let known = ChunkTokens {
            parent: None,
            tokens: long.clone(),
        };
        cache.announce(&rows(""), &[hash(chunk)], &known);
    }
    assert_eq!(cache.event_log().unwrap().depth, 3);
    assert!(cache.stats().bookkeeping_bytes > 3 * (16 << 20));
    // A batch of large events is short.
    let read = cache.events(MODEL, 5, 1024).unwrap();
    assert_eq!((read.events.len(), read.next_cursor), (1, 6));
}
