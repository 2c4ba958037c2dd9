//! The index against a naive matcher and a naive ring; hostile records.

use super::*;
use crate::random::SplitMix64;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet as Set};

const SIZE: usize = 4;

fn scope(salt: &str) -> SegmentScope {
    let namespace = Namespace::new("model", 1 << 24, 0, 7, salt).unwrap();
    SegmentScope::new([&namespace], SIZE)
}

fn hash(number: usize) -> ChunkHash {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    ChunkHash(bytes)
}

fn hashes(count: usize) -> Vec<ChunkHash> {
    (0..count).map(hash).collect()
}

fn random_tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut random = SplitMix64::new(seed);
    (0..count).map(|_| random.next() as u32).collect()
}

fn find(segments: &Segments, salt: &str, tokens: &[u32]) -> Vec<SegmentMatch> {
    segments
        .find(&scope(salt), SIZE, tokens, 0, || true)
        .unwrap()
}

/// Hash, old start and start of each match.
type Places = Vec<(ChunkHash, usize, usize)>;

fn places(found: &[SegmentMatch]) -> Places {
    let place = |found: &SegmentMatch| (found.hash, found.old_start, found.start);
    found.iter().map(place).collect()
}

/// Segments of a naive matcher: hash and old start by content.
type Naive = HashMap<Vec<u32>, (ChunkHash, usize)>;

fn naive_find(segments: &Naive, size: usize, tokens: &[u32], from: usize) -> Places {
    let (mut found, mut seen, mut at) = (Vec::new(), Set::new(), from);
    while at + size <= tokens.len() {
        let window = &tokens[at..at + size];
        match segments.get(window) {
            Some(&(hash, old_start)) if seen.insert(window) => {
                found.push((hash, old_start, at));
                at += size;
            }
            _ => at += 1,
        }
    }
    found
}

/// Registers a prompt in both; the hash of a chunk is made of both numbers.
fn register_both(
    segments: &Segments,
    naive: &mut Naive,
    size: usize,
    first: usize,
    tokens: &[u32],
    number: usize,
) {
    let chunks: Vec<_> = tokens.chunks_exact(size).collect();
    let hashes: Vec<_> = (0..chunks.len())
        .map(|chunk| hash(number << 32 | chunk))
        .collect();
    segments.register(&scope("a"), size, first, &hashes, tokens);
    for ((chunk, tokens), hash) in (first..).zip(chunks).zip(hashes) {
        if chunk > 0 {
            naive.insert(tokens.to_vec(), (hash, chunk * size));
        }
    }
}

/// Checks that the table has each segment once, where it is found, and nothing else.
fn check(segments: &Segments) {
    let index = segments.index.read();
    let (mut live, mut filter) = (0, vec![0; index.filter.len()]);
    for (number, entry) in index.entries.iter().enumerate() {
        if entry.chunk != VACANT {
            live += 1;
            let tag = index.tags[number];
            assert_eq!(index.numbers(tag).filter(|n| *n == number).count(), 1);
            let (byte, bit) = index.filter_bit(tag);
            filter[byte] |= bit;
        }
    }
    assert_eq!((index.live, &index.filter), (live, &filter));
    assert_eq!(index.slots.iter().filter(|slot| **slot != 0).count(), live);
}

