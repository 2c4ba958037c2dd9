//! A process that is killed between any two words of its ledger.

use std::collections::BTreeSet;
use std::time::Duration;

use kvtier_core::cache::{Cache, Extent, ReadLease, Reservation};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::ledger::LedgerError;
use kvtier_core::random::SplitMix64;

use super::{KEYS, Key, Memory, Shared, objects, open, recorded, restored, space};
use crate::cache_support::{FirstFit, hash, request};

/// Memory that a client has, from one word to another.
struct Grant {
    extents: Vec<Extent>,
    from: usize,
    to: usize,
}

/// A cache whose history is known.
struct Walk {
    words: Shared,
    cache: Cache<FirstFit>,
    now: Duration,
    /// Memory, key, and the words that were written before.
    writes: Vec<(usize, Extent, Key)>,
    grants: Vec<Grant>,
    stores: Vec<(Reservation<FirstFit>, Vec<Key>, Option<usize>)>,
    reads: Vec<(ReadLease<FirstFit>, Option<usize>)>,
    /// Readable objects after each step, and the words by then.
    steps: Vec<(usize, BTreeSet<Key>)>,
}

impl Walk {
    fn new(eviction: EvictionKind) -> Self {
        let words = Shared::default();
        Self {
            cache: recorded(&words, eviction),
            steps: vec![(words.position(), BTreeSet::new())],
            words,
            now: Duration::from_secs(1),
            writes: Vec::new(),
            grants: Vec::new(),
            stores: Vec::new(),
            reads: Vec::new(),
        }
    }

    fn granted(&mut self, extents: Vec<Extent>) -> usize {
        self.grants.push(Grant {
            extents,
            from: self.words.position(),
            to: usize::MAX,
        });
        self.grants.len() - 1
    }

    fn step(&mut self, random: &mut SplitMix64) {
        self.now += Duration::from_secs(random.below(4));
        let salt = random.below(3) as usize;
        let first = random.below(u64::from(KEYS) - 3) as u32;
        let numbers: Vec<_> = (first..=first + random.below(3) as u32).collect();
        let hashes: Vec<_> = numbers.iter().map(|number| hash(*number)).collect();
        match random.below(10) {
            0..=3 => {
                let len = 1 + random.below(7);
                let wanted = request(space(salt), &hashes, len);
                let reservation = self.cache.reserve(self.now, &wanted).unwrap().reservation;
                let keys: Vec<_> = reservation
                    .staged()
                    .iter()
                    .map(|staged| (salt, numbers[staged.position as usize]))
                    .collect();
                let grant = (random.below(2) == 0).then(|| {
                    reservation.grant(self.now);
                    let extents = reservation.extents().collect();
                    self.granted(extents)
                });
                for (extent, key) in reservation.extents().zip(&keys) {
                    self.writes.push((self.words.position(), extent, *key));
                }
                self.stores.push((reservation, keys, grant));
            }
            4..=5 if !self.stores.is_empty() => {
                let at = random.below(self.stores.len() as u64) as usize;
                let (reservation, keys, grant) = self.stores.swap_remove(at);
                // The client has stopped: its commit says so.
                if let Some(grant) = grant {
                    self.grants[grant].to = self.words.position();
                }
                // It writes until then.
                for (extent, key) in reservation.extents().zip(keys) {
                    self.writes.push((self.words.position(), extent, key));
                }
                match random.below(4) {
                    0 => drop(reservation),
                    1 => drop(reservation.commit_leased(self.now)),
                    _ => drop(reservation.commit(self.now)),
                }
            }
            6 => {
                if let Some(lease) = self.cache.lease(self.now, space(salt), &hashes[..1]) {
                    let grant = (random.below(2) == 0).then(|| {
                        lease.grant();
                        self.granted(lease.extents().to_vec())
                    });
                    self.reads.push((lease, grant));
                }
            }
            7 if !self.reads.is_empty() => {
                let at = random.below(self.reads.len() as u64) as usize;
                let (lease, grant) = self.reads.swap_remove(at);
                if let Some(grant) = grant {
                    self.grants[grant].to = self.words.position();
                }
                drop(lease);
            }
            8 => {
                self.cache
                    .remove(space(salt), &hashes, random.below(2) == 0);
            }
            _ => {
                self.cache.evict(self.now, 1 + random.below(20), 8);
            }
        }
        let resident = objects(&self.cache).into_keys().collect();
        self.steps.push((self.words.position(), resident));
    }

