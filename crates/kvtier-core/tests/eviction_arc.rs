//! Adaptive replacement behind the real cache: what it is for.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cache_support;

use cache_support::*;
use kvtier_core::cache::{Cache, LookupRow};
use kvtier_core::eviction::EvictionKind;
use std::ops::Range;

/// Objects that fit; each has one byte.
const CAPACITY: u32 = 100;
/// A prompt that comes back, of this many chunks.
const HOT: Range<u32> = 0..40;

/// What an engine does with a prompt: takes what is found, and stores the rest. Gives the chunks found.
fn serve(cache: &Cache<FirstFit>, prompt: Range<u32>) -> u32 {
    let keys = hashes(prompt);
    let row = LookupRow {
        space: space(0, ""),
        window: None,
    };
    let found = cache.lookup(NOW, &[row], &keys);
    let hit = found.hit_chunks;
    drop(found);
    assert_eq!(
        store(cache, space(0, ""), &keys[hit..], 1),
        keys.len() - hit
    );
    hit as u32
}

/// Prompts that nobody asks for twice.
struct Scan(u32);

impl Scan {
    fn pass(&mut self, cache: &Cache<FirstFit>, chunks: u32) {
        for _ in 0..chunks / 10 {
            let first = self.0;
            self.0 += 10;
            assert_eq!(
                serve(cache, first..self.0),
                0,
                "{first} was asked for before"
            );
        }
    }
}

/// The hot prompt `warm` times, then again and again behind a scan of so many chunks. Gives the chunks found each time.
fn hits_behind_scans(eviction: EvictionKind, warm: u32, scanned: u32) -> Vec<u32> {
    let cache = cache_with(u64::from(CAPACITY), eviction);
    let mut scan = Scan(1000);
    for _ in 0..warm {
        serve(&cache, HOT);
    }
    let rounds = (0..10).map(|_| {
        scan.pass(&cache, scanned);
        serve(&cache, HOT)
    });
    let hits = rounds.collect();
    assert_eq!(cache.stats().objects, u64::from(CAPACITY));
    hits
}

#[test]
fn what_is_used_again_survives_a_scan_of_any_length() {
    let scanned = 5 * CAPACITY;
    let kept = hits_behind_scans(EvictionKind::Arc, 2, scanned);
    assert_eq!(kept, [HOT.end; 10]);
    let lost = hits_behind_scans(EvictionKind::Lru, 2, scanned);
    assert_eq!(lost, [0; 10]);
}

#[test]
fn what_a_scan_pushed_out_is_known_when_it_comes_back() {
    // Gone when it is used for the second time, but not for the third.
    let kept = hits_behind_scans(EvictionKind::Arc, 1, CAPACITY);
    assert_eq!((kept[0], &kept[1..]), (0, &[HOT.end; 9][..]));
    let lost = hits_behind_scans(EvictionKind::Lru, 1, CAPACITY);
    assert_eq!(lost, [0; 10]);
}

#[test]
fn a_hot_prompt_that_cools_down_makes_room_for_the_next() {
    let cache = cache_with(u64::from(CAPACITY), EvictionKind::Arc);
    let mut scan = Scan(10_000);
    for prompt in [0..60, 100..160, 200..260] {
        serve(&cache, prompt.clone());
        serve(&cache, prompt.clone());
        for _ in 0..20 {
            scan.pass(&cache, 50);
            serve(&cache, prompt.clone());
        }
        scan.pass(&cache, 50);
        assert_eq!(serve(&cache, prompt.clone()), 60, "{prompt:?}");
    }
}