proptest! {
    #[test]
    fn matches_equal_those_of_a_naive_matcher(
        size in 1_usize..7,
        stored in vec((0_usize..3, vec(0_u32..3, 0..40)), 0..6),
        tokens in vec(0_u32..3, 0..90),
        from in 0_usize..100,
    ) {
        let (segments, mut naive) = (Segments::new([1; 32], 1000), Naive::new());
        for (number, (first, tokens)) in stored.iter().enumerate() {
            register_both(&segments, &mut naive, size, *first, tokens, number);
        }
        check(&segments);
        let found = segments.find(&scope("a"), size, &tokens, from, || true).unwrap();
        prop_assert_eq!(places(&found), naive_find(&naive, size, &tokens, from));
    }

    #[test]
    fn index_equals_a_naive_ring(
        capacity in 1_usize..24,
        steps in vec((0_usize..40, any::<bool>()), 0..200),
    ) {
        let segments = Segments::new([1; 32], capacity);
        let (mut ring, mut next) = (vec![None; capacity], 0);
        for (text, is_stored) in steps {
            // Few tags, so that clusters are long and reach over the end of the table.
            let tag = u32::MAX - (text as u32 % 3) * 7;
            let content = [text as u8; 16];
            let entry = Entry { hash: hash(text), content, chunk: 1 };
            let mut index = segments.index.write();
            if is_stored {
                index.register(tag, entry);
                if !ring.contains(&Some(text)) {
                    ring[next % capacity] = Some(text);
                    next += 1;
                }
            } else if let Some(number) = ring.iter().position(|held| *held == Some(text)) {
                ring[number] = None;
                index.unlink(number);
            }
            drop(index);
            check(&segments);
            let index = segments.index.read();
            for text in 0..40 {
                let tag = u32::MAX - (text as u32 % 3) * 7;
                let entry = Entry { hash: hash(text), content: [text as u8; 16], chunk: 1 };
                let place = ring.iter().position(|held| *held == Some(text));
                prop_assert_eq!(index.number_of(tag, &entry), place);
            }
        }
    }

    #[test]
    fn hostile_records_are_ignored(
        capacity in 0_usize..5,
        records in vec((any::<usize>(), vec(any::<u8>(), 0..80)), 0..8),
        flip in (0_usize..72, 1_u8..),
        sequences in vec((0_usize..6, prop_oneof![0_u64..12, any::<u64>()]), 0..12),
    ) {
        let segments = Segments::new([1; 32], capacity);
        for (place, bytes) in records {
            prop_assert!(!segments.restore(place, &bytes));
        }
        // Records with a right checksum, as an older file or another capacity has them.
        for (text, sequence) in sequences {
            let entry = Entry {
                hash: hash(text),
                content: [text as u8; 16],
                chunk: 1,
            };
            let mut bytes = segments.encode(sequence, text as u32 % 2, &entry);
            segments.restore(text, &bytes);
            check(&segments);
            bytes[flip.0] ^= flip.1;
            prop_assert!(!segments.restore(text, &bytes));
        }
        let tokens = random_tokens(1, 3 * SIZE);
        segments.register(&scope("a"), SIZE, 1, &hashes(3), &tokens);
        check(&segments);
        prop_assert_eq!(find(&segments, "a", &tokens).len(), 3.min(capacity));
    }
}

#[test]
fn long_prompts_match_across_slices() {
    let size = 96;
    let (segments, mut naive) = (Segments::new([1; 32], 1000), Naive::new());
    let stored = random_tokens(1, 40 * size);
    register_both(&segments, &mut naive, size, 0, &stored, 1);
    // Chunks around the ends of slices, one of them behind another match, and a chunk that repeats.
    let mut tokens = random_tokens(2, 5 * SLICE);
    for (chunk, start) in [
        (1, 0),
        (2, SLICE - 50),
        (3, SLICE - 50 + size),
        (4, 2 * SLICE - size),
        (5, 3 * SLICE),
        (4, 3 * SLICE + 500),
        (6, 5 * SLICE - size),
    ] {
        tokens[start..start + size].copy_from_slice(&stored[chunk * size..(chunk + 1) * size]);
    }
    for from in [0, 1, SLICE - 51, SLICE - 49] {
        let found = segments.find(&scope("a"), size, &tokens, from, || true);
        let found = places(&found.unwrap());
        assert_eq!(found, naive_find(&naive, size, &tokens, from));
        assert!(found.len() >= 4);
    }
}

#[test]
fn other_scopes_never_match() {
    let segments = Segments::new([1; 32], 100);
    let tokens = random_tokens(1, 4 * SIZE);
    segments.register(&scope("alice"), SIZE, 1, &hashes(4), &tokens);
    assert_eq!(find(&segments, "alice", &tokens).len(), 4);
    assert_eq!(find(&segments, "bob", &tokens), []);
    // Both have their own hash for the same text, and lose only that.
    segments.register(&scope("bob"), SIZE, 7, &[hash(9)], &tokens);
    let found = find(&segments, "bob", &tokens);
    assert_eq!(places(&found), [(hash(9), 7 * SIZE, 0)]);
    segments.remove(&found[0]);
    assert_eq!(find(&segments, "bob", &tokens), []);
    assert_eq!(find(&segments, "alice", &tokens).len(), 4);
}

#[test]
fn scope_depends_on_every_field() {
    let part = |model: &str, rank, group, layout, salt: &str| {
        Namespace::new(model, rank, group, layout, salt).unwrap()
    };
    let namespaces = [
        part("m", 1, 0, 7, "s"),
        part("ms", 1, 0, 7, ""),
        part("", 1, 0, 7, "ms"),
        part("m", 2, 0, 7, "s"),
        part("m", 1, 1, 7, "s"),
        part("m", 1, 0, 8, "s"),
    ];
    let mut scopes: Set<_> = namespaces
        .iter()
        .map(|namespace| SegmentScope::new([namespace], 16))
        .collect();
    scopes.insert(SegmentScope::new([&namespaces[0]], 32));
    scopes.insert(SegmentScope::new([&namespaces[0], &namespaces[4]], 16));
    scopes.insert(SegmentScope::new([&namespaces[4], &namespaces[0]], 16));
    assert_eq!(scopes.len(), 9);
}