    /// Checks what is restored after the first `position` words.
    fn check(&self, position: usize, memory: &Memory, eviction: EvictionKind) {
        let (cache, restored) = restored(memory, eviction);
        assert_eq!(restored.rejected.total(), 0, "nothing is torn");
        let found = objects(&cache);
        for (key, extent) in &found {
            let mut writes = self.writes.iter().rev();
            let last = writes.find(|(at, it, _)| *at <= position && it.overlaps(extent));
            let (at, written, owner) = last.expect("an object without a write");
            assert!(at < &position, "{key:?} is readable before it is written");
            assert_eq!(
                (owner, written),
                (key, extent),
                "bytes of {key:?} after {position} words"
            );
        }
        let next = self.steps.partition_point(|(at, _)| *at < position);
        let after = self.steps.get(next).map(|(_, resident)| resident);
        let before = next.checked_sub(1).map(|at| &self.steps[at].1);
        if let (Some(before), Some(after)) = (before, after) {
            for key in before.intersection(after) {
                // One that was replaced in the same step may be missing between.
                let is_kept = !self.writes.iter().any(|(at, _, owner)| {
                    owner == key && *at >= self.steps[next - 1].0 && *at <= position
                });
                assert!(
                    !is_kept || found.contains_key(key),
                    "{key:?} after {position} words"
                );
            }
            if self.steps[next].0 == position {
                assert_eq!(&found.keys().copied().collect::<BTreeSet<_>>(), after);
            }
        }
        let read = restored.read.extents().iter().copied();
        let kept: Vec<_> = restored.withheld.extents().chain(read).collect();
        for grant in &self.grants {
            if (grant.from..grant.to).contains(&position) {
                for extent in &grant.extents {
                    assert!(
                        kept.contains(extent),
                        "{extent:?} after {position} words: {kept:?}"
                    );
                }
            }
        }
        // All of it can be used, and the parts in use by clients are free once they are done.
        drop(restored);
        cache.evict(Duration::from_secs(2000), u64::MAX, usize::MAX);
        assert_eq!(cache.usage().used_bytes, 0);
        cache.check_invariants().unwrap();
    }
}

/// A process that is killed between any two words: each readable object has its own bytes, each committed one is there,
/// and what clients may be copying is kept from others.
// proves: docs/operate.md#l1-after-a-restart
#[test]
fn kill_at_any_word_restores_what_was_committed() {
    for seed in 0..24 {
        let eviction = [
            EvictionKind::Lru,
            EvictionKind::IsolatedLru,
            EvictionKind::Arc,
        ];
        let eviction = eviction[seed as usize % 3];
        let mut random = SplitMix64::new(seed);
        let mut walk = Walk::new(eviction);
        let start = walk.words.position();
        for _ in 0..60 {
            walk.step(&mut random);
        }
        let whole = walk.words.memory();
        let mut memory = Memory {
            len: whole.len,
            ..Memory::default()
        };
        for (position, (at, word)) in whole.log.iter().enumerate() {
            if position >= start {
                walk.check(position, &memory, eviction);
            }
            memory.write(*at, *word);
        }
        walk.check(whole.log.len(), &memory, eviction);
    }
}

/// Before the header is whole, nothing is believed.
#[test]
fn kill_while_the_header_is_written_leaves_no_ledger() {
    let words = Shared::default();
    drop(recorded(&words, EvictionKind::Lru));
    let whole = words.memory();
    // Over an older ledger, too, whose header was sound.
    for older in [Memory::default(), whole.clone()] {
        let mut memory = Memory {
            len: whole.len,
            ..older
        };
        let (last, others) = whole.log.split_last().unwrap();
        for (at, word) in others {
            memory.write(*at, *word);
            assert_eq!(open(&memory).err(), Some(LedgerError::Absent));
        }
        memory.write(last.0, last.1);
        assert!(open(&memory).is_ok());
    }
}
