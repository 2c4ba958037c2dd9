//! Adaptive replacement behind the real cache: what it is for.

use crate::cache_support::*;
use kvtier_core::cache::Cache;
use kvtier_core::eviction::EvictionKind;
use proptest::prelude::*;
use std::ops::Range;

/// Objects that fit; each has one byte.
const CAPACITY: u32 = 100;
/// A prompt that comes back, of this many chunks.
const HOT: Range<u32> = 0..40;

/// Serves a prompt as an engine does: reads the chunks found and stores the rest. Returns the chunks found.
fn serve(cache: &Cache<FirstFit>, prompt: Range<u32>) -> u32 {
    let keys = hashes(prompt);
    let row = row(0, "", None);
    let found = cache.lookup(NOW, &[row.clone()].into(), &keys);
    let hit = found.hit_chunks;
    drop(found);
    assert_eq!(
        store(cache, namespace(0, ""), &keys[hit..], 1),
        keys.len() - hit
    );
    // Written to another tier meanwhile: no use.
    drop(cache.hold(NOW, namespace(0, ""), &keys[hit..]));
    hit as u32
}

/// Prompts that are requested once.
struct Scan(u32);

impl Scan {
    fn pass(&mut self, cache: &Cache<FirstFit>, chunks: u32) {
        for _ in 0..chunks / 10 {
            let first = self.0;
            self.0 += 10;
            assert_eq!(
                serve(cache, first..self.0),
                0,
                "{first} was requested before"
            );
        }
    }
}

/// Serves the hot prompt `warm` times, then ten times behind a scan of `scanned` chunks. Returns the chunks found each time.
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

// proves: docs/compare.md#l1-in-host-memory
#[test]
fn reused_objects_survive_scans_of_any_length() {
    let scanned = 5 * CAPACITY;
    let kept = hits_behind_scans(EvictionKind::Arc, 2, scanned);
    assert_eq!(kept, [HOT.end; 10]);
    let lost = hits_behind_scans(EvictionKind::Lru, 2, scanned);
    assert_eq!(lost, [0; 10]);
}

#[test]
fn objects_evicted_by_scan_return_as_ghost_hits() {
    // Evicted when it is used for the second time, but not for the third.
    let kept = hits_behind_scans(EvictionKind::Arc, 1, CAPACITY);
    assert_eq!((kept[0], &kept[1..]), (0, &[HOT.end; 9][..]));
    let lost = hits_behind_scans(EvictionKind::Lru, 1, CAPACITY);
    assert_eq!(lost, [0; 10]);
}

#[test]
fn hot_prompt_that_cools_down_yields_to_next() {
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

#[derive(Clone, Debug)]
enum Op {
    Serve(Range<u32>),
    /// Leases what is found of a prompt.
    Hold(Range<u32>),
    Release(usize),
    Touch(Range<u32>),
    Remove(Range<u32>, bool),
    Evict(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let prompt = || (0..60u32, 1..12u32).prop_map(|(from, len)| from..from + len);
    prop_oneof![
        8 => prompt().prop_map(Op::Serve),
        2 => prompt().prop_map(Op::Hold),
        3 => (0..9usize).prop_map(Op::Release),
        1 => prompt().prop_map(Op::Touch),
        1 => (prompt(), any::<bool>()).prop_map(|(keys, force)| Op::Remove(keys, force)),
        1 => (1..20usize).prop_map(Op::Evict),
    ]
}

proptest! {
    /// The cache's invariants, checked after every call, hold after any calls, and a store that can be placed is placed.
    #[test]
    fn any_calls_leave_the_cache_sound(ops in prop::collection::vec(op(), 1..60)) {
        let cache = cache_with(30, EvictionKind::Arc);
        let row = row(0, "", None);
        let mut held = Vec::new();
        for op in ops {
            match op {
                Op::Serve(prompt) => {
                    let keys = hashes(prompt);
                    let found = cache.lookup(NOW, &[row.clone()].into(), &keys);
                    store(&cache, &row.namespace, &keys[found.hit_chunks..], 1);
                    drop(found);
                    let present = cache.contains(&row.namespace, &keys);
                    let present = present.iter().filter(|&&is_present| is_present).count();
                    // Held objects may leave too little capacity for the prompt: then nothing else is evictable.
                    let evictable = cache.stats().evictable_objects as usize;
                    prop_assert!(present == keys.len() || evictable <= present);
                }
                Op::Hold(prompt) => {
                    let found = cache.lookup(NOW, &[row.clone()].into(), &hashes(prompt));
                    held.push(found.lease);
                }
                Op::Release(n) => {
                    if n < held.len() {
                        drop(held.swap_remove(n));
                    }
                }
                Op::Touch(prompt) => {
                    cache.touch(NOW, [&row.namespace], &hashes(prompt));
                }
                Op::Remove(prompt, force) => {
                    cache.remove(&row.namespace, &hashes(prompt), force);
                }
                Op::Evict(objects) => {
                    let evictable = cache.stats().evictable_objects as usize;
                    let evicted = cache.evict(NOW, u64::MAX, objects);
                    prop_assert_eq!(evicted.objects, objects.min(evictable));
                }
            }
        }
        drop(held);
        let objects = cache.stats().objects as usize;
        prop_assert_eq!(cache.evict(NOW, u64::MAX, 100).objects, objects);
        prop_assert_eq!(cache.stats().used_bytes, 0);
    }
}