#[test]
fn equal_fingerprints_of_other_tokens_do_not_match() {
    let segments = Segments::new([1; 32], 100);
    let tokens = random_tokens(1, SIZE);
    let windows = segments.windows(&scope("a"), SIZE);
    let tag = tag(windows.fingerprint(windows.hash(&tokens)));
    let crafted = Entry {
        hash: hash(6),
        content: [6; 16],
        chunk: 1,
    };
    segments.index.write().register(tag, crafted);
    assert_eq!(find(&segments, "a", &tokens), []);
    segments.register(&scope("a"), SIZE, 1, &[hash(1)], &tokens);
    check(&segments);
    assert_eq!(places(&find(&segments, "a", &tokens)), [(hash(1), SIZE, 0)]);
}

#[test]
fn contents_differ_in_any_bit_of_a_token() {
    let segments = Segments::new([1; 32], 100);
    let windows = segments.windows(&scope("a"), 300);
    let tokens = random_tokens(1, 300);
    let narrow: Vec<_> = tokens.iter().map(|token| token >> 8).collect();
    for tokens in [tokens, narrow] {
        let mut contents = Set::from([windows.content(&tokens)]);
        for (at, bit) in (0..300).step_by(23).zip((0..32).cycle()) {
            let mut other = tokens.clone();
            other[at] ^= 1 << bit;
            assert!(contents.insert(windows.content(&other)), "{at} {bit}");
        }
    }
}

#[test]
fn oldest_segments_leave_first() {
    let segments = Segments::new([1; 32], 10);
    let tokens = random_tokens(1, 25 * SIZE);
    segments.register(&scope("a"), SIZE, 1, &hashes(25), &tokens);
    let found: Vec<_> = find(&segments, "a", &tokens)
        .iter()
        .map(|found| found.start / SIZE)
        .collect();
    assert_eq!(found, Vec::from_iter(15..25));
    assert_eq!(segments.stats().segments, 10);
}

#[test]
fn all_registered_segments_are_reachable() {
    const COUNT: usize = 100_000;
    let segments = Segments::new([1; 32], COUNT);
    let tokens = random_tokens(1, COUNT * SIZE);
    segments.register(&scope("a"), SIZE, 1, &hashes(COUNT), &tokens);
    check(&segments);
    let shifted: Vec<_> = [5].into_iter().chain(tokens).collect();
    let found = find(&segments, "a", &shifted);
    assert_eq!(found.len(), COUNT);
    for (number, found) in found.iter().enumerate() {
        assert_eq!(found.hash, hash(number));
        assert_eq!(found.old_start, (number + 1) * SIZE);
        assert_eq!(found.start, number * SIZE + 1);
    }
    let stats = segments.stats();
    assert!(
        stats.segments == COUNT && stats.bytes <= 64 * COUNT,
        "{stats:?}"
    );
}

#[test]
fn text_that_repeats_itself_is_one_segment() {
    let segments = Segments::new([1; 32], 100);
    let tokens = vec![3; 20_000];
    for number in 0..1000 {
        let hashes = [hash(number); 10];
        segments.register(&scope("a"), SIZE, 1 + number, &hashes, &tokens[..10 * SIZE]);
    }
    assert_eq!(segments.stats().segments, 1);
    check(&segments);
    // The last chunk of the last registration.
    let expected = [(hash(999), 1009 * SIZE, 0)];
    assert_eq!(places(&find(&segments, "a", &tokens)), expected);
}

#[test]
fn removed_segment_does_not_match() {
    let segments = Segments::new([1; 32], 100);
    let tokens = random_tokens(1, 3 * SIZE);
    segments.register(&scope("a"), SIZE, 1, &hashes(3), &tokens);
    let found = find(&segments, "a", &tokens);
    segments.remove(&found[1]);
    segments.remove(&found[1]);
    check(&segments);
    let left = find(&segments, "a", &tokens);
    assert_eq!(left, [found[0].clone(), found[2].clone()]);
    // The object of an old match is not that of the segment now.
    segments.register(&scope("a"), SIZE, 1, &[hash(8)], &tokens);
    segments.remove(&found[0]);
    assert_eq!(find(&segments, "a", &tokens)[0].hash, hash(8));
    Segments::new([1; 32], 1).remove(&found[2]);
}

#[test]
fn search_ends_when_it_may_not_go_on() {
    let segments = Segments::new([1; 32], 100);
    let tokens = random_tokens(1, 3 * SLICE);
    segments.register(&scope("a"), SIZE, 1, &hashes(8), &tokens);
    let mut asked = 0;
    let mut may_go_on = |limit| {
        asked += 1;
        // Waits forever, or panics, if the index is locked.
        segments.register(&scope("a"), SIZE, 1, &hashes(8), &tokens);
        asked <= limit
    };
    let found = segments.find(&scope("a"), SIZE, &tokens, 0, || may_go_on(1));
    assert_eq!((found, asked), (None, 2));
}

#[test]
fn nothing_is_found_where_there_is_nothing() {
    let tokens = random_tokens(1, 3 * SIZE);
    for (capacity, size) in [(0, SIZE), (9, 0), (9, 3 * SIZE + 1)] {
        let segments = Segments::new([1; 32], capacity);
        segments.register(&scope("a"), size, 1, &hashes(3), &tokens);
        let found = segments.find(&scope("a"), size, &tokens, 0, || true);
        assert_eq!(found, Some(Vec::new()));
        assert_eq!(segments.stats().segments, 0);
        assert!(segments.take_changes(9).is_empty());
    }
    let segments = Segments::new([1; 32], 1);
    segments.register(&scope("a"), SIZE, 1, &hashes(3), &tokens);
    assert_eq!(find(&segments, "a", &tokens).len(), 1);
    assert_eq!(find(&segments, "a", &tokens[..SIZE - 1]), []);
    for from in [tokens.len(), usize::MAX] {
        let found = segments.find(&scope("a"), SIZE, &tokens, from, || true);
        assert_eq!(found, Some(Vec::new()));
    }
}

/// Writes what has changed to a file of records.
fn write(segments: &Segments, file: &mut Vec<[u8; Segments::RECORD_BYTES]>) -> usize {
    // In two steps, since the number per call is bounded.
    let mut changes = segments.take_changes(2);
    assert!(changes.len() <= 2);
    changes.extend(segments.take_changes(usize::MAX));
    for (place, record) in &changes {
        file.resize(file.len().max(place + 1), [0; Segments::RECORD_BYTES]);
        file[*place] = *record;
    }
    changes.len()
}

fn restored(secret: u8, capacity: usize, file: &[[u8; Segments::RECORD_BYTES]]) -> Segments {
    let segments = Segments::new([secret; 32], capacity);
    for (place, record) in file.iter().enumerate() {
        segments.restore(place, record);
    }
    check(&segments);
    segments
}

#[test]
fn restored_index_finds_what_was_written() {
    let (segments, mut file) = (Segments::new([1; 32], 10), Vec::new());
    let tokens = random_tokens(1, 30 * SIZE);
    let store = |segments: &Segments, from: usize, to: usize| {
        let hashes: Vec<_> = (from..to).map(hash).collect();
        segments.register(&scope("a"), SIZE, from, &hashes, &tokens[from * SIZE..]);
    };
    store(&segments, 1, 8);
    assert_eq!(
        (write(&segments, &mut file), write(&segments, &mut file)),
        (7, 0)
    );
    store(&segments, 8, 14);
    segments.remove(&find(&segments, "a", &tokens)[3]);
    // A segment that is registered again.
    segments.register(&scope("a"), SIZE, 20, &[hash(50)], &tokens[6 * SIZE..]);
    let is_left = |segments: &Segments| find(segments, "a", &tokens);
    write(&segments, &mut file);
    let again = restored(1, 10, &file);
    assert_eq!(is_left(&again), is_left(&segments));
    assert_eq!(again.stats(), segments.stats());
    assert_eq!(again.take_changes(99), []);
    assert_eq!(is_left(&restored(2, 10, &file)), []);
    // A torn record is lost alone.
    let place = is_left(&segments)[5].number as usize;
    let mut torn = file.clone();
    torn[place][40..].fill(0);
    let mut expected = is_left(&segments);
    expected.remove(5);
    assert_eq!(is_left(&restored(1, 10, &torn)), expected);
    // The oldest still leave first.
    for segments in [&segments, &again] {
        store(segments, 14, 17);
    }
    assert_eq!(is_left(&again), is_left(&segments));
    assert_eq!(is_left(&again)[0].hash, hash(8));
}

#[test]
fn other_capacities_keep_the_youngest_segments() {
    let (segments, mut file) = (Segments::new([1; 32], 10), Vec::new());
    let tokens = random_tokens(1, 24 * SIZE);
    segments.register(&scope("a"), SIZE, 1, &hashes(24), &tokens);
    // An older one does not take the place of one that was removed.
    segments.remove(&find(&segments, "a", &tokens)[8]);
    write(&segments, &mut file);
    for (capacity, oldest) in [(4, 20), (10, 14), (13, 14)] {
        let other = restored(1, capacity, &file);
        let found = find(&other, "a", &tokens);
        let numbers: Vec<_> = found.iter().map(|found| found.start / SIZE).collect();
        let expected: Vec<_> = (oldest..24).filter(|number| *number != 22).collect();
        assert_eq!(numbers, expected, "capacity {capacity}");
    }
}
